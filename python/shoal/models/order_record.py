"""The record of a fit under SSP or ASP: where each pull and push of a worker was executed among those of the others.

    DIR/
        record.json        what it is of, and its divisions: {"crc32c": ..., "body": {"format": "shoal order", ...}}
        start/             the model before its first batch
        order-000001-0     division 1, worker 0

An endpoint numbers the pushes of a table. Of each message of a pull or a push a worker keeps this number: of a push its
own, of a pull that of the last push that its rows include. So the pushes of all workers have one order for each
endpoint and table, and a pull a place in it.

    file of a worker   "SHOALORD", u32 n, n bytes of JSON (`Segment`), deflated columns, u32 CRC-32C of all before
    columns            a row for each message, in the order of the worker's calls: u8 begins a call, u16 table * 2 + is
                       push, u16 first slot, u16 end slot - 1, u32 number less that before it of the table and endpoint
                       each column by its bytes: all lowest bytes, all second ones, ...

Numbers are modulo 2^32.

Threads: no state.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.decoders import json_decoder
from shoal.errors import CorruptionError
from shoal.storage.base import StorageDir
from shoal.storage.checksummed_json import UNREADABLE, encode_checksummed
from shoal.store.order import Parts

RECORD_FILE = "record.json"
START = "start"
FORMAT = "shoal order"
VERSION = 1

_MAGIC = b"SHOALORD"
_LENGTH = struct.Struct("<I")
_LEVEL = 1  # of zlib: columns are repetitive
_ROW_BYTES = 11
_LARGEST_HEADER = 1 << 24
_MOST_MESSAGES = 1 << 32
_MOST_SLOTS = 1 << 14
_MOST_ENDPOINTS = 1 << 53

Numbers = npt.NDArray[np.int64]


class Division(msgspec.Struct, frozen=True):
    """A part of the fit between two points at which nothing was under way."""

    number: int
    # Examples that all workers had learned from before it.
    examples: int
    # Of each table the steps of its arcs before it, which a checkpoint does not have.
    steps: dict[str, list[int]] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a record is of."""

    format_name: str = msgspec.field(name="format", default=FORMAT)
    version: int = VERSION
    # Random: its files name it.
    id: str
    workers: int
    consistency: str
    divisions: list[Division] = []
    # Why there is none of what follows; empty: it is not known, or all is there.
    why: str = ""
    is_complete: bool = False


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of a worker is of."""

    record: str
    division: int
    rank: int
    workers: int
    slots: int
    tables: list[str]
    # Of each arc its first slot, its end, and a number of its endpoint.
    arcs: list[tuple[int, int, int]]
    messages: int
    # Why the order is not known; empty: it is.
    broken: str = ""


class Messages(NamedTuple):
    """The messages of a worker in a division, in the order of its calls."""

    begins: npt.NDArray[np.bool_]  # whether a call begins with it
    table: Numbers  # index in the tables of the segment
    is_push: npt.NDArray[np.bool_]
    first: Numbers
    end: Numbers
    number: Numbers

    @classmethod
    def of(cls, parts: Parts) -> Messages:
        """Make those of `shoal.Store.take_order`."""
        parts = parts[np.lexsort((parts[:, 3], parts[:, 0]))]
        serial, table, is_push, first, end, number = parts.astype(np.int64).T
        begins = np.ones(len(parts), np.bool_)
        begins[1:] = serial[1:] != serial[:-1]
        return cls(begins, table, is_push.astype(np.bool_), first, end, number)


def file_of(division: int, rank: int) -> str:
    """Return the name of the file of a worker."""
    return f"order-{division:06}-{rank}"


def endpoint_of(segment: Segment, messages: Messages) -> Numbers:
    """Return the endpoint of each message."""
    of_slot = np.empty(segment.slots, np.int64)
    for first, end, endpoint in segment.arcs:
        of_slot[first:end] = endpoint
    return of_slot[messages.first]


def _streams(segment: Segment, messages: Messages) -> list[Numbers]:
    """Return the messages of each table and endpoint, in their order."""
    if not segment.messages:
        return []
    endpoint = endpoint_of(segment, messages)
    order = np.lexsort((endpoint, messages.table))  # stable
    table, endpoint = messages.table[order], endpoint[order]
    cuts = np.flatnonzero((np.diff(table) != 0) | (np.diff(endpoint) != 0)) + 1
    return np.split(order, cuts)


# ---- a worker's file -------------------------------------------------------------------------------------------------


def encode(segment: Segment, messages: Messages) -> bytes:
    """Return the file of a worker."""
    change = messages.number.copy()
    for stream in _streams(segment, messages):
        change[stream[1:]] -= messages.number[stream[:-1]]
    columns = (
        messages.begins.astype("u1"),
        (messages.table * 2 + messages.is_push).astype("<u2"),
        messages.first.astype("<u2"),
        (messages.end - 1).astype("<u2"),
        (change & 0xFFFFFFFF).astype("<u4"),
    )
    body = b"".join(one.view("u1").reshape(-1, one.itemsize).T.tobytes() for one in columns)
    header = msgspec.json.encode(segment)
    parts = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, zlib.compress(body, _LEVEL)))
    return parts + _LENGTH.pack(_core.crc32c(parts))


_segment = json_decoder(Segment)


def decode(raw: bytes, address: str) -> tuple[Segment, Messages]:
    """Return what `encode` has made a file of; raise CorruptionError if it is anything else."""

    def damaged(what: str) -> CorruptionError:
        return CorruptionError(f"{address} is not the record of a worker, or is damaged: {what}")

    at = len(_MAGIC) + _LENGTH.size
    if len(raw) < at + _LENGTH.size or raw[: len(_MAGIC)] != _MAGIC:
        raise damaged("it does not begin as one, or is cut short")
    if _LENGTH.unpack(raw[-_LENGTH.size :])[0] != _core.crc32c(raw[: -_LENGTH.size]):
        raise damaged("its checksum does not match")
    (length,) = _LENGTH.unpack_from(raw, len(_MAGIC))
    if length > min(_LARGEST_HEADER, len(raw) - at - _LENGTH.size):
        raise damaged(f"its header has {length} bytes")
    try:
        segment = _segment.decode(raw[at : at + length])
    except UNREADABLE as error:
        raise damaged(str(error)) from None
    _check_segment(segment, damaged)
    size = segment.messages * _ROW_BYTES
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(raw[at + length : -_LENGTH.size], size + 1)
    except zlib.error as error:
        raise damaged(str(error)) from None
    if len(body) != size or not inflate.eof or inflate.unused_data:
        raise damaged(f"it does not have {segment.messages} messages")
    columns, begin = [], 0
    for width in (1, 2, 2, 2, 4):
        planes = np.frombuffer(body, "u1", segment.messages * width, begin).reshape(width, -1)
        columns.append(np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1).astype(np.int64))
        begin += segment.messages * width
    begins, code, first, last, change = columns
    messages = Messages(begins == 1, code >> 1, (code & 1) == 1, first, last + 1, change)
    if segment.messages and not (
        begins[0] == 1
        and (begins <= 1).all()
        and (code >> 1 < len(segment.tables)).all()
        and (first <= last).all()
        and (last < segment.slots).all()
    ):
        raise damaged("a message is of no table or slot")
    for stream in _streams(segment, messages):
        messages.number[stream] = np.cumsum(change[stream]) & 0xFFFFFFFF
    return segment, messages


def _check_segment(segment: Segment, damaged: Callable[[str], CorruptionError]) -> None:
    if not 0 <= segment.messages <= _MOST_MESSAGES or not 1 <= segment.slots <= _MOST_SLOTS:
        raise damaged(f"{segment.messages} messages, {segment.slots} slots")
    if not 0 <= segment.rank < segment.workers:
        raise damaged(f"worker {segment.rank} of {segment.workers}")
    at = 0
    for first, end, _ in segment.arcs:
        if first != at or not at < end <= segment.slots:
            raise damaged(f"an arc of slots {first} to {end}")
        at = end
    if at != segment.slots or not all(-_MOST_ENDPOINTS < one < _MOST_ENDPOINTS for _, _, one in segment.arcs):
        raise damaged(f"its arcs are not those of {segment.slots} slots")


# ---- record.json -----------------------------------------------------------------------------------------------------


def write(place: StorageDir, record: Record) -> None:
    """Write or replace what a record is of."""
    body = encode_checksummed(msgspec.json.encode(record))
    place.publish(RECORD_FILE, body, before=place.version(RECORD_FILE))


_record = json_decoder(Record)


def read(place: StorageDir) -> Record:
    """Read what a record is of."""
    body = place.read_checksummed(RECORD_FILE, missing=f"{place} is not the record of a fit", what="record of a fit")
    address = place.address(RECORD_FILE)
    try:
        record = _record.decode(body)
    except UNREADABLE as error:
        raise CorruptionError(f"{address} cannot be read: {error}") from None
    if (record.format_name, record.version) != (FORMAT, VERSION):
        raise CorruptionError(f"{address} is not a record of version {VERSION}: replay it with a newer shoal")
    numbers = [one.number for one in record.divisions]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []) or record.workers < 1:
        raise CorruptionError(f"{address} has divisions {numbers} of {record.workers} workers")
    return record
