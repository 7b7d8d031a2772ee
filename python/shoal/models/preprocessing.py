"""Preprocessing of a reader's batches for a model: sampling, shuffling, warm-up, sorting by hash.

    reader --> Sampling: some negatives --> Shuffle: within a buffer --> warm-up: small batches at first
           --> sort: one batch ahead --> (batch, KeyBatch)

`Plan.batches` combines them. The reader is iterated by the caller's thread: an iterable that belongs to a thread is
used by that thread alone.

Invariants
    I1  The batches are a function of the data, the seed, the number of the pass and the number of examples learned from
        before: not of time or threads.
    I2  A batch is passed on before the error that the reader raised after it.

Threads: `sorted_ahead` sorts the next batch in a helper thread while the consumer works on the current one. The helper
ends with the generator. Small batches, which take longer to pass to a thread than to sort, are sorted when they are
needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.prefetch import prefetch_map
from shoal.base.scalars import whole
from shoal.data import Batch
from shoal.data.batch import take
from shoal.data.rebatch import joined, rows_of
from shoal.table.arrays import mix

# Batches in the buffer of ``shuffle=True``.
SHUFFLE_BATCHES = 16

# A batch of a warm-up has at most this fraction of the examples learned from before, or this number if that is more.
WARM_UP_SHARE = 0.1
WARM_UP_LEAST = 32

# Features of the batches that are sorted ahead: smaller batches take longer to pass to a thread than to sort ("Sorting
# ahead" in bench/training.md).
WORTH_A_THREAD = 16384

_TO_UNIT = 2.0**-64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds that differ by a little, mixed, differ by a lot


class Sampling(msgspec.Struct, frozen=True):
    """Sampling of negatives: which are dropped, and the weight of the others.

    Example number i of a fit (counted on over its passes) is kept if it is positive, or if a hash of (seed, i), read as
    a number in [0, 1), is below ``rate``. The weight of a kept negative is multiplied by 1 / rate, so that the
    expectation of every sum over negatives, of gradients and of metrics, is the sum over all of them.
    """

    # Above 0, at most 1.
    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"negative_rate is {self.rate!r}: pass the share of negatives to keep, above 0 up to 1")

    def chosen(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Return which of the examples from number ``first`` on are kept if they are negative."""
        start = (self.seed * _GOLDEN + first) % 2**64
        drawn = mix(mix(np.uint64(start) + np.arange(count, dtype=np.uint64)))
        return drawn * _TO_UNIT < self.rate

    def apply(self, batch: Batch, first: int) -> Batch:
        """Return the kept examples of a batch whose first example has the number ``first``."""
        if self.rate == 1.0:
            return batch
        rows = np.flatnonzero((batch.labels == 1) | self.chosen(first, len(batch)))
        kept = take(batch, rows)
        scale = np.where(kept.labels == 1, np.float32(1), np.float32(1 / self.rate))
        weights = scale if kept.weights is None else kept.weights * scale
        return Batch(kept.labels, kept.indptr, kept.keys, kept.values, weights, kept.fields)


def class_weighted(batch: Batch, weights: tuple[float, ...]) -> Batch:
    """Multiply the weights of examples of the labels 0, 1, ... by ``weights``."""
    each = np.array(weights, np.float32)
    # A label that is none of a class has an error later, before anything is learned.
    numbers = np.minimum(np.where(batch.labels > 0, batch.labels, 0), len(each) - 1)
    scale = each[numbers.astype(np.intp)]
    weighed = scale if batch.weights is None else batch.weights * scale
    return Batch(batch.labels, batch.indptr, batch.keys, batch.values, weighed, batch.fields)


def shuffled(batches: Sequence[Batch], seed: Sequence[int]) -> Iterator[Batch]:
    """Permute the examples of some batches; the batches keep their sizes. Holds them twice."""
    if not batches:
        return
    whole = joined(batches)
    order = np.random.default_rng(seed).permutation(len(whole))
    ends = np.cumsum([len(batch) for batch in batches])
    for rows in np.split(order, ends[:-1]):
        yield take(whole, rows)


def warmed_up(batches: Iterable[Batch], learned: int, workers: int = 1) -> Iterator[Batch]:
    """Cut batches into smaller ones while the model has learned from few examples; ``learned`` is their number.

    With several workers, each of which has a part of the examples, the batches of a clock together are those of one.

    A step adds the gradients of a batch. While the model is far from its optimum they all have the same sign, and FTRL
    and Adagrad, which use the square of the sum, reduce the steps of frequent features permanently. Batches that grow
    with the number of examples avoid this (compare Smith et al., "Don't decay the learning rate, increase the batch
    size", ICLR 2018), at the cost of about fifty small batches.
    """
    for batch in batches:
        begin = 0
        while begin < len(batch):
            most = max(WARM_UP_LEAST, int(WARM_UP_SHARE * learned)) // workers
            end = min(len(batch), begin + max(1, most))
            yield rows_of(batch, begin, end)
            learned += workers * (end - begin)
            begin = end


def shuffle_buffer(shuffle: bool | int) -> int:
    """Return the batches of the buffer, 0 for the order of the data."""
    if isinstance(shuffle, bool):
        return SHUFFLE_BATCHES if shuffle else 0
    return min(whole("shuffle", shuffle, 0, "the number of batches to shuffle among, True for 16, or 0"), sys.maxsize)


def examples_of(reader: Iterable[Batch]) -> Generator[Batch]:
    """Iterate, and close the iterator in any case at the end: a reader's thread then ends with the pass."""
    iterator = iter(reader)
    try:
        for batch in iterator:
            check_batch(batch)
            yield batch
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def check_batch(batch: object) -> None:
    """Raise TypeError if this is not a batch, ValueError if a value is not finite, since it would spoil the weights."""
    if not isinstance(batch, Batch):
        raise TypeError(f"a batch is a {type(batch).__name__}: pass a shoal.Batch, or iterate a reader")
    values = batch.values
    # Minimum and maximum are NaN if any value is, and need no temporary array.
    if values is not None and len(values) and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = np.flatnonzero(~np.isfinite(values))
        at = int(bad[0])
        example = int(np.searchsorted(batch.indptr, at, side="right")) - 1
        raise ValueError(
            f"example {example} of a batch has the value {values[at]} for key {batch.keys[at]} ({len(bad)} of "
            f"{len(values)} values are not finite): leave such features out, or replace the values"
        )


Made = TypeVar("Made")


def sorted_ahead(
    batches: Iterable[Batch],
    sort: Callable[[Batch], Made],
    ahead: Callable[[Batch], Made],
    *,
    overlap: bool,
    always: bool = False,
) -> Generator[tuple[Batch, Made], None, None]:
    """Sort the keys of each batch; if ``overlap``, ahead where it is faster, while the consumer uses the one before.

    ``always``: ahead whatever its size.

    ``sort`` is called by this thread, ``ahead`` by the helper.
    """

    def background(batch: Batch) -> Callable[[Batch], Made] | None:
        return ahead if always or (overlap and batch.nnz >= WORTH_A_THREAD) else None

    return prefetch_map(batches, sort, background, "shoal sort")
