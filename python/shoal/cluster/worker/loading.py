"""A load on a cluster: servers read their slots side by side, worker 0 has checked the manifests and says when.

    worker 0                                     each endpoint
    LOAD_BEGIN, of each table      ---------->   makes empty rows beside those that are there
    SAVE_BEGIN, of those rows      ---------->   csrc/server/checkpoint_session.h holds them for a thread
    the place, and a digest        ---------->   finds that checkpoint there, and its own slots' files: "ready"
    "go", once all are ready       ---------->   fills them with its slots, and how many rows it found: "done"
    SAVE_END, with the digest      ---------->   lets go of them
    LOAD_END, of each table, once the numbers are right   ->  they take the place of what was there

How the two speak: tasks.py. Rows that a worker sends take the place of the four lines in the middle (client.py).

Invariants
    L1  No row of any table is changed before every endpoint has read all of its slots, of all tables.
    L2  A load that fails leaves none of its rows on any endpoint that hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from shoal import _core
from shoal.checkpoint.checkpoint import Bytes, History, Link, fill, histories, read_chain
from shoal.cluster.protocol import tasks
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.protocol.tasks import Report, Task, TaskCoordinator, words_of
from shoal.cluster.worker.channel import Channel
from shoal.errors import CorruptionError, StorageError
from shoal.storage.base import StorageDir

__all__ = ["ReadTask", "ServerLoad"]

_KIND = 3  # of what SAVE_BEGIN names: rows of a load


class ServerLoad(TaskCoordinator):
    """Tables of servers whose loads have begun, and which the servers fill. A context manager.

    Parameters
    ----------
    channel : Channel
    endpoints : sequence of Endpoint
        All of them.
    tables : sequence of int
        The servers' numbers of the tables.
    """

    def __init__(self, channel: Channel, endpoints: Sequence[Endpoint], tables: Sequence[int]) -> None:
        super().__init__(channel, endpoints, "load")
        self._tables = tables

    def read(self, link: Link, slots: int, told: Callable[[int], None]) -> list[int]:
        """Have all endpoints read the tables of a checkpoint.

        Parameters
        ----------
        link : Link
            The last of a chain that this process has checked. It has these tables, in this order.
        slots : int
            How many the store has.
        told : callable
            Is told how many rows were read, now and then.

        Returns
        -------
        list of int
            Rows of each table.

        Raises
        ------
        StorageError
            A server does not see the checkpoint, or may not read it: the message names it.
        CorruptionError
            A file is damaged.
        MemoryBudgetExceededError
            A server has no room for the rows.
        ServerLostError, DeadlineExceededError
            A server is gone, or makes no progress.
        """
        where, options = link.place.to_spec()
        task = ReadTask(place=where, options=dict(options), patience=self._patience(), digest=link.digest, slots=slots)
        numbers = [*words_of(link.digest), *(number | _KIND << 32 for number in self._tables)]
        for endpoint, figures in zip(self._endpoints, self._begin(numbers), strict=True):
            if not figures:
                raise self._given_up(endpoint)
        self._until("ready", task)
        reports = self._until("done", msgspec.structs.replace(task, go=True), told)
        self._end(link.digest)
        return [sum(rows) for rows in zip(*(report.loaded for report in reports), strict=True)]


class ReadTask(Task, frozen=True, kw_only=True, tag="read"):
    """What an endpoint is to read."""

    digest: str  # of the checkpoint
    slots: int  # of the store

    def look(self, place: StorageDir, save: _core.CheckpointSession) -> list[History]:
        """Find the checkpoint there, and the files of these slots."""
        deadline = time.monotonic() + tasks.SEEING
        while True:
            try:
                return self._find(place, save)
            except (
                CorruptionError,
                FileNotFoundError,
            ) as error:  # the worker has found all of it: this is not the same, or not yet
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"it does not see the checkpoint that worker 0 has found in {self.place} ({error}): each "
                        "server reads its own rows, so load from a directory that all machines share by that path, or "
                        "from an object store (s3://...), or connect with shared_storage=False and let worker 0 read "
                        "them all"
                    ) from None
            place.names()  # has a network's file system look anew
            time.sleep(tasks.LONGEST)

    def _find(self, place: StorageDir, save: _core.CheckpointSession) -> list[History]:
        chain = read_chain(place)
        if chain[-1].digest != self.digest:
            raise CorruptionError(f"{place} has another one, whose digest is {chain[-1].digest}")
        return histories(chain, range(save.first_slot, save.end_slot), self.slots)

    def do(
        self, place: StorageDir, save: _core.CheckpointSession, seen: list[History], told: Callable[[int], None]
    ) -> Report:
        """Read the slots."""
        loaded = fill(seen, [SessionLoadTarget(save, k) for k in range(len(seen))], 1, told)
        return Report("done", sum(loaded), loaded=loaded)


class SessionLoadTarget:
    """Rows of a table that is loaded: of what is restored the endpoint keeps its own slots."""

    def __init__(self, save: _core.CheckpointSession, table: int) -> None:
        self._save = save
        self._table = table

    def restore(self, rows: int, section: Bytes, /) -> int:
        """Add the rows of a section: how many are of these slots."""
        return self._save.restore(self._table, rows, section)

    def restore_filter(self, slots: int, slot: int, filter: Bytes, /) -> None:
        """Add what admission has counted in a slot of so many."""
        self._save.restore_filter(self._table, slots, slot, filter)
