"""Which keys get a row, and which rows are given up: the rules of a table's lifecycle.

    push --> admission --> rows --> sweep --> what the expiry rules leave

Rules are frozen values, as optimizers are: compared, hashed, pickled, written into manifests and sent to servers in a
plain form. They run in the engine, where the rows are. An *occurrence* is one appearance of a key in a push; an
assignment counts as one, a pull as none. ``docs/lifecycle.md`` says what each rule costs and keeps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core

__all__ = [
    "Admission",
    "AfterBloom",
    "AfterCount",
    "DecayedScore",
    "Dropped",
    "Expiry",
    "MaxRows",
    "MinNorm",
    "RuleRecord",
    "SweepReport",
    "TableSweep",
    "TimeToLive",
    "WithProbability",
    "make_admission",
    "make_expiry",
    "parse_admission",
    "parse_expiry",
    "read_sweep",
    "rules_native",
]


class RuleRecord(msgspec.Struct, frozen=True, array_like=True):
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

    def record(self) -> RuleRecord:
        """Put the rule into plain values."""
        return RuleRecord(type(self).__name__, self.params())


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

    Waiting keys take 16 to 21 bytes each, in addition to the rows.

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


_KINDS: tuple[type[Expiry], ...] = (TimeToLive, DecayedScore, MinNorm, MaxRows)  # numbered so, from 1
_WHOLE = {"n", "within", "capacity", "seed", "clocks", "rows"}


def _made(kind: type[Any], form: RuleRecord) -> Any:
    values: dict[str, Any] = {name: int(value) if name in _WHOLE else value for name, value in form.params.items()}
    if kind is MaxRows:
        values["keep"] = "frequent" if values.pop("frequent", 0.0) else "recent"
    return kind(**values)


def make_admission(form: RuleRecord) -> Admission:
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


def make_expiry(form: RuleRecord) -> Expiry:
    """Rebuild an expiry rule from its :meth:`form`.

    Raises
    ------
    ValueError, TypeError
        It describes no rule that this version knows.
    """
    kinds = {kind.__name__: kind for kind in _KINDS}
    if form.rule not in kinds:
        raise ValueError(f"no expiry rule {form.rule!r}")
    made: Expiry = _made(kinds[form.rule], form)
    return made


def rules_native(rules: Sequence[Expiry]) -> npt.NDArray[np.float64]:
    """Put expiry rules as the engine and the wire take them: three numbers each, one behind the other."""
    numbers = [(_KINDS.index(type(rule)) + 1, *rule.params().values(), 0.0)[:3] for rule in rules]
    return np.array(numbers, np.float64).ravel()


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that a rule drops, or would drop.

    Parameters
    ----------
    rule : Expiry
    rows : int
        Those that no rule before it in the list drops.
    bytes : int
        Their share of the table's memory: about what becomes free.
    share : float
        Of the table's recent impressions, the share that these rows carried. Recent is, where rows keep a score: by
        that score, in which a sighting counts ``decay**clocks``. Else, where rows keep a count: all sightings since a
        row was made. Else, where rows keep the clock of their last sighting: of all sightings of rows since the last
        sweep, those of rows that had not been sighted for as long as the rows that go, so that the rule, had it been in
        force all the time, would have given them up before they came back. (Ages are kept in classes of 1, 2 to 3,
        4 to 7, ... clocks, and taken as spread evenly in each.) NaN where rows keep none of these, or nothing was
        sighted.
    """

    rule: Expiry
    rows: int
    bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class TableSweep:
    """What a sweep did to one table, or would do.

    Parameters
    ----------
    table : str
    rows : int
        Before it.
    bytes : int
        Before it, of index, rows and what admission remembers.
    bytes_given_back : int
        0 of a dry run.
    forgotten : int
        Waiting keys that were forgotten; 0 of a dry run.
    dropped : tuple of Dropped
        By rule, in their order.
    thresholds : tuple of tuple of Dropped
        Of a dry run: what each rule, alone, would drop at other thresholds. Else empty.
    """

    table: str
    rows: int
    bytes: int
    bytes_given_back: int
    forgotten: int
    dropped: tuple[Dropped, ...]
    thresholds: tuple[tuple[Dropped, ...], ...]

    def __str__(self) -> str:
        """Lay it out as a small table."""
        lines = [f"{self.table}: {self.rows:,} rows, {self.bytes:,} bytes, {self.bytes_given_back:,} freed"]
        for dropped, others in zip(self.dropped, self.thresholds or ((),) * len(self.dropped), strict=True):
            lines.append(f"  {dropped.rule}: {_told(dropped)}")
            lines.extend(f"    {other.rule}: {_told(other)}" for other in others)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep of a store did, or would do.

    Parameters
    ----------
    dry_run : bool
    tables : tuple of TableSweep
        Those that have rules.
    """

    dry_run: bool
    tables: tuple[TableSweep, ...]

    @property
    def rows_dropped(self) -> int:
        """Rows that went, or would go, in all tables."""
        return sum(dropped.rows for table in self.tables for dropped in table.dropped)

    @property
    def bytes_given_back(self) -> int:
        """Memory that went back to the system; 0 of a dry run."""
        return sum(table.bytes_given_back for table in self.tables)

    def __str__(self) -> str:
        """Lay it out as small tables."""
        return "\n".join(map(str, self.tables))


def _told(dropped: Dropped) -> str:
    share = "" if math.isnan(dropped.share) else f", {dropped.share:.3%} of recent impressions"
    return f"{dropped.rows:,} rows, {dropped.bytes:,} bytes{share}"


# The words of an answer of the engine (csrc/shard/shard.h, Shard::sweep).
_AGES = 33
_HEAD = 5 + _AGES
_CLASSES = 64
_EXPONENT = 32  # class of a score or norm of 1 to 2


class _Answer:
    """The words of one answer, as what they say."""

    def __init__(self, words: npt.NDArray[np.uint64], rules: Sequence[Expiry], *, dry_run: bool) -> None:
        numbers = [int(word) for word in words]
        self.rows, self.before, self.after, self.impressions, self.forgotten = numbers[:5]
        self.returns = numbers[5:_HEAD]
        self.dropped = [(numbers[_HEAD + 2 * k], numbers[_HEAD + 2 * k + 1]) for k in range(len(rules))]
        behind = numbers[_HEAD + 2 * len(rules) :]
        if len(behind) != (2 * _CLASSES * len(rules) if dry_run else 0):
            raise ValueError(f"{len(words)} words do not match a sweep by {len(rules)} rules")
        cut = [behind[start : start + 2 * _CLASSES] for start in range(0, len(behind), 2 * _CLASSES)]
        self.classes = [list(zip(some[::2], some[1::2], strict=True)) for some in cut]

    def described(self, rule: Expiry, rows: int, impressions: int, age: float | None) -> Dropped:
        """Say it of rows that go, all of them not seen for more than ``age`` clocks where that is known."""
        if self.impressions:
            share = impressions / self.impressions
        elif age is None or not sum(self.returns):
            share = math.nan
        else:
            share = _beyond(self.returns, age) / sum(self.returns)
        return Dropped(rule, rows, self.before * rows // max(self.rows, 1), share)

    def thresholds(self, rule: Expiry, classes: list[tuple[int, int]]) -> Iterator[Dropped]:
        """Say what a rule would drop at thresholds between classes: from the first that drops some to that of all."""
        last = max((k for k, (rows, _) in enumerate(classes) if rows), default=-1)
        first = min((k for k, (rows, _) in enumerate(classes) if rows), default=0)
        if isinstance(rule, TimeToLive) or (isinstance(rule, MaxRows) and rule.keep == "recent"):
            for edge in range(max(first, 1), max(last, 1) + 1):  # ages below 2**edge stay
                rows, impressions = map(sum, zip((0, 0), *classes[edge + 1 :], strict=True))
                older: Expiry = (
                    TimeToLive(2**edge - 1) if isinstance(rule, TimeToLive) else MaxRows(max(1, self.rows - rows))
                )
                yield self.described(older, rows, impressions, 2**edge - 1)
            return
        for edge in range(first, last + 1):  # classes up to it go
            rows, impressions = map(sum, zip((0, 0), *classes[: edge + 1], strict=True))
            floor = 2.0 ** (edge + 1 - _EXPONENT)
            other = (
                DecayedScore(rule.decay, floor)
                if isinstance(rule, DecayedScore)
                else MinNorm(floor)
                if isinstance(rule, MinNorm)
                else MaxRows(max(1, self.rows - rows), keep="frequent")
            )
            yield self.described(other, rows, impressions, None)


def _beyond(returns: list[int], age: float) -> float:
    """Count the sightings of rows that had not been seen for more than ``age`` clocks."""
    total = 0.0
    for k, count in enumerate(returns):
        low, high = (2**k // 2, 2**k - 1)  # the ages of the class; 0 has one of its own
        total += count * min(1.0, max(0.0, (high - age) / (high - low + 1)))
    return total


def read_sweep(table: str, rules: Sequence[Expiry], words: npt.NDArray[np.uint64], *, dry_run: bool) -> TableSweep:
    """Read what the engine, or all servers together, answered to a sweep by ``rules``."""
    answer = _Answer(words, rules, dry_run=dry_run)
    return TableSweep(
        table=table,
        rows=answer.rows,
        bytes=answer.before,
        bytes_given_back=max(0, answer.before - answer.after),
        forgotten=answer.forgotten,
        dropped=tuple(
            answer.described(rule, rows, impressions, rule.clocks if isinstance(rule, TimeToLive) else None)
            for rule, (rows, impressions) in zip(rules, answer.dropped, strict=True)
        ),
        thresholds=tuple(
            tuple(answer.thresholds(rule, classes)) for rule, classes in zip(rules, answer.classes, strict=False)
        ),
    )


# By the words of the command line and of configuration files: the rule, and what it is given without a name.
_ADMISSIONS: dict[str, tuple[type[Admission], tuple[str, ...]]] = {
    "count": (AfterCount, ("n",)),
    "bloom": (AfterBloom, ("n", "capacity")),
    "probability": (WithProbability, ("p",)),
}
_EXPIRIES: dict[str, tuple[type[Expiry], tuple[str, ...]]] = {
    "ttl": (TimeToLive, ("clocks",)),
    "score": (DecayedScore, ("decay", "floor")),
    "norm": (MinNorm, ("floor",)),
    "rows": (MaxRows, ("rows",)),
}


def parse_admission(text: str) -> Admission:
    """Read an admission rule from text, e.g. of the command line.

    Parameters
    ----------
    text : str
        ``count:N``, ``bloom:N:CAPACITY`` or ``probability:P``, and behind it ``:NAME=VALUE`` for what else there is.

    Raises
    ------
    ValueError
        It is none: the message has all forms.

    Examples
    --------
    >>> parse_admission("count:3:within=1000")
    AfterCount(n=3, within=1000, capacity=None)
    """
    rule: Admission = _parsed(text, _ADMISSIONS, "an admission rule")
    return rule


def parse_expiry(text: str) -> Expiry:
    """Read an expiry rule from text, e.g. of the command line.

    Parameters
    ----------
    text : str
        ``ttl:CLOCKS``, ``score:DECAY:FLOOR``, ``norm:FLOOR``, ``rows:ROWS`` or ``rows:ROWS:keep=frequent``.

    Raises
    ------
    ValueError
        It is none: the message has all forms.

    Examples
    --------
    >>> parse_expiry("rows:1e6:keep=frequent")
    MaxRows(rows=1000000, keep='frequent')
    """
    rule: Expiry = _parsed(text, _EXPIRIES, "an expiry rule")
    return rule


def _parsed(text: str, kinds: Mapping[str, tuple[type[Any], tuple[str, ...]]], what: str) -> Any:
    name, *values = text.split(":")
    kind, names = kinds.get(name, (None, ()))
    forms = ", ".join(":".join([word, *(one.upper() for one in given)]) for word, (_, given) in kinds.items())
    unnamed = [value for value in values if "=" not in value]
    if kind is None or len(unnamed) != len(names) or values[: len(unnamed)] != unnamed:
        raise ValueError(f"{text!r} is not {what}: write one of {forms}")
    given = dict(zip(names, unnamed, strict=True))
    given |= dict(value.split("=", 1) for value in values[len(unnamed) :])
    try:
        rule = kind(**{name: value if name == "keep" else _number(name, value) for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not {what}: {error}") from None
    return rule


def _number(name: str, text: str) -> float:
    number = float(text)
    if name not in _WHOLE:
        return number
    if not number.is_integer():
        raise ValueError(f"{name} is a whole number, got {text}")
    return int(number)
