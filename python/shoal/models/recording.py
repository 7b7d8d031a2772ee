"""Recorder: writes the order of a fit's pulls and pushes while its workers learn (order_record.py).

    checkpoint --> meeting --> batches of all workers --> each writes its file --> meeting --> checkpoint --> ...

A part of the fit begins and ends where nothing is under way: before the first batch, at the ends of passes, and at each
checkpoint, for which all workers wait. So a fit can be made again from any of its checkpoints.

The order is not that of the fit any more once a worker has died, or slots have moved: then the record ends, the fit
goes on, and whoever reads the record is told.

Threads: the one that fits.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from msgspec import structs

from shoal.data import Reader
from shoal.data.stream import is_live
from shoal.errors import ShoalError
from shoal.models import order_record
from shoal.models.learner import Learner
from shoal.models.order_record import RECORD_FILE, START, Division, Messages, Record, Segment
from shoal.models.plan import FitInput
from shoal.models.team import Team
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.order import Placement

log = logging.getLogger(__name__)


class Recorder:
    """An `Order` that is written into a directory, which all workers see."""

    has_meetings = True

    def __init__(self, model: Learner, directory: StoragePath, every: int | None, *, overwrite: bool) -> None:
        self.directory: StorageDir = open_dir(directory)
        self.every = every
        self._model = model
        self._overwrite = overwrite
        self._tables: list[str] = []  # once the fit has begun
        self._team: Team | None = None
        store = model.store
        self._record = Record(id=secrets.token_hex(8), workers=store.num_workers, consistency=repr(store.consistency))
        self._placement = Placement(0, [])
        self._present: list[int] = []
        self._division = Division(0, 0)
        self._examples = 0
        self._steps: dict[str, list[int]] = {}
        self._broken = ""

    @property
    def id(self) -> str:
        """Of the record."""
        return self._record.id

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def check(self, given: FitInput, team: Team, *, resumes: bool) -> None:
        """Raise ValueError if the fit cannot be recorded; nothing is changed. ``resumes``: from a checkpoint."""
        store, reader = self._model.store, given.reader
        self._check_tables()
        if team.may_change or store.member.is_replacement:
            raise ValueError(
                "a fit whose number of workers may change, or that replaces a worker, cannot be recorded: pass one "
                f"number of workers (--workers {store.num_workers}), or leave out record (--record)"
            )
        if not isinstance(reader, Reader) or is_live(reader) or reader.format == "arrow":
            raise ValueError(
                "only a fit of files can be recorded, since a replay reads them again: train on a reader of files, or "
                "leave out record (--record)"
            )
        split = tuple(reader.position()["shard"])
        if split != (store.rank, store.num_workers):
            raise ValueError(
                f"worker {store.rank} of {store.num_workers} reads split {split[0]} of {split[1]}, and a replay reads "
                "one split a worker: pass reader.split(store.rank, store.num_workers)"
            )
        if not self._model.has_order:
            raise ValueError(
                "the workers sum the gradients of the dense part, in an order that is not that of pushes: pass "
                'dense="servers" ([train] dense in a configuration), or leave out record (--record)'
            )
        if not team.leads or resumes:
            return
        if self.directory.version(RECORD_FILE) is not None and not self._overwrite:
            raise ValueError(
                f"{self.directory} has the record of a fit: pass overwrite=True (--overwrite), or another directory"
            )
        if self.directory.version(RECORD_FILE) is None and (self.directory.names() or self.directory.subdirectories()):
            raise ValueError(f"{self.directory} has files that are no record of a fit: choose another directory")

    def _check_tables(self) -> None:
        """Take note of the tables that are recorded; raise ValueError if the order of one is not all that counts."""
        tables, store = self._model.pushed_tables, self._model.store
        self._tables = [table.name for table in tables]
        store.log_order(self._tables)
        store.log_order(())
        for table in tables:
            if table.spec.keeps_clock:
                raise ValueError(
                    f"table {table.name!r} has rules of admission or expiry, or a schedule, which depend on the clocks "
                    "of all workers and not on the order alone: leave them out, or record (--record)"
                )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Be the order of the store meanwhile."""
        store = self._model.store
        store.order = self
        try:
            yield
        finally:
            store.order = None
            with suppress(ShoalError):  # it was closed
                store.log_order(())
                store.take_order(())

    def resume(self, examples: int) -> None:
        """Record what follows a checkpoint of so many examples: in a directory of its own."""
        self.directory = self.directory.child(f"from-{examples:012}")

    def start(self, team: Team, save: Callable[[StorageDir], None]) -> None:
        """Begin the record: the leader saves the model as it is before its first batch. Waits for all workers."""
        self._team, store = team, self._model.store
        self._check_tables()  # that of a dense part has come
        if team.leads:
            self.directory.clear()
            self.directory.make()
            save(self.directory.child(START))
            order_record.write(self.directory, self._record)
        team.meet()
        self._record = order_record.read(self.directory)
        self._placement, self._present = store.placement, team.present

    # ---- a division --------------------------------------------------------------------------------------------------

    def begin(self, division: int) -> None:
        """Begin to record a division."""
        self._division = Division(division, self._examples, self._steps)
        self._model.store.log_order(self._tables)

    def end(self) -> None:
        """Write what was recorded, once all calls of this worker are answered."""
        store = self._model.store
        store.flush()
        parts = store.take_order(self._tables)
        store.log_order(())
        messages = Messages.of(parts)
        self._broken = self._broken or self._why_broken(messages)
        if self._broken:
            messages = Messages.of(parts[:0])
        segment = Segment(
            record=self._record.id,
            division=self._division.number,
            rank=store.rank,
            workers=store.num_workers,
            slots=store.slots,
            tables=self._tables,
            arcs=self._placement.arcs,
            messages=len(messages.number),
            broken=self._broken,
        )
        with self.directory.create(order_record.file_of(self._division.number, store.rank)) as file:
            file.write(order_record.encode(segment, messages))

    def _why_broken(self, messages: Messages | None = None) -> str:
        """Return why what was recorded is not the order of all pushes; empty: it is."""
        store, team = self._model.store, self._team
        assert team is not None
        if store.placement.epoch != self._placement.epoch:
            return "slots have moved to other servers, or a server was lost"
        if lost := [*store.member.lost_workers, *(rank for rank in self._present if rank not in team.present)]:
            return f"worker {min(lost)} was lost"
        if messages is not None and (messages.number[messages.is_push] == 0).any():
            return "a push was sent again, after its answer was lost"
        return ""

    def met(self) -> None:
        """Have the leader name the files of the division, which all workers have written, or why it is not whole."""
        assert self._team is not None
        if self._record.why:
            return
        self._broken = self._broken or self._why_broken()
        if self._team.leads:
            written = order_record.read(self.directory)  # maybe by a leader that is gone
            change = {"why": self._broken} if self._broken else {"divisions": [*written.divisions, self._division]}
            order_record.write(self.directory, structs.replace(written, **change))
        if self._broken:
            self._record = structs.replace(self._record, why=self._broken)
            log.warning(
                "the record in %s ends at the checkpoint of %d examples: %s. To record the rest, resume the fit from "
                "there into another record",
                self.directory,
                self._division.examples,
                self._broken,
            )

    def rest(self, examples: int) -> None:
        """Take note of the steps of all arcs."""
        assert self._team is not None
        self._examples = examples
        if self._team.leads:
            self._steps = {table: self._model.store.arc_steps(table) for table in self._tables}

    def complete(self) -> None:
        """Have the leader say that the fit is over."""
        assert self._team is not None
        if self._team.leads:
            written = order_record.read(self.directory)
            order_record.write(self.directory, structs.replace(written, is_complete=True))
