"""A count-min sketch on Python's integers: the hash functions of csrc/kernel/count_min.h, and lists of counters."""

from __future__ import annotations

from collections.abc import Iterable

from oracle.hashing import MASK, mix

STEP = 0x9E3779B97F4A7C15


class CountMin:
    def __init__(self, seed: int, depth: int, width: int) -> None:
        self.width = width
        self.counters = [[0] * width for _ in range(depth)]
        self.hashes = []
        for row in range(depth):
            low, high, add_high, add_low = (mix(mix(seed) + (4 * row + i) * STEP & MASK) for i in range(1, 5))
            self.hashes.append((high << 64 | low, add_high << 64 | add_low))

    def positions(self, key: int) -> list[int]:
        """The position of a key in each row."""
        return [((a * key + b) % 2**128 >> 64) * self.width >> 64 for a, b in self.hashes]

    def update(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Add counts of keys."""
        for key, count in pairs:
            for row, position in zip(self.counters, self.positions(key), strict=True):
                row[position] += count

    def query(self, key: int) -> int:
        """Estimate the count of a key."""
        return min(row[position] for row, position in zip(self.counters, self.positions(key), strict=True))
