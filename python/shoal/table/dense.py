"""Dense parameters: an array whose blocks are the rows of a table.

    array of some shape --> one line of numbers --> blocks of `block` numbers, the last one padded --> keys 0, 1, 2, ...

    float32[3, 500], block 1024:   key 0 has numbers 0..1023, key 1 has 1024..1499 and 548 of padding

A block is a row like any other: hash order distributes blocks over the servers, pushes are summed and applied by the
table's optimizer, and clocks and checkpoints include it. This module only maps the shape to blocks.

Threads: immutable but for its table; safe from any thread.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.base.scalars import plain
from shoal.optim import Optimizer
from shoal.table.future import After, Future
from shoal.table.table import Table

Values: TypeAlias = npt.NDArray[Any]  # float32, or int64

# 4 KB: a hash adds 0.2 % on the wire, and a million numbers make a thousand blocks, which spread evenly over servers.
BLOCK = 1024


def shape_of(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Check a shape; a number is a shape of one dimension."""
    shape = plain(shape)
    sizes = (shape,) if isinstance(shape, int) else tuple(map(plain, shape))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"dense table {name!r} needs a shape of positive whole numbers, got {shape!r}")
    return sizes


class DenseTable:
    """An array of parameters on a store, with the optimizer that updates them. Made by ``store.dense(...)``.

    Examples
    --------
    >>> import shoal
    >>> with shoal.local() as store:
    ...     bias = store.dense("bias", (2, 2), optimizer=shoal.SGD(lr=0.5))
    ...     bias.push(np.array([[1, 2], [3, 4]], np.float32)).result()
    ...     bias.pull().tolist()
    [[-0.5, -1.0], [-1.5, -2.0]]

    It reads like an array, and ``+=`` pushes a gradient:

    >>> with shoal.local() as store:
    ...     w = store.dense("w", (2, 3), optimizer=shoal.SGD(lr=1.0))
    ...     w += -np.ones((2, 3), np.float32)
    ...     w[1].tolist(), (w @ np.ones(3)).tolist(), float(np.asarray(w).mean())
    ([1.0, 1.0, 1.0], [3.0, 3.0], 1.0)
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
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return len(self._shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the array's numbers: float32, or int64."""
        return np.dtype(np.int64 if self._table.spec.is_integer else np.float32)

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
        return self.pull_async().result()

    def pull_async(self, *, after: After = ()) -> Future[Values]:
        """Start reading the array; on a cluster, the caller can compute while the servers answer.

        Parameters
        ----------
        after : Future, or list or tuple of Future, optional
            What it comes after: see :meth:`shoal.Table.push`.

        Returns
        -------
        Future
            ``result()`` returns float32 of the table's shape.
        """
        return self._shaped(self._table.pull_async(self._keys, after=after))

    def push(self, grad: npt.ArrayLike, *, after: After = ()) -> Future[None]:
        """Apply one optimizer step.

        Parameters
        ----------
        grad : float32 of the table's shape
        after : Future, or list or tuple of Future, optional
            What it comes after: see :meth:`shoal.Table.push`.

        Returns
        -------
        Future
            ``result()`` returns once the push is applied.

        Notes
        -----
        A block is a row: one whose gradient is all zeros keeps every bit, momentum included; one whose gradient is not
        finite is left unchanged. Rules for whole rows (``clip_norm``, RowWiseAdagrad, GroupFTRL) act on each block.
        """
        return self._table.push(self._keys, self._blocks(grad, "grad"), after=after)

    def push_pull(self, grad: npt.ArrayLike, *, after: After = ()) -> Future[Values]:
        """Push, and read the array after that push; see :meth:`shoal.Table.push_pull`.

        Parameters
        ----------
        grad : float32 of the table's shape
        after : Future, or list or tuple of Future, optional
            What it comes after: see :meth:`shoal.Table.push`.

        Returns
        -------
        Future
            ``result()`` returns float32 of the table's shape.
        """
        return self._shaped(self._table.push_pull(self._keys, self._blocks(grad, "grad"), after=after))

    def assign(self, values: npt.ArrayLike) -> None:
        """Set the array, for example to its initial values; the optimizer's state is unchanged.

        Parameters
        ----------
        values : float32 of the table's shape
            Finite. On a cluster every worker may assign the same values before its first tick.
        """
        self._table.assign(self._keys, self._blocks(values, "values"))

    # --- as an array --------------------------------------------------------------------------------------------

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read the array, for functions of NumPy: ``numpy.asarray(dense)``."""
        if copy is False:
            raise ValueError(f"dense table {self.name!r} cannot be read without a copy: use copy=None or True")
        return self.pull() if dtype is None else self.pull().astype(dtype, copy=False)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self._shape:
            raise TypeError(f"dense table {self.name!r} is a single number: it has no length")
        return self._shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read a part, indexed as in NumPy; a number or a range as the first index reads only the blocks that it needs.

        Parameters
        ----------
        index : int, slice, ..., array or tuple of these

        Returns
        -------
        float32 array or number
            A copy.
        """
        first, *others = index if isinstance(index, tuple) else (index,)
        if not self._shape or isinstance(first, bool) or not isinstance(first, int | np.integer | slice):
            return self.pull()[index]
        if isinstance(first, slice):
            rows = range(len(self))[first]
            low = min(rows, default=0)
            read = self._read(low, max(rows, default=-1) + 1)
            return (read if rows.step == 1 else read[np.array(rows, np.intp) - low])[(slice(None), *others)]
        row = range(len(self))[first]  # IndexError, as of a list
        return self._read(row, row + 1)[(0, *others)]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse: a part is changed by gradients, the whole by `assign`."""
        raise TypeError(
            f"dense table {self.name!r} has no assignment to a part: push a gradient, or assign(values) the whole array"
        )

    def __iadd__(self, grad: npt.ArrayLike) -> Self:
        """Push a gradient: ``dense += grad`` is ``dense.push(grad)``. What is added depends on the optimizer."""
        self.push(grad)
        return self

    def _refuse_in_place(self, _: Any) -> NoReturn:
        """Refuse ``dense -= x`` and its like, after which the name would be that of a NumPy array."""
        raise TypeError(f"dense table {self.name!r} is changed by += gradient (the optimizer's step) or assign(values)")

    __isub__ = __imul__ = __itruediv__ = __imatmul__ = _refuse_in_place

    def __matmul__(self, other: npt.ArrayLike) -> Any:
        """Return the matrix product of the array, as it is read now, with another one."""
        return self.pull() @ np.asarray(other)

    def __rmatmul__(self, other: npt.ArrayLike) -> Any:
        """Return the matrix product of another array with this one, as it is read now."""
        return np.asarray(other) @ self.pull()

    def _read(self, low: int, high: int) -> Values:
        """Read the rows ``low`` to ``high - 1`` of the first dimension."""
        row = self._size // self._shape[0]
        block = self._table.dim
        first = low * row // block
        numbers = self._table.pull(self._keys[first : -(-high * row // block)]).reshape(-1)
        begin = low * row - first * block
        return numbers[begin : begin + (high - low) * row].reshape(high - low, *self._shape[1:])

    # --- blocks -------------------------------------------------------------------------------------------------

    def _blocks(self, array: npt.ArrayLike, what: str) -> Values:
        values: npt.NDArray[Any] = np.asarray(array)
        wanted = self.dtype
        if values.dtype != wanted:
            raise TypeError(
                f"dense table {self.name!r} takes {what} as {wanted}, got {values.dtype}: "
                f"pass {what}.astype(np.{wanted})"
            )
        if values.shape != self._shape:
            raise ValueError(f"dense table {self.name!r} has shape {self._shape}, got {what} {values.shape}")
        blocks = np.zeros((len(self._keys), self._table.dim), wanted)
        blocks.reshape(-1)[: self._size] = values.reshape(-1)
        return blocks

    def _shaped(self, future: Future[Values]) -> Future[Values]:
        return Future(future, lambda: future.result().reshape(-1)[: self._size].reshape(self._shape))
