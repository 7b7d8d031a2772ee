"""Schedules: how a table's learning rate changes with its clock, as frozen descriptions.

A schedule multiplies the ``lr`` of an optimizer: ``shoal.SGD(0.1, schedule=shoal.schedules.Cosine(10_000))``. It is a
function of the table's clock, which counts ``store.tick()``, in `shoal.models.Model.fit` batches: all servers of a
cluster step with the same rate at the same clock, and a table that was saved and loaded continues with it.
``docs/optimizers.md`` has the formulas; ``csrc/optim/schedule.h`` computes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from shoal import _core
from shoal.base.scalars import make_plain, whole

__all__ = ["Cosine", "InverseRoot", "Linear", "Schedule", "Steps", "Warmup", "make_schedule"]

_PREFIX = "schedule_"
_MOST_CLOCKS = 2**32


@dataclass(frozen=True, slots=True)
class Schedule:
    """Base class of schedules."""

    kind: ClassVar[int]  # as csrc/optim/schedule.h numbers them

    def __post_init__(self) -> None:
        make_plain(self)
        self.at(0)

    def params(self) -> dict[str, float]:
        """Return the schedule as numbers, which are among the parameters of its optimizer."""
        numbers = {_PREFIX + each.name: float(getattr(self, each.name)) for each in fields(self)}
        return {"schedule": float(self.kind), **numbers}

    def at(self, clock: int) -> float:
        """Compute the factor of the learning rate at a clock.

        Parameters
        ----------
        clock : int
            Of the table, from 0.

        Returns
        -------
        float
            From 0 to 1, rounded to float32.

        Examples
        --------
        >>> [Linear(4).at(clock) for clock in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
        """
        clock = whole("clock", clock, 0, "0 to 2**32 - 1")
        if clock >= _MOST_CLOCKS:
            raise ValueError(f"clock is {clock}: pass 0 to 2**32 - 1")
        return _core.schedule_at(self.params(), clock)


@dataclass(frozen=True, slots=True)
class Warmup(Schedule):
    """A linear increase from a small rate to the full rate, then constant.

    Parameters
    ----------
    warmup : int
        Clocks until the full rate is reached: at clock c the factor is ``(c + 1) / warmup``.
    """

    warmup: int
    kind: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Steps(Schedule):
    """The rate times ``factor`` after every ``clocks`` clocks.

    Parameters
    ----------
    clocks : int
    factor : float
        0 to 1.
    warmup : int
        Clocks of a `Warmup` before; the schedule counts from its end.
    """

    clocks: int
    factor: float = 0.1
    warmup: int = field(default=0, kw_only=True)
    kind: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Linear(Schedule):
    """A linear decrease to ``floor`` times the rate, within ``clocks`` clocks; then constant.

    Parameters
    ----------
    clocks : int
    floor : float
        0 to 1.
    warmup : int
        Clocks of a `Warmup` before; the schedule counts from its end.
    """

    clocks: int
    floor: float = 0.0
    warmup: int = field(default=0, kw_only=True)
    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Half a cosine down to ``floor`` times the rate, within ``clocks`` clocks (Loshchilov, Hutter, ICLR'17).

    Parameters
    ----------
    clocks : int
    floor : float
        0 to 1.
    warmup : int
        Clocks of a `Warmup` before; the schedule counts from its end.
    """

    clocks: int
    floor: float = 0.0
    warmup: int = field(default=0, kw_only=True)
    kind: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class InverseRoot(Schedule):
    """The rate divided by ``sqrt(1 + c / clocks)`` at clock c: a decrease that never ends and becomes slower.

    Parameters
    ----------
    clocks : int
        After three times this number of clocks the rate is half.
    warmup : int
        Clocks of a `Warmup` before; the schedule counts from its end.
    """

    clocks: int
    warmup: int = field(default=0, kw_only=True)
    kind: ClassVar[int] = 5


SCHEDULES: tuple[type[Schedule], ...] = (Warmup, Steps, Linear, Cosine, InverseRoot)
_KINDS = {one.kind: one for one in SCHEDULES}
_WHOLE = ("warmup", "clocks")


def make_schedule(params: Mapping[str, float]) -> Schedule:
    """Rebuild a schedule from its `Schedule.params`.

    Raises
    ------
    ValueError, TypeError
        They describe no schedule that this version knows.
    """
    kind = _KINDS.get(int(params["schedule"])) if "schedule" in params else None
    if kind is None:
        raise ValueError(f"no schedule {dict(params)}")
    values = {name.removeprefix(_PREFIX): value for name, value in params.items() if name != "schedule"}
    return kind(**{name: int(value) if name in _WHOLE else value for name, value in values.items()})
