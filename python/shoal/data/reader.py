"""Reader: files of examples, to be iterated in batches; the functions of `shoal.data.readers` make one."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.data.ahead import Ahead
from shoal.data.batch import Batch
from shoal.data.files import File, Wheres, files_of
from shoal.data.fill import Place, Source, fill
from shoal.data.names import FeatureNames
from shoal.data.rows import Format
from shoal.data.source import Lines

OnError = Literal["raise", "skip"]

# A part is the batches that end in one block, or one batch longer than that.
_PARTS_AHEAD = 2
_BEGINNING = Place()


@dataclass(slots=True)
class _Seen:
    """How far the consumer of one pass has come."""

    place: Place
    skipped: int
    fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class _Settings:
    """How the files are read."""

    batch_size: int
    on_error: OnError
    threads: int
    rank: int = 0
    shards: int = 1
    begin: Place = _BEGINNING
    sizes: tuple[int | None, ...] | None = None  # of the files when the position was taken

    def __post_init__(self) -> None:
        if operator.index(self.batch_size) < 1:
            raise ValueError(f"batch_size is {self.batch_size}: pass 1 or more")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}: pass 'raise' or 'skip'")
        if operator.index(self.threads) < 1:
            raise ValueError(f"threads is {self.threads}: pass 1 or more")
        if not 0 <= operator.index(self.rank) < operator.index(self.shards):
            raise ValueError(f"shard {self.rank} of {self.shards}: pass a rank from 0 to the number of shards - 1")


class Reader:
    """Files of examples, in batches; each ``for`` is a pass over them from their beginning.

    Made by `read_libsvm` and its kin. It only describes: it holds no file and no thread, and can be pickled (but for
    one of a stream).

    Parameters
    ----------
    path : path, pattern, URL, binary file, or sequence of them
        See ``docs/readers.md``. Files are plain text, or gzip, bzip2, xz or Zstandard of it, as their first bytes tell.
    form : Format
        What their lines are.
    batch_size : int
        Examples in each batch but the last of a pass, which may have fewer. Batches run on from file to file.
    on_error : {"raise", "skip"}
        What a malformed line does.
    threads : int
        That parse; beside them, one reads and decompresses. Batches are the same for any number.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature. A pickled reader has a copy of its own.
    storage_options : mapping, optional
        What fsspec's file systems are made with, for URLs.

    Raises
    ------
    OSError
        There is no such file (FileNotFoundError), it is a directory, or cannot be read.
    ValueError
        It is not a regular file; a parameter is out of range.
    ImportError
        A URL, and fsspec is not installed.

    Notes
    -----
    A pass reads, decompresses and parses in a background thread, some batches ahead. The thread ends with the pass: at
    the end of the data, on an error, and when the iterator is closed or dropped, as ``break`` does. Memory is bounded
    by a few batches and a line, whatever the size of the files; a line has at most 16 MiB.

    Any number of passes may run at a time; `skipped`, `progress` and `position` tell of the one that began last. One
    iterator belongs to one thread at a time. After a fork the child has to begin a new pass.

    An error shows after the batches that were complete before it.
    """

    def __init__(
        self,
        path: Wheres,
        form: Format,
        *,
        batch_size: int = 8192,
        on_error: OnError = "raise",
        threads: int = 1,
        names: FeatureNames | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(names, FeatureNames | None):
            raise TypeError(f"names is a {type(names).__name__}: pass shoal.FeatureNames(), which the passes fill")
        settings = _Settings(batch_size, on_error, threads)
        self._describe(files_of(path, storage_options), replace(form, names=names), settings)

    def _describe(self, files: tuple[File, ...], form: Format, settings: _Settings) -> None:
        self._files = files
        self._form = form
        self._settings = settings
        self._seen = _Seen(settings.begin, settings.begin.skipped)

    def __repr__(self) -> str:
        settings = self._settings
        shard = f", shard {settings.rank} of {settings.shards}" if settings.shards > 1 else ""
        return f"<Reader {self._form.name} {self.path!r}{shard}, batches of {settings.batch_size}>"

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass, when the first batch is asked for."""
        settings = self._settings
        seen = self._seen = _Seen(settings.begin, settings.begin.skipped)
        parts = fill(
            self._sources(),
            self._form,
            settings.batch_size,
            settings.on_error == "skip",
            settings.begin,
            settings.threads,
        )
        ahead = Ahead(parts, _PARTS_AHEAD, f"shoal reader {os.path.basename(self._files[0].name)}")
        try:
            for batches, skipped, fraction in ahead:
                seen.skipped, seen.fraction = skipped, fraction
                for batch, place in batches:
                    seen.place = place
                    yield batch
        finally:
            ahead.close()

    def _sources(self) -> Iterator[Source]:
        settings, begin = self._settings, self._settings.begin
        sizes = [file.size() for file in self._files]
        self._check_sizes(sizes)
        whole = len(self._files) >= settings.shards  # each file belongs to one shard
        mine = [i for i in range(len(self._files)) if not whole or i % settings.shards == settings.rank]
        rank, shards = (0, 1) if whole else (settings.rank, settings.shards)
        total = sum(sizes[i] or 0 for i in mine)
        before = 0.0
        for i in mine:
            share = (sizes[i] or 0) / total if total else 0.0
            if i >= begin.file:
                start = begin.offset if i == begin.file else 0
                lines = Lines(self._files[i], rank, shards, start=start, headed=self._form.header is not None)
                yield Source(i, lines, before, share)
            before += share

    def _check_sizes(self, sizes: list[int | None]) -> None:
        for file, size, noted in zip(self._files, sizes, self._settings.sizes or sizes, strict=True):
            if size != noted:
                raise ValueError(
                    f"{file.name} has {size} bytes, and had {noted} when the position was taken: begin a new pass over "
                    f"what there is now"
                )

    def shard(self, rank: int, n: int) -> Reader:
        """Take one of ``n`` parts of the files, which together hold each line once.

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
            The rank is out of range, this is a shard already, or a stream is to be cut.

        Notes
        -----
        Of n files or more, file i belongs to shard i % n. Fewer are cut, each into n: a plain file into ranges of
        bytes, of which a shard reads just its own. A compressed file is decompressed whole by each shard, which keeps
        every n-th block of 256 KiB of text (``docs/readers.md``).
        """
        if self._settings.shards > 1:
            raise ValueError(
                f"{self!r} is a shard already: take shard(rank, n) of the whole, with n the number of all shards"
            )
        settings = replace(self._settings, rank=rank, shards=n)
        for file in self._files:
            if n > 1 and not file.seekable:
                raise ValueError(f"{file.name} is a stream, which is read once: write the data to a file to cut it")
        return self._with(settings)

    def _with(self, settings: _Settings) -> Reader:
        reader = Reader.__new__(Reader)
        reader._describe(self._files, self._form, settings)
        return reader

    def position(self) -> dict[str, Any]:
        """Tell where the pass that began last stands: behind the batch that it gave last.

        Returns
        -------
        dict
            To be kept as JSON, and given to `resume`. Of a reader that has given nothing yet, its beginning.
        """
        settings, place = self._settings, self._seen.place
        return {
            "format": self._form.name,
            "files": [[file.name, file.size()] for file in self._files],
            "shard": [settings.rank, settings.shards],
            "place": list(place),
        }

    def resume(self, position: Mapping[str, Any]) -> Reader:
        """Go on where another pass stood: with the very next example.

        Parameters
        ----------
        position : mapping
            From `position` of a reader of the same files.

        Returns
        -------
        Reader
            Its passes begin there. The batch size, the threads and what malformed lines do are this reader's.

        Raises
        ------
        ValueError
            The position is of other files, of another format or shard, or is none. While iterating: a file is longer or
            shorter than it was.

        Notes
        -----
        A plain file is read from there on; a compressed one and a stream are read from their beginning, and what was
        seen is passed over.
        """
        try:
            form, files, shard, place = (position[name] for name in ("format", "files", "shard", "place"))
            names, sizes = [name for name, _ in files], tuple(size for _, size in files)
            file, offset, rows, skipped = map(operator.index, place)
            begin = Place(file, offset, rows, skipped)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{position!r} is no position: pass what position() returned") from error
        if form != self._form.name or names != [file.name for file in self._files]:
            raise ValueError(
                f"the position is one in {form} data of {_told(names)}, and this reader is of {self._form.name} data "
                f"of {self.path}: make the reader of the same files"
            )
        if min(begin) < 0 or begin.file >= len(names):
            raise ValueError(f"the place {list(begin)} is none in {len(names)} files: pass what position() returned")
        rank, shards = shard
        return self._with(replace(self._settings, rank=rank, shards=shards, begin=begin, sizes=sizes))

    @property
    def path(self) -> str:
        """The file; of several, the first and how many there are."""
        return _told([file.name for file in self._files])

    @property
    def paths(self) -> tuple[str, ...]:
        """All files."""
        return tuple(file.name for file in self._files)

    @property
    def format(self) -> str:
        """Name of the format, such as "libsvm". Models remember it: keys of another one would mean nothing."""
        return self._form.name

    @property
    def schema(self) -> dict[str, Any]:
        """What was asked of the function that made the reader, beside the files and how they are read, as JSON."""
        return dict(self._form.schema)

    @property
    def names(self) -> FeatureNames | None:
        """What the passes fill with names of features, if that was asked for."""
        return self._form.names

    @property
    def batch_size(self) -> int:
        """Examples in each batch but the last."""
        return self._settings.batch_size

    @property
    def skipped(self) -> int:
        """Malformed lines left out by the last pass, or so far by the current one."""
        return self._seen.skipped

    def progress(self) -> float:
        """Tell how much of the files, or of the shard, the last or the current pass has consumed.

        Returns
        -------
        float
            From 0 (no pass has begun) to 1 (it has ended), in bytes on the disk, compressed ones where they are; runs
            ahead of the batches by a block. Of a stream 0 until it ends.
        """
        return self._seen.fraction


def _told(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
