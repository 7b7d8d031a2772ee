"""What all processes of a cluster share: messages, addresses, keys, the slot map, the scheduler's clients."""
