"""The processes of a cluster, and what they know of each other.

    address.py      addresses: checked, completed, tried out
    membership.py   the scheduler's truth, without sockets or clocks
    scheduler.py    its process
    link.py         every other process's connection to it

Nothing here is imported by ``import shoal``.
"""
