"""A cluster in memory: many workers and endpoints, a network that misbehaves, and a clock that is only a number.

model.py      an endpoint's rules, slow and obvious: the twin of _core.Service
network.py    delays, losses, copies, disorder and reconnections, all from a seed; who runs when
cluster.py    workers as generators, their deaths and returns, maps that change
whole.py      the same with the real membership: who is dead is found out by silence
history.py    what happened, and the checkers of what may happen
schedules.py  whole runs from one number
planted.py    bugs that the checkers must find
"""
