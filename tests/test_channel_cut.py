"""Connections that are cut in the midst of anything: every push is applied once, every pull is answered."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading

import numpy as np
import pytest
import zmq

import shoal
from cluster_standin import described
from shoal import _core
from shoal._core import Op
from shoal.rpc.channel import Channel
from shoal.rpc.loop import start_loop
from shoal.rpc.map import ClusterMap, Endpoint
from shoal.rpc.requests import Policy, Requests, Worker

SLOTS = 16
ME = Worker(0, 1, 77)
SPEC = shoal.TableSpec(name="t", dim=1, optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros(), dtype="float32", seed=0)
TIMEOUT = 60.0

pytestmark = pytest.mark.timeout(120)


class Wire:
    """Carries bytes between a port of its own and another, and cuts each connection after some of them."""

    def __init__(self, port, seed, longest):
        self._random = random.Random(seed)
        self._longest = longest
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            selector.register(self._listener, selectors.EVENT_READ)
            pairs, left = {}, {}
            while not self._stop.is_set():
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        near, _ = self._listener.accept()
                        far = socket.create_connection(("127.0.0.1", self._port))
                        allowance = [self._random.randrange(300, self._longest)]
                        for one, other in ((near, far), (far, near)):
                            stack.enter_context(one)
                            pairs[one], left[one] = other, allowance
                            selector.register(one, selectors.EVENT_READ)
                        continue
                    one = key.fileobj
                    if one not in pairs:
                        continue
                    other, allowance = pairs[one], left[one]
                    data = b""
                    with contextlib.suppress(OSError):
                        data = one.recv(1 << 16)
                    part = data[: allowance[0]]
                    allowance[0] -= len(data)
                    with contextlib.suppress(OSError):
                        other.sendall(part)
                    if not data or allowance[0] <= 0:
                        self.cuts += allowance[0] <= 0
                        for end in (one, other):
                            selector.unregister(end)
                            del pairs[end]
                            end.close()

    def close(self):
        self._stop.set()
        self._thread.join(TIMEOUT)


@pytest.mark.parametrize("seed", range(3))
def test_cut_connections_lose_no_push_and_apply_none_twice(seed):
    rng = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        services, wires, endpoints = [], [], []
        for first, end in ((0, 6), (6, 16)):
            service = _core.Service(SLOTS, first, end)
            service.start_job(ME.job, "asp")
            service.admit(ME.rank, ME.incarnation, 0)
            service.add_table(0, **described(SPEC))
            loop = start_loop(service, context, "tcp://127.0.0.1:0")
            stack.callback(loop.stop)
            wire = stack.enter_context(contextlib.closing(Wire(int(loop.address.rsplit(":")[-1]), seed, 40_000)))
            services.append(service)
            wires.append(wire)
            endpoints.append(Endpoint(first, end, wire.address, 0))
        policy = Policy(resend_after=0.05, longest=0.2)
        requests = Requests(ME, ClusterMap(1, tuple(endpoints)), policy)
        channel = stack.enter_context(contextlib.closing(Channel(requests, timeout=TIMEOUT)))
        workers = _core.Workers(1)
        total = np.zeros(500, np.int64)
        pushes = []
        for step in range(150):
            keys = np.sort(rng.choice(500, 100, replace=False)).astype(np.uint64)
            batch = _core.KeyBatch(keys, SLOTS, workers)
            grads = rng.integers(-8, 9, (100, 1)).astype(np.float32)
            total[_core.unmix(batch.hashes).astype(np.int64)] += grads[:, 0].astype(np.int64)
            pushes.append(channel.begin(Op.PUSH, 0, hashes=batch.hashes, begins=batch.begins, values=grads, dim=1))
            if step % 10 == 9:
                pushes[-1].wait()
        for pushed in pushes:
            pushed.wait()
        batch = _core.KeyBatch(np.arange(500, dtype=np.uint64), SLOTS, workers)
        rows = np.empty((500, 1), np.float32)
        channel.begin(Op.PULL, 0, hashes=batch.hashes, begins=batch.begins, out=rows, dim=1).wait()
        np.testing.assert_array_equal(rows[batch.inverse, 0], -total)
        print(
            [wire.cuts for wire in wires], channel.metrics(), [service.metrics()["duplicates"] for service in services]
        )
        assert sum(wire.cuts for wire in wires) > 5
        assert channel.metrics()["resent"] > 0
