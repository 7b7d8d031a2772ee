"""Numbers of other libraries as those of Python: NumPy's scalars, as grids and configurations hold them."""

from __future__ import annotations

import numbers
from dataclasses import fields
from typing import Any

_NUMBERS = {"int": "a whole number", "float": "a number", "bool": "True or False", "None": "None"}


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


def whole(name: str, value: Any, least: int = 0, what: str | None = None) -> int:
    """Return a parameter that counts something as an int; ``what`` to pass is for messages.

    Examples
    --------
    >>> whole("epochs", 4.0, 1)
    Traceback (most recent call last):
    TypeError: epochs is 4.0: pass a whole number, 1 or more
    """
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is {value!r:.80}: pass {what or f'a whole number, {least} or more'}")
    if number < least:
        raise ValueError(f"{name} is {number}: pass {what or f'{least} or more'}")
    return number


def make_plain(description: Any, *, checked: bool = True) -> None:
    """Make the numbers of a frozen dataclass plain: they are compared, hashed and written into manifests."""
    for one in fields(description):
        value = getattr(description, one.name)
        found = plain(value)
        kinds = (one.type.__name__ if isinstance(one.type, type) else str(one.type)).split(" | ")
        if checked and _NUMBERS.keys() >= set(kinds) and not _is_one_of(found, kinds):
            what = " or ".join(_NUMBERS[kind] for kind in kinds)
            raise TypeError(f"{one.name} is {value!r:.80}: pass {what}")
        if found is not value:
            object.__setattr__(description, one.name, found)


def _is_one_of(value: Any, kinds: list[str]) -> bool:
    kind = "None" if value is None else type(value).__name__
    return kind in kinds or (kind == "int" and "float" in kinds)
