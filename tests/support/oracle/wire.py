"""A slow second implementation of the wire format, from its document: docs/wire-format.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import pairwise

HEADER = struct.Struct("<IBBBBHHIIIQIIIIIIII")
NAMES = [
    "magic", "version", "op", "status", "dtype", "flags", "dim", "table", "worker", "incarnation", "sequence", "epoch",
    "clock", "count", "aux", "job", "payload_bytes", "payload_crc", "header_crc",
]  # fmt: skip
MAGIC = int.from_bytes(b"SHOL", "little")
REPLY, PACKED, KEEP, DIGEST, COUNTED, TIMED, DATED, WHOLE = 1, 2, 4, 8, 16, 32, 64, 128
PULL, PUSH, TICK, ASSIGN, ERASE, CONTAINS, STATE, SLOT, SECTION, LOAD_BEGIN, LOAD_ROWS, LOAD_END, STATS = range(1, 14)
REDUCE, LOAD_FILTER, SWEEP, SAVE_BEGIN, SAVE_POLL, SAVE_END, REPLICATE, PING, PREFETCH = range(14, 23)
REQUEST, COPY_END = 1, 5  # kinds of a REPLICATE's record
VERSION = 2
BYTES = {0: 0, 1: 4, 2: 2, 3: 2, 4: 1, 5: 8, 6: 8}
WEIGHTS = {1, 2, 3}
TEXT, SLOTS, EMPTY = {16, 23, 27}, {17}, {1, 18, 19, 20, 21, 22, 24, 25, 26}

REQUESTS = {
    PULL: (["hashes"], WEIGHTS, PACKED | KEEP | DIGEST | TIMED | DATED | WHOLE),
    PUSH: (["hashes", "values"], WEIGHTS, PACKED | KEEP | DIGEST | COUNTED | TIMED | WHOLE),
    TICK: (["numbers", "tables"], {0}, TIMED),
    ASSIGN: (["hashes", "values"], WEIGHTS, PACKED | TIMED),
    ERASE: (["hashes"], {0}, 0),
    CONTAINS: (["hashes"], {0}, TIMED),
    STATE: (["hashes"], {0}, 0),
    SLOT: ([], {0}, 0),
    SECTION: ([], {0}, 0),
    LOAD_BEGIN: (["numbers"], {0}, 0),
    LOAD_ROWS: (["bytes"], {4}, 0),
    LOAD_END: (["numbers"], {0}, 0),
    STATS: ([], {0}, 0),
    REDUCE: (["ones"], {6}, 0),
    LOAD_FILTER: (["bytes"], {4}, 0),
    SWEEP: (["ones"], {6}, 0),
    SAVE_BEGIN: (["numbers"], {0}, 0),
    SAVE_POLL: (["numbers", "bytes"], {4}, 0),
    SAVE_END: (["numbers"], {0}, 0),
    PING: ([], {0}, 0),
    PREFETCH: (["hashes"], {0}, KEEP | DIGEST),
}
# REPLICATE, by aux.
RECORDS = [([], {0}, 0), (["nested"], {0}, 0), *[(["bytes"], {4}, 0)] * 4]
ANSWERS = {
    PULL: (["values"], WEIGHTS, PACKED | TIMED | DATED | WHOLE),
    PUSH: ([], {0}, TIMED),
    TICK: ([], {0}, TIMED),
    ASSIGN: ([], {0}, TIMED),
    CONTAINS: (["ones"], {4}, TIMED),
    STATE: (["values"], {1}, 0),
    SLOT: (["hashes", "values"], {1}, 0),
    SECTION: (["bytes"], {4}, 0),
    STATS: (["numbers"], {0}, 0),
    REDUCE: (["ones"], {6}, 0),
    SWEEP: (["numbers"], {0}, 0),
    SAVE_BEGIN: (["numbers"], {0}, 0),
    SAVE_POLL: (["bytes"], {4}, 0),
}


class Wrong(Exception):
    """A message that a receiver must refuse."""


def crc32c(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def is_nested(header: dict[str, int]) -> bool:
    """Whether the payload is another message, with checksums of its own."""
    request = not header.get("flags", 0) & REPLY
    return request and header.get("op") == REPLICATE and header.get("aux") == REQUEST


def encode(payload: list[bytes], **fields: int) -> list[bytes]:
    """All frames of a message whose checksums hold, whatever else is in it."""
    given = {"magic": MAGIC, "version": VERSION, **fields}
    own = [] if is_nested(given) else payload
    given["payload_bytes"] = sum(map(len, own)) & 0xFFFFFFFF
    given["payload_crc"] = crc32c(b"".join(own))
    raw = HEADER.pack(*(given.get(name, 0) for name in NAMES))
    return [raw[:60] + struct.pack("<I", crc32c(raw[:60])), *payload]


@dataclass
class Read:
    header: dict[str, int]
    hashes: list[int] = field(default_factory=list)
    digest: bytes = b""
    values: bytes = b""
    counts: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    text: bytes = b""
    nested: list[bytes] = field(default_factory=list)


def wide(raw: bytes, dtype: int) -> list[bytes]:
    """Weights of one dtype, each as the bytes of a float32."""
    if dtype == 1:
        return [raw[at : at + 4] for at in range(0, len(raw), 4)]
    if dtype == 3:
        return [b"\0\0" + raw[at : at + 2] for at in range(0, len(raw), 2)]
    found = []
    for bits in words(raw, "H"):
        if bits & 0x7C00 == 0x7C00:  # an infinity, or a NaN with all that it says
            found.append(struct.pack("<I", (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13))
        else:
            found.append(struct.pack("<f", struct.unpack("<e", struct.pack("<H", bits))[0]))
    return found


def words(raw: bytes, code: str) -> list[int]:
    return [one for (one,) in struct.iter_unpack("<" + code, raw)]


def pack_counts(counts: list[int]) -> bytes:
    """Say how often each row occurred."""
    some = [count for count in counts if count != 1]
    bits = sum(1 << row for row, count in enumerate(counts) if count != 1)
    small = bytes(count if count < 256 else 0 for count in some)
    return (
        bits.to_bytes((len(counts) + 7) // 8, "little")
        + small
        + struct.pack(f"<{sum(count > 255 for count in some)}I", *(count for count in some if count > 255))
    )


def unpack_counts(raw: bytes, rows: int) -> list[int]:
    """Read what pack_counts wrote, or raise Wrong."""
    edge = (rows + 7) // 8
    bits = int.from_bytes(raw[:edge], "little")
    small = raw[edge : edge + bits.bit_count()]
    tail = raw[edge + bits.bit_count() :]
    if len(raw) < edge or bits >> rows or len(tail) != 4 * small.count(0) or len(small) != bits.bit_count():
        raise Wrong("counts")
    large, some = iter(words(tail, "I")), iter(small)
    counts = [(next(some) or next(large)) if bits >> row & 1 else 1 for row in range(rows)]
    if pack_counts(counts) != raw:
        raise Wrong("counts in another form")
    return counts


def decode(frames: list[bytes], *, replies: bool, limit: int) -> Read:
    """Read a message, or raise Wrong."""
    if not 1 <= len(frames) <= 6 or len(frames[0]) != 64:
        raise Wrong("frames")
    h = dict(zip(NAMES, HEADER.unpack(frames[0]), strict=True))
    if h["magic"] != MAGIC or h["header_crc"] != crc32c(frames[0][:60]):
        raise Wrong("header")
    if h["version"] != VERSION:
        raise Wrong("version")
    flags, status, op = h["flags"], h["status"], h["op"]
    is_reply = bool(flags & REPLY)
    if op > PREFETCH or h["dtype"] > 6 or is_reply != replies:
        raise Wrong("kind")
    if status not in {0} | TEXT | SLOTS | EMPTY or (not is_reply and (status != 0 or op == 0)):
        raise Wrong("status")
    if op == 0 and status not in {16, 23, 24}:
        raise Wrong("op 0")
    if op == REPLICATE and not is_reply and h["aux"] > COPY_END:
        raise Wrong("record")
    if not is_reply:
        parts, dtypes, allowed = RECORDS[h["aux"]] if op == REPLICATE else REQUESTS[op]
    elif status == 0:
        parts, dtypes, allowed = ANSWERS.get(op, ([], {0}, 0))
    else:
        parts = ["text"] if status in TEXT else ["slots"] if status in SLOTS else []
        dtypes, allowed = {0}, 0
    extra = flags & (PACKED | KEEP | DIGEST | COUNTED | TIMED | DATED | WHOLE)
    if h["dtype"] not in dtypes or extra & ~allowed or extra & (KEEP | DIGEST) == KEEP | DIGEST:
        raise Wrong("dtype or flags")
    parts = ["digest" if extra & DIGEST and part == "hashes" else part for part in parts]
    if extra & PACKED and parts[-1] == "values":
        parts = [*parts[:-1], "map", "kept"]
    if extra & COUNTED:
        parts = [*parts, "counts"]
    payload = frames[1:]
    if parts == ["nested"]:
        if not payload or not 64 <= len(payload[0]) <= 256 or sum(map(len, payload[1:])) > limit:
            raise Wrong("nested")
        if h["payload_bytes"] or h["payload_crc"]:
            raise Wrong("payload")
        return Read(h, nested=payload)
    if len(payload) != len(parts):
        raise Wrong("frames")

    count, size, read = h["count"], BYTES[h["dtype"]], Read(h)
    cells = count * h["dim"]
    if {"values", "map"} & set(parts) and (not 1 <= h["dim"] <= 4096 or cells * 4 > limit):
        raise Wrong("dim or limit")
    if sum(map(len, payload)) > limit:
        raise Wrong("limit")
    bits: list[int] = []
    for part, frame in zip(parts, payload, strict=True):
        if part == "map":
            bits = [byte >> bit & 1 for byte in frame for bit in range(8)]
            if any(bits[cells:]):
                raise Wrong("map")
        due = {
            "hashes": 8 * count,
            "digest": 16,
            "values": cells * size,
            "map": (cells + 7) // 8,
            "kept": sum(bits) * size,
            "ones": count * size,
            "numbers": 8 * count,
            "tables": 4 * h["aux"],
            "slots": 2 * count,
            "text": count,
            "bytes": len(frame),
            "counts": len(frame),  # looked at below
        }[part]
        if len(frame) != due:
            raise Wrong("length")
    if h["payload_bytes"] != sum(map(len, payload)) or h["payload_crc"] != crc32c(b"".join(payload)):
        raise Wrong("payload")

    for part, frame in zip(parts, payload, strict=True):
        if part in ("hashes", "tables"):
            found = words(frame, "Q" if part == "hashes" else "I")
            if any(a >= b for a, b in pairwise(found)):
                raise Wrong("order")
            setattr(read, part, found)
        elif part == "numbers":
            read.numbers = words(frame, "Q")
        elif part == "slots":
            read.slots = words(frame, "H")
        elif part in ("digest", "text"):
            setattr(read, part, frame)
        elif part in ("ones", "bytes"):
            read.values = frame
        elif part == "counts":
            read.counts = unpack_counts(frame, count)
        elif part == "values":
            read.values = b"".join(wide(frame, h["dtype"]))
        elif part == "kept":
            kept = iter(wide(frame, h["dtype"]))
            read.values = b"".join(next(kept) if bit else b"\0\0\0\0" for bit in bits[:cells])
    return read


def murmur3_128(data: bytes, seed: int = 0) -> bytes:
    """MurmurHash3_x64_128 (Appleby, public domain), from its description."""
    mask = 2**64 - 1
    c1, c2 = 0x87C37B91114253D5, 0x4CF5AD432745937F

    def turn(x: int, by: int) -> int:
        return (x << by | x >> (64 - by)) & mask

    def finish(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return x ^ x >> 33

    a = b = seed
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        k1, k2 = struct.unpack_from("<QQ", data, at)
        a ^= turn(k1 * c1 & mask, 31) * c2 & mask
        a = ((turn(a, 27) + b) * 5 + 0x52DCE729) & mask
        b ^= turn(k2 * c2 & mask, 33) * c1 & mask
        b = ((turn(b, 31) + a) * 5 + 0x38495AB5) & mask
    k1, k2 = struct.unpack("<QQ", data[whole:].ljust(16, b"\0"))
    b ^= turn(k2 * c2 & mask, 33) * c1 & mask
    a ^= turn(k1 * c1 & mask, 31) * c2 & mask
    a ^= len(data)
    b ^= len(data)
    a = (a + b) & mask
    b = (b + a) & mask
    a, b = finish(a), finish(b)
    a = (a + b) & mask
    b = (b + a) & mask
    return struct.pack("<QQ", a, b)
