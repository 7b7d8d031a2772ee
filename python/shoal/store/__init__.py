"""Stores: where tables live."""
