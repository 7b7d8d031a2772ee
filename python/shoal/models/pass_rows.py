"""PassRows: what one worker has of a division, and the rows that it pushes with each of its batches.

    batch    its share's position, the sums of the pass's metrics, now and then counts of histograms --> one push

The rows are described in base/fit_rows.py, and what they are for in progress.py.

Threads: the one that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec import structs

from shoal.base.decoders import msgpack_decoder
from shoal.base.fit_rows import (
    COUNTS,
    DIM,
    FILES,
    HEADER,
    PASSES,
    SAVED_SHARE,
    SAVED_SUMS,
    SHARE,
    STATE,
    STOP,
    SUMS,
    TOTALS,
    Header,
)
from shoal.metrics import StreamMetrics
from shoal.models.history import Standing
from shoal.models.learner import Learner
from shoal.models.model_trainer import ModelTrainer
from shoal.models.pass_reader import PassReader
from shoal.models.progress_rows import Keys, ProgressRows, Row, key, keys_of
from shoal.models.shares import ROW, Share
from shoal.models.team import Team

COUNTS_EVERY = 1 << 16  # examples between two pushes of a worker's histograms

# Fields of a row of SHARE: the rank of its worker; whether it has no batch left; batches of it that count, and, where
# these follow behind, that were begun. Those of the share come next.
_OWNER, _OVER, _DONE, _SENT, _SHARE = range(5)
_SENT_ONE = np.array([number == _SENT for number in range(DIM)], np.int64)

_CURVE = 0  # a note
_MANY = 1 << 12  # shares of a place
_DIVISION = 0  # field of the first row of a state, which follows it
_STATE = 8  # bytes before it

_curves = msgpack_decoder(list[Standing])


class PassRows:
    """The shares of a worker, and the metrics of its pass, as rows."""

    def __init__(self, models: Sequence[Learner], team: Team, every: int | None) -> None:
        # Of the division.
        self.header = Header()
        # What this worker has left of the pass.
        self.shares: list[Share] = []
        # Clocks between two checkpoints.
        self.every = every
        self._models = models
        self._team = team
        self._rows: ProgressRows = team.rows
        self._writes = team.can_continue
        self._numbers: list[int] = []  # of the shares of this worker
        self._share_keys: Keys = np.empty(0, np.uint64)  # of all workers
        self._done: list[int] = []  # batches of each, by this worker
        self._ended = 0  # shares that have no batches left
        self._largest = 0  # examples of a batch
        self._states: list[bytes] = []  # of the models, as rows have them
        self._blocks: dict[int, int] = {}  # of the histogram of each model
        self._files: dict[int, list[int]] = {}  # digests of the names that each split of a folder has begun

    # ---- a division --------------------------------------------------------------------------------------------------

    def assign(self, header: Header, lists: Mapping[int, Sequence[Share]]) -> None:
        """Write the shares of all workers of a division, and what learning has changed in each of them alone."""
        rows = [_row(rank, share) for rank, shares in lists.items() for share in shares]
        self._rows.assign(_keys_of_shares(SHARE, header), np.array(rows).reshape(-1, DIM))
        self._divide_states(header)

    def take(self, header: Header, shares: Sequence[Share]) -> None:
        """Take the shares of a worker that writes no rows while it learns."""
        self.header = header
        self._take([(number, share, 0) for number, share in enumerate(shares)])

    def read(self, header: Header) -> None:
        """Read what this worker has of a division, the present one or one that follows."""
        self.header = header
        self.take_states()
        rows = self._share_rows()
        mine = np.flatnonzero((rows[:, _OWNER] == self._team.store.rank) & (rows[:, _OVER] == 0)).tolist()
        self._take([(number, _share(rows[number], header), int(rows[number, _DONE])) for number in mine])
        for number in mine:
            if header.lags and rows[number, _SENT] != rows[number, _DONE]:  # what the predecessor had begun
                known = rows[number].copy()
                known[_SENT] = known[_DONE]
                known[_SHARE : _SHARE + ROW] = _share(rows[number], header).to_row()  # its repeats
                self._rows.add_now(self._share_key(number), known - rows[number])
                rows[number] = known
            self._rows.knows(self._share_key(number), rows[number])

    def _take(self, found: Sequence[tuple[int, Share, int]]) -> None:
        self._share_keys = _keys_of_shares(SHARE, self.header)
        self._numbers = [number for number, _, _ in found]
        self.shares = [share for _, share, _ in found]
        self._done = [done for _, _, done in found]
        self._ended = 0
        if self._writes:
            self._files.clear()  # another worker may have continued with them

    def files(self, share: Share) -> list[int]:
        """Return the digests of the names of the files of a folder that a share has begun."""
        if share.rank not in self._files:
            known = 0 if share.examples == 0 else share.file + 1
            keys = keys_of(FILES, share.rank, 0, -(-known // DIM))
            rows = self._rows.pull(keys) if known else np.empty((0, DIM), np.int64)
            for at, row in zip(keys.tolist(), rows, strict=True):
                self._rows.knows(at, row)
            self._files[share.rank] = rows.reshape(-1)[:known].tolist()
        return list(self._files[share.rank])

    def _begin_files(self, share: Share, begun: Sequence[int]) -> None:
        """Set the digests of files that a batch was the first of, in the clock of the batch."""
        if not begun:
            return
        files = self._files.setdefault(share.rank, [])
        first = len(files) // DIM
        files.extend(begun)
        for at, row in self._file_rows(share.rank, first) if self._writes else ():
            self._rows.set(at, row)

    def _file_rows(self, rank: int, first: int = 0) -> list[tuple[int, Row]]:
        files = self._files[rank]
        rows = np.zeros((-(-len(files) // DIM), DIM), np.int64)
        rows.reshape(-1)[: len(files)] = files
        keys = keys_of(FILES, rank, 0, len(rows)).tolist()
        return list(zip(keys, rows, strict=True))[first:]

    def left(self, *, is_saved: bool = False) -> list[list[Share]]:
        """Return what each worker of the division has left; ``is_saved``: rows are those of a checkpoint."""
        rows = self._share_rows()
        if is_saved and self.header.lags:
            # Servers made their snapshots after the copy of the rows, and before or after a later batch was sent.
            sent, rows = rows[:, _SENT], self._share_rows(SAVED_SHARE)
            rows[:, _SENT] = sent
        lists: list[list[Share]] = [[] for _ in range(self.header.workers)]
        for row in rows[rows[:, _OVER] == 0]:
            lists[row[_OWNER]].append(_share(row, self.header))
        return lists

    def _share_rows(self, kind: int = SHARE) -> Row:
        return self._rows.pull(_keys_of_shares(kind, self.header))

    def _share_key(self, number: int) -> int:
        return int(self._share_keys[number])

    # ---- batches -----------------------------------------------------------------------------------------------------

    @property
    def clocks(self) -> int:
        """Clocks of the pass so far: batches of this worker, or of others."""
        return self.header.clocks + self._team.store.clock - self.header.clock

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint follows the clock that is about to end."""
        return self.every is not None and (self.clocks + 1) % self.every == 0

    def begin_batch(self, index: int) -> None:
        """Say that a batch of a share is about to be learned from, if its position will follow behind."""
        if self._writes and self._rows.lags:
            self._rows.add_now(self._share_key(self._numbers[index]), _SENT_ONE)

    def learned(self, data: PassReader, examples: int, trainers: Sequence[ModelTrainer]) -> None:
        """Account for a batch, within the clock that is about to end."""
        index, share = data.learned()
        given = self.shares[index]
        self._largest = max(self._largest, examples)
        self._done[index] += 1
        self.shares[index] = share = structs.replace(share, repeats=max(0, given.repeats - 1))
        if given.repeats:
            for trainer in trainers:
                trainer.repeated += examples
        if data.is_live:
            self._team.store.activity.late_examples += data.late
            for trainer in trainers:
                trainer.skipped += share.skipped - given.skipped
                trainer.late += data.late
                record = trainer.model.record
                record.event_time = max(record.event_time, share.newest)
            self._begin_files(share, data.files_begun)
        else:
            self._end_shares(index, data, trainers)
        if not self._writes:
            return
        at = self._share_key(self._numbers[index])
        row = _row(self._team.store.rank, share)
        row[_DONE], row[_SENT] = self._done[index], self._rows.known(at)[_SENT]
        self._rows.set(at, row)
        self._add_metrics(trainers, with_counts=self.is_due)
        self._set_states()
        self._rows.push()

    def ended(self, data: PassReader, trainers: Sequence[ModelTrainer], *, is_over: bool = True) -> None:
        """Account for the end of all shares of this worker, within the clock that is about to end.

        ``is_over``: They have nothing left; otherwise a stream is to be divided again, or to end here.
        """
        if is_over:
            self._end_shares(len(self.shares), data, trainers)
        if self._writes:
            self._add_metrics(trainers, with_counts=True)

    def _end_shares(self, end: int, data: PassReader, trainers: Sequence[ModelTrainer]) -> None:
        """Account for the shares before ``end``, which have no batches left."""
        for index in range(self._ended, end):
            for trainer in trainers:
                trainer.skipped += data.skipped_in(index)
                # As many as there were no batches for: several workers have died in the last ones.
                trainer.repeated += self.shares[index].repeats * self._largest
            if self._writes:
                at = self._share_key(self._numbers[index])
                row = self._rows.known(at).copy()
                row[_OVER] = 1
                self._rows.set(at, row)
        self._ended = max(self._ended, end)

    def tick(self) -> None:
        """End a clock in which this worker had no batch."""
        self._rows.push()
        self._team.store.tick()

    def leave(self) -> None:
        """Have the positions of all batches arrive, before others continue without this worker."""
        if self._writes:
            self._rows.settle()

    def _add_metrics(self, trainers: Sequence[ModelTrainer], *, with_counts: bool) -> None:
        epoch = self.header.epoch
        has_counts = False
        for trainer in trainers:
            number = self._models.index(trainer.model)
            if with_counts or trainer.uncounted >= COUNTS_EVERY:
                blocks, counts = trainer.take_counts()
                self._rows.add_all(self._counts_keys(trainer.model, number, epoch)[blocks], counts)
                has_counts = True
            self._rows.add(self._sums_key(SUMS, number, epoch), trainer.take_sums())  # which say what was counted
        if has_counts and self._team.leads:
            curves = [Standing.of(model.record) for model in self._models]
            self._rows.put_note(_CURVE, 0, msgspec.msgpack.encode(curves), tag=self.header.division)

    def _set_states(self) -> None:
        """Set what the batch has changed in this worker alone."""
        states = [model.local_state() for model in self._models]
        if states != self._states:
            self._states = states
            rows = _state_rows(self.header, states)
            keys = self._state_keys(self.header, self._team.store.rank, len(rows))
            for at, row in zip(keys.tolist(), rows, strict=True):
                self._rows.set(at, row)

    def _divide_states(self, header: Header) -> None:
        """Give each worker of a new division the state of one of the division before, or else that of this one."""
        before, states = self.header, [model.local_state() for model in self._models]
        own = _state_rows(header, states)
        is_restored = header.is_over and states != self._states  # all have the best weights
        for rank in range(header.workers if len(own) else 0):
            rows = self._rows.pull(self._state_keys(before, rank % max(1, before.workers), len(own)))
            if not before.fit or rows[0, _DIVISION] != before.division or is_restored:
                rows = own
            rows[0, _DIVISION] = header.division
            self._rows.assign(self._state_keys(header, rank, len(own)), rows)

    def take_states(self) -> None:
        """Take what learning has changed in this worker alone, or in the one whose place it has."""
        self._states = [model.local_state() for model in self._models]
        rank = self._team.store.rank % max(1, self.header.workers)
        keys = self._state_keys(self.header, rank, len(_state_rows(self.header, self._states)))
        if not len(keys):
            return
        rows = self._rows.pull(keys)
        for at, row in zip(keys.tolist(), rows, strict=True):
            self._rows.knows(at, row)
        content = rows.tobytes()[_STATE:]
        for number, model in enumerate(self._models):
            size = len(self._states[number])
            self._states[number], content = content[:size], content[size:]
            if size:
                model.set_local_state(self._states[number])

    @staticmethod
    def _state_keys(header: Header, rank: int, count: int) -> Keys:
        return keys_of(STATE, header.division % 2, rank, count)

    # ---- the end of a stream -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Have all workers end their streams within this division."""
        row = np.zeros((1, DIM), np.int64)
        row[0, 0] = self.header.division
        self._rows.assign([key(STOP)], row)

    def is_stopped(self) -> bool:
        """Whether a worker has called `stop`. Waits for the clocks that a pull waits for."""
        return bool(self._rows.pull([key(STOP)])[0, 0] == self.header.division)

    # ---- all workers -------------------------------------------------------------------------------------------------

    def seen(self, trainer: ModelTrainer) -> tuple[StreamMetrics, Row]:
        """Return the metrics of the pass of all workers, and its row of SUMS."""
        number, epoch = self._models.index(trainer.model), self.header.epoch
        sums = self._rows.pull([self._sums_key(SUMS, number, epoch)])[0]
        seen = trainer.model.accumulator()
        keys = self._counts_keys(trainer.model, number, epoch)
        seen.take(sums[TOTALS:], self._rows.pull(keys).reshape(-1) if len(keys) else np.empty(0, np.int64))
        return seen, sums

    def examples(self, model: Learner) -> int:
        """Return how many examples all workers have learned from in this pass."""
        number = self._models.index(model)
        return int(self._rows.pull([self._sums_key(SUMS, number, self.header.epoch)])[0, TOTALS])

    def erase(self, epoch: int, *, with_sums: bool = True) -> None:
        """Erase the metrics of a pass."""
        for number, model in enumerate(self._models):
            self._rows.erase(self._counts_keys(model, number, epoch))
            if with_sums:
                self._rows.erase(np.array([self._sums_key(SUMS, number, epoch)], np.uint64))

    @staticmethod
    def _sums_key(kind: int, model: int, epoch: int) -> int:
        return key(kind, model, epoch % PASSES)

    def _counts_keys(self, model: Learner, number: int, epoch: int) -> Keys:
        if number not in self._blocks:
            self._blocks[number] = -(-len(model.accumulator().histogram()) // DIM)
        return keys_of(COUNTS, number, epoch % PASSES, self._blocks[number])

    def take_curves(self) -> None:
        """Take the learning curves of the predecessor of this worker."""
        content = self._rows.note(_CURVE, 0, self.header.division)
        for model, standing in zip(self._models, [] if content is None else _curves.decode(content), strict=False):
            standing.give_curve(model.record)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_point(self, trainers: Sequence[ModelTrainer]) -> str:
        """Make the rows those of this moment, for a checkpoint of them; return the name of their table.

        For the leader, between two clocks. Under BSP all others have ended the clock before, and none of a later one
        counts until this worker has ended it too.
        """
        if not self._writes:
            self._write_all(trainers)
        elif not self._rows.lags:
            self._rows.table.wait_for_clock()
        else:
            self._rows.settle()
            self._rows.assign(_keys_of_shares(SAVED_SHARE, self.header), self._share_rows())
            numbers = range(len(self._models))
            sums = self._rows.pull([self._sums_key(SUMS, number, self.header.epoch) for number in numbers])
            self._rows.assign([self._sums_key(SAVED_SUMS, number, self.header.epoch) for number in numbers], sums)
        return self._rows.name

    def _write_all(self, trainers: Sequence[ModelTrainer]) -> None:
        """Write all rows of a fit that writes none while it learns."""
        header = self.header
        header.clocks, header.clock, header.shares = self.clocks, self._team.store.clock, len(self.shares)
        rank = self._team.store.rank
        rows = np.array([_row(rank, share) for share in self.shares]).reshape(-1, DIM)
        self._numbers, self._done = list(range(len(rows))), [0] * len(rows)
        header.workers = 1
        rows[:, _OWNER] = 0
        self._rows.assign(_keys_of_shares(SHARE, header), rows)
        for split in self._files:
            for at, row in self._file_rows(split):
                self._rows.assign([at], row[None])
        self.erase(header.epoch)
        if header.epoch:
            self.erase(header.epoch - 1)
        for trainer in trainers:
            number = self._models.index(trainer.model)
            self._rows.assign([self._sums_key(SUMS, number, header.epoch)], trainer.sums()[None])
            keys = self._counts_keys(trainer.model, number, header.epoch)
            self._rows.assign(keys, trainer.seen.histogram().reshape(-1, DIM))
        self._rows.assign([key(HEADER)], np.array([header.to_row()]))

    def take_saved_sums(self) -> None:
        """Make the sums of the pass those that a checkpoint was written with."""
        numbers, epoch = range(self.header.models), self.header.epoch
        saved = self._rows.pull([self._sums_key(SAVED_SUMS, number, epoch) for number in numbers])
        self._rows.assign([self._sums_key(SUMS, number, epoch) for number in numbers], saved)


def _keys_of_shares(kind: int, header: Header) -> Keys:
    """Return the keys of the shares of a division."""
    half, shares = header.division % 2, header.shares
    parts = [keys_of(kind, half, many, min(_MANY, shares - many * _MANY)) for many in range(shares // _MANY + 1)]
    return np.concatenate(parts)


def _row(rank: int, share: Share) -> Row:
    """Return the row of a share that nobody has begun."""
    row = np.zeros(DIM, np.int64)
    row[_OWNER] = rank
    row[_SHARE : _SHARE + ROW] = share.to_row()
    return row


def _state_rows(header: Header, states: Sequence[bytes]) -> Row:
    """Return the rows of the states of all models in one worker; none if all of them are empty."""
    if not any(states):
        return np.empty((0, DIM), np.int64)
    content = header.division.to_bytes(_STATE, "little") + b"".join(states)
    rows = np.zeros((-(-len(content) // (DIM * 8)), DIM), np.int64)
    rows.reshape(-1).view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    return rows


def _share(row: Row, header: Header) -> Share:
    """Return the share of a row, with the batches that may count already where rows follow behind."""
    share = Share.from_row(row[_SHARE : _SHARE + ROW].tolist())
    if header.lags and row[_SENT] > row[_DONE]:
        share = structs.replace(share, repeats=share.repeats + int(row[_SENT] - row[_DONE]))
    return share
