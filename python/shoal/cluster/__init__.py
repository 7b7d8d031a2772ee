"""The processes of a cluster.

protocol/     messages, addresses, keys, the environment and the connection to the scheduler, used by all processes
scheduler/    membership of the cluster, jobs, and the assignment of splits
server/       endpoints that serve rows, and the tasks of saves and loads
worker/       ``shoal.connect`` and the store of a worker: remote shards, requests and their connections
launch/       ``shoal.launch``, starting and supervising the processes
"""
