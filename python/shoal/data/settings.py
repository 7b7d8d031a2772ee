"""Settings: how files are read. Share: one of the files of a pass, or one split of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from shoal.data.files import File
from shoal.data.names import FeatureNames
from shoal.data.rebatch import Place

__all__ = ["BEGINNING", "OnError", "Settings", "Share"]

OnError = Literal["raise", "skip"]

BEGINNING = Place()


@dataclass(frozen=True, slots=True)
class Settings:
    """How the files are read: the parameters of the functions that make readers, which shard, and where to begin."""

    batch_size: int
    on_error: OnError = "raise"
    threads: int = 1
    names: FeatureNames | None = None
    fielded: bool = False
    labelled: bool = True
    rank: int = 0
    shards: int = 1
    begin: Place = BEGINNING
    sizes: tuple[int | None, ...] | None = None  # of the files when the position was taken
    order: tuple[int, ...] | None = None  # of the files, by their numbers; None: as they were given

    def __post_init__(self) -> None:
        if operator.index(self.batch_size) < 1:
            raise ValueError(f"batch_size is {self.batch_size}: pass 1 or more")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}: pass 'raise' or 'skip'")
        if operator.index(self.threads) < 1:
            raise ValueError(f"threads is {self.threads}: pass 1 or more")
        if not isinstance(self.names, FeatureNames | None):
            raise TypeError(f"names is a {type(self.names).__name__}: pass shoal.FeatureNames(), which the passes fill")
        if not 0 <= operator.index(self.rank) < operator.index(self.shards):
            raise ValueError(f"shard {self.rank} of {self.shards}: pass a rank from 0 to the number of shards - 1")


@dataclass(frozen=True, slots=True)
class Share:
    """A file among those of a pass, or a shard of it.

    Parameters
    ----------
    number : int
        Of the file, as places count.
    file : File
    rank, shards : int
        Which shard of how many.
    before, share : float
        Of the bytes of all: those before it, and its own; 0 where they are not known.
    """

    number: int
    file: File
    rank: int
    shards: int
    before: float
    share: float
