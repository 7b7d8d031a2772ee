"""A worker's requests, answered by hand."""

from collections import Counter

import numpy as np

from shoal import _core
from shoal._core import Policy, Requests
from shoal.cluster.protocol.slot_map import cut_evenly

Op, Status, Dtype = _core.Op, _core.Status, _core.WireDtype


WINDOW = 64  # sequences that a slot remembers


THREAD = _core.ThreadPool(1)


SLOTS = 16


A, B = "tcp://a:1", "tcp://b:1"


MAP = cut_evenly(1, SLOTS, [(A, 0), (B, 1)])


class Asked:
    """A message on its way out, read as a server would."""

    def __init__(self, address, frames):
        self.address, self.frames = address, [bytes(frame) for frame in frames]
        self.message = _core.decode(self.frames, replies=False)

    def answer(self, status=Status.OK, payload=(), **fields):
        m = self.message
        fields = {"epoch": 1, "job": m.job, "incarnation": m.incarnation, **fields}
        header = _core.encode_header(
            op=m.op, status=status, reply=True, payload=payload, table=m.table, worker=m.worker, sequence=m.sequence,
            clock=m.clock, part=m.part, **fields,
        )  # fmt: skip
        return [header, *payload]

    def rows(self, value):
        values = np.full((self.message.count, self.message.dim), value, np.float32)
        return self.answer(payload=[values], count=len(values), dim=self.message.dim, dtype=Dtype.FLOAT32)

    def slots(self):
        return sorted({hash * SLOTS >> 64 for hash in self.message.hashes.tolist()})


def requests(atomic_clocks=True, **policy):
    return Requests((3, 2, 77), MAP, Policy(**policy), atomic_clocks=atomic_clocks)


def make_filter(filters, rank=3, incarnation=2, job=77):
    """The filter of a worker's calls."""
    return _core.Filter(
        key_caching=filters.key_caching, zeros=filters.zeros, gradients=Dtype[filters.gradients.upper()],
        weights=Dtype[filters.weights.upper()], threshold=filters.threshold,
        seed=filters.seed ^ (rank << 32 | incarnation), job=job,
    )  # fmt: skip


def counts_of(filter):
    return Counter(filter.metrics())


def batch(n, first=0):
    return _core.KeyBatch(np.arange(first, first + n, dtype=np.uint64), SLOTS, THREAD)


def taken(r):
    assert r.verify() == ""
    return [Asked(address, frames) for address, frames in r.take_outgoing()]


def pull(r, n=40, clock=0, now=0.0, deadline=60.0, **fields):
    b = batch(n)
    out = np.full((len(b), 2), np.nan, np.float32)
    return r.submit(Op.PULL, 1, clock, now, deadline, hashes=b.hashes, begins=b.offsets, out=out, dim=2, **fields)


def push(r, n=40, clock=0, now=0.0, deadline=60.0, dim=2, **fields):
    b = batch(n)
    values = np.arange(len(b) * dim, dtype=np.float32).reshape(len(b), dim)
    return r.submit(
        Op.PUSH, 1, clock, now, deadline, hashes=b.hashes, begins=b.offsets, values=values, dim=dim, **fields
    )
