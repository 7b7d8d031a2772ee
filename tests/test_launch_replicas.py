"""What a launcher does when roles end that may be started again, mostly with programs of a line in their place."""

import contextlib
import queue
import signal
import threading

import numpy as np
import pytest

import shoal
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster, running

PATIENCE = 60.0


class Roles(LocalCluster):
    """A cluster whose roles wait until they are ended."""

    last_words = "ends"

    def close(self):
        self.stop()

    def _role(self, name, arguments):
        waits = f"trap 'echo {self.last_words}; exit 0' TERM; echo waits; while :; do sleep 0.05; done"
        made = ChildProcess(name, ["/bin/sh", "-c", waits], {}, self._watched, changed=self._changed)
        with self._changed:
            assert self._changed.wait_for(lambda: made.last, PATIENCE)
        self.made.put(made)
        return made


def roles(server, last_words="ends"):
    made = Roles()
    made.last_words = last_words
    made.made = queue.SimpleQueue()
    made.scheduler = made._role("scheduler", [])
    made.servers = [made._role(f"server {rank}", []) for rank in range(2)]
    for _ in range(3):
        made.made.get()
    made._watcher = threading.Thread(target=made._watch, args=([], server))
    made._watcher.start()
    return made


@pytest.fixture
def cluster():
    made = roles([])
    yield made
    made.stop()
    assert all(child.process.poll() is not None for child in made.roles)


def test_another_server_is_started_for_one_that_dies(cluster, caplog):
    dead, other = cluster.servers
    dead.signal(signal.SIGKILL)
    started = cluster.made.get(timeout=PATIENCE)
    cluster._watched.put(None)
    cluster._watcher.join(PATIENCE)
    assert started.name == "server 0"
    assert cluster.servers == [started, other]
    assert started.process.poll() is None
    assert cluster.ended.empty()
    assert "server 0 was killed by signal 9. Another server is started" in caplog.text


def test_a_server_that_was_asked_to_end_is_not_replaced(cluster):
    first, second = cluster.servers
    first.signal(signal.SIGTERM)
    first.process.wait(PATIENCE)
    first._waiter.join(PATIENCE)
    second.signal(signal.SIGKILL)  # reported after the other
    started = cluster.made.get(timeout=PATIENCE)
    cluster._watched.put(None)
    cluster._watcher.join(PATIENCE)
    assert cluster.servers == [started]
    assert cluster.ended.empty()


def test_servers_that_die_too_often_are_reported(cluster):
    for _ in range(5):
        cluster.servers[0].signal(signal.SIGKILL)
        last = cluster.made.get(timeout=PATIENCE)
        with cluster._lock:
            assert cluster.servers[0] is last
    last.signal(signal.SIGKILL)
    assert cluster.ended.get(timeout=PATIENCE) is last
    assert cluster.made.empty()


def test_the_scheduler_is_started_again_and_not_counted_with_the_servers(cluster):
    for _ in range(5):
        cluster.servers[1].signal(signal.SIGKILL)
        cluster.made.get(timeout=PATIENCE)
        with cluster._lock:
            pass
    cluster.scheduler.signal(signal.SIGKILL)
    assert cluster.made.get(timeout=PATIENCE).name == "scheduler"
    assert cluster.ended.empty()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_replicas_the_end_of_a_server_is_reported(number):
    with contextlib.closing(roles(None)) as cluster:
        first = cluster.servers[0]
        first.signal(number)
        assert cluster.ended.get(timeout=PATIENCE) is first
        assert cluster.made.empty()


def test_without_replicas_the_cluster_goes_on_without_a_server_that_has_been_drained():
    with contextlib.closing(roles(None, "server 0 has been drained: it ends")) as cluster:
        first, second = cluster.servers
        first.signal(signal.SIGTERM)
        first.process.wait(PATIENCE)
        first._waiter.join(PATIENCE)
        second.signal(signal.SIGKILL)  # reported after the other
        assert cluster.ended.get(timeout=PATIENCE) is second
        assert cluster.servers == [second]


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
