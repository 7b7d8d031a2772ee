"""A cluster in memory: many workers and endpoints, an unreliable network, and simulated time.

model.py      an endpoint's rules, slow and simple: the reference of _core.Endpoint
network.py    delays, losses, copies, disorder and reconnections, all from a seed; who runs when
cluster.py    workers as generators, their deaths and returns, maps that change
whole.py      the same with the real membership, which declares silent processes dead
replicated.py the same with copies of all slots, streams, the journal of the scheduler, and joining servers
pings.py      pings of the scheduler, and which servers are silent
fibers.py     functions that block, in simulated time
saves.py      saves by the real code of workers and servers, and what must hold of them
invariants.py what must hold in it at every moment
workloads.py  what its workers do
scenarios.py  what happens to it
sweep.py      many runs of these, in several processes
history.py    the history of a run, and its checkers
schedules.py  whole runs from one number
cached.py     workers with a cache of rows
jobs.py       two jobs at the same time
planted*.py   bugs that the checkers must find
"""
