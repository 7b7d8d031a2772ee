"""Connections that are cut, changed or thinned out anywhere: every push is applied once, every pull is answered."""

from __future__ import annotations

import contextlib
import functools
import random

import numpy as np
import pytest
import zmq

from maps import map_of
from shoal import _core
from shoal._core import Op, Policy
from shoal.cluster.protocol.curve import Guard, Keys, make_keys
from shoal.cluster.server.data_loop import start_loop
from shoal.cluster.worker.channel import Channel, CurveKeys, Role, WorkerIdentity
from table_specs import native, table_spec
from tiers import long_after
from wires import Faults, Wire

SLOTS = 16
ME = WorkerIdentity(0, 1, 77)
SPEC = table_spec()
TIMEOUT = 120.0
WORKERS = _core.ThreadPool(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder)
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Connections that find out sooner than in life that nothing comes over them."""
    quick = functools.partial(_core.Client, heartbeat_ms=200, silent_ms=600, handshake_ms=500)
    monkeypatch.setattr(_core, "Client", quick)


def curve_keys(folder):
    keys = Keys.load(folder, "worker")
    return CurveKeys(*(key.decode() for key in (keys.public_of("server"), keys.public, keys.secret)))


@contextlib.contextmanager
def through_wires(make_change, mode="asp", folder=None):
    """Two endpoints of one server, each behind a wire; a channel to them."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        keys = None if folder is None else Keys.load(folder, "server")
        if keys is not None:
            stack.enter_context(Guard(context, keys))
        endpoints, wires, ranges = [], [], []
        for number, (first, end) in enumerate(((0, 6), (6, 16))):
            endpoint = _core.Endpoint(SLOTS, [(first, end)])
            endpoint.start_job(ME.job, mode)
            endpoint.admit(ME.rank, ME.incarnation, 0)
            endpoint.add_table(0, native(SPEC))
            loop = start_loop(endpoint, context, "tcp://127.0.0.1:0", keys=keys, heartbeat=0.2, dead_after=0.6)
            stack.callback(loop.stop)
            wire = stack.enter_context(contextlib.closing(Wire(int(loop.address.rsplit(":")[-1]), make_change(number))))
            endpoints.append(endpoint)
            wires.append(wire)
            ranges.append((first, end, wire.address, 0))
        policy = Policy(resend_after=0.05, longest=0.2)
        channel = Channel(
            Role(ME, map_of(1, *ranges), atomic_clocks=True),
            timeout=TIMEOUT,
            policy=policy,
            curve=None if folder is None else curve_keys(folder),
        )
        yield stack.enter_context(contextlib.closing(channel)), wires, endpoints


def push(channel, keys, grads):
    batch = _core.KeyBatch(np.asarray(keys, np.uint64), SLOTS, WORKERS)
    values = np.ascontiguousarray(grads[_core.unmix(batch.hashes).astype(np.int64)])
    return channel.begin(Op.PUSH, 0, hashes=batch.hashes, begins=batch.offsets, values=values, dim=1)


def pull(channel, count):
    batch = _core.KeyBatch(np.arange(count, dtype=np.uint64), SLOTS, WORKERS)
    rows = np.empty((count, 1), np.float32)
    channel.begin(Op.PULL, 0, hashes=batch.hashes, begins=batch.offsets, out=rows, dim=1).result()
    return rows[batch.inverse, 0]


def train(channel, rng, steps, wait_every):
    """Push sums that are exact in float32, and return what the rows must be."""
    total = np.zeros(500, np.float32)
    pushes = []
    for step in range(steps):
        keys = rng.choice(500, 100, replace=False)
        grads = rng.integers(-8, 9, (500, 1)).astype(np.float32)
        total[keys] -= grads[keys, 0]
        pushes.append(push(channel, keys, grads))
        if step % wait_every == wait_every - 1:
            pushes[-1].result()
    for pushed in pushes:
        pushed.result()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_cut_connections_lose_no_push_and_apply_none_twice(seed):
    def make_change(number):
        return Faults(random.Random(f"{seed}-{number}"), ["cut"], 5_000)

    with through_wires(make_change) as (channel, wires, endpoints):
        expected = train(channel, np.random.default_rng(seed), 150, 10)
        np.testing.assert_array_equal(pull(channel, 500), expected)
        print([w.cuts for w in wires], channel.metrics(), [endpoint.metrics()["duplicates"] for endpoint in endpoints])
        assert sum(wire.cuts for wire in wires) > 5
        assert channel.metrics()["resent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize("seed", long_after(1, range(6)))
def test_changed_and_missing_bytes_lose_no_push_and_apply_none_twice(seed, secured, folder, quick):
    print("seed", seed)
    faults = []

    def make_change(number):
        # Every other connection is changed early: in the greeting, the handshake, the first frames.
        faults.append(Faults(random.Random(f"{seed}-{number}"), ["flip", "drop", "cut"], [400, 12_000], most=12))
        return faults[-1]

    with through_wires(make_change, folder=folder if secured else None) as (channel, _, _):
        rng = np.random.default_rng(seed)
        expected = np.zeros(500, np.float32)
        while not all(fault.is_over for fault in faults):
            expected += train(channel, rng, 20, 5)
        np.testing.assert_array_equal(pull(channel, 500), expected)
        print([fault.done for fault in faults], channel.metrics())
        assert channel.metrics()["reconnected"] > 0
