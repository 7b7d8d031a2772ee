"""Whole runs from one number: workload, weather, deaths, returns and moves."""

import random
from dataclasses import dataclass

from shoal._core import ClientDefect
from shoal.cluster.worker.filters import Filters
from sim import model
from sim.cached import CachePlan
from sim.cluster import Cluster
from sim.history import CHECKERS, amounts
from sim.network import CALM, ROUGH, Weather

__all__ = ["KEYS", "Plan", "counting", "run", "violations"]

KEYS = 24
MANY_KEYS = 64  # for lists that are worth a digest


def counting(seed, clocks, think=0.005, lists=None):
    """A worker that pulls and pushes small whole numbers, waits for some of it, and ticks.

    ``lists`` are the lists of keys that it takes; any few out of ``range(KEYS)`` if there are none.
    """

    def program(client):
        rng = random.Random(f"{seed} {client.rank} {client.incarnation}")
        workers = client.cluster.workers
        later = []

        def some():
            return rng.choice(lists) if lists else rng.sample(range(KEYS), rng.randint(1, 8))

        while client.clock < clocks:
            if client.saver is not None:
                yield from client.saver.maybe(later, {})
            for _ in range(rng.randint(0, 2)):
                call = client.pull(some())
                if rng.random() < 0.7:
                    yield call
                else:
                    later.append(call)
            if rng.random() < 0.5:
                yield rng.expovariate(1.0) * think
            for _ in range(rng.randint(0, 3)):
                keys = some()
                call = client.push(keys, amounts(client.rank, workers, len(keys), rng.randint(1, 3)))
                if rng.random() < 0.3:
                    yield call
                later.append(call)
            later.append(client.tick())
        yield [*later, *client.flush(), *client.tasks]

    return program


def fitting(seed, clocks, think=0.005):
    """A worker that begins the pull of each clock in the one before, pushes, and ticks."""

    def program(client):
        rng = random.Random(f"{seed} {client.rank} {client.incarnation}")
        begun = client.pull(rng.sample(range(KEYS), 8))
        later = []
        while client.clock < clocks:
            pulled, begun = begun, client.pull(rng.sample(range(KEYS), 8), ahead=1)
            yield pulled
            yield rng.expovariate(1.0) * think
            for _ in range(rng.randint(0, 2)):
                keys = rng.sample(range(KEYS), rng.randint(1, 8))
                later.append(client.push(keys, amounts(client.rank, client.cluster.workers, len(keys), 1)))
            later.append(client.tick())
        yield [begun, *later]

    return program


@dataclass(frozen=True)
class Plan:
    """What happens while the workers run."""

    mode: str = "bsp"
    staleness: int = 0
    mean: bool = False
    workers: int = 3
    endpoints: int = 2
    clocks: int = 5
    weather: Weather = CALM
    deaths: int = 0  # of worker 0, which returns each time
    zombies: bool = False  # a dismissed worker was only slow, and continues
    moves: int = 0  # of slots between neighbours: the model's endpoints alone can
    filters: Filters | None = None  # _core's endpoints alone know them
    cache: CachePlan | None = None  # under SSP and ASP
    is_fit: bool = False  # pulls are begun a clock early


def run(seed, plan, service=model.Endpoint, defect=ClientDefect.NONE):
    """Run a schedule; returns the cluster, which has the history."""
    cluster = Cluster(
        seed, service, mode=plan.mode, staleness=plan.staleness, mean=plan.mean, workers=plan.workers,
        endpoints=plan.endpoints, weather=plan.weather, defect=defect, filters=plan.filters,
        cache=plan.cache,
    )  # fmt: skip
    lists = [random.Random(k).sample(range(MANY_KEYS), 40 + k) for k in range(4)] if plan.filters else None
    program = fitting(seed, plan.clocks) if plan.is_fit else counting(seed, plan.clocks, lists=lists)
    cluster.start([program] * plan.workers)
    rng = cluster.random
    time = 0.0
    for _ in range(plan.deaths):
        time += rng.uniform(0.005, 0.15)
        cluster.network.at(time, cluster.replace, 0, program, rng.uniform(0.0, 0.1), plan.zombies)
        time += 0.2
    for _ in range(plan.moves):
        giver = rng.randrange(plan.endpoints)
        up = giver + 1 < plan.endpoints and (giver == 0 or rng.random() < 0.5)
        cluster.network.at(rng.uniform(0.0, 0.3), cluster.move, giver, rng.randint(1, 4), up)
    cluster.run()
    return cluster


def violations(cluster):
    """Return (checker, sentence) of everything that must not have happened."""
    keys = range(MANY_KEYS if cluster.filters else KEYS)
    rows = dict(enumerate(cluster.rows(list(keys))))
    return [(name, text) for name, check in CHECKERS.items() for text in check(cluster.history, rows)]


__all__ += ["CALM", "ROUGH"]
