"""Reader: a file of examples, to be iterated in batches; the functions of `shoal.data.readers` make one."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal.data.ahead import Ahead
from shoal.data.batch import Batch
from shoal.data.rows import Format, fill
from shoal.data.source import Lines, open_regular

OnError = Literal["raise", "skip"]

# A part is the batches that end in one block, or one batch longer than that.
_PARTS_AHEAD = 2


@dataclass(slots=True)
class _Seen:
    """How far the consumer of one pass has come."""

    skipped: int = 0
    fraction: float = 0.0


class Reader:
    """A file of examples, in batches; each ``for`` is a pass over it from its beginning.

    Made by `read_libsvm` and its kin. It only describes: it holds no file and no thread, and can be pickled.

    Parameters
    ----------
    path : str or PathLike
        A regular file: plain text, or gzip, bzip2 or xz of it, as its first bytes tell.
    form : Format
        What its lines are.
    batch_size : int
        Examples in each batch but the last of a pass, which may have fewer.
    on_error : {"raise", "skip"}
        What a malformed line does.
    rank, shards : int
        Which shard of how many.

    Raises
    ------
    OSError
        There is no such file (FileNotFoundError), it is a directory, or cannot be read.
    ValueError
        It is not a regular file; a parameter is out of range.

    Notes
    -----
    A pass reads, decompresses and parses in a background thread, some batches ahead. The thread ends with the pass: at
    the end of the data, on an error, and when the iterator is closed or dropped, as ``break`` does. Memory is bounded
    by a few batches and a line, whatever the size of the file; a line has at most 16 MiB.

    Any number of passes may run at a time; `skipped` and `progress` tell of the one that began last. One iterator
    belongs to one thread at a time. After a fork the child has to begin a new pass.

    An error shows after the batches that were complete before it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        form: Format,
        *,
        batch_size: int = 8192,
        on_error: OnError = "raise",
        rank: int = 0,
        shards: int = 1,
    ) -> None:
        if operator.index(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size}: pass 1 or more")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}: pass 'raise' or 'skip'")
        if not 0 <= operator.index(rank) < operator.index(shards):
            raise ValueError(f"shard {rank} of {shards}: pass a rank from 0 to the number of shards - 1")
        self._path = os.fspath(path)
        self._form = form
        self._batch_size = batch_size
        self._on_error: OnError = on_error
        self._rank = rank
        self._shards = shards
        self._seen = _Seen()
        open_regular(self._path).close()

    def __repr__(self) -> str:
        shard = f", shard {self._rank} of {self._shards}" if self._shards > 1 else ""
        return f"<Reader {self._form.name} {self._path!r}{shard}, batches of {self._batch_size}>"

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass, when the first batch is asked for."""
        seen = self._seen = _Seen()
        lines = Lines(self._path, self._rank, self._shards)
        parts = fill(lines, self._form, self._batch_size, self._on_error == "skip")
        ahead = Ahead(parts, _PARTS_AHEAD, f"shoal reader {os.path.basename(self._path)}")
        try:
            for batches, skipped, fraction in ahead:
                seen.skipped, seen.fraction = skipped, fraction
                yield from batches
        finally:
            ahead.close()

    def shard(self, rank: int, n: int) -> Reader:
        """Take one of ``n`` parts of the file, which together hold each line once.

        Parameters
        ----------
        rank : int
            From 0 to n - 1.
        n : int
            Number of shards.

        Returns
        -------
        Reader

        Raises
        ------
        ValueError
            The rank is out of range, or this is a shard already.

        Notes
        -----
        A plain file is cut into ranges of bytes, and a shard reads just its own. A compressed file is decompressed
        whole by each shard, which keeps every n-th block of 256 KiB of text (``docs/readers.md``).
        """
        if self._shards > 1:
            raise ValueError(
                f"{self!r} is a shard already: take shard(rank, n) of the whole, with n the number of all shards"
            )
        return Reader(self._path, self._form, batch_size=self._batch_size, on_error=self._on_error, rank=rank, shards=n)

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def format(self) -> str:
        """Name of the format, such as "libsvm". Models remember it: keys of another one would mean nothing."""
        return self._form.name

    @property
    def batch_size(self) -> int:
        """Examples in each batch but the last."""
        return self._batch_size

    @property
    def skipped(self) -> int:
        """Malformed lines left out by the last pass, or so far by the current one."""
        return self._seen.skipped

    def progress(self) -> float:
        """Tell how much of the file, or of the shard, the last or the current pass has consumed.

        Returns
        -------
        float
            From 0 (no pass has begun) to 1 (it has ended), in bytes on the disk, compressed ones where they are; runs
            ahead of the batches by a block.
        """
        return self._seen.fraction
