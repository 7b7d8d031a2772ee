"""A stream of keys, gradients and examples that takes no memory: all of it is computed from the numbers 0 .. n-1.

    number i --odd factor--> key         a bijection of 64 bits: all keys differ
    key --> first gradient               one of 126 exact values, so the result of a first push is known to the bit
    Zipf traffic                         the number of rank r is r, with probability about 1 / (r + 1)^1.05, over all n
    examples                             HEADS features of Zipf traffic, from whose planted weights the label is drawn,
                                         and TAILS features that walk over all numbers, each once, in steps of a stride
                                         that is coprime to n

All processes with the same n compute the same stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import shoal

BATCH = 65536
EXAMPLES = 8192
HEADS = 13
TAILS = 26
EXPONENT = 1.05

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd
_STRIDE = 0.6180339887


class Stream:
    """The keys 0 .. n-1 of a run."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._counter = np.arange(BATCH, dtype=np.uint64)
        # Zipf by the inverse of the integral of x^-EXPONENT from 1 to n + 1.
        self._power = 1 - EXPONENT
        self._reach = (n + 1.0) ** self._power - 1

    def keys(self, begin: int, end: int) -> Keys:
        """Return the keys of the numbers from ``begin`` to ``end``, at most BATCH of them."""
        return self.of(self._counter[: end - begin] + np.uint64(begin))

    def of(self, numbers: Keys) -> Keys:
        """Return the keys of some numbers."""
        return numbers * _FACTOR

    def zipf(self, random: np.random.Generator, shape: int | tuple[int, ...]) -> Keys:
        """Draw numbers, small ones most often."""
        drawn = (random.random(shape) * self._reach + 1) ** (1 / self._power)
        return np.minimum(drawn.astype(np.uint64) - np.uint64(1), np.uint64(self.n - 1))

    def uniform(self, random: np.random.Generator, count: int) -> Keys:
        """Draw numbers uniformly."""
        return random.integers(0, self.n, count, np.uint64)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Cut all numbers into batches [begin, end)."""
        for begin in range(0, self.n, BATCH):
            yield begin, min(begin + BATCH, self.n)

    def examples(self, number: int) -> shoal.Batch:
        """Draw a batch of examples; the same number gives the same batch."""
        random = np.random.default_rng([7, number])
        heads = self.zipf(random, (EXAMPLES, HEADS))
        keys = np.empty((EXAMPLES, HEADS + TAILS), np.uint64)
        keys[:, :HEADS] = self.of(heads)
        keys[:, HEADS:] = self.of(self._walk(number)).reshape(EXAMPLES, TAILS)
        planted = shoal.data.mix(heads.ravel()) >> np.uint64(40)
        margin = (planted.astype(np.float64) * 2.0**-24 - 0.5).reshape(heads.shape).sum(axis=1) * 2 - 1
        labels = (random.random(EXAMPLES) < 1 / (1 + np.exp(-margin))).astype(np.float32)
        return shoal.Batch(labels, _INDPTR, keys.ravel(), None)

    def example_batches(self) -> int:
        """Count the batches whose examples cover all numbers."""
        return -(-self.n // (EXAMPLES * TAILS))

    def _walk(self, number: int) -> Keys:
        stride = self._stride()
        per_batch = EXAMPLES * TAILS
        steps = np.arange(per_batch, dtype=np.uint64) * np.uint64(stride) % np.uint64(self.n)
        steps += np.uint64(number * per_batch * stride % self.n)
        return np.where(steps >= self.n, steps - np.uint64(self.n), steps)

    def _stride(self) -> int:
        stride = max(1, int(self.n * _STRIDE))
        while math.gcd(stride, self.n) != 1:
            stride += 1
        return stride


def first_gradients(keys: Keys) -> Floats:
    """Return gradients whose squares are exact in float32: k / 64, k from 1 to 63, of either sign."""
    bits = keys >> np.uint64(57)  # 0 .. 127
    sizes = (bits >> np.uint64(1)).astype(np.float32)
    return np.where(sizes == 0, np.float32(1), np.where(bits & np.uint64(1), sizes, -sizes)) / np.float32(64)


_INDPTR = np.arange(EXAMPLES + 1, dtype=np.int64) * (HEADS + TAILS)
