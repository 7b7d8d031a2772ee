"""What control messages are made of: messages.py has the messages.

A kind of message is a subclass with a tag; `union_of` is what decoders and fields of envelopes take.

Threads: records are immutable.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, ClassVar

import msgspec


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message, or a part of one."""


class RequestBody(Record, frozen=True):
    """What a process requests of the scheduler. ``doing`` describes it to users; it may name fields of the request."""

    doing: ClassVar[str] = "asking the scheduler"


class Command(RequestBody, frozen=True):
    """A request that any process may send, also one that is not known; to repeat it changes nothing."""


class ReplyBody(Record, frozen=True):
    """The answer to a request."""


class OrderBody(Record, frozen=True):
    """What all servers execute."""


class Event(Record, frozen=True):
    """What all processes are told of."""


def union_of(base: type[Record]) -> Any:
    """Return the union of the kinds of a base that are defined so far."""
    return functools.reduce(operator.or_, _kinds(base))


def _kinds(base: type[Record]) -> list[type[Record]]:
    own = [base] if base.__struct_config__.tag is not None else []
    return own + [kind for sub in base.__subclasses__() for kind in _kinds(sub)]
