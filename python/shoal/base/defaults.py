"""Defaults that commands show in their help, before they import what uses them."""

BATCH_SIZE = 8192  # examples of a batch: readers, arrays, the command line
CLICK_BATCH_SIZE = 4096  # of click models
