"""Deaths that are known from closed connections: simulated with planted bugs, and real processes that are killed."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import zmq

import shoal
from cluster_fakes import HEARTBEAT, TIMEOUT, FakeServer, Wire, scheduler
from membership_world import Process, World
from shoal.cluster.launch import local_cluster
from shoal.cluster.protocol.address import all_refuse
from shoal.cluster.protocol.messages import Heartbeat, JobConsistency, Join
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.scheduler import peers as peers_module
from shoal.cluster.scheduler.connections import ConnectionMonitor
from shoal.cluster.scheduler.failure_detector import FailureDetector
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.peers import LivenessProbe, Peers
from shoal.consistency import ASP
from shoal.errors import ServerLostError

KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((500, 1), np.float32)


# --- simulated ------------------------------------------------------------------------------------------------------


class Connections(World):
    """A world whose processes have connections that end, and a scheduler that is stopped now and then."""

    def __init__(self, seed: int, *, servers: int = 2, workers: int = 2) -> None:
        super().__init__(seed, servers=servers, workers=workers, loss=0.0)
        self.stopped_at = self.stopped_until = 0.0
        self.later: list[tuple[float, object, bytes]] = []  # ends of connections, and results of probes
        for rank in range(workers):
            self.start_worker(rank)
        self.go(5.0)
        assert len(self.membership.workers) == workers

    def _fly(self, message: object, process: Process, up: bytes | None) -> None:
        self.flying.append((self.now + self.rng.uniform(0, 0.15), message, process, up))

    def cut(self, process: Process, seconds: float) -> None:
        """End a connection, unless there is none; the process connects again after some seconds."""
        if process.connects_at > self.now:
            return
        self.later.append((self.now + self.rng.uniform(0, 0.02), None, process.route))
        process.connection += 1
        process.connects_at = self.now + seconds

    def kill(self, process: Process) -> None:
        process.alive = False
        self.later.append((self.now + self.rng.uniform(0, 0.02), None, process.route))

    def go(self, seconds: float) -> None:
        """As `World.go`, in steps of 10 ms; a stopped scheduler finds what has happened meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.01
            for process in self.processes:
                connects = process.connects_at > self.now - 0.01
                is_due = process.connects_at <= self.now and (connects or self.now >= process.speaks_at)
                if process.running and not process.fenced and is_due:
                    process.speaks_at = self.now + self.rng.uniform(0.1, 0.5)
                    process.speak()
            if self.now < self.stopped_until:
                continue
            self.step()
        self.check_servers()

    def step(self) -> None:
        due = [flying for flying in self.flying if flying[0] <= self.now]
        self.flying = [flying for flying in self.flying if flying[0] > self.now]
        for _, message, process, up in due:
            if up is None:
                if process.running:
                    process.hear(message)
            elif process.connects_at >= self.stopped_at and self.now < self.stopped_until + 0.1:
                self.flying.append((self.stopped_until + 0.1, message, process, up))  # the handshake comes first
            else:
                self.route(self.membership.handle(up, "10.0.0.9", message, self.now))
        happened = [one for one in self.later if one[0] <= self.now]
        self.later = [one for one in self.later if one[0] > self.now]
        for _, probe, route in happened:
            if isinstance(probe, LivenessProbe):
                self.route(self.membership.liveness(probe, route == b"refused", self.now))
            else:
                self.route(self.membership.disconnected(route, self.now))
        while self.membership.probes:
            probe = self.membership.probes.popleft()
            if isinstance(probe, LivenessProbe):
                server = next(process for process in self.processes if process.sender == probe.sender)
                answer = b"" if server.alive else b"refused"
                self.later.append((self.now + self.rng.expovariate(50), probe, answer))
            else:
                self.route(self.membership.probed(probe, None, self.now))
        self.route(self.membership.on_time(self.now))


def check_cuts(seed: int) -> None:
    """Connections that are made again in time, and a scheduler that is stopped meanwhile, are no deaths."""
    world = Connections(seed)
    for _ in range(world.rng.randrange(1, 8)):
        roll = world.rng.random()
        if roll < 0.7:
            world.cut(world.rng.choice(world.processes), world.rng.uniform(0.0, 0.6))
        if roll > 0.5:
            world.stopped_at = world.now
            world.stopped_until = world.now + world.rng.uniform(0.2, 20.0)
            world.go(world.stopped_until - world.now)
        world.go(world.rng.choice([0.05, 0.3, 1.0, 2.0]))
    world.go(3.0)
    assert not world.membership.broken, "a server that lives is declared dead"
    assert len(world.membership.workers) == 2, "a worker that lives is declared dead"
    assert not world.membership._detector.has_disconnected


def check_deaths(seed: int) -> None:
    """A killed worker is declared dead in little more than a second, a killed server in less than 0.2 s."""
    world = Connections(seed)
    worker, server = world.those("worker")[world.rng.randrange(2)], world.those("server")[world.rng.randrange(2)]
    world.go(world.rng.uniform(0, 1))
    if world.rng.random() < 0.5:
        world.cut(worker, world.rng.uniform(0, 0.5))
        world.go(world.rng.uniform(0.6, 1.5))
    world.kill(worker)
    world.go(0.9)
    assert len(world.membership.workers) == 2, "a worker is declared dead before it had its time to connect again"
    world.go(0.4)
    assert len(world.membership.workers) == 1, "the death of a worker is not known"
    world.kill(server)
    world.go(0.2)
    assert "is lost with its rows, its process has ended: its connection closed" in world.membership.broken


@pytest.mark.parametrize("seed", range(60))
def test_connections_that_are_made_again_and_a_stopped_scheduler_are_no_deaths(seed):
    check_cuts(seed)


@pytest.mark.parametrize("seed", range(30))
def test_a_closed_connection_of_a_killed_process_is_acted_on_at_once(seed):
    check_deaths(seed)


def unconfirmed(monkeypatch):
    liveness = Membership.liveness
    monkeypatch.setattr(Membership, "liveness", lambda self, probe, _, now: liveness(self, probe, True, now))


def counts_own_stop(monkeypatch):
    monkeypatch.setattr(peers_module, "_MAX_STEP_SECONDS", 1e9)


def forgets_reconnections(monkeypatch):
    monkeypatch.setattr(Peers, "_mark_connected", lambda self, link: None)


def is_hasty(monkeypatch):
    init = FailureDetector.__init__

    def hasty(self, *parts):
        init(self, *parts)
        self._reconnect_seconds = 0.4

    monkeypatch.setattr(FailureDetector, "__init__", hasty)


@pytest.mark.parametrize("plant", [unconfirmed, counts_own_stop, forgets_reconnections, is_hasty])
def test_planted_bugs_of_the_detection_are_found(monkeypatch, plant):
    plant(monkeypatch)
    for seed in range(60):
        try:
            check_cuts(seed)
        except AssertionError:
            return
    pytest.fail("no schedule finds it")


def test_a_late_message_of_an_earlier_connection_is_no_connection():
    world = Connections(1)
    worker = world.those("worker")[0]
    old = worker.route
    world.cut(worker, 0.1)
    world.go(1.0)
    world.membership.handle(old, "10.0.0.9", Heartbeat(worker.sender, 0), world.now)
    world.membership.disconnected(old, world.now)
    assert not world.membership._detector.has_disconnected
    world.cut(worker, 0.1)
    world.go(0.05)
    world.membership.handle(old, "10.0.0.9", Heartbeat(worker.sender, 0), world.now)
    assert world.membership._detector.has_disconnected


def test_a_stopped_worker_whose_silent_connection_libzmq_ends_has_all_its_heartbeats_and_a_server_too():
    world = Connections(1)
    worker, server = world.those("worker")[0], world.those("server")[0]
    worker.paused = server.paused = True
    world.go(1.5)
    world.later += [(world.now, None, worker.route), (world.now, None, server.route)]
    world.go(3.0)
    assert len(world.membership.workers) == 2
    assert not world.membership.broken
    world.go(1.0)
    assert len(world.membership.workers) == 1
    assert "is lost with its rows, it has been silent for 5." in world.membership.broken


def test_a_worker_that_dies_before_its_job_is_complete_gives_its_rank_back_at_once():
    world = World(1, servers=1, workers=2, loss=0.0)
    first = world.start_worker(1)
    world.go(1.0)
    first.alive = False
    world.membership.disconnected(first.route, world.now)
    again, other = world.start_worker(1), world.start_worker(0)
    world.go(3.0)
    assert (again.place.rank, other.place.rank) == (1, 0)


# --- connections ----------------------------------------------------------------------------------------------------


def until(what, seconds=TIMEOUT):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_ports_that_refuse_are_told_from_those_that_answer_or_are_silent():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
        socket.socket() as free,
    ):
        free.bind(("127.0.0.1", 0))
        open_port, refusing = (f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (listening, free))
        assert all_refuse([refusing, refusing], TIMEOUT)
        assert not all_refuse([refusing, open_port], TIMEOUT)
        assert not all_refuse(["tcp://no-such-host.invalid:1"], TIMEOUT)
        assert not all_refuse([f"tcp://127.0.0.1:{full.getsockname()[1]}"], 0.1)


def test_the_ends_of_connections_are_found_whoever_uses_their_descriptors_next():
    with contextlib.ExitStack() as undo:
        context = zmq.Context()
        undo.callback(context.term)
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        monitor = ConnectionMonitor(context, router)
        undo.callback(router.close, 0)
        undo.callback(monitor.close)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def come():
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(b"")
            frames = router.recv_multipart(copy=False)
            monitor.observe(frames[0].bytes, frames[-1])
            return dealer, frames[0].bytes

        stays, _ = come()
        gone = []
        for _ in range(5):
            dealer, route = come()
            dealer.close()
            gone.append(route)
            poll_until_closed(monitor.socket)  # unread: the next connection may have the same descriptor
        ended = []
        until(lambda: len(ended.extend(monitor.ended(time.monotonic())) or ended) == len(gone))
        assert sorted(ended) == sorted(gone)
        until(lambda: monitor.next_time is None or monitor.ended(time.monotonic()))
        stays.close()


def poll_until_closed(monitor):
    assert monitor.poll(1000 * TIMEOUT)


@pytest.mark.slow
def test_a_worker_whose_connection_closes_for_good_is_dead_long_before_its_heartbeats_are_missed():
    with (
        scheduler(1, heartbeat=HEARTBEAT / 10, workers=2) as running,
        FakeServer(running.address),
        SchedulerClient(running.address, "worker") as stays,
    ):
        gone = []
        with SchedulerClient(running.address, "worker") as leaves:
            joining = threading.Thread(target=leaves.join, args=JOIN)
            joining.start()
            stays.join(*JOIN)
            joining.join()
            stays._on_event = gone.append
        until(lambda: gone)
        assert "its connection closed, and it has not connected again" in gone[0].text  # not: it has been silent


JOIN = (Join(workers=2, rules=JobConsistency.of(ASP())), TIMEOUT)


# --- real processes -------------------------------------------------------------------------------------------------


PUSHER = """
    import sys, numpy as np, shoal
    with shoal.connect(sys.argv[1], workers=2, rank=1) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        keys, ones = np.arange(500, dtype=np.uint64), np.ones((500, 1), np.float32)
        print("joined", flush=True)
        while True:
            table.pull(keys)
            table.push(keys, ones)
            store.tick()
"""


@contextlib.contextmanager
def pusher(address):
    """A worker in a process of its own, which pushes and ticks until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PUSHER), address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def error_of_pulls(table, error):
    """Pull until an error is raised, for less time than five heartbeats; returns its text."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            table.pull(KEYS)
        except error as raised:
            return str(raised)
    return pytest.fail("pulls go on")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_killed_server_is_lost_at_once_with_the_reason(threads):
    with (
        local_cluster.running(2, threads=threads, heartbeat=60.0, timeout=TIMEOUT) as cluster,
        shoal.connect(cluster.address, timeout=2 * TIMEOUT) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS, ONES)
        store.tick()
        table.pull(KEYS)  # the clock has ended: nothing is left for the end of the block
        cluster.servers[1].process.kill()
        text = error_of_pulls(table, ServerLostError)
        assert "server 1 at ipc:///" in text
        ports = "ports refuse" if threads > 1 else "port refuses"
        assert f"its process has ended: its connection closed and its {ports} connections" in text


@pytest.mark.slow
def test_the_others_go_on_at_once_when_a_worker_is_killed():
    with (
        local_cluster.running(1, workers=2, heartbeat=6.0, timeout=TIMEOUT) as cluster,
        pusher(cluster.address) as victim,
        shoal.connect(cluster.address, workers=2, rank=0, timeout=24.0) as store,  # less than five heartbeats
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        for _ in range(20):
            table.push(KEYS, ONES)
            store.tick()
            table.pull(KEYS)
        victim.kill()
        for _ in range(20):
            table.push(KEYS, ONES)
            store.tick()
            table.pull(KEYS)
        assert store.member.lost_workers == {1}


@pytest.mark.slow
def test_a_stopped_server_and_a_stopped_worker_are_not_dead_at_once():
    with (
        local_cluster.running(1, workers=2, heartbeat=60.0, timeout=TIMEOUT) as cluster,
        pusher(cluster.address) as other,
        shoal.connect(cluster.address, workers=2, rank=0, timeout=TIMEOUT) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        for process in (other, cluster.servers[0].process):
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)  # a death would be known after 0.02 s, or 1 s
            process.send_signal(signal.SIGCONT)
            for _ in range(5):
                table.push(KEYS, ONES)
                store.tick()
                table.pull(KEYS)
        assert not store.member.lost_workers


@pytest.mark.slow
def test_connections_to_the_scheduler_that_are_cut_again_and_again_are_no_deaths():
    with scheduler(1, workers=2) as running, contextlib.ExitStack() as undo:
        wires = [Wire(running.address) for _ in range(3)]
        for wire in wires:
            undo.callback(wire.close)
        server = undo.enter_context(FakeServer(wires[0].address))
        links = [undo.enter_context(SchedulerClient(wire.address, "worker")) for wire in wires[1:]]
        joining = threading.Thread(target=links[0].join, args=JOIN)
        joining.start()
        links[1].join(*JOIN)
        joining.join()
        for _ in range(20):
            before = routes(running.membership)
            for wire in wires:
                wire.break_off()
            until(functools.partial(have_reconnected, running.membership, before))
        assert sorted(running.membership.workers) == [0, 1]
        assert not running.membership.broken
        assert server.error is None


def routes(membership):
    return {peer.link.route for peer in list(membership._peers.known.values())}


def have_reconnected(membership, before):
    return not membership._detector.has_disconnected and before.isdisjoint(routes(membership))
