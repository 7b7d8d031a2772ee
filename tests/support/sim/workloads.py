"""What workers do in a cluster with replicas: they count in one table, and use the others in all other ways.

    1  counting, which the checkers of history.py judge
    2  rows that are admitted after some occurrences, expire, and are dropped by sweeps; 16 bits with rounding noise. A
       server may have no memory for them
    3  each worker's own rows, which only it pushes, assigns and erases: it knows what it must see
    4  rows of worker 0, which it multiplies by calls to all endpoints
    5  dense: every worker pushes all rows in every clock
    0  is created during a run, and pushed to afterwards

What a worker reads in the tables 3 and 4 must be what it has computed itself; a difference is an entry of
``history.errors``. All results are appended to ``client.answers``: under BSP they are those of an undisturbed run.
"""

import random

import numpy as np

import shoal
from shoal.cluster.protocol.messages import TableRecord
from shoal.errors import ShoalError
from sim.cluster import SUM
from sim.history import amounts
from sim.schedules import KEYS
from table_specs import table_spec

_ADAGRAD = shoal.Adagrad(lr=0.1, eps=1e-8, n0=0.1)
TABLES = {
    1: table_spec(6, SUM.optimizer),
    2: table_spec(
        2,
        _ADAGRAD,
        dtype="bfloat16",
        init=shoal.Uniform(0.5, seed=3),
        seed=11,
        admit=shoal.AfterCount(2, capacity=60),
        expire=(shoal.TimeToLive(3), shoal.MaxRows(40)),
    ),
    3: table_spec(),
    4: table_spec(),
    5: table_spec(3, _ADAGRAD, dtype="float16", init=shoal.Uniform(0.1), seed=5),
}
TIGHT = {
    **TABLES,
    2: table_spec(2, _ADAGRAD, admit=shoal.AfterCount(2)),
}  # a memory budget has no room for all rows of table 2
# Number 0, created during a run.
CREATED = TableRecord.of(table_spec(2, name="created"))
OWN = 12  # keys of a worker in table 3
REDUCED = list(range(16))
DENSE = list(range(20))
NORM, DECAY = 2, 5


class UnexpectedRowsError(ShoalError):
    """A worker has read something else than it has computed."""


class _Wrong:
    """Stands for a call that has failed: the worker ends with the error."""

    def __init__(self, text):
        self.error = UnexpectedRowsError(text)

    def done(self):
        return True


def mixed(seed, clocks, think=0.05, rare=60):
    """A worker that uses all of `TABLES`; it waits for what it has to know, and ticks. Table 2 has `rare` keys."""

    def program(client):
        rng = random.Random(f"{seed} {client.rank} {client.incarnation}")
        workers, rank = client.cluster.workers, client.rank
        bsp = client.cluster.history.mode == "bsp"
        own = [100 + OWN * rank + i for i in range(OWN)]
        rows = {}  # of table 3, by key; None: unknown
        product = None  # of table 4
        later = []
        roomy = client.cluster.tables[2] is not TIGHT[2]
        client.answers, client.refusable = [], []

        def kept(call):
            later.append(call)
            return call

        if not roomy:  # table 2 takes all that the others leave
            yield client.push(range(KEYS), amounts(rank, workers, KEYS, 1))
            yield client.push(own, np.zeros((OWN, 1), np.float32), 3)

        while client.clock < clocks:
            if client.saver is not None:
                alone = {3: rows} if product is None else {3: rows, 4: dict(zip(REDUCED, product, strict=True))}
                yield from client.saver.maybe(later, alone)
            for _ in range(rng.randint(0, 2)):
                keys = rng.sample(range(KEYS), rng.randint(1, 8))
                call = client.pull(keys)
                if rng.random() < 0.7:
                    yield call
                else:
                    later.append(call)
            if rng.random() < 0.5:
                yield rng.expovariate(1.0) * think
            keys = rng.sample(range(KEYS), rng.randint(1, 8))
            kept(client.push(keys, amounts(rank, workers, len(keys), rng.randint(1, 3))))

            keys = [1000 + key for key in rng.sample(range(rare), rng.randint(1, 12))]
            grads = np.array([[rng.randint(-4, 4), rng.randint(-4, 4)] for _ in keys], np.float32)
            begun = [other.clock > 0 for other in client.cluster.clients]
            if roomy or (len(begun) >= workers and all(begun)):
                client.refusable.append(client.try_push(keys, grads, 2, counts=[rng.randint(1, 3) for _ in keys]))
            if rank == 0 and rng.random() < 0.2 and roomy:
                call = client.sweep([], 2)
                later.append(call)
                client.answers.append(("sweep", client.clock, call))

            call, read = client.read(own, 3)  # under BSP, all pushes of the clocks before have been applied now
            yield call
            found = dict(zip(own, read()[:, 0].tolist(), strict=True))
            if rows and found != rows:
                yield _Wrong(f"worker {rank} at clock {client.clock}: its rows are {found}, they must be {rows}")
            rows = found
            erased = rng.sample(own, rng.randint(0, 3)) if roomy and rng.random() < 0.5 else []
            if erased:
                call = client.erase(erased, 3)
                yield call
                client.answers.append(("erase", client.clock, call))
                rows.update(dict.fromkeys(erased, 0.0))
                call = client.contains(own, 3)
                yield call
                client.answers.append(("contains", client.clock, call))
            pushed = rng.sample(own, rng.randint(1, OWN))
            amount = float(rng.randint(1, 4))
            call = kept(client.push(pushed, np.full((len(pushed), 1), -amount, np.float32), 3))
            for key in pushed:
                rows[key] += amount
            if not bsp:
                yield call

            if rank == 0:
                call, read = client.read(REDUCED, 4)
                yield call
                found = read()[:, 0].tolist()
                if product is not None and found != product:
                    yield _Wrong(f"worker 0 at clock {client.clock}: {found} in table 4, it must be {product}")
                product = found
                if rng.random() < 0.5:
                    call = client.reduce(DECAY, [0.5], 4, write=True)
                    yield call
                    product = [0.5 * value for value in product]
                    call = client.reduce(NORM, [2.0], 4, write=False)
                    yield call
                    client.answers.append(("norm", client.clock, call))
                amount = float(rng.randint(1, 4))
                call = kept(client.push(REDUCED, np.full((len(REDUCED), 1), -amount, np.float32), 4))
                product = [float(np.float32(value) + np.float32(amount)) for value in product]
                if not bsp:
                    yield call

            if client.cluster.created is not None:
                client.try_push(DENSE, np.ones((len(DENSE), 2), np.float32), client.cluster.created)

            grads = np.array([[rng.randint(-4, 4) for _ in range(3)] for _ in DENSE], np.float32)
            kept(client.push(DENSE, grads, 5))
            kept(client.tick())
        yield [*later, *client.tasks]

    return program
