"""The interface between a table and its rows, which are held by this process or by servers.

Threads: implementations are safe from any thread.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.table.arrays import Counts, Rows
from shoal.table.future import Waitable

__all__ = ["PendingPush", "Shard", "Snapshot"]


class PendingPush(Waitable, Protocol):
    """A push under way."""

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Waitable:
        """Fill ``rows`` as they are behind this push."""


class Shard(Protocol):
    """The rows of one table, as a table asks for them: the engine's own, or those that servers hold.

    The engine's ``_core.Shard`` has completed a call when it returns. A remote one may return a
    :class:`~shoal.table.future.WaitableRequest` from ``pull`` and ``push``, which keeps a reference to the arrays.
    """

    @property
    def step(self) -> int:
        """Number of the last push."""

    def __len__(self) -> int: ...

    def pull(self, batch: _core.KeyBatch, rows: Rows, /) -> Waitable | None:
        """Fill ``rows``; None: they are filled."""

    def push(
        self, batch: _core.KeyBatch | _core.SummedBatch, grads: Rows, counts: Counts | None = None, clock: int = 0, /
    ) -> PendingPush | int:
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
