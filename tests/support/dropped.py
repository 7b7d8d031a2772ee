"""What is still there after it was dropped, until the collector of cycles comes by: it is not looked for by size."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Leave cycles alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept(make: Callable[[], Iterable[Any]]) -> list[str]:
    """Return the types of what a function has made, and is there when nothing uses it any more."""
    with no_collector():
        made = [weakref.ref(one) for one in make()]
        return [type(one()).__name__ for one in made if one() is not None]
