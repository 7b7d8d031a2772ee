"""The export format as docs/export-format.md has it: a slow reader. Shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from oracle.checkpoint import crc32c
from oracle.hashing import MASK, unmix


def body(folder: Path) -> dict:
    """Read a manifest."""
    return json.loads((folder / "manifest.json").read_bytes())["body"]


def rows_of(folder: Path, name: str) -> dict[int, np.ndarray | None]:
    """Return what one export has of a table, by key; None for a key that it calls removed."""
    reported = body(folder)
    table = next(t for t in reported["tables"] if t["name"] == name)
    found: dict[int, np.ndarray | None] = {}
    for section in table["sections"]:
        slot, file, offset, size, rows, homes, lines, reach, width, crc = section
        data = (folder / table["files"][file]["name"]).read_bytes()[offset : offset + size]
        assert crc32c(data) == crc
        hashes = _section(data, table, reported["slots"], slot, homes, lines, reach, width)
        assert list(hashes) == sorted(hashes)
        assert len(hashes) == rows
        found.update({unmix(h): row for h, row in hashes.items()})
    assert len(found) == table["rows"]
    return found


def _section(data: bytes, table: dict, slots: int, slot: int, homes: int, lines: int, reach: int, width: int) -> dict:
    dim, dtype = table["dim"], table["dtype"]
    row_bytes = {"float32": 4 * dim, "float16": 2 * dim, "bfloat16": 2 * dim, "int8": 1 if dim == 1 else 2 + dim}[dtype]
    narrow = row_bytes <= 4
    shared = dtype == "int8" and dim == 1
    lanes = (61 if shared else 63) // (width + row_bytes) if narrow else 59 // width
    bits = slots.bit_length() - 1
    found: dict[int, np.ndarray | None] = {}
    farthest: dict[int, int] = {}
    wide = 0
    for b in range(lines):
        line = data[64 * b : 64 * b + 64]
        if line[63] == 255:
            continue
        scale = _half(line[61:63], "bfloat16")[0] if shared else 0.0
        first_row = int.from_bytes(line[59:63], "little")
        here: list[int] = []
        for lane in range(lanes):
            low = line[4 * lane : 4 * lane + 4]
            high = line[4 * lanes + (width - 4) * lane :][: width - 4]
            stored = int.from_bytes(low + high, "little")
            home = max(b - reach, 0)
            place = ((home << 64) + homes - 1) // homes
            first = (slot << (64 - bits)) + (place + slots - 1) // slots
            h = first + (stored - first) % (1 << 8 * width) if width < 8 else stored
            if narrow:
                at = width * lanes + lane * row_bytes
                row = line[at : at + row_bytes]
            else:
                at = 64 * lines + (first_row + min(lane, len(set(here)))) * row_bytes
                row = data[at : at + row_bytes]
            if here and h == here[-1]:
                here.append(h)
                continue
            assert len(here) == lane, "a lane behind those that repeat"
            here.append(h)
            assert h >> (64 - bits) == slot
            home = (((h << bits) & MASK) * homes) >> 64
            assert home <= b <= home + reach
            farthest[home] = b - home
            if not narrow:
                assert first_row + lane == wide
                wide += 1
            found[h] = _weights(row, dtype, scale)
    for home in range(homes):
        if data[64 * home + 63] != 255:
            assert data[64 * home + 63] == min(farthest.get(home, 0), 254)
    end = 64 * lines + (0 if narrow else wide * row_bytes)
    assert len(data) == -(-end // 64) * 64
    assert not any(data[end:])
    return found


def _weights(row: bytes, dtype: str, scale: float) -> np.ndarray | None:
    if dtype == "float32":
        weights = np.frombuffer(row, "<f4")
    elif dtype == "int8":
        if len(row) > 1:
            scale, row = float(_half(row[:2], "bfloat16")[0]), row[2:]
        integers = np.frombuffer(row, np.int8)
        return None if integers[0] == -128 else np.float32(scale) * integers.astype(np.float32)
    else:
        weights = _half(row, dtype)
    return None if np.isnan(weights[0]) else weights


def _half(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def rounded(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest number of 16 bits."""
    if dtype == "float16":
        return np.clip(weights, -65504, 65504).astype(np.float16).astype(np.float32)
    bits = weights.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return (kept.astype(np.uint32) << 16).view(np.float32)


def seal(body_json: bytes) -> bytes:
    """Put a manifest's body under its checksum."""
    return b'{"crc32c":"%08x","body":%s}' % (crc32c(body_json), body_json)
