"""What bench_client.py is made of: the peers that move the same bytes, and its figures."""
