"""The scheduler and its links over real sockets, with servers that only acknowledge."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

import shoal
from cluster_fakes import HEARTBEAT, TIMEOUT, FakeServer, Wire, declare_dead, scheduler
from shoal.cluster.protocol import connection as connections
from shoal.cluster.protocol.address import complete, split, try_out
from shoal.cluster.protocol.curve import Keys, make_keys
from shoal.cluster.protocol.messages import (
    VERSION,
    AddTable,
    Barrier,
    BarrierReply,
    CreateTable,
    Dismiss,
    Fence,
    Figures,
    GetMap,
    GetMapReply,
    GetMetrics,
    HelloReply,
    JobConsistency,
    Join,
    JoinReply,
    Leave,
    LeaveReply,
    ListTables,
    ListTablesReply,
    MetricsReply,
    Reply,
    Request,
    StartJob,
    TableRecord,
    TableReply,
    decode,
    encode,
)
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig
from shoal.errors import ClosedError, DeadlineExceededError, NotConnectedError, ProtocolError, ServerLostError
from wires import Faults
from wires import Wire as Changing

FORM = TableRecord.of(shoal.local().table("x", dim=3).spec)


@pytest.mark.parametrize("kind", ["raises", "cannot be sent"])
def test_an_error_in_figures_for_displays_ends_no_connection(kind, caplog):
    calls = []

    def figures():
        calls.append(1)
        if kind == "raises":
            raise ZeroDivisionError("in a metric")
        return Figures({"x" * 100_000: 1.0})

    with (
        scheduler(1, heartbeat=0.1) as cluster,
        SchedulerClient(cluster.address, "reader", figures=figures) as link,
    ):
        link.hello(TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert link.call(GetStatus(), StatusReply, TIMEOUT).cluster == link._welcome.cluster
        assert link.fault is None
    assert len(calls) >= 3
    assert "this reader reports no figures for displays: " in caplog.text


def test_the_end_of_a_context_ends_a_connection_without_a_word():
    """As at the end of a process that a signal interrupts; a traceback of the thread would fail this test."""
    with scheduler(1) as cluster:
        context = zmq.Context()
        link = SchedulerClient(cluster.address, "reader", context=context)
        link.hello(TIMEOUT)
        context.term()
        link.wait_for_end(TIMEOUT)
        assert isinstance(link.fault, NotConnectedError)
        link.close()


def test_servers_and_workers_join_agree_on_a_table_meet_at_a_barrier_and_leave():
    with (
        scheduler(2) as cluster,
        FakeServer(cluster.address, rank=1) as second,
        FakeServer(cluster.address, rank=0) as first,
        SchedulerClient(cluster.address, "worker") as one,
        SchedulerClient(cluster.address, "worker") as two,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [
            pool.submit(link.join, Join(rank, workers=2, rules=JobConsistency.of(shoal.SSP(3))), TIMEOUT)
            for link, rank in ((one, 1), (two, 0))
        ]
        joined = [waiting.result() for waiting in both]
        assert [place.rank for place in joined] == [1, 0]
        assert joined[0].map == joined[1].map
        assert joined[0].job == joined[1].job
        assert [(run[0], run[1], run.endpoint.server) for run in joined[0].map.runs] == [(0, 512, 0), (512, 1024, 1)]
        table = one.call(CreateTable(FORM), TableReply, timeout=TIMEOUT)
        assert table == TableReply(0, FORM)
        assert two.call(CreateTable(FORM), TableReply, timeout=TIMEOUT) == table
        waiting = pool.submit(one.call, Barrier("end"), BarrierReply, timeout=TIMEOUT)
        assert not waiting.done()
        two.call(Barrier("end"), BarrierReply, timeout=TIMEOUT)
        waiting.result()
        one.call(Leave(), LeaveReply, TIMEOUT)
        two.call(Leave(), LeaveReply, TIMEOUT)
    orders = [order.body for order in first.orders]
    assert [type(order) for order in orders] == [StartJob, AddTable, Fence, Dismiss, Fence, Dismiss]
    assert orders[0].incarnations == (1, 1)
    assert second.orders == first.orders


@pytest.mark.slow
def test_who_misses_others_at_the_deadline_is_told_which_ones():
    with scheduler(2) as cluster, FakeServer(cluster.address), SchedulerClient(cluster.address, "worker") as link:
        until(lambda: any(server.inside for server in cluster.membership._peers.servers.values()))
        link.hello(TIMEOUT)
        with pytest.raises(DeadlineExceededError, match="1 of 2 servers have joined"):
            link.join(Join(rules=JobConsistency.of(shoal.BSP())), 3.0)
        with FakeServer(cluster.address) as other:
            assert other.joined.wait(TIMEOUT)


def until(what):
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_scheduler_that_was_started_anew_ends_nobody_and_both_sides_say_what_holds(caplog):
    faults = []
    with contextlib.ExitStack() as ends:
        with scheduler(1, heartbeat=1.0) as cluster:
            address = cluster.address
            server = ends.enter_context(FakeServer(address))
            link = ends.enter_context(SchedulerClient(address, "worker", on_fault=faults.append))
            link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
            cluster._membership.stop = lambda now: []  # it dies: nobody is told
        with scheduler(1, bind=address) as anew:
            until(lambda: anew.refused().get("unknown", 0) > 3)
            with pytest.raises(NotConnectedError, match="it was restarted since"):
                link.call(Barrier("b"), BarrierReply, timeout=TIMEOUT)
            link.check()
            server.link.check()
            assert (server.error, faults) == (None, [])
            assert anew.membership.workers == {}
            with FakeServer(address) as fresh, SchedulerClient(address, "worker") as late:  # another cluster
                assert fresh.joined.wait(TIMEOUT)
                late.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
            anew._membership.stop = lambda now: []
    lines = [record.getMessage() for record in caplog.records]
    assert sum("was restarted and does not know this server any more" in line for line in lines) == 1
    assert sum("was restarted and does not know this worker any more" in line for line in lines) == 1
    assert sum("a process that this scheduler does not know" in line for line in lines) == 1


def test_a_stopped_scheduler_tells_everybody():
    events, faults = [], []
    with (
        scheduler(1) as cluster,
        SchedulerClient(cluster.address, "worker", on_event=events.append, on_fault=faults.append) as link,
    ):
        link.hello(TIMEOUT)
        cluster.stop()
        until(lambda: link.fault)
        assert link.stopped
        assert [type(event).__name__ for event in events] == ["SchedulerStopped"]
        assert faults == [link.fault]
        with pytest.raises(NotConnectedError, match="was stopped"):
            link.call(Barrier("b"), BarrierReply, timeout=TIMEOUT)


def test_a_lost_server_ends_a_wait_at_once_and_every_call_after_it():
    with (
        scheduler(1) as cluster,
        FakeServer(cluster.address) as server,
        SchedulerClient(cluster.address, "worker") as one,
        SchedulerClient(cluster.address, "worker") as two,
        ThreadPoolExecutor(3) as pool,
    ):
        wanted = Join(workers=2, rules=JobConsistency.of(shoal.ASP()))
        joins = [pool.submit(link.join, wanted, TIMEOUT) for link in (one, two)]
        assert sorted(join.result().rank for join in joins) == [0, 1]
        waiting = pool.submit(one.call, Barrier("b"), BarrierReply, timeout=TIMEOUT)
        server.die()
        with pytest.raises(
            ServerLostError, match=r"server 0 at tcp://127\.0\.0\.1:\d+ .* is lost .* process has ended"
        ):
            waiting.result()
        until(lambda: two.fault is not None)  # before that the scheduler lets it leave
        with pytest.raises(ServerLostError):
            two.call(Leave(), LeaveReply, TIMEOUT)


@pytest.mark.slow
def test_a_server_that_a_worker_cannot_reach_is_named_with_the_remedy():
    with (
        scheduler(1) as cluster,
        FakeServer(cluster.address) as server,
        SchedulerClient(cluster.address, "worker") as link,
    ):
        assert server.joined.wait(TIMEOUT)
        server._socket.close(0)
        until(lambda: try_out(server._addresses[0], 1.0) is not None)
        with pytest.raises(NotConnectedError, match=r"server 0 cannot be reached from here .* --advertise HOST"):
            link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        until(lambda: not cluster.membership.workers)  # it left


def test_what_is_no_control_message_gets_no_answer_and_harms_nobody():
    with scheduler(1) as cluster, zmq.Context() as context, context.socket(zmq.DEALER) as stray:
        stray.setsockopt(zmq.LINGER, 0)
        stray.connect(cluster.address)
        for frames in ([b""], [b"GET / HTTP/1.1"], [b"SHOALCTL\1\0", b"\xff"], [b"SHOALCTL\1\0"], [b"x"] * 9):
            stray.send_multipart(frames)
        stray.send_multipart([b"SHOALCTL" + struct.pack("<H", VERSION + 1), b"hello"])
        assert stray.poll(TIMEOUT * 1000)
        answers = [stray.recv_multipart()]
        while stray.poll(100):
            answers.append(stray.recv_multipart())
        assert b"version %d meet version %d" % (VERSION + 1, VERSION) in answers[-1][2]
        with FakeServer(cluster.address) as server:
            assert server.joined.wait(TIMEOUT)


OLD = {
    "ZeroMQ 1": bytes.fromhex("0100020041"),
    "ZeroMQ 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00\x00\x01A",
    "HTTP": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (k, b"y" * 60) for k in range(20)) + b"\r\n",
}


def test_what_comes_by_another_protocol_is_counted_and_the_log_has_one_line_of_it(caplog):
    with scheduler(1) as cluster, FakeServer(cluster.address) as server:
        address = ("127.0.0.1", split(cluster.address)[1])
        for k in range(100):
            with socket.create_connection(address, TIMEOUT) as stranger:
                stranger.sendall(OLD["ZeroMQ 2"] if k % 2 else OLD["ZeroMQ 1"])
        with socket.create_connection(address, TIMEOUT) as stranger:
            stranger.sendall(OLD["HTTP"])
            until(lambda: cluster.refused().get("garbage", 0) >= 100)
        assert server.joined.wait(TIMEOUT)
        with SchedulerClient(cluster.address, "worker") as link:
            link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
            figures = link.call(GetMetrics(), MetricsReply, timeout=TIMEOUT)
            assert figures.scheduler["garbage"] >= 100
    assert sum("the protocol of ZeroMQ 2" in record.getMessage() for record in caplog.records) <= 2


def test_a_request_out_of_bounds_or_one_that_meets_a_defect_is_answered_and_the_scheduler_goes_on(caplog, monkeypatch):
    with scheduler(1) as cluster, FakeServer(cluster.address), SchedulerClient(cluster.address, "worker") as link:
        link.hello(TIMEOUT)
        for bad in (Join(rank=2**70), Join(workers=2**40), Barrier("bad\ud800")):
            with pytest.raises(ValueError, match="the scheduler"):
                link.ask(bad)
        monkeypatch.setattr("shoal.cluster.protocol.scheduler_client.checked", lambda body: body)
        with pytest.raises(ValueError, match=r"workers = 1099511627776: Expected"):
            link.call(Join(workers=2**40), JoinReply, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="from 1 to 16384 workers, got workers=100000000"):
            link.join(Join(workers=10**8, rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        monkeypatch.setattr(cluster.membership._jobs, "barrier", lambda *_: 1 / 0)
        link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        with pytest.raises(ProtocolError, match="caused an internal error: ZeroDivisionError"):
            link.call(Barrier("b"), BarrierReply, timeout=TIMEOUT)
        assert link.call(CreateTable(FORM), TableReply, timeout=TIMEOUT) == TableReply(0, FORM)
        refused = cluster.refused()
        assert (refused["invalid"], refused["failed"]) == (1, 1)
    assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_a_link_that_hears_what_it_cannot_read_goes_on_and_names_it_when_a_call_fails():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with SchedulerClient(f"tcp://127.0.0.1:{port}", "server") as link, ThreadPoolExecutor(1) as pool:
            hello = pool.submit(link.hello, timeout=TIMEOUT)
            assert router.poll(TIMEOUT * 1000)
            route = router.recv_multipart()[0]
            welcome = HelloReply("c", "h", 16, HEARTBEAT, 5 * HEARTBEAT, 0, TIMEOUT)
            router.send_multipart([route, *encode(Reply(1, welcome))])
            assert hello.result() == welcome
            for frames in ([b"GET /"], [*encode(welcome)[:1], b"\xff"], [b"SHOALCTL\x09\0", b"", b"no version 9 here"]):
                router.send_multipart([route, *frames])
            until(lambda: link._refusal)
            with pytest.raises(DeadlineExceededError, match="the other side refuses: no version 9 here"):
                link.call(GetMap(), GetMapReply, timeout=0.4)
            link.check()


def test_a_flood_of_messages_does_not_hide_that_a_worker_is_dead(monkeypatch):
    receive = Scheduler._receive
    monkeypatch.setattr(Scheduler, "_receive", lambda self: receive(self) and False)  # there are always more
    with scheduler(1) as cluster, FakeServer(cluster.address):
        link = SchedulerClient(cluster.address, "worker", about="a worker\n\x1b[31mthat paints")
        link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        known = list(cluster.membership.state.peers.values())
        assert any("(a worker??[31mthat paints)" in str(peer) for peer in known)
        link.close()
        running = cluster.membership
        running.settings = msgspec.structs.replace(running.settings, heartbeat=0.1)  # how often it looks
        declare_dead(cluster, "worker", 0)
        assert not cluster.membership.workers


def test_a_peer_of_another_version_is_told_so():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with SchedulerClient(f"tcp://127.0.0.1:{port}", "worker") as link, ThreadPoolExecutor(1) as pool:
            hello = pool.submit(link.hello, timeout=TIMEOUT)
            assert router.poll(TIMEOUT * 1000)
            router.send_multipart([router.recv_multipart()[0], b"SHOALCTL\x09\0", b"", b"version 1 meets version 9"])
            with pytest.raises(ProtocolError, match="version 1 meets version 9"):
                hello.result()
        router.close(0)


def test_a_closed_link_says_so_and_ends_the_calls_that_are_under_way():
    with scheduler(1) as cluster, ThreadPoolExecutor(1) as pool:
        link = SchedulerClient(cluster.address, "worker")
        join = pool.submit(link.join, Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        until(lambda: link._welcome is not None)
        link.close()
        with pytest.raises(ClosedError, match="was closed"):
            join.result()
        link.close()


def test_a_connection_that_breaks_is_made_anew_and_nobody_is_taken_for_another():
    with (
        scheduler(1) as cluster,
        FakeServer(cluster.address),
        SchedulerClient((wire := Wire(cluster.address)).address, "worker") as link,
        ThreadPoolExecutor(1) as pool,
    ):
        joined = link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        for _ in range(3):
            wire.break_off()
            table = link.call(CreateTable(FORM), TableReply, timeout=TIMEOUT)
            assert table == TableReply(0, FORM)
        wire.cut()
        waiting = pool.submit(link.call, Barrier("b"), BarrierReply, timeout=TIMEOUT)
        until(lambda: wire.dropped)
        wire.break_off()
        wire.mend()
        waiting.result()
        assert cluster.membership.workers == {joined.rank: joined.incarnation}
    wire.close()


def test_an_address_that_is_taken_is_said_to_be_so():
    with scheduler(1) as cluster, pytest.raises(OSError, match=f"cannot listen at {cluster.address}"):
        Scheduler(SchedulerConfig(bind=cluster.address, servers=1))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5570", "tcp://h", "tcp://h:x", "tcp://h:70000", "tcp://:1", "tcp://h:0"]
)
def test_what_cannot_be_connected_to_is_no_address(address):
    with pytest.raises(ValueError, match=r"address|port|cannot be connected to"):
        split(address)


def test_addresses_of_version_6_and_names_are_completed():
    assert split("tcp://[::1]:5570") == ("::1", 5570)
    assert split("tcp://*:*", wildcard=True) == ("*", 0)
    assert complete("tcp://*:7", "fe80::1") == "tcp://[fe80::1]:7"
    assert complete("tcp://node-3.example:7", "10.0.0.1") == "tcp://node-3.example:7"


@pytest.mark.slow
def test_a_request_whose_reply_was_lost_is_answered_however_many_others_overtake_it(monkeypatch):
    lost = []
    send = Scheduler._send_frames

    def lose_some(scheduler, route, frames):
        reply = decode(frames)
        if isinstance(reply, Reply) and isinstance(reply.body, TableReply) and len(lost) < 2:
            lost.append(reply)  # it is executed, and its asker does not hear of it
        else:
            send(scheduler, route, frames)

    with (
        scheduler(1) as cluster,
        FakeServer(cluster.address),
        SchedulerClient(cluster.address, "worker") as link,
    ):
        link.join(Join(rules=JobConsistency.of(shoal.ASP())), TIMEOUT)
        monkeypatch.setattr(Scheduler, "_send_frames", lose_some)
        asked = link.ask(CreateTable(FORM))
        until(lambda: lost)
        for _ in range(300):
            link.call(GetMap(), GetMapReply, timeout=TIMEOUT)
        assert link.answer(asked, TableReply, timeout=TIMEOUT) == TableReply(0, FORM)
        link.forget(asked)
        link.call(GetMap(), GetMapReply, timeout=TIMEOUT)
        (peer,) = [peer for peer in cluster.membership._peers.known.values() if peer.role == "worker"]
        assert len(peer.replies) <= 1  # what was answered is forgotten


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "curve"])
def test_a_link_that_is_cut_or_whose_bytes_are_changed_asks_on_over_another_connection(secured, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_HANDSHAKE_MS", 500)
    monkeypatch.setattr(connections, "_HEARTBEAT_MS", 200)
    monkeypatch.setattr("shoal.cluster.protocol.scheduler_client._SILENCE_MS", 600)
    if secured:
        make_keys(tmp_path / "keys")
    curve = tmp_path / "keys" if secured else None
    keys = None if curve is None else Keys.load(curve, "worker")
    faults = Faults(random.Random(0), ["cut", "flip", "drop"], [500, 3000], most=15)
    with (
        scheduler(1, curve=curve) as cluster,
        contextlib.closing(Changing(int(cluster.address.rsplit(":")[-1]), faults)) as wire,
        SchedulerClient(wire.address, "worker", keys=keys) as link,
    ):
        link.hello(TIMEOUT)
        calls = 0
        while not faults.is_over:
            assert link.call(ListTables(), ListTablesReply, timeout=TIMEOUT) == ListTablesReply(())
            calls += 1
        print(calls, faults.done, wire.connections)
        assert wire.connections > 5
        assert len(cluster.membership._peers.known) == 1  # however often it connected


def test_a_damaged_message_is_dropped_as_one_that_was_lost():
    with scheduler(1) as cluster, FakeServer(cluster.address), SchedulerClient(cluster.address, "worker") as link:
        link.join(Join(rules=JobConsistency.of(shoal.BSP())), TIMEOUT)
        send, damaged = link.sender, []
        asked = link.ask(GetMap())
        assert isinstance(link.answer(asked, GetMapReply, timeout=TIMEOUT), GetMapReply)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stray:
            stray.setsockopt(zmq.LINGER, 0)
            stray.connect(cluster.address)
            for at in range(4, 40):  # a leave in the name of the worker, and a bit of it flipped
                preamble, leave = encode(Request(send, 1 << 40, Leave()))
                leave = bytearray(leave)
                leave[at % len(leave)] ^= 1 << at % 8
                damaged.append(bytes(leave))
                stray.send_multipart([preamble, damaged[-1]])
            until(lambda: cluster.refused().get("garbage", 0) == len(damaged))
            assert not stray.poll(50)
        assert cluster.membership.workers == {0: 1}
        link.check()


@pytest.mark.slow
@pytest.mark.parametrize("journaled", [False, True])
def test_a_scheduler_with_nothing_to_do_waits(tmp_path, journaled):
    """A load only makes the rounds fewer."""
    rounds = 0
    end = time.monotonic() + 1.0

    def going():
        nonlocal rounds
        rounds += 1
        return time.monotonic() < end

    journal = tmp_path / "journal" if journaled else None
    with Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1, journal=journal)) as scheduler:
        scheduler.run(going)
    assert rounds < 50
