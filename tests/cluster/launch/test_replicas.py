"""What a launcher does when roles end that may be started again, mostly with programs of a line in their place."""

import contextlib
import errno
import os
import queue
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest

import shoal
from shoal.cluster.launch import supervisor
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster, running
from shoal.cluster.protocol.reports import Drained, Joined, ServerDied
from shoal.config import SchedulerConfig, ServerConfig
from threads import refuse_threads

PATIENCE = 60.0


class Roles(LocalCluster):
    """A scheduler and two servers that wait until they are ended."""

    def __init__(self, replicas):
        super().__init__()
        self.made = queue.Queue()
        self._scheduler_config = SchedulerConfig(bind="tcp://127.0.0.1:*", servers=2, replicas=replicas)
        self._server_config = ServerConfig(scheduler="tcp://127.0.0.1:1") if replicas else None
        self.scheduler = self._start("scheduler", self._scheduler_config)
        self.servers = [self._start(f"server {rank}", self._server_config) for rank in range(2)]
        for _ in range(3):
            self.made.get()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _start(self, name, config, former=None):
        waits = "trap 'exit 0' TERM; echo waits; while :; do sleep 0.05; done"
        is_waiting = threading.Event()
        made = ChildProcess(name, ["/bin/sh", "-c", waits], {}, self.notify, lambda line: is_waiting.set())
        assert is_waiting.wait(PATIENCE)
        made.joined = Joined(process=f"process {made.process.pid} on here", pid=made.process.pid)
        self.made.put(made)
        return made

    def settle(self):
        """Wait until what has been reported is done."""
        self._reports.put(None)
        self._thread.join(PATIENCE)


@pytest.fixture
def cluster():
    with Roles(1) as made:
        yield made
    assert all(child.process.poll() is not None for child in made.roles)


@pytest.mark.slow
def test_another_server_is_started_for_one_that_dies(cluster, caplog):
    dead, other = cluster.servers
    dead.signal(signal.SIGKILL)
    started = cluster.made.get(timeout=PATIENCE)
    cluster.settle()
    assert started.name == "server 0"
    assert cluster.servers == [started, other]
    assert started.process.poll() is None
    assert cluster.ended.empty()
    assert "server 0 was killed by signal 9. Another server is started" in caplog.text


@pytest.mark.slow
def test_a_server_that_was_asked_to_end_is_not_replaced(cluster):
    first, second = cluster.servers
    first.signal(signal.SIGTERM)
    first.process.wait(PATIENCE)
    first._follower.join(PATIENCE)
    second.signal(signal.SIGKILL)  # reported after the other
    started = cluster.made.get(timeout=PATIENCE)
    cluster.settle()
    assert cluster.servers == [started]
    assert cluster.ended.empty()


@pytest.mark.slow
def test_servers_that_die_too_often_are_reported_and_fail_the_calls_of_the_store(cluster, caplog):
    failed = queue.Queue()
    cluster.supervise(failed.put)
    for _ in range(5):
        cluster.servers[0].signal(signal.SIGKILL)
        last = cluster.made.get(timeout=PATIENCE)
        with cluster._lock:
            assert cluster.servers[0] is last
    assert failed.empty()
    last.signal(signal.SIGKILL)
    assert cluster.ended.get(timeout=PATIENCE) is last
    assert cluster.made.empty()
    error = failed.get(timeout=PATIENCE)
    assert isinstance(error, shoal.ServerLostError)
    assert str(error) == (
        f"server 0 (process {last.process.pid}) was killed by signal 9. It is end number 6 of a server within 60 s, "
        "and it is not replaced: remove the cause, start the cluster again and load a checkpoint"
    )
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [str(error)]
    cluster.supervise(failed.put)  # too late for the event, but not for the error
    assert failed.get(timeout=PATIENCE) is error


@pytest.mark.slow
def test_no_server_is_replaced_when_the_last_copy_of_slots_is_lost(cluster):
    failed = queue.Queue()
    cluster.supervise(failed.put)
    stopped, other = cluster.servers
    stopped.signal(signal.SIGSTOP)
    pid = stopped.process.pid
    cluster.notify(cluster.scheduler, ServerDied(f"process {pid} on here", "0 to 7, 16 to 23"))
    assert cluster.ended.get(timeout=PATIENCE) is stopped
    assert str(failed.get(timeout=PATIENCE)) == (
        f"server 0 (process {pid}) was killed by signal 9. The last copy of slots 0 to 7, 16 to 23 is lost, and it is "
        "not replaced: remove the cause, start the cluster again and load a checkpoint"
    )
    assert cluster.made.empty()
    assert cluster.servers == [stopped, other]


@pytest.mark.slow
def test_a_launched_cluster_that_has_lost_slots_stops_and_says_so(caplog):
    failed = queue.Queue()
    with running(2, replicas=1, timeout=PATIENCE) as cluster:
        cluster.supervise(failed.put)
        for server in cluster.servers:
            server.signal(signal.SIGKILL)
        error = str(failed.get(timeout=PATIENCE))
    assert re.search(r"The last copy of slots [\d to,]+ is lost, and it is not replaced", error)
    assert caplog.text.count("Another server is started") <= 3


def test_a_scheduler_that_dies_too_often_fails_the_calls_of_the_store(cluster):
    failed = queue.Queue()
    cluster.supervise(failed.put)
    for _ in range(5):
        cluster.scheduler.signal(signal.SIGKILL)
        last = cluster.made.get(timeout=PATIENCE)
        with cluster._lock:
            assert cluster.scheduler is last
    assert failed.empty()
    last.signal(signal.SIGKILL)
    error = failed.get(timeout=PATIENCE)
    assert type(error) is shoal.NotConnectedError
    assert "the scheduler (process" in str(error)
    assert "end number 6 of the scheduler within 60 s" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable"),
        (ValueError("the name is taken"), "the name is taken"),
    ],
)
def test_a_role_that_cannot_be_started_again_is_reported(cluster, monkeypatch, error, reason):
    failed = queue.Queue()
    cluster.supervise(failed.put)

    def refuse(*_):
        raise error

    monkeypatch.setattr(cluster, "_start", refuse)
    cluster.servers[1].signal(signal.SIGKILL)
    assert f"No other process can be started ({reason})" in str(failed.get(timeout=PATIENCE))


@pytest.mark.slow
def test_a_server_that_is_stopped_and_was_declared_dead_is_killed_and_replaced(cluster, caplog):
    stopped, other = cluster.servers
    stopped.signal(signal.SIGSTOP)
    cluster.notify(cluster.scheduler, ServerDied(f"process {stopped.process.pid} on elsewhere"))
    cluster.notify(cluster.scheduler, ServerDied(f"process {stopped.process.pid} on here"))
    started = cluster.made.get(timeout=PATIENCE)
    assert stopped.process.wait(PATIENCE) == -signal.SIGKILL
    with cluster._lock:
        assert cluster.servers == [started, other]
    assert caplog.text.count("was declared dead, but its process exists") == 1


@pytest.mark.slow
def test_the_scheduler_is_started_again_and_not_counted_with_the_servers(cluster):
    for _ in range(5):
        cluster.servers[1].signal(signal.SIGKILL)
        cluster.made.get(timeout=PATIENCE)
        with cluster._lock:
            pass
    cluster.scheduler.signal(signal.SIGKILL)
    assert cluster.made.get(timeout=PATIENCE).name == "scheduler"
    assert cluster.ended.empty()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_replicas_the_end_of_a_server_is_reported(number):
    with Roles(0) as cluster:
        first = cluster.servers[0]
        first.signal(number)
        assert cluster.ended.get(timeout=PATIENCE) is first
        assert cluster.made.empty()
        assert "Its rows are lost, since the cluster has no replicas" in str(cluster.fault)


@pytest.mark.slow
def test_without_replicas_the_cluster_goes_on_without_a_server_that_has_been_drained():
    with Roles(0) as cluster:
        first, second = cluster.servers
        cluster.notify(first, Drained())
        first.signal(signal.SIGTERM)
        first.process.wait(PATIENCE)
        first._follower.join(PATIENCE)
        second.signal(signal.SIGKILL)  # reported after the other
        assert cluster.ended.get(timeout=PATIENCE) is second
        assert cluster.servers == [second]


def test_too_many_replicas_are_refused_before_a_process_is_started():
    with pytest.raises(ValueError, match=r"replicas must be a number from 0 to 1, .* got 2: start more servers"):
        shoal.launch(servers=2, replicas=2)


def server_processes():
    """The servers among this process's children, which may include ended ones of other tests."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "server" in child.cmdline()]


def wait_for_another(store, dead):
    """Wait until another server has the copies in the place of a process."""

    def has_copies():
        status = store.cluster()
        processes = [int(one["about"].split()[1]) for one in status["servers"]]
        return len(processes) == 2 and dead.pid not in processes and all(arc["copies"] for arc in status["arcs"])

    until(has_copies)


def until(what):
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_stopped_server_is_replaced_and_its_process_ends():
    with shoal.launch(servers=2, replicas=1, timeout=PATIENCE) as store:
        table = store.table("counts", dim=1, optimizer=shoal.SGD(lr=1.0))
        stopped = server_processes()[0]
        stopped.suspend()
        for _ in range(5):
            table.push(np.zeros(1, np.uint64), np.ones((1, 1), np.float32))
            store.tick()
        until(lambda: not stopped.is_running())
        wait_for_another(store, stopped)
        (failover,) = store.cluster()["failovers"]
        assert failover["about"].startswith(f"process {stopped.pid} on ")
        assert table.pull(np.zeros(1, np.uint64)).tolist() == [[-5.0]]


@pytest.mark.slow
def test_calls_of_a_launched_store_fail_at_once_when_servers_die_too_often(monkeypatch):
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1)
    message = r"server \d \(process \d+\) was killed by signal 9\. .* not replaced"
    with contextlib.suppress(shoal.ServerLostError), shoal.launch(servers=2, replicas=1, timeout=1000.0) as store:
        table = store.table("counts", dim=1, optimizer=shoal.SGD(lr=1.0))
        dead = server_processes()[0]
        dead.kill()
        wait_for_another(store, dead)
        server_processes()[0].kill()
        with pytest.raises(shoal.ServerLostError, match=message):
            until(lambda: table.pull(np.zeros(1, np.uint64)) is None)


@pytest.mark.slow
def test_training_continues_without_a_server_that_is_killed_and_every_push_counts_once():
    keys, ones = np.arange(50, dtype=np.uint64), np.ones((50, 1), np.float32)
    with (
        running(3, replicas=1, timeout=PATIENCE) as cluster,
        shoal.connect(cluster.address, timeout=PATIENCE) as store,
    ):
        table = store.table("counts", dim=1, optimizer=shoal.SGD(lr=1.0))
        for clock in range(20):
            if clock == 10:
                cluster.servers[0].signal(signal.SIGKILL)
            table.push(keys, ones)
            store.tick()
        assert table.pull(keys).tolist() == [[-20.0]] * 50


def test_a_process_whose_threads_cannot_start_is_ended(monkeypatch):
    started = []
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        signalled = ChildProcess.signal
        patched.setattr(ChildProcess, "signal", lambda child, number: (started.append(child), signalled(child, number)))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ChildProcess("sleeper", ["sleep", "600"], {}, queue.Queue())
    (child,) = started
    assert child.process.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_a_server_is_replaced_when_others_have_its_slots_and_a_scheduler_at_once(cluster, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAILOVER_SECONDS", 3.0)
    cluster.servers[0].signal(signal.SIGKILL)
    cluster.servers[0].process.wait()
    cluster.scheduler.signal(signal.SIGKILL)
    assert [cluster.made.get(timeout=PATIENCE).name for _ in range(2)] == ["scheduler", "server 0"]
