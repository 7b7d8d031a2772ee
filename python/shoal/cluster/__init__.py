"""The processes of a cluster.

api           ``shoal.connect`` and ``shoal.launch``
protocol/     messages, addresses, keys and the connection to the scheduler, used by all processes
scheduler/    membership of the cluster, jobs, and the assignment of splits
server/       endpoints that serve rows, and the tasks of saves and loads
worker/       the store of a worker: remote shards, requests and their connections
launch/       starting and supervising the processes
"""
