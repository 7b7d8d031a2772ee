"""Tables: rows by 64-bit key, and the batches, futures and locks of their requests."""
