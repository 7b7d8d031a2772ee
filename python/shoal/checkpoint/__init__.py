"""Checkpoints: the rows of a store in a directory. ``docs/checkpoint-format.md`` has the bytes."""
