"""A recorded fit under SSP or ASP made again: the same bits, in one process or on any number of servers.

    record, checkpoint --> each worker in a thread of its own: the same fit, of its split of the data
    its pulls and pushes, in the order of the record --> one store (turns.py) --> the model

Threads: one for each worker, the caller's among them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from shoal.data import Batch
from shoal.errors import CorruptionError
from shoal.lineage.again import inputs_of
from shoal.lineage.order import RecordedOrder
from shoal.lineage.past import job_of
from shoal.lineage.turns import RecordEndsError, ReplayStore, Turns
from shoal.metrics import StreamMetrics
from shoal.models import files, fitting, order_record
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.order_record import START, Record
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.tools.load import load


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What was made again.

    Attributes
    ----------
    workers : int
    messages : int
        Pulls and pushes that were put in order, one for each endpoint.
    begin, end : int
        Examples that the model had learned from before and after.
    is_whole : bool
        Whether the replay has reached the end of the fit.
    why : str
        Why not.
    """

    workers: int
    messages: int
    begin: int
    end: int
    is_whole: bool
    why: str


def replay(
    record: StoragePath,
    output: StoragePath,
    *,
    checkpoint: StoragePath | None = None,
    store: Store | None = None,
    overwrite: bool = False,
    progress: bool | float = False,
) -> Replayed:
    """Make a recorded fit again: the model has the same bits.

    Parameters
    ----------
    record : path or URL
        As written by a fit with ``Checkpointing(record=)``, or by ``shoal train --record``.
    output : path or URL
        Where the model is written.
    checkpoint : path or URL, optional
        A checkpoint of the recorded fit to begin with, such as ``model/kept-000000080000``. Default: the model before
        its first batch, which the record has.
    store : Store, optional
        Where the rows are meanwhile: of any number of servers, with as many slots as that of the fit, one worker, under
        ASP, without tables, caches and filters. Default: a local store.
    overwrite : bool
        Whether to replace a model that is in ``output``.
    progress : bool, int or float
        As of `shoal.models.Model.fit`.

    Returns
    -------
    Replayed

    Raises
    ------
    CorruptionError
        A file of the record is missing, cut short or changed, or is of another record.
    FileNotFoundError
        There is no such record.
    ValueError
        The data has changed, the checkpoint is of another fit, the store does not suit, or ``output`` holds anything
        but a model that may be replaced.

    Notes
    -----
    Blocks for about the time in which one process makes the steps of all workers. Where the record ends early, since a
    worker or a server was lost, the model is that of the last checkpoint before, and `Replayed.is_whole` is False.
    """
    place, target = open_dir(record), open_dir(output)
    described = order_record.read(place)
    files.check_target(target, overwrite=overwrite)
    origin = place.child(START) if checkpoint is None else open_dir(checkpoint)
    if target.is_same(origin) or target.is_same(place):
        raise ValueError(f"{target} is what the replay begins with: choose another directory")
    start = files.read(origin)
    if start.fit_state is None or not start.history.fits or start.history.fits[-1].source is None:
        raise ValueError(f"{origin} is no checkpoint of a fit that is under way: pass one that the recorded fit kept")
    if start.fit_state.record != described.id:
        raise ValueError(
            f"{origin} is no checkpoint of the fit whose record is in {place}: pass one that this fit kept"
        )
    begin = _division_at(described, start.examples, origin)
    with contextlib.ExitStack() as held:
        if store is None:
            store = held.enter_context(files.store_for(origin))
        if store.tables or store.num_workers != 1 or store.consistency.is_bulk:
            raise ValueError(
                "a replay needs a store without tables, with one worker and under ASP: pass shoal.launch(servers, "
                "consistency=shoal.ASP()), or none"
            )
        order = RecordedOrder(place, described, begin)
        if not order.divisions:
            raise ValueError(f"the record in {place} has no part from {start.examples:,} examples on: {order.why}")
        if order.slots not in (0, store.slots):
            raise ValueError(
                f"the record in {place} is of {order.slots} slots, and the store has {store.slots}: pass a store with "
                f"slots={order.slots}"
            )
        turns = Turns(order, store, described.workers, str(place))
        files.copy(origin, target)
        files.drop_kept(target)
        run = _Run(turns, target, start, progress)
        try:
            run.run()
            if left := order.calls_left + turns.waiting:
                raise CorruptionError(
                    f"the fit has ended, and {left} calls of the record in {place} are left: it is that of another fit"
                )
            if turns.has_ended and not order.why:
                raise CorruptionError(f"the fit has more calls than the record in {place}: it is that of another fit")
        except BaseException:
            target.clear()  # it would look like a model
            raise
    return Replayed(
        workers=described.workers,
        messages=order.messages,
        begin=start.examples,
        end=start.examples + run.learned,
        is_whole=not turns.has_ended,
        why=order.why if turns.has_ended else "",
    )


def _division_at(record: Record, examples: int, origin: StorageDir) -> int:
    """Return the number of the division that begins with a checkpoint."""
    found = [one.number for one in record.divisions if one.examples == examples]
    if not found:
        known = ", ".join(f"{one.examples:,}" for one in record.divisions) or "none"
        raise ValueError(
            f"{origin} is a checkpoint of {examples:,} examples, and the record begins at those of {known}: pass one "
            "that the recorded fit has kept"
        )
    return found[-1]  # those before it have learned nothing


class _Run:
    """The workers of a replay."""

    def __init__(self, turns: Turns, place: StorageDir, start: files.ModelFile, progress: bool | float) -> None:
        # Examples that all workers have learned from.
        self.learned = 0
        self._turns = turns
        self._place = place
        self._fit, self._begin = start.history.fits[-1], start.examples
        # Of the recorded fit: the table of its progress has it in its name.
        self._job = job_of(start)
        self._progress = progress
        self._lock = threading.Lock()

    def run(self) -> None:
        """Make the fit again; raise the first error of any worker."""
        turns = self._turns
        others = [
            threading.Thread(target=self._work, args=(rank,), name=f"shoal replay {rank}", daemon=True)
            for rank in range(1, turns.workers)
        ]
        for one in others:
            one.start()

        def save(model: Any) -> None:
            for one in others:
                one.join()
            if turns.failed is None:
                model.record.examples = self._begin + self.learned
                model.save(self._place, overwrite=True)

        self._work(0, save)
        for one in others:
            one.join()
        if turns.failed is not None:
            raise turns.failed

    def _work(self, rank: int, save: Callable[[Any], None] = lambda model: None) -> None:
        """Be a worker; ``save`` is called with its model where the record ends."""
        turns = self._turns
        try:
            with ReplayStore(turns, rank, self._job) as store, load(self._place, store=store) as model:
                try:
                    self._learn(rank, model)
                except RecordEndsError:
                    turns.leave(rank)
                    save(model)
        except RecordEndsError:
            pass
        except BaseException as error:
            turns.fail(error)
        finally:
            turns.leave(rank)

    def _learn(self, rank: int, model: Any) -> None:
        fitting.fit(
            [cast(Learner, model)],
            inputs_of(self._fit, model, rank, self._turns.workers),
            progress=self._progress if rank == 0 else False,
            checkpoint=Checkpointing(self._place, resume=True, overwrite=True),
            observers=[_Counter(self)],
        )


class _Counter(FitObserver):
    """Counts what the workers learn from."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._size = 0

    def batch_begins(self, batch: Batch) -> None:
        self._size = len(batch)

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        with self._run._lock:
            self._run.learned += self._size
