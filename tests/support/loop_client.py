"""A client of a data loop."""

import numpy as np
import zmq

from shoal import _core
from shoal._core import Op, Status
from table_specs import native_spec

JOB, TABLE, SLOTS = 77, 1, 64
WAIT_MS = 60_000  # only spent by a test that fails


def make_endpoint():
    """A endpoint that owns all slots, with one table of dim 1 (SGD, lr 1) and one worker."""
    endpoint = _core.Endpoint(SLOTS, [(0, SLOTS)])
    endpoint.set_map(1, [(0, SLOTS)])
    endpoint.start_job(JOB, "asp", 0, False)
    endpoint.admit(0, 1, 0)
    add_table(endpoint, TABLE, 1)
    return endpoint


def add_table(endpoint, number, dim):
    endpoint.add_table(number, native_spec(dim))


class Client:
    """A worker's side of one connection, one request at a time; ``watched``: events that its monitor tells of."""

    def __init__(self, context, address, keys=None, watched=0):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.ipv6 = True
        # From before it connects: a handshake that fails is not tried again.
        self.monitor = self.socket.get_monitor_socket(watched) if watched else None
        if keys is not None:
            keys.client_of("server")(self.socket)
        self.socket.connect(address)
        self.sequence = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
        self.socket.close(0)

    def send(self, op, payload=(), **fields):
        self.sequence += 1
        fields = {"table": TABLE, "worker": 0, "incarnation": 1, "job": JOB, "epoch": 1} | fields
        sequence = self.sequence if op in {Op.PUSH, Op.ASSIGN, Op.ERASE} else 2**63 + self.sequence
        header = _core.encode_header(op=op, payload=payload, sequence=sequence, **fields)
        self.socket.send_multipart([header, *payload])
        return sequence

    def receive(self):
        assert self.socket.poll(WAIT_MS), "no reply"
        return _core.decode(self.socket.recv_multipart())

    def ask(self, *arguments, **fields):
        sequence = self.send(*arguments, **fields)
        reply = self.receive()
        assert reply.sequence == sequence
        return reply

    def push(self, hashes, grads):
        reply = self.ask(Op.PUSH, [hashes, grads], dtype=1, dim=grads.shape[1], count=len(hashes))
        assert reply.status == Status.OK, reply.text

    def pull(self, hashes, dim=1, table=TABLE):
        reply = self.ask(Op.PULL, [hashes], dtype=1, dim=dim, count=len(hashes), table=table)
        assert reply.status == Status.OK, reply.text
        return np.array(reply.values).reshape(-1, dim)


def hashes_of(n, seed=1):
    return np.unique(np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64))
