"""Helpers without dependencies: the machine, signals, prefetching, plural forms, tables for notebooks, defaults."""
