"""A cluster in memory: many workers and endpoints, an unreliable network, and simulated time.

model.py      an endpoint's rules, slow and simple: the reference of _core.Service
network.py    delays, losses, copies, disorder and reconnections, all from a seed; who runs when
cluster.py    workers as generators, their deaths and returns, maps that change
whole.py      the same with the real membership, which declares silent processes dead
history.py    the history of a run, and its checkers
schedules.py  whole runs from one number
planted.py    bugs that the checkers must find
"""
