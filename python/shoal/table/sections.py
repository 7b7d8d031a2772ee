"""Columns of rows as a section: what a shard restores rows with their state from (docs/checkpoint-format.md).

Threads: no state.
"""

import numpy as np
import numpy.typing as npt

from shoal.table.arrays import Rows
from shoal.table.spec import TableSpec

_ALIGNMENT = 64  # of columns in a section
# Row metadata of occurrences, with the values after one occurrence now; its clock is the table's.
MARKS = {"count": "uint32", "clock": "uint32", "score": "float32"}
_SIGHTED = {"count": 1, "score": 1.0}

Column = npt.NDArray[np.float32] | npt.NDArray[np.uint32]


def sighted(name: str, rows: int, clock: int) -> Column:
    """Return the metadata of rows that have occurred once, at that clock of their table."""
    column: Column = np.full(rows, _SIGHTED.get(name, clock), MARKS[name])
    return column


def section(
    spec: TableSpec, hashes: npt.NDArray[np.uint64], columns: list[Rows], marks: dict[str, Column]
) -> npt.NDArray[np.uint8]:
    """Convert columns to a section; hashes ascend, and the first column is weights or z.

    Raises
    ------
    ValueError
        A weight is not finite or not a number of the table's dtype, or a score is negative.
    """
    if "score" in marks and not (np.isfinite(marks["score"]) & (marks["score"] >= 0)).all():
        raise ValueError("a score is not a finite number from 0 on")
    pieces = bytearray()
    for column in (hashes, _weights(spec.dtype, columns[0]), *columns[1:], *marks.values()):
        pieces += np.ascontiguousarray(column).tobytes()
        pieces += bytes(-len(pieces) % _ALIGNMENT)
    return np.frombuffer(pieces, np.uint8)


def _weights(dtype: str, given: Rows) -> npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]:
    if not np.isfinite(given).all():
        raise ValueError("a weight is not finite")
    if dtype == "float32":
        return given
    bits = given.view(np.uint32)
    halves = given.astype(np.float16)
    is_exact = np.array_equal(halves.astype(np.float32), given) if dtype == "float16" else not np.any(bits & 0xFFFF)
    if not is_exact:
        raise ValueError(f"a weight is not a {dtype} number, the table's dtype")
    return halves if dtype == "float16" else (bits >> 16).astype(np.uint16)
