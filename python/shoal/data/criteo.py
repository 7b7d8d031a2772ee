"""Criteo's integer columns: the log-squared buckets, and the keys of the buckets.

The customary rule turns an integer v into a token:

    v > 2    the decimal digits of floor(ln(v)^2)
    v <= 2   "SP" and the decimal digits of v

A bucket is thus an interval of integers, and the rule becomes a table of the lower bounds of the intervals. The table
is exact: floor(ln(v)^2) >= b if and only if v >= exp(sqrt(b)), which is never a whole number for b >= 1.
"""

from __future__ import annotations

import functools
from decimal import ROUND_CEILING, Context, Decimal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.data.hashing import hash_strings

INTEGER_COLUMNS = 13
CATEGORY_COLUMNS = 26
_BITS = 63  # of the largest integer
_SMALL = 10_000
_DIGITS = 24  # 19 before the point, and enough after it to distinguish any of the bounds from a whole number


class Buckets(msgspec.Struct, frozen=True):
    """The tables that `shoal._reader.parse_criteo` walks."""

    # Bucket b holds the integers in [floors[b], floors[b + 1]); the last entry is 2^64 - 1.
    floors: NDArray[np.uint64]
    # The bucket of the least integer in each cell. A cell holds the integers that agree in their length and their
    # leading eight bits, so that at most two buckets share one.
    cells: NDArray[np.uint16]
    # The bucket of each integer of up to four digits.
    small: NDArray[np.uint8]
    # The key of each bucket in each integer column.
    numbers: NDArray[np.uint64]


@functools.cache
def buckets() -> Buckets:
    """Make the tables, once in a process: some milliseconds."""
    starts = [0, 1, 2]
    tokens = ["SP0", "SP1", "SP2"]
    context = Context(prec=_DIGITS)
    b = 1
    while (start := _start_of(b, context)) < 1 << _BITS:
        starts.append(start)
        tokens.append(str(b))
        b += 1
    floors = np.array([*starts, (1 << 64) - 1], np.uint64)
    least = [*range(256), *(top << shift for shift in range(1, _BITS - 7) for top in range(128, 256))]
    cells = np.searchsorted(floors, np.array(least, np.uint64), side="right") - 1
    small = np.searchsorted(floors, np.arange(_SMALL, dtype=np.uint64), side="right") - 1
    numbers = np.stack([hash_strings(tokens, field=column) for column in range(1, INTEGER_COLUMNS + 1)])
    return Buckets(floors, cells.astype(np.uint16), small.astype(np.uint8), numbers)


def integer_key(column: int, text: str) -> int:
    """Return the key of an integer in a column, 1 to 13."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"I{column}={text}: this column has integers") from None
    if number < 0:
        return int(hash_strings([f"SP{number}"], field=column)[0])
    made = buckets()
    return int(made.numbers[column - 1, np.searchsorted(made.floors, np.uint64(number), side="right") - 1])


def _start_of(b: int, context: Context) -> int:
    """Compute the least integer v with ln(v)^2 >= b."""
    return int(context.exp(context.sqrt(Decimal(b))).to_integral_value(ROUND_CEILING, context))


def column_of(name: str | int) -> int:
    """Return the number of a column: itself, or that of its customary name, I1 to I13 and C1 to C26."""
    text = str(name)
    first = {"I": 0, "C": INTEGER_COLUMNS}.get(text[:1].upper())
    number = text if first is None else text[1:]
    column = int(number) + (first or 0) if number.isdecimal() else 0
    last = INTEGER_COLUMNS if first == 0 else INTEGER_COLUMNS + CATEGORY_COLUMNS
    if not (first or 0) < column <= last:
        raise ValueError(f"{name!r} is not a feature column: pass 1 to 39, or I1 to I13 and C1 to C26")
    return column
