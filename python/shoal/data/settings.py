"""Settings: the options of a reader. FileSplit: one of the files of a pass, or one split of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shoal.base.scalars import make_plain, whole
from shoal.data.batch import Batch, left_out
from shoal.data.files import File
from shoal.data.names import FeatureNames
from shoal.data.places import Spans
from shoal.data.rebatch import Cursor

OnError = Literal["raise", "skip"]

BEGINNING = Cursor()
_MOST_CLASSES = 1 << 24  # whose numbers are exact in float32


class Settings(msgspec.Struct, frozen=True):
    """How the files are read: the parameters of the functions that make readers, which split, and where to begin."""

    batch_size: int
    on_error: OnError = "raise"
    reader_threads: int | None = None  # that parse; None: by the cores
    names: FeatureNames | None = None
    fielded: bool = False
    labelled: bool = True
    classes: int = 0  # whose numbers labels are; 0: labels are 0/1 or -1/+1
    max_delay: float | None = None  # seconds after which a batch of a stream is as large as it is; None: never
    rank: int = 0
    num_splits: int = 1
    begin: Cursor = BEGINNING
    sizes: tuple[int | None, ...] | None = None  # of the files when the position was taken
    split_sizes: tuple[int | None, ...] | None = None  # of the files when they were split
    without: tuple[int, ...] = ()  # keys, which are sorted: examples that have any of them are left out
    without_lines: Mapping[str, Spans] = {}  # by file: examples of these lines are left out
    order: tuple[int, ...] | None = None  # of the files, by their numbers; None: the original order

    def __post_init__(self) -> None:
        make_plain(self)
        whole("batch_size", self.batch_size, 1)
        structs.force_setattr(self, "without", tuple(sorted(set(map(operator.index, self.without)))))
        if self.without and not 0 <= self.without[0] <= self.without[-1] < 2**64:
            raise ValueError(f"without is {self.without}: pass keys, whole numbers from 0 to 2**64 - 1")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}: pass 'raise' or 'skip'")
        if self.reader_threads is not None:
            whole("reader_threads", self.reader_threads, 1)
        if self.max_delay is not None and not self.max_delay > 0:
            raise ValueError(f"max_delay is {self.max_delay}: pass a number of seconds above 0")
        if not isinstance(self.names, FeatureNames | None):
            raise TypeError(
                f"names is a {type(self.names).__name__}: pass shoal.data.FeatureNames(), which the passes fill"
            )
        if not (self.classes == 0 or 2 <= self.classes <= _MOST_CLASSES):
            raise ValueError(f"classes is {self.classes}: pass 2 to {_MOST_CLASSES:,}")
        if not 0 <= self.rank < self.num_splits:
            raise ValueError(f"split {self.rank} of {self.num_splits}: pass a rank from 0 to the number of splits - 1")

    @property
    def leaves_out(self) -> bool:
        """Whether examples are left out."""
        return bool(self.without or self.without_lines)

    def leaving_out(self) -> Callable[[Batch], Batch]:
        """Return what leaves these examples out of a batch."""
        if not self.leaves_out:
            return lambda batch: batch
        keys = np.array(self.without, np.uint64)
        return lambda batch: left_out(batch, keys)

    def lines_without(self, file: File) -> NDArray[np.int64] | None:
        """Return the spans of lines of a file whose examples are left out; None: it has none."""
        spans = self.without_lines.get(file.name)
        return None if spans is None else np.array(spans, np.int64)


class FileSplit(msgspec.Struct, frozen=True):
    """A file among those of a pass, or a split of it."""

    # Of the file, as places count.
    number: int
    file: File
    # rank, num_splits: Which split of how many.
    rank: int
    num_splits: int
    # before, fraction: Of the bytes of all: those before it, and its own; 0 where they are not known.
    before: float
    fraction: float
    # Of the file when the pass began.
    size: int | None = None
