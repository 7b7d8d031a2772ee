"""Limits: the memory of one request, and of all requests together.

A request has an Account. Its memory is added there before it is allocated: the bytes of its body as they arrive, then
an upper bound of its decoded size, which is known before decoding. Accounts share one Budget; a request that does not
fit is refused (503) and has no effect.

Threads: a Budget is safe from any thread, an Account belongs to its request.
"""

from __future__ import annotations

import math
from typing import Self

import msgspec
from msgspec import structs

from shoal import _core
from shoal.base.scalars import make_plain


class RequestError(ValueError):
    """A request that cannot be answered: the message has the reason."""

    status = 400


class TooLargeError(RequestError):
    """A request that is larger than the limits allow."""

    status = 413


class UnavailableError(RequestError):
    """A request that cannot be answered now: try again later."""

    status = 503


class BusyError(UnavailableError):
    """The pending requests use all of the memory budget."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests and connections.

    Parameters
    ----------
    body_bytes : int
        Maximum size of a body.
    decoded_bytes : int
        Maximum memory of the decoded content of one body; an upper bound of it is computed before decoding.
    in_flight_bytes : int
        Maximum memory of all pending requests: their bodies, and their decoded content.
    connections : int
        Maximum number of open connections. A further one replaces the connection that has been idle longest; if none
        is idle, the oldest whose client has not sent its request, or does not read the answer; if there is no such
        connection, it is answered with 503.
    request_seconds : float
        Time in which a request must arrive completely, from the connection or its first byte on, and in which the
        client must read the answer.

    Raises
    ------
    ValueError
        One of them is not above 0.
    """

    body_bytes: int = 64 << 20
    decoded_bytes: int = 512 << 20
    in_flight_bytes: int = 1 << 30
    connections: int = 1024
    request_seconds: float = 30.0

    def __post_init__(self) -> None:
        make_plain(self)
        for name, value in structs.asdict(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}: pass a number above 0")


class Budget:
    """The memory of all pending requests.

    Attributes
    ----------
    native : _core.ByteBudget
        The count, which the engine's HTTP server shares.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.native = _core.ByteBudget(limits.in_flight_bytes)

    @property
    def held(self) -> int:
        """Bytes that requests hold now."""
        return self.native.held

    def add(self, size: int) -> None:
        """Reserve bytes."""
        if not self.native.add(size):
            raise BusyError(
                f"the requests in progress use {self.held} bytes, and this one needs {size} more: at most "
                f"{self.limits.in_flight_bytes} are used at a time; try again later"
            )

    def give_back(self, size: int) -> None:
        """Release bytes."""
        self.native.give_back(size)


class Account:
    """The memory of one request. A context manager that releases it.

    Parameters
    ----------
    budget : Budget
    received : int
        Bytes of the body that whoever has received it holds and releases.
    """

    def __init__(self, budget: Budget, *, received: int = 0) -> None:
        self._budget = budget
        self._received = received
        self._body = received
        self._decoded = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._budget.give_back(self._body - self._received + self._decoded)

    @property
    def most(self) -> int:
        """Bytes that a body may have."""
        return min(self._budget.limits.body_bytes, self._budget.limits.in_flight_bytes)

    def body(self, size: int) -> None:
        """Add bytes of the body."""
        if self._body + size > self.most:
            raise TooLargeError(f"a body of {self._body + size} bytes or more: at most {self.most} are accepted")
        self._budget.add(size)
        self._body += size

    @property
    def left(self) -> int:
        """Bytes that may be decoded."""
        limits = self._budget.limits
        return min(limits.decoded_bytes, limits.in_flight_bytes - self._body) - self._decoded

    def decoded(self, size: int) -> None:
        """Add bytes that are about to be decoded."""
        limit = min(self._budget.limits.decoded_bytes, self._budget.limits.in_flight_bytes - self._body)
        if self._decoded + size > limit:
            raise TooLargeError(
                f"the body takes {self._decoded + size} bytes or more once it is decoded, and at most {limit} are "
                "used: send fewer examples in a request"
            )
        self._budget.add(size)
        self._decoded += size
