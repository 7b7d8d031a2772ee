"""Data loops that replicate to each other over tcp: connections that are cut, damaged, refused and authenticated."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
import zmq

from loop_client import JOB, SLOTS, TABLE, Client, add_table, hashes_of
from replicated import equal
from shoal import _core
from shoal._core import Op, Status
from shoal.cluster.protocol.curve import Guard, Keys, make_keys
from shoal.cluster.server.data_loop import start_loop
from shoal.errors import TransportError
from tiers import long_after, long_but
from wires import Faults, Wire

ALL = [(0, SLOTS)]
STREAM = 2**40 + 7
WAIT_SECONDS = 120.0  # only spent by a test that fails


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def port_of(address: str) -> int:
    port = urlsplit(address).port
    assert port is not None
    return port


class Pair:
    """A primary and a backup in one process, each with a loop."""

    worker: Keys | None = None

    def __init__(self, context: zmq.Context, keys: Keys | None = None) -> None:
        self.context, self.keys = context, keys
        self.primary, self.backup = _core.Endpoint(SLOTS, ALL), _core.Endpoint(SLOTS)
        self.loops = [start_loop(one, context, "tcp://127.0.0.1:0", keys=keys) for one in (self.primary, self.backup)]
        self.backup.assign(1, [], [], [(STREAM, ALL)])

    def connect(self, address: str | None = None, server_key: str = "") -> None:
        """Open the stream, then give orders: they are records of it."""
        self.primary.assign(1, ALL, [(STREAM, address or self.loops[1].address, server_key, ALL, [])])
        self.primary.start_job(JOB, "asp", 0, False)
        self.primary.admit(0, 1, 0)
        add_table(self.primary, TABLE, 1)

    def restart_backup(self) -> None:
        """End the loop of the backup and start another one at its address."""
        self.loops[1].stop()
        self.start_backup()

    def start_backup(self) -> None:
        address = self.loops[1].address

        def is_started() -> bool:
            with contextlib.suppress(TransportError):  # libzmq closes the former socket a little later
                self.loops[1] = start_loop(self.backup, self.context, address, keys=self.keys)
            return self.loops[1].running

        until(is_started)

    def is_committed(self) -> bool:
        return self.primary.committed(self.primary.position())

    def check(self, hashes: np.ndarray, weights: np.ndarray) -> None:
        """Compare the backup with the primary, bit by bit, and both with what was pushed."""
        until(self.is_committed)
        assert equal(self.primary, self.backup.replica(STREAM), ALL)
        with Client(self.context, self.loops[0].address, keys=self.worker) as client:
            assert np.array_equal(client.pull(hashes), weights)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pair(context: zmq.Context) -> Iterator[Pair]:
    pair = Pair(context)
    yield pair
    for loop in pair.loops:
        loop.stop()


def push(client: Client, hashes: np.ndarray, times: int, rng: np.random.Generator) -> np.ndarray:
    """Push integers to parts of all sizes, so that some frames are copied and others shared."""
    weights = np.zeros((len(hashes), 1), np.float32)
    for _ in range(times):
        begin = int(rng.integers(0, len(hashes)))
        end = begin + int(rng.integers(0, len(hashes) - begin + 1))
        grads = rng.integers(-8, 9, (end - begin, 1)).astype(np.float32)
        client.push(hashes[begin:end], grads)
        weights[begin:end] -= grads
    return weights


def test_the_backup_is_equal_to_its_primary_bit_by_bit(context: zmq.Context, pair: Pair) -> None:
    pair.connect()
    hashes = hashes_of(20_000)
    with Client(context, pair.loops[0].address) as client:
        weights = push(client, hashes, 40, np.random.default_rng(1))
        metrics = pair.loops[0].metrics()
        assert metrics["stream_messages"] >= 43  # three orders, 40 pushes
        assert metrics["stream_bytes"] > weights.nbytes
        assert metrics["acknowledgements"] >= 1
        assert metrics["connections"] == 1
    pair.check(hashes, weights)


@pytest.mark.slow
def test_replies_wait_for_the_backup_and_leave_when_it_is_there(context: zmq.Context, pair: Pair) -> None:
    pair.connect()
    hashes = hashes_of(5000)
    rng = np.random.default_rng(2)
    with Client(context, pair.loops[0].address) as client:
        weights = push(client, hashes, 3, rng)
        pair.loops[1].stop()
        ones = np.ones((len(hashes), 1), np.float32)
        client.send(Op.PUSH, [hashes, ones], dtype=1, dim=1, count=len(hashes))
        client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes))
        until(lambda: pair.primary.replication()["held"] == 2)
        assert not client.socket.poll(300)  # refuted at once if a reply leaves
        pair.start_backup()
        assert client.receive().op == Op.PUSH
        assert np.array_equal(np.array(client.receive().values).reshape(-1, 1), weights - ones)
        assert pair.loops[0].metrics()["connections"] >= 2
    pair.check(hashes, weights - ones)


def test_a_stream_that_is_closed_holds_no_reply(context: zmq.Context, pair: Pair) -> None:
    pair.connect("tcp://127.0.0.1:9")  # nobody listens
    with Client(context, pair.loops[0].address) as client:
        client.send(Op.PULL, [hashes_of(3)], dtype=1, dim=1, count=3)
        until(lambda: pair.primary.replication()["held"] == 1)
        pair.primary.assign(2, ALL)
        assert client.receive().status == Status.OK
        assert len(client.pull(hashes_of(3))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kinds", long_but(["damage"], {"cut": ["cut"], "damage": ["cut", "flip", "drop"]}))
@pytest.mark.parametrize("seed", long_after(1, range(3)))
def test_nothing_is_lost_or_doubled_over_a_bad_connection(
    context: zmq.Context, pair: Pair, kinds: list[str], seed: int
) -> None:
    faults = Faults(random.Random(seed), kinds, [200, 20_000, 50_000], most=10)
    wire = Wire(port_of(pair.loops[1].address), faults)
    try:
        pair.connect(wire.address)
        hashes = hashes_of(20_000)
        with Client(context, pair.loops[0].address) as client:
            weights = np.zeros((len(hashes), 1), np.float32)
            rng = np.random.default_rng(seed)
            while not faults.is_over:
                weights += push(client, hashes, 5, rng)
            weights += push(client, hashes, 5, rng)
        assert pair.loops[0].metrics()["connections"] > 2, faults.done
        pair.check(hashes, weights)
    finally:
        wire.close()


def test_a_backup_whose_loop_is_started_again_and_again_gets_each_record_once(context: zmq.Context, pair: Pair) -> None:
    pair.connect()
    hashes = hashes_of(3000)
    weights: list[np.ndarray] = []

    def work() -> None:
        with Client(context, pair.loops[0].address) as client:
            weights.append(push(client, hashes, 200, np.random.default_rng(4)))

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        worker.join(0.1)
        pair.restart_backup()
    pair.check(hashes, weights[0])


def test_with_keys_the_loops_authenticate_each_other(context: zmq.Context, tmp_path: object) -> None:
    make_keys(f"{tmp_path}/keys")
    keys, worker = (Keys.load(f"{tmp_path}/keys", role) for role in ("server", "worker"))
    hashes = hashes_of(5000)
    with contextlib.ExitStack() as undo:
        undo.enter_context(Guard(context, keys))
        pair = Pair(context, keys)
        pair.worker = worker
        for number in (0, 1):
            undo.callback(lambda number=number: pair.loops[number].stop())
        pair.connect(server_key=keys.public.decode("ascii"))
        with Client(context, pair.loops[0].address, keys=worker) as client:
            weights = push(client, hashes, 10, np.random.default_rng(5))
        pair.check(hashes, weights)
        # A backup with another key is not accepted: nothing is sent to it.
        make_keys(f"{tmp_path}/others")
        other = Keys.load(f"{tmp_path}/others", "server")
        pair.backup.assign(2, [], [], [(STREAM + 1, ALL)])
        sent = pair.loops[0].metrics()["connections"]
        pair.primary.assign(2, ALL, [(STREAM + 1, pair.loops[1].address, other.public.decode("ascii"), ALL, [])])
        with Client(context, pair.loops[0].address, keys=worker) as client:
            client.send(Op.PULL, [hashes], dtype=1, dim=1, count=len(hashes))
            until(lambda: pair.loops[0].metrics()["connections"] > sent + 1)  # it is tried again
            assert pair.primary.replication()["held"] == 1
            pair.backup.assign(3, [], [], [(STREAM + 2, ALL)])
            # Empty: the key of this cluster's servers.
            pair.primary.assign(3, ALL, [(STREAM + 2, pair.loops[1].address, "", ALL, [])])
            assert client.receive().status == Status.OK


def test_loops_end_with_streams_in_any_state(context: zmq.Context) -> None:
    for address in (None, "tcp://127.0.0.1:9", "inproc://nowhere", "tcp://[::1]:9"):
        pair = Pair(context)
        pair.connect(address)
        with Client(context, pair.loops[0].address) as client:
            client.send(Op.PULL, [hashes_of(3)], dtype=1, dim=1, count=3)
            until(lambda pair=pair: pair.loops[0].metrics()["requests"] == 1)
        for loop in pair.loops:
            loop.stop()
            assert not loop.running


def test_an_address_that_cannot_be_connected_is_tried_again_until_it_is_replaced(
    context: zmq.Context, pair: Pair
) -> None:
    pair.connect("nonsense://x")
    until(lambda: pair.loops[0].metrics()["stream_failures"] >= 3)
    with Client(context, pair.loops[0].address) as client:
        client.send(Op.PULL, [hashes_of(3)], dtype=1, dim=1, count=3)
        until(lambda: pair.primary.replication()["held"] == 1)
        pair.backup.assign(2, [], [], [(STREAM + 1, ALL)])
        pair.primary.assign(2, ALL, [(STREAM + 1, pair.loops[1].address, "", ALL, [])])
        assert client.receive().status == Status.OK
