"""The store of a reader: the tables of a cluster, to be read while a job trains.

A reader is known to the scheduler, which sends it the changes of the map, but is part of no job: servers answer its
reads at once, and no worker waits for it.

Threads: as for any store. Fork: a child's copy raises WrongProcessError; a child that reads connects itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.write import SnapshotSet
from shoal.cluster.protocol.messages import ListTables, ListTablesReply, TableReply
from shoal.cluster.protocol.ping import NO_WORKER
from shoal.cluster.worker.channel import Role, WorkerIdentity
from shoal.cluster.worker.connected_store import ConnectedStore, ask_map
from shoal.cluster.worker.remote_shard import RemoteShard
from shoal.consistency import ASP, Consistency
from shoal.storage.base import StoragePath
from shoal.store.description import check_same
from shoal.table.arrays import Counts, Rows
from shoal.table.dense import DenseTable, shape_of
from shoal.table.reductions import CHANGES_ROWS
from shoal.table.spec import TableSpec
from shoal.table.table import Table
from shoal.user_functions import Description

_ANONYMOUS = WorkerIdentity(NO_WORKER, 0, 0)
_READ_ONLY = "a store that was connected with mode='read' reads tables and changes nothing: connect as a worker to {}"


def _refuse(what: str) -> NoReturn:
    raise ValueError(_READ_ONLY.format(what))


class _ReaderShard(RemoteShard):
    """The rows of a table, without the calls that change them."""

    def push(
        self,
        batch: _core.KeyBatch | _core.SummedBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> NoReturn:
        """Refuse."""
        _refuse("push")

    def push_per_key(
        self,
        batch: _core.KeyBatch,
        grads: Rows,
        counts: Counts | None = None,
        clock: int = 0,
        locations: _core.RowLocations | None = None,
        /,
    ) -> NoReturn:
        """Refuse."""
        _refuse("push")

    def assign(self, batch: _core.KeyBatch, rows: Rows, clock: int = 0, /) -> NoReturn:
        """Refuse."""
        _refuse("assign rows")

    def erase(self, batch: _core.KeyBatch, /) -> int:
        """Refuse."""
        _refuse("erase rows")

    def reduce(self, function: int, parameters: npt.NDArray[np.float64], /) -> npt.NDArray[np.float64]:
        """Evaluate a function of all rows that changes none."""
        if function in CHANGES_ROWS:
            _refuse("decay or shrink weights")
        return super().reduce(function, parameters)

    def run_function(
        self, function: int, description: Description, hashes: npt.NDArray[np.uint64] | None, /
    ) -> _core.Call:
        """Call a function of a user that changes no rows."""
        if function in CHANGES_ROWS:
            _refuse("apply functions")
        return super().run_function(function, description, hashes)

    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, /, *, dry_run: bool) -> npt.NDArray[np.uint64]:
        """Count the rows that expiry rules select."""
        if not dry_run:
            _refuse("sweep")
        return super().sweep(rules, clock, dry_run=True)


class ReaderStore(ConnectedStore):
    """The tables of a cluster, to be read. Made by :func:`shoal.connect` with ``mode="read"``.

    Every read is answered by the servers at once with what they have executed: under BSP the pushes of the clocks that
    all workers have ended, under SSP and ASP all that have arrived. The rows of one call may be of different moments:
    no server waits for another one.

    Safe from any thread. Calls that change rows, and saves, loads and exports, raise ValueError.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
        metrics_port: str | None,
        tracing: bool = False,
    ) -> None:
        super().__init__(
            address,
            "reader",
            timeout=timeout,
            threads=threads,
            curve=curve,
            metrics_port=metrics_port,
            tracing=tracing,
        )

    def __repr__(self) -> str:
        return f"ReaderStore({self._about}, tables={list(self._tables)})"

    def _check_arguments(self) -> None:
        pass

    def _join(self) -> Role:
        map = ask_map(self._scheduler, self._timeout)  # answered when the cluster has formed
        self._scheduler.try_servers(map, self._timeout)
        return Role(_ANONYMOUS, map)

    # ---- properties --------------------------------------------------------------------------------------------------

    @property
    def _about(self) -> str:
        return repr(self._scheduler.address)

    @property
    def rank(self) -> int:
        """0: a reader has no rank."""
        return 0

    @property
    def num_workers(self) -> int:
        """1: a reader works alone."""
        return 1

    @property
    def consistency(self) -> Consistency:
        """ASP: nothing waits for a clock."""
        return ASP()

    @property
    def clock(self) -> int:
        """0: a reader has no clock."""
        return 0

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _found(self, name: str) -> TableReply:
        reply = self._scheduler.call(ListTables(), ListTablesReply, self._timeout)
        for table in reply.tables:
            if table.form.name == name:
                return table
        names = ", ".join(sorted(repr(table.form.name) for table in reply.tables)[:20]) or "none yet"
        raise ValueError(f"the cluster has no table {name!r}: its tables are {names}; a worker makes them")

    def table(self, name: str, **description: Any) -> Table:
        """Return a table of the cluster.

        Blocks for a round trip to the scheduler when a name is first used.
        """
        if not description and (known := self._tables.get(name)) is not None:
            return known
        if not description:
            spec = self._found(name).form.spec()
            description = {field: getattr(spec, field) for field in spec.__struct_fields__ if field != "name"}
        return super().table(name, **description)

    def dense(self, name: str, shape: int | Sequence[int], **description: Any) -> DenseTable:
        """Return an array of parameters of the cluster; without a description it is taken as it is."""
        if description:
            return super().dense(name, shape, **description)
        return DenseTable(self.table(name), shape_of(name, shape))

    def _make_shard(self, spec: TableSpec) -> RemoteShard:
        found = self._found(spec.name)
        check_same(found.form.spec(), spec)
        self._name_table(found.id, spec.name)
        return _ReaderShard(self.channel, found.id, spec, workers=self._workers)

    # ---- what a reader does not do -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Refuse: a reader has no clock."""
        _refuse("end clocks")

    def meet(self, name: str, timeout: float | None = None) -> frozenset[int]:
        """Refuse: no worker waits for a reader."""
        _refuse("wait for other workers")

    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        _refuse("take splits of the data")

    def _snapshots(
        self, tables: list[tuple[Table, str]], base: ChainEntry | None
    ) -> AbstractContextManager[SnapshotSet]:
        _refuse("save")

    def check_storage(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Refuse: a reader saves nothing."""
        _refuse("save")

    @contextmanager
    def _to_export(self, tables: list[Table], *, track: bool) -> Iterator[Any]:
        yield _refuse("export")

    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        _refuse("load")
