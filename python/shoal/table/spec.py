"""The description of a table, for users, files and messages.

    TableSpec      optimizer, initializer and rules as objects; what the rest of the package works with
    TableRecord    the same in plain values: its fields are those of checkpoint manifests and of messages to servers
    RowRecord      the part of it that reading rows needs: its fields are those of manifests of exports

A `TableRecord` has the fields of a `TableSpec` in the same order, and is a `RowRecord`. `TableRecord.native` alone
makes the engine's description, `_core.TableSpec`.

Threads: immutable.
"""

from typing import Self

import msgspec

from shoal import _core
from shoal.base.dtypes import dtype_name
from shoal.base.scalars import make_plain
from shoal.lifecycle import (
    Admission,
    Expiry,
    MinNorm,
    RuleRecord,
    make_admission,
    make_expiry,
)
from shoal.optim import SGD, Add, Init, Optimizer, Zeros, make_init, make_optimizer
from shoal.user_optimizer import UserOptimizer, make_user_optimizer

DTYPES = ("float32", "float16", "bfloat16", "int64")
MAX_TABLES = 1024  # of a store: a table without rows takes 0.6 MB in 1024 slots
MAX_NAME_LENGTH = 1024  # characters of a table's name
_WIDEST = 4096


def check_table_count(count: int) -> None:
    """Raise ValueError if a store cannot have so many tables."""
    if count > MAX_TABLES:
        raise ValueError(
            f"{count} tables: a store has at most {MAX_TABLES}; put features of one dim and optimizer into one table"
        )


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a table: the same on every server, and written into every manifest.

    Parameters
    ----------
    name : str
        Unique in its store; 1 to 1024 characters.
    dim : int
        Numbers per row, 1 to 4096; of int64 up to 2048.
    optimizer : Optimizer
    init : Init
    dtype : numpy.dtype or str
        How weights are stored: ``float32``; from dim 2 also ``float16`` or ``bfloat16``, stochastically rounded;
        or ``int64``: rows are integers, and the optimizer is `Add`.
    seed : int
        Of the rounding.
    admit : Admission, optional
        Which keys get a row; default: all that are pushed.
    expire : tuple of Expiry
        Which rows sweeps drop, at most one rule of a kind. The first one selects what to evict when memory is short.
    """

    name: str
    dim: int
    optimizer: Optimizer
    init: Init
    dtype: str
    seed: int
    admit: Admission | None = None
    expire: tuple[Expiry, ...] = ()

    def __post_init__(self) -> None:
        make_plain(self)
        msgspec.structs.force_setattr(self, "dtype", dtype_name(self.dtype))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a table needs a name, got {self.name!r:.80}")
        if len(self.name) > MAX_NAME_LENGTH:
            raise ValueError(f"a table's name has {MAX_NAME_LENGTH} characters at most, got {len(self.name)}")
        if not 1 <= self.dim <= _WIDEST:
            raise ValueError(f"table {self.name!r} needs a dim from 1 to {_WIDEST}, got {self.dim!r}")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"table {self.name!r} needs an optimizer such as shoal.FTRL(), got {self.optimizer!r}")
        if not isinstance(self.init, Init):
            raise TypeError(f"table {self.name!r} needs an initializer such as shoal.Zeros(), got {self.init!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"table {self.name!r} needs a dtype out of {', '.join(DTYPES)}, got {self.dtype!r}")
        self._check_integers()
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"table {self.name!r} needs a seed from 0 to 2**64 - 1, got {self.seed!r}")
        if not isinstance(self.admit, Admission | None):
            raise TypeError(f"table {self.name!r} admits by a rule such as shoal.AfterCount(3), got {self.admit!r}")
        for rule in self.expire:
            if not isinstance(rule, Expiry):
                raise TypeError(f"table {self.name!r} expires rows by rules such as shoal.TimeToLive(9), got {rule!r}")
        kinds = [type(rule).__name__ for rule in self.expire]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"table {self.name!r} takes one {kind}, got {kinds.count(kind)}: choose one of them")

    def _check_integers(self) -> None:
        name = self.name
        if not self.is_integer:
            if isinstance(self.optimizer, Add):
                raise ValueError(f"table {name!r} has dtype {self.dtype!r}, and Add is for dtype='int64': choose SGD()")
            return
        if not isinstance(self.optimizer, Add):
            raise ValueError(
                f"table {name!r} of int64 adds what is pushed: its optimizer is Add(), not {self.optimizer}"
            )
        if self.optimizer != Add():
            raise ValueError(f"table {name!r} of int64 takes Add() without clip_value, clip_norm or schedule")
        if self.dim > _WIDEST // 2:
            raise ValueError(f"table {name!r} of int64 needs a dim from 1 to {_WIDEST // 2}, got {self.dim}")
        if not isinstance(self.init, Zeros):
            raise ValueError(f"table {name!r} of int64 starts with shoal.Zeros(), got {self.init!r}: use assign()")
        if any(isinstance(rule, MinNorm) for rule in self.expire):
            raise ValueError(f"table {name!r} of int64 has no MinNorm: use TimeToLive, DecayedScore or MaxRows")

    @property
    def is_integer(self) -> bool:
        """Whether rows are int64, not floats."""
        return self.dtype == "int64"

    @property
    def floats(self) -> int:
        """Floats per row in the engine and in messages: an int64 is two, which are copied only."""
        return 2 * self.dim if self.is_integer else self.dim

    @property
    def has_rules(self) -> bool:
        """Whether it has an admission or expiry rule."""
        return self.admit is not None or bool(self.expire)

    @property
    def keeps_clock(self) -> bool:
        """Whether the table's clock is saved: rules and schedules use it."""
        return self.has_rules or self.optimizer.schedule is not None

    @property
    def needs_counts(self) -> bool:
        """Whether its rules use the number of occurrences of a key in a push."""
        return self.admit is not None or any(rule.needs_counts for rule in self.expire)


# The order of the fields is that of the bytes in files and messages: positional fields come first, then those of
# classes with kw_only=True, base classes before derived ones.


class _WeightRecord(msgspec.Struct, frozen=True):
    name: str
    dim: int
    dtype: str


class RowRecord(_WeightRecord, frozen=True, kw_only=True):
    """The part of a table's description that determines how its rows are read, also those that are not stored.

    ``dtype`` is that of the stored weights, which an export may change.
    """

    init: str
    init_parameter: float
    init_seed: int

    def description(self, dtype: str | None = None) -> "RowRecord":
        """Return these fields alone, with another ``dtype`` if one is given."""
        return RowRecord(
            name=self.name,
            dim=self.dim,
            dtype=self.dtype if dtype is None else dtype,
            init=self.init,
            init_parameter=self.init_parameter,
            init_seed=self.init_seed,
        )

    def differing(self, other: Self) -> list[str]:
        """Return the names of the fields that differ from those of ``other``."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]

    def values(self, fields: list[str]) -> str:
        """Return the values of some fields, for a message."""
        return ", ".join(f"{name} {getattr(self, name)!r}" for name in fields)

    def spec(self) -> TableSpec:
        """Return the description of a table of float32 weights with such rows, which is only read."""
        return TableSpec(
            name=self.name,
            dim=self.dim,
            optimizer=SGD(),
            init=make_init(self.init, self.init_parameter, self.init_seed),
            dtype="float32",
            seed=0,
        )


class _UpdateRecord(RowRecord, frozen=True):
    seed: int
    optimizer: str
    params: dict[str, float]


class TableRecord(_UpdateRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A table's description in plain values, as it is written into a manifest and sent to servers.

    Fields that have their default are omitted.
    """

    admit: RuleRecord | None = None
    expire: tuple[RuleRecord, ...] = ()

    @classmethod
    def of(cls, spec: TableSpec) -> "TableRecord":
        """Convert a description."""
        return TableRecord(
            name=spec.name,
            dim=spec.dim,
            dtype=spec.dtype,
            seed=spec.seed,
            optimizer=spec.optimizer.rule,
            params=spec.optimizer.engine_params(),
            init=type(spec.init).__name__,
            init_parameter=spec.init.parameter,
            init_seed=spec.init.init_seed,
            admit=None if spec.admit is None else spec.admit.record(),
            expire=tuple(rule.record() for rule in spec.expire),
        )

    def native(self) -> _core.TableSpec:
        """Convert it for the engine."""
        return _core.TableSpec(
            dim=self.dim,
            dtype=self.dtype,
            optimizer=(self.optimizer, self.params),
            init=(self.init, self.init_parameter, self.init_seed),
            seed=self.seed,
            admit=None if self.admit is None else self.admit.native(),
            expire=[rule.native() for rule in self.expire],
        )

    def spec(self) -> TableSpec:
        """Rebuild the description."""
        return TableSpec(
            name=self.name,
            dim=self.dim,
            optimizer=make_optimizer(self.optimizer, self.params)
            if self.optimizer != UserOptimizer.__name__
            else make_user_optimizer(self.params),
            init=make_init(self.init, self.init_parameter, self.init_seed),
            dtype=self.dtype,
            seed=self.seed,
            admit=None if self.admit is None else make_admission(self.admit),
            expire=tuple(make_expiry(rule) for rule in self.expire),
        )
