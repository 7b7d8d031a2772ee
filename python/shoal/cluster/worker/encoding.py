"""The messages of a part: encoding its request, and storing its answer.

Threads: one at a time; the owner locks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.calls import Call, Frames, RequestPart, WorkerIdentity
from shoal.cluster.worker.filters import EncodedPayload
from shoal.table.reductions import OF_ANY_LENGTH

Op = _core.Op

_TIMED_OPS = frozenset({Op.PULL, Op.PUSH, Op.TICK, Op.ASSIGN, Op.CONTAINS})  # whose answers can have times


def encode(
    part: RequestPart,
    worker: WorkerIdentity,
    map: ClusterMap,
    known: Mapping[bytes, None],
    pushes: Sequence[RequestPart],
) -> Frames:
    """Return the frames of a part, the header first."""
    call = part.call
    payload = _payload(part, map, known, pushes)
    count = part.end - part.begin
    aux = call.aux
    if call.op == Op.TICK:
        count, aux = len(payload[0]), len(payload[1])
    elif call.hashes is None:
        count = call.count
    sent_as = part.sent_as or EncodedPayload(payload, call.dtype)
    header = _core.encode_header(
        op=call.op,
        payload=payload,
        dtype=sent_as.dtype,
        packed=sent_as.packed,
        keep=sent_as.keep,
        digest=bool(sent_as.digest) and not sent_as.keep,
        counted=part.counted,
        timed=call.trace is not None and call.op in _TIMED_OPS,
        dated=call.dated,
        whole=call.whole,
        dim=call.dim if call.op in (Op.PULL, Op.PUSH, Op.ASSIGN) else 0,
        table=call.table,
        worker=worker.rank,
        incarnation=worker.incarnation,
        sequence=part.sequence,
        epoch=map.epoch,
        clock=call.clock + call.ahead,
        count=count,
        aux=aux,
        job=worker.job,
        part=part.number,
    )
    return [header, *payload]


def _payload(part: RequestPart, map: ClusterMap, known: Mapping[bytes, None], pushes: Sequence[RequestPart]) -> Frames:
    call = part.call
    if call.op == Op.TICK:
        assert call.tables is not None
        return [np.array([mark for push in pushes for mark in _marks(push, map)], np.uint64), call.tables]
    if call.hashes is None:
        return call.payload
    hashes = call.hashes[part.begin : part.end]
    if call.filter is not None:
        if part.sent_as is not None:  # encoded before: only its key list may have changed
            return part.sent_as.frames
        if call.op == Op.PREFETCH:
            part.sent_as = call.filter.prefetch(hashes, known)
        elif call.values is None:
            part.sent_as = call.filter.pull(hashes, known)
        else:
            values = call.values[part.begin : part.end]
            part.sent_as = call.filter.push(hashes, values, part.sequence, known, whole=call.whole)
            part.sent_as.frames += _counts(part)
        return part.sent_as.frames
    frames: Frames = [hashes]
    if call.values is not None:
        frames.append(call.values[part.begin : part.end])
    return frames + _counts(part)


def _counts(part: RequestPart) -> Frames:
    """Encode how often each row occurred, unless all occurred once; set the header's flag."""
    counts = part.call.counts
    packed = None if counts is None else _core.pack_counts(counts[part.begin : part.end])
    part.counted = packed is not None
    return [] if packed is None else [packed]


def _marks(part: RequestPart, map: ClusterMap) -> Iterator[int]:
    """Yield the names of a push's part in a tick: for each arc the slot of its last row there, and the sequence.

    A server executes an arc's rows together, but it may have had only some of the arcs when the part arrived.
    """
    begins = part.call.begins
    assert begins is not None
    done = part.begin
    for arc in map.arcs_of(part.first_slot, part.end_slot):
        end = int(begins[min(arc.end_slot, part.end_slot)])
        if end > done:
            slot = int(np.searchsorted(begins, end, "left")) - 1
            yield (slot + 1 << 48) | part.sequence
            done = end


def answer_buffer(part: RequestPart) -> npt.NDArray[Any] | None:
    """Return the array into which the values of an answer may be decoded directly; None: there is none."""
    out = part.call.out
    if out is None or not out.flags.carray:
        return None
    return out[part.begin : part.end]


def store_answer(part: RequestPart, reply: Any) -> None:
    """Store an answer as the result of its call."""
    call = part.call
    if call.dated:
        clocks = reply.clock if reply.dated else 0
        call.included = clocks if call.included is None else min(call.included, clocks)
    if call.out is not None:
        target = call.out[part.begin : part.end]
        if not reply.in_place:
            values = reply.values
            if values.size != target.size or values.dtype != target.dtype:
                raise ValueError(f"{values.dtype}[{values.size}] where {target.dtype}[{target.size}] was asked for")
            target[...] = values.reshape(target.shape)
        call.result = call.out
        if call.filter is not None:
            call.filter.pulled(target.nbytes, reply.payload_bytes)
    elif call.op in (Op.ERASE, Op.PREFETCH):
        call.total += reply.aux
        call.result = call.total
    elif call.op == Op.SLOT:
        call.result = (reply.hashes, reply.values.reshape(reply.count, reply.dim))
    elif call.op == Op.SAVE_POLL:
        call.result = (bool(reply.count), reply.values.tobytes())
    elif call.op == Op.SECTION:
        call.result = (reply.count, reply.values, reply.aux)
    elif call.slot is None and call.begins is None:
        call.answers[part.address] = reply.values if call.op == Op.REDUCE else reply.numbers


def in_slot_order(call: Call, map: ClusterMap) -> list[npt.NDArray[Any]]:
    """Return the answers of all endpoints, in the order of their first slots.

    Where an endpoint has several runs of slots, the answers of a function with numbers for each slot are cut by run.
    """
    owners = map.owners
    if call.op != Op.REDUCE or call.aux in OF_ANY_LENGTH or len(map.runs) == len(owners):
        return [call.answers[endpoint.address] for endpoint in owners]
    pieces: dict[int, npt.NDArray[Any]] = {}
    for endpoint in owners:
        ranges = map.run_ranges(endpoint.id)
        answer, slots = call.answers[endpoint.address], sum(end - first for first, end in ranges)
        if len(answer) % slots:
            raise ValueError(f"{len(answer)} numbers for {slots} slots")
        width, at = len(answer) // slots, 0
        for first, end in ranges:
            pieces[first] = answer[at : at + width * (end - first)]
            at += width * (end - first)
    return [pieces[first] for first in sorted(pieces)]
