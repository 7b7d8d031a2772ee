"""Order: of a fit of several workers under SSP or ASP, the order in which servers execute their pulls and pushes.

It is recorded while models learn (models/recording.py), or is that of a record (lineage/replay.py). In other fits a
store has none.

Threads: the one that fits.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Order(Protocol):
    """What the loop that learns calls."""

    @property
    def id(self) -> str:
        """Of the record that is written, in the worker that leads; empty: none is."""

    @property
    def every(self) -> int | None:
        """Batches after which a worker waits for all others, for a checkpoint; None: at the ends of passes."""

    @property
    def has_meetings(self) -> bool:
        """Whether all workers wait for a checkpoint: what is recorded begins anew there."""

    def begin(self, division: int) -> None:
        """Begin to learn from a division."""

    def end(self) -> None:
        """End it: all calls of this worker are answered when this returns. The others are met next."""

    def met(self) -> None:
        """Take note that all workers have ended it."""

    def rest(self, examples: int) -> None:
        """Take note of what a checkpoint of so many examples does not have, while all workers wait for it."""


class Placement(NamedTuple):
    """Where the rows of a store are."""

    # Of the map of slots: it grows with every change.
    epoch: int
    # Of each arc its first slot, its end, and a number of its endpoint.
    arcs: list[tuple[int, int, int]]


Parts = npt.NDArray[np.uint64]
"""[n, 6]: of each message of a pull or a push the serial of its call, the index of its table, whether it is a push, the
first of its slots, their end, and its number (docs/wire-format.md)."""
