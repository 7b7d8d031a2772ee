"""Which method handles what: `handles` marks it, and `Handlers` finds it by the type of what has come.

A new request needs its struct (protocol/messages.py), a method that is marked with it, and its caller; a new input its
struct (inputs.py) and its method. docs/architecture.md has an example.

Threads: one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_Kind = type[msgspec.Struct]
_Method = TypeVar("_Method", bound=Callable[..., Any])

_marked: dict[str, dict[str, _Kind]] = defaultdict(dict)  # by class: what its methods handle
_of_all: set[_Kind] = set()


def handles(kind: _Kind, *, of_all: bool = False) -> Callable[[_Method], _Method]:
    """Mark the method that handles an input, a command of a tool or a request of a peer.

    A request is one of a worker that is a member of a job, unless it is taken ``of_all`` peers.
    """

    def mark(method: _Method) -> _Method:
        owner, _, name = method.__qualname__.rpartition(".")
        _marked[owner][name] = kind
        if of_all:
            _of_all.add(kind)
        return method

    return mark


class Handlers:
    """The marked methods of some objects."""

    def __init__(self, *parts: object) -> None:
        self._methods = {
            kind: (part, name) for part in parts for name, kind in _marked[type(part).__qualname__].items()
        }

    def __call__(self, body: msgspec.Struct, *whose: Any) -> Any:
        """Call the method for an input, after what else it takes: the peer and the number of a request."""
        part, name = self._methods[type(body)]
        return getattr(part, name)(*whose, body)


def is_taken_of_all(body: msgspec.Struct) -> bool:
    """Whether a request is taken of all peers."""
    return type(body) in _of_all
