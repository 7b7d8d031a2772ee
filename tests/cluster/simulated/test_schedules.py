"""Thousands of messages, lost, doubled, late and damaged: what consistency.md promises holds on every schedule.

    python -m pytest tests/cluster/simulated/test_schedules.py
    PYTHONPATH=tests/support python tests/cluster/simulated/test_schedules.py 1000    more seeds; prints what breaks

A schedule is a seed and a plan: the same ones give the same run.
"""

import random
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

import shoal
from requests_by_hand import counts_of
from shoal import _core
from shoal.cluster.worker.filters import Filters
from shoal.errors import FencedError
from sim import model
from sim.cluster import SUM, THREAD, Cluster
from sim.history import CHECKERS
from sim.network import Weather
from sim.planted import PLANTED
from sim.schedules import CALM, ROUGH, Plan, run, violations
from simulated_plans import (
    MODES,
    MOVES,
    plan_of,
)
from table_specs import native, table_spec
from tiers import long_but


def in_arcs(slots, arcs):
    """An endpoint with several arcs."""
    bounds = sorted({bound for first, end in arcs for bound in (first, first + (end - first) // 3, first + 1, end)})
    return _core.Endpoint(slots, list(pairwise(bounds)))


SERVICES = {"native": _core.Endpoint, "arcs": in_arcs, "model": model.Endpoint}
TCP = Weather(ordered=True, loss=0.0, reconnects=0.02)

PLANS = {
    "calm": {"weather": CALM},
    "connections that break": {"weather": TCP},
    "rough": {"weather": ROUGH, "endpoints": 3},
    "deaths": {"weather": ROUGH, "deaths": 2},
    "zombies": {"weather": ROUGH, "deaths": 2, "zombies": True},
    "many workers": {"weather": ROUGH, "workers": 6, "endpoints": 4, "clocks": 3, "deaths": 1},
    "pulls a clock early": {"weather": ROUGH, "clocks": 8, "deaths": 1, "is_fit": True},
}


@pytest.mark.combined(2)
@pytest.mark.parametrize("mode", long_but(["bsp", "ssp(1)", "asp"], list(MODES)))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("service", SERVICES)
def test_every_schedule_keeps_every_promise(service, plan, mode):
    for seed in range(12 if service == "arcs" else 3):
        cluster = run(seed, plan_of(mode, PLANS[plan]), SERVICES[service])
        assert violations(cluster) == [], f"seed {seed}"
        assert all(one.metrics()["deferred_reads"] == 0 for one in cluster.services.values())


def forgetful(slots, arcs):
    """An endpoint with room for the list of one call or two."""
    return _core.Endpoint(slots, arcs, key_list_bytes=700)


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deaths", [0, 2])
def test_exact_filters_keep_every_promise(mode, deaths):
    counts = Counter()
    for seed in range(6):
        plan = plan_of(mode, {"weather": ROUGH, "deaths": deaths, "filters": Filters(key_caching=True, zeros=True)})
        cluster = run(seed, plan, forgetful if seed % 2 else _core.Endpoint)
        assert violations(cluster) == [], f"seed {seed}"
        for client in cluster.clients:
            counts += counts_of(client.filter)
    assert min(counts[name] for name in ("lists_named", "lists_lost", "gradient_bytes_saved", "weight_bytes_saved")) > 0


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", MOVES)
def test_slots_that_move_keep_every_promise(plan, mode):
    moved = 0
    for seed in range(6):
        cluster = run(seed, plan_of(mode, MOVES[plan]), model.Endpoint)
        assert violations(cluster) == [], f"seed {seed}"
        moved += cluster.map.epoch - 1
    assert moved > 6


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    service, defect, plan, checkers = PLANTED[name]
    for seed in range(100):
        if checkers & {checker for checker, _ in violations(run(seed, plan, service, defect))}:
            return
    pytest.fail(f"none of {sorted(checkers)} saw it in 100 schedules")


@pytest.mark.parametrize("service", SERVICES)
def test_a_mean_has_one_divisor_everywhere_when_a_worker_dies(service):
    plan = Plan(mode="bsp", mean=True, workers=2, endpoints=3, weather=ROUGH, deaths=3)
    for seed in range(24 if service == "native" else 6):
        found = violations(run(seed, plan, SERVICES[service]))
        of_sums = ("bounds", "exactly once", "read my writes")  # these checkers know no means
        assert [one for one in found if one[0] not in of_sums] == [], f"seed {seed}"


def test_every_checker_finds_a_bug_that_it_names_alone():
    named = [next(iter(checkers)) for *_, checkers in PLANTED.values() if len(checkers) == 1]
    assert set(named) == CHECKERS.keys()


def test_a_zombie_is_fenced():
    fenced = 0
    for seed in range(10):
        cluster = run(seed, Plan(weather=ROUGH, deaths=1, zombies=True, clocks=8), _core.Endpoint)
        fenced += sum(isinstance(zombie.error, FencedError) for zombie in cluster.zombies)
    assert fenced > 0


def test_one_seed_is_one_run():
    plan = Plan(mode="ssp", staleness=1, weather=ROUGH, deaths=1)
    first, again = run(5, plan), run(5, plan)
    assert first.network.delivered == again.network.delivered
    assert [pull.rows.tolist() for pull in first.history.pulls if pull.rows is not None] == [
        pull.rows.tolist() for pull in again.history.pulls if pull.rows is not None
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_assigned_rows_are_there_and_erased_rows_are_counted_once(service):
    def program(client):
        rng = random.Random(f"{client.cluster.network.random.random()}")
        mine = range(100 * client.rank, 100 * client.rank + 40)
        there = set()
        for _ in range(8):
            some = rng.sample(mine, 15)
            if rng.random() < 0.5:
                yield client.assign(some, np.full((len(some), 6), client.rank, np.float32))
                there |= set(some)
            else:
                call = client.erase(some)
                yield call
                assert call.get() == len(there & set(some))
                there -= set(some)
            call = client.contains(mine)
            yield call
            assert call.get().sum() == len(there)
            checked.append(client.rank)

    for seed in range(6):
        checked = []
        cluster = Cluster(seed, SERVICES[service], mode="asp", workers=3, endpoints=3, weather=ROUGH)
        cluster.start([program] * 3)
        if service == "model":
            for time in (0.01, 0.03, 0.06):
                cluster.network.at(time, cluster.move, 1, 2, time == 0.03)
        assert not cluster.run().stuck
        assert len(checked) == 24


COUNTING = structs.replace(SUM, expire=(shoal.MaxRows(10**9, keep="frequent"),))  # rows keep their occurrences


def occurrences(cluster):
    """By hash, as the rows have it: the column behind the weight."""
    found = {}
    for first, end, endpoint, _ in cluster.map.runs:
        for slot in range(first, end):
            rows, section, _ = cluster.services[endpoint.address].shard(1).section(slot)
            padded = [-(-size * rows // 64) * 64 for size in (8, 4)]
            counts = section[sum(padded) :][: 4 * rows].view(np.uint32)
            found |= dict(zip(section[: 8 * rows].view(np.uint64).tolist(), counts.tolist(), strict=True))
    return found


@pytest.mark.parametrize("mode", ["bsp", "ssp(1)", "asp"])
@pytest.mark.parametrize("service", SERVICES)
def test_occurrences_are_counted_once_on_every_schedule(service, mode):
    name, staleness = MODES[mode]

    def program(client):
        rng = random.Random(f"{seed} {client.rank}")
        for _ in range(5):
            keys = rng.sample(range(40), 20)
            counts = [rng.choice([1, 1, 2, 300]) for _ in keys]
            total.update(dict(zip(_core.mix(np.array(keys, np.uint64)).tolist(), counts, strict=True)))
            client.push(keys, np.ones((20, 1)), counts=counts)
            yield client.tick()

    for seed in range(6 if service == "native" else 2):
        total = Counter()
        cluster = Cluster(
            seed, SERVICES[service], mode=name, staleness=staleness, workers=3, endpoints=3, weather=ROUGH,
            tables={1: COUNTING},
        )  # fmt: skip
        cluster.start([program] * 3)
        if service == "model":
            for time in (0.01, 0.03, 0.06):
                cluster.network.at(time, cluster.move, 1, 2, time == 0.03)
        assert not cluster.run().stuck
        assert occurrences(cluster) == total, f"seed {seed}"


# --- the bits of BSP ---

ADAGRAD = table_spec(3, shoal.Adagrad(lr=0.05, eps=1e-8, n0=0.1), init=shoal.Uniform(0.1, seed=5))
BIT_KEYS, BIT_CLOCKS, BIT_WORKERS = 12, 4, 3


def pushes_of(rank, clock):
    """What a worker pushes in a clock: nothing, or up to three lists that share keys.

    2^60 + 1 - 2^60 is 0 in float64, and 1 in another order: so a sum in a wrong order shows.
    """
    rng = random.Random(f"{rank} {clock}")
    for _ in range(rng.randint(0, 3)):
        keys = sorted(rng.sample(range(BIT_KEYS), rng.randint(1, 12)))
        grads = [[rng.choice([-1, 1]) * 2.0 ** rng.choice([-1, 0, 60]) for _ in range(3)] for _ in keys]
        yield keys, np.array(grads, np.float32)


def one_process(spec, mean):
    """The same steps, one after the other, in the order of the ranks."""
    shard = _core.Shard(native(spec), 16, THREAD)
    for clock in range(BIT_CLOCKS):
        sums = {}
        pushed = [(keys, grads) for rank in range(BIT_WORKERS) for keys, grads in pushes_of(rank, clock)]
        for keys, grads in pushed:
            for key, row in zip(keys, grads.astype(np.float64), strict=True):
                sums[key] = sums[key] + row if key in sums else row
        if pushed:
            batch = _core.KeyBatch(np.array(list(sums), np.uint64), 16, THREAD)
            grads = np.array(list(sums.values())) / (BIT_WORKERS if mean else 1)
            summed = np.empty((len(batch), 3), np.float32)
            batch.sum(np.ascontiguousarray(grads.astype(np.float32)), 3, summed, THREAD)
            shard.push(batch, summed)
    batch = _core.KeyBatch(np.arange(BIT_KEYS, dtype=np.uint64), 16, THREAD)
    rows = np.empty((BIT_KEYS, 3), np.float32)
    shard.pull(batch, rows)
    out = np.empty_like(rows)
    batch.expand(rows, 3, out, THREAD)
    return out, shard.step


def worker(client):
    while client.clock < BIT_CLOCKS:
        later = [client.push(keys, grads) for keys, grads in pushes_of(client.rank, client.clock)]
        client.tick()
        if client.cluster.random.random() < 0.5:
            yield later
    yield client.pull(list(range(BIT_KEYS)))


def bsp(service, endpoints, seed, mean):
    cluster = Cluster(
        seed,
        service,
        mode="bsp",
        mean=mean,
        workers=BIT_WORKERS,
        endpoints=endpoints,
        weather=ROUGH,
        tables={1: ADAGRAD},
    )
    cluster.start([worker] * BIT_WORKERS)
    cluster.run()
    return cluster


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("service", SERVICES)
def test_bsp_has_the_same_bits_on_any_number_of_servers(service, mean):
    expected, steps = one_process(ADAGRAD, mean)
    for endpoints in (1, 2, 4):
        for seed in range(3):
            cluster = bsp(SERVICES[service], endpoints, seed, mean)
            assert not cluster.history.stuck
            assert cluster.rows(list(range(BIT_KEYS))).tobytes() == expected.tobytes()
            assert all(pull.rows.tobytes() == expected.tobytes() for pull in cluster.history.pulls)
            assert {one.shard(1).step for one in cluster.services.values()} == {steps}


class MergesBackwards(model.Endpoint):
    def merge(self, table, pushes, workers):
        super().merge(table, pushes[::-1], workers)


class MergesAsTheyCame(model.Endpoint):
    def merge(self, table, pushes, workers):
        super().merge(table, [push for push in self.pending if push in pushes], workers)


@pytest.mark.parametrize("planted", [MergesBackwards, MergesAsTheyCame])
def test_a_merge_in_another_order_has_other_bits(planted):
    expected, _ = one_process(ADAGRAD, mean=False)
    rows = [bsp(planted, 2, seed, mean=False).rows(list(range(BIT_KEYS))) for seed in range(10)]
    assert any(one.tobytes() != expected.tobytes() for one in rows)


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    runs = broken = 0
    for seed in range(seeds):
        for mode in MODES:
            for name, fields in {**PLANS, **MOVES}.items():
                for service in SERVICES if name in PLANS else ["model"]:
                    bad = violations(run(seed, plan_of(mode, fields), SERVICES[service]))
                    runs, broken = runs + 1, broken + bool(bad)
                    if bad:
                        print(f"seed {seed}, {mode}, {name}, {service}: {bad[0]}")
    print(f"{runs} schedules, {broken} broken")
