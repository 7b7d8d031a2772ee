"""What bench_billion.py works with: a stream of keys that takes no memory, and the watch over memory and time."""
