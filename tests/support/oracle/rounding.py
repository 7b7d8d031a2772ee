"""The grids that 16-bit weights lie on."""

from __future__ import annotations

import numpy as np

LARGEST = {"float16": 65504.0, "bfloat16": float(np.uint32(0x7F7F0000).view(np.float32))}
BITS = {"float16": 10, "bfloat16": 7}  # of the fraction
LEAST_EXPONENT = {"float16": -14, "bfloat16": -126}


def spacing(dtype: str, x: float) -> float:
    """Return the distance of the grid's points around ``x``: a power of two, smallest below the least normal."""
    exponent = int(np.frexp(abs(float(x)))[1]) - 1 if x else LEAST_EXPONENT[dtype]
    return 2.0 ** (max(exponent, LEAST_EXPONENT[dtype]) - BITS[dtype])


def neighbours(dtype: str, x: float) -> tuple[float, float]:
    """Return the largest grid point not above ``x`` and the smallest not below it."""
    step = spacing(dtype, x)
    return np.floor(x / step) * step, np.ceil(x / step) * step


def on_grid(dtype: str, x) -> bool:
    """Whether every number is a grid point."""
    return all(lo == hi and abs(lo) <= LARGEST[dtype] for lo, hi in (neighbours(dtype, v) for v in np.ravel(x)))
