"""Inputs: a batch's features as tensors, the input of models: what arrangement.py finds, without a copy.

Threads: `inputs` is a pure function, safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.base.scalars import whole
from shoal.data import Batch
from shoal.models.arrangement import ArrangedItems, arrange, factors_of, keys_of
from shoal.models.features import Features


class Padded(NamedTuple):
    """A sequence of which every example has the same number of places.

    Attributes
    ----------
    keys : int64[n, L]
        0 behind the items of an example.
    mask : bool[n, L]
        Where there is an item.
    side : dict of int64[n, L]
        The keys of the side columns of texts.
    numeric : float32[n, L, k] or None
        Those of numbers.
    """

    keys: Tensor
    mask: Tensor
    side: Mapping[str, Tensor]
    numeric: Tensor | None


class Items(NamedTuple):
    """The items of a list or sequence, jagged.

    Attributes
    ----------
    keys : int64[nnz]
    offsets : int64[n + 1]
        Where the items of each example begin, and the number of all.
    weights : float32[nnz] or None
        The factors of their rows; None: 1.
    side : dict of int64[nnz]
        The keys of the side columns of texts.
    numeric : float32[nnz, k] or None
        The numbers of the side columns of numbers.
    """

    keys: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    side: Mapping[str, Tensor] = {}
    numeric: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Items of each example, int64[n]."""
        return self.offsets.diff()

    @property
    def example(self) -> Tensor:
        """The example of each item, int64[nnz]."""
        return torch.repeat_interleave(self.lengths, output_size=self.keys.shape[0])

    def padded(self, max_len: int) -> Padded:
        """Return ``max_len`` places for each example: its last items, in their order, from place 0."""
        place, mask = self.places(max_len)
        filled = [_filled(one, place, mask) for one in (self.keys, *self.side.values())]
        numeric = None if self.numeric is None else _filled(self.numeric, place, mask)
        return Padded(filled[0], mask, dict(zip(self.side, filled[1:], strict=True)), numeric)

    def places(self, max_len: int) -> tuple[Tensor, Tensor]:
        """Return the item of each place, int64[n, L], and whether there is one, bool[n, L]."""
        step = torch.arange(max_len)
        mask = step < self.lengths.unsqueeze(1)
        first = self.offsets[1:] - self.lengths.clamp(max=max_len)
        return torch.where(mask, first.unsqueeze(1) + step, 0), mask


def _filled(given: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    if not given.shape[0]:
        return given.new_zeros((*place.shape, *given.shape[1:]))
    found = given[place]
    return found.masked_fill(~mask.reshape(*mask.shape, *[1] * (found.dim() - mask.dim())), 0)


class Inputs(NamedTuple):
    """A batch of examples, the input of `shoal.torch.models`.

    Attributes
    ----------
    keys : int64[n, fields]
        One key for each fixed field, the 64 bits of the reader's uint64.
    values : float32[n, fields] or None
        The factor of the row of each key; None: 1.
    dense : float32[n, d] or None
        Numbers, which have no rows.
    lists : dict of Items
        By the names of the features.
    sequences : dict of Items
    labels : dict of float32[n]
        Those of the tasks but the first, by their names; NaN where an example has none.
    """

    keys: Tensor
    values: Tensor | None = None
    dense: Tensor | None = None
    lists: Mapping[str, Items] = {}
    sequences: Mapping[str, Items] = {}
    labels: Mapping[str, Tensor] = {}


def inputs(batch: Batch, features: int | Features) -> Inputs:
    """Arrange a batch's features as tensors.

    Parameters
    ----------
    batch : Batch
    features : Features or int
        The description of the features, which needs the batch's fields (`shoal.data.Reader.with_fields`). A number:
        every example has this many features, and the i-th one is that of field i.

    Returns
    -------
    Inputs
        ``values`` is None if all are 1.

    Raises
    ------
    ValueError
        The batch has no fields, an example has two features of a fixed field, the columns beside a sequence have
        another number of items, or a vector another size: the message names example and feature. With a number: an
        example has another number of features.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"batch is a {type(batch).__name__}: pass a shoal.Batch, of which a reader yields many")
    if isinstance(features, Features):
        found = arrange(batch, features)
        return Inputs(
            _tensor(found.keys),
            _tensor(found.values),
            _tensor(found.dense),
            _items(found.lists),
            _items(found.sequences),
            {name: _tensor(label) for name, label in found.labels.items()},
        )
    features, lengths = whole("features", features, 1), np.diff(batch.indptr)
    if len(bad := np.flatnonzero(lengths != features)):
        raise ValueError(
            f"example {bad[0]} has {lengths[bad[0]]} features, and the model {features} fields: read the fields "
            f"(reader.with_fields()), and pass Features in place of {features}"
        )
    return Inputs(_tensor(keys_of(batch.keys.reshape(-1, features))), _tensor(factors_of(batch.values, features)))


def _tensor(array: npt.NDArray[Any] | None) -> Any:
    return None if array is None else torch.from_numpy(array)


def _items(given: Mapping[str, ArrangedItems]) -> dict[str, Items]:
    return {
        name: Items(
            _tensor(its.keys),
            _tensor(its.offsets),
            _tensor(its.weights),
            {column: _tensor(keys) for column, keys in its.side.items()},
            _tensor(its.numeric),
        )
        for name, its in given.items()
    }
