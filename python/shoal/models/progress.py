"""Progress: what a fit has left, and what it has measured, as rows of a table; all that has to survive is one.

    batch --> gradients, the position of its split, its metrics --push--> one clock --> all of it counts, or nothing

Whoever continues the fit does the same, a process in place of one that died, the workers of another number, those that
are left when one has died, and a fit that resumes from a checkpoint: read the rows, and learn from what they say is
left. A checkpoint of the tables is one of the fit.

A *division* gives each worker a list of shares of the pass (shares.py). One worker, which leads, writes it: first its
rows and a note with the records of the models, then the header, which names them; after the meeting that follows all
read them. If the leader dies before it has written the header, the next one does it again. A pass has one division, and
another one whenever there are shares whose workers are gone.

    division --> meeting --> batches --> all have ended --> meeting --> [predictions --> meeting] --> the next division

Sums of metrics are pushed with every batch, the counts of a histogram every few, and before a checkpoint: those that a
worker had not pushed when it died are missing in the AUC (`Pass.unmeasured`), and in nothing else.

Under SSP and ASP pushes take effect when they arrive. There a position may lie behind what counts by the batches in
flight, which are learned from again, and counted (`Pass.repeated`). Since servers make their snapshots of a checkpoint
at different moments, the leader first copies the positions, which are then behind all of them.

A process whose rows nobody could continue, alone in a local store, writes them for a checkpoint only.

Threads: the one that fits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from shoal.base.decoders import msgpack_decoder
from shoal.base.fit_rows import HEADER, Header
from shoal.base.plural import counted
from shoal.data import Reader
from shoal.data.live import Part
from shoal.data.stream import file_sizes, is_live, parts_of
from shoal.errors import DeadlineExceededError, ShoalError, WorkerLostError
from shoal.models.history import Standing
from shoal.models.learner import FitState, Learner
from shoal.models.pass_rows import PassRows
from shoal.models.plan import FitInput, Plan
from shoal.models.progress_rows import ProgressRows, key
from shoal.models.shares import Share, divided
from shoal.models.sources import identity
from shoal.models.team import START_AGAIN, Team

log = logging.getLogger(__name__)

_HELLO, _RECORDS, _PREDICTIONS, _DENSE = range(1, 5)  # notes


class _Hello(msgspec.Struct, frozen=True):
    """What a worker says before a fit: its settings, its split, and what keeps it from beginning."""

    settings: bytes
    split: tuple[int, int]
    is_reader: bool
    has_valid: bool
    has_model: bool
    data: str  # what identifies the data of a reader that is not the worker's split; empty: unknown
    sizes: tuple[int, ...]  # of the files of which the reader has the worker's split; empty: unknown
    failed: str | None


class _Records(msgspec.Struct, frozen=True):
    """What a division begins with: the records of the models, what they need to join, and where the leader was."""

    models: list[Standing]
    meeting: bytes
    splits: list[tuple[int, int]]
    is_shared: bool
    any_valid: bool
    present: list[int]
    barriers: dict[str, int]


_hello = msgpack_decoder(_Hello)
_records = msgpack_decoder(_Records)


class Progress:
    """How far a fit is: its pass, its shares and its metrics, in rows that outlive its workers."""

    def __init__(
        self, models: Sequence[Learner], team: Team, plan: Plan, every: int | None, reader: object = None
    ) -> None:
        # The newest one that this worker has read.
        self.header = Header()
        # What this worker has of the present division.
        self.work = PassRows(models, team, every)
        # What models need to join: `Learner.prepare_to_join` of the leader.
        self.meeting = b""
        # Whether any worker has validation data.
        self.any_valid = False
        # Number of the division that this worker has met the others for, and of the one whose records it has.
        self._division = self._recorded = 0
        self._models = models
        self._team = team
        self._rows: ProgressRows = team.rows
        self._plan = plan
        self._stream = reader if isinstance(reader, Reader) and is_live(reader) and not plan.shuffles else None
        # has_found: Whether others have begun this fit. is_in_place: Whether this worker has the place of one of them.
        self.has_found = self.is_in_place = False
        self._splits: list[tuple[int, int]] = []  # of the workers
        self._is_shared = True  # whether all have readers of splits of the same data, which others can learn from
        # Whether rows are written as they change.
        self.writes = team.can_continue

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def find(self) -> bool:
        """Return whether others have begun this fit, which this worker continues; of a predecessor its place is taken.

        The header and the records of the models are then theirs.
        """
        team, member = self._team, self._team.store.member
        job = member.job if member.is_replacement else member.continued if team.may_change else None
        if job is None or not self.writes:
            return False
        header = self._pull_header()
        if header.job != job or header.fit < team.number:
            return False
        self.header = self.work.header = header
        self.has_found = True
        team.begun()
        if job != member.job or header.fit > team.number:
            self._take_records()
            return True
        while self._division != self.header.division:  # the leader may write another one meanwhile
            self._division = self.header.division
            records = self._take_records()
            team.came_to(self.header.meetings - 1, records.barriers, records.present)
            team.meet()
            self._read()
        self.is_in_place = True
        if team.leads:
            self.work.take_curves()
        return True

    @property
    def is_over(self) -> bool:
        """Whether others have completed the fit that `find` has found."""
        return self.header.fit > self._team.number or bool(self.header.is_over)

    def take_result(self) -> None:
        """Take what the others have learned in a fit that is over."""
        if self.header.job != self._team.store.member.job:
            self._take_dense_part()
            self.work.take_states()
        for model in self._models:
            model.come_late()

    def hand_over(self) -> bool:
        """Leave the rows for another job to continue; return whether any worker of this one has begun to write some."""
        if not self.writes:
            return False
        self._rows.settle()
        header = self._pull_header()
        content = self._models[0].common_state() if self._team.leads else b""
        if content:
            self._rows.put_note(_DENSE, 0, content, tag=header.division)
        return header.job == self._team.store.member.job

    def agree(
        self, settings: Mapping[str, object], given: FitInput, failed: Exception | None, *, has_model: bool
    ) -> None:
        """Meet the others before a fit, and raise the error of any of them that cannot begin, or differs."""
        team, store = self._team, self._team.store
        split = (0, 1) if team.is_alone else (store.rank, store.num_workers)
        is_reader = isinstance(given.reader, Reader)
        if is_reader:
            split = tuple(given.reader.position()["shard"])
        self._splits, self.any_valid = [split] * store.num_workers, given.valid is not None
        if team.is_alone:
            team.meet()
            if failed is not None:
                raise failed
            return
        encoded = msgspec.json.encode(
            settings, enc_hook=lambda one: one.item() if isinstance(one, np.generic) else str(one)
        )
        is_split = split == (store.rank, store.num_workers)
        data = "" if is_split else identity(given.reader)
        sizes = file_sizes(given.reader) if is_split else ()
        why = None if failed is None else str(failed)
        hello = _Hello(encoded, split, is_reader, self.any_valid, has_model, data, sizes, why)
        self._rows.put_note(_HELLO, store.rank, msgspec.msgpack.encode(hello), tag=self._tag)
        team.meet(patiently=False)
        said = {rank: its for rank in team.present if (its := self._heard(rank)) is not None}
        failed = failed or _difference(said)
        if failed is not None:
            with contextlib.suppress(DeadlineExceededError):
                team.meet(patiently=False)  # none says anything else while others read
            raise failed
        self._splits = [
            said[rank].split if rank in said else (rank, store.num_workers) for rank in range(store.num_workers)
        ]
        self._is_shared = all(
            its.is_reader and tuple(its.split) == (rank, store.num_workers) for rank, its in said.items()
        )
        if team.may_change and not self._is_shared:
            raise ValueError(
                "the number of workers may change, and others cannot continue with the data of one: pass each worker "
                "its split of the same reader, reader.split(store.rank, store.num_workers)"
            )
        self.any_valid = any(its.has_valid for its in said.values())

    def _heard(self, rank: int) -> _Hello | None:
        content = self._rows.note(_HELLO, rank, self._tag)
        return None if content is None else _hello.decode(content)

    @property
    def _tag(self) -> int:
        """Of what workers say before this fit."""
        return self._team.store.member.job << 24 | self._team.number

    def begin(self, resumed: FitState | None, *, has_begun: bool) -> None:
        """Begin the fit, or divide what is left of it among the workers of this job; all of them read it then.

        ``resumed``: its rows are those of a checkpoint. ``has_begun``: by the workers of another job.
        """
        if resumed is not None:
            self._find_saved(resumed)
            self.header.clocks = max(self.header.clocks, resumed.clocks)
            for model in self._models:
                model.record.examples = self.header.known  # until the pass ends
        elif has_begun:
            self._take_dense_part()
        self._until_published(lambda: self._begin(is_saved=resumed is not None, has_begun=has_begun))
        self._team.begun()

    def _take_dense_part(self) -> None:
        """Take what the workers of the job before had in common, and not in tables."""
        first = self._models[0]
        if first.common_state():
            content = self._rows.note(_DENSE, 0, self.header.division)
            if content is None:
                raise WorkerLostError(
                    "the worker that had the dense part ended before it had handed it over, when the number of workers "
                    f"changed: {START_AGAIN}"
                )
            first.set_common_state(content)

    def _begin(self, *, is_saved: bool, has_begun: bool) -> None:
        present, header = self._team.present, self.header
        if has_begun:
            self._note_irregular("the number of its workers has changed")
        if is_saved or has_begun:
            new = divided(self.work.left(is_saved=is_saved), len(present), is_live=self._stream is not None)
            if is_saved and header.lags:
                self.work.take_saved_sums()
            self._publish(dict(zip(present, new, strict=True)), clocks=header.clocks)
        else:
            known = min(model.examples for model in self._models)
            division = self._pull_header().division if self.writes else 0  # of an earlier fit
            self.header = Header(division=division, known=known)
            self._publish(self._whole())

    def _find_saved(self, resumed: FitState) -> None:
        """Find the rows of a checkpoint."""
        if resumed.table != self._rows.name:
            raise ShoalError(
                f"the checkpoint has the progress of its fit in table {resumed.table!r}, and this fit writes "
                f"{self._rows.name!r}: resume it in a job of the same name"
            )
        self.header = self.work.header = self._pull_header()
        if not self.header.division:
            raise ShoalError(f"table {self._rows.name!r} of the checkpoint has no fit: begin another one")

    def _whole(self) -> dict[int, list[Share]]:
        """Return the shares of a whole pass: each worker has its own split, and of those of the ones gone a part."""
        present = self._team.present
        if self._stream is not None:
            parts = [_share_of(part) for part in parts_of(self._stream, len(present))]
            return {rank: parts[index :: len(present)] for index, rank in enumerate(present)}
        shares = [[Share(rank=rank, workers=workers)] for rank, workers in self._splits]
        if self._team.is_alone:
            return {present[0]: shares[present[0]]}
        gone = [its for rank, its in enumerate(shares) if rank not in present]
        return self._with_rest({rank: shares[rank] for rank in present}, gone if self._is_shared else [])

    def _with_rest(self, lists: dict[int, list[Share]], rest: list[list[Share]]) -> dict[int, list[Share]]:
        """Divide what workers that are gone had left among those that are there."""
        parts = divided(rest, len(self._team.present), is_live=self._stream is not None)
        for rank, more in zip(self._team.present, parts, strict=True):
            lists.setdefault(rank, []).extend(more)
        return lists

    # ---- divisions ---------------------------------------------------------------------------------------------------

    def _until_published(self, publish: Callable[[], None]) -> None:
        """Have the leader publish a division; return when this worker has read it, whoever leads."""
        before, this = self._division, (self._team.store.member.job, self._team.number)
        while True:
            if is_mine := self._team.leads:
                publish()
            self._team.meet()
            self._read(is_mine=is_mine)
            if self.header.division > before and (self.header.job, self.header.fit) == this:
                break
        # Not the header's: the leader may have written the next one already.
        self._division = before + 1 if before else self.header.division

    def _publish(self, lists: Mapping[int, Sequence[Share]], **changes: int) -> None:
        """Write a division: its header last."""
        store, team, before = self._team.store, self._team, self.header
        if not team.is_alone and len(team.present) < store.num_workers:
            self._note_irregular("a worker was lost, and the others have learned from what it had left")
        header = structs.replace(
            before,
            job=store.member.job,
            fit=team.number,
            epochs=self._plan.epochs,
            division=before.division + 1,
            shares=sum(len(shares) for shares in lists.values()),
            workers=store.num_workers,
            models=len(self._models),
            classes=getattr(self._models[0].accumulator(), "classes", 0),
            meetings=team.meetings + 1,
            clock=store.clock,
            lags=int(self._rows.lags),
            **changes,
        )
        if not self.writes:
            self.header = header
            self.work.take(header, lists[store.rank])
            return
        if not before.fit or header.epoch != before.epoch:
            self.work.erase(header.epoch)
        self.work.assign(header, lists)
        records = _Records(
            [Standing.of(model.record) for model in self._models],
            self.meeting,
            self._splits,
            self._is_shared,
            self.any_valid,
            team.present,
            dict(store.member.barriers),
        )
        self._rows.put_note(_RECORDS, header.division % 2, msgspec.msgpack.encode(records), tag=header.division)
        self._rows.assign([key(HEADER)], np.array([header.to_row()]))

    def _note_irregular(self, why: str) -> None:
        """Note in the records why the fit is no function of its data and settings any more."""
        for model in self._models:
            fits = model.record.fits
            fits[-1] = structs.replace(fits[-1], irregular=fits[-1].irregular or why)

    def _pull_header(self) -> Header:
        return Header.from_row(self._rows.pull([key(HEADER)])[0].tolist())

    def _take_records(self) -> _Records:
        """Take the records that the header names."""
        content = self._rows.note(_RECORDS, self.header.division % 2, self.header.division)
        if content is None:
            raise ShoalError(f"table {self._rows.name!r} does not have the records of its fit any more: begin another")
        records = _records.decode(content)
        for model, standing in zip(self._models, records.models, strict=True):
            standing.give(model.record)
        self._splits, self._is_shared = records.splits, records.is_shared
        self.any_valid, self.meeting = records.any_valid, records.meeting
        self._recorded = self.header.division
        return records

    def _read(self, *, is_mine: bool = False) -> None:
        """Read the newest division, and what this worker has of it; ``is_mine``: it has written it."""
        if not self.writes:
            return
        self.header = self._pull_header()
        if is_mine:
            self._recorded = self.header.division
        elif self.header.division > self._recorded:
            self._take_records()
        self.work.read(self.header)

    def divide_rest(self, *, is_paused: bool = False) -> bool:
        """Divide what workers that are gone have left of the pass among the others; return whether there was any.

        After a meeting at which all others have ended. ``is_paused``: or have paused, and keep what they have left.
        """
        if self._team.is_alone or not self.writes:
            return False
        lists = self.work.left()
        if self._stream is not None or is_paused:
            return self._divide_again(lists)
        left = [shares for shares in lists if shares]
        if not left:
            return False
        if self._team.leads:
            what = "the others continue from there"
            if not self._is_shared:
                what = (
                    "what was left of their batches is not learned from, since not all workers have readers of their "
                    "splits, reader.split(store.rank, store.num_workers)"
                )
            log.warning("%s ended within pass %d: %s", counted(len(left), "worker"), self.header.epoch + 1, what)
        if not self._is_shared:
            return False
        self._until_published(lambda: self._publish(self._with_rest({}, left), clocks=self.work.clocks))
        return True

    def _divide_again(self, lists: list[list[Share]]) -> bool:
        """Divide what workers that are gone have left among the others, which keep their own."""
        present = self._team.present
        gone = [shares for rank, shares in enumerate(lists) if shares and rank not in present]
        if not any(lists):
            return False
        if self._team.leads and gone:
            log.warning("%s ended: the others read what they have left", counted(len(gone), "worker"))
        own = {rank: lists[rank] if rank < len(lists) else [] for rank in present}
        self._until_published(lambda: self._publish(self._with_rest(own, gone), clocks=self.work.clocks))
        return True

    # ---- the end of a pass -------------------------------------------------------------------------------------------

    def predict(self, mine: Callable[[], bytes]) -> None:
        """Write what this worker has predicted, by the function, and meet the others."""
        if not self._team.is_past:
            self._rows.put_note(_PREDICTIONS, self._team.store.rank, mine(), tag=self.header.division)
        self._team.meet()

    def predictions(self) -> list[bytes]:
        """Return what all workers there have predicted."""
        ranks = range(self._team.store.num_workers)
        found = [self._rows.note(_PREDICTIONS, rank, self.header.division) for rank in ranks]
        return [one for one in found if one is not None]

    def end_pass(self, publish: Callable[[], None]) -> None:
        """Have the leader complete the pass, and begin the next one; return when all know of it."""
        before = self.header

        def next_pass() -> None:
            publish()
            known = min(model.examples for model in self._models)
            is_last = self._stream is not None  # a stream has one pass
            next_one = {rank: [] for rank in self._team.present} if is_last else self._whole()
            self._publish(next_one, epoch=before.epoch + 1, known=known, clocks=0)

        self._until_published(next_pass)
        if self.writes and self._team.leads:
            self.work.erase(before.epoch, with_sums=False)  # who watches sees them for longer
            self._rows.drop_notes(_PREDICTIONS, range(self._team.store.num_workers))

    def end(self, save: Callable[[], None] = lambda: None) -> None:
        """Have the leader save what was learned, and record that the fit is over; return when all know of it."""

        def publish() -> None:
            save()
            if self.writes:
                self._publish({}, is_over=1, clocks=self.work.clocks)

        if self.writes:
            self._until_published(publish)
        else:
            publish()


def _share_of(part: Part) -> Share:
    begin = part.begin
    return Share(rank=part.rank, workers=part.num_splits, file=begin.file, offset=begin.offset, end=part.end)


def _files(its: _Hello) -> str:
    return f"{counted(len(its.sizes), 'file')} of {sum(its.sizes):,} bytes"


def _difference(said: Mapping[int, _Hello]) -> Exception | None:
    """Return the error of workers that begin a fit with different settings, or of one that cannot; None: all can."""
    first, *others = said.items()
    for rank, its in said.items():
        if its.failed is not None:
            return ShoalError(f"worker {rank} cannot begin the fit: {its.failed}")
    ours: dict[str, Any] = msgspec.json.decode(first[1].settings)
    for rank, its in others:
        theirs = msgspec.json.decode(its.settings)
        for name, value in ours.items():
            if theirs.get(name) != value:
                return ValueError(
                    f"{name} is {value!r} on worker {first[0]} and {theirs.get(name)!r} on worker {rank}: pass all "
                    "workers of a fit the same settings"
                )
        if its.has_model != first[1].has_model:
            return ShoalError(
                f"worker {first[0]} and worker {rank} do not see the same checkpoint: the directory must be on storage "
                "that all workers share"
            )
        if its.sizes and first[1].sizes and its.sizes != first[1].sizes:
            return ValueError(
                f"worker {first[0]} reads {_files(first[1])} and worker {rank} {_files(its)}: each learns from its "
                "split of them, so pass all workers of a fit the same files"
            )
    readers: dict[str, int] = {}
    for rank, its in said.items():
        if its.data and (other := readers.setdefault(its.data, rank)) != rank:
            return ValueError(
                f"workers {other} and {rank} read the same examples: pass each worker its split of the data, "
                "reader.split(store.rank, store.num_workers)"
            )
    return None
