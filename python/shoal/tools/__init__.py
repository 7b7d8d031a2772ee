"""Tools for whole models and tables: reports, sizing, conversion, compaction, the demonstration."""
