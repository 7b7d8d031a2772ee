"""TensorBoard: a fit as an event file.

    DIR/NAME-1, DIR/NAME-2, ...    a directory for each run: TensorBoard shows each as a run of its own

The writer is that of the package tensorboard; neither TensorFlow nor PyTorch is needed.

Threads: a tracker belongs to the thread that fits; the library writes in a thread of its own.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.base.machine import local_path
from shoal.storage.base import StoragePath
from shoal.tracking.base import Tracker


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, each run into a directory of its own: NAME-1, NAME-2, ...

    Parameters
    ----------
    directory : path
        Of all runs.
    name : str
        Of this run, before its number.
    log_every : int
        Batches between two points of the progressive metrics.
    settings : mapping, optional
        Settings to write in addition to those of the model and the fit.
    resume : bool
        Whether to continue the newest run of this name, if there is one.

    Attributes
    ----------
    directory : Path or None
        Of this run, once a fit has begun.

    Raises
    ------
    ImportError
        tensorboard is not installed (extra ``tensorboard``).

    Examples
    --------
    >>> model.fit(data, callbacks=[shoal.tracking.TensorBoard("runs")])  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: str | Path,
        name: str = "run",
        *,
        log_every: int = 100,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__(log_every, settings)
        if not isinstance(name, str) or not name or "/" in name or os.sep in name:
            raise ValueError(f"name is {name!r:.80}: pass the name of a folder in {directory}, without a slash")
        try:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError("event files require tensorboard: pip install 'shoal[tensorboard]'") from error
        self.directory: Path | None = None
        self._open = EventFileWriter
        self._hparams_pb, self._scalar_pb, self._text_pb = hparams_pb, scalar_pb, text_pb
        self._root, self._name, self._resume = local_path(directory), name, resume
        self._writer: Any = None

    def begin_run(self, settings: Mapping[str, Any]) -> None:
        """Open the file, and write the settings as text and as hyperparameters."""
        self.directory = _run_directory(self._root, self._name, resume=self._resume)
        self._writer = self._open(str(self.directory))
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        self._add(self._text_pb("settings", "\n".join(["| setting | value |", "|---|---|", *rows])), 0)
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        self._add(self._hparams_pb(plain, trial_id=self.directory.name), 0)

    def write(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        for name, number in numbers.items():
            self._add(self._scalar_pb(name, number), examples)

    def end_run(self, model: Any, saved: StoragePath | None, error: BaseException | None) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _run_directory(directory: Path, name: str, *, resume: bool) -> Path:
    """Make the directory of a run, or return that of the newest of its name."""
    numbers = [
        int(one.name[len(name) + 1 :]) for one in directory.glob(f"{glob.escape(name)}-*") if _numbered(one.name, name)
    ]
    newest = max(numbers, default=0)
    if resume and newest:
        return directory / f"{name}-{newest}"
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        newest += 1
        with suppress(FileExistsError):  # of a run that begins at the same time
            (directory / f"{name}-{newest}").mkdir()
            return directory / f"{name}-{newest}"


def _numbered(found: str, name: str) -> bool:
    number = found[len(name) + 1 :]
    return number.isascii() and number.isdigit()
