"""A server dies in a cluster with copies: workers go on, and nothing is lost or counted twice."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, Server, cluster
from relay import has_copies
from shoal import checkpoint
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.protocol.curve import make_keys
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.server.server import Server as Real
from shoal.config import ServerConfig
from stores import joined
from tiers import long_after

KEYS = np.arange(2000, dtype=np.uint64)
STEPS = 60


def train(store: shoal.Store, table: shoal.Table, reached: threading.Semaphore) -> np.ndarray:
    """Push whole numbers, and return their sums: the weights that there must be."""
    rng = np.random.default_rng(3)
    sums = np.zeros(len(KEYS), np.float32)
    for step in range(STEPS):
        some = np.sort(rng.choice(KEYS, 700, replace=False))
        numbers = rng.integers(1, 5, 700).astype(np.float32)
        sums[some.astype(np.int64)] += numbers
        table.push(some, -numbers)
        if step % 4 == 0:
            table.pull(some)
        store.tick()
        reached.release()
    return sums


@pytest.mark.parametrize("endpoints", [1, 2])
@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.ASP()], ids=["bsp", "asp"])
def test_no_push_is_lost_or_applied_twice_when_a_server_dies(consistency, endpoints):
    with cluster(4, endpoints, slots=64, replicas=1) as made, joined(made.address, 1, consistency=consistency) as one:
        (store,) = one
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        sums = []
        reached = threading.Semaphore(0)
        training = threading.Thread(target=lambda: sums.append(train(store, table, reached)))
        training.start()
        for _ in range(STEPS // 2):
            assert reached.acquire(timeout=TIMEOUT)
        made.servers[1].close()  # it answers nothing more, while pushes are under way
        declare_dead(made.scheduler, "server", 1)
        training.join(TIMEOUT)
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), sums[0])
        assert 1 not in {endpoint.server for endpoint in store.channel.map.endpoints}
        assert store.cluster()["failovers"][0]["server"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.SSP(8), shoal.ASP()], ids=["ssp", "asp"])
def test_a_worker_that_makes_the_steps_itself_sees_its_pushes_when_a_server_dies(consistency):
    cache = shoal.Cache(rows=1000, staleness=4)
    with (
        cluster(4, 1, slots=64, replicas=1) as made,
        joined(made.address, 1, consistency=consistency, cache=cache) as (store,),
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        rng = np.random.default_rng(4)
        sums = np.zeros(len(KEYS), np.float32)
        for step in range(STEPS):
            if step in (STEPS // 3, STEPS // 2):
                dies = step % 3 + 1
                made.servers[dies].close()
                declare_dead(made.scheduler, "server", dies)
            some = np.sort(rng.choice(KEYS, 700, replace=False))
            np.testing.assert_array_equal(table.pull(some).ravel(), sums[some.astype(np.int64)])
            numbers = rng.integers(1, 5, 700).astype(np.float32)
            sums[some.astype(np.int64)] += numbers
            table.push(some, -numbers)
            store.tick()
        counts = store.cache_metrics()["t"]
        assert counts["added"] > 0
        assert counts["passed"] > 0  # rows without room
        store.barrier()
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), sums)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "read"])
def test_who_connects_while_a_server_dies_waits_until_the_others_have_its_slots(mode):
    with cluster(4, 1, slots=64, replicas=1) as made:
        with joined(made.address, 1, consistency=shoal.ASP()) as (store,):
            store.table("t", optimizer=shoal.SGD(lr=1.0)).push(KEYS, np.ones(len(KEYS), np.float32)).result()
            eventually(lambda: copies(made.scheduler.membership.map) == len(store.channel.map.arcs))
        made.servers[1].close()
        verdict = threading.Timer(0.5, declare_dead, (made.scheduler, "server", 1))
        verdict.start()
        try:
            arguments = {"workers": 1, "consistency": shoal.ASP()} if mode == "train" else {}
            with shoal.connect(made.address, mode=mode, timeout=TIMEOUT, **arguments) as store:
                table = store.table("t") if mode == "read" else store.table("t", optimizer=shoal.SGD(lr=1.0))
                np.testing.assert_array_equal(table.pull(KEYS).ravel(), np.full(len(KEYS), -1.0, np.float32))
                assert 1 not in {endpoint.server for endpoint in store.channel.map.endpoints}
        finally:
            verdict.join()


@pytest.mark.slow
def test_lost_copies_are_made_again_so_that_another_server_may_die():
    with cluster(3, 1, slots=64, replicas=1) as made, joined(made.address, 1) as (store,):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        for step, dies in enumerate((0, 1)):
            table.push(KEYS, -np.ones(len(KEYS), np.float32))
            store.tick()
            made.servers[dies].close()
            declare_dead(made.scheduler, "server", dies)
            np.testing.assert_array_equal(table.pull(KEYS).ravel(), np.full(len(KEYS), step + 1.0))
            if dies == 0:
                eventually(lambda: copies(made.scheduler.membership.map) == len(store.channel.map.arcs))
        assert [one.server for one in store.channel.map.endpoints] == [2]


def test_a_store_drains_a_server_and_evens_out_the_slots_of_the_others():
    with cluster(3, 1, slots=64, replicas=1) as made, joined(made.address, 1) as (store,):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        table.push(KEYS, -np.ones(len(KEYS), np.float32))
        store.tick()
        assert store.drain(2) == "server 2 ends when other servers have all of its slots"
        eventually(lambda: {arc["server"] for arc in store.cluster()["arcs"]} == {0, 1})
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), np.ones(len(KEYS)))
        with pytest.raises(ValueError, match="the cluster has no server 7"):
            store.drain(7)
        with pytest.raises(ValueError, match="replicas=1 needs 2: start another server first"):
            store.drain(1)
        assert store.rebalance() == "slots move until all endpoints have equally many"
        with pytest.raises(ValueError, match="-1"):
            store.drain(-1)


def copies(map: ClusterMap) -> int:
    """Return how many arcs have a copy in sync."""
    return len({arc for stream in map.streams for arc in stream.arcs})


def served(map: ClusterMap, rank: int) -> int:
    """Return how many arcs a server serves."""
    return sum(map.endpoint(arc.primary).server == rank for arc in map.arcs)


def is_settled(made: Cluster) -> bool:
    """Whether all arcs have their copies and nothing moves: a save of arcs that move fails."""
    map = made.scheduler.membership.map
    return copies(map) == len(map.arcs) and not any(stream.arriving for stream in map.streams)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_copies_a_dead_server_breaks_the_cluster():
    with cluster(2, 1, slots=64, replicas=0) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        made.servers[1].close()
        declare_dead(made.scheduler, "server", 1)
        with pytest.raises(shoal.ServerLostError, match="server 1"):
            table.pull(KEYS)


def test_a_save_after_a_failover_has_the_rows_of_the_dead_server(tmp_path):
    with cluster(3, 1, slots=64, replicas=1) as made, joined(made.address, 1) as (store,):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        table.push(KEYS, -np.ones(len(KEYS), np.float32))
        store.tick()
        table.pull(KEYS)
        made.servers[0].close()
        declare_dead(made.scheduler, "server", 0)
        store.save(tmp_path / "saved")
    with shoal.local(slots=64) as store:
        store.load(tmp_path / "saved")
        np.testing.assert_array_equal(
            store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros()).pull(KEYS).ravel(), np.ones(len(KEYS))
        )


@pytest.mark.slow
@pytest.mark.parametrize("event", ["death", "move"])
def test_deltas_of_a_checkpoint_go_on_after_a_failover_and_after_moves(tmp_path, event):
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(cluster(3, 1, slots=64, replicas=1))
        (store,) = stack.enter_context(joined(made.address, 1))
        table = store.table("t", optimizer=shoal.Adagrad(lr=0.1), init=shoal.Zeros())

        def push(first: int, end: int) -> None:
            table.push(KEYS[first:end], np.linspace(-1, 1, end - first, dtype=np.float32))
            store.tick()

        push(0, len(KEYS))
        store.save(tmp_path / "0", track=True)
        push(0, 20)
        if event == "death":
            made.servers[0].close()
            declare_dead(made.scheduler, "server", 0)
        else:
            stack.enter_context(contextlib.closing(Server(made.address, 1, None)))
            eventually(lambda: served(store.channel.map, 3) == len(store.channel.map.arcs) // 4 and is_settled(made))
        push(1000, 1020)
        table.erase(KEYS[1500:1505])
        store.save(tmp_path / "1", since=tmp_path / "0")
        push(1990, 2000)
        store.save(tmp_path / "2", since=tmp_path / "1")
        expected = table.pull(KEYS)
    assert checkpoint.read_manifest(tmp_path / "1").tables[0].rows < 1500
    with shoal.local(slots=64) as store:
        store.load(tmp_path / "2")
        table = store.table("t", optimizer=shoal.Adagrad(lr=0.1), init=shoal.Zeros())
        np.testing.assert_array_equal(table.pull(KEYS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 1 << 20], ids=["unlimited", "limited"])
def test_a_server_that_joins_late_takes_over_the_memory_limits_of_the_slots(memory):
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(cluster(2, 1, [memory] * 2, slots=64))
        (store,) = stack.enter_context(joined(made.address, 1))
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        table.push(KEYS, -np.ones(len(KEYS), np.float32))
        store.tick()
        late = stack.enter_context(Real(ServerConfig(scheduler=made.address, memory=1 << 30, timeout=TIMEOUT)))
        running = threading.Thread(target=late.run)
        running.start()
        stack.callback(running.join, TIMEOUT)
        stack.callback(late.stop)
        eventually(lambda: served(store.channel.map, 2) > 1)
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), np.ones(len(KEYS)))
        assert running.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consistency", "number"),
    long_after(
        2,
        [
            (shoal.BSP(), signal.SIGKILL),
            (shoal.ASP(), signal.SIGSTOP),
            (shoal.BSP(), signal.SIGSTOP),
            (shoal.ASP(), signal.SIGKILL),
        ],
    ),
    ids=["bsp-killed", "asp-stopped", "bsp-stopped", "asp-killed"],
)
def test_no_push_is_lost_or_applied_twice_when_the_process_of_a_server_is(number, consistency):
    """Under BSP an optimizer with state has the bits of a local store; under ASP sums of whole numbers are exact."""
    is_bulk = isinstance(consistency, shoal.BSP)
    how = {"optimizer": shoal.Adagrad(lr=0.1) if is_bulk else shoal.SGD(lr=1.0), "init": shoal.Zeros()}
    with shoal.local() as store:
        table = store.table("t", **how)
        train(store, table, threading.Semaphore(0))
        expected = table.pull(KEYS)
    with running(3, replicas=1, timeout=TIMEOUT) as made:
        with shoal.connect(made.address, timeout=TIMEOUT, consistency=consistency) as store:
            table, reached = store.table("t", **how), threading.Semaphore(0)
            training = threading.Thread(target=train, args=(store, table, reached))
            training.start()
            for _ in range(STEPS // 2):
                assert reached.acquire(timeout=TIMEOUT)
            process = made.servers[1].process
            eventually(lambda: has_copies(store.cluster()))
            process.send_signal(number)
            training.join(TIMEOUT)
            assert not training.is_alive()
            np.testing.assert_array_equal(table.pull(KEYS), expected)
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [3, 4])
def test_two_copies_survive_two_servers_that_are_killed_at_once(servers):
    with (
        running(servers, replicas=2, timeout=TIMEOUT) as made,
        shoal.connect(made.address, timeout=TIMEOUT, consistency=shoal.ASP()) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        sums, reached = [], threading.Semaphore(0)
        training = threading.Thread(target=lambda: sums.append(train(store, table, reached)))
        training.start()
        rng = random.Random()
        for _ in range(rng.randrange(10, STEPS - 10)):
            assert reached.acquire(timeout=TIMEOUT)
        eventually(lambda: has_copies(store.cluster()))
        for victim in rng.sample(made.servers, 2):  # while pushes are under way
            victim.process.kill()
        training.join(TIMEOUT)
        assert not training.is_alive()
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), sums[0])
        assert len(store.cluster()["failovers"]) == 2


@pytest.mark.slow
def test_streams_between_servers_are_encrypted_with_the_keys_of_servers(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys)
    with (
        running(2, replicas=1, timeout=TIMEOUT, curve=str(keys)) as made,
        shoal.connect(made.address, timeout=TIMEOUT, curve=keys) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        table.push(KEYS, -np.ones(len(KEYS), np.float32))
        store.tick()
        table.pull(KEYS)
        eventually(lambda: has_copies(store.cluster()))
        made.servers[1].process.kill()
        np.testing.assert_array_equal(table.pull(KEYS).ravel(), np.ones(len(KEYS)))
