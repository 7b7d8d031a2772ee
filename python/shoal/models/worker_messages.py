"""WorkerMessages: an all-gather of bytes among the workers of a store, by way of its servers.

    each worker    assign its rows    barrier    pull the rows of the others    barrier

Rows, in a table of the model's name and "-messages"
    rank 2^32 + i    the i-th block of the worker's message; a message begins with its number, its flag and its length

A number of a row is one byte, 0 to 255, which every filter of values transfers exactly.

Invariants
    M1  A call is one of all workers, at the same clock. The k-th call of a worker exchanges the k-th messages.
    M2  The message of a worker that was lost or has left is None: its rows have another number.

Threads: the one that fits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.optim import SGD
from shoal.store.base import Store

__all__ = ["Exchanged", "WorkerMessages"]

_BLOCK = 1024  # bytes
_HEAD = struct.Struct("<QQQ")  # number of the call, flag, length
_RANK_BITS = 32


class Exchanged(NamedTuple):
    """The messages of all workers by rank, None of one that sent none; ``flags`` likewise."""

    flags: list[int | None]
    messages: list[bytes | None]


class WorkerMessages:
    """Messages among the workers of a store that fit a model together.

    Parameters
    ----------
    store : Store
    name : str
        Of the model; the same on all workers.
    barrier : callable
        Waits for all workers.
    """

    def __init__(self, store: Store, name: str, barrier: Callable[[], None]) -> None:
        self._store = store
        self._barrier = barrier
        self._table = store.table(f"{name}-messages", dim=_BLOCK, optimizer=SGD(lr=1.0))
        self._number = 0

    def exchange(self, message: bytes = b"", *, flag: int = 0, to: int | None = None) -> Exchanged:
        """Send a message to all workers, or to the worker ``to``; return those of all.

        Parameters
        ----------
        message : bytes
        flag : int
            Sent to all workers.
        to : int, optional
            The rank of the only worker that receives the messages; the others get empty ones.

        Returns
        -------
        Exchanged

        Raises
        ------
        ShoalError
            As of any call.
        """
        self._number += 1
        self._assign(message, flag)
        self._barrier()
        flags: list[int | None] = []
        messages: list[bytes | None] = []
        for rank in range(self._store.num_workers):
            first = self._pull(rank, 0, 1)
            number, its_flag, length = _HEAD.unpack_from(first)
            if number != self._number or rank in self._store.lost_workers:
                flags.append(None)
                messages.append(None)
                continue
            flags.append(its_flag)
            if to not in (None, self._store.rank):
                messages.append(b"")
                continue
            blocks = -(-(_HEAD.size + length) // _BLOCK)
            content = first + (self._pull(rank, 1, blocks) if blocks > 1 else b"")
            messages.append(content[_HEAD.size : _HEAD.size + length])
        self._barrier()
        self._erase(message)
        return Exchanged(flags, messages)

    def _assign(self, message: bytes, flag: int) -> None:
        content = _HEAD.pack(self._number, flag, len(message)) + message
        blocks = -(-len(content) // _BLOCK)
        rows = np.zeros((blocks, _BLOCK), np.float32)
        rows.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        self._table.assign(self._keys(self._store.rank, 0, blocks), rows)

    def _pull(self, rank: int, begin: int, end: int) -> bytes:
        rows = self._table.pull(self._keys(rank, begin, end))
        return rows.astype(np.uint8).tobytes()

    def _erase(self, message: bytes) -> None:
        """Drop all rows of this worker's message but the first."""
        blocks = -(-(_HEAD.size + len(message)) // _BLOCK)
        if blocks > 1:
            self._table.erase(self._keys(self._store.rank, 1, blocks))

    @staticmethod
    def _keys(rank: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
        return np.arange(begin, end, dtype=np.uint64) + np.uint64(rank << _RANK_BITS)
