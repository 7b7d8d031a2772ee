"""Dense parameters: an array whose blocks are the rows of a table.

    array of some shape --> one line of numbers --> blocks of `block` numbers, the last one padded --> keys 0, 1, 2, ...

    float32[3, 500], block 1024:   key 0 has numbers 0..1023, key 1 has 1024..1499 and 548 of padding

A block is a row like any other: hash order spreads blocks over the servers, pushes are summed and stepped by the
table's optimizer, clocks and checkpoints apply to it. This module only maps the shape to blocks.

Threads: immutable but for its table; safe from any thread.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.optim import Optimizer
from shoal.table.future import Future
from shoal.table.table import Table

__all__ = ["BLOCK", "DenseTable", "shape_of"]

Values: TypeAlias = npt.NDArray[np.float32]

# 4 KB: a hash adds 0.2 % on the wire, and a million numbers make a thousand blocks, which spread evenly over servers.
BLOCK = 1024


def shape_of(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Check a shape; a number is a shape of one dimension."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"dense table {name!r} needs a shape of positive whole numbers, got {shape!r}")
    return sizes


class DenseTable:
    """An array of parameters on a store, with the optimizer that updates them. Made by ``store.dense(...)``.

    Examples
    --------
    >>> import shoal
    >>> with shoal.local() as store:
    ...     bias = store.dense("bias", (2, 2), shoal.SGD(lr=0.5))
    ...     bias.push(np.array([[1, 2], [3, 4]], np.float32)).wait()
    ...     bias.pull().tolist()
    [[-0.5, -1.0], [-1.5, -2.0]]
    """

    def __init__(self, table: Table, shape: tuple[int, ...]) -> None:
        self._table = table
        self._shape = shape
        self._size = math.prod(shape)
        self._keys = np.arange(-(-self._size // table.dim), dtype=np.uint64)
        if table.contains(self._keys[-1:] + np.uint64(1))[0]:
            raise ValueError(
                f"table {table.name!r} has more blocks than the {len(self._keys)} of shape {shape}: it holds another "
                f"array, choose another name"
            )

    def __repr__(self) -> str:
        return f"DenseTable({self.name!r}, shape={self._shape}, optimizer={self.optimizer})"

    @property
    def name(self) -> str:
        """Its name in the store, which is also its table's name."""
        return self._table.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._shape

    @property
    def size(self) -> int:
        """Numbers in the array."""
        return self._size

    @property
    def optimizer(self) -> Optimizer:
        """The rule that a push applies."""
        return self._table.optimizer

    @property
    def table(self) -> Table:
        """The table of the blocks: keys 0, 1, 2, ..., rows in the array's order (C)."""
        return self._table

    def pull(self) -> Values:
        """Read the array.

        Returns
        -------
        float32 of the table's shape
            A copy.
        """
        return self.pull_async().wait()

    def pull_async(self) -> Future[Values]:
        """Start reading the array; on a cluster, the caller can compute while the servers answer.

        Returns
        -------
        Future
            ``wait()`` returns float32 of the table's shape.
        """
        return self._shaped(self._table.pull_async(self._keys))

    def push(self, grad: npt.ArrayLike) -> Future[None]:
        """Apply one optimizer step.

        Parameters
        ----------
        grad : float32 of the table's shape

        Returns
        -------
        Future
            ``wait()`` returns once the push is applied.

        Notes
        -----
        A block is a row: one whose gradient is all zeros keeps every bit, momentum included; one whose gradient is not
        finite is left unchanged. Rules for whole rows (``clip_norm``, RowWiseAdagrad, GroupFTRL) act on each block.
        """
        return self._table.push(self._keys, self._blocks(grad, "grad"))

    def push_pull(self, grad: npt.ArrayLike) -> Future[Values]:
        """Push, and read the array after that push; see :meth:`shoal.Table.push_pull`.

        Parameters
        ----------
        grad : float32 of the table's shape

        Returns
        -------
        Future
            ``wait()`` returns float32 of the table's shape.
        """
        return self._shaped(self._table.push_pull(self._keys, self._blocks(grad, "grad")))

    def assign(self, values: npt.ArrayLike) -> None:
        """Set the array, for example to its initial values; the optimizer's state is unchanged.

        Parameters
        ----------
        values : float32 of the table's shape
            Finite. On a cluster every worker may assign the same values before its first tick.
        """
        self._table.assign(self._keys, self._blocks(values, "values"))

    def _blocks(self, array: npt.ArrayLike, what: str) -> Values:
        values: npt.NDArray[Any] = np.asarray(array)
        if values.dtype != np.float32:
            raise TypeError(
                f"dense table {self.name!r} takes {what} as float32, got {values.dtype}: pass {what}.astype(np.float32)"
            )
        if values.shape != self._shape:
            raise ValueError(f"dense table {self.name!r} has shape {self._shape}, got {what} {values.shape}")
        blocks = np.zeros((len(self._keys), self._table.dim), np.float32)
        blocks.reshape(-1)[: self._size] = values.reshape(-1)
        return blocks

    def _shaped(self, future: Future[Values]) -> Future[Values]:
        return Future(future, lambda: future.wait().reshape(-1)[: self._size].reshape(self._shape))
