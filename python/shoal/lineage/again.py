"""A part of a fit made again by as many workers as it had: this process alone, or with others around a server.

    checkpoint, data --> this process                                                       a fit of one worker
                     --> this process, one more for each other worker, one with the rows    a fit of several, under BSP

All make the same fit, and follow its clocks, so that all end at the same one.

Threads: the caller's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import msgspec
from msgspec import structs

from shoal.base.interrupts import held_back
from shoal.base.machine import cores
from shoal.data import Reader
from shoal.data.places import places_of
from shoal.data.readers import READERS
from shoal.errors import ShoalError, WorkerLostError
from shoal.metrics import StreamMetrics
from shoal.models import files, fitting
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.history import Fit
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.plan import FitInput
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.tools.load import load

Moment = tuple[int, int]  # between two clocks: the pass, from 0, and the clocks of it before

_TIMEOUT_SECONDS = 60.0  # of the calls of the workers
_PATIENCE_SECONDS = 5.0  # for them to end
_LONGEST_SECONDS = 86400.0  # for the model to be written


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What all who make a part of a fit again are told, besides the checkpoint that it begins with."""

    # Where the checkpoint is, and the model will be.
    place: str
    # begin, end: end is None where the fit ends.
    begin: Moment
    end: Moment | None
    # saves: Whether the model is written at `end`; where the fit ends, it is. keep: Whether checkpoints are kept.
    saves: bool
    keep: bool
    # consistency, workers, job: Of the fit.
    consistency: str
    workers: int
    job: str
    # scheduler, curve: Of the cluster of several workers.
    scheduler: str = ""
    curve: str | None = None


class Watcher:
    """Watches the rows while a part of a fit is made again."""

    def watch(self, model: Any) -> None:
        """Take the model that is about to learn."""
        self.model = model

    def reached(self, moment: Moment) -> None:
        """React to a moment after a clock: all rows are those of then."""


@contextmanager
def made(part: Part, watchers: Sequence[Watcher] = ()) -> Iterator[Any]:
    """Make a part of a fit again; yield the model as it is then."""
    if part.workers == 1:
        with files.store_for(part.place) as alone:
            alone.member.job_name = part.job
            with _learned(part, alone, watchers) as model:
                yield model
        return
    from shoal.cluster.launch.child import Process, ProcessFailedError, end_all
    from shoal.cluster.launch.local_cluster import running, threads_of_each
    from shoal.cluster.launch.workers import no_op
    from shoal.cluster.protocol.environment import find_keys

    curve, others = find_keys(os.environ), list[Process]()
    with running(1, slots=files.slots_of(part.place), threads=threads_of_each(1), curve=curve) as cluster:
        part = structs.replace(part, scheduler=cluster.address, curve=curve)
        told = msgspec.json.encode(part).decode()
        try:
            for rank in range(1, part.workers):
                command = [sys.executable, "-m", "shoal.lineage.worker", told, str(rank)]
                with held_back():
                    others.append(cluster.start_worker(rank, command, part.workers, no_op, no_op))
            with joined(part, 0) as store, _learned(part, store, watchers) as model:
                yield model
        except ShoalError as error:
            for other in others:
                if other.returncode:
                    raise ProcessFailedError(other) from error
            raise
        finally:
            end_all(others, _PATIENCE_SECONDS)


def work(part: Part, rank: int) -> None:
    """Be one of the other workers."""
    with joined(part, rank) as store, _learned(part, store):
        pass


@contextmanager
def joined(part: Part, rank: int) -> Iterator[Store]:
    """Join the cluster as a worker."""
    from shoal.cluster.worker.cluster_store import ClusterStore

    with ClusterStore(
        part.scheduler,
        job=part.job or None,
        consistency=part.consistency,
        workers=part.workers,
        rank=rank,
        timeout=_TIMEOUT_SECONDS,
        threads=max(1, cores() // part.workers),
        curve=part.curve,
        filters=None,
    ) as store:
        yield store


@contextmanager
def _learned(part: Part, store: Store, watchers: Sequence[Watcher] = ()) -> Iterator[Any]:
    """Make the part as one of its workers; yield the model."""
    place = open_dir(part.place)
    fit = files.read(place).history.fits[-1]
    with load(place, store=store) as model:
        for one in watchers:
            one.watch(model)
        given = inputs_of(fit, model, store.rank, part.workers)
        how = Checkpointing(place, resume=True, overwrite=True, keep=part.keep)
        with suppress(_Reached):
            fitting.fit(
                [cast(Learner, model)],
                given,
                progress=False,
                checkpoint=how,
                observers=[_Clocks(part, store, model, watchers)],
            )
        if why := cast(Learner, model).record.fits[-1].irregular:
            raise WorkerLostError(f"{place} could not be made again: {why}")
        yield model


class _Reached(Exception):
    """The part of the fit that was asked for is done."""


class _Clocks(FitObserver):
    """Follows the clocks of a part, and ends it."""

    def __init__(self, part: Part, store: Store, model: Any, watchers: Sequence[Watcher]) -> None:
        self._part = part
        self._store = store
        self._model = model
        self._watchers = watchers
        self._epoch, self._clock = part.begin

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        """Follow a clock."""
        self.clock_done(fit_state)

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """Follow a clock."""
        self._clock += 1
        self._reached(fit_state)

    def pass_done(self, fit_state: Callable[[], FitState]) -> None:
        """Follow the end of a pass."""
        self._epoch, self._clock = self._epoch + 1, 0
        self._reached(fit_state)

    def _reached(self, fit_state: Callable[[], FitState]) -> None:
        if lost := self._store.member.lost_workers:
            raise WorkerLostError(f"worker {min(lost)} was lost before it had made its part")
        moment = self._epoch, self._clock
        for one in self._watchers:
            one.reached(moment)
        if moment != self._part.end:
            return
        if self._part.saves and self._store.rank == 0:
            state = fit_state()
            self._model.record.examples = state.examples
            self._model.save(self._part.place, overwrite=True, fit_state=state)
        if absent := self._store.meet("end of the part", _LONGEST_SECONDS):
            raise WorkerLostError(f"worker {min(absent)} was lost before it had made its part")
        raise _Reached


# ---- the data --------------------------------------------------------------------------------------------------------


def inputs_of(fit: Fit, model: Any, rank: int, workers: int) -> FitInput:
    """Return what one of the workers of a fit learned from, as it is now."""
    source, held_out = fit.source, fit.valid_source
    assert source is not None
    data, valid = reader_of(source, "the data of the fit"), None
    if held_out is not None and (rank == 0 or held_out["shard"][1] > 1):
        valid = reader_of(held_out, "the validation data")
        if held_out["shard"][1] > 1:
            valid = valid.split(rank, workers)
    return FitInput(
        model.reading(data.split(rank, workers) if workers > 1 else data),
        None if valid is None else model.reading(valid),
        fit.plan,
    )


def reader_of(source: Mapping[str, Any], what: str) -> Reader:
    """Make a reader of the whole data that a fingerprint describes; raise ValueError if it is no longer the same."""
    names = [file["name"] for file in source["files"]]
    how = {} if source["format"] == "parquet" else {"on_error": "skip"}  # where none was skipped, none is now
    if source["format"] not in READERS or source["format"] == "arrow":
        raise ValueError(f"{what} was a table in memory, or of format {source['format']!r}: it cannot be read again")
    if streams := [file["name"] for file in source["files"] if "size" not in file]:
        raise ValueError(f"{what} was a stream, {streams[0]}: it cannot be read again")
    reader = READERS[source["format"]](names, batch_size=source["batch_size"], **source["schema"], **how)
    lines = {name: spans for name, spans in source.get("without_lines", {}).items() if name in names}
    reader = reader.without(source.get("without", ()), examples=places_of(lines))
    if (changed := reader.changes({**source, "shard": [0, 1], "without_lines": lines or None})) is not None:
        raise ValueError(f"{what} has changed since, so no fit can be made again: {changed}")
    return reader
