"""What all processes of a cluster share: messages, addresses, keys, the environment, the slot map, the connections."""
