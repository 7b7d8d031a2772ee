"""The parts of bench_billion.py: a stream of keys that takes no memory, and measurement of memory and time."""
