"""PyTorch: click models whose embeddings are tables of a store.

    fields.py   from a reader's batches to tensors of fixed fields, dense columns and histories
    models/     click models, which take their sparse parts from a maker

Needs torch, which is an extra; `import shoal` does without.
"""
