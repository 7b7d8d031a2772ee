"""The worker: the store of a cluster, its requests and their sockets."""
