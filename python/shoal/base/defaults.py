"""Defaults that commands show in their help, before they import what uses them."""

__all__ = ["BATCH_SIZE"]

BATCH_SIZE = 8192  # examples of a batch: readers, arrays, the command line
