"""ExactSum: a sum of float64 numbers that does not depend on their order.

Threads: a sum belongs to one thread at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Self

_HEXADECIMAL = re.compile(r"-?[0-9a-f]{1,1024}")


class ExactSum:
    """A sum of float64 numbers that is never rounded: an integer of units of 2^-1074. No number may be -inf or NaN."""

    __slots__ = ("_infinite", "_units")

    INTEGERS = 5  # how many `whole` returns
    _UNIT_BITS = 1074  # every finite float64 is a whole number of 2^-1074
    _DROPPED_BITS = _UNIT_BITS - 64  # of `whole`
    _MOST_BITS = 63 + 64  # of `whole`

    def __init__(self, value: float = 0.0) -> None:
        self._units = 0
        self._infinite = False
        self.add(value)

    def add(self, value: float) -> None:
        """Add one number."""
        if value == math.inf:
            self._infinite = True
        else:
            numerator, denominator = value.as_integer_ratio()
            self._units += numerator << (self._UNIT_BITS + 1 - denominator.bit_length())

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self._units += other._units
        self._infinite |= other._infinite

    def __float__(self) -> float:
        """Round the sum to the nearest float64."""
        try:
            return math.inf if self._infinite else self._units / (1 << self._UNIT_BITS)
        except OverflowError:
            return math.inf

    def whole(self) -> tuple[int, int, int, int, int]:
        """Return integers that may be added to those of other sums, none of them negative.

        They are 1 if the sum is infinite or 2^63 or more, else 0; and four digits to base 2^32, the lowest first, of
        the sum in units of 2^-64, rounded down; 0 if it is infinite.
        """
        units = self._units >> self._DROPPED_BITS
        if self._infinite or units >> self._MOST_BITS:
            return 1, 0, 0, 0, 0
        return 0, units & 0xFFFFFFFF, units >> 32 & 0xFFFFFFFF, units >> 64 & 0xFFFFFFFF, units >> 96

    @classmethod
    def of_whole(cls, integers: Sequence[int]) -> Self:
        """Make the sum of the sums whose integers, those of `whole`, were added; they are below 2^63."""
        infinities, *digits = integers
        units = sum(digit << 32 * i for i, digit in enumerate(digits))
        out = cls()
        out._infinite = infinities > 0 or units >> cls._MOST_BITS > 0
        out._units = units << cls._DROPPED_BITS
        return out

    def to_text(self) -> str:
        """Write the sum, all of it: hexadecimal digits, or "inf"."""
        return "inf" if self._infinite else f"{self._units:x}"

    @classmethod
    def from_text(cls, text: object) -> Self:
        """Read what `to_text` wrote."""
        out = cls()
        if text == "inf":
            out._infinite = True
        elif isinstance(text, str) and _HEXADECIMAL.fullmatch(text):
            out._units = int(text, 16)
        else:
            raise ValueError(f"{text!r} is not an exact sum: pass what to_dict wrote")
        return out
