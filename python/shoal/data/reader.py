"""Reader: a file of examples, to be iterated in batches; `read_libsvm` and `read_criteo` make one."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal.data.ahead import Ahead
from shoal.data.batch import Batch
from shoal.data.rows import CRITEO, LIBSVM, Format, fill
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

    Made by `read_libsvm` and `read_criteo`. It only describes: it holds no file and no thread, and can be pickled.

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
        """Name of the format: "libsvm" or "criteo". Models remember it: keys of another one would mean nothing."""
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


def read_libsvm(path: str | os.PathLike[str], *, batch_size: int = 8192, on_error: OnError = "raise") -> Reader:
    r"""Read libsvm (svmlight) text: ``label key:value key:value ...``.

    Parameters
    ----------
    path : str or PathLike
        Plain, gzip, bzip2 or xz.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its place, its text and what is wrong, or is left out and counted.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    Keys are the whole numbers as written, all of 0 to 2^64 - 1; values are the nearest float32. Labels are 0/1 or
    -1/+1. ``docs/readers.md`` has the grammar.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.libsvm")
    ...     _ = path.write_text("+1 3:1 18446744073709551615:0.5\n-1 3:2\n")
    ...     for batch in read_libsvm(path):
    ...         print(batch.labels, batch.indptr, batch.keys, batch.values)
    [1. 0.] [0 2 3] [                   3 18446744073709551615                    3] [1.  0.5 2. ]
    """
    return Reader(path, LIBSVM, batch_size=batch_size, on_error=on_error)


def read_criteo(path: str | os.PathLike[str], *, batch_size: int = 8192, on_error: OnError = "raise") -> Reader:
    r"""Read Criteo's tab-separated click logs: a label, 13 integers, 26 categories.

    Parameters
    ----------
    path : str or PathLike
        Plain, gzip, bzip2 or xz.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its place, its text and what is wrong, or is left out and counted.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    An empty column is no feature, and every value is 1 (`Batch.values` is None). A category's key is
    ``hash_strings([text], field=column)``, columns counted from 0, the label's. An integer v becomes the text
    ``floor(ln(v)^2)`` if it is above 2, else ``SP`` and v, and is then hashed likewise. ``docs/readers.md`` has it all.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from shoal.data import hash_strings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "day_0.tsv")
    ...     _ = path.write_text("1\t20" + "\t" * 12 + "\t68fd1e64" + "\t" * 25 + "\n")
    ...     (batch,) = read_criteo(path)
    >>> keys = [hash_strings(["8"], field=1)[0], hash_strings(["68fd1e64"], field=14)[0]]  # ln(20)^2 = 8.97
    >>> batch.labels, batch.keys.tolist() == keys
    (array([1.], dtype=float32), True)
    """
    return Reader(path, CRITEO, batch_size=batch_size, on_error=on_error)
