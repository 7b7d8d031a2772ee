"""Consistency models: what a pull sees of other workers' pushes. Frozen descriptions, one for a whole job.

A worker's clock is the number of ticks it has completed; a push belongs to the clock at which it was made.
``docs/consistency.md`` defines what each model guarantees.

    BSP()      a pull at clock c sees all pushes of clocks before c and none of c; the pushes of a clock are one step
    SSP(s)     a pull at clock c sees all pushes of clocks up to c - s - 1, and possibly newer ones
    ASP()      pushes are visible when they arrive; no pull waits

A model is described to a server by three plain values: ``mode`` ("bsp", "ssp" or "asp"), ``waits`` (clocks that the
slowest worker may lag behind a pull) and ``mean``.
"""

from dataclasses import dataclass
from typing import ClassVar

from shoal.base.scalars import make_plain

_MOST_CLOCKS = 2**31


@dataclass(frozen=True, slots=True)
class Consistency:
    """The base class of the three models."""

    mode: ClassVar[str]

    @property
    def waits(self) -> int:
        """Clocks that the slowest worker may lag behind a pull before the pull waits for it; 0 for BSP."""
        return 0

    @property
    def is_bulk(self) -> bool:
        """Whether pushes are held back until all workers have ended their clock."""
        return self.mode == "bsp" or (self.mode == "ssp" and self.waits == 0)

    @property
    def mean(self) -> bool:
        """Whether the pushes of a clock are divided by the number of workers."""
        return False

    @property
    def text(self) -> str:
        """It as `parse_consistency` reads it."""
        return self.mode


@dataclass(frozen=True, slots=True)
class BSP(Consistency):
    """Bulk synchronous: all pushes of a clock are merged in the order of the workers' ranks and applied as one step.

    The result is bit-identical for any number of servers and threads, and for any order of arrival.

    Parameters
    ----------
    reduce : {"sum", "mean"}
        Whether the gradients of the workers are added up ("sum"), or also divided by the number of workers ("mean").

    Examples
    --------
    >>> BSP().reduce
    'sum'
    """

    mode: ClassVar[str] = "bsp"

    reduce: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "mean"):
            raise ValueError(f"BSP merges by 'sum' or 'mean', got reduce={self.reduce!r}")

    @property
    def mean(self) -> bool:
        """Whether the pushes of a clock are divided by the number of workers."""
        return self.reduce == "mean"

    @property
    def text(self) -> str:
        """It as `parse_consistency` reads it."""
        return "bsp:mean" if self.mean else "bsp"


@dataclass(frozen=True, slots=True)
class SSP(Consistency):
    """Stale synchronous: pushes are applied as they arrive; a pull waits for workers that are too far behind.

    Parameters
    ----------
    staleness : int
        Clocks that the slowest worker may be behind a pull, 0 to 2^31 - 1. 0 is run as :class:`BSP`.

    Examples
    --------
    >>> SSP(staleness=4).waits
    4
    """

    mode: ClassVar[str] = "ssp"

    staleness: int

    def __post_init__(self) -> None:
        make_plain(self)
        if not 0 <= self.staleness < _MOST_CLOCKS:
            raise ValueError(f"SSP needs a staleness from 0 to {_MOST_CLOCKS - 1} clocks, got {self.staleness!r}")

    @property
    def waits(self) -> int:
        """Clocks that the slowest worker may lag behind a pull before the pull waits for it."""
        return self.staleness

    @property
    def text(self) -> str:
        """It as `parse_consistency` reads it."""
        return f"ssp:{self.staleness}"


@dataclass(frozen=True, slots=True)
class ASP(Consistency):
    """Asynchronous: pushes are applied as they arrive, and no pull waits for any worker."""

    mode: ClassVar[str] = "asp"


def as_consistency(given: Consistency | str) -> Consistency:
    """Return a consistency that is given as such, or as its text."""
    if isinstance(given, str):
        return parse_consistency(given)
    if not isinstance(given, Consistency):
        raise TypeError(f"consistency is one of BSP(), SSP(staleness) and ASP(), got {given!r}")
    return given


def parse_consistency(text: str) -> Consistency:
    """Read bsp, bsp:mean, ssp:4 or asp, in any case; ValueError if it is none of them.

    >>> parse_consistency("BSP"), parse_consistency("ssp:4")
    (BSP(reduce='sum'), SSP(staleness=4))
    """
    name, colon, staleness = text.lower().partition(":")
    if (name, staleness) == ("bsp", "mean"):
        return BSP("mean")
    if (name, colon) in (("bsp", ""), ("asp", "")):
        return BSP() if name == "bsp" else ASP()
    if (name, colon) == ("ssp", ":") and staleness.isascii() and staleness.isdigit():
        return SSP(int(staleness))
    raise ValueError(f"{text!r} is not a consistency: write bsp, bsp:mean, ssp:N (such as ssp:4) or asp")
