"""Rules of a table's lifecycle: admission of keys and expiry of rows.

    push --> admission --> rows --> sweep --> remaining rows

Rules are frozen values like optimizers: they are compared, hashed, pickled, written into manifests and sent to servers
in a plain form. They run in the engine, in the process that holds the rows. An *occurrence* is one appearance of a key
in a push; an assignment counts as one, a pull as none. ``docs/lifecycle.md`` describes the cost and the metadata of
each rule.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from shoal import _core
from shoal.base.scalars import make_plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
        """Return the rule in the engine's format."""
        return self.rule, self.params


@dataclass(frozen=True, slots=True)
class _Rule:
    _native: ClassVar[Any]

    def __post_init__(self) -> None:
        make_plain(self)
        self._native(type(self).__name__, self.params())

    def params(self) -> dict[str, float]:
        """All parameters by name, as numbers; unset ones are left out."""
        found: dict[str, float] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                found[name] = value if isinstance(value, int) and abs(value) > 2**53 else float(value)
        return found

    def record(self) -> RuleRecord:
        """Return the rule in plain values."""
        return RuleRecord(type(self).__name__, self.params())


class Admission(_Rule):
    """Base class of admission rules. A key that waits for its row reads its initial row; its gradients are dropped."""

    __slots__ = ()
    _native = staticmethod(_core.check_admission)


class Expiry(_Rule):
    """Base class of expiry rules, which select the rows that a sweep drops."""

    @property
    def needs_counts(self) -> bool:
        """Whether the rule uses the number of occurrences of a key in a push."""
        return False

    __slots__ = ()
    _native = staticmethod(_core.check_expiry)


@dataclass(frozen=True, slots=True)
class AfterCount(Admission):
    """A key gets its row at its ``n``-th occurrence, counted exactly.

    Waiting keys take 16 to 23 bytes each, in addition to the rows.

    Parameters
    ----------
    n : int
        At least 1. The push with the n-th occurrence creates the row and is applied to it.
    within : int, optional
        A waiting key that has not occurred for more than this many clocks is forgotten. Default: never.
    capacity : int, optional
        Maximum number of waiting keys. Each slot has its share; when it is full, the least recently occurring eighth
        is forgotten (of equal clocks the smallest hashes). Default: no limit.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> table = shoal.local().table("t", admit=shoal.AfterCount(2))
    >>> key, grad = np.array([7], np.uint64), np.ones(1, np.float32)
    >>> for _ in range(2):
    ...     table.push(key, grad).result()
    ...     print(table.contains(key).item())
    False
    True
    """

    n: int
    within: int | None = None
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class AfterBloom(Admission):
    """A key gets its row at its ``n``-th occurrence, counted by a Bloom filter of fixed size, or earlier.

    A key's counters are in one cache line, selected by its hash; their minimum is its count. Counters have 4 bits
    up to ``n = 15``, otherwise 8.

    Parameters
    ----------
    n : int
        1 to 255.
    capacity : int
        Number of waiting keys that the filter is sized for. More keys increase its error.
    error : float
        Approximate false-positive rate of a filter with ``capacity`` keys: 1e-6 to 0.5.
    within : int, optional
        The filter is cleared every ``within`` clocks. Default: never, so it eventually fills up.
    """

    n: int
    capacity: int
    error: float = 0.01
    within: int | None = None


@dataclass(frozen=True, slots=True)
class WithProbability(Admission):
    """A key gets its row at each occurrence with probability ``p``: after ``1 / p`` occurrences on average.

    Uses no memory. The random number is a hash of the seed, the key, the number of the push and that of the occurrence.

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
    """Drops rows whose keys have not occurred for more than a number of clocks. Four bytes per row.

    Parameters
    ----------
    clocks : int
        1 to 2^31 - 1.
    """

    clocks: int


@dataclass(frozen=True, slots=True)
class DecayedScore(Expiry):
    """Drops rows whose score is below a floor. Eight bytes per row.

    An occurrence adds 1 to the score, and each clock multiplies it by ``decay``:
    ``score * decay**clocks + occurrences``. To weight clicks separately, push counts:
    ``push_unique(batch, grads, counts=shows + 9 * clicks)``.

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
    """Drops rows whose weights have a Euclidean norm below a floor. No additional memory.

    Parameters
    ----------
    floor : float
        Above 0. Under FTRL with an L1 penalty rows of zeros are below any floor, and their optimizer state is lost.
    """

    floor: float


@dataclass(frozen=True, slots=True)
class MaxRows(Expiry):
    """Limits a table to a number of rows: a push that makes a slot exceed its share then drops an eighth of its rows.

    Each slot has its share of ``rows``, so a table is full slightly below that number. Four bytes per row.

    Parameters
    ----------
    rows : int
        At least as many as the store has slots.
    keep : {"recent", "frequent"}
        Rows to keep: those that occurred most recently, or most often since they were created. Of equal ones, those
        with the largest hashes.
    """

    rows: int
    keep: str = "recent"

    def __post_init__(self) -> None:
        make_plain(self)
        if self.keep not in {"recent", "frequent"}:
            raise ValueError(f'MaxRows keeps "recent" or "frequent" rows, got {self.keep!r}')
        _core.check_expiry("MaxRows", self.params())

    @property
    def needs_counts(self) -> bool:
        """Whether it keeps frequent rows."""
        return self.keep == "frequent"

    def params(self) -> dict[str, float]:
        """All parameters by name, as numbers: ``frequent`` is 1 if ``keep`` is "frequent"."""
        return {"rows": float(self.rows), "frequent": float(self.keep == "frequent")}


_KINDS: tuple[type[Expiry], ...] = (TimeToLive, DecayedScore, MinNorm, MaxRows)  # numbered from 1, in this order
_WHOLE = {"n", "within", "capacity", "seed", "clocks", "rows"}


def _made(kind: type[Any], form: RuleRecord) -> Any:
    values: dict[str, Any] = {name: int(value) if name in _WHOLE else value for name, value in form.params.items()}
    if kind is MaxRows:
        values["keep"] = "frequent" if values.pop("frequent", 0.0) else "recent"
    return kind(**values)


def make_admission(form: RuleRecord) -> Admission:
    """Rebuild an admission rule from its ``record``.

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
    """Rebuild an expiry rule from its ``record``.

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


def rules_native(rules: Sequence[Expiry]) -> "npt.NDArray[np.float64]":
    """Encode expiry rules for the engine and the wire: three numbers each, concatenated."""
    import numpy as np  # a scheduler describes tables without it

    numbers = [(_KINDS.index(type(rule)) + 1, *rule.params().values(), 0.0)[:3] for rule in rules]
    return np.array(numbers, np.float64).ravel()


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that a rule dropped, or would drop.

    Parameters
    ----------
    rule : Expiry
    rows : int
        Rows that no earlier rule of the list drops.
    bytes : int
        Their share of the table's memory: approximately the memory that is freed.
    share : float
        Their share of the table's recent occurrences. If rows keep a score, occurrences are weighted by age: one counts
        ``decay**clocks``. Otherwise, if rows keep a count: all occurrences since a row was created. Otherwise, if rows
        keep the clock of their last occurrence: the share, among all occurrences since the last sweep, of those whose
        rows the rule would have dropped before, because the key had not occurred for as long as the dropped rows. (Ages
        are kept in classes of 1, 2 to 3, 4 to 7, ... clocks, assumed uniform within each class.) NaN if rows keep none
        of these, or there were no occurrences.
    """

    rule: Expiry
    rows: int
    bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class TableSweep:
    """Result of a sweep of one table, or of a dry run.

    Parameters
    ----------
    table : str
    rows : int
        Before it.
    bytes : int
        Before it: index, rows and admission counters.
    bytes_given_back : int
        0 for a dry run.
    forgotten : int
        Waiting keys that were forgotten; 0 for a dry run.
    dropped : tuple of Dropped
        One entry per rule, in order.
    thresholds : tuple of tuple of Dropped
        For a dry run, the rows that each rule alone would drop at other thresholds; otherwise empty.
    """

    table: str
    rows: int
    bytes: int
    bytes_given_back: int
    forgotten: int
    dropped: tuple[Dropped, ...]
    thresholds: tuple[tuple[Dropped, ...], ...]

    def __str__(self) -> str:
        """Format the result as a table."""
        lines = [f"{self.table}: {self.rows:,} rows, {self.bytes:,} bytes, {self.bytes_given_back:,} freed"]
        for dropped, others in zip(self.dropped, self.thresholds or ((),) * len(self.dropped), strict=True):
            lines.append(f"  {dropped.rule}: {_told(dropped)}")
            lines.extend(f"    {other.rule}: {_told(other)}" for other in others)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Result of a sweep of a store, or of a dry run.

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
        """Number of rows dropped in all tables, or that would be dropped."""
        return sum(dropped.rows for table in self.tables for dropped in table.dropped)

    @property
    def bytes_given_back(self) -> int:
        """Memory returned to the system; 0 for a dry run."""
        return sum(table.bytes_given_back for table in self.tables)

    def __str__(self) -> str:
        """Format the results as tables."""
        return "\n".join(map(str, self.tables))


def _told(dropped: Dropped) -> str:
    share = "" if math.isnan(dropped.share) else f", {dropped.share:.3%} of recent impressions"
    return f"{dropped.rows:,} rows, {dropped.bytes:,} bytes{share}"


# Indices of the words of the engine's answer (csrc/shard/shard.h, Shard::sweep).
_AGES = 33
_HEAD = 5 + _AGES
_CLASSES = 64
_EXPONENT = 32  # class of a score or norm of 1 to 2


class _Answer:
    """One decoded answer."""

    def __init__(self, words: "npt.NDArray[np.uint64]", rules: Sequence[Expiry], *, dry_run: bool) -> None:
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
        """Describe dropped rows; none of them has occurred for more than ``age`` clocks, if that is known."""
        if self.impressions:
            share = impressions / self.impressions
        elif age is None or not sum(self.returns):
            share = math.nan
        else:
            share = _beyond(self.returns, age) / sum(self.returns)
        return Dropped(rule, rows, self.before * rows // max(self.rows, 1), share)

    def thresholds(self, rule: Expiry, classes: list[tuple[int, int]]) -> Iterator[Dropped]:
        """Yield what a rule would drop at thresholds between classes, from the first nonempty one to all rows."""
        last = max((k for k, (rows, _) in enumerate(classes) if rows), default=-1)
        first = min((k for k, (rows, _) in enumerate(classes) if rows), default=0)
        if isinstance(rule, TimeToLive) or (isinstance(rule, MaxRows) and rule.keep == "recent"):
            for edge in range(max(first, 1), max(last, 1) + 1):  # rows of ages below 2**edge are kept
                rows, impressions = map(sum, zip((0, 0), *classes[edge + 1 :], strict=True))
                older: Expiry = (
                    TimeToLive(2**edge - 1) if isinstance(rule, TimeToLive) else MaxRows(max(1, self.rows - rows))
                )
                yield self.described(older, rows, impressions, 2**edge - 1)
            return
        for edge in range(first, last + 1):  # classes up to it are dropped
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
    """Count the occurrences of rows that had not occurred for more than ``age`` clocks."""
    total = 0.0
    for k, count in enumerate(returns):
        low, high = (2**k // 2, 2**k - 1)  # the ages of the class; 0 has one of its own
        total += count * min(1.0, max(0.0, (high - age) / (high - low + 1)))
    return total


def read_sweep(table: str, rules: Sequence[Expiry], words: "npt.NDArray[np.uint64]", *, dry_run: bool) -> TableSweep:
    """Decode the answer of the engine, or of all servers together, to a sweep by ``rules``."""
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


# By their names in the command line and in configuration files: the rule, and its positional parameters.
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
        ``count:N``, ``bloom:N:CAPACITY`` or ``probability:P``, followed by ``:NAME=VALUE`` for other parameters.

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
