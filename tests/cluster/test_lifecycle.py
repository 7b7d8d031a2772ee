"""Admission, expiry and sweeps come to the same bits however many servers and threads there are, and over a save.

The reference is one process that merges what the workers push, in rank order, and sweeps at the start of a clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, scheduler
from cluster_standin import cluster
from shoal import _core
from shoal.cluster.server.server import Server
from shoal.config import ServerConfig
from stores import joined, together

SLOTS = 64
RULES = {
    "count": {"admit": shoal.AfterCount(2), "expire": (shoal.TimeToLive(6), shoal.MaxRows(400, keep="frequent"))},
    "count, bounded": {"admit": shoal.AfterCount(3, within=4, capacity=500)},
    "bloom": {"admit": shoal.AfterBloom(2, 5000, within=7), "expire": shoal.DecayedScore(0.8, 0.3)},
    "probability": {"admit": shoal.WithProbability(0.4, seed=3), "expire": (shoal.MaxRows(300), shoal.MinNorm(0.05))},
}
CLOCKS = 16
FEW = np.arange(100, dtype=np.uint64)
SWEEPS = {5, 11}  # clocks that begin with one


def tables(store: shoal.Store) -> list[shoal.Table]:
    return [
        store.table(name, dim=2, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Normal(0.1, seed=1), **rules)
        for name, rules in RULES.items()
    ]


def data(rank: int, clock: int) -> tuple[Any, Any]:
    """Keys of which some are frequent, and their gradients."""
    random = np.random.default_rng([rank, clock])
    keys = (random.zipf(1.3, size=600) % 3000 + 40 * clock * (random.random(600) < 0.3)).astype(np.uint64)
    return keys, random.normal(size=(600, 2)).astype(np.float32)


def everything(store: shoal.Store) -> dict[str, list[Any]]:
    """All bytes that the store would save."""
    return {
        name: [
            (rows, section.tobytes(), filter.tobytes())
            for rows, section, filter in (table.shard.section(slot) for slot in range(store.slots))
        ]
        for name, table in store.tables.items()
    }


def sweep(store: shoal.Store, *, dry_run: bool = False) -> list[int]:
    """Let go what the tables' rules name: how many rows each rule dropped."""
    dropped = []
    for table in store.tables.values():
        words = table.shard.sweep(np.empty(0), store.clock, dry_run=dry_run)
        dropped += words[38 : 38 + 2 * len(table.spec.expire) : 2].tolist()
    return dropped


def learn(store: shoal.Store, first: int, end: int) -> None:
    """Push, sweep and tick as one of the workers."""
    for clock in range(first, end):
        if clock in SWEEPS and store.rank == 0:
            sweep(store)
        for table in tables(store):
            table.push(*data(store.rank, clock)).result()
        store.tick()


def learn_merged(store: shoal.Store, workers: int) -> None:
    """The same in one process, by hand."""
    pool = _core.ThreadPool(1)
    for clock in range(CLOCKS):
        if clock in SWEEPS:
            sweep(store)
        parts = [data(rank, clock) for rank in range(workers)]
        batches = [store.key_batch(keys) for keys, _ in parts]
        lists = [(batch.hashes, batch.sum(grads)) for batch, (_, grads) in zip(batches, parts, strict=True)]
        hashes, grads = _core.merge(lists, 2, pool)
        merged = store.key_batch(_core.unmix(hashes))
        counts = sum(np.bincount(np.searchsorted(hashes, b.hashes), b.counts(), len(hashes)) for b in batches)
        for table in tables(store):
            table.push_unique(merged, grads, counts=counts.astype(np.uint32)).result()
        store.tick()


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, list[Any]]]:
    """What one process comes to, for as many workers."""
    found = {}
    for workers in (1, 2):
        with shoal.local(threads=1, slots=SLOTS) as store:
            learn_merged(store, workers)
            found[workers] = everything(store)
            for name, table in store.tables.items():
                expired = [rows for what, rows in table.shard.stats().items() if what.startswith("expired")]
                assert (sum(expired) > 0) == bool(table.spec.expire), name
    return found


def test_threads_change_nothing(alone: dict[int, Any]) -> None:
    for threads in (2, 4):
        with shoal.local(threads=threads, slots=SLOTS) as store:
            learn(store, 0, CLOCKS)
            assert everything(store) == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "endpoints"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_servers_change_nothing(alone: dict[int, Any], servers: int, endpoints: int) -> None:
    with cluster(servers, endpoints, slots=SLOTS) as made:
        together(made.address, 2, lambda store: learn(store, 0, CLOCKS))
        with joined(made.address, 1) as (store,):
            tables(store)
            assert everything(store) == alone[2]


@pytest.mark.slow
def test_processes_change_nothing(alone: dict[int, Any]) -> None:
    with shoal.launch(2, server_threads=2, slots=SLOTS, timeout=TIMEOUT) as store:
        learn(store, 0, CLOCKS)
        assert everything(store) == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_saved_and_loaded_it_goes_on_as_if_it_had_not_been(alone: dict[int, Any], kind: str, tmp_path: Any) -> None:
    with shoal.local(slots=SLOTS) as store:  # limits are of slots
        learn(store, 0, 8)
        store.save(tmp_path / "c")
    if kind == "local":
        with shoal.local(slots=SLOTS) as store:
            store.load(tmp_path / "c")
            clock_goes_on(store)
            assert everything(store) == alone[1]
        return
    with cluster(2, 2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.load(tmp_path / "c")
        clock_goes_on(store)
        assert everything(store) == alone[1]
        store.save(tmp_path / "d")
        with shoal.local(slots=SLOTS) as other:
            other.load(tmp_path / "d")
            assert everything(other) == alone[1]
            assert other.tables["count"].shard.table_clock(other.clock) == CLOCKS


def clock_goes_on(store: shoal.Store) -> None:
    """Learn the rest: the store's clock begins at 0, the tables' do not."""
    assert store.clock == 0
    learn(store, 8, CLOCKS)


@pytest.mark.slow
def test_jobs_change_nothing(alone: dict[int, Any]) -> None:
    with cluster(2, 1, slots=SLOTS) as made:
        for first, end in ((0, 3), (3, 9), (9, CLOCKS)):
            with joined(made.address, 1) as (store,):
                tables(store)
                learn(store, first, end)
        with joined(made.address, 1) as (store,):
            tables(store)
            assert everything(store) == alone[1]


@pytest.mark.parametrize(
    "filters",
    [
        shoal.Filters(key_caching=True, zeros=True),
        shoal.Filters(key_caching=True, zeros=True, gradients="float16", threshold=1.0, seed=2),
    ],
    ids=["exact", "unbiased"],
)
def test_filters_leave_the_occurrences_as_they_are(alone: dict[int, Any], filters: shoal.Filters) -> None:
    with cluster(2, 1, slots=SLOTS) as made, joined(made.address, 1, filters=filters) as (store,):
        learn(store, 0, 5)
        learned = everything(store)
    with shoal.local(slots=SLOTS) as store:
        learn(store, 0, 5)
        if filters.exact:
            assert everything(store) == learned
        for name in ("count", "count, bounded", "probability"):
            for (rows, section, filter), (others, other, kept) in zip(
                learned[name], everything(store)[name], strict=True
            ):
                assert (rows, filter) == (others, kept)
                assert section[: 8 * rows] == other[: 8 * others]  # the same keys


def test_under_asp_sweeps_act_at_once() -> None:
    with cluster(2, 2, slots=SLOTS) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", expire=shoal.TimeToLive(2))
        table.push(np.arange(100, dtype=np.uint64), np.ones(100, np.float32)).result()
        for _ in range(3):
            store.tick()
        table.push(np.arange(40, dtype=np.uint64), np.ones(40, np.float32)).result()
        assert sweep(store, dry_run=True) == [60]
        assert len(table) == 100
        assert sweep(store) == [60]
        assert len(table) == 40


@pytest.mark.slow
def test_a_budget_is_met_alike_by_a_cluster_and_in_one_process() -> None:
    def fill(store: shoal.Store) -> tuple[int, list[Any]]:
        table = store.table("t", dim=4, optimizer=shoal.SGD(), expire=shoal.MaxRows(10**6))
        for part in range(8):
            keys = np.arange(part * 500, part * 500 + 500, dtype=np.uint64)
            table.push(keys, np.ones((500, 4), np.float32)).result()
            store.tick()
        return len(table), everything(store)["t"]

    with shoal.local(slots=SLOTS, memory=SLOTS * 2048) as store:
        rows, alone = fill(store)
    assert 500 < rows < 4000
    with shoal.launch(3, slots=SLOTS, memory=SLOTS * 2048, consistency=shoal.ASP(), timeout=TIMEOUT) as store:
        assert fill(store) == (rows, alone)
        with pytest.raises(shoal.MemoryBudgetExceededError, match=r"server 0 at .* cannot create table 'plain'"):
            store.table("plain")
        assert fill(store)[0] > 500
        store.tables["t"].erase(np.arange(4000, dtype=np.uint64))
        plain = store.table("plain")

        def push_until_full() -> None:
            for part in range(200):
                plain.push(np.arange(part * 500, part * 500 + 500, dtype=np.uint64), np.ones(500, np.float32)).result()

        with pytest.raises(shoal.MemoryBudgetExceededError, match=r"server .* refused the push of table"):
            push_until_full()


def test_a_table_without_room_is_refused_to_all_that_ask_and_nobody_else_notices() -> None:
    share = 4864  # 12 empty tables of 384 bytes a slot, or 9 of 512, as other C++ runtimes have them; and some rows
    with (
        cluster(2, 2, slot_memory=[None, share], slots=1024) as one,
        joined(one.address, 2) as stores,
        ThreadPoolExecutor(2) as pool,
    ):

        def everywhere(work: Callable[[shoal.Store], Any]) -> list[Any]:
            return list(pool.map(work, stores))

        def tables() -> list[list[int]]:
            return [service.tables() for server in one.servers for service in server.services]

        def refusal(store: shoal.Store, number: int) -> str:
            try:
                store.table(f"more {number}")
            except shoal.MemoryBudgetExceededError as error:
                return str(error)
            return ""

        everywhere(
            lambda store: store.table("t", optimizer=shoal.SGD(lr=1.0)).push(FEW, np.ones(100, np.float32)).result()
        )
        for number in range(100):  # empty tables, until there is no room for another
            before = tables()
            texts = set(everywhere(lambda store: refusal(store, number)))  # noqa: B023 - called at once
            if texts != {""}:
                break
        (text,) = texts
        assert number > 3
        assert re.match(r"server 1 at tcp://\S+, tcp://\S+ \(process \d+ on \S+\) cannot create table 'more", text)
        assert f"of the {share} bytes that each of 1024 slots has; give the store more memory" in text
        assert tables() == before
        assert all(f"more {number}" not in store.tables for store in stores)
        everywhere(lambda store: store.tick())
        for pulled in everywhere(lambda store: store.tables["t"].pull(FEW)):
            assert np.all(pulled == -2)
        assert one.scheduler.membership.broken == ""
        # Where there is room again, a table is made under the number that the refused one would have had.
        for service in one.servers[1].services:
            service.drop_table(before[0][-1])
        everywhere(lambda store: store.table("later").push(FEW, np.ones(100, np.float32)).result())
        assert all(len(numbers) >= len(before[0]) for numbers in tables())


def test_a_load_into_servers_without_room_is_refused_and_leaves_what_was_there(tmp_path: Path) -> None:
    with shoal.local() as store:
        for k in range(30):
            store.table(f"t{k}")
        store.save(tmp_path / "many")
    with cluster(1, slot_memory=[4096]) as one, joined(one.address, 1) as (store,):
        table = store.table("mine", optimizer=shoal.SGD(lr=1.0))
        table.push(FEW, np.ones(100, np.float32)).result()
        store.tick()
        with pytest.raises(shoal.MemoryBudgetExceededError, match=r"server 0 at .* cannot create table 't\d+'"):
            store.load(tmp_path / "many")
        assert np.all(table.pull(FEW) == -1)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"memory": 1000}, "at least 1048576 bytes for 1024 slots, got 1000"),
        ({"memory": 0}, "memory: 0 is not a size above 0"),
        ({"slot_memory": 10}, "at least 1048576 bytes for 1024 slots, got 10240"),
        ({"memory": 2**61}, "budget of 2251799813685248 bytes for each slot is beyond any machine"),
    ],
)
def test_a_server_whose_memory_makes_no_sense_is_refused_before_it_joins(what: dict[str, int], text: str) -> None:
    with scheduler(1) as one:
        with pytest.raises(ValueError, match=text):
            Server(ServerConfig(scheduler=one.address, timeout=TIMEOUT, **what))
        assert one.membership.map is None
    with pytest.raises(ValueError, match="at least 1048576 bytes"):
        shoal.launch(memory=1000)
