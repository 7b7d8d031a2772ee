"""A peer of a ``_core.Endpoint`` without sockets: makes requests, reads replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal._core import Op, Status, WireDtype

Frames = list[Any]


@dataclass(frozen=True)
class Reply:
    """What came back: ``values`` by op, ``slots`` that were refused, or the text of an error."""

    peer: bytes
    op: int
    status: int
    sequence: int
    aux: int
    values: Any
    slots: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, peer: bytes, frames: Sequence[bytes]) -> Reply:
        message = _core.decode(frames)
        values: Any = None
        if message.status == Status.OK and message.op in (Op.PULL, Op.STATE):
            values = message.values.reshape(message.count, message.dim).copy()
        elif message.status == Status.OK and message.op == Op.SLOT:
            values = (message.hashes.copy(), message.values.reshape(message.count, message.dim).copy())
        elif message.status == Status.OK and message.op in (Op.STATS, Op.SWEEP, Op.SAVE_BEGIN):
            values = message.numbers.tolist()
        elif message.status == Status.OK:
            values = message.values.copy()
        return cls(
            peer,
            message.op,
            message.status,
            message.sequence,
            message.aux,
            values,
            tuple(message.slots.tolist()),
            message.text,
        )


def deliver(endpoint: _core.Endpoint, frames: Frames, peer: bytes = b"peer") -> list[Reply]:
    """Hand a message to the endpoint; the replies, also those for others."""
    return [Reply.of(to, answer) for to, answer in endpoint.handle(peer, frames)]


def released(endpoint: _core.Endpoint) -> list[Reply]:
    return [Reply.of(to, answer) for to, answer in endpoint.released()]


@dataclass(frozen=True)
class Worker:
    """The header fields of a worker; each method makes the frames of one request."""

    rank: int = 0
    incarnation: int = 1
    job: int = 1
    epoch: int = 0

    def _message(self, op: int, payload: Frames, **fields: Any) -> Frames:
        header = _core.encode_header(
            op=op,
            payload=payload,
            worker=self.rank,
            incarnation=self.incarnation,
            job=self.job,
            epoch=fields.pop("epoch", self.epoch),
            **fields,
        )
        return [header, *payload]

    def pull(
        self,
        hashes: npt.ArrayLike,
        *,
        clock: int = 0,
        sequence: int = 1 << 63,
        table: int = 0,
        **fields: Any,
    ) -> Frames:
        h = np.asarray(hashes, np.uint64)
        return self._message(
            Op.PULL,
            [h],
            dtype=WireDtype.FLOAT32,
            table=table,
            clock=clock,
            sequence=sequence,
            count=len(h),
            **fields,
        )

    def _write(self, op: int, hashes: npt.ArrayLike, rows: npt.ArrayLike, **fields: Any) -> Frames:
        h = np.asarray(hashes, np.uint64)
        values = np.asarray(rows, np.float32).reshape(len(h), -1) if len(h) else np.zeros((0, 1), np.float32)
        dim = fields.pop("dim", values.shape[1])
        counts = fields.pop("counts", None)
        packed = None if counts is None else _core.pack_counts(np.asarray(counts, np.uint32))
        payload = [h, values] if packed is None else [h, values, packed]
        fields["counted"] = packed is not None
        return self._message(op, payload, dtype=WireDtype.FLOAT32, dim=dim, count=len(h), **fields)

    def push(
        self,
        hashes: npt.ArrayLike,
        grads: npt.ArrayLike,
        *,
        sequence: int,
        clock: int = 0,
        table: int = 0,
        **fields: Any,
    ) -> Frames:
        return self._write(Op.PUSH, hashes, grads, sequence=sequence, clock=clock, table=table, **fields)

    def assign(
        self, hashes: npt.ArrayLike, rows: npt.ArrayLike, *, sequence: int, table: int = 0, clock: int = 0
    ) -> Frames:
        return self._write(Op.ASSIGN, hashes, rows, sequence=sequence, table=table, clock=clock)

    def keys(self, op: int, hashes: npt.ArrayLike, **fields: Any) -> Frames:
        """ERASE, CONTAINS, STATE."""
        h = np.asarray(hashes, np.uint64)
        return self._message(op, [h], count=len(h), **fields)

    def tick(
        self,
        clock: int,
        sequences: Sequence[int] = (),
        tables: Sequence[int] = (0,),
        sequence: int = 1 << 63,
        **fields: Any,
    ) -> Frames:
        return self._message(
            Op.TICK,
            [np.asarray(sequences, np.uint64), np.asarray(tables, np.uint32)],
            clock=clock,
            sequence=sequence,
            count=len(sequences),
            aux=len(tables),
            **fields,
        )

    def bare(self, op: int, **fields: Any) -> Frames:
        """SLOT, SECTION, STATS."""
        return self._message(op, [], **fields)

    def numbers(self, op: int, numbers: npt.ArrayLike, **fields: Any) -> Frames:
        """LOAD_BEGIN, LOAD_END."""
        values = np.asarray(numbers, np.uint64)
        return self._message(op, [values], count=len(values), **fields)

    def section(self, rows: int, section: npt.NDArray[np.uint8], **fields: Any) -> Frames:
        return self._message(Op.LOAD_ROWS, [section], dtype=WireDtype.UINT8, count=rows, **fields)

    def sweep(self, rules: Sequence[float] = (), *, dry_run: bool = False, **fields: Any) -> Frames:
        values = np.asarray(rules, np.float64)
        return self._message(Op.SWEEP, [values], dtype=WireDtype.FLOAT64, count=len(values), aux=int(dry_run), **fields)

    def filter(self, cut: int, slot: int, filter: npt.NDArray[np.uint8], **fields: Any) -> Frames:
        return self._message(Op.LOAD_FILTER, [filter], dtype=WireDtype.UINT8, count=cut, aux=slot, **fields)

    def reduce(self, function: int, parameters: Sequence[float] = (), **fields: Any) -> Frames:
        values = np.asarray(parameters, np.float64)
        return self._message(Op.REDUCE, [values], dtype=WireDtype.FLOAT64, count=len(values), aux=function, **fields)


def part_named(slot: int, sequence: int) -> int:
    """How a tick names a message of a push: by its sequence and the slot of its last row in an arc."""
    return (slot + 1) << 48 | sequence
