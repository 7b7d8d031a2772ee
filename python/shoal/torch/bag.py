"""EmbeddingBag: one row for every bag of keys.

    keys[n, l], or keys[nnz] and offsets[n], or a Batch --> rows of the unique keys --pool--> float32[n, dim]
    gradient float32[n, dim] --through the pooling, summed per unique key--> push

The arithmetic is csrc/kernel/pooling.h's. Threads: as `shoal.torch.sparse`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal import _core
from shoal.data import Batch
from shoal.table.table import Table
from shoal.torch import ops
from shoal.torch.sparse import Keys, PendingLookup, Rows, SparseModule, floats_of, keys_of

Mode: TypeAlias = Literal["sum", "mean", "sqrtn", "max"]
_MODES = ("sum", "mean", "sqrtn", "max")


class Bags(NamedTuple):
    """A batch of bags: bag i has the entries from indptr[i] to indptr[i + 1]."""

    indptr: npt.NDArray[np.int64]
    values: Tensor | None  # float32, one for each entry


class Pooled(NamedTuple):
    """The state that a forward keeps for backward."""

    lookup: PendingLookup
    indptr: npt.NDArray[np.int64]
    winners: npt.NDArray[np.uint32] | None
    rows: Rows | None  # of the unique keys, if the values need a gradient
    pushes: bool


class EmbeddingBag(SparseModule):
    """Rows of a table, pooled bag by bag; the counterpart of ``nn.EmbeddingBag``.

    Parameters
    ----------
    table : shoal.Table
    mode : {"sum", "mean", "sqrtn", "max"}
        "sqrtn" is the sum divided by the root of the number of keys. With weights "mean" divides the weighted sum by
        the sum of the weights, "sqrtn" by the root of the sum of their squares, and "max" takes the greatest of the
        weighted rows.
    include_last_offset : bool
        Whether ``offsets`` ends with the number of keys, as an ``indptr`` does.

    Notes
    -----
    As in torch, an empty bag gives zeros, and "max" takes the first of equal entries. A bag whose weights add up to 0
    gives zeros too where it is divided by them. Sums are computed in float64, rounded once, and bit-identical for any
    number of threads. Gradients are pushed as by `Embedding`.

    Examples
    --------
    >>> import torch
    >>> store = shoal.local()
    >>> bag = EmbeddingBag(store.table("tag", dim=4), mode="mean")
    >>> bag(torch.tensor([7, 3, 7]), torch.tensor([0, 2, 2])).shape
    torch.Size([3, 4])
    """

    def __init__(self, table: Table, mode: Mode = "sum", *, include_last_offset: bool = False) -> None:
        super().__init__(table)
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        """Return the table and the pooling, for ``repr``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self, keys: Tensor | Batch, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Read the rows of ``keys`` and pool those of each bag.

        Parameters
        ----------
        keys : int64 or uint64 tensor [n, l] or [nnz], or shoal.Batch
            [n, l]: n bags of l keys. [nnz]: all bags, concatenated. A batch: its examples are the bags, its values, if
            it has any, the weights of their keys.
        offsets : int64 or int32 tensor [n], or [n + 1] with ``include_last_offset``
            Where each bag begins; with keys [nnz] only.
        per_sample_weights : float32 tensor of the keys' shape, optional
            Factor of each row. Its gradient is computed.

        Returns
        -------
        float32 tensor [n, dim]

        Raises
        ------
        TypeError, ValueError
            The arguments are inconsistent.
        WrongProcessError
            The store was made before a fork, by the parent.
        ShoalError
            This pull failed, or an earlier push did.

        Notes
        -----
        Blocks until the rows have arrived.
        """
        if torch.compiler.is_compiling() and isinstance(keys, Tensor):
            return ops.pool(self, keys, offsets, per_sample_weights)
        return self.finish(*self.begin(keys, offsets, per_sample_weights))

    def begin(
        self, keys: Tensor | Batch, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[PendingLookup, Bags]:
        """Begin the pull: the first half of forward."""
        given, bags = self._bags(keys, offsets, per_sample_weights)
        return self.begin_lookup(given), bags

    def finish(self, lookup: PendingLookup, bags: Bags) -> Tensor:
        """Wait for the rows and pool them: the second half of forward."""
        values = bags.values
        if self.records or (values is not None and values.requires_grad and torch.is_grad_enabled()):
            anchor = self.anchor if self.records else None
            if anchor is not None and not self.training:
                anchor = _Unlearned.apply(anchor, self)  # type: ignore[no-untyped-call]
            out: Tensor = _Pool.apply(anchor, values, self, lookup, bags)  # type: ignore[no-untyped-call]
            return out
        return self.pool(lookup, bags)[0]

    def _bags(self, keys: Tensor | Batch, offsets: Tensor | None, weights: Tensor | None) -> tuple[Keys, Bags]:
        if isinstance(keys, Batch):
            if offsets is not None or weights is not None:
                raise ValueError("a Batch has its own offsets and values: pass it alone")
            values = None if keys.values is None else torch.from_numpy(keys.values)
            self._check_weights(values, (keys.nnz,))
            return keys.keys, Bags(keys.indptr, values)
        given = keys_of(keys)
        self._check_weights(weights, tuple(keys.shape))
        if keys.dim() == 2:
            if offsets is not None:
                raise ValueError(f"keys {list(keys.shape)} are bags of {keys.shape[1]} keys: pass no offsets")
            bags, length = keys.shape
            indptr = np.arange(bags + 1, dtype=np.int64) * length
        elif keys.dim() != 1 or offsets is None:
            raise ValueError(f"keys must be [n, l], or [nnz] with offsets[n], got {list(keys.shape)}")
        else:
            indptr = self._indptr(offsets, len(given))
        return given, Bags(indptr, weights)

    def _indptr(self, offsets: Tensor, entries: int) -> npt.NDArray[np.int64]:
        if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"offsets must be int64[n], got {offsets.dtype}{list(offsets.shape)}")
        begins: npt.NDArray[np.int64] = offsets.detach().contiguous().numpy().astype(np.int64, copy=False)
        if self.include_last_offset:
            if not len(begins):
                raise ValueError("include_last_offset: offsets must end with the number of keys, got none")
            if begins[-1] != entries:
                raise ValueError(f"offsets must end with the number of keys, {entries:,}, got {begins[-1]:,}")
            indptr = begins
        else:  # no bags and no keys: the offsets of no bags are one 0
            indptr = np.append(begins, entries) if len(begins) or entries else np.zeros(1, np.int64)
        if indptr[0] != 0:
            raise ValueError(f"offsets must begin with 0, got {begins[0] if len(begins) else 'none'}")
        if len(falls := np.flatnonzero(np.diff(indptr) < 0)):
            at = int(falls[0]) + 1
            after = f"{indptr[at]:,}" if at < len(begins) else f"the number of keys, {entries:,}"
            raise ValueError(f"offsets falls at position {at}: from {indptr[at - 1]:,} to {after}")
        return indptr

    @staticmethod
    def _check_weights(weights: Tensor | None, shape: tuple[int, ...]) -> None:
        if weights is None:
            return
        if tuple(weights.shape) != shape:
            raise ValueError(
                f"per_sample_weights must have the shape of the keys, {list(shape)}, got {list(weights.shape)}"
            )
        if weights.dtype != torch.float32:
            raise TypeError(f"per_sample_weights must be float32, got {weights.dtype}: pass weights.float()")

    def pool(
        self, lookup: PendingLookup, bags: Bags, *, keep: bool = False, pushes: bool = False
    ) -> tuple[Tensor, Pooled]:
        """Pool the rows, without autograd; ``keep`` the rows for the gradient of the values."""
        lookup.begin(self._table, self.take_buffer)
        rows = lookup.rows()
        out = torch.empty((len(bags.indptr) - 1, self.dim))
        values = None if bags.values is None else floats_of(bags.values)
        native, workers = lookup.batch.native, self._table.workers
        winners = _core.pool_rows(self.mode, bags.indptr, values, native, rows, out.numpy(), workers)
        if not keep:
            self.return_buffer(rows)
        return out, Pooled(lookup, bags.indptr, winners, rows if keep else None, pushes)

    def push_pooled(self, pooled: Pooled, values: Tensor | None, grad: Tensor) -> Tensor | None:
        """Push the gradient of the bags; return the gradient of the values, if their rows were kept."""
        lookup, indptr, winners, rows, pushes = pooled
        native, workers = lookup.batch.native, self._table.workers
        grads = floats_of(grad)
        weights = None if values is None else floats_of(values)
        slopes = None
        if rows is not None and values is not None:
            found = _core.pool_values_gradient(self.mode, indptr, weights, native, rows, grads, winners, workers)
            slopes = torch.from_numpy(found).view(values.shape)
        if pushes:
            sums = self.take_buffer(len(lookup.batch))
            _core.pool_gradient(self.mode, indptr, weights, native, grads, winners, sums, workers)
            self.push(lookup, sums)
        return slopes


class _Unlearned(torch.autograd.Function):
    """The anchor of rows that were read in eval mode: reached by a backward, unless that is for the values alone."""

    @staticmethod
    def forward(ctx, anchor: Tensor, module: EmbeddingBag) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.module = module
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:  # type: ignore[no-untyped-def]
        ctx.module.raise_unlearned()


class _Pool(torch.autograd.Function):
    """`EmbeddingBag.pool`, with the push as its backward."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, anchor: Tensor | None, values: Tensor | None, module: EmbeddingBag, lookup: PendingLookup, bags: Bags
    ) -> Tensor:
        pushes = anchor is not None and module.training
        out, pooled = module.pool(lookup, bags, keep=ctx.needs_input_grad[1], pushes=pushes)
        ctx.module, ctx.pooled = module, pooled
        ctx.save_for_backward(values)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None, None, None, None]:  # type: ignore[no-untyped-def]
        (values,) = ctx.saved_tensors
        return None, ctx.module.push_pooled(ctx.pooled, values, grad), None, None, None
