"""Exports of models while they are trained: rows, dense part and calibration of one moment.

    PublishDelta    every few seconds     DIR/000001, DIR/000002, ...: full, then the changes since the one before

Threads: the one that trains.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.dtypes import Dtype
from shoal.base.machine import local_path
from shoal.base.scalars import whole
from shoal.errors import ShoalError
from shoal.models.callbacks import Callback, FitProgress
from shoal.models.saved_predictor import check_moments

log = logging.getLogger(__name__)


class PublishDelta(Callback):
    """Exports a model every few seconds of its fit, for servers that watch the directory.

    Parameters
    ----------
    directory : path
        Of the exports, which are its folders 000001, 000002, ...; ``shoal serve DIRECTORY --watch 1`` serves the
        newest. Those that are there are continued.
    every : float
        Seconds from the beginning of one export to that of the next; the last one is written at the end of the fit.
    full_every : int
        Exports of which one is full: the others have the changes since the one before, and are read together with it.
        After a full one the exports before the last full one are removed.
    dtype : as `shoal.Store.export`, optional

    Raises
    ------
    ValueError
        A number is out of range; or, when a fit begins, it is one of several workers under SSP or ASP.

    Notes
    -----
    Of a topic an export has the time of the latest event that the model has learned from, from which a server tells how
    fresh its predictions are (``shoal_freshness_seconds``).

    Of several workers all have it, and the first one exports; under BSP, where the others wait for its clock.

    An export has rows, dense part and calibration of the moment after a batch. A delta costs what has changed: rows
    that the table has recorded since the last one. Training waits for it. An export that fails is logged, and the next
    one is full; the fit goes on.

    Examples
    --------
    >>> model.fit(reader, callbacks=PublishDelta("exports", every=60))  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: float = 60.0,
        full_every: int = 30,
        dtype: Dtype | Mapping[str, Dtype] | None = None,
    ) -> None:
        if not every > 0:
            raise ValueError(f"every is {every}: pass a number of seconds above 0")
        self.directory = local_path(directory)
        self._every = every
        self._full_every = whole("full_every", full_every, 1)
        self._dtype = dtype
        self._last = 0.0
        self._base: Path | None = None  # the export that the next delta is of
        self._deltas = 0  # since the last full one
        self._full: list[int] = []  # numbers of the full ones of this fit
        self._examples = -1  # that the last export has seen

    def fit_begins(self, progress: FitProgress) -> None:
        """Look for exports of an earlier fit: the first one of this fit is full."""
        check_moments(progress.model.store)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._base, self._full, self._last = None, [], time.monotonic()

    def batch_done(self, progress: FitProgress) -> None:
        """Export the model, if it is time."""
        if self._is_due(progress):
            self._publish(progress.model, progress.examples_of_all())

    def stream_idle(self, progress: FitProgress) -> None:
        """Export the model, if it is time, and it has learned anything since the last time."""
        if self._is_due(progress) and (examples := progress.examples_of_all()) not in (0, self._examples):
            self._publish(progress.model, examples)

    def fit_ends(self, progress: FitProgress, error: BaseException | None) -> None:
        """Export the model as it is at the end, unless the fit has failed."""
        is_new = progress.examples_of_all() != self._examples
        if is_new and self._leads(progress) and (error is None or isinstance(error, KeyboardInterrupt)):
            self._publish(progress.model, progress.examples_of_all())

    def _is_due(self, progress: FitProgress) -> bool:
        return time.monotonic() - self._last >= self._every and self._leads(progress)

    @staticmethod
    def _leads(progress: FitProgress) -> bool:
        """Whether this worker exports: the first one that is there."""
        store = progress.model.store
        return bool(store.rank == min({*range(store.num_workers)} - store.member.lost_workers, default=0))

    def _publish(self, model: Any, examples: int) -> None:
        self._last = time.monotonic()
        record = model.record
        record.examples, mine = examples, record.examples
        try:
            self._export(model)
        finally:
            record.examples = mine

    def _export(self, model: Any) -> None:
        number = 1 + max((int(path.name) for path in self._exports()), default=0)
        target = self.directory / f"{number:06}"
        is_full = self._base is None or self._deltas + 1 >= self._full_every
        try:
            model.export(target, since=None if is_full else self._base, dtype=self._dtype, version=number, track=True)
        except (OSError, ShoalError) as error:
            log.warning("the model was not exported to %s: %s", target, error)
            self._base = None
            return
        self._deltas = 0 if is_full else self._deltas + 1
        self._base, self._examples = target, model.examples
        if is_full:
            self._full.append(number)
            self._remove_old()

    def _exports(self) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if path.name.isdecimal() and path.is_dir())

    def _remove_old(self) -> None:
        """Remove the exports before the full one that is older than the newest: readers have had time to leave them."""
        if len(self._full) > 1:
            for path in self._exports():
                if int(path.name) < self._full[-2]:
                    shutil.rmtree(path, ignore_errors=True)
