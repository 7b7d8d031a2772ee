"""Reader: the base of all readers, which are iterated in batches; `shoal.data.readers` makes them.

TextReader    files of lines           text.py
TableReader   Parquet, Arrow streams   arrow.py
"""

from __future__ import annotations

import copy
import operator
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from shoal.base.prefetch import prefetch
from shoal.base.scalars import whole
from shoal.data.batch import Batch
from shoal.data.files import File, Live
from shoal.data.fingerprint import difference, file_fingerprint, first_of, place_of
from shoal.data.hashing import hash_cells
from shoal.data.interactions import field_of
from shoal.data.kafka import Topic
from shoal.data.names import FeatureNames
from shoal.data.places import spans_of
from shoal.data.rebatch import BatchGroups, Cursor
from shoal.data.settings import BEGINNING, FileSplit, Settings
from shoal.data.splits import file_splits

# A group is the batches that end in one block, or one batch longer than that.
GROUPS_AHEAD = 2
_MOST_LABELS = 10_000  # that are counted, where the one that is looked for is none of them
_MOST_HEADS = 1000  # files whose first bytes are read: on an object store each costs a request


class _PassProgress(msgspec.Struct):
    """Progress of the consumer of one pass."""

    cursor: Cursor
    skipped: int
    fraction: float = 0.0


class Reader(ABC):
    """Examples in batches; each ``for`` is a pass over them from their beginning.

    Made by `shoal.read_libsvm` and the other functions of this kind. It holds no open file and no thread, and can be
    pickled (except a reader of a stream).

    Parameters
    ----------
    files : tuple of File
    name : str
        Of the format.
    schema : mapping
        What was asked of the function that made the reader, as JSON.
    settings : Settings

    Raises
    ------
    OSError
        A file does not exist (FileNotFoundError), is a directory, or cannot be read.
    ValueError
        A file is not a regular file, or a parameter is out of range.
    ImportError
        The extra that is needed to read the files is not installed.

    Notes
    -----
    A pass reads, decompresses and parses in background threads, some batches ahead. The threads end with the pass: at
    the end of the data, on an error, and when the iterator is closed or dropped, as ``break`` does. Memory is bounded
    by a few batches and a line, for files of any size; a line has at most 16 MiB.

    Any number of passes may run at a time; `skipped`, `progress` and `position` refer to the pass that began last. One
    iterator belongs to one thread at a time. After a fork the child has to begin a new pass.

    An error is raised after the batches that were complete before it.
    """

    def __init__(self, files: tuple[File, ...], name: str, schema: Mapping[str, Any], settings: Settings) -> None:
        self._files = files
        self._name = name
        self._schema = schema
        self._settings = settings
        self._seen = _PassProgress(settings.begin, settings.begin.skipped)
        self._original: Reader | None = None  # another one, whose passes these are too
        self._split_sizes: list[int | None] = []  # of the files when this, or what it is a copy of, was split first
        self._others: dict[str, None] = {}  # columns of which nothing is said, as passes have found them
        self._begun: list[int] = []  # digests of the files of a folder, up to the one that is read

    @abstractmethod
    def _batch_groups(self) -> BatchGroups:
        """Read: in a thread of its own."""

    def _parse_values(self, values: Sequence[bytes]) -> tuple[Batch, int]:
        """Make a batch of the values of messages; return how many were left out, too."""
        raise NotImplementedError

    @property
    def _live(self) -> Live | None:
        """What its data is, if that appears while it is read, and is divided."""
        file = self._files[0]
        return file if isinstance(file, Live) else None

    @property
    def _topic(self) -> Topic | None:
        """What its data is, if that is messages: other live data is files."""
        return live if isinstance(live := self._live, Topic) else None

    def __repr__(self) -> str:
        settings = self._settings
        split = f", split {settings.rank} of {settings.num_splits}" if settings.num_splits > 1 else ""
        return f"<Reader {self._name} {self.path!r}{split}, batches of {settings.batch_size}>"

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass, when the first batch is asked for."""
        settings = self._settings
        remaining, is_live = settings.leaving_out(), self._live is not None
        seen = self._seen = _PassProgress(settings.begin, settings.begin.skipped)
        original = self._original
        while original is not None:
            original._seen = seen
            original = original._original
        topic = self._topic
        groups = self._batch_groups() if topic is None else topic.groups(settings, self._parse_values)
        ahead = prefetch(groups, GROUPS_AHEAD, f"shoal reader {os.path.basename(self._files[0].name)}")
        try:
            for batches, skipped, fraction in ahead:
                seen.skipped, seen.fraction = skipped, fraction
                for batch, cursor in batches:
                    seen.cursor = cursor
                    batch = remaining(batch)
                    if len(batch) or not is_live:  # an empty one of a stream would say that nothing has arrived
                        yield batch
        finally:
            ahead.close()

    def _file_splits(self) -> Iterable[FileSplit | None]:
        """Find the files that this split reads from the cursor on, and which part of each; None: there is none yet."""
        return file_splits(self._files, self._settings, self._begun)

    def split(self, rank: int, n: int) -> Reader:
        """Return one of ``n`` splits of the files, which together hold each line once.

        Parameters
        ----------
        rank : int
            From 0 to n - 1.
        n : int
            Number of splits.

        Returns
        -------
        Reader

        Raises
        ------
        ValueError
            The rank is out of range, this is a split already, or the data is a pipe or another open file.
        CorruptionError
            During a pass: a file that several splits share has another size than when it was first split.

        Notes
        -----
        If there are n files or more, file i belongs to split i % n. Otherwise each file is divided into n parts: a
        plain file into ranges of bytes, of which a split reads only its own; a compressed file is decompressed
        completely by each split, which keeps every n-th block of 512 KiB of text (``docs/readers.md``).
        """
        if self._settings.num_splits > 1:
            raise ValueError(
                f"{self!r} is a split already: take split(rank, n) of the whole, with n the number of all splits"
            )
        sizes = None
        if len(self._files) < n:  # files are divided: all splits of this reader are of one state of them
            if not self._split_sizes:
                self._split_sizes[:] = [file.size() for file in self._files]  # at once: threads may split it
            sizes = tuple(self._split_sizes)
        settings = structs.replace(self._settings, rank=rank, num_splits=n, split_sizes=sizes)
        for file in self._files:
            if n > 1 and not file.seekable and self._live is None:
                raise ValueError(f"{file.name} is a stream, which is read once: write the data to a file to split it")
        return self._with(settings)

    def splits(self, split_bytes: int) -> list[Reader]:
        """Split the files into ranges that can be read separately and together hold each example once.

        Parameters
        ----------
        split_bytes : int
            Approximate size of a split. A file that has to be read from its beginning, compressed or Parquet, is one
            split of any size.

        Returns
        -------
        list of Reader
            In the order of the files, and of their bytes.

        Raises
        ------
        ValueError
            The size is below 1; this is a split, starts from a position, or reads a stream.

        Examples
        --------
        >>> [split.path for split in read_libsvm(["a.txt", "b.txt"]).splits(1 << 26)]  # doctest: +SKIP
        ['a.txt', 'b.txt']
        """
        whole("split_bytes", split_bytes, 1)
        if self._settings.num_splits > 1 or self.resumed:
            raise ValueError(f"{self!r} is a split, or starts from a position: split the whole data")
        splits = []
        for number in self._settings.order or range(len(self._files)):
            file = self._files[number]
            if not file.seekable:
                raise ValueError(f"{file.name} is a stream, which is read once: write the data to a file to split it")
            size = file.size()
            count = max(1, -(-(size or 0) // split_bytes)) if self._can_begin_anywhere(file) else 1
            for rank in range(count):
                settings = structs.replace(self._settings, rank=rank, num_splits=count, order=None, split_sizes=(size,))
                split = self._with(settings)
                split._files = (file,)
                splits.append(split)
        return splits

    def _can_begin_anywhere(self, file: File) -> bool:
        """Whether reading a range of a file costs no more than its own bytes."""
        return False

    def _with(self, settings: Settings) -> Reader:
        reader = copy.copy(self)
        reader._settings = settings
        reader._original, reader._begun = None, []
        reader._seen = _PassProgress(settings.begin, settings.begin.skipped)
        return reader

    def in_order(self, order: Sequence[int]) -> Reader:
        """Return this reader with the files in another order.

        Parameters
        ----------
        order : sequence of int
            The number of each file, from 0 as they were given; each once.

        Returns
        -------
        Reader
            Each split of it has the files that it would have had, in this order.

        Raises
        ------
        ValueError
            It is not a permutation of the files, or this reader starts from a position.
        """
        if self.resumed:
            raise ValueError(
                f"{self!r} starts from a position, which fixes the order of the files: call in_order before resume()"
            )
        numbers = tuple(operator.index(number) for number in order)
        if sorted(numbers) != list(range(len(self._files))):
            raise ValueError(
                f"{list(order)} is not a permutation of {len(self._files)} files: pass each of their numbers once"
            )
        return self._with(structs.replace(self._settings, order=numbers))

    def with_max_delay(self, seconds: float | None) -> Reader:
        """Return this reader with batches of a stream that leave when their first example has waited for so long."""
        return self._with(structs.replace(self._settings, max_delay=seconds))

    def with_names(self, names: FeatureNames | None) -> Reader:
        """Return this reader with other names to fill, or none."""
        return self._with(structs.replace(self._settings, names=names))

    def with_fields(self) -> Reader:
        """Return this reader with batches with the field of each feature in `Batch.fields`.

        Returns
        -------
        Reader
            A field is a number: of a column by name and of a namespace of Vowpal Wabbit ``hash_strings([name])[0]``, of
            libffm as written, of Criteo's logs 1 to 39.

        Raises
        ------
        ValueError
            The format has no fields (libsvm), or features are made of two (interactions).
        """
        return self._with(structs.replace(self._settings, fielded=True))

    def with_columns(self, categorical: Sequence[str] | None = None) -> Reader:
        """Return this reader for the same columns in every file, if it reads all that nothing is said of.

        Parameters
        ----------
        categorical : list of str, optional
            The columns; default: those of the first file.

        Returns
        -------
        Reader
            Its `schema` names the columns, each of which all files must have. Itself if columns are named already, if
            the format has none, or if they are not known before a pass, as of a stream. `skipped` and `progress` of
            this reader report its passes too.

        Raises
        ------
        ValueError
            The first line of the first file is not a header.
        """
        return self

    def unlabelled(self) -> Reader:
        """Return this reader for data without labels, to be predicted: labels and weights are ignored.

        Returns
        -------
        Reader
            `Batch.labels` is NaN, and a label may be wrong, blank or missing: the column of csv and parquet, the first
            column of Criteo's logs, the first word of libsvm and libffm, what stands before the bar of Vowpal Wabbit.
            `skipped` and `progress` of this reader report its passes too.

        Notes
        -----
        `shoal.models.Model.predict` does this to its readers. An empty line is still not an
        example.
        """
        reader = self._with(structs.replace(self._settings, labelled=False))
        reader._original = self
        return reader

    def without(self, keys: Iterable[int] = (), *, examples: Iterable[str] = ()) -> Reader:
        """Return this reader without the examples that have any of some features, or are at some places of its files.

        Parameters
        ----------
        keys : iterable of int
            Of the features, from 0 to 2**64 - 1; `shoal.data.key_of_name` returns that of ``"user=u17"``.
        examples : iterable of str
            ``"day_1.csv:7"``, ``"day_1.csv:7-12"`` and ``"day_1.csv:7-"`` are lines, or rows of tables, from 1, of a
            file of `paths`; ``"day_1.csv"`` or a pattern, ``"2026-11-29T12/*"``, whole files.

        Returns
        -------
        Reader
            Its batches are those of this reader, each without these examples: it may be empty.

        Raises
        ------
        ValueError
            A number is no key, or a place is in no file of this reader; topics and followed folders have no places.
        """
        keys, lines = (*self._settings.without, *keys), spans_of(examples, self.paths, self._settings.without_lines)
        if lines and self._live is not None:
            raise ValueError(f"{self.path} is a stream, whose examples have no lines: leave them out by a feature")
        return self._with(structs.replace(self._settings, without=keys, without_lines=lines))

    def with_classes(self, classes: int) -> Reader:
        """Return this reader for labels that are numbers of classes: 0, 1, ..., ``classes`` - 1.

        Parameters
        ----------
        classes : int
            2 or more.

        Returns
        -------
        Reader
            For `shoal.models.MulticlassRegression`; models of two classes take labels of 0/1 or -1/+1.

        Raises
        ------
        ValueError
            There are fewer than two classes, or the reader has the text of a positive label.
        """
        if self._schema.get("positive") is not None:
            raise ValueError("labels of several classes are numbers: leave positive (--positive) out")
        if classes < 2:
            raise ValueError(f"classes is {classes}: pass 2 or more")
        return self._with(structs.replace(self._settings, classes=classes))

    def _of_labels(self) -> Reader | None:
        """Return a reader in which the texts of the labels are the only features, if labels are texts."""
        return None

    def check_positive(self, *, alone: bool = False) -> None:
        """Check that some label is the one that counts as 1, where such a text was given (``positive``).

        Parameters
        ----------
        alone : bool
            Whether data whose labels are all of one other text is good: it may have no positives.

        Raises
        ------
        ValueError
            None is. The message lists the labels.

        Notes
        -----
        Reads all files up to the first positive, also those of other splits, and nothing of a stream.
        """
        positive, column = self._schema.get("positive"), self._schema.get("label")
        labels = self._of_labels()
        if positive is None or column is None or labels is None or not self.repeatable:
            return
        names = FeatureNames(_MOST_LABELS)
        sought = hash_cells([positive], field_of(column))[0]
        counts: Counter[int] = Counter()
        for batch in labels._with(Settings(self.batch_size, "skip", names=names)):
            if np.any(batch.keys == sought):
                return
            for key, count in zip(*np.unique(batch.keys, return_counts=True), strict=True):
                if int(key) in names:
                    counts[int(key)] += int(count)
        if not counts or (alone and len(counts) == 1):
            return
        texts = [f"{names[key].removeprefix(f'{column}=')!r} ({count:,})" for key, count in counts.most_common(8)]
        more = f" and {len(counts) - len(texts):,} more" if len(counts) > len(texts) else ""
        raise ValueError(
            f"no label of {self.path} is {positive!r}, which positive (--positive) names: column {column!r} holds "
            f"{', '.join(texts)}{more}"
        )

    @property
    def cursor(self) -> Cursor:
        """Cursor of the pass that began last, for `position`; cheap enough to read after each batch."""
        return self._seen.cursor

    def position(self, cursor: Cursor | None = None) -> dict[str, Any]:
        """Return the position of the pass that began last, after the last batch that it returned.

        Parameters
        ----------
        cursor : Cursor, optional
            An earlier value of `cursor`.

        Returns
        -------
        dict
            A JSON value for `resume`. Before the first batch, the beginning of the data.
        """
        settings = self._settings
        return {
            "format": self._name,
            "files": [[file.name, file.size()] for file in self._files],
            "shard": [settings.rank, settings.num_splits],
            "place": list(self._seen.cursor if cursor is None else cursor),
            **({} if settings.order is None else {"order": list(settings.order)}),
        }

    def fingerprint(self) -> dict[str, Any]:
        """Describe the data, to distinguish it from other data and from the same data read in another way.

        Returns
        -------
        dict
            As JSON: format, schema, batch size and split; of each file its name, its size where that is known, and a
            digest of its first 64 KiB (of the first 1,000 files).
        """
        settings = self._settings
        return {
            "format": self._name,
            "schema": dict(self._schema),
            "batch_size": settings.batch_size,
            "shard": [settings.rank, settings.num_splits],
            **({"without": list(settings.without)} if settings.without else {}),
            **({"without_lines": settings.without_lines} if settings.without_lines else {}),
            "files": [file_fingerprint(file, headed=i < _MOST_HEADS) for i, file in enumerate(self._files)],
        }

    def changes(self, earlier: Mapping[str, Any], *, appended: bool = False) -> str | None:
        """Describe the first difference between this reader's data and an earlier `fingerprint`.

        Parameters
        ----------
        earlier : mapping
            The earlier `fingerprint`.
        appended : bool
            Whether files may have grown at their ends, and more files may follow them.

        Returns
        -------
        str or None
            A sentence without its end; None where nothing differs.
        """
        return difference(earlier, self.fingerprint(), self._files, appended=appended)

    def resume(self, position: Mapping[str, Any]) -> Reader:
        """Resume at the position of another pass: with the very next example.

        Parameters
        ----------
        position : mapping
            Result of `position` of a reader of the same files. It determines the order of the files, too.

        Returns
        -------
        Reader
            A reader whose passes begin there. The batch size, the threads and the handling of malformed lines are those
            of this reader.

        Raises
        ------
        ValueError
            The position belongs to other files, another format or another split, or is invalid. While iterating: the
            size of a file has changed.

        Notes
        -----
        A plain file is read from there on; a compressed one and a stream are read from their beginning, skipping
        earlier examples.
        """
        found = place_of(position, self._name, [file.name for file in self._files])
        return self._with(structs.replace(self._settings, **found))

    @property
    def path(self) -> str:
        """The file; of several, the first and how many there are."""
        return first_of([file.name for file in self._files])

    @property
    def paths(self) -> tuple[str, ...]:
        """All files."""
        return tuple(file.name for file in self._files)

    @property
    def format(self) -> str:
        """Name of the format, such as "libsvm". Models record it: keys of other formats stand for other features."""
        return self._name

    @property
    def schema(self) -> dict[str, Any]:
        """The options of the function that made the reader that define the features, as JSON.

        Where it reads all columns of which nothing is said, ``categorical`` has them after a pass.
        """
        return {**self._schema, **({"categorical": list(self._others)} if self._others else {})}

    def _note_columns(self, names: Sequence[str]) -> None:
        self._others.update(dict.fromkeys(names))

    @property
    def resumed(self) -> bool:
        """Whether the passes begin at a position, not at the beginning."""
        return self._settings.begin != BEGINNING

    @property
    def repeatable(self) -> bool:
        """Whether there can be more than one pass: a stream is read once."""
        return all(file.seekable for file in self._files)

    def why_empty(self) -> str:
        """Explain why the last pass had no examples: no lines, or only malformed ones, of which the first is described.

        Returns
        -------
        str
            A sentence without its end.
        """
        if not self.skipped:
            return f"{self.path} has no examples"
        message = f"{self.path} has no examples: all of its {self.skipped:,} lines are malformed, and were skipped"
        if not self.repeatable:
            return message
        try:
            for _ in self._with(structs.replace(self._settings, on_error="raise", names=None)):
                pass
        except ValueError as error:
            return f"{message}; the first is {str(error).partition('; on_error=')[0]}"
        return message

    @property
    def names(self) -> FeatureNames | None:
        """The names of features that passes collect, if any."""
        return self._settings.names

    @property
    def batch_size(self) -> int:
        """Examples in each batch but the last."""
        return self._settings.batch_size

    @property
    def skipped(self) -> int:
        """Malformed lines left out by the last pass, or so far by the current one."""
        return self._seen.skipped

    def progress(self) -> float:
        """Return the fraction of the files, or of the split, that the last or the current pass has consumed.

        Returns
        -------
        float
            From 0 (no pass has begun) to 1 (it has ended), in bytes on the disk, compressed ones where they are; runs
            ahead of the batches by a block. Of a stream 0 until it ends.
        """
        return self._seen.fraction
