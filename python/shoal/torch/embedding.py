"""Embedding: a row for every key.

    keys int64[n, l] --> rows of the unique keys --expand--> float32[n, l, dim], written straight into the output
    gradient float32[n, l, dim] --sum per unique key, read in place--> push

Threads: as `shoal.torch.sparse`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.torch import ops
from shoal.torch.sparse import PendingLookup, SparseModule, keys_of

Shape = tuple[int, ...]


class Embedding(SparseModule):
    """Rows of a table by key; the counterpart of ``nn.Embedding``.

    Parameters
    ----------
    table : shoal.Table

    Notes
    -----
    All 64-bit keys are valid; an unseen key reads its initial row, and its row is created by the push. Backward sums
    the gradients of each key in order of occurrence, in float64 rounded once, and pushes the sums as one step of the
    table's optimizer, unless the rows are frozen by ``requires_grad_(False)``; of a forward in eval mode it raises
    RuntimeError. The next forward or ``store.flush()`` raises the error of a failed push. The output is float32, also
    under autocast, as that of ``nn.Embedding``. docs/torch.md has the details.

    Examples
    --------
    >>> import torch
    >>> store = shoal.local()
    >>> embedding = Embedding(store.table("user", dim=4, optimizer=shoal.Adagrad(lr=0.1)))
    >>> embedding(torch.tensor([[7, -1], [7, 0]])).shape
    torch.Size([2, 2, 4])
    """

    def forward(self, keys: Tensor) -> Tensor:
        """Read the rows of ``keys``.

        Parameters
        ----------
        keys : int64 or uint64 tensor of any shape
            The bits of int64 are used unchanged. Duplicates are allowed.

        Returns
        -------
        float32 tensor, shape ``(*keys.shape, dim)``

        Raises
        ------
        TypeError
            Keys of another dtype.
        WrongProcessError
            The store was made before a fork, by the parent.
        ShoalError
            This pull failed, or an earlier push did.

        Notes
        -----
        Blocks until the rows have arrived.
        """
        if torch.compiler.is_compiling():
            return ops.embed(self, keys)
        return self.finish(*self.begin(keys))

    def begin(self, keys: Tensor) -> tuple[PendingLookup, Shape]:
        """Begin the pull: the first half of forward."""
        return self.begin_lookup(keys_of(keys)), tuple(keys.shape)

    def finish(self, lookup: PendingLookup, shape: Shape) -> Tensor:
        """Wait for the rows and expand them to one for each key: the second half of forward."""
        if self.records:
            rows: Tensor = _Rows.apply(self.anchor, self, lookup, shape)  # type: ignore[no-untyped-call]
            return rows
        return self.expand(lookup, shape)

    def expand(self, lookup: PendingLookup, shape: Shape) -> Tensor:
        """Write the row of each key, without autograd."""
        out = torch.empty((*shape, self.dim))
        if not lookup.has_begun:
            self._table.reader.pull_per_key(lookup.batch.native, out.numpy(), lookup.locations)
        else:
            rows = lookup.rows()
            lookup.batch.native.expand(rows, self.dim, out.numpy(), self._table.workers)
            self.return_buffer(rows)
        return out


class _Rows(torch.autograd.Function):
    """`Embedding.expand`, with the push as its backward."""

    @staticmethod
    def forward(ctx, anchor: Tensor, module: Embedding, lookup: PendingLookup, shape: Shape) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.module, ctx.lookup, ctx.learns = module, lookup, module.training
        return module.expand(lookup, shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, None, None]:  # type: ignore[no-untyped-def]
        if not ctx.learns:
            ctx.module.raise_unlearned()
        ctx.module.push_per_key(ctx.lookup, grad)
        return None, None, None, None
