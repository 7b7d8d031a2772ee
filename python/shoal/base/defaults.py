"""Numbers that commands show or check before they import what uses them."""

BATCH_SIZE = 8192  # examples of a batch: readers, arrays, the command line
CLICK_BATCH_SIZE = 4096  # of click models
MAX_WORKERS = 1 << 14  # of a job; one thread receives the heartbeats of all
