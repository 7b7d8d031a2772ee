"""The checkpoint format of docs/checkpoint-format.md: a slow reader, and checksums for forged manifests.

Shares no code with the package: it follows the document alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

COLUMNS = {
    "SGD": ["w"],
    "Momentum": ["w", "v"],
    "Adagrad": ["w", "n"],
    "RowWiseAdagrad": ["w"],
    "FTRL": ["z", "n"],
    "GroupFTRL": ["z", "n"],
    "Adam": ["w", "m", "v"],
    "AdamW": ["w", "m", "v"],
    "Proximal": ["w"],
}
MARKS = {"TimeToLive": {"clock"}, "DecayedScore": {"clock", "score"}, "MinNorm": set()}


def marks(table: dict) -> list[tuple[str, int, str]]:
    """Return the columns that the rules of a table need."""
    names: set[str] = set()
    for rule, params in table.get("expire", []):
        names |= {"count" if params["frequent"] else "clock"} if rule == "MaxRows" else MARKS[rule]
    return [(name, 1, kind) for name, kind in (("count", "<u4"), ("clock", "<u4"), ("score", "<f4")) if name in names]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli, reflected polynomial 82f63b78) of ``data``."""
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def sealed(body: object) -> bytes:
    """Return the bytes of a manifest with this body."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"crc32c":"%08x","body":%s}' % (crc32c(text), text)


def manifest(folder: Path, digest: str | None = None) -> dict:
    """Return the body of a manifest whose seal holds, and whose digest is this one."""
    raw = (folder / "manifest.json").read_bytes()
    start = raw.index(b'"body":') + len(b'"body":')
    body = raw[start:-1]
    assert raw == b'{"crc32c":"%08x","body":%s}' % (crc32c(body), body)
    assert digest in {None, hashlib.sha256(body).hexdigest()}
    return json.loads(body)


def ranges_of(data: bytes, bits: int, number: int) -> set[int]:
    """Return the ranges that a delta names."""
    if 32 * number < 2**bits:
        found = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
        assert found == sorted(set(found))
    else:
        assert len(data) == 2**bits // 8
        found = [r for r in range(2**bits) if data[r // 8] >> r % 8 & 1]
    assert len(found) == number
    assert max(found) < 2**bits
    return set(found)


def laid_over(folder: Path, body: dict, table: dict, columns: dict, ranges: dict, filters: dict) -> dict:
    """Return what a delta's columns come to: its base's rows that lie in none of its ranges, and its own."""
    base = folder / body["base"]["path"]
    assert manifest(base, body["base"]["digest"])["slots"] == body["slots"]
    known: dict[str, dict[int, bytes]] = {}
    old = read(base, known)[table["name"]]
    filters[table["name"]] = known.get(table["name"], {}) | filters.get(table["name"], {})
    per_slot = 2**64 // body["slots"]

    def is_named(h: int) -> bool:
        bits, named = ranges.get(h // per_slot, (6, set()))
        return h % per_slot * 2**bits // per_slot in named

    kept = np.array([not is_named(int(h)) for h in old["hash"].ravel()], bool)
    assert all(is_named(int(h)) for h in columns["hash"].ravel())
    whole = {name: np.concatenate([old[name][kept], columns[name]]) for name in columns}
    order = np.argsort(whole["hash"].ravel())
    return {name: values[order] for name, values in whole.items()}


def offsets(table: dict, rows: int) -> dict[str, tuple[int, int, str]]:
    """Return (start, items a row, type) of each column of a section, and its size as ``end``."""
    w = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[table["dtype"]]
    columns = [("hash", 1, "<u8")]
    columns += [(name, table["dim"], w if name == "w" else "<f4") for name in COLUMNS[table["optimizer"]]]
    if table["optimizer"] == "RowWiseAdagrad":
        columns.append(("m", 1, "<f4"))
    if table["params"].get("per_row_step"):
        columns.append(("t", 1, "<f4"))
    found, at = {}, 0
    for name, width, kind in columns + marks(table):
        found[name] = (at, width, kind)
        at = -(-(at + rows * width * np.dtype(kind).itemsize) // 64) * 64
    return found | {"end": (at, 0, "")}


def read(folder: Path, filters: dict[str, dict[int, bytes]] | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Return the columns of every table, in hash order; put what waits into ``filters``, by table and slot."""
    filters = {} if filters is None else filters
    body = manifest(folder)
    version = 1 + any("admit" in table or "expire" in table for table in body["tables"]) if "base" not in body else 3
    assert (body["format"], body["version"]) == ("shoal checkpoint", version)
    header = b"SHOALSLT" + bytes([version, 0, 0, 0]) + bytes(52)
    tables = {}
    for table in body["tables"]:
        files = [(folder / file["name"]).read_bytes() for file in table["files"]]
        ends = [64] * len(files)
        parts = {name: [] for name in offsets(table, 0) if name != "end"}
        kinds = ("sections", "filters", "ranges")
        pieces = [(piece, kind) for kind in kinds for piece in table.get(kind, [])]
        ranges = {}
        for (slot, number, offset, size, rows, *more, crc), kind in sorted(pieces, key=lambda piece: piece[0][1:4]):
            data = files[number][offset : offset + size]
            assert files[number].startswith(header)
            assert crc32c(data) == crc
            assert offset == ends[number]
            ends[number] += size
            if kind != "sections":
                assert (0 if table.get("delta") else 1) <= rows <= size == -(-rows // 64) * 64
                assert not any(data[rows:])
                if kind == "filters":
                    filters.setdefault(table["name"], {})[slot] = data[:rows]
                else:
                    ranges[slot] = (more[0], ranges_of(data[:rows], *more))
                continue
            places = offsets(table, rows)
            assert places["end"][0] == size
            used = bytearray(size)
            for name, (start, width, kind) in places.items():
                if name == "end":
                    continue
                bytes_ = rows * width * np.dtype(kind).itemsize
                used[start : start + bytes_] = b"\1" * bytes_
                values = np.frombuffer(data, kind, rows * width, start).reshape(rows, width)
                if kind == "<u2":
                    values = (values.astype(np.uint32) << 16).view(np.float32)
                parts[name].append(values)
            assert not any(byte for byte, seen in zip(data, used, strict=True) if not seen)
            assert {int(h) // (2**64 // body["slots"]) for h in parts["hash"][-1].ravel()} == {slot}
        assert ends == [len(data) for data in files] == [file["bytes"] for file in table["files"]]
        columns = {name: np.concatenate(values) if values else np.empty((0, 1)) for name, values in parts.items()}
        assert np.all(columns["hash"][1:] > columns["hash"][:-1])
        assert len(columns["hash"]) == table["rows"]
        if table.get("delta"):
            columns = laid_over(folder, body, table, columns, ranges, filters)
            assert len(columns["hash"]) == table.get("total", 0)
        tables[table["name"]] = columns
    return tables
