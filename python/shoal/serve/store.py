"""ExportStore: the tables of an export with the interface of a store, for models that only predict."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.checkpoint.format import Chain, ChainEntry
from shoal.checkpoint.write import SnapshotSet
from shoal.export.read import ExportTable, ExportVersion
from shoal.store.local import SingleProcessStore
from shoal.table.arrays import Rows
from shoal.table.future import Waitable
from shoal.table.shard import OTHER_STORE, ShardReader, pull_and_expand
from shoal.table.spec import TableRecord, TableSpec
from shoal.table.table import Table


def _refuse() -> NoReturn:
    raise ValueError("an export is read-only: train in a store, and export it again")


class _ExportShard:
    """The rows of an exported table: a :class:`~shoal.table.shard.ShardReader`."""

    def __init__(self, table: ExportTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.rows_written

    def reads_ahead(self) -> bool:
        return False

    def prefetch(self, batch: _core.KeyBatch, locations: _core.RowLocations | None = None, /) -> None:
        pass

    def make_locations(self, batch: _core.KeyBatch, /) -> None:
        return None

    def pull(self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /) -> None:
        self._table.native.pull(batch.hashes, rows, self._table.workers, hashed=True)

    @property
    def is_remote(self) -> bool:
        return False

    def pull_per_key(
        self, batch: _core.KeyBatch, rows: Rows, locations: _core.RowLocations | None = None, /
    ) -> Waitable:
        return pull_and_expand(self.pull, batch, rows, self._table.workers)

    def contains(self, batch: _core.KeyBatch, /) -> npt.NDArray[np.uint8]:
        return self._table.contains(_core.unmix(batch.hashes)).view(np.uint8)

    def read_slot(self, slot: int, /) -> tuple[npt.NDArray[np.uint64], Rows]:
        return self._table.native.read_slot(slot)

    def after(self, requests: Sequence[Waitable], /) -> NoReturn:
        raise ValueError(OTHER_STORE)

    def as_shard(self) -> NoReturn:
        raise ValueError(
            f"table {self._table.name!r} is of an export, which is read-only and answers nothing but reads by key: "
            "train in a store, and export it again"
        )


class ExportStore(SingleProcessStore):
    """A store over one version of an export: its tables can be read, others are refused."""

    def __init__(self, version: ExportVersion, *, threads: int | None = None) -> None:
        super().__init__(threads=threads, slots=version.slots)
        self._version = version

    def exported(self, name: str) -> Table:
        """Return the table of the export with this name."""
        spec = self._version.table(name).form.spec()
        return self.table(name, dim=spec.dim, optimizer=spec.optimizer, init=spec.init)

    def _make_shard(self, spec: TableSpec) -> ShardReader:
        table = self._version.table(spec.name)
        there = table.form.description()
        wanted = TableRecord.of(spec).description(there.dtype)
        if wanted != there:
            fields = there.differing(wanted)
            raise ValueError(
                f"table {spec.name!r} is exported with {there.values(fields)}, and the model takes "
                f"{wanted.values(fields)}"
            )
        return _ExportShard(table)

    def tick(self) -> None:
        """Refuse."""
        _refuse()

    def _take_splits(self, count: int, digest: str, reissue: float) -> Iterator[int]:
        _refuse()

    def _snapshots(
        self, tables: list[tuple[Table, str]], base: ChainEntry | None
    ) -> AbstractContextManager[SnapshotSet]:
        _refuse()

    def _load(self, chain: Chain, *, track: bool, progress: bool) -> None:
        _refuse()
