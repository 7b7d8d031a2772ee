"""What ends a cluster, and what ends one of its processes alone: signals, and `shoal cluster ADDRESS stop`."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, FakeServer, scheduler
from processes import Processes, processes
from shoal.cli import main
from shoal.cluster.protocol.messages import JobConsistency, Join, Leave, LeaveReply
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.server.server import Server
from shoal.errors import NotConnectedError

KEYS = np.arange(300, dtype=np.uint64)
ONES = np.ones((300, 1), np.float32)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# --- in one process -----------------------------------------------------------------------------------------------


def test_a_scheduler_that_leaves_can_come_back_and_its_peers_wait(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with scheduler(1, journal=tmp_path) as one:
        server = FakeServer(one.address)
        client = SchedulerClient(one.address, "worker")
        joined = client.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        one.leave()
    assert "the scheduler ends, and its cluster continues: start it again with its journal within 600 s" in caplog.text
    with server, client, scheduler(1, journal=tmp_path) as anew:
        assert anew.address == one.address
        assert anew.membership.state.cluster == one.membership.state.cluster
        assert client.call(GetStatus(), StatusReply, TIMEOUT).generation == 2
        assert anew.membership.state.jobs[""].job.number == joined.job
        assert client.fault is None
        assert server.error is None


def test_a_scheduler_without_a_journal_that_leaves_ends_its_cluster():
    with scheduler(1) as one, FakeServer(one.address) as server:
        assert server.joined.wait(TIMEOUT)
        one.leave()
        until(lambda: server.link.stopped)


def test_a_scheduler_that_is_stopped_first_does_not_leave(tmp_path):
    with scheduler(1, journal=tmp_path) as one, FakeServer(one.address) as server:
        assert server.joined.wait(TIMEOUT)
        one.stop()
        one.leave()
        until(lambda: server.link.stopped)
    with scheduler(1, journal=tmp_path) as anew:
        assert anew.membership.state.cluster != one.membership.state.cluster


def test_the_command_ends_a_cluster_and_its_journal_begins_another(tmp_path, capsys):
    with scheduler(1, journal=tmp_path) as one, FakeServer(one.address) as server:
        assert server.joined.wait(TIMEOUT)
        assert main(["cluster", one.address, "stop"]) == 0
        assert "the cluster ends" in capsys.readouterr().out
        until(lambda: server.link.stopped)
        until(lambda: one.membership.state.ended)
    with scheduler(1, journal=tmp_path) as anew:
        assert anew.membership.state.cluster != one.membership.state.cluster


def test_a_broken_cluster_can_be_ended_too(capsys):
    with scheduler(1) as one:
        with FakeServer(one.address) as server:
            assert server.joined.wait(TIMEOUT)
            server.link.call(Leave(), LeaveReply, TIMEOUT)
        assert one.membership.broken
        assert main(["cluster", one.address, "stop"]) == 0
        until(lambda: one.membership.state.ended)


@pytest.mark.parametrize("patience", [20.0, None])
def test_a_second_sigterm_ends_a_server_that_is_drained(patience):
    server = Server.__new__(Server)
    server._scheduler = mock.Mock()
    server._drain_seconds, server._drains, server._stopping = patience, False, False
    server.leave()
    assert server._stopping == (patience is None)
    server.leave()
    assert server._stopping


# --- processes ----------------------------------------------------------------------------------------------------


def connect(cluster: Processes) -> shoal.Store:
    return shoal.connect(cluster.address, timeout=TIMEOUT)


@pytest.mark.slow
def test_training_goes_on_while_a_scheduler_is_evicted_and_comes_back(tmp_path):
    with processes(journal=str(tmp_path), servers=2) as cluster:
        (scheduler,) = cluster.children
        servers = [cluster.start_server() for _ in range(2)]
        with connect(cluster) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            table.push(KEYS, ONES).result()
            store.tick()
            assert cluster.end(scheduler, signal.SIGTERM) == 0
            table.push(KEYS, ONES).result()
            store.tick()
            anew = cluster.start_scheduler(journal=str(tmp_path), servers=2)
            other = store.table("another")
            assert not other.pull(KEYS).any()
            assert (table.pull(KEYS) == -2).all()
            assert cluster.end(anew, signal.SIGINT) == 0
            for server in servers:
                assert server.process.wait(TIMEOUT) == 0
            with pytest.raises(NotConnectedError):
                store.barrier()


@pytest.mark.slow
def test_all_processes_end_with_status_0_when_a_cluster_is_stopped(tmp_path):
    with processes(journal=str(tmp_path), servers=2) as cluster:
        (scheduler,) = cluster.children
        servers = [cluster.start_server() for _ in range(2)]
        with SchedulerClient(cluster.address, "observer") as client:
            until(lambda: client.call(GetStatus(), StatusReply, TIMEOUT).epoch)
        assert main(["cluster", cluster.address, "stop"]) == 0
        assert [child.process.wait(TIMEOUT) for child in (scheduler, *servers)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_that_is_evicted_gives_its_slots_away_first(replicas):
    with processes(replicas=replicas, servers=3) as cluster:
        servers = [cluster.start_server(drain_on_sigterm=100, rank=rank) for rank in range(3)]
        with connect(cluster) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            done = threading.Event()
            errors: queue.Queue[Exception] = queue.Queue()
            clocks = 0

            def train() -> None:
                nonlocal clocks
                try:
                    while not done.is_set():
                        table.push(KEYS, ONES)
                        store.tick()
                        clocks += 1
                except Exception as error:
                    errors.put(error)

            training = threading.Thread(target=train)
            training.start()
            try:
                assert cluster.end(servers[1], signal.SIGTERM) == 0
                assert "server 1 has been drained: it ends" in servers[1].describe_end()
            finally:
                done.set()
                training.join(TIMEOUT)
            assert errors.empty(), errors.get()
            assert (table.pull(KEYS) == -clocks).all()
            assert clocks > 0
            assert {one.server for one in store.channel.map.endpoints} == {0, 2}


@pytest.mark.slow
def test_a_server_that_the_others_cannot_replace_ends_at_once():
    with processes(servers=1) as cluster:
        server = cluster.start_server(drain_on_sigterm=1000)
        cluster.wait_for(server)
        assert cluster.end(server, signal.SIGTERM) == 0
        text = "server 0 ends without being drained: without server 0 the cluster has 0 servers"
        assert text in server.describe_end()


@pytest.mark.slow
def test_a_server_whose_time_is_over_ends_although_it_has_slots():
    with processes(copy_rate="1KiB", servers=2) as cluster:
        servers = [cluster.start_server(drain_on_sigterm=0.3) for _ in range(2)]
        with connect(cluster) as store:
            table = store.table("t", dim=64)
            table.push(KEYS, np.ones((300, 64), np.float32)).result()
            store.tick()
            assert cluster.end(servers[0], signal.SIGTERM) == 0
            assert "ends before it has been drained, which took longer than 0.3 s" in servers[0].describe_end()
