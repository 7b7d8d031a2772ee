"""The public tables that bench_public_tables.py reproduces, and FuxiCTR's side of the comparison."""
