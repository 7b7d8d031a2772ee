"""Click logs without files: Zipf ids, labels of a planted model, initial rows.

    rows R, fields F    field f owns the ids [f * (R // F), (f + 1) * (R // F)), and gives one to every example
    zipf                token k = 1, 2, 3, ... of a field has a probability that falls as 1 / k^1.05, unbounded
    bounded             the same up to k = R // F: fewer ids are rare
    uniform             every id of a field is equally likely
    id of a token       k * 7368787 modulo R // F, a hashing trick: frequent ids are not neighbours in memory, and rare
                        tokens share an id
    label               drawn from a logistic model in which every id has a fixed weight

All of them are functions of a seed: every process draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIELDS = 26
BATCH = 4096
EXPONENT = 1.05
KINDS = ("zipf", "bounded", "uniform")

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]

_SPREAD = 7_368_787  # a prime
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Examples:
    """A batch: ids int64[n, fields], labels float32[n]."""

    ids: Ids
    labels: Rows


class Draw:
    """Batches of examples by number."""

    def __init__(self, rows: int, kind: str = "zipf", seed: int = 5) -> None:
        self.each = rows // FIELDS
        if self.each % _SPREAD == 0:
            raise ValueError(f"{rows} rows are a multiple of {_SPREAD} in each field: choose another number")
        self._kind = kind
        self._seed = seed
        self._until = np.zeros(0)
        if kind == "bounded":
            self._until = np.cumsum(1.0 / np.arange(1, self.each + 1, dtype=np.float64) ** EXPONENT)
            self._until /= self._until[-1]

    def _tokens(self, random: np.random.Generator) -> Ids:
        shape = (BATCH, FIELDS)
        if self._kind == "zipf":
            return random.zipf(EXPONENT, shape)
        if self._kind == "bounded":
            return np.searchsorted(self._until, random.random(shape)) + 1
        return random.integers(1, self.each + 1, shape)

    def batch(self, number: int) -> Examples:
        """Draw a batch; the same number gives the same batch."""
        random = np.random.default_rng([self._seed, number])
        ids = self._tokens(random) % self.each * _SPREAD % self.each + np.arange(FIELDS) * self.each
        weight = (ids.astype(np.uint64) * _MIXER >> np.uint64(40)).astype(np.float64) / (1 << 24) - 0.5
        chance = 1.0 / (1.0 + np.exp(1.0 - weight.sum(axis=1)))
        return Examples(ids, (random.random(BATCH) < chance).astype(np.float32))


def pieces(rows: int) -> list[tuple[int, int]]:
    """Return the pieces [begin, end) in which the initial rows are made."""
    return [(begin, min(rows, begin + _PIECE)) for begin in range(0, rows, _PIECE)]


def first(begin: int, end: int, dim: int) -> Rows:
    """Make the initial rows of the ids of a piece: uniform in [-0.01, 0.01)."""
    random = np.random.default_rng([begin, end, dim])
    return (random.random((end - begin, dim), np.float32) - np.float32(0.5)) * np.float32(0.02)
