"""Scenarios: what happens to a cluster with replicas. A scenario and a seed are one run, which can be repeated."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

import shoal
from shoal.cluster.protocol import messages as m
from sim.jobs import TwoJobs, find_violations_of_jobs
from sim.network import CALM, ROUGH, Weather
from sim.replicated import Replicated
from sim.schedules import counting, violations
from sim.workloads import CREATED, TABLES, TIGHT, mixed

MODES = {"bsp": ("bsp", 0), "ssp": ("ssp", 2), "asp": ("asp", 0)}
SHORT, LONG = 0.1, 0.6  # seconds; a process is declared dead after 0.25
DANGEROUS = ("kill", "stop", "cut")  # a server may die, or be declared dead
HARMLESS = ("scheduler", "stall", "worker", "zombie", "mute", "join", "drain", "rebalance", "table")
TIGHT_BYTES = 1580  # of a slot, for the rows of all tables
SLOW = 100_000  # bytes per second of a copy: an arc takes some hundredths of a second


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster, and the faults that happen to it in this order.

    Parameters
    ----------
    random_faults : int
        Up to so many, drawn from all kinds that the cluster survives, instead of ``faults``.
    saves : bool
        Workers save.
    pings : bool
        The scheduler pings the servers.
    jobs : bool
        There may be several jobs, each with so many ``workers``.
    other : str
        The mode of a second job, a named one; empty: there is none.
    shared : bool
        Both jobs use one table.
    varies : bool
        The number of servers, endpoints, slots and copies, the disk, the copy rate and the weather are drawn, too.
    """

    mode: str = "bsp"
    weather: Weather = CALM
    faults: tuple[str, ...] = ()
    random_faults: int = 0
    servers: int = 3
    endpoints_each: int = 1
    replicas: int = 1
    clocks: int = 20
    slots: int = 16
    disk: float = 0.0
    slot_bytes: int = 0
    copy_rate: int = 1 << 28
    tables: str = "counting"
    saves: bool = field(default=False, repr=False)  # a seed has the same faults without
    pings: bool = field(default=False, repr=False)
    jobs: bool = field(default=False, repr=False)
    workers: int = field(default=3, repr=False)
    other: str = field(default="", repr=False)
    shared: bool = field(default=False, repr=False)
    varies: bool = False

    def kinds(self):
        """Return the faults that the cluster survives."""
        dangerous = [*DANGEROUS, *DANGEROUS] if self.replicas else []
        return [*dangerous, *["kill-two"] * (self.replicas > 1), *HARMLESS]

    def drawn(self, seed):
        """Return the scenario of a seed."""
        if not self.varies:
            return self
        rng = random.Random(f"{seed} {self}")
        chances = {name: rng.choice([0.0, rng.random() * 0.1]) for name in ("loss", "copies", "ghosts")}
        replicas = rng.choice([0, 1, 1, 1, 2])
        return replace(
            self,
            varies=False,
            weather=Weather(
                jitter=rng.choice([0.001, 0.002, 0.01]),
                damage=rng.choice([0.0, 0.01]),
                reconnects=rng.choice([0.0, 0.01]),
                **chances,
            ),
            replicas=replicas,
            servers=rng.randint(max(2, replicas + 1), 5),
            endpoints_each=rng.choice([1, 1, 2]),
            slots=rng.choice([16, 32]),
            disk=rng.choice([0.0, 0.0, 0.01, 0.05]),
            copy_rate=rng.choice([SLOW, 1 << 28]),
            saves=rng.choice([False, True]),
            pings=rng.choice([False, True]) and replicas > 0,
        )


def prepare(seed, scenario, kind=None):
    """Make a cluster, and plan ``cluster.planned`` faults; ``cluster.happened`` are those that have happened so far."""
    scenario = scenario.drawn(seed)
    mode, staleness = MODES[scenario.mode]
    weather = scenario.weather
    if not scenario.replicas:
        weather = replace(weather, most_lost=3)  # a server without a copy whose heartbeats are lost ends the cluster
    several = {}
    if scenario.jobs:
        several = {"other": MODES.get(scenario.other), "shared": scenario.shared}
    kind = kind or (TwoJobs if scenario.jobs else Replicated)
    cluster = kind(
        seed, mode=mode, staleness=staleness, workers=scenario.workers,
        servers=scenario.servers, replicas=scenario.replicas,
        endpoints_each=scenario.endpoints_each, slots=scenario.slots, weather=weather, disk=scenario.disk,
        slot_bytes=scenario.slot_bytes, copy_rate=scenario.copy_rate,
        tables={"mixed": TABLES, "tight": TIGHT}.get(scenario.tables), saves=scenario.saves,
        pings=scenario.pings, **several,
    )  # fmt: skip
    if scenario.tables == "counting":
        program = counting(seed, scenario.clocks, think=0.05)
    else:
        program = mixed(seed, scenario.clocks, rare=60 if scenario.tables == "mixed" else 500)
    cluster.start([program] * scenario.workers)
    cluster.scenario = scenario
    rng = random.Random(f"faults {seed} {scenario}")
    faults = scenario.faults
    if scenario.random_faults:
        faults = rng.choices(scenario.kinds(), k=rng.randint(1, scenario.random_faults))
    cluster.happened, cluster.planned, cluster.muted = [], len(faults), []  # until when
    for number, fault in enumerate(faults):
        clock = rng.randint(1, scenario.clocks - 2) if scenario.random_faults else 2 + 2 * number
        if fault in DANGEROUS or fault == "kill-two":
            cluster.once(clock, cluster.when_redundant, _happen, cluster, program, rng, fault)
        else:
            cluster.once(clock, _happen, cluster, program, rng, fault)
    return cluster


def _happen(cluster, program, rng, fault):
    servers = cluster.living()
    if cluster.over or not servers:
        return
    members = [server for server in cluster.members() if server in servers]
    running = [one for one in cluster.worker_processes if one.alive and one.client and not one.client.finished]
    left = min(Counter(id(one.world) for one in running).values(), default=0)  # of a job
    left -= sum(cluster.network.now < until for until in cluster.muted)
    may_end_job = cluster.scenario.random_faults or cluster.scenario.jobs  # both workers of one may be drawn
    if fault in ("worker", "zombie", "mute") and may_end_job and left < 2:
        return  # without any worker the job ends, and another one begins at clock 0
    cluster.happened.append(fault)
    if fault == "kill":
        rng.choice(members).kill()
    elif fault == "kill-two":  # the second one at the same time, or while the first one is being replaced
        if len(members) > 2:
            one, other = rng.sample(members, 2)
            one.kill()
            cluster.condemned.append(other)
            cluster.network.after(rng.choice([0.0, rng.random() * LONG]), other.kill)
    elif fault == "stop":
        rng.choice(servers).stop(rng.choice([SHORT, LONG]))
    elif fault == "cut":
        server, rank = rng.choice(servers), rng.randrange(3)
        pairs = [(server, None), (None, server), (server, rank), (rank, server)]
        one, other = rng.choice([*pairs, rng.sample(servers, 2)] if len(servers) > 1 else pairs)
        cluster.cut(one, other, rng.choice([SHORT, LONG]))
    elif fault == "scheduler":
        cluster.kill_scheduler(rng.choice([0.05, 0.5]))
    elif fault == "stall":
        cluster.stalled_until = cluster.network.now + rng.choice([SHORT, LONG])
    elif fault in ("worker", "zombie"):
        cluster.replace_one(program, fault == "zombie")
    elif fault == "mute":  # the scheduler declares a worker dead that runs on until it is told
        if running:
            cluster.muted.append(cluster.network.now + LONG + 1.0)
            cluster.cut(rng.choice(running), None, LONG)
    elif fault == "join":
        cluster.add_server()
    elif fault == "drain":
        draining = sum(isinstance(tool.body, m.Drain) for tool in cluster.tools)
        if len(members) - draining > cluster.replicas + 1:
            cluster.command(m.Drain(rng.choice(members).rank))
    elif fault == "table":
        cluster.create_table(CREATED)
    elif fault == "rebalance":
        cluster.command(m.Rebalance())


def run(seed, scenario, kind=None):
    """Run a scenario; returns the cluster."""
    cluster = prepare(seed, scenario, kind)
    cluster.run()
    return cluster


def find_violations(cluster):
    """Return sentences about everything that must not have happened."""
    found, scenario = list(cluster.monitor.violations), cluster.scenario
    if cluster.map is None or cluster.membership.broken:
        return found or [cluster.membership.broken or "the cluster does not form"]
    if scenario.jobs:
        return found + find_violations_of_jobs(cluster) + _changed_by_the_other_job(cluster)
    found += [f"{checker}: {text}" for checker, text in violations(cluster)]
    if scenario.mode == "bsp" and scenario.tables == "mixed" and not cluster.replaced:
        scenario = scenario.drawn(cluster.seed)
        undisturbed = run(
            cluster.seed,
            replace(
                scenario, faults=(), random_faults=0, weather=CALM, disk=0.0, servers=1, endpoints_each=1, replicas=0
            ),
        )
        found += _differences(cluster, undisturbed)
    return found


def _changed_by_the_other_job(cluster):
    """Return what the table of a job under BSP has otherwise than if the other job and all faults had not been."""
    scenario = cluster.scenario.drawn(cluster.seed)
    if scenario.mode != "bsp" or scenario.shared or cluster.replaced:
        return []
    calm = {"weather": CALM, "faults": (), "random_faults": 0, "disk": 0.0, "servers": 1, "replicas": 0}
    alone = run(cluster.seed, replace(scenario, other="", **calm))
    one, two = _sections(cluster, 1), _sections(alone, 1)
    slots = [slot for slot in range(cluster.slots) if one[slot] != two[slot]]
    return [f"slots {slots} differ from a run without the other job"] if slots else []


def _differences(cluster, other):
    """Yield what differs from an undisturbed run under BSP: rows with their state, and the results of calls."""
    for table in cluster.tables:
        one, two = _sections(cluster, table), _sections(other, table)
        slots = [slot for slot in range(cluster.slots) if one[slot] != two[slot]]
        if slots:
            yield f"slots {slots} of table {table} differ from an undisturbed run"
    for clock, table in sorted(set(cluster.saves.sections) & set(other.saves.sections) if cluster.saves else ()):
        if cluster.saves.sections[clock, table] != other.saves.sections[clock, table]:
            yield f"table {table} in the checkpoints of clock {clock} differs from an undisturbed run"
    for client in cluster.clients:
        twin = next(one for one in other.clients if one.rank == client.rank)
        if len(client.answers) != len(twin.answers):
            yield f"worker {client.rank} has {len(client.answers)} answers, undisturbed {len(twin.answers)}"
        for (name, clock, call), (_, _, same) in zip(client.answers, twin.answers, strict=False):
            if not np.array_equal(_value(name, call), _value(name, same)):
                yield f"worker {client.rank} at clock {clock}: {name} has another result than in an undisturbed run"


def _value(name, call):
    if call.error is not None:
        return None
    result = call.get()
    if name == "sweep":
        return np.sum(result, axis=0)
    return np.concatenate(result) if name == "norm" else np.asarray(result)


def _sections(cluster, table):
    found = []
    for slot in range(cluster.slots):
        arc = next(arc for arc in cluster.map.arcs if arc.first_slot <= slot < arc.end_slot)
        address = cluster.map.endpoint(arc.primary).address
        rows, section, admission = cluster.services[address].shard(table).section(slot)
        found.append((rows, bytes(section), bytes(admission)))
    return found


def _empty_slot_bytes():
    """Return the bytes of a slot without rows, which depend on the library that the engine is linked with."""
    with shoal.local(slots=2, threads=1) as store:
        return store.table("t").stats().bytes // 2


def _scenarios():
    """Yield (name, scenario): each plan of faults under each consistency, in calm and rough networks."""
    tight = len(TIGHT) * _empty_slot_bytes() + TIGHT_BYTES
    plans = {
        "kill": {"faults": ("kill",)},
        "stop": {"faults": ("stop",)},
        "cut": {"faults": ("cut",)},
        "scheduler": {"faults": ("scheduler",)},
        "worker": {"faults": ("worker",)},
        "mute": {"faults": ("mute",)},
        "kill-scheduler": {"faults": ("kill", "scheduler")},
        "worker-kill-worker": {"faults": ("worker", "kill", "worker")},
        "kill-join-kill": {"faults": ("kill", "join", "kill")},
        "drain": {"faults": ("drain", "rebalance", "join"), "servers": 4},
        "drain-join-kill": {"faults": ("join", "drain", "kill"), "servers": 3, "endpoints_each": 2},
        "kill-two": {"faults": ("kill-two", "join", "kill-two"), "servers": 5, "replicas": 2},
        "tables-2": {
            "faults": ("kill-two", "join", "join", "kill-two"), "servers": 5, "replicas": 2, "tables": "mixed",
            "copy_rate": SLOW,
        },
        "slow-moves": {"faults": ("join", "drain", "join"), "replicas": 0, "tables": "mixed", "copy_rate": SLOW},
        "moves": {"faults": ("join", "drain", "scheduler", "join", "rebalance"), "replicas": 0, "tables": "mixed"},
        "disk": {"faults": ("scheduler", "kill", "scheduler", "join", "scheduler"), "disk": 0.03},
        "tables": {"faults": ("kill", "join", "kill"), "tables": "mixed", "slot_bytes": 1 << 16, "copy_rate": SLOW},
        "budget": {
            "faults": ("kill", "join", "kill"), "tables": "tight", "slot_bytes": tight, "copy_rate": SLOW,
            "modes": ("ssp", "asp"),
        },
        "everything": {"clocks": 14,
            "random_faults": 7, "servers": 4, "endpoints_each": 2, "tables": "mixed", "slot_bytes": 1 << 16,
            "disk": 0.01, "copy_rate": SLOW,
        },
        "everything-2": {"clocks": 14,
            "random_faults": 7, "servers": 5, "replicas": 2, "tables": "mixed", "disk": 0.01, "copy_rate": SLOW,
        },
        "pings": {"faults": ("stop", "cut", "stop"), "clocks": 40, "pings": True},
        "saves": {"faults": ("kill", "join", "kill"), "clocks": 30, "saves": True},
        "saves-tables": {
            "faults": ("kill", "join", "kill"), "tables": "mixed", "slot_bytes": 1 << 16, "copy_rate": SLOW,
            "saves": True,
        },
        "saves-moves": {
            "faults": ("join", "drain", "scheduler", "join", "rebalance"), "replicas": 0, "tables": "mixed",
            "copy_rate": SLOW, "saves": True,
        },
        "saves-everything": {"clocks": 14,
            "random_faults": 7, "servers": 5, "replicas": 2, "tables": "mixed", "disk": 0.01, "copy_rate": SLOW,
            "saves": True,
        },
    }  # fmt: skip
    for plan, fields in plans.items():
        for mode in fields.pop("modes", MODES):
            for weather, conditions in (("calm", CALM), ("rough", ROUGH)):
                yield f"{plan}/{mode}/{weather}", Scenario(mode=mode, weather=conditions, **fields)
    for mode in MODES:
        yield (
            f"anything/{mode}",
            Scenario(mode=mode, random_faults=8, varies=True, tables="mixed", slot_bytes=1 << 16, clocks=14),
        )


def _scenarios_of_jobs():
    """Yield (name, scenario): two jobs of different consistency, with tables of their own and with a shared one."""
    plans = {
        "jobs": {"faults": ("worker", "kill", "scheduler", "worker")},
        "jobs-calm": {"faults": ("scheduler",)},
        "jobs-moves": {"faults": ("join", "drain", "kill", "rebalance"), "copy_rate": SLOW},
        "jobs-everything": {"clocks": 14, "random_faults": 6, "servers": 4, "endpoints_each": 2, "disk": 0.01},
    }
    for plan, fields in plans.items():
        for mode, other in (("bsp", "asp"), ("bsp", "bsp"), ("asp", "bsp"), ("ssp", "bsp")):
            for shared in (False, True):
                for weather, conditions in (("calm", CALM), ("rough", ROUGH)):
                    what = "shared" if shared else "own"
                    scenario = Scenario(
                        mode=mode, other=other, shared=shared, workers=2, jobs=True, weather=conditions, **fields
                    )
                    yield f"{plan}/{mode}+{other}/{what}/{weather}", scenario


SCENARIOS = {**dict(_scenarios()), **dict(_scenarios_of_jobs())}
