"""The wire format: the native decoder and encoder against the slow ones of tests/support/oracle/wire.py."""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import wire
from paths import ROOT
from shoal import _core
from tiers import rounds

HERE = ROOT / "tests"
LIMIT = 4096  # of the payload, where it is tried


def opened(path: Path) -> tuple[bool, list[bytes]]:
    """Whether replies are due, and the frames: tests/cpp/wire_input.h tells how they lie in a file."""
    raw = path.read_bytes()
    mode, at, frames = raw[0] if raw else 0, 1, []
    while at + 2 <= len(raw):
        (size,) = struct.unpack_from("<H", raw, at)
        frames.append(raw[at + 2 : at + 2 + size])
        at += 2 + len(frames[-1])
    if mode & 2 and frames and len(frames[0]) == 64:
        payload = b"".join(frames[1:])
        if wire.is_nested(dict(zip(wire.NAMES, wire.HEADER.unpack(frames[0]), strict=True))):
            payload = b""
        head = frames[0][:52] + struct.pack("<II", len(payload), wire.crc32c(payload))
        frames[0] = head + struct.pack("<I", wire.crc32c(head))
    return bool(mode & 1), frames


def both(frames: list[bytes], *, replies: bool, limit: int = LIMIT) -> wire.Read | None:
    """Read by both decoders, which must agree; None if they refuse."""
    try:
        slow = wire.decode(frames, replies=replies, limit=limit)
    except wire.Wrong:
        with pytest.raises(ValueError, match=r"\w"):
            _core.decode(frames, replies=replies, payload_bytes=limit)
        return None
    fast = _core.decode(frames, replies=replies, payload_bytes=limit)
    h = slow.header
    for name in (*numbers, "payload_bytes"):
        assert getattr(fast, name) == h[name], name
    found = (fast.reply, fast.packed, fast.keep, fast.timed, fast.dated)
    assert found == tuple(bool(h["flags"] & bit) for bit in (1, 2, 4, 32, 64))
    assert fast.counts.tolist() == slow.counts
    assert fast.part == h["flags"] >> 8
    assert fast.values.tobytes() == slow.values
    for name in ("hashes", "numbers", "tables", "slots"):
        assert getattr(fast, name).tolist() == getattr(slow, name)
    assert fast.nested == slow.nested
    assert (fast.digest, fast.text) == (slow.digest, slow.text.decode("utf-8", "replace"))
    return slow


def test_every_message_of_version_2_is_still_read():
    folder = HERE / "golden" / "wire-v2"
    read = {path.name: both(opened(path)[1], replies=opened(path)[0]) for path in folder.iterdir()}
    assert len(read) >= 50
    assert [name for name, message in read.items() if message is None] == []
    assert {message.header["op"] for message in read.values()} == set(range(22))
    assert {message.header["status"] for message in read.values()} == {s.value for s in _core.Status}


def test_the_times_of_a_reply_are_those_that_the_document_defines():
    folder = HERE / "golden" / "wire-v2"
    for op in ("pull", "push", "tick"):
        request = _core.decode(opened(folder / f"{op}-timed")[1], replies=False)
        assert (request.timed, request.times) == (True, None)
        reply = _core.decode(opened(folder / f"{op}-answer-timed")[1])
        assert (reply.timed, reply.aux) == (True, 3 << 16 | 2 << 11 | 1250)
        assert reply.times == (1250 * 2**2, 3)
        plain = _core.decode(opened(folder / f"{op}-answer")[1])
        assert (plain.timed, plain.times) == (False, None)


def test_the_clock_of_a_dated_reply_is_read_as_the_document_says():
    folder = HERE / "golden" / "wire-v2"
    asked = _core.decode(opened(folder / "pull-dated")[1], replies=False)
    assert (asked.dated, asked.clock) == (True, 11)
    reply = _core.decode(opened(folder / "pull-answer-dated")[1])
    assert (reply.dated, reply.timed, reply.clock, reply.times) == (True, True, 9, (1250 * 2**2, 3))
    assert not _core.decode(opened(folder / "pull-answer")[1]).dated


def test_whole_rows_have_as_many_numbers_as_the_header_says():
    folder = HERE / "golden" / "wire-v2"
    for name, replies in (("pull-whole", False), ("pull-answer-whole", True), ("push-whole", False)):
        message = _core.decode(opened(folder / name)[1], replies=replies)
        assert (message.whole, message.dim, message.count) == (True, 4, 3)
        assert message.values.size == (0 if name == "pull-whole" else 12)
    assert not _core.decode(opened(folder / "push")[1], replies=False).whole


def test_every_message_of_version_1_is_refused_by_both_versions():
    folder = HERE / "golden" / "wire-v1"
    for path in sorted(folder.iterdir()):
        replies, frames = opened(path)
        with pytest.raises(ValueError, match="version 1 of the wire format, this side speaks 2: run the same shoal"):
            _core.decode(frames, replies=replies)
        # Which call it is about is known all the same.
        (sequence,) = struct.unpack_from("<Q", frames[0], 24)
        assert _core.peek(frames) == (sequence, frames[0][9])


@pytest.mark.parametrize("op", [_core.Op.PULL, _core.Op.PING, _core.Op.REPLICATE])
def test_a_server_answers_a_request_of_version_1_in_a_form_that_names_its_own_version(op):
    service = _core.Endpoint(8, [(0, 8)])
    (header,) = wire.encode([], version=1, op=op, sequence=91)
    ((_, (reply,)),) = service.handle(b"peer", [header])
    fields = dict(zip(wire.NAMES, wire.HEADER.unpack(reply), strict=True))
    assert (fields["version"], fields["op"], fields["status"]) == (2, op, _core.Status.VERSION)
    assert fields["sequence"] == 91
    assert fields["header_crc"] == wire.crc32c(reply[:60])


def test_the_corpus_of_the_fuzzer_comes_to_the_same_in_both():
    paths = sorted((HERE / "fuzz" / "wire" / "corpus").iterdir())
    verdicts = Counter(both(frames, replies=replies) is not None for replies, frames in map(opened, paths))
    assert verdicts[True] >= 10
    assert verdicts[False] >= 10
    assert len(paths) <= 200
    assert sum(path.stat().st_size for path in paths) <= 60 * 1024


def test_the_worked_example_of_the_document_is_right():
    text = (HERE.parent / "docs" / "wire-format.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("    ") and line[4:6].strip()]
    example = b"".join(
        bytes.fromhex(line[4:].split("    ")[0]) for line in lines if all(w in HEX for w in line.split()[:4])
    )
    hashes, grads = np.array([0x63CBE1E459320DD7], np.uint64), np.array([0.5], np.float32)
    assert _core.mix(np.array([7], np.uint64))[0] == hashes[0]
    header = _core.encode_header(
        op=_core.Op.PUSH, payload=[hashes, grads], dtype=_core.WireDtype.FLOAT32, dim=1, table=5, worker=2,
        incarnation=1, sequence=7, epoch=3, clock=11, count=1, job=0xDEADBEEF,
    )  # fmt: skip
    assert example == header + hashes.tobytes() + grads.tobytes()


HEX = {f"{byte:02x}" for byte in range(256)}
FLAGS = ("reply", "packed", "keep", "digest", "counted", "timed", "dated")
numbers = {
    "op": st.integers(0, 21), "status": st.sampled_from([s.value for s in _core.Status]), "dtype": st.integers(0, 6),
    "dim": st.integers(0, 65535), "table": st.integers(0, 2**32 - 1), "worker": st.integers(0, 2**32 - 1),
    "incarnation": st.integers(0, 2**32 - 1), "sequence": st.integers(0, 2**64 - 1),
    "epoch": st.integers(0, 2**32 - 1), "clock": st.integers(0, 2**32 - 1), "count": st.integers(0, 2**32 - 1),
    "aux": st.integers(0, 2**32 - 1), "job": st.integers(0, 2**32 - 1),
}  # fmt: skip


@given(
    st.fixed_dictionaries(numbers),
    st.fixed_dictionaries({name: st.booleans() for name in FLAGS}),
    st.integers(0, 255),
    st.lists(st.binary(max_size=50), max_size=5),
)
def test_a_header_is_what_struct_makes_of_it(fields, flags, part, payload):
    header = _core.encode_header(payload=payload, part=part, **fields, **flags)
    bits = sum(1 << place for place, name in enumerate(FLAGS) if flags[name])
    if wire.is_nested({"flags": bits, **fields}):
        payload = []  # the frames of a nested message have checksums of their own
        header = _core.encode_header(payload=payload, part=part, **fields, **flags)
    assert [header, *payload] == wire.encode(payload, flags=bits | part << 8, **fields)


COUNTS = st.sampled_from([1, 1, 1, 2, 3, 255, 256, 257, 2**32 - 1])


@given(st.lists(COUNTS, max_size=100))
def test_counts_are_packed_as_the_document_says(counts):
    packed = _core.pack_counts(np.array(counts, np.uint32))
    if set(counts) <= {1}:
        assert packed is None
    else:
        assert packed.tobytes() == wire.pack_counts(counts)
        assert packed.nbytes <= (len(counts) + 7) // 8 + 5 * len(counts)


def test_the_counts_of_the_document_are_right():
    text = (HERE.parent / "docs" / "wire-format.md").read_text()
    given, packed = re.search(r"The counts ([\d ]+) are the bytes `([0-9a-f ]+)`", text).groups()
    assert wire.pack_counts([int(count) for count in given.split()]) == bytes.fromhex(packed)


def test_who_counts_nothing_is_told():
    with pytest.raises(ValueError, match="number 1 is 0"):
        _core.pack_counts(np.array([1, 0, 2], np.uint32))


@st.composite
def messages(draw):
    """Mostly right: the frames that the op has, by count and dim, with now and then a thing changed."""
    op, flags = (
        draw(st.integers(1, wire.PREFETCH)),
        draw(st.sampled_from([0, 0, 0, wire.PACKED, wire.KEEP, wire.DIGEST, 0x700])),
    )
    replies = draw(st.booleans())
    count, dim = draw(st.integers(0, 20)), draw(st.integers(1, 3))
    record = draw(st.integers(0, wire.COPY_END))
    parts, dtypes, allowed = (wire.ANSWERS if replies else wire.REQUESTS).get(op, ([], {0}, 0))
    if op == wire.REPLICATE and not replies:
        parts, dtypes, allowed = wire.RECORDS[record]
    flags |= draw(st.sampled_from([0, wire.COUNTED, wire.DATED, wire.WHOLE]))
    flags &= allowed | 0xFF00
    dtype = draw(st.sampled_from(sorted(dtypes)))
    hashes = sorted(draw(st.sets(st.integers(0, 2**64 - 1), min_size=count, max_size=count)))
    tables = sorted(draw(st.sets(st.integers(0, 2**32 - 1), max_size=3)))
    aux = len(tables) if op == wire.TICK else record if op == wire.REPLICATE else draw(st.integers(0, 2**32 - 1))
    cells, size = count * dim, wire.BYTES[dtype]
    bits = draw(st.integers(0, 2**cells - 1))
    payload = []
    for part in parts:
        if part == "hashes" and flags & wire.DIGEST:
            payload.append(draw(st.binary(min_size=16, max_size=16)))
        elif part == "hashes":
            payload.append(np.array(hashes, np.uint64).tobytes())
        elif part == "nested":
            payload = [draw(st.binary(min_size=64, max_size=80))]
            payload += draw(st.lists(st.binary(max_size=20), max_size=4))
        elif part == "numbers":
            payload.append(draw(st.binary(min_size=8 * count, max_size=8 * count)))
        elif part == "tables":
            payload.append(np.array(tables, np.uint32).tobytes())
        elif part == "values" and flags & wire.PACKED:
            kept = bits.bit_count() * size
            payload += [bits.to_bytes((cells + 7) // 8, "little"), draw(st.binary(min_size=kept, max_size=kept))]
        else:
            due = {"values": cells * size, "ones": count * size, "bytes": draw(st.integers(0, 100))}[part]
            payload.append(draw(st.binary(min_size=due, max_size=due)))
    if flags & wire.COUNTED:
        payload.append(wire.pack_counts(draw(st.lists(COUNTS, min_size=count, max_size=count))))
    fields = {"op": op, "flags": flags | replies, "dtype": dtype, "dim": dim, "count": count, "aux": aux}
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        match draw(st.integers(0, 3)):
            case 0:
                fields[draw(st.sampled_from(sorted(fields)))] = draw(st.integers(0, 15))
            case 1:
                fields["status"] = draw(st.sampled_from([s.value for s in _core.Status]))
            case 2 if payload:
                payload[draw(st.integers(0, len(payload) - 1))] = draw(st.binary(max_size=40))
            case _:
                payload.append(draw(st.binary(max_size=3)))
    return replies, wire.encode(payload, **fields)


@pytest.mark.slow
@settings(max_examples=rounds(400))
@given(messages(), st.sampled_from([LIMIT, 100]))
def test_both_take_and_refuse_the_same(message, limit):
    replies, frames = message
    both(frames, replies=replies, limit=limit)


def push(n: int = 3, dim: int = 2) -> list[object]:
    hashes, grads = np.arange(n, dtype=np.uint64), np.ones((n, dim), np.float32)
    payload = [hashes, grads]
    return [
        _core.encode_header(op=_core.Op.PUSH, payload=payload, dtype=_core.WireDtype.FLOAT32, dim=dim, count=n),
        *payload,
    ]


def test_what_arrived_lives_as_long_as_somebody_looks_at_it():
    head, hashes, grads = push(1000)
    frames = [bytearray(head), bytearray(hashes.tobytes()), bytearray(grads.tobytes())]
    got = _core.decode(frames, replies=False)
    seen = got.hashes
    del got
    with pytest.raises(BufferError):
        frames[1].clear()
    assert seen.tolist() == list(range(1000))
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1


def test_frames_are_any_buffers_and_nothing_else():
    head, hashes, grads = push()
    odd = memoryview(b"x" + hashes.tobytes())[1:]
    assert _core.decode((head, odd, grads), replies=False).hashes.tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        _core.decode([head, "hashes", grads], replies=False)
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _core.decode([head, np.zeros(6, np.uint64)[::2], grads], replies=False)
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _core.encode_header(op=2, payload=[np.zeros(6)[::2]])


def test_a_number_too_large_for_its_field_is_refused():
    with pytest.raises(TypeError):
        _core.encode_header(op=2, dim=65536)
    with pytest.raises(TypeError):
        _core.encode_header(op=2, sequence=2**64)
    with pytest.raises(TypeError):
        _core.encode_header(op=2, aux=-1)


def test_large_messages_are_read_too():
    frames = push(100_000, 16)
    got = _core.decode(frames, replies=False)
    assert got.values.size == 1_600_000
    frames[2][99_999, 15] = 2
    with pytest.raises(ValueError, match="damaged"):
        _core.decode(frames, replies=False)


def answer(values: np.ndarray) -> list[object]:
    head = _core.encode_header(
        op=_core.Op.PULL, payload=[values], reply=True, dtype=1, dim=2, count=len(values), sequence=5, part=3
    )
    return [head, values]


@pytest.mark.parametrize("n", [1, 50, 40_000])
def test_values_are_put_where_they_are_wanted(n):
    frames = answer(np.arange(2 * n, dtype=np.float32).reshape(n, 2))
    assert _core.peek(frames) == (5, 3)
    room = np.zeros((n + 2, 2), np.float32)
    got = _core.decode(frames, into=room[1:-1])
    assert got.in_place
    assert np.array_equal(room[1:-1], frames[1])
    assert not room[[0, -1]].any()
    assert np.array_equal(got.values, frames[1].ravel())
    assert not _core.decode(frames, into=room).in_place  # not as long
    assert not _core.decode(frames).in_place
    assert _core.peek([b"x" * 64]) is None


def test_a_place_must_be_writable_and_in_one_piece():
    frames = answer(np.ones((4, 2), np.float32))
    for place in (b"x" * 32, np.zeros((4, 4), np.float32)[:, ::2]):
        with pytest.raises((BufferError, ValueError)):
            _core.decode(frames, into=place)


def test_ops_and_statuses_have_the_numbers_of_the_document():
    text = (HERE.parent / "docs" / "wire-format.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = {(row[1], int(row[0])) for row in rows if len(row) == 4 and row[0].isdigit()}
    assert {(op.name, op.value) for op in _core.Op} | {(s.name, s.value) for s in _core.Status} <= found
