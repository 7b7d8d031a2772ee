"""Numbers of other libraries as those of Python: NumPy's scalars, as grids and configurations hold them."""

from __future__ import annotations

import functools
import inspect
import numbers
import threading
from dataclasses import fields
from typing import Any

import msgspec
from msgspec import structs

from shoal.base.defaults import SLOTS

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


def check_slots(slots: Any) -> None:
    """Raise a ValueError if no store can have so many slots."""
    if not isinstance(slots, int) or slots not in SLOTS:
        raise ValueError(f"slots must be a power of two from 2 to 16384, got {slots!r}")


def period(seconds: Any) -> float:
    """Return the seconds between two looks of a thread, no more than it can wait for."""
    number = plain(seconds)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"the period of watch is {seconds!r:.80}: pass a number of seconds above 0")
    if not number > 0:
        raise ValueError(f"the period of watch is {number}: pass a number of seconds above 0")
    return float(min(number, threading.TIMEOUT_MAX))


def make_plain(description: Any, *, checked: bool = True) -> None:
    """Make the numbers of a frozen struct or dataclass plain: they are compared, hashed and written into manifests."""
    is_struct = isinstance(description, msgspec.Struct)
    kind: Any = type(description)
    for name, kinds in _kinds_of(kind):
        value = getattr(description, name)
        found = plain(value)
        if checked and kinds and not _is_one_of(found, kinds):
            what = " or ".join(_NUMBERS[kind] for kind in kinds)
            raise TypeError(f"{name} is {value!r:.80}: pass {what}")
        if found is not value:
            (structs.force_setattr if is_struct else object.__setattr__)(description, name, found)


@functools.cache
def _kinds_of(kind: Any) -> list[tuple[str, list[str]]]:
    """Return the fields of a description, each with the types of numbers that it takes; with none: it takes others."""
    if issubclass(kind, msgspec.Struct):
        types: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            types |= inspect.get_annotations(base)
        named = [(name, types[name]) for name in kind.__struct_fields__]
    else:
        named = [(one.name, one.type) for one in fields(kind)]
    found = [(name, (one.__name__ if isinstance(one, type) else str(one)).split(" | ")) for name, one in named]
    return [(name, kinds if _NUMBERS.keys() >= set(kinds) else []) for name, kinds in found]


def _is_one_of(value: Any, kinds: list[str]) -> bool:
    kind = "None" if value is None else type(value).__name__
    return kind in kinds or (kind == "int" and "float" in kinds)
