"""Numbers that commands show or check before they import what uses them."""

BATCH_SIZE = 8192  # examples of a batch: readers, arrays, the command line
CLICK_BATCH_SIZE = 4096  # of click models
SLOTS = frozenset(1 << bits for bits in range(1, 15))  # that a store, a checkpoint and an export may have
MAX_WORKERS = 1 << 14  # of a job; one thread receives the heartbeats of all
