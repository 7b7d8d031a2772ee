"""Tables: rows by 64-bit key, with their optimizer; and the batches of keys that all requests are made of."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.errors import ClosedError
from shoal.lifecycle import (
    Admission,
    Expiry,
    RuleForm,
    TableSweep,
    make_admission,
    make_expiry,
    read_sweep,
    rules_native,
)
from shoal.optim import Init, Optimizer, make_init, make_optimizer
from shoal.table import reductions
from shoal.table.future import Future, Pending
from shoal.table.rwlock import Gate

__all__ = ["Future", "KeyBatch", "Shard", "Snapshot", "Table", "TableForm", "TableSpec", "TableStats", "mix", "unmix"]

Keys: TypeAlias = npt.NDArray[np.uint64] | npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.float32]
Counts: TypeAlias = npt.NDArray[np.uint32]

DTYPES = ("float32", "float16", "bfloat16")
_WIDEST = 4096


def as_keys(keys: npt.ArrayLike, what: str = "keys") -> npt.NDArray[np.uint64]:
    """View ``keys`` as contiguous uint64[n]; signed ones are taken bit for bit as int64, all but integers refused."""
    array = np.asarray(keys)
    if array.dtype not in (np.uint64, np.int64):
        if array.size == 0 and not isinstance(keys, np.ndarray):
            array = array.astype(np.uint64)
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"{what} must be integers, such as uint64 or int64, got {array.dtype}: convert them, e.g. with "
                f"np.asarray(x, np.uint64)"
            )
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64)
    if array.ndim != 1:
        raise ValueError(f"{what} must have one dimension, got shape {array.shape}: pass {what}.ravel()")
    return np.ascontiguousarray(array).view(np.uint64)


def as_rows(values: npt.ArrayLike, shape: tuple[int, int], table: str, what: str) -> Rows:
    """View ``values`` as contiguous float32[n, dim]; at dim 1 also float32[n]."""
    array = np.asarray(values)
    n, dim = shape
    if array.dtype != np.float32:
        raise TypeError(f"table {table!r} takes {what} as float32, got {array.dtype}: pass {what}.astype(np.float32)")
    if array.shape != shape and not (dim == 1 and array.shape == (n,)):
        raise ValueError(
            f"table {table!r} has dim {dim}, got {what} {array.shape} for {n} keys: pass float32[{n}, {dim}]"
        )
    return np.ascontiguousarray(array).reshape(shape)


def as_counts(counts: npt.ArrayLike, n: int) -> Counts:
    """View ``counts`` as contiguous uint32[n], each at least 1."""
    array = np.asarray(counts)
    if array.dtype.kind not in "iu" or array.shape != (n,):
        raise ValueError(f"counts must be uint32[{n}], one for each unique key, got {array.dtype}{list(array.shape)}")
    if n and not 1 <= array.min() <= array.max() < 2**32:
        raise ValueError(f"counts must be from 1 to 2**32 - 1, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.uint32)


def as_out(out: Rows | None, shape: tuple[int, int], table: str) -> Rows:
    """Return ``out``, or a fresh array where it is None."""
    if out is None:
        return np.empty(shape, np.float32)
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        raise TypeError(f"out must be a float32 array, got {getattr(out, 'dtype', type(out).__name__)}")
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be a writeable, C-contiguous float32[{shape[0]}, {shape[1]}] for table {table!r}, "
            f"got {out.shape}"
            f"{'' if out.flags.c_contiguous else ', not contiguous'}{'' if out.flags.writeable else ', read-only'}"
        )
    return out


def mix(keys: Keys) -> npt.NDArray[np.uint64]:
    """Hashes of keys: a fixed bijection of 64 bits, the order that everything in shoal follows.

    Parameters
    ----------
    keys : uint64[n] or int64[n]

    Returns
    -------
    uint64[n]

    Examples
    --------
    >>> unmix(mix(np.array([7, 2**64 - 1], np.uint64))).tolist()
    [7, 18446744073709551615]
    """
    return _core.mix(as_keys(keys))


def unmix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys of hashes: the inverse of :func:`mix`."""
    return _core.unmix(as_keys(hashes, "hashes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What a table is: the same on every server, written into every manifest.

    Parameters
    ----------
    name : str
        Unique in its store.
    dim : int
        Weights per row, 1 to 4096.
    optimizer : Optimizer
    init : Init
    dtype : str
        How weights are stored: ``float32``; from dim 2 also ``float16`` or ``bfloat16``, stochastically rounded.
    seed : int
        Of the rounding.
    admit : Admission, optional
        Which keys get a row; default: all that are pushed.
    expire : tuple of Expiry
        Which rows sweeps drop, at most one rule of a kind. The first one says which rows go where memory is short.
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
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a table needs a name, got {self.name!r}")
        if not isinstance(self.dim, int) or not 1 <= self.dim <= _WIDEST:
            raise ValueError(f"table {self.name!r} needs a dim from 1 to {_WIDEST}, got {self.dim!r}")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"table {self.name!r} needs an optimizer such as shoal.FTRL(), got {self.optimizer!r}")
        if not isinstance(self.init, Init):
            raise TypeError(f"table {self.name!r} needs an initializer such as shoal.Zeros(), got {self.init!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"table {self.name!r} needs a dtype out of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
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

    @property
    def has_rules(self) -> bool:
        """Whether keys wait for their rows, or rows go."""
        return self.admit is not None or bool(self.expire)

    @property
    def keeps_clock(self) -> bool:
        """Whether a clock is part of what the table is, and saved: rules and schedules go by it."""
        return self.has_rules or self.optimizer.schedule is not None

    @property
    def needs_counts(self) -> bool:
        """Whether it matters to the rules how often a key occurs in a push."""
        return self.admit is not None or any(rule.needs_counts for rule in self.expire)

    def shard(self, slots: int, workers: _core.Workers, budget: _core.Budget | None = None) -> _core.Shard:
        """Make the empty rows of such a table, within a memory budget or without one."""
        return _core.Shard(
            dim=self.dim,
            dtype=self.dtype,
            optimizer=type(self.optimizer).__name__,
            params=self.optimizer.params(),
            init=type(self.init).__name__,
            init_parameter=self.init.parameter,
            init_seed=self.init.init_seed,
            seed=self.seed,
            slots=slots,
            workers=workers,
            admit=None if self.admit is None else self.admit.form().native(),
            expire=[rule.form().native() for rule in self.expire],
            budget=budget,
        )


class TableForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table's description in plain values: how it is written into a manifest and sent to servers.

    What a table without rules does not have is left out.
    """

    name: str
    dim: int
    dtype: str
    seed: int
    optimizer: str
    params: dict[str, float]
    init: str
    init_parameter: float
    init_seed: int
    admit: RuleForm | None = None
    expire: tuple[RuleForm, ...] = ()

    @classmethod
    def of(cls, spec: TableSpec) -> "TableForm":
        """Put a description into this form."""
        return TableForm(
            name=spec.name,
            dim=spec.dim,
            dtype=spec.dtype,
            seed=spec.seed,
            optimizer=type(spec.optimizer).__name__,
            params=spec.optimizer.params(),
            init=type(spec.init).__name__,
            init_parameter=spec.init.parameter,
            init_seed=spec.init.init_seed,
            admit=None if spec.admit is None else spec.admit.form(),
            expire=tuple(rule.form() for rule in spec.expire),
        )

    def spec(self) -> TableSpec:
        """Rebuild the description.

        Raises
        ------
        ValueError, TypeError
            It describes no table that this version knows.
        """
        return TableSpec(
            name=self.name,
            dim=self.dim,
            optimizer=make_optimizer(self.optimizer, self.params),
            init=make_init(self.init, self.init_parameter, self.init_seed),
            dtype=self.dtype,
            seed=self.seed,
            admit=None if self.admit is None else make_admission(self.admit),
            expire=tuple(make_expiry(rule) for rule in self.expire),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Figures of one table at one moment; counters run since the table was made or loaded.

    Parameters
    ----------
    rows : int
    bytes : int
        Memory of index and rows, in bytes.
    bytes_per_row : float
        NaN for an empty table.
    load : float
        Rows as a share of the places in the index.
    pulls, pushes : int
        Requests.
    keys_pulled, keys_pushed : int
        Unique keys in them.
    rows_created, rows_erased : int
    nonfinite_rows : int
        Rows that a push left whole because its gradient, or the new row, was not finite.
    refused : int
        Sightings of keys that waited for their rows, and got none by them.
    waiting : int
        Keys that wait now, where admission counts them one by one.
    expired : dict of int
        Rows that each of the table's expiry rules dropped, by the name of its class; for `MaxRows`, in pushes too.
    """

    rows: int
    bytes: int
    bytes_per_row: float
    load: float
    pulls: int
    pushes: int
    keys_pulled: int
    keys_pushed: int
    rows_created: int
    rows_erased: int
    nonfinite_rows: int
    refused: int = 0
    waiting: int = 0
    expired: Mapping[str, int] = field(default_factory=dict)


class Pushed(Pending, Protocol):
    """A push under way."""

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Pending:
        """Fill ``rows`` as they are behind this push."""


class Shard(Protocol):
    """The rows of one table, as a table asks for them: the engine's own, or those that servers hold.

    The engine's ``_core.Shard`` has done what it was asked when it returns; a remote one may return something
    :class:`~shoal.table.future.Pending` from ``pull`` and ``push``, which holds on to the arrays that it was given.
    """

    @property
    def step(self) -> int:
        """Number of the last push."""

    def __len__(self) -> int: ...

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Pending | None:
        """Fill ``rows``; None: they are filled."""

    def push(
        self, batch: _core.KeyBatch | _core.SummedBatch, grads: Rows, counts: Counts | None = None, clock: int = 0, /
    ) -> Pushed | int:
        """Apply one step; a number: it is applied. ``grads`` and ``counts`` are not changed any more.

        ``counts`` are the sightings of each key, None where the table's rules do not ask; ``clock`` is that of a store
        in this process: a cluster's keeps its own.
        """

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights; ``clock`` as for ``push``."""

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows: how many there were."""

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        """Tell which rows there are."""

    def columns(self) -> list[str]:
        """Names of what is stored."""

    def state(self, batch: _core.KeyBatch, column: int, /) -> Rows:
        """Read one column."""

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        """Read hashes and weights of a slot."""

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Answer a function of all rows (reductions.py), in slot order."""

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop what expiry rules name, or only count it (lifecycle.py reads the answer); ``clock`` as for ``push``."""

    def stats(self) -> dict[str, int]:
        """Read the figures."""


class Snapshot(Protocol):
    """A table as it was at one moment, which is read slot by slot."""

    @property
    def step(self) -> int:
        """Number of the table's last push before it."""

    @property
    def table_clock(self) -> int:
        """The table's clock then."""

    @property
    def rows(self) -> int:
        """How many there were."""

    @property
    def bytes(self) -> int:
        """What the table took, about."""

    def section(self, slot: int, /) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read a slot as a checkpoint keeps it: how many rows, their bytes, and what its admission had counted.

        Each slot once, from any thread.
        """

    def changes(
        self, slot: int, /
    ) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None, int, int, npt.NDArray[np.uint8]]:
        """Read what a delta has of a slot, likewise.

        The same, but the filter is None where it has not changed; then the ranges: bits, how many, and their bytes.
        """

    def done(self, name: str, /) -> None:
        """Say that all was saved, under this name: changes are known since then, unless it is plain."""

    def close(self) -> None:
        """Let go of what was not read."""


class KeyBatch:
    """The keys of one batch in hash order, each once: sort once, then pull and push many times.

    Made by ``store.key_batch(keys)``; fits every table of that store. Immutable; safe from any thread.

    Examples
    --------
    >>> import shoal
    >>> with shoal.local() as store:
    ...     batch = store.key_batch(np.array([7, 3, 7], np.uint64))
    ...     batch.sum(np.array([[1.0], [5.0], [2.0]], np.float32))[batch.inverse].ravel().tolist()
    [3.0, 5.0, 3.0]
    """

    __slots__ = ("_native", "_workers")

    def __init__(self, keys: Keys, slots: int, workers: _core.Workers, last: int | None = None) -> None:
        self._native = _core.KeyBatch(as_keys(keys), slots, workers, last)
        self._workers = workers

    @classmethod
    def of(cls, native: _core.KeyBatch, workers: _core.Workers) -> "KeyBatch":
        """Make one of an engine's object that is there, and of its store's threads."""
        batch = cls.__new__(cls)
        batch._native = native
        batch._workers = workers
        return batch

    def __len__(self) -> int:
        """Count the unique keys."""
        return len(self._native)

    @property
    def native(self) -> _core.KeyBatch:
        """The engine's object, for the kernels that take one."""
        return self._native

    @property
    def given(self) -> int:
        """Number of keys as given, duplicates counted."""
        return self._native.given

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes uint64[m], strictly ascending. Read-only."""
        return self._native.hashes

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Unique keys uint64[m] in hash order."""
        return _core.unmix(self._native.hashes)

    @property
    def inverse(self) -> npt.NDArray[np.uint32]:
        """For every key as given, which unique key it is: uint32[n]. Read-only."""
        return self._native.inverse

    @property
    def begins(self) -> npt.NDArray[np.uint64]:
        """Where each slot's hashes begin: uint64[slots + 1]. Read-only."""
        return self._native.begins

    def counts(self) -> npt.NDArray[np.uint32]:
        """How often each unique key was given: uint32[m]."""
        return self._native.counts()

    def is_of(self, keys: Keys) -> bool:
        """Whether it was made of exactly these keys, in this order; much cheaper than to make it again.

        Parameters
        ----------
        keys : uint64[n] or int64[n]

        Returns
        -------
        bool
        """
        return self._native.is_of(as_keys(keys), self._workers)

    def sum(self, grads: Rows) -> Rows:
        """Add up the rows of each unique key, in order of occurrence, in float64, rounded once.

        Parameters
        ----------
        grads : float32[n, dim]
            One row for every key as given.

        Returns
        -------
        float32[m, dim]
        """
        array = np.asarray(grads)
        if array.dtype != np.float32 or array.ndim != 2 or len(array) != self.given:
            raise ValueError(f"sum takes float32[{self.given}, dim], got {array.dtype}{list(array.shape)}")
        sums = np.empty((len(self), array.shape[1]), np.float32)
        self._native.sum(np.ascontiguousarray(array), array.shape[1], sums, self._workers)
        return sums

    def expand(self, rows: Rows, *, out: Rows | None = None) -> Rows:
        """Give the row of each unique key to every key as given.

        Parameters
        ----------
        rows : float32[m, dim]
        out : float32[n, dim], optional

        Returns
        -------
        float32[n, dim]
        """
        array = np.asarray(rows)
        if array.dtype != np.float32 or array.ndim != 2 or len(array) != len(self):
            raise ValueError(f"expand takes float32[{len(self)}, dim], got {array.dtype}{list(array.shape)}")
        given = as_out(out, (self.given, array.shape[1]), "expand")
        self._native.expand(np.ascontiguousarray(array), array.shape[1], given, self._workers)
        return given


class Table:
    """Rows of ``dim`` weights by 64-bit key, with the optimizer that moves them. Made by ``store.table(...)``.

    All keys are legal, 0 and 2**64 - 1 included; duplicates in a call are fine. Every method may be called from any
    thread: a row is never seen half written. Calls block until they are done and release the GIL while they work.

    Examples
    --------
    >>> import shoal
    >>> store = shoal.local()
    >>> table = store.table("user", dim=2, optimizer=shoal.SGD(lr=0.5))
    >>> keys = np.array([7, 7, 3], np.uint64)
    >>> table.push(keys, np.ones((3, 2), np.float32)).wait()
    >>> table.pull(keys).tolist()
    [[-1.0, -1.0], [-1.0, -1.0], [-0.5, -0.5]]
    """

    def __init__(
        self,
        spec: TableSpec,
        shard: Shard,
        slots: int,
        workers: _core.Workers,
        gate: Gate,
        clock: Callable[[], int],
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._shard: Shard | None = shard
        self._slots = slots
        self._workers = workers
        self._gate = gate

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, optimizer={self.optimizer}, dtype={self.dtype!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"table {self.name!r} is not passed to another process: make or connect a store there, and ask it for the "
            "table"
        )

    @property
    def spec(self) -> TableSpec:
        """What the table is."""
        return self._spec

    @property
    def clock(self) -> int:
        """The store's clock."""
        return self._clock()

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._spec.name

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._spec.dim

    @property
    def optimizer(self) -> Optimizer:
        """The rule that a push applies."""
        return self._spec.optimizer

    @property
    def init(self) -> Init:
        """Where rows start."""
        return self._spec.init

    @property
    def dtype(self) -> str:
        """How weights are stored."""
        return self._spec.dtype

    @property
    def seed(self) -> int:
        """Seed of the rounding."""
        return self._spec.seed

    @property
    def step(self) -> int:
        """Number of pushes so far."""
        return self.shard.step

    @property
    def shard(self) -> Shard:
        """The rows themselves: the engine's object, or a client's of the servers. A load may put another in its place.

        Raises
        ------
        ClosedError
            The store was closed.
        WrongProcessError
            The store was made before a fork, by the parent.
        """
        shard = self._shard
        if shard is None:
            raise ClosedError(f"table {self.name!r} belongs to a store that was closed: make a new store")
        self._gate.check_process()
        return shard

    @property
    def workers(self) -> _core.Workers:
        """The store's threads, for the kernels that take them."""
        return self._workers

    def key_batch(self, keys: Keys, workers: _core.Workers | None = None) -> KeyBatch:
        """Sort keys once, as the store's ``key_batch`` does; by other threads than the store's, if any are given."""
        return KeyBatch(keys, self._slots, self._workers if workers is None else workers)

    def _check_usable(self) -> None:
        """Say before any work that there are no rows to change."""
        _ = self.shard

    def replace_shard(self, shard: Shard | None) -> None:
        """Put other rows in place of these: what loading does, behind the shut gate, and closing."""
        self._shard = shard

    def _batch(self, keys: Keys) -> KeyBatch:
        return KeyBatch(keys, self._slots, self._workers)

    def pull(self, keys: Keys, *, out: Rows | None = None) -> Rows:
        """Read the rows of ``keys``.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Any order, duplicates allowed. An unseen key reads its initial row and is not created. Narrower integers
            are widened; negative ones are taken bit for bit as int64.
        out : float32[n, dim], optional
            Filled and returned instead of a new array.

        Returns
        -------
        float32[n, dim]

        Examples
        --------
        >>> import shoal
        >>> shoal.local().table("t", dim=16).pull(np.array([7, 7], np.uint64)).shape
        (2, 16)
        """
        return self.pull_async(keys, out=out).wait()

    def pull_async(self, keys: Keys, *, out: Rows | None = None) -> Future[Rows]:
        """Begin to read the rows of ``keys``: on a cluster, compute while the servers answer.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            As for :meth:`pull`.
        out : float32[n, dim], optional
            Filled by the time ``wait()`` returns.

        Returns
        -------
        Future
            ``wait()`` returns float32[n, dim].
        """
        shard = self.shard
        batch = self._batch(keys)
        rows = as_out(out, (batch.given, self.dim), self.name)
        unique = np.empty((len(batch), self.dim), np.float32)
        return Future(shard.pull(batch.native, unique), lambda: batch.expand(unique, out=rows))

    def push(self, keys: Keys, grads: Rows) -> Future[None]:
        """Apply one optimizer step to the rows of ``keys``, creating rows that are not there.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Duplicates allowed: their gradients are summed first, in order of occurrence, then ONE step is made.
        grads : float32[n, dim], at dim 1 also float32[n]
            A row whose sum is all zeros keeps every bit. A row that is not finite, or would become so, stays whole and
            is counted in ``stats().nonfinite_rows``.

        Returns
        -------
        Future
            ``wait()`` returns once the push is applied.

        Notes
        -----
        On a cluster the servers may not have it when this returns; ``grads`` may be changed all the same. Under BSP a
        push is seen once every worker has ended the clock with ``store.tick()``.
        """
        self._check_usable()
        given = as_keys(keys)
        rows = as_rows(grads, (len(given), self.dim), self.name, "grads")
        counting = self._spec.needs_counts
        batch = _core.SummedBatch(given, rows, self.dim, self._slots, self._workers, counting)
        return self._push(batch, batch.sums, batch.counts() if counting else None)

    def _push(self, batch: _core.KeyBatch | _core.SummedBatch, grads: Rows, counts: Counts | None) -> Future[None]:
        begun: Pending | int = self._gate.change(lambda: self.shard.push(batch, grads, counts, self._clock()))
        return Future(None if isinstance(begun, int) else begun, _nothing)

    def push_pull(self, keys: Keys, grads: Rows, *, out: Rows | None = None) -> Future[Rows]:
        """Push, and read the rows of the same keys behind that push.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            As for :meth:`push`.
        grads : float32[n, dim], at dim 1 also float32[n]
            As for :meth:`push`.
        out : float32[n, dim], optional
            Filled by the time ``wait()`` returns.

        Returns
        -------
        Future
            ``wait()`` returns float32[n, dim]: the rows with this push in them; under BSP on a cluster, where a push
            is seen by the pulls of the next clock only, the rows of this clock. The keys are sorted once for both.

        Examples
        --------
        >>> import shoal
        >>> table = shoal.local().table("t", optimizer=shoal.SGD(lr=1.0))
        >>> table.push_pull(np.array([7, 3], np.uint64), np.array([2.0, 1.0], np.float32)).wait().tolist()
        [[-2.0], [-1.0]]
        """
        self._check_usable()
        batch = self._batch(keys)
        rows = as_out(out, (batch.given, self.dim), self.name)
        summed = batch.sum(as_rows(grads, (batch.given, self.dim), self.name, "grads"))
        counts = batch.counts() if self._spec.needs_counts else None
        unique = np.empty((len(batch), self.dim), np.float32)

        def both() -> Pending | None:
            shard = self.shard
            pushed = shard.push(batch.native, summed, counts, self._clock())
            source = shard if isinstance(pushed, int) else pushed
            return source.pull(batch.native, unique)

        return Future(self._gate.change(both), lambda: batch.expand(unique, out=rows))

    def pull_unique(self, batch: KeyBatch, *, out: Rows | None = None) -> Rows:
        """Read the rows of a batch's unique keys, in hash order.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        out : float32[m, dim], optional

        Returns
        -------
        float32[m, dim]
        """
        rows = as_out(out, (len(batch), self.dim), self.name)
        return Future(self.shard.pull(batch.native, rows), lambda: rows).wait()

    def push_unique(
        self,
        batch: KeyBatch,
        grads: Rows,
        *,
        counts: Counts | None = None,
        copy: bool = True,
        where: _core.Whereabouts | None = None,
    ) -> Future[None]:
        """Apply one optimizer step to a batch's unique keys.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        grads : float32[m, dim], at dim 1 also float32[m]
            Summed per unique key, in hash order.
        counts : uint32[m], optional
            Sightings of each key, at least 1, for tables with rules that count them. Default: how often the batch has
            it.
        copy : bool
            False promises that ``grads`` will not be changed before the push is done, and saves a cluster's worker the
            copy that it sends, perhaps again. A local store has done with it when this returns.
        where : optional
            What a pull of the same batch has noted of where its rows are; a cluster has no use for it.

        Returns
        -------
        Future
        """
        given = as_rows(grads, (len(batch), self.dim), self.name, "grads")
        if copy and not isinstance(self.shard, _core.Shard):
            given = given.copy()
        if self._spec.needs_counts:
            counts = batch.counts() if counts is None else as_counts(counts, len(batch))
        else:
            counts = None
        if where is None or not isinstance(self.shard, _core.Shard):
            return self._push(batch.native, given, counts)
        self._gate.change(lambda: self._local().push(batch.native, given, counts, self._clock(), where))
        return Future(None, _nothing)

    def push_given(self, batch: KeyBatch, grads: Rows, *, where: _core.Whereabouts | None = None) -> Future[None]:
        """Apply one optimizer step to a batch's keys, of a gradient for each of them as given.

        The same as :meth:`push_unique` of ``batch.sum(grads)``; in a local store the sums are made as rows are stepped.

        Parameters
        ----------
        batch : KeyBatch
            From this store's ``key_batch``.
        grads : float32[n, dim], at dim 1 also float32[n]
            One row for every key as given.
        where : optional
            What a pull of the same batch has noted of where its rows are; a cluster has no use for it.

        Returns
        -------
        Future
        """
        given = as_rows(grads, (batch.given, self.dim), self.name, "grads")
        if not isinstance(self.shard, _core.Shard):
            return self.push_unique(batch, batch.sum(given), copy=False)
        counts = batch.counts() if self._spec.needs_counts else None
        self._gate.change(lambda: self._local().push_given(batch.native, given, counts, self._clock(), where))
        return Future(None, _nothing)

    def _local(self) -> _core.Shard:
        shard = self.shard  # asked for again: a load replaces it
        assert isinstance(shard, _core.Shard)
        return shard

    def assign(self, keys: Keys, rows: Rows) -> None:
        """Set the weights of ``keys``, creating rows that are not there.

        The optimizer's state of a row that is there stays; a new row's starts fresh. FTRL and GroupFTRL, which store z,
        read back the assigned weights up to float32 rounding.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Each once: of two rows for one key neither is right.
        rows : float32[n, dim], at dim 1 also float32[n]
            Finite.
        """
        self._check_usable()
        batch = self._batch(keys)
        if len(batch) != batch.given:
            twice = batch.keys[batch.counts() > 1][0]
            raise ValueError(
                f"assign to table {self.name!r} takes each key once, {batch.given - len(batch)} of {batch.given} are "
                f"repeated, first {twice}: drop the duplicates"
            )
        given = as_rows(rows, (batch.given, self.dim), self.name, "rows")
        in_order = np.empty_like(given)
        in_order[batch.inverse] = given
        self._gate.change(lambda: self.shard.assign(batch.native, in_order, self._clock()))

    def erase(self, keys: Keys) -> int:
        """Remove the rows of ``keys``; memory goes back to the system.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            Keys that are not there are passed over.

        Returns
        -------
        int
            How many rows there were.
        """
        self._check_usable()
        batch = self._batch(keys)
        return self._gate.change(lambda: self.shard.erase(batch.native))

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Tell which of ``keys`` have a row.

        Parameters
        ----------
        keys : uint64[n] or int64[n]

        Returns
        -------
        bool[n]
        """
        shard = self.shard
        batch = self._batch(keys)
        return shard.contains(batch.native).view(np.bool_)[batch.inverse]

    def state(self, keys: Keys) -> dict[str, Rows]:
        """Read weights and optimizer state as they are stored.

        Parameters
        ----------
        keys : uint64[n] or int64[n]
            A key without a row reads what its row would start with.

        Returns
        -------
        dict of float32[n, dim]
            By the names of ``docs/optimizers.md``, e.g. ``z`` and ``n`` for FTRL; one number per row (RowWiseAdagrad's
            ``m``, Adam's own ``t``) is float32[n, 1].
        """
        shard = self.shard
        batch = self._batch(keys)
        return {name: batch.expand(shard.state(batch.native, k)) for k, name in enumerate(shard.columns())}

    def items(self, batch_size: int = 65536) -> Iterator[tuple[npt.NDArray[np.uint64], Rows]]:
        """Iterate over all rows, in hash order.

        Parameters
        ----------
        batch_size : int
            Rows in each piece but the last, at most; pieces end with slots.

        Yields
        ------
        (uint64[k], float32[k, dim])
            Keys and weights. Rows pushed meanwhile are seen or not, slot by slot.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        shard = self.shard
        waiting: list[tuple[npt.NDArray[np.uint64], Rows]] = []
        count = 0
        for slot in range(self._slots):
            hashes, rows = shard.read_slot(slot)
            for start in range(0, len(hashes), batch_size):
                piece = (_core.unmix(hashes[start : start + batch_size]), rows[start : start + batch_size])
                if count + len(piece[0]) > batch_size:
                    yield _joined(waiting)
                    waiting, count = [], 0
                waiting.append(piece)
                count += len(piece[0])
        if waiting:
            yield _joined(waiting)

    def sum(self) -> npt.NDArray[np.float64]:
        """Add up the weights of all rows, where the rows are.

        Returns
        -------
        float64[dim]
            A number for each weight of a row (of `Proximal`, one), added up in float64, in hash order, slot by slot:
            the bits do not depend on threads or servers.

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", dim=2)
        ...     table.assign(np.array([7, 9], np.uint64), np.array([[1, 2], [3, 4]], np.float32))
        ...     table.sum().tolist()
        [4.0, 6.0]
        """
        return reductions.total(self.shard, self._slots)

    def norm(self, order: float = 2) -> float:
        """Compute the norm of all weights of the table, as one vector, where the rows are.

        Parameters
        ----------
        order : {1, 2, inf}
            Sum of the sizes, Euclidean norm, or the largest size.

        Returns
        -------
        float
            0 of an empty table. Bits as of :meth:`sum`.
        """
        return reductions.norm(self.shard, order)

    def count(self, *, above: float = 0.0) -> int:
        """Count the rows whose Euclidean norm is above a number: by default those that are not all zeros.

        Parameters
        ----------
        above : float
            0 or more. ``len(table)`` counts all rows.

        Returns
        -------
        int
        """
        return reductions.count(self.shard, above)

    def topk(self, k: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
        """Find the rows with the largest Euclidean norms, where the rows are.

        Parameters
        ----------
        k : int
            1 to 2^20.

        Returns
        -------
        keys : uint64[<= k]
            The largest norm first, of equal ones the smaller key. All keys of a table with fewer rows.
        norms : float64[<= k]

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t")
        ...     table.assign(np.array([7, 9, 8], np.uint64), np.array([1, -2, 1], np.float32))
        ...     keys, norms = table.topk(2)
        ...     keys.tolist(), norms.tolist()
        ([9, 7], [2.0, 1.0])
        """
        return reductions.topk(self.shard, k)

    def digest(self) -> str:
        """Compute a digest of all rows, weights and optimizer state, where the rows are.

        Returns
        -------
        str
            32 hexadecimal digits. Tables of one description with the same digest have the same rows, bit for bit, but
            for one chance in 2^128; it tells changes that come about, not those that somebody makes up. It depends on
            neither slots nor servers, nor on the way to these rows: a table that was saved and loaded keeps it.

        Notes
        -----
        Takes no memory. Of keys that wait for their rows, the table's clock and its number of pushes it says nothing.
        Rows pushed meanwhile are in it or not, slot by slot.

        Examples
        --------
        >>> import shoal
        >>> digests = set()
        >>> for slots in (2, 1024):
        ...     with shoal.local(slots=slots) as store:
        ...         table = store.table("t")
        ...         table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).wait()
        ...         digests.add(table.digest())
        >>> len(digests)
        1
        """
        return reductions.digest(self.shard, self._slots)

    def decay(self, factor: float) -> int:
        """Multiply all weights by a factor, where the rows are; the optimizer's state stays.

        Parameters
        ----------
        factor : float
            Above 0, at most 1.

        Returns
        -------
        int
            How many rows changed.

        Notes
        -----
        The product is rounded once, to the nearest: a weight whose change is below half a unit in its last place
        stays. Weights of 16 bits are rounded stochastically, with bits that change with every push. FTRL and
        GroupFTRL, which store z, keep n and read the new weights up to the rounding of z; weights that are 0 keep
        their z. Initial rows of keys without a row stay.
        """
        return self._gate.change(lambda: reductions.changed(self.shard, reductions.Function.DECAY, factor))

    def shrink(self, l1: float) -> int:
        """Bring all weights nearer to 0 by a number, and to 0 those that are no further from it, where the rows are.

        ``w = sgn(w) * max(|w| - l1, 0)``: the proximal step of an L1 penalty.

        Parameters
        ----------
        l1 : float
            0 or more.

        Returns
        -------
        int
            How many rows changed.

        Notes
        -----
        Rounded as by :meth:`decay`. Under FTRL and GroupFTRL a weight that becomes 0 gets the z nearest to its own
        that reads 0. Rows of zeros stay in the table: their state is kept for what may come.
        """
        return self._gate.change(lambda: reductions.changed(self.shard, reductions.Function.SHRINK, l1))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.shard)

    def stats(self) -> TableStats:
        """Read the table's figures."""
        native = self.shard.stats()
        rows, size, cells = native["rows"], native["bytes"], native["cells"]
        return TableStats(
            rows=rows,
            bytes=size,
            bytes_per_row=size / rows if rows else float("nan"),
            load=rows / cells if cells else 0.0,
            pulls=native["pulls"],
            pushes=native["pushes"],
            keys_pulled=native["rows_pulled"],
            keys_pushed=native["rows_pushed"],
            rows_created=native["rows_created"],
            rows_erased=native["rows_erased"],
            nonfinite_rows=native["nonfinite_rows"],
            refused=native["refused"],
            waiting=native["waiting"],
            expired={name: native[f"expired_by_{name}"] for name in (type(rule).__name__ for rule in self.spec.expire)},
        )

    def forecast(self, *rules: Expiry) -> TableSweep:
        """Say what expiry rules would drop now: nothing is dropped.

        Parameters
        ----------
        *rules : Expiry
            Any rules that can be answered from what rows keep; default: those of the table.

        Returns
        -------
        TableSweep
            How many rows each rule would drop, the share of recent impressions that they carried (`Dropped` says what
            is recent), and the same at other thresholds, to choose one.

        Raises
        ------
        ValueError
            A rule needs what the table's rows do not keep.

        Examples
        --------
        >>> import shoal
        >>> with shoal.local() as store:
        ...     table = store.table("t", expire=shoal.TimeToLive(9))
        ...     table.push(np.array([7, 9], np.uint64), np.ones(2, np.float32)).wait()
        ...     for _ in range(20):
        ...         store.tick()
        ...     table.push(np.array([9], np.uint64), np.ones(1, np.float32)).wait()
        ...     print(table.forecast().dropped[0].rows)
        1
        """
        return self.sweep(rules, dry_run=True)

    def sweep(self, rules: Sequence[Expiry] = (), *, dry_run: bool) -> TableSweep:
        """Sweep this table alone: see :meth:`shoal.Store.sweep` and :meth:`forecast`."""
        asked = tuple(rules) or self.spec.expire
        for rule in asked:
            if not isinstance(rule, Expiry):
                raise TypeError(f"table {self.name!r} is swept by rules such as shoal.TimeToLive(9), got {rule!r}")
        numbers = rules_native(asked)

        def ask() -> npt.NDArray[np.uint64]:
            return self.shard.sweep(numbers, self._clock(), dry_run=dry_run)

        return read_sweep(self.name, asked, ask() if dry_run else self._gate.change(ask), dry_run=dry_run)


def _joined(pieces: list[tuple[npt.NDArray[np.uint64], Rows]]) -> tuple[npt.NDArray[np.uint64], Rows]:
    return np.concatenate([keys for keys, _ in pieces]), np.concatenate([rows for _, rows in pieces])


def _nothing() -> None:
    """Answer of a push."""
