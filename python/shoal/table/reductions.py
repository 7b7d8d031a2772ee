"""Reductions and updates over all rows of a table, computed by the process that holds the rows.

    request --> each slot computes in hash order, in float64 --> the results are combined here, in slot order

The bits depend on neither threads nor the number of servers, and no row is transferred. What the engine
computes for a slot is documented in ``csrc/shard/reductions.h``; this module combines the results.

Threads: no state.
"""

from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal import _core

Answers = npt.NDArray[np.float64]


class Function(IntEnum):
    """Function codes of the engine and the wire."""

    SUM = 1
    NORM = 2
    COUNT = 3
    TOPK = 4
    DECAY = 5
    SHRINK = 6
    DIGEST = 7
    MAP = 8
    APPLY = 9
    RATE = 10


CHANGES_ROWS = frozenset({Function.DECAY, Function.SHRINK, Function.APPLY, Function.RATE})  # or later steps of them
# Functions whose answers do not consist of as many numbers for each slot.
OF_ANY_LENGTH = frozenset({Function.TOPK, Function.MAP, Function.APPLY})


class Reducible(Protocol):
    """The rows of a table, in this process or on servers."""

    def reduce(self, function: int, parameters: Answers, /) -> Answers:
        """Answers of all slots, in slot order; for TOPK, the concatenated lists of all servers."""


def _ask(rows: Reducible, function: Function, *parameters: float) -> Answers:
    return rows.reduce(int(function), np.array(parameters, np.float64))


def _in_order(answers: Answers) -> Answers:
    """Add up rows in order: np.sum does not fix the order."""
    added: Answers = np.add.accumulate(answers, axis=0)
    return np.asarray(added[-1])


def total(rows: Reducible, slots: int, *, integers: bool = False) -> npt.NDArray[Any]:
    """Add up each weight of a row over the rows: float64[dim], or int64[dim]."""
    if integers:
        sums: npt.NDArray[np.int64] = _ask(rows, Function.SUM).reshape(slots, -1).view(np.int64)
        return np.asarray(sums.sum(axis=0, dtype=np.int64))
    return _in_order(_ask(rows, Function.SUM).reshape(slots, -1))


def norm(rows: Reducible, order: float) -> float:
    """Compute the norm of all weights as one vector."""
    answers = _ask(rows, Function.NORM, order)
    if order == np.inf:
        return float(answers.max())
    summed = float(_in_order(answers))
    return summed if order == 1 else float(np.sqrt(summed))


def count(rows: Reducible, above: float) -> int:
    """Count the rows whose Euclidean norm is above a number."""
    return int(_ask(rows, Function.COUNT, above).sum())


def topk(rows: Reducible, k: int) -> tuple[npt.NDArray[np.uint64], Answers]:
    """Find the keys of the rows with the largest norms: keys uint64[<= k], norms float64[<= k]."""
    pairs = _ask(rows, Function.TOPK, k).reshape(-1, 2)
    norms = np.ascontiguousarray(pairs[:, 0])
    keys = _core.unmix(np.ascontiguousarray(pairs[:, 1]).view(np.uint64))
    order = np.lexsort((keys, -norms))[:k]
    return keys[order], norms[order]


def digest(rows: Reducible, slots: int) -> str:
    """Add up the digests of all rows: 32 hexadecimal digits."""
    words = _ask(rows, Function.DIGEST).reshape(slots, 4).astype(np.uint64)
    sums = (words[:, ::2] | (words[:, 1::2] << np.uint64(32))).sum(axis=0, dtype=np.uint64)  # modulo 2^64
    return f"{int(sums[0]):016x}{int(sums[1]):016x}"


def changed(rows: Reducible, function: Function, parameter: float) -> int:
    """Change all rows; return the number of rows that changed."""
    return int(_ask(rows, function, parameter).sum())
