"""A cluster's store: what its workers see of each other, what it saves and loads, how it fails and how it ends."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import shoal
from channel_peer import eventually
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import cluster
from forks import in_child
from shoal import _core
from shoal.cluster.protocol.messages import MapChanged
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from stores import joined

KEYS = np.array([7, 3, 0, 2**64 - 1, 5], np.uint64)
ONES = np.ones(5, np.float32)
SGD = {"optimizer": shoal.SGD(lr=1.0)}


@pytest.fixture
def made():
    with cluster(2, 2, slots=16) as one:
        yield one


def everywhere(stores, work):
    """Do the same in all workers at once, as processes of their own would."""
    with ThreadPoolExecutor(len(stores)) as pool:
        return [one.result(TIMEOUT) for one in [pool.submit(work, store) for store in stores]]


def read(table):
    """All of a table, bit for bit: keys, weights, state, step."""
    pieces = list(table.items())
    keys = np.concatenate([keys for keys, _ in pieces]) if pieces else np.empty(0, np.uint64)
    return [keys, table.pull(keys), *table.state(keys).values(), np.array(table.stats().step)]


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_bsp_a_push_is_seen_when_all_workers_have_ended_its_clock(made):
    with joined(made.address, 2, consistency=shoal.BSP()) as stores:
        assert [(store.rank, store.num_workers, store.clock) for store in stores] == [(0, 2, 0), (1, 2, 0)]
        one, two = everywhere(stores, lambda store: store.table("t", **SGD))
        one.push(KEYS, ONES).result()
        assert not one.pull(KEYS).any()  # nothing of its own clock, its own push neither
        stores[0].tick()
        ahead = one.pull_async(KEYS)
        assert not two.pull(KEYS).any()
        with pytest.raises(shoal.DeadlineExceededError, match="it continues"):
            ahead.result(0.05)
        two.push(KEYS[:2], ONES[:2])
        stores[1].tick()
        assert ahead.result().ravel().tolist() == [-2, -2, -1, -1, -1]
        assert two.pull(KEYS).ravel().tolist() == [-2, -2, -1, -1, -1]
        assert one.stats().step == two.stats().step == 1
        assert [store.clock for store in stores] == [1, 1]


def test_reads_that_are_no_pulls_see_what_a_pull_sees(made):
    with joined(made.address, 2, consistency=shoal.BSP()) as stores:
        one, two = everywhere(stores, lambda store: store.table("t", **SGD))
        one.push(KEYS, ONES)
        stores[0].tick()
        calls = {
            "len": lambda table: len(table),
            "step": lambda table: table.stats().step,
            "rows": lambda table: table.stats().rows,
            "contains": lambda table: table.contains(KEYS).tolist(),
            "state": lambda table: table.state(KEYS)["w"].ravel().tolist(),
            "items": lambda table: sum(len(keys) for keys, _ in table.items()),
            "sum": lambda table: table.sum().tolist(),
        }
        assert [call(two) for call in calls.values()] == [0, 0, 0, [False] * 5, [0] * 5, 0, [0]]
        with ThreadPoolExecutor(len(calls)) as pool:
            waiting = [pool.submit(call, one) for call in calls.values()]
            with pytest.raises(TimeoutError):
                waiting[0].result(0.05)
            assert not any(call.done() for call in waiting)
            stores[1].tick()
            got = [call.result(TIMEOUT) for call in waiting]
        assert got == [5, 1, 5, [True] * 5, [-1] * 5, 5, [-5]]


def test_under_ssp_a_pull_waits_for_a_worker_that_is_too_far_behind(made):
    with joined(made.address, 2, consistency=shoal.SSP(2)) as stores:
        one, two = everywhere(stores, lambda store: store.table("t", **SGD))
        for clock in range(3):
            one.push(KEYS, ONES).result()
            assert np.all(one.pull(KEYS) == -clock - 1)
            stores[0].tick()
        ahead = one.pull_async(KEYS)
        with pytest.raises(shoal.DeadlineExceededError):
            ahead.result(0.05)
        assert np.all(two.pull(KEYS) == -3)
        stores[1].tick()
        assert np.all(ahead.result() == -3)


def test_under_asp_nobody_waits(made):
    with joined(made.address, 2, consistency=shoal.ASP()) as stores:
        one, two = everywhere(stores, lambda store: store.table("t", **SGD))
        for clock in range(20):
            one.push(KEYS, ONES).result()
            assert np.all(one.pull(KEYS) == -clock - 1)
            stores[0].tick()
        assert np.all(two.pull(KEYS) == -20)


def test_the_mean_divides_by_the_workers(made):
    with joined(made.address, 4, consistency=shoal.BSP(reduce="mean")) as stores:

        def work(store):
            table = store.table("t", **SGD)
            if store.rank < 3:
                table.push(KEYS, np.full(5, 4.0 * (store.rank + 1), np.float32))
            store.tick()
            return table.pull(KEYS).ravel().tolist()

        assert everywhere(stores, work) == [[-6.0] * 5] * 4


def gradient(rows, rank, clock):
    """Something that depends on every bit of what was read."""
    return np.sin(rows * 3 + rank + np.float32(0.1) * clock).astype(np.float32)


def batch_of(rank, clock):
    return np.random.default_rng([rank, clock]).integers(0, 300, 200).astype(np.uint64)


def by_one_process(workers, clocks, spec):
    """Do the workers' parts one after the other, merge in their order, make one step."""
    pool = _core.ThreadPool(1)
    with shoal.local(threads=1, slots=16) as store:
        table = store.table("t", **spec)
        for clock in range(clocks):
            lists = []
            for rank in range(workers):
                batch = store.key_batch(batch_of(rank, clock))
                lists.append((batch.hashes, gradient(table.pull_unique(batch), rank, clock)))
            hashes, grads = _core.merge(lists, table.dim, pool)
            table.push_unique(store.key_batch(shoal.data.unmix(hashes)), grads)
        return read(table)


@pytest.mark.combined
@pytest.mark.parametrize(("servers", "endpoints"), [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize(
    "spec",
    [
        {"dim": 1, "optimizer": shoal.FTRL(l1=0.1)},
        {"dim": 3, "optimizer": shoal.Adam(), "init": shoal.Uniform(0.1, seed=4)},
        {"dim": 2, "optimizer": shoal.Adagrad(lr=0.1), "dtype": "bfloat16", "seed": 9},
    ],
    ids=["ftrl", "adam", "adagrad in bfloat16"],
)
def test_bsp_has_the_bits_of_one_process(servers, endpoints, spec):
    with cluster(servers, endpoints, slots=16) as made, joined(made.address, 3) as stores:

        def work(store):
            table = store.table("t", **spec)
            for clock in range(4):
                batch = store.key_batch(batch_of(store.rank, clock))
                table.push_unique(batch, gradient(table.pull_unique(batch), store.rank, clock))
                store.tick()
            return read(table)

        for bits in everywhere(stores, work):
            same(bits, by_one_process(3, 4, spec))


def test_calls_come_after_calls_of_the_same_store_only(made):
    with joined(made.address, 2, consistency=shoal.BSP()) as stores:
        one, two = everywhere(stores, lambda store: store.table("t", **SGD))
        first = one.push(KEYS, ONES)
        with pytest.raises(ValueError, match="of the same store, got one of another store"):
            two.pull_async(KEYS, after=first)
        second = one.push(KEYS[:1], ONES[:1], after=[first, one.pull_async(KEYS)])
        everywhere(stores, lambda store: store.tick())
        assert one.pull(KEYS).ravel().tolist() == [-2.0, -1.0, -1.0, -1.0, -1.0]
        assert second.done()


def test_arrays_may_change_after_a_push_returned(made):
    with joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", dim=64, **SGD)
        keys = np.arange(20_000, dtype=np.uint64)
        batch = store.key_batch(keys)
        grads = np.ones((20_000, 64), np.float32)
        for push in (lambda: table.push(keys, grads), lambda: table.push_unique(batch, grads)):
            grads[:] = 1
            pushed = push()
            grads[:] = 77
            pushed.result()
        assert np.all(table.pull(keys) == -2)


def test_a_barrier_waits_for_all_workers_and_who_gave_up_goes_on_where_it_was(made):
    with joined(made.address, 2, consistency=shoal.ASP()) as stores:
        for _ in range(2):
            with pytest.raises(shoal.DeadlineExceededError, match="all workers at the barrier"):
                stores[0].barrier(timeout=0.05)
        stores[1].barrier()
        stores[0].barrier()
        order = []

        def work(store):
            for _ in range(3):
                order.append("before")
                store.barrier()
                order.append("behind")
                store.barrier()

        everywhere(stores, work)
        assert order == (["before"] * 2 + ["behind"] * 2) * 3


def test_a_push_pull_through_a_filter_is_done_without_a_wait(made):
    """Its pull begins after the push."""
    with joined(made.address, 1, consistency=shoal.ASP(), filters=shoal.Filters(key_caching=True)) as (store,):
        table = store.table("t", **SGD)
        future = table.push_pull(KEYS, ONES)
        deadline = time.monotonic() + TIMEOUT
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert future.done()
        assert future.result(0.0).ravel().tolist() == [-1] * 5


def test_workers_meet_by_name_and_know_who_takes_no_part(made):
    with joined(made.address, 3, consistency=shoal.ASP()) as stores:
        one, two, three = stores
        assert everywhere(stores, lambda store: store.meet("a")) == [frozenset()] * 3
        with pytest.raises(shoal.DeadlineExceededError, match="all workers at the b was not done"):
            one.meet("b", timeout=0.05)
        with pytest.raises(KeyboardInterrupt), three:
            raise KeyboardInterrupt
        two.close()
        assert one.meet("b") == {1, 2}
        eventually(lambda: one.member.lost_workers == {2})
        one.member.past_barriers = {"c": 1}
        assert [one.meet("c"), one.meet("c")] == [frozenset(), {1, 2}]
        assert one.member.barriers == {"a": 1, "b": 1, "c": 2}


def test_a_clock_counts_under_ssp_when_all_servers_have_confirmed_it(made):
    with joined(made.address, 1, consistency=shoal.SSP(staleness=3)) as (store,):
        table = store.table("t", **SGD)
        table.push(KEYS, ONES)
        store.tick()
        store.flush()
        assert store.counted_clock == store.clock == 1
        made.servers[1]._loops[0].stop()
        store.tick()
        store.tick()
        assert (store.counted_clock, store.clock) == (1, 3)
        store.channel.lose(1, "told so")
        with pytest.raises(shoal.ServerLostError, match="told so"):
            store.flush()
        assert (store.counted_clock, store.clock) == (1, 3)


@pytest.mark.slow
def test_a_barrier_counts_the_time_of_its_flush(made, monkeypatch):
    waited = []

    def answer(self, asked, kind, timeout, *, begun):
        waited.append((timeout, begun + timeout - time.monotonic()))
        return original(self, asked, kind, timeout, begun=begun)

    original = SchedulerClient.answer
    with joined(made.address, 2) as (one, two):
        with monkeypatch.context() as patched:
            patched.setattr(SchedulerClient, "answer", answer)
            patched.setattr(one, "flush", lambda seconds: time.sleep(seconds))
            with pytest.raises(shoal.DeadlineExceededError, match=r"at the barrier was not done in 0\.2 s"):
                one.barrier(timeout=0.2)
        assert waited[0][0] == 0.2
        assert waited[0][1] <= 0
        everywhere([one, two], lambda store: store.barrier())


def test_a_push_that_failed_unheard_is_told_by_the_next_tick_and_by_the_end(made):
    with joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", **SGD)
        store.channel.lose(0, "told so")
        table.push(KEYS, ONES)
        with pytest.raises(shoal.ServerLostError, match=r"push of table.*and 1 calls more"):
            store.tick()
        table.push(KEYS, ONES)
        with pytest.raises(shoal.ServerLostError, match="told so"):
            store.close()


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.ASP()], ids=str)
def test_many_pushes_without_a_tick_are_warned_of_once_under_bsp(made, caplog, consistency):
    keys, grads = np.arange(2, dtype=np.uint64), np.ones((2, 1), np.float32)
    with shoal.connect(made.address, threads=1, timeout=TIMEOUT, consistency=consistency) as store:
        table = store.table("a")
        for _ in range(30):
            for _ in range(99):
                table.push(keys, grads)
            store.tick()
        assert not caplog.records
        for _ in range(3000):
            table.push(keys, grads)
        store.table("b").push(keys, grads)
        store.tick()
    told = [record.getMessage() for record in caplog.records]
    said = "1,000 pushes to table 'a' in clock 30, which has not ended: under BSP none of them counts"
    if isinstance(consistency, shoal.ASP):
        assert not told
    else:
        assert [one[: len(said)] for one in told] == [said]


def test_a_store_that_is_closed_ends_the_clock_of_its_last_pushes(made, caplog):
    """Under BSP, the default: they count as those of its other clocks, with those of a worker that goes on."""
    with joined(made.address, 2) as (one, other):
        tables = [store.table("t", **SGD) for store in (one, other)]
        tables[0].push(KEYS, ONES)
        one.close()
        tables[1].push(KEYS, 2 * ONES)
        other.tick()
        assert np.all(tables[1].pull(KEYS) == -3)
    with joined(made.address, 1) as (store,):
        table = store.table("t", **SGD)
        table.push(KEYS, ONES)
        store.tick()
        table.push(KEYS, ONES)
    with joined(made.address, 1) as (store,):
        assert np.all(store.table("t", **SGD).pull(KEYS) == -5)
    assert not caplog.records


def test_pushes_of_a_store_that_is_closed_by_an_error_do_not_count(made):
    with pytest.raises(ZeroDivisionError), joined(made.address, 1) as (store,), store:  # noqa: PT012
        store.table("t", **SGD).push(KEYS, ONES).result()
        raise ZeroDivisionError
    with joined(made.address, 1) as (store,):
        assert np.all(store.table("t", **SGD).pull(KEYS) == 0)


@pytest.mark.slow
def test_a_store_that_is_closed_while_other_threads_call_it_is_closed_for_them(made):
    """Not fenced, and not refused as by another version: and the next store can join at once."""
    calls = {
        "pull": lambda store, table: table.pull(KEYS),
        "push": lambda store, table: table.push(KEYS, ONES).result(),
        "barrier": lambda store, table: store.barrier(),
        "status": lambda store, table: store.cluster(),
        "table": lambda store, table: store.table("t", **SGD),
        "metrics": lambda store, table: store.server_metrics(),
    }

    def repeat(call, store, table, begun):
        begun.release()
        while True:
            try:
                call(store, table)
            except shoal.ShoalError as error:
                return type(error), str(error)

    for _ in range(5):
        with joined(made.address, 1, consistency=shoal.ASP()) as (store,), ThreadPoolExecutor(len(calls)) as pool:
            table, begun = store.table("t", **SGD), threading.Semaphore(0)
            ends = [pool.submit(repeat, call, store, table, begun) for call in calls.values()]
            assert all(begun.acquire(timeout=TIMEOUT) for _ in calls)
            store.close()
            found = dict(zip(calls, [end.result(TIMEOUT) for end in ends], strict=True))
        assert {name: kind for name, (kind, _) in found.items() if kind is not shoal.errors.ClosedError} == {}, found


def test_calls_that_a_leaving_worker_no_longer_waits_for_are_refused_without_a_word(made, caplog):
    with joined(made.address, 2) as (store, _), pytest.raises(ZeroDivisionError):  # noqa: PT012
        table = store.table("t", **SGD)
        store.tick()
        pending = table.pull_async(KEYS)  # until the other worker ends its clock
        call = store._scheduler.call

        def leave_and_be_refused(*request):
            store.channel.lose(0, "fenced")
            return call(*request)

        store._scheduler.call = leave_and_be_refused
        with store:
            raise ZeroDivisionError
    with pytest.raises(shoal.errors.ClosedError, match="this store was closed"):
        pending.result()
    assert not caplog.records


# ---- tables and jobs -------------------------------------------------------------------------------------------------


def test_workers_find_each_others_tables_and_must_mean_the_same(made):
    with joined(made.address, 2) as stores:
        stores[0].table("t", dim=3, **SGD)
        assert stores[1].table("t", dim=3, **SGD).dim == 3
        with pytest.raises(ValueError, match="dim 3 instead of 4"):
            stores[1].table("t", dim=4, **SGD)
        stores[0].table("u", dim=1, **SGD)
        with pytest.raises(ValueError, match="'u' exists with dim 1 instead of 2"):
            stores[1].table("u", dim=2, **SGD)
        assert set(stores[1].tables) == {"t"}


def test_tables_outlive_a_job_and_clocks_do_not(made):
    with joined(made.address, 1) as (store,):
        store.table("t", **SGD).push(KEYS, ONES)
        store.tick()
        assert store.clock == 1
    with joined(made.address, 2, consistency=shoal.ASP()) as stores:
        assert [store.clock for store in stores] == [0, 0]
        for table in everywhere(stores, lambda store: store.table("t", **SGD)):
            assert np.all(table.pull(KEYS) == -1)


@pytest.mark.slow
def test_nobody_there_and_somebody_missing_are_told_apart(made):
    with joined(made.address, 1):
        pass  # so all servers are there
    with pytest.raises(shoal.DeadlineExceededError, match="1 of 2 workers"):
        shoal.connect(made.address, workers=2, timeout=1.5)
    with pytest.raises(shoal.NotConnectedError, match="no scheduler answers"):
        shoal.connect("tcp://127.0.0.1:9", timeout=0.3)
    with pytest.raises(shoal.NotConnectedError, match=r"the name 'no-such-host.invalid' cannot be resolved .*; check"):
        shoal.connect("tcp://no-such-host.invalid:5570", timeout=0.3)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"consistency": "bps"}, ValueError, "write bsp, bsp:mean, ssp:N"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "1"}, ValueError, "timeout"),
        ({"threads": 0}, ValueError, "threads"),
        ({"workers": 0}, ValueError, "workers"),
        ({"rank": 3, "workers": 2}, ValueError, "rank"),
    ],
    ids=str,
)
def test_what_connect_cannot_use_is_refused(made, how, kind, words):
    with pytest.raises(kind, match=words):
        shoal.connect(made.address, **{"timeout": TIMEOUT, **how})


# ---- workers that die ------------------------------------------------------------------------------------------------


@pytest.fixture
def team():
    """Two workers of a job, how the second dies without a word, and how to get another in."""
    with cluster(2, 1, slots=16) as made, contextlib.ExitStack() as stack:

        def connect(rank):
            return shoal.connect(made.address, workers=2, rank=rank, threads=1, timeout=TIMEOUT)

        with ThreadPoolExecutor(2) as pool:
            stores = list(pool.map(connect, range(2)))
        for store in stores:
            stack.callback(store._close, failed=True)

        def die():
            stores[1]._scheduler.close()
            declare_dead(made.scheduler, "worker", 1)

        yield (*stores, die, lambda rank: stack.enter_context(connect(rank)))


def test_a_worker_that_died_holds_nobody_back_and_another_takes_its_place(team):
    one, two, die, connect = team
    tables = [store.table("t", **SGD) for store in (one, two)]
    for _ in range(3):
        for store, table in zip((one, two), tables, strict=True):
            table.push(KEYS, ONES)
            store.tick()
    assert np.all(tables[0].pull(KEYS) == -6)
    tables[1].push(KEYS, ONES).result()  # of a clock that it does not end
    tables[0].push(KEYS, ONES)
    one.tick()
    waiting = tables[0].pull_async(KEYS)
    die()
    assert np.all(waiting.result() == -7)  # what it had not ended is dropped
    new = connect(1)
    assert (new.rank, new.clock, new.counted_clock) == (1, 4, 4)
    table = new.table("t", **SGD)
    assert np.all(table.pull(KEYS) == -7)
    for store, each in ((one, tables[0]), (new, table)):
        each.push(KEYS, ONES)
        store.tick()
    assert np.all(tables[0].pull(KEYS) == -9)
    assert np.all(table.pull(KEYS) == -9)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(one.barrier)
        new.barrier()
        there.result(TIMEOUT)


def test_a_worker_that_was_taken_for_dead_changes_nothing_any_more(team):
    one, two, die, connect = team
    table, zombie = one.table("t", **SGD), two.table("t", **SGD)
    die()
    connect(1)
    with pytest.raises(shoal.errors.FencedError, match="worker 1"):
        zombie.push(KEYS, ONES).result()
    with pytest.raises(shoal.errors.FencedError):
        zombie.pull(KEYS)
    assert len(table) == 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def train(store, spec, clocks=4):
    table = store.table("t", **spec)
    for clock in range(clocks):
        batch = store.key_batch(batch_of(0, clock))
        table.push_unique(batch, gradient(table.pull_unique(batch), 0, clock))
        store.tick()
    return table


ADAM = {"dim": 3, "optimizer": shoal.Adam(), "init": shoal.Uniform(0.1, seed=4)}


@pytest.mark.slow
@pytest.mark.parametrize("slots", [4, 16, 256])
def test_a_checkpoint_goes_from_one_process_to_a_cluster_and_back(made, slots, tmp_path):
    with shoal.local(slots=slots) as store:
        table = train(store, ADAM)
        store.table("empty")
        expected = read(table)
        store.save(tmp_path / "one")
    with joined(made.address, 1) as (store,):
        store.load(tmp_path / "one")
        assert set(store.tables) == {"t", "empty"}
        assert len(store.tables["empty"]) == 0
        same(read(store.tables["t"]), expected)
        store.save(tmp_path / "two")
        store.tables["t"].push(KEYS, np.ones((5, 3), np.float32))
        store.tick()
        store.load(tmp_path / "one")
        same(read(store.tables["t"]), expected)
    with shoal.local() as store:
        store.load(tmp_path / "two")
        same(read(store.tables["t"]), expected)
        # Both go on alike.
        here = read(train(store, ADAM, clocks=2))
    with joined(made.address, 1) as (store,):
        same(read(train(store, ADAM, clocks=2)), here)


def test_a_section_that_is_too_long_for_a_message_is_cut(made, tmp_path, monkeypatch):
    from shoal.cluster.worker import remote_load

    monkeypatch.setattr(remote_load, "_MAX_SECTION_BYTES", 1000)
    with shoal.local(slots=2) as store:
        expected = read(train(store, ADAM))
        store.save(tmp_path)
    with joined(made.address, 1, shared_storage=False) as (store,):
        store.load(tmp_path)
        same(read(store.tables["t"]), expected)


@pytest.mark.slow
def test_all_workers_load_and_one_saves(made, tmp_path):
    with shoal.local() as store:
        expected = read(train(store, ADAM))
        store.save(tmp_path / "one")
    with joined(made.address, 3) as stores:

        def work(store):
            store.load(tmp_path / "one")
            if store.rank == 1:
                store.save(tmp_path / "two")
            return read(train(store, ADAM, clocks=0))

        for bits in everywhere(stores, work):
            same(bits, expected)
    assert (tmp_path / "two" / "manifest.json").exists()


def test_a_load_that_fails_fails_in_every_worker_and_changes_nothing(made, tmp_path):
    with shoal.local() as store:
        train(store, ADAM)
        store.save(tmp_path)
    (slots,) = tmp_path.glob("*.slots")
    damaged = bytearray(slots.read_bytes())
    damaged[-5] ^= 1
    slots.write_bytes(damaged)
    with joined(made.address, 2) as stores:

        def work(store):
            with pytest.raises(shoal.ShoalError) as caught:
                store.load(tmp_path)
            return type(caught.value).__name__, len(store.table("t", **ADAM))

        assert everywhere(stores, work) == [("CorruptionError", 0), ("ShoalError", 0)]
        assert everywhere(stores, lambda store: store.table("t", **ADAM).pull(KEYS).shape) == [(5, 3)] * 2


@pytest.mark.slow
def test_a_model_trains_saves_and_loads(made, tmp_path):
    path = tmp_path / "data.libsvm"
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(2000):
        keys = rng.integers(0, 50, 5)
        lines.append(f"{int(keys.min() < 5)} " + " ".join(f"{key}:1" for key in sorted(set(keys.tolist()))))
    path.write_text("\n".join(lines) + "\n")
    optimizer = shoal.FTRL(alpha=0.3, l1=0.01)

    def bits(store):
        with shoal.LogisticRegression(optimizer=optimizer, store=store) as model:
            model.fit(shoal.read_libsvm(path, batch_size=100), progress=False)
            model.save(tmp_path / type(store).__name__)
            return read(model.table)

    with shoal.local() as store:
        expected = bits(store)
    with joined(made.address, 1, consistency=shoal.BSP()) as (store,):  # all arcs number their steps equally
        same(bits(store), expected)
    with cluster(1, 3) as other, joined(other.address, 1) as (store,):
        model = shoal.LogisticRegression.load(tmp_path / "ClusterStore", store=store)
        same(read(model.table), expected)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_is_told_by_every_call_and_at_once(made):
    with cluster(2, 1) as made, contextlib.ExitStack() as stack:
        (store,) = stack.enter_context(joined(made.address, 1, consistency=shoal.ASP()))
        table = store.table("t", **SGD)
        keys = np.arange(1000, dtype=np.uint64)
        table.push(keys, np.ones(1000, np.float32)).result()
        made.servers[1].close()
        declare_dead(made.scheduler, "server", 1)
        calls = (
            lambda: table.pull(keys),
            lambda: table.push(keys, np.ones(1000, np.float32)).result(),
            lambda: len(table),
            lambda: store.save("nowhere"),
        )
        for call in calls:
            with pytest.raises(shoal.ServerLostError, match="server 1"):
                call()


def test_the_scheduler_that_is_gone_is_told_when_something_is_asked_of_it(made):
    with joined(made.address, 1):
        pass  # so all servers are there
    with joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", **SGD)
        store._timeout = 1.0
        made.scheduler.stop()

        def barriers():
            while True:  # what comes before it has stopped may still be answered
                store.barrier()

        for call in (barriers, lambda: store.table("another"), store.tick, lambda: table.pull(KEYS)):
            with pytest.raises((shoal.NotConnectedError, shoal.DeadlineExceededError)):
                call()


FORKED = {
    "pull": lambda store, table, folder: table.pull(KEYS),
    "pull_async": lambda store, table, folder: table.pull_async(KEYS).result(),
    "push": lambda store, table, folder: table.push(KEYS, ONES),
    "push_pull": lambda store, table, folder: table.push_pull(KEYS, ONES),
    "assign": lambda store, table, folder: table.assign(KEYS, ONES),
    "erase": lambda store, table, folder: table.erase(KEYS),
    "contains": lambda store, table, folder: table.contains(KEYS),
    "state": lambda store, table, folder: table.state(KEYS),
    "items": lambda store, table, folder: list(table.items()),
    "len": lambda store, table, folder: len(table),
    "stats": lambda store, table, folder: table.stats(),
    "step": lambda store, table, folder: table.stats().step,
    "sum": lambda store, table, folder: table.sum(),
    "tick": lambda store, table, folder: store.tick(),
    "barrier": lambda store, table, folder: store.barrier(),
    "metrics": lambda store, table, folder: store.metrics(),
    "table": lambda store, table, folder: store.table("t", **SGD),
    "a new table": lambda store, table, folder: store.table("new"),
    "save": lambda store, table, folder: store.save(folder / "child"),
    "load": lambda store, table, folder: store.load(folder / "parent"),
}


@pytest.mark.slow
def test_the_parents_store_says_in_a_forked_child_whose_it_is(made, tmp_path):
    with joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", **SGD)
        table.push(KEYS, ONES).result()
        store.save(tmp_path / "parent")

        def work():
            for name, call in FORKED.items():
                print(name)
                with pytest.raises(shoal.errors.WrongProcessError, match="fork"):
                    call(store, table, tmp_path)
            store.close()
            gc.collect()
            return "fine"

        assert in_child(work) == "fine"
        assert np.all(table.pull(KEYS) == -1)
        store.barrier()


@pytest.mark.slow
def test_a_forked_child_is_a_worker_of_its_own_if_it_connects(made):
    def work():
        with shoal.connect(made.address, workers=2, rank=1, consistency=shoal.ASP(), timeout=TIMEOUT) as store:
            store.table("t", **SGD).push(KEYS, ONES).result()
            store.barrier()
        return "pushed"

    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(in_child, work)
        with shoal.connect(made.address, workers=2, rank=0, consistency=shoal.ASP(), timeout=TIMEOUT) as store:
            table = store.table("t", **SGD)
            store.barrier()
            assert np.all(table.pull(KEYS) == -1)
        assert child.result(TIMEOUT) == "pushed"


SCRIPT = """
import sys
import numpy as np, shoal
assert "zmq" not in sys.modules, "import shoal needs no ZeroMQ"
store = shoal.connect(sys.argv[1], consistency=shoal.ASP(), timeout=120)
table = store.table("t")
table.push(np.arange(1000, dtype=np.uint64), np.ones(1000, np.float32))
print("ends")
"""


@pytest.mark.slow
def test_a_process_that_forgets_its_store_ends_at_once_with_a_word_about_its_pushes_at_most(made):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, made.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ends\n")
    assert not done.stderr or re.fullmatch(r"the program has ended before .* pushes of it are lost: .*\n", done.stderr)


# ---- rows for others -------------------------------------------------------------------------------------------------


def test_exports_of_a_cluster_and_deltas_of_them_are_those_of_a_local_store_tracked_or_not(made, tmp_path):
    def run(store, folder):
        table = store.table("t", **SGD)
        keys = np.arange(500, dtype=np.uint64)
        table.push(keys, -np.ones(500, np.float32)).result()
        store.export(folder / "0", track=True)
        table.push(keys[:7], np.ones(7, np.float32)).result()
        table.erase(keys[7:9])
        assert store.export(folder / "1", since=folder / "0").tables["t"].rows == 9
        assert store.export(folder / "2", since=folder / "1").tables["t"].rows == 0
        return [path.read_bytes() for k in range(3) for path in (folder / str(k)).glob("*.frozen")]

    with shoal.local(slots=16) as local, joined(made.address, 1, consistency=shoal.ASP()) as stores:
        assert run(stores[0], tmp_path / "cluster") == run(local, tmp_path / "local")


def test_parquet_of_a_clusters_table_with_rules_loads_as_sighted_now(made, tmp_path):
    exchange = pytest.importorskip("shoal.tools.convert")
    pytest.importorskip("pyarrow.parquet")
    with joined(made.address, 1, consistency=shoal.ASP()) as stores:
        table = stores[0].table("t", expire=shoal.TimeToLive(2), **SGD)
        table.push(KEYS, ONES).result()
        assert exchange.write_parquet(table, tmp_path / "t.parquet") == 5
        weights = table.pull(KEYS)
    with shoal.local(slots=4) as store:
        store.tick()
        again = exchange.load_parquet(store, tmp_path / "t.parquet")
        np.testing.assert_array_equal(again.pull(KEYS), weights)
        store.sweep()
        assert len(again) == 5
        for _ in range(3):
            store.tick()
        store.sweep()
        assert len(again) == 0


def test_a_worker_follows_the_map_that_the_scheduler_announces():
    with cluster(2) as made, joined(made.address, 1) as (store,):
        table = store.table("t", **SGD)
        table.push(KEYS, ONES)
        newer = msgspec.structs.replace(store.channel.map, epoch=2)
        store._on_event(MapChanged(newer))
        assert store.channel.map is newer
        store.tick()
        assert len(table.pull(KEYS)) == len(KEYS)
