"""Datasets of Ray as examples: columns become keys in Ray's tasks or in the worker, and a shard becomes a `Reader`.

    ray.data.Dataset --map_batches(Hash)--> keys, values, label   hashed before, by tasks of Ray on any node
    shard            --Hash.read---------> Reader of shoal.Batch  hashed there, where it was not before
    ray.data.Dataset --map_batches(HashColumns)--> int64 columns  for iter_torch_batches and shoal.torch

A block of Ray is an Arrow table in shared memory. Texts are hashed where they are, and the keys of a hashed block are
the arrays of its batches: neither is copied.

Invariants
    D1  A feature has the key that `shoal.read_parquet` and `shoal.read_csv` give it.
    D2  The examples of a pass are those of the dataset's iterator, in its order.
    D3  A pass holds two groups of batches, the block that they come from, and ``prefetch_batches`` blocks more: it asks
        for no more before the consumer takes some.

Threads: `Hash` and `HashColumns` are immutable. A pass over a shard runs in a thread of its own, as of any `Reader`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.base.defaults import BATCH_SIZE
from shoal.data import Batch, FeatureNames, Reader, hash_strings
from shoal.data.arrow import ArrowSource, TableReader
from shoal.data.columns import PASSED_OVER, Columns
from shoal.data.hashing import MISSING_TEXT
from shoal.data.interactions import Interactions, field_of
from shoal.data.record_batch import RowError, featured, keys_of, pyarrow
from shoal.data.settings import FileSplit, Settings

_ROWS = 1 << 14  # of a piece of a block that is hashed at once
_COLUMNS = ("label", "weight", "keys", "values", "fields")  # of a hashed block


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash:
    """Columns of a `ray.data` dataset as features: a step of ``map_batches``, and the reader of a shard.

    Parameters
    ----------
    label, categorical, numeric, weight, positive, lists, vectors, labels, interactions
        As `shoal.read_parquet`.
    with_fields : bool
        Whether hashed blocks have the field of each feature, which click models of `shoal.torch` need.

    Notes
    -----
    As a step it takes ``batch_format="pyarrow"`` and makes the columns ``keys`` (lists of uint64), ``values`` (lists of
    float32, where a column is numeric or a vector), ``fields`` (lists of uint64), ``label`` and ``weight`` (float32).
    Interactions have no field.

    Examples
    --------
    >>> hashed = Hash(label="click", numeric=["price"])
    >>> dataset = dataset.map_batches(hashed, batch_format="pyarrow", zero_copy_batch=True)  # doctest: +SKIP
    >>> model.fit(hashed.read(ray.train.get_dataset_shard("train")))  # doctest: +SKIP
    """

    label: str | None
    categorical: Sequence[str] | None = None
    numeric: Sequence[str] = ()
    weight: str | None = None
    positive: str | float | None = None
    lists: Mapping[str, str] = field(default_factory=dict)
    vectors: Sequence[str] = ()
    labels: Sequence[str] = ()
    interactions: Interactions = ()
    with_fields: bool = False
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # see `featured`

    def __post_init__(self) -> None:
        if self.columns.pairs and self.with_fields:
            raise ValueError("an interaction belongs to no field: leave out the interactions or with_fields")
        if "keys" in (*self.lists, *self.vectors):
            what = "lists has" if "keys" in self.lists else "vectors has"
            raise ValueError(f"{what} 'keys', which is the name of a column of hashed blocks: rename the column")

    @property
    def columns(self) -> Columns:
        """The roles of the columns."""
        return Columns(
            label=self.label,
            categorical=self.categorical,
            numeric=self.numeric,
            weight=self.weight,
            positive=self.positive,
            lists=self.lists,
            vectors=self.vectors,
            labels=self.labels,
            interactions=self.interactions,
        )

    def __call__(self, table: Any) -> Any:
        """Hash a block.

        Parameters
        ----------
        table : pyarrow.Table

        Returns
        -------
        pyarrow.Table

        Raises
        ------
        TypeError
            The block is not an Arrow table.
        ValueError
            A column is not there, or a cell cannot be used; the message names the row within the block.
        """
        columns = self.columns
        made: list[Any] = []
        first = 0
        for piece in _pieces(table, type(self).__name__):
            try:
                batch = featured(
                    *(piece, columns, None),
                    fielded=self.with_fields,
                    labelled=columns.label is not None,
                    warned=self._warned,
                )
            except RowError as error:
                raise ValueError(f"row {first + error.row} of a block, column {error.column!r}: {error}") from None
            made.append(self._hashed(batch))
            first += piece.num_rows
        return pyarrow().Table.from_batches(made)

    def read(
        self,
        shard: Any,
        *,
        batch_size: int = BATCH_SIZE,
        prefetch_batches: int = 1,
        names: FeatureNames | None = None,
    ) -> Reader:
        """Read a dataset, or a worker's shard of one, in batches of examples.

        Parameters
        ----------
        shard : ray.data.Dataset or ray.data.DataIterator
            Such as ``ray.train.get_dataset_shard("train")``. Of the columns, or of those that this step has hashed.
        batch_size : int
            Examples of a batch.
        prefetch_batches : int
            Blocks that Ray fetches ahead.
        names : FeatureNames, optional
            Collects the names of features, where blocks are hashed here.

        Returns
        -------
        Reader
            Of the format "arrow", with the options of this step: a model that learns from it can be used with
            `shoal.read_parquet` and `shoal.read_csv`. Each ``for`` is a pass over the shard. It has no `split`: Ray has
            divided the data.

        Raises
        ------
        TypeError
            ``shard`` has no ``iter_batches``.
        ValueError
            A parameter is out of range.
        """
        if not hasattr(shard, "iter_batches"):
            raise TypeError(
                f"shard is a {type(shard).__name__}: pass a ray.data.Dataset, or a shard of one, as "
                f"ray.train.get_dataset_shard() returns it"
            )
        if prefetch_batches < 0:
            raise ValueError(f"prefetch_batches is {prefetch_batches}: pass 0 or more")
        return _ShardReader(_ShardSource(shard, prefetch_batches), self.columns, Settings(batch_size, names=names))

    def _hashed(self, batch: Batch) -> Any:
        """Wrap the arrays of a batch as columns."""
        arrow = pyarrow()
        columns: dict[str, Any] = {} if self.label is None else {"label": arrow.array(batch.labels)}
        if self.weight is not None:
            weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights
            columns["weight"] = arrow.array(weights)
        offsets = arrow.array(batch.indptr)
        for name, values in (("keys", batch.keys), ("values", batch.values), ("fields", batch.fields)):
            if values is not None:
                columns[name] = arrow.LargeListArray.from_arrays(offsets, arrow.array(values))
        return arrow.RecordBatch.from_pydict(columns)


@dataclass(frozen=True, slots=True)
class HashColumns:
    """Columns of texts as columns of keys: a step of ``map_batches`` before ``iter_torch_batches``.

    Parameters
    ----------
    columns : sequence of str
        Those that become int64 keys (the 64 bits of the readers' uint64); the others stay. An empty cell has the key
        that `shoal.torch.Fields` gives it.

    Examples
    --------
    >>> dataset.map_batches(HashColumns(["site", "ad"]), batch_format="pyarrow")  # doctest: +SKIP
    """

    columns: Sequence[str]
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # see `featured`

    def __post_init__(self) -> None:
        if isinstance(self.columns, str) or not all(isinstance(name, str) for name in self.columns):
            raise TypeError(f"columns is {self.columns!r}: pass a list of names of columns")

    def __call__(self, table: Any) -> Any:
        """Hash the columns of a block, a pyarrow.Table.

        Raises
        ------
        TypeError
            The block is not an Arrow table.
        ValueError
            A column is not there, or has no text.
        """
        arrow = pyarrow()
        made = []
        for piece in _pieces(table, type(self).__name__):
            for name in self.columns:
                at = piece.schema.get_field_index(name)
                if at < 0:
                    raise ValueError(f"column {name!r} is not there: the columns are {', '.join(piece.schema.names)}")
                number = field_of(name)
                keys, there = keys_of(piece.column(name), number, name, warned=self._warned)
                keys[~there] = hash_strings([MISSING_TEXT], number)[0]
                piece = piece.set_column(at, name, arrow.array(keys.view(np.int64)))
            made.append(piece)
        return arrow.Table.from_batches(made)


def _pieces(table: Any, step: str) -> list[Any]:
    """Divide a block into record batches that are hashed at once."""
    arrow = pyarrow()
    if not isinstance(table, arrow.Table):
        raise TypeError(
            f"{step} takes Arrow tables, and got a {type(table).__name__}: pass batch_format='pyarrow' to map_batches"
        )
    return table.to_batches(_ROWS) or [arrow.RecordBatch.from_pylist([], schema=table.schema)]


class _ShardSource(ArrowSource):
    """The blocks of a dataset's iterator, a pass at a time."""

    def __init__(self, shard: Any, prefetch_batches: int) -> None:
        super().__init__(shard, "a dataset of Ray")
        self.seekable = True
        self._prefetch_batches = prefetch_batches

    def size(self) -> int | None:
        """Return None: the number of rows of a shard is not known."""
        return None

    def stream(self) -> Any:
        """Refuse: `blocks` yields tables, whose types may differ."""
        raise TypeError(f"{self.name} is not an Arrow stream")

    def blocks(self) -> Iterator[Any]:
        """Begin a pass."""
        blocks = self._data.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=self._prefetch_batches
        )
        return iter(blocks)


class _ShardReader(TableReader):
    """The examples of a shard."""

    def __init__(self, source: _ShardSource, columns: Columns, settings: Settings) -> None:
        super().__init__((source,), "arrow", columns, settings)
        self._source = source

    def split(self, rank: int, n: int) -> Reader:
        """Refuse: Ray has divided the data."""
        if n == 1 and rank == 0:
            return self
        raise ValueError(
            "Ray divides a dataset among the workers: pass it as datasets={...} to the trainer, or call streaming_split"
        )

    def with_columns(self, categorical: Sequence[str] | None = None) -> Reader:
        """Return this reader for given columns; those of a dataset are known after a pass."""
        return self if categorical is None else super().with_columns(categorical)

    def splits(self, split_bytes: int) -> list[Reader]:
        """Refuse: Ray has divided the data."""
        raise ValueError("Ray divides a dataset among the workers: train from ray.train.get_dataset_shard()")

    def _tables(self, split: FileSplit) -> Generator[tuple[int, float, Any]]:
        first = 0
        for block in self._source.blocks():
            for piece in block.to_batches(None if _is_hashed(block.schema) else _ROWS):
                yield first, first / sys.maxsize, self._needed(piece)
                first += piece.num_rows

    def _needed(self, piece: Any) -> Any:
        names = piece.schema.names
        if _is_hashed(piece.schema):
            return piece.select([name for name in names if name in _COLUMNS])
        kinds = self._kinds_of(names)
        return piece.select([name for name, kind in zip(names, kinds, strict=True) if kind != PASSED_OVER])

    def _batch(self, file: Any, table: Any, first: int) -> Batch:
        if not _is_hashed(table.schema):
            return super()._batch(file, table, first)
        return _batch_of(table, labelled=self._labelled, fielded=self._settings.fielded)


def _is_hashed(schema: Any) -> bool:
    arrow = pyarrow()
    at = schema.get_field_index("keys")
    return at >= 0 and schema.field(at).type == arrow.large_list(arrow.uint64())


def _batch_of(piece: Any, *, labelled: bool, fielded: bool) -> Batch:
    """Return the examples of a hashed record batch: its arrays, without a copy."""
    names = piece.schema.names
    labels: NDArray[np.float32] = np.full(piece.num_rows, np.nan, np.float32)
    weights = None
    if labelled:
        if "label" not in names:
            raise ValueError("the blocks were hashed without labels: pass label= to shoal.ray.Hash")
        labels = piece.column("label").to_numpy()
        if "weight" in names:
            weights = piece.column("weight").to_numpy()
            weights = None if np.all(weights == 1) else weights
    if fielded and "fields" not in names:
        raise ValueError("the blocks were hashed without fields: pass with_fields=True to shoal.ray.Hash")
    indptr, keys = _lists(piece.column("keys"))
    values = _lists(piece.column("values"))[1] if "values" in names else None
    fields = _lists(piece.column("fields"))[1] if fielded else None
    return Batch(labels, indptr, keys, values, weights, fields)


def _lists(column: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the offsets from 0 of a column of lists, and its values."""
    offsets: NDArray[np.int64] = column.offsets.to_numpy()
    begin, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values: NDArray[Any] = column.values.to_numpy()[begin:end]
    return offsets - begin if begin else offsets, values
