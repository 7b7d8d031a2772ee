"""Which keys get a row, and which rows are given up: the rules of a table's lifecycle.

    push --> admission --> rows --> sweep --> what the expiry rules leave

Rules are frozen values, as optimizers are: compared, hashed, pickled, written into manifests and sent to servers in a
plain form. They run in the engine, beside the rows. A *sighting* is one occurrence of a key in a push; an assignment
counts as one, a pull as none. ``docs/lifecycle.md`` says what each rule costs and keeps.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgspec

from shoal import _core

__all__ = [
    "Admission",
    "AfterBloom",
    "AfterCount",
    "DecayedScore",
    "Expiry",
    "MaxRows",
    "MinNorm",
    "RuleForm",
    "TimeToLive",
    "WithProbability",
    "make_admission",
    "make_expiry",
]


class RuleForm(msgspec.Struct, frozen=True, array_like=True):
    """A rule in plain values."""

    rule: str
    params: dict[str, float]

    def native(self) -> tuple[str, dict[str, float]]:
        """Put it as the engine takes it."""
        return self.rule, self.params


@dataclass(frozen=True, slots=True)
class _Rule:
    _native: ClassVar[Any]

    def __post_init__(self) -> None:
        self._native(type(self).__name__, self.params())

    def params(self) -> dict[str, float]:
        """All parameters by name, as numbers; those that are not set are left out."""
        found: dict[str, float] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{type(self).__name__} needs a number for {name}, got {value!r}")
            found[name] = value if isinstance(value, int) and abs(value) > 2**53 else float(value)
        return found

    def form(self) -> RuleForm:
        """Put the rule into plain values."""
        return RuleForm(type(self).__name__, self.params())


class Admission(_Rule):
    """What every admission rule has. A key that waits for its row reads its initial row; its gradients are dropped."""

    __slots__ = ()
    _native = staticmethod(_core.check_admission)


class Expiry(_Rule):
    """What every expiry rule has: a sweep drops the rows that it names."""

    @property
    def needs_counts(self) -> bool:
        """Whether it matters how often a key occurs in a push."""
        return False

    __slots__ = ()
    _native = staticmethod(_core.check_expiry)


@dataclass(frozen=True, slots=True)
class AfterCount(Admission):
    """A key gets its row at its ``n``-th sighting, counted exactly.

    Waiting keys take 16 to 21 bytes each, beside the rows.

    Parameters
    ----------
    n : int
        At least 1. The push that brings the n-th sighting makes the row and is applied to it.
    within : int, optional
        A waiting key that was not sighted for more than this many clocks is forgotten. Default: never.
    capacity : int, optional
        Keys that may wait at a time. Each slot has its share; where it is full, the eighth that was sighted longest ago
        is forgotten (of equal clocks the smallest hashes). Default: as many as come.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> table = shoal.local().table("t", admit=shoal.AfterCount(2))
    >>> key, grad = np.array([7], np.uint64), np.ones(1, np.float32)
    >>> for _ in range(2):
    ...     table.push(key, grad).wait()
    ...     print(table.contains(key).item())
    False
    True
    """

    n: int
    within: int | None = None
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class AfterBloom(Admission):
    """A key gets its row at its ``n``-th sighting, counted by a Bloom filter of fixed size; early at times, never late.

    A key's counters stand in one cache line, which its hash names; the least of them is its count. Counters have 4 bits
    up to ``n = 15``, else 8.

    Parameters
    ----------
    n : int
        1 to 255.
    capacity : int
        Waiting keys that the filter is made for. More of them make it err more often.
    error : float
        About the share of new keys that a filter with ``capacity`` keys in it takes for sighted before: 1e-6 to 0.5.
    within : int, optional
        The filter starts anew every so many clocks. Default: never, so that it fills up in the end.
    """

    n: int
    capacity: int
    error: float = 0.01
    within: int | None = None


@dataclass(frozen=True, slots=True)
class WithProbability(Admission):
    """A key gets its row at each sighting with probability ``p``: after ``1 / p`` sightings on average.

    Takes no memory. The coin is hashed from the seed, the key, the number of the push and that of the occurrence.

    Parameters
    ----------
    p : float
        1e-9 to 1.
    seed : int
        0 to 2^53.
    """

    p: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TimeToLive(Expiry):
    """Drops rows that were not sighted for more than a number of clocks. Four bytes a row.

    Parameters
    ----------
    clocks : int
        1 to 2^31 - 1.
    """

    clocks: int


@dataclass(frozen=True, slots=True)
class DecayedScore(Expiry):
    """Drops rows whose score is below a floor. Eight bytes a row.

    A sighting adds 1 to the score, and each clock multiplies it by ``decay``: ``score * decay**clocks + sightings``. To
    give clicks a weight of their own, push counts: ``push_unique(batch, grads, counts=shows + 9 * clicks)``.

    Parameters
    ----------
    decay : float
        1e-9 to 1.
    floor : float
        Above 0.
    """

    decay: float
    floor: float

    @property
    def needs_counts(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class MinNorm(Expiry):
    """Drops rows whose weights have a Euclidean norm below a floor. No bytes.

    Parameters
    ----------
    floor : float
        Above 0. Under FTRL with an L1 penalty rows of zeros are below any floor, with all the evidence in their state.
    """

    floor: float


@dataclass(frozen=True, slots=True)
class MaxRows(Expiry):
    """Holds a table to a number of rows: a push that makes a slot exceed its share ends by giving an eighth of it up.

    Each slot has its share of ``rows``, so a table is full a little below that number. Four bytes a row.

    Parameters
    ----------
    rows : int
        At least as many as the store has slots.
    keep : {"recent", "frequent"}
        Which rows stay: those sighted last, or those sighted most often since they were made. Of equal ones, those with
        the largest hashes.
    """

    rows: int
    keep: str = "recent"

    def __post_init__(self) -> None:
        if self.keep not in {"recent", "frequent"}:
            raise ValueError(f'MaxRows keeps "recent" or "frequent" rows, got {self.keep!r}')
        _core.check_expiry("MaxRows", self.params())

    @property
    def needs_counts(self) -> bool:
        """Where it keeps frequent rows."""
        return self.keep == "frequent"

    def params(self) -> dict[str, float]:
        """All parameters by name, as numbers: ``frequent`` is 1 where ``keep`` says so."""
        if isinstance(self.rows, bool) or not isinstance(self.rows, (int, float)):
            raise TypeError(f"MaxRows needs a number for rows, got {self.rows!r}")
        return {"rows": float(self.rows), "frequent": float(self.keep == "frequent")}


_WHOLE = {"n", "within", "capacity", "seed", "clocks", "rows"}


def _made(kind: type[Any], form: RuleForm) -> Any:
    values: dict[str, Any] = {name: int(value) if name in _WHOLE else value for name, value in form.params.items()}
    if kind is MaxRows:
        values["keep"] = "frequent" if values.pop("frequent", 0.0) else "recent"
    return kind(**values)


def make_admission(form: RuleForm) -> Admission:
    """Rebuild an admission rule from its :meth:`form`.

    Raises
    ------
    ValueError, TypeError
        It describes no rule that this version knows.
    """
    kinds = {kind.__name__: kind for kind in (AfterCount, AfterBloom, WithProbability)}
    if form.rule not in kinds:
        raise ValueError(f"no admission rule {form.rule!r}")
    made: Admission = _made(kinds[form.rule], form)
    return made


def make_expiry(form: RuleForm) -> Expiry:
    """Rebuild an expiry rule from its :meth:`form`.

    Raises
    ------
    ValueError, TypeError
        It describes no rule that this version knows.
    """
    kinds = {kind.__name__: kind for kind in (TimeToLive, DecayedScore, MinNorm, MaxRows)}
    if form.rule not in kinds:
        raise ValueError(f"no expiry rule {form.rule!r}")
    made: Expiry = _made(kinds[form.rule], form)
    return made
