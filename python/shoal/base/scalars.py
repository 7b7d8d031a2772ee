"""Numbers of other libraries as those of Python: NumPy's scalars, as grids and configurations hold them."""

from __future__ import annotations

import numbers
from dataclasses import fields
from typing import Any

__all__ = ["make_plain", "plain"]


def plain(value: Any) -> Any:
    """Return a number of any type as an int or a float, and a truth value as a bool; anything else is unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> [plain(value) for value in (np.int64(4), np.float32(0.5), np.bool_(True), "4", None)]
    [4, 0.5, True, '4', None]
    """
    if type(value) in (int, float, bool, str) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    is_truth = getattr(getattr(value, "dtype", None), "kind", None) == "b" and getattr(value, "shape", None) == ()
    return bool(value) if is_truth else value


def make_plain(description: Any) -> None:
    """Make the numbers of a frozen dataclass plain: they are compared, hashed and written into manifests."""
    for one in fields(description):
        value = getattr(description, one.name)
        found = plain(value)
        if found is not value:
            object.__setattr__(description, one.name, found)
