"""The data loop: a C++ thread that serves through the libzmq that pyzmq has loaded."""

import contextlib
import gc
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_client import (
    JOB,
    SLOTS,
    TABLE,
    WAIT_MS,
    Client,
    add_table,
    hashes_of,
    make_endpoint,
)
from paths import SUPPORT
from shoal import _core
from shoal._core import Op, Status
from shoal.cluster.protocol.curve import Guard, Keys, make_keys
from shoal.cluster.server.data_loop import start_loop
from shoal.errors import TransportError
from tiers import rounds


@pytest.fixture
def endpoint():
    return make_endpoint()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def loop(endpoint, context):
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0")
    yield loop
    loop.stop()


def test_the_constants_are_pyzmq_s():
    """There is no zmq.h at hand when the engine is compiled."""
    assert len(_core.zmq_constants()) >= 19
    for name, value in _core.zmq_constants().items():
        assert int(getattr(zmq, name)) == value, name


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://[::1]:0", "inproc://loop", "ipc"])
def test_requests_are_answered_over_every_transport(endpoint, context, tmp_path, where):
    if "::1" in where and not ipv6():
        pytest.skip("no IPv6 here")
    address = f"ipc://{tmp_path}/loop" if where == "ipc" else where
    loop = start_loop(endpoint, context, address)
    assert loop.running
    assert not loop.address.endswith((":0", ":*"))
    with Client(context, loop.address) as client:
        for n in (0, 1, 7, 5000):
            hashes = hashes_of(n, seed=n)
            client.push(hashes, np.full((len(hashes), 1), 2, np.float32))
            assert (client.pull(hashes) == -2).all()
    assert loop.metrics()["requests"] == 8
    loop.stop()
    assert not loop.running


def ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


def until(what):
    deadline = time.monotonic() + WAIT_MS / 1000
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_large_replies_are_whole_and_their_memory_is_used_again(endpoint, context, loop):
    add_table(endpoint, 2, 16)
    hashes = hashes_of(30_000)
    grads = np.random.default_rng(3).random((len(hashes), 16), np.float32)
    with Client(context, loop.address) as client:
        reply = client.ask(Op.PUSH, [hashes, grads], dtype=1, dim=16, count=len(hashes), table=2)
        assert reply.status == Status.OK, reply.text
        for _ in range(20):
            assert np.array_equal(client.pull(hashes, dim=16, table=2), -grads)
    # The last one is counted when it has left, and its memory may be on its way back.
    until(lambda: loop.metrics()["replies"] == 21 and loop.metrics()["unsent_bytes"] == 0)
    metrics = loop.metrics()
    assert metrics["reply_bytes"] > 20 * grads.nbytes
    assert metrics["request_bytes"] > 21 * hashes.nbytes + grads.nbytes


def test_many_peers_are_answered_each_with_its_own(endpoint, context, loop):
    hashes = hashes_of(300)
    with Client(context, loop.address) as client:
        client.push(hashes, np.arange(len(hashes), dtype=np.float32)[:, None])
    wrong = []

    def work(seed):
        with Client(context, loop.address) as client:
            random = np.random.default_rng(seed)
            for _ in range(30):
                some = np.sort(random.choice(len(hashes), 50, replace=False))
                if not np.array_equal(client.pull(hashes[some])[:, 0], -some.astype(np.float32)):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert loop.metrics()["dropped_gone"] == 0


def test_a_python_thread_that_holds_the_lock_holds_no_request_up():
    """No time is compared: requests are answered while no other Python thread of the server can run at all."""
    program = textwrap.dedent("""
        import ctypes, sys, time
        import zmq
        sys.path.insert(0, sys.argv[1])
        from loop_client import make_endpoint
        from shoal.cluster.server.data_loop import start_loop

        context, endpoint = zmq.Context(), make_endpoint()
        loop = start_loop(endpoint, context, "tcp://127.0.0.1:0")
        print(loop.address, flush=True)
        sys.stdin.readline()
        # A C function that keeps the lock: it returns when the other end of the pipe has written.
        byte = ctypes.create_string_buffer(1)
        read = ctypes.PyDLL(None).read
        print("locked", flush=True)
        read(0, byte, 1)
        print(loop.metrics()["requests"], flush=True)
        loop.stop()
        context.term()
    """)
    with (
        subprocess.Popen(
            [sys.executable, "-u", "-c", program, str(SUPPORT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as server,
        zmq.Context() as context,
    ):
        try:
            address = server.stdout.readline().strip()
            hashes = hashes_of(500)
            with Client(context, address) as client:
                client.push(hashes, np.ones((len(hashes), 1), np.float32))
                server.stdin.write("\n")
                assert server.stdout.readline().strip() == "locked"
                time.sleep(0.05)
                for _ in range(200):
                    assert (client.pull(hashes) == -1).all()
            server.stdin.write("\n")
            assert server.stdout.readline().strip() == "201"
            assert server.wait(120) == 0
        finally:
            server.kill()


def test_whatever_frames_arrive_are_answered_or_counted_and_the_loop_goes_on(endpoint, context, loop):
    random = np.random.default_rng(5)
    good = hashes_of(20)
    with Client(context, loop.address) as client:
        client.push(good, np.ones((len(good), 1), np.float32))
        header = _core.encode_header(op=Op.PULL, payload=[good], dtype=1, dim=1, count=len(good), table=TABLE)
        odd = [
            [b""],
            [b"", b""],
            [b"x"],
            [header],
            [header, b""],
            [b"", header, good],  # as a REQ sends it
            [header, good, b"more"],
            [header, good, b"and", b"more"],
            [header, good, *[b"more"] * 200],
            [header[:-1], good],
            [header + b"\0", good],
            [header, good[1:]],
            [random.bytes(64)],
            [random.bytes(64), random.bytes(100)],
            [random.bytes(3_000_000)],
        ]
        for frames in odd:
            client.socket.send_multipart(frames)
            reply = client.receive()
            assert reply.reply
            assert reply.status == Status.BAD_REQUEST, frames
        assert (client.pull(good) == -1).all()
    assert loop.metrics()["requests"] == len(odd) + 2


@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=6))
@settings(max_examples=rounds(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_frames_get_a_reply(loop, context, frames):
    with Client(context, loop.address) as client:
        client.socket.send_multipart(frames)
        assert client.receive().status == Status.BAD_REQUEST
    assert loop.running


def test_bytes_that_are_no_zeromq_leave_the_loop_alone(endpoint, context, loop):
    host, port = loop.address.removeprefix("tcp://").split(":")
    random = np.random.default_rng(11)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    for stray in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 100,
        b"\xff" * 100,
        random.bytes(5000),
        greeting,
        greeting + random.bytes(1000),
        greeting + b"\x04\xff" + b"\x05READY" + b"\xff" * 249,
        greeting + b"\x06" + struct.pack(">Q", 1 << 63) + b"x",
    ):
        with socket.create_connection((host, int(port)), timeout=WAIT_MS / 1000) as raw:
            raw.sendall(stray)
            raw.settimeout(0.05)
            with contextlib.suppress(OSError):
                raw.recv(1000)
    assert loop.running
    with Client(context, loop.address) as client:
        assert len(client.pull(hashes_of(3))) == 3


def test_a_message_above_the_limit_cuts_its_sender_off_and_nobody_else(endpoint, context):
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0", max_message=100_000)
    try:
        with Client(context, loop.address) as other, Client(context, loop.address) as client:
            hashes = hashes_of(1000)
            other.push(hashes, np.ones((len(hashes), 1), np.float32))
            monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            client.socket.send_multipart([b"x" * 64, b"x" * 100_001])
            assert monitor.poll(WAIT_MS), "was not cut off"
            client.socket.disable_monitor()
            monitor.close(0)
            assert (other.pull(hashes) == -1).all()
            assert loop.metrics()["requests"] == 2  # it never got so far as to be a request
    finally:
        loop.stop()


def test_replies_to_peers_that_vanish_are_dropped_and_counted(endpoint, context, loop):
    hashes = hashes_of(20_000)
    for _ in range(20):
        with zmq.Context() as gone, Client(gone, loop.address) as client:
            for _ in range(5):
                client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes))
            assert client.socket.poll(WAIT_MS)
    with Client(context, loop.address) as client:
        assert len(client.pull(hashes)) == len(hashes)

    def all_counted():  # a reply is counted once it is on its way
        metrics = loop.metrics()
        return metrics["requests"] == metrics["replies"] + metrics["dropped_gone"] + metrics["dropped_full"]

    until(all_counted)
    assert loop.metrics()["requests"] > 20  # a client that goes takes what it has not sent with it


def test_a_peer_that_does_not_read_is_not_waited_for(endpoint, context):
    """What it does not take is bounded; others are told to come again while all of the bound is its."""
    add_table(endpoint, 2, 64)
    hashes = hashes_of(10_000)
    one = len(hashes) * 64 * 4
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0", unsent_bytes=10 * one, heartbeat=0)
    try:
        with Client(context, loop.address) as idle, Client(context, loop.address) as client:
            idle.socket.rcvhwm = 1
            idle.socket.disconnect(loop.address)
            idle.socket.connect(loop.address)
            for _ in range(60):
                idle.send(Op.PULL, [hashes], dtype=1, dim=64, count=len(hashes), table=2)
            for _ in range(20):
                reply = client.ask(Op.PULL, [hashes], dtype=1, dim=64, count=len(hashes), table=2)
                assert reply.status in {Status.OK, Status.OVERLOADED}
                assert loop.metrics()["unsent_bytes"] <= 11 * one  # and one that was just made
            client.push(hashes, np.ones((len(hashes), 1), np.float32))  # whose reply holds no values
            assert loop.metrics()["overloaded"] > 0
            idle.socket.close(0)
            until(lambda: loop.metrics()["unsent_bytes"] == 0)  # what waited for it goes with it
            assert (client.pull(hashes, dim=64, table=2) == 0).all()
    finally:
        loop.stop()


def test_replies_that_a_control_call_releases_are_sent_at_once(context):
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.set_map(1, [(0, SLOTS)])
    endpoint.start_job(JOB, "bsp", 0, False)
    endpoint.admit(0, 1, 0)
    endpoint.admit(1, 1, 0)
    add_table(endpoint, TABLE, 1)
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0")
    try:
        with Client(context, loop.address) as client:
            hashes = hashes_of(10)
            reply = client.ask(
                Op.TICK, [np.array([], np.uint64), np.array([], np.uint32)], table=0, clock=0, count=0, aux=0
            )
            assert reply.status == Status.OK, reply.text
            sequence = client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes), clock=1)
            assert client.receive().status == Status.DEFERRED
            assert not client.socket.poll(50)
            endpoint.dismiss(1, 1)
            reply = client.receive()
            assert (reply.status, reply.sequence, reply.count) == (Status.OK, sequence, len(hashes))
        assert loop.metrics()["wakes"] >= 1
    finally:
        loop.stop()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tcp://127.0.0.1:0", "inproc://kept"])
def test_pushes_of_any_size_that_wait_for_their_clock_are_applied_as_sent(context, where):
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.set_map(1, [(0, SLOTS)])
    endpoint.start_job(JOB, "bsp", 0, False)
    endpoint.admit(0, 1, 0)
    add_table(endpoint, TABLE, 1)
    loop = start_loop(endpoint, context, where)
    try:
        with Client(context, loop.address) as client:
            expected = {}
            for seed, n in enumerate((1, 3000, 5000, 300_000, 200, 40_000)):
                hashes = hashes_of(n, seed)
                grads = np.random.default_rng(n).random((len(hashes), 1), np.float32)
                client.push(hashes, grads)
                expected |= dict(zip(hashes.tolist(), (-grads).ravel().tolist(), strict=True))
            named = np.array([TABLE], np.uint32)
            reply = client.ask(Op.TICK, [np.array([], np.uint64), named], table=0, clock=0, count=0, aux=1)
            assert reply.status == Status.OK, reply.text
            hashes = np.array(sorted(expected), np.uint64)
            reply = client.ask(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes), clock=1)
            assert reply.status == Status.OK, reply.text
            assert reply.values.tolist() == [expected[key] for key in hashes.tolist()]
        assert endpoint.metrics()["pending_bytes"] == 0
    finally:
        loop.stop()


def test_an_address_that_cannot_be_bound_is_an_error_that_names_it(endpoint, context, loop):
    for address in (loop.address, "tcp://192.0.2.1:0", "tcp://127.0.0.1", "nothing://x", ""):
        with pytest.raises(TransportError, match="cannot serve at") as caught:
            start_loop(endpoint, context, address)
        assert address in str(caught.value)
    with pytest.raises(ValueError, match="dead_after_ms must exceed heartbeat_ms"):
        start_loop(endpoint, context, "tcp://127.0.0.1:0", heartbeat=2.0, dead_after=1.0)
    with Client(context, loop.address) as client:
        assert len(client.pull(hashes_of(3))) == 3


def test_a_pyzmq_without_a_shared_libzmq_is_an_error_with_the_remedy(endpoint, context, tmp_path):
    with pytest.raises(TransportError, match=r"is not loaded.*import zmq first"):
        _core.DataLoop(endpoint, context.underlying, str(tmp_path / "none.so"), "inproc://a")
    with pytest.raises(TransportError, match=r"no function zmq_version.*install pyzmq's wheel"):
        _core.DataLoop(endpoint, context.underlying, _core.__file__, "inproc://a")


def test_a_context_that_is_terminated_ends_the_loop(endpoint):
    context = zmq.Context()
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0")
    context.term()  # would wait for a loop that did not let go
    until(lambda: not loop.running)
    loop.stop()


def test_a_loop_that_is_dropped_ends_and_its_address_is_free_again(endpoint, context):
    loop = start_loop(endpoint, context, "tcp://127.0.0.1:0")
    address = loop.address
    del loop
    gc.collect()
    begun = []

    def begins():  # libzmq closes in a thread of its own
        with contextlib.suppress(TransportError):
            begun.append(start_loop(endpoint, context, address))
        return begun

    until(begins)
    (loop,) = begun
    assert loop.address == address
    loop.stop()
    loop.stop()


def test_loops_come_and_go_under_requests(context):
    endpoint = make_endpoint()
    hashes = hashes_of(100)
    for i in range(20):
        loop = start_loop(endpoint, context, f"inproc://loop-{i}")
        with Client(context, loop.address) as client:
            client.push(hashes, np.ones((len(hashes), 1), np.float32)) if i == 0 else client.pull(hashes)
            client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes))
            loop.stop()


def test_a_forked_child_s_copy_does_nothing_and_ends(endpoint, context, loop):
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            loop.stop()
            del loop
            gc.collect()
            status = 0
        os._exit(status)
    deadline = time.monotonic() + 120
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    assert status == 0
    with Client(context, loop.address) as client:
        assert len(client.pull(hashes_of(3))) == 3


def test_with_keys_only_those_listed_are_served(endpoint, context, tmp_path):
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    keys, worker = (Keys.load(tmp_path / "keys", role) for role in ("server", "worker"))
    stranger = Keys.load(tmp_path / "others", "worker")
    for name in ("server.key", "scheduler.key"):  # the stranger knows whom to speak to
        (tmp_path / "others" / name).write_bytes((tmp_path / "keys" / name).read_bytes())
    hashes = hashes_of(40_000)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    with Guard(context, keys) as guard, zmq.Context() as clients:
        loop = start_loop(endpoint, context, "tcp://127.0.0.1:0", keys=keys)
        try:
            for who in (None, stranger):
                with Client(clients, loop.address, keys=who, watched=failed) as client:
                    client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes))
                    assert client.monitor.poll(WAIT_MS)
                    assert not client.socket.poll(0)
            assert loop.metrics()["requests"] == 0
            with Client(clients, loop.address, keys=worker) as client:
                client.push(hashes, np.ones((len(hashes), 1), np.float32))
                assert (client.pull(hashes) == -1).all()
            assert (guard.admitted, loop.metrics()["requests"]) == (1, 2)
        finally:
            loop.stop()


def test_keys_that_libzmq_does_not_take_are_an_error(endpoint, context):
    module = __import__("zmq.backend.cython._zmq", fromlist=["_zmq"]).__file__
    with pytest.raises(TransportError, match="CURVE_SECRETKEY"):
        _core.DataLoop(endpoint, context.underlying, module, "tcp://127.0.0.1:0", curve_secret="x", zap_domain="shoal")
