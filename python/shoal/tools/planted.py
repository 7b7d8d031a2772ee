"""Click logs drawn from a known model, for examples, tests and benchmarks.

A log looks like Criteo's: 13 integers, 26 categories whose frequencies follow Zipf's law (Criteo's own numbers of
categories, up to a million), missing columns, a quarter of the examples clicked. The labels are drawn from a logistic
model,

    margin = b + sum of 13 effects of an integer's log-squared bucket + sum of 26 effects of a category

so that the trainer can represent it, and no model predicts better. Half of the categories have no effect;
the others have normal ones that shrink with the root of the category's rank, since an effect that is seen three times
cannot be learned. Every effect is a pure function of (column, bucket or rank): no table of them exists.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.metrics import probabilities

Floats = npt.NDArray[np.float64]

# Of the Kaggle log's 26 categorical columns, cut off at a million.
_CATEGORIES = (
    *(1460, 583, 1_000_000, 1_000_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 1_000_000, 3194),
    *(27, 14_992, 1_000_000, 10, 5652, 2173, 4, 1_000_000, 18, 15, 286_181, 105, 142_572),
)
_INTEGERS = 13
_ZIPF = 1.2
_CLICKED = 0.256
_MISSING = (0.0, 0.1, 0.2, 0.4)  # share of empty columns, in turn
_CHUNK = 1 << 15


class DrawnLog(msgspec.Struct, frozen=True):
    """Examples as drawn: what is written, and the margins that only the planted model knows."""

    labels: npt.NDArray[np.uint8]  # n
    integers: npt.NDArray[np.int64]  # n x 13, -1 is missing
    tokens: npt.NDArray[np.uint32]  # n x 26, written as eight hexadecimal digits
    missing: npt.NDArray[np.bool_]  # n x 26
    margins: Floats  # n


class PlantedModel:
    """A logistic model over Criteo's columns that draws its own examples."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._bias = 0.0
        margins = self.draw(1 << 14, -1).margins
        for _ in range(50):  # Newton's method: the mean probability becomes _CLICKED
            p = probabilities(margins + self._bias)
            self._bias -= (float(np.mean(p)) - _CLICKED) / float(np.mean(p * (1 - p)))

    def draw(self, n: int, chunk: int) -> DrawnLog:
        """Draw examples: a pure function of the seed and the number of the chunk."""
        rng = np.random.default_rng([self._seed, chunk + 1])
        margins = np.full(n, self._bias)
        integers = np.empty((n, _INTEGERS), np.int64)
        for column in range(_INTEGERS):
            v = np.exp(rng.normal(0.5 + 0.35 * column, 1.5, n)).astype(np.int64)
            v[rng.random(n) < _MISSING[column % 4]] = -1
            phase = 6.0 * self._uniform(column, np.zeros(1, np.uint64), 0)[0]
            margins += np.where(v < 0, 0.0, 0.3 * np.sin(np.sqrt(buckets(v)) + phase))
            integers[:, column] = v
        tokens = np.empty((n, len(_CATEGORIES)), np.uint32)
        missing = np.empty((n, len(_CATEGORIES)), np.bool_)
        for column, categories in enumerate(_CATEGORIES):
            # Zipf's law by its inverse: the share of ranks up to r grows as r^(1 - _ZIPF).
            most = (categories + 1.0) ** (1 - _ZIPF) - 1
            rank = ((most * rng.random(n) + 1) ** (1 / (1 - _ZIPF))).astype(np.uint64)
            effect = 0.6 * self._normal(_INTEGERS + column, rank) / np.sqrt(rank)
            effect[self._uniform(_INTEGERS + column, rank, 2) < 0.5] = 0.0
            missing[:, column] = rng.random(n) < _MISSING[column % 4] / 2
            margins += np.where(missing[:, column], 0.0, effect)
            # An odd factor modulo 2^32 is a bijection: no two categories of a column share a token.
            tokens[:, column] = (rank * np.uint64(0x9E3779B1) + np.uint64(column)).astype(np.uint32)
        labels = (rng.random(n) < probabilities(margins)).astype(np.uint8)
        return DrawnLog(labels, integers, tokens, missing, margins)

    def _uniform(self, column: int, rank: npt.NDArray[np.uint64], which: int) -> Floats:
        salt = _core.mix(np.array([self._seed * 1024 + column * 4 + which], np.uint64))
        return (_core.mix(rank ^ salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _normal(self, column: int, rank: npt.NDArray[np.uint64]) -> Floats:
        u, v = self._uniform(column, rank, 0), self._uniform(column, rank, 1)
        return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * math.pi * v))


def buckets(v: npt.NDArray[np.int64]) -> Floats:
    """Compute the bucket of an integer as `shoal.read_criteo` does: floor(ln(v)^2) above 2, else the integer."""
    return np.where(v > 2, np.floor(np.log(np.maximum(v, 1)) ** 2) + 3, v).clip(0)


_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint8).reshape(256, 2)


def criteo_text(drawn: DrawnLog) -> bytes:
    """Write examples as Criteo's lines: every column at its full width, the unused bytes 0, and the zeros dropped."""
    n = len(drawn.labels)
    digits = len(str(int(drawn.integers.max(initial=0))))
    text = np.zeros((n, 1 + _INTEGERS * (1 + digits) + len(_CATEGORIES) * 9 + 1), np.uint8)
    text[:, 0] = drawn.labels + ord("0")
    at = 1
    for column in range(_INTEGERS):
        v = drawn.integers[:, column]
        text[:, at] = ord("\t")
        for place in range(digits):
            power = 10 ** (digits - 1 - place)
            shown = (v >= power) | ((v == 0) & (power == 1))
            text[:, at + 1 + place] = np.where(shown, v // power % 10 + ord("0"), 0)
        at += 1 + digits
    for column in range(len(_CATEGORIES)):
        token = _HEX[drawn.tokens[:, column].astype(">u4").view(np.uint8).reshape(n, 4)].reshape(n, 8)
        text[:, at] = ord("\t")
        text[:, at + 1 : at + 9] = np.where(drawn.missing[:, column, None], 0, token)
        at += 9
    text[:, at] = ord("\n")
    flat = text.ravel()
    return bytes(flat[flat != 0])


def write_log(path: Path, model: PlantedModel, examples: int, first_chunk: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Draw a log and write it; returns the labels and the planted margins."""
    labels: list[npt.NDArray[np.uint8]] = []
    margins: list[Floats] = []
    with path.open("wb") as file:
        for chunk, begin in enumerate(range(0, examples, _CHUNK), first_chunk):
            drawn = model.draw(min(_CHUNK, examples - begin), chunk)
            file.write(criteo_text(drawn))
            labels.append(drawn.labels)
            margins.append(drawn.margins)
    return np.concatenate(labels), np.concatenate(margins)
