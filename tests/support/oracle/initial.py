"""Initial rows, element by element: a function of (seed, key, element) and of nothing else.

row(seed, key)      mix(mix(seed) ^ mix(key))
bits(row, element)  mix(row + element)
Uniform             scale * (2 * top24(bits) / 2^24 - 1), in [-scale, scale)
Normal              std * the normal quantile of (top52(bits) + 1/2) / 2^52
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from oracle.hashing import MASK, mix


def bits(seed: int, key: int, element: int) -> int:
    return mix((mix(mix(seed & MASK) ^ mix(key)) + element) & MASK)


def uniform(scale: float, seed: int, key: int, dim: int) -> np.ndarray:
    fractions = [(bits(seed, key, e) >> 40) / 2**23 - 1 for e in range(dim)]
    return np.float32(scale) * np.array(fractions, np.float32)


def normal(std: float, seed: int, key: int, dim: int) -> np.ndarray:
    quantile = NormalDist().inv_cdf  # Wichura's AS 241 too, with the C library's logarithm
    fractions = [quantile(((bits(seed, key, e) >> 12) + 0.5) / 2**52) for e in range(dim)]
    return (float(np.float32(std)) * np.array(fractions)).astype(np.float32)
