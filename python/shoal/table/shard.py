"""The interface between a table and its rows, which are held by this process or by servers.

Threads: implementations are safe from any thread.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.machine import available_bytes
from shoal.table.arrays import AnyRows, Counts, Rows
from shoal.table.future import Future, Waitable
from shoal.table.spec import TableRecord, TableSpec
from shoal.table.tiered import Tiered
from shoal.user_functions import Description, failure

OTHER_STORE = "after takes futures of calls of the same store, got one of another store: wait for it instead"


class PendingAnswers(Waitable, Protocol):
    """A call of a user's function that may not be done yet."""

    def result(self, timeout: float | None = None) -> list[npt.NDArray[np.float64]]:
        """Wait, and return the answers."""


class ShardReader(Protocol):
    """The rows of one table, read by key: a `Shard`, or a table of an export.

    A remote shard may return a :class:`~shoal.table.future.Waitable` from ``pull``, which keeps a reference to
    the arrays.
    """

    def __len__(self) -> int: ...

    def make_locations(self, batch: _core.KeyBatch, /) -> _core.RowLocations | None:
        """Make room for the positions of a batch's rows, which a pull finds and a push reuses; None: not supported."""

    def reads_ahead(self) -> bool:
        """Whether `prefetch` reads from a disk."""

    def prefetch(self, batch: _core.KeyBatch, locations: _core.RowLocations | None = None, /) -> None:
        """Prepare a later call: find the positions of a batch's rows, and begin to read those that are on disk."""

    def pull(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable | None:
        """Read the row of each unique key. None: the call is complete."""

    @property
    def is_remote(self) -> bool:
        """Whether calls wait for servers: `pull_per_key` pulls unique rows, which its result copies to the keys."""

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable | None:
        """Read the row of each input key. None: the call is complete."""

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        """Return which keys have a row."""

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        """Read hashes and weights of a slot."""

    def after(self, requests: Sequence[Waitable], /) -> Self:
        """Return a view of the same rows, whose pulls and pushes begin when these requests have succeeded."""

    def as_shard(self) -> "Shard":
        """Return the shard, for everything but reading by key."""


class Shard(ShardReader, Protocol):
    """The rows of one table, in the engine of this process or on servers.

    The engine's ``_core.Shard`` has completed a call when it returns. A remote one may return a
    :class:`~shoal.table.future.Waitable` from ``pull`` and ``push``, which keeps a reference to the arrays.
    """

    @property
    def pulls_early(self) -> bool:
        """Whether a pull may be sent a clock early, and be answered at once."""

    def for_later(self, clocks: int, /) -> Self:
        """Return a view of the same rows, whose pulls are for so many clocks later."""

    @property
    def retains_arrays(self) -> bool:
        """Whether a push keeps a reference to its arrays until it is done."""

    def reserve(self, rows: Sequence[int], /) -> None:
        """Make room for so many rows in each slot, if all rows are in the memory of this process."""

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable | int:
        """Apply one step with a gradient for each unique key. A number: the call is complete.

        ``counts`` are the occurrences of each key, None if the table's rules do not use them. ``clock`` is the local
        store's; a cluster has its own.
        """

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> Waitable | int:
        """Apply one step with a gradient for each input key, like `push` of their sums."""

    def pull_after(self, push: Waitable, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Read the row of each input key, as it is after a push that is not complete."""

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> None:
        """Set weights; ``clock`` as for ``push``."""

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Remove rows; return how many were removed."""

    def columns(self) -> list[str]:
        """Names of the stored columns."""

    def state(self, batch: _core.KeyBatch, column: int, /) -> Rows:
        """Read one column."""

    def metadata_names(self) -> list[str]:
        """Names of the row metadata of the table's rules that can be read here."""

    def metadata(self, batch: _core.KeyBatch, k: int, /) -> npt.NDArray[np.uint32]:
        """Read the row metadata with index ``k`` in `metadata_names`."""

    def marks_clock(self, store_clock: int, /) -> int:
        """Return the clock that row metadata refer to; 0 if they cannot be read."""

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Answer a function of all rows (reductions.py), in slot order."""

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> PendingAnswers | list[npt.NDArray[np.float64]]:
        """Call a function of a user for all rows, or for those of ascending hashes. A list: the call is complete.

        The answers are those of user_functions.py.
        """

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Drop the rows that expiry rules select, or only count them (lifecycle.py decodes the answer).

        ``clock`` as for ``push``.
        """

    def stats(self) -> dict[str, int]:
        """Read the statistics."""


class Snapshot(Protocol):
    """A consistent snapshot of a table, read slot by slot."""

    @property
    def step(self) -> int:
        """Number of the table's last push before the snapshot."""

    @property
    def table_clock(self) -> int:
        """The table's clock at the snapshot."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def bytes(self) -> int:
        """Approximate memory of the table."""

    def section(self, slot: int, /) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read a slot in checkpoint format: number of rows, their bytes, and the admission counters.

        Each slot once, from any thread.
        """

    def changes(
        self, slot: int, /
    ) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None, int, int, npt.NDArray[np.uint8]]:
        """Read a slot in the format of a delta checkpoint.

        As `section`, but the filter is None if it has not changed; then the ranges: bits, count, and their bytes.
        """

    def done(self, name: str, /) -> None:
        """Record that all was saved under this name: changes are tracked since then, unless the snapshot is plain."""

    def close(self) -> None:
        """Release what was not read."""


class LocalCalls:
    """What the shards of this process have in common: a call is complete when it returns."""

    def as_shard(self) -> Self:
        """Return itself."""
        return self

    def after(self, requests: Sequence[Waitable], /) -> Self:
        """Refuse: no request of this store is under way when a call returns."""
        raise ValueError(OTHER_STORE)

    @property
    def is_remote(self) -> bool:
        """False: a call is complete when it returns."""
        return False

    @property
    def pulls_early(self) -> bool:
        """False: nothing is to be gained."""
        return False

    def for_later(self, clocks: int, /) -> Self:
        """Return itself."""
        return self

    def pull_after(self, push: Waitable, batch: _core.KeyBatch, rows: Rows, /) -> NoReturn:
        """Refuse: every push of this store is complete."""
        raise ValueError(OTHER_STORE)

    @property
    def retains_arrays(self) -> bool:
        """False: arrays are read before a call returns."""
        return False

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> list[npt.NDArray[np.float64]]:
        """Call a function of a user; raise its error."""
        answers = [cast("_core.Shard", self).reduce(function, description.parameters(hashes))]
        if error := failure(answers):
            raise error
        return answers

    def stats(self) -> dict[str, int]:
        """Read the statistics, the number of pushes, and the statistics of a tier."""
        shard = cast("_core.Shard", self)
        tier = shard.tier_stats()
        tiers = {} if tier is None else {"tiers": 1, **{f"tier_{name}": number for name, number in tier.items()}}
        return {"step": shard.step, **_core.Shard.stats(shard), **tiers}

    def make_locations(self, batch: _core.KeyBatch, /) -> _core.RowLocations:
        """Make room for the positions of a batch's rows."""
        return _core.RowLocations(batch)

    def marks_clock(self, store_clock: int, /) -> int:
        """Return the table's clock."""
        return cast("_core.Shard", self).table_clock(store_clock)


class LocalShard(LocalCalls, _core.Shard):
    """The rows of a table in the memory of this process, and on its disk if they have a storage."""

    @classmethod
    def of(
        cls,
        spec: TableSpec,
        slots: int,
        pool: _core.ThreadPool,
        budget: _core.Budget | None = None,
        storage: Tiered | None = None,
    ) -> Self:
        """Make an empty shard of a table, with a memory budget, a storage, or neither."""
        tier = None if storage is None else storage.native()
        return cls(TableRecord.of(spec).native(), slots, pool, budget, tier)

    def reserve(self, rows: Sequence[int], /) -> None:
        """Make room for so many rows in each slot; with a storage rows go to disk as they come."""
        if self.reads_ahead():
            return
        count = sum(rows)
        needed, free = self.bytes_at(count) - self.stats()["bytes"], available_bytes()
        if 0 < free < needed:
            raise ValueError(
                f"room for {count:,} rows takes {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: "
                "expect fewer rows, or keep them on disk too, with storage=shoal.Tiered(...)"
            )
        super().reserve(rows)


def pull_and_expand(
    pull: Callable[[_core.KeyBatch, Rows], Waitable | None],
    batch: _core.KeyBatch,
    rows: Rows,
    workers: _core.ThreadPool,
    result: AnyRows | None = None,
) -> Future[AnyRows]:
    """Pull the rows of unique keys into a buffer, and copy each to its input keys: ``rows``, of which a view is given.

    The future returns ``result``, the rows as the caller knows them.
    """
    dim = rows.shape[1]
    unique = np.empty((len(batch), dim), np.float32)

    def expand() -> AnyRows:
        batch.expand(unique, dim, rows, workers)
        return rows if result is None else result

    return Future(pull(batch, unique), expand)
