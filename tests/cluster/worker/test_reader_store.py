"""Readers: they see what servers have executed, change nothing, and hold nobody up."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead, scheduler
from cluster_standin import Server, cluster
from shoal.errors import DeadlineExceededError, FencedError, ServerLostError
from stores import joined

KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((500, 1), np.float32)
SGD = shoal.SGD(lr=1.0)


def reader(made, **how):
    return shoal.connect(made.address, mode="read", **{"timeout": TIMEOUT, "threads": 1} | how)


def test_a_reader_sees_the_clocks_that_all_workers_have_ended():
    with cluster(2, 2, slots=16) as made, reader(made) as live, joined(made.address, 2) as (one, two):
        with ThreadPoolExecutor(2) as pool:
            tables = list(pool.map(lambda store: store.table("t", optimizer=SGD), (one, two)))
        table = live.table("t")
        assert (table.spec, live.rank, live.num_workers, live.clock) == (tables[0].spec, 0, 1, 0)
        tables[0].push(KEYS, -ONES).result()
        one.tick()
        assert not table.pull(KEYS).any()  # at once: two has not ended the clock
        assert len(table) == 0
        two.tick()
        np.testing.assert_array_equal(tables[1].pull(KEYS), ONES)
        np.testing.assert_array_equal(table.pull(KEYS), ONES)
        np.testing.assert_array_equal(table.pull_async(KEYS[::-1]).result(), ONES)
        assert table.digest() == tables[0].digest()
        assert (len(table), table.sum().tolist(), table.norm(1), table.count()) == (500, [500.0], 500.0, 500)
        assert table.contains(np.array([3, 500], np.uint64)).tolist() == [True, False]
        assert sum(len(keys) for keys, _ in table.items()) == table.stats().rows == 500
        assert live.cluster()["job"]["size"] == 2


def test_a_reader_reads_before_during_and_after_jobs_and_workers_come_and_go():
    with cluster(2, 1, slots=16) as made, reader(made) as live:
        with pytest.raises(ValueError, match="no table 't': its tables are none yet; a worker makes them"):
            live.table("t")
        for job in (1, 2):
            with joined(made.address, 1) as (store,):
                table = store.table("t", optimizer=SGD)
                dense = store.dense("d", (3,), optimizer=shoal.SGD(lr=1.0), block=2)
                dense.push(-np.ones(3, np.float32))
                table.push(KEYS, -ONES)
                store.tick()
                table.pull(KEYS)
                np.testing.assert_array_equal(live.table("t").pull(KEYS), job * ONES)
                assert live.dense("d", 3).pull().tolist() == [job] * 3
        np.testing.assert_array_equal(live.table("t").pull(KEYS), 2 * ONES)
        assert live.table("t", optimizer=SGD) is live.table("t")
        with pytest.raises(ValueError, match="exists with dim 1 instead of 2"):
            live.table("t", dim=2, optimizer=SGD)


def test_a_reader_changes_nothing(tmp_path):
    with cluster(1, 1, slots=16) as made, joined(made.address, 1) as (store,), reader(made) as live:
        table = store.table("t", optimizer=SGD, expire=shoal.MinNorm(0.5))
        table.push(KEYS, -ONES)
        store.tick()
        digest = table.digest()
        rows = live.table("t")
        assert live.sweep(dry_run=True).rows_dropped == 0
        refused = [
            lambda: rows.push(KEYS, ONES),
            lambda: rows.push_pull(KEYS, ONES),
            lambda: rows.push_unique(live.key_batch(KEYS), ONES),
            lambda: rows.push_per_key(live.key_batch(KEYS), ONES),
            lambda: rows.assign(KEYS, ONES),
            lambda: rows.erase(KEYS),
            lambda: rows.decay(0.5),
            lambda: rows.shrink(0.5),
            lambda: live.sweep(),
            lambda: live.tick(),
            lambda: live.barrier(),
            lambda: live.meet("a"),
            lambda: live.save(tmp_path / "save"),
            lambda: live.export(tmp_path / "export"),
            lambda: live.check_storage(tmp_path),
            lambda: list(live.splits(shoal.read_libsvm([__file__]))),
        ]
        for call in refused:
            with pytest.raises(ValueError, match=r"connected with mode='read' reads tables and changes nothing"):
                call()
        store.save(tmp_path / "saved")
        with pytest.raises(ValueError, match="changes nothing"):
            live.load(tmp_path / "saved")
        assert table.digest() == digest
        assert not (tmp_path / "save").exists()
        assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 1},
        {"rank": 0},
        {"filters": shoal.Filters()},
        {"consistency": shoal.ASP()},
        {"shared_storage": False},
    ],
    ids=str,
)
def test_a_reader_has_no_settings_of_a_worker(how):
    with pytest.raises(ValueError, match=f"{next(iter(how))} describes a worker, and mode='read' connects a reader"):
        shoal.connect("tcp://127.0.0.1:1", mode="read", **how)
    with pytest.raises(ValueError, match="mode is 'train' or 'read', got 'write'"):
        shoal.connect("tcp://127.0.0.1:1", mode="write")


def test_a_reader_follows_a_failover_while_it_reads():
    with cluster(3, 1, slots=64, replicas=1) as made, joined(made.address, 1) as (store,), reader(made) as live:
        table = store.table("t", optimizer=SGD)
        table.push(KEYS, -ONES)
        store.tick()
        table.pull(KEYS)
        rows, seen, stop = live.table("t"), [], threading.Event()

        def read():
            while not stop.is_set():
                seen.append(rows.pull(KEYS))

        reading = threading.Thread(target=read)
        reading.start()
        made.servers[1].close()
        declare_dead(made.scheduler, "server", 1)
        table.push(KEYS, -ONES)
        store.tick()
        table.pull(KEYS)
        np.testing.assert_array_equal(rows.pull(KEYS), 2 * ONES)
        stop.set()
        reading.join(TIMEOUT)
        assert {float(value) for one in seen for value in np.unique(one)} <= {1.0, 2.0}
        assert 1 not in {endpoint.server for endpoint in live.channel.map.endpoints}


@pytest.mark.slow
def test_a_reader_waits_for_the_servers_and_says_how_many_have_joined():
    with scheduler(1) as alone:
        with pytest.raises(DeadlineExceededError, match="0 of 1 servers have joined"):
            reader(alone, timeout=0.3)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(reader, alone)
            time.sleep(0.1)
            with contextlib.closing(Server(alone.address, 1, None)), found.result(TIMEOUT) as live:
                assert [server["rank"] for server in live.cluster()["servers"]] == [0]


@pytest.mark.slow
def test_a_lost_server_and_a_reader_that_was_declared_dead_are_errors_at_once():
    with cluster(2, 1, slots=16, heartbeat=2.0) as made, joined(made.address, 1) as (store,), reader(made) as live:
        table = store.table("t", optimizer=SGD)
        table.push(KEYS, -ONES)
        store.tick()
        table.pull(KEYS)  # the clock has ended: nothing is left for the end of the block
        with reader(made) as silent:
            rows = silent.table("t")
            known = made.scheduler.membership._peers.known
            peer = [one for one in known.values() if one.role == "reader"][-1]
            deadline = time.monotonic() + TIMEOUT
            while peer.sender in known:
                assert time.monotonic() < deadline
                peer.link.last_heard = -math.inf
                made.scheduler._wake()
                time.sleep(0.01)
            while silent._scheduler.fault is None:  # its next heartbeat is refused
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(FencedError, match=r"a reader .* was declared dead"):
                rows.pull(KEYS)
        rows = live.table("t")
        made.servers[1].close()
        declare_dead(made.scheduler, "server", 1)
        with pytest.raises(ServerLostError, match="server 1"):
            rows.pull(KEYS)
        with pytest.raises(ServerLostError):
            reader(made)
