"""Embeddings and a network, trained: batches (draw.py), and the sides that take turns (sides.py)."""
