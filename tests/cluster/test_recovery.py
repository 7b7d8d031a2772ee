"""A scheduler with a journal that is killed and started again, in processes of their own: all that ran goes on."""

import contextlib
import logging
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from zmq.auth.thread import AuthenticationThread

import shoal
from cluster_fakes import TIMEOUT, FakeServer, scheduler
from shoal.cluster.launch import local_cluster, supervisor
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.protocol.address import split
from shoal.cluster.protocol.curve import make_keys
from shoal.cluster.protocol.messages import (
    Barrier,
    BarrierReply,
    Hello,
    HelloReply,
    JobConsistency,
    Join,
    Order,
    SplitReply,
    StartJob,
    TakeSplit,
)
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.cluster.server.server import Server
from shoal.config import SchedulerConfig, ServerConfig
from shoal.errors import NotConnectedError, StorageError

pytestmark = pytest.mark.slow


def until(what):
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def die(cluster):
    """Have a scheduler end without a word, as if it were killed."""
    cluster._membership.stop = lambda now: []


def test_a_scheduler_that_is_started_again_knows_its_peers_and_answers_what_they_asked_before(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with scheduler(1, journal=tmp_path) as one:
        assert one.membership.state.generation == 1
        server = FakeServer(one.address)
        link = SchedulerClient(one.address, "worker")
        other = SchedulerClient(one.address, "worker")
        joining = threading.Thread(
            target=lambda: other.join(Join(workers=2, rules=JobConsistency.of(shoal.BSP())), TIMEOUT), daemon=True
        )
        joining.start()
        joined = link.join(Join(workers=2, rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        joining.join(TIMEOUT)
        assert link._welcome.grace == 600.0
        asked = link.ask(Barrier("b"))
        until(lambda: (job := one.membership.state.jobs[""].job) is not None and job.barriers)
        die(one)
    with server, link, other:
        second = other.ask(Barrier("b"))  # while there is none
        split = other.ask(TakeSplit(0, 5, "d", -1, 0.0, 0))
        with scheduler(1, journal=tmp_path, bind="tcp://127.0.0.1:*") as anew:
            assert anew.address == one.address
            for its, number in ((link, asked), (other, second)):
                assert its.answer(number, BarrierReply, timeout=TIMEOUT) == BarrierReply()
            taken = other.answer(split, SplitReply, timeout=TIMEOUT)
            assert taken == SplitReply(0, None)
            assert anew.membership.state.jobs[""].job.passes[0].splits.taken.keys() == {0}  # once
            assert set(anew.membership.workers) == {0, 1}
            assert anew.membership.state.generation == 2
            until(lambda: "was started again from its journal (generation 2)" in caplog.text)
            assert anew.refused() == {}
            assert link.fault is None
            assert joined.job == anew.membership.state.jobs[""].job.number
    assert sum(isinstance(order.body, StartJob) for order in server.orders) == 1


def test_orders_of_a_scheduler_that_was_replaced_are_refused(caplog):
    with scheduler(1) as one, FakeServer(one.address) as server, SchedulerClient(one.address, "worker") as link:
        link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        client = server.link
        client._generation = 5
        outdated = Order(99, StartJob(1, server.orders[0].body.rules, (1,)), 4)
        assert client._is_outdated(outdated)
        assert not client._is_outdated(Order(99, outdated.body, 5))
    assert "sent Order of generation 4, but generation 5 has replaced it: end the older one" in caplog.text


def test_a_second_scheduler_of_a_journal_is_refused_and_the_first_goes_on(tmp_path):
    with scheduler(1, journal=tmp_path) as one:
        with pytest.raises(StorageError, match="is in use by another scheduler"):
            Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, heartbeat=0.5, journal=tmp_path))
        with FakeServer(one.address) as server:
            assert server.joined.wait(TIMEOUT)


def test_a_scheduler_whose_disk_is_full_ends_and_promises_nothing(tmp_path, monkeypatch):
    cluster = Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, heartbeat=0.2, journal=tmp_path))
    with cluster, SchedulerClient(cluster.address, "worker") as link:
        monkeypatch.setattr(
            "shoal.cluster.scheduler.journal.Journal._write",
            lambda self, data: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        asked = link.ask(Hello("worker", "w"))
        with pytest.raises(StorageError, match="No space left on device"):
            cluster.run()
        with pytest.raises(NotConnectedError):
            link.answer(asked, HelloReply, timeout=0.2)


def test_a_scheduler_that_could_not_be_made_releases_its_journal(tmp_path, monkeypatch):
    make_keys(tmp_path / "keys")
    curve = tmp_path / "keys"
    begin = threading.Thread.start

    def refuse(thread):
        if isinstance(thread, AuthenticationThread):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, journal=tmp_path / "journal", curve=curve))
    monkeypatch.undo()
    with Scheduler(
        SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, journal=tmp_path / "journal", curve=curve)
    ) as one:
        (_, port) = split(one.address)
        with pytest.raises(OSError, match="another program listens there"):
            Scheduler(
                SchedulerConfig(bind=f"tcp://127.0.0.1:{port}", servers=1, journal=tmp_path / "other", curve=curve)
            )
        Journal(tmp_path / "other").close()


def test_a_scheduler_that_fails_is_closed_and_another_one_takes_its_address_and_journal(tmp_path, monkeypatch):
    first = Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, journal=tmp_path))
    with SchedulerClient(first.address, "worker") as link:
        monkeypatch.setattr(first, "_silent_servers", lambda now: (_ for _ in ()).throw(RuntimeError("a defect")))
        with pytest.raises(RuntimeError, match="a defect"):
            first.run()
        with scheduler(1, journal=tmp_path, heartbeat=2.0, bind=first.address):
            link.hello(TIMEOUT)
    first.close()


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_process_that_cannot_check_keys_any_more_ends_with_an_error(tmp_path, role):
    make_keys(tmp_path)
    curve = tmp_path
    with scheduler(1, curve=curve) if role == "server" else contextlib.nullcontext() as other:
        made = (
            Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, curve=curve))
            if other is None
            else Server(ServerConfig(scheduler=other.address, curve=str(tmp_path)))
        )
        with made:
            made._guard._checks.pipe.send(b"TERMINATE")
            deadline = time.monotonic() + TIMEOUT
            with pytest.raises(NotConnectedError, match="the thread that checks the keys of connections has ended"):
                made.run(lambda: time.monotonic() < deadline)


KEYS = np.arange(400, dtype=np.uint64)


def train(address, rank, digests, seed, clocks, between=lambda clock: None):
    """Push gradients that depend on the weights, under BSP; a barrier, a table and splits now and then."""
    rng = np.random.default_rng([seed, rank])
    with shoal.connect(address, workers=2, rank=rank, timeout=TIMEOUT) as store:
        table = store.table("t", dim=2, optimizer=shoal.Adagrad(lr=0.1))
        for clock in range(clocks):
            keys = rng.choice(KEYS, 50, replace=False)
            table.push(keys, np.tanh(table.pull(keys)) + rng.normal(size=(50, 2)).astype(np.float32))
            store.tick()
            if clock % 20 == 10:
                store.table(f"t{clock}", dim=1)
                store.barrier()
            if rank == 0:
                between(clock)
            time.sleep(0.005)
        store.barrier()
        if rank == 0:
            digests.append(table.pull(KEYS).tobytes())
            digests.append(sorted(store.tables))
        store.barrier()


def run(cluster, seed, clocks, between=lambda clock: None):
    digests, errors = [], []

    def work(rank):
        try:
            train(cluster.address, rank, digests, seed, clocks, between)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT)
    assert not errors, errors
    return digests


def test_training_goes_on_and_gives_the_same_rows_while_the_scheduler_is_killed_again_and_again(capfd):
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    with local_cluster.running(2, workers=2, heartbeat=0.5) as cluster:
        undisturbed = run(cluster, 1, 120)
    kills = sorted(rng.sample(range(5, 115), 4))
    generations = []

    def kill(clock):
        if clock in kills:
            dead = cluster.scheduler
            dead.signal(signal.SIGKILL)
            generations.append(dead)
            until(lambda: cluster.scheduler is not dead)

    with local_cluster.running(2, workers=2, heartbeat=0.5) as cluster:
        scratch = Path(cluster._scheduler_config.journal)
        assert list(scratch.glob("log-*"))
        assert run(cluster, 1, 120, kill) == undisturbed
        assert all(server.process.poll() is None for server in cluster.servers)
        assert len(generations) == 4
    assert not scratch.exists()


def test_what_is_asked_while_there_is_no_scheduler_is_answered_once_it_is_back(tmp_path):
    with local_cluster.running(1, heartbeat=0.5, journal=tmp_path) as cluster:
        config = cluster._scheduler_config
        none = ChildProcess("none", ["true"], {}, lambda *_: None)  # the test starts another one, and later
        cluster._start = lambda *_: none
        with shoal.connect(cluster.address, timeout=TIMEOUT) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            cluster.scheduler.signal(signal.SIGKILL)
            until(lambda: cluster.scheduler is none)
            results = []
            asks = [
                threading.Thread(target=lambda: results.append(store.table("another", dim=3).dim)),
                threading.Thread(target=lambda: results.append(store.barrier())),
                threading.Thread(target=lambda: results.append(len(store.server_metrics()))),
            ]
            for thread in asks:
                thread.start()
            for clock in range(1, 40):  # the data plane needs no scheduler
                table.push(KEYS, np.ones((400, 1), np.float32)).result()
                store.tick()
                assert (table.pull(KEYS) == -clock).all()
            assert not results
            anew = local_cluster.start_role("scheduler", config, lambda *_: None)
            try:
                for thread in asks:
                    thread.join(TIMEOUT)
                assert sorted(map(str, results)) == ["1", "3", "None"]
                assert set(store.tables) >= {"t", "another"}
            finally:
                anew.signal(signal.SIGKILL)
                anew.end(time.monotonic())


def test_a_scheduler_that_dies_too_often_is_reported(monkeypatch):
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1)
    with local_cluster.running(1) as cluster:
        first = cluster.scheduler
        first.signal(signal.SIGKILL)
        until(lambda: cluster.scheduler is not first)
        second = cluster.scheduler
        second.signal(signal.SIGKILL)
        assert cluster.ended.get(timeout=TIMEOUT) is second


def test_a_scheduler_that_is_asked_to_end_is_not_started_again():
    with local_cluster.running(1) as cluster:
        first = cluster.scheduler
        first.signal(signal.SIGINT)
        ended = {cluster.ended.get(timeout=TIMEOUT), cluster.ended.get(timeout=TIMEOUT)}
        assert ended == {first, *cluster.servers}
        assert cluster.scheduler is first
