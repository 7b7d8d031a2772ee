"""Training of embeddings and a network: batches (draw.py), and the sides that take turns (sides.py)."""
