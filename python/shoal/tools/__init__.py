"""Tools for whole models and tables: reports, sizing, conversion, compaction, click logs drawn from a known model."""
