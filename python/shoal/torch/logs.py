"""Metrics of a running fit, written to TensorBoard, MLflow or any `LogWriter`.

    progressive/logloss, auc, calibration, examples_per_second      every log_every batches, over examples learned from
    valid/logloss, auc, calibration, gauc                           after every pass
    rows/NAME                                                       of each table, after every pass

Both libraries are extras, imported when a writer is made.

Threads: a writer belongs to the thread that fits.
"""

from __future__ import annotations

import glob
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shoal.metrics import Accumulator
from shoal.models.learner import FitState
from shoal.models.predictor import Predictor
from shoal.storage.base import StorageDir

__all__ = ["LogWriter", "MLflow", "MetricsLogger", "TensorBoard"]


class LogWriter(Protocol):
    """The interface of writers of metrics."""

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of a fit: names and plain values."""

    def numbers(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write metrics, all finite, after ``examples`` examples."""

    def close(self) -> None:
        """Write all pending metrics."""


def _own(directory: Path, name: str, *, resume: bool) -> Path:
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


class TensorBoard:
    """Writes event files for TensorBoard, each run into a directory of its own: NAME-1, NAME-2, ...

    Parameters
    ----------
    directory : path
        Of all runs.
    name : str
        Of this run, before its number.
    resume : bool
        Whether to continue the newest run of this name, if there is one.

    Attributes
    ----------
    directory : Path
        Of this run.

    Raises
    ------
    ImportError
        tensorboard is not installed (extra ``tensorboard``).
    """

    def __init__(self, directory: str | Path, name: str = "run", *, resume: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("event files require tensorboard: pip install 'shoal[tensorboard]'") from error
        self.directory = _own(Path(directory), name, resume=resume)
        self._writer: Any = SummaryWriter(str(self.directory))

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings as a table of text."""
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def numbers(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, examples)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """Writes a run of MLflow.

    Parameters
    ----------
    uri : str
        Of the tracking server or its database; or a folder, in which a database ``mlflow.db`` is created.
    experiment : str
        Created if it does not exist.

    Raises
    ------
    ImportError
        mlflow (extra ``mlflow``), or a dependency for that kind of URI, is not installed.
    ValueError
        mlflow refuses the URI.
    """

    def __init__(self, uri: str, experiment: str = "shoal") -> None:
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ImportError("MLflow runs require mlflow: pip install 'shoal[mlflow]'") from error
        store, artifacts = _store_of(uri)
        try:
            self._client: Any = MlflowClient(tracking_uri=store)
            known = self._client.get_experiment_by_name(experiment)
            number = (
                self._client.create_experiment(experiment, artifact_location=artifacts)
                if known is None
                else known.experiment_id
            )
            self._run: str = self._client.create_run(number).info.run_id
        except MlflowException as error:
            raise ValueError(f"mlflow = {uri!r}: {' '.join(str(error).split())}") from error
        except ImportError as error:
            raise ImportError(f"mlflow = {uri!r} takes {error.name}: pip install 'shoal[mlflow]'") from error

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Write a parameter for each setting."""
        for name, value in settings.items():
            self._client.log_param(self._run, name, value)

    def numbers(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write the metrics."""
        for name, number in numbers.items():
            self._client.log_metric(self._run, name, number, step=examples)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


def _store_of(uri: str) -> tuple[str, str | None]:
    """Return the URI of MLflow's store, and the directory of artifacts if the store does not define it.

    A folder gets a database: current versions of MLflow refuse the files that earlier ones kept in folders. A folder
    that has such files is used as it is.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", uri) or uri == "databricks":
        return uri, None
    folder = Path(uri).expanduser().absolute()
    if any(folder.glob("*/meta.yaml")):
        return uri, None
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


class MetricsLogger:
    """Writes the metrics of a fit; a `shoal.models.learner.FitObserver`.

    Parameters
    ----------
    model : ClickModel
    writers : sequence of LogWriter
    every : int
        Batches between two points.
    """

    def __init__(self, model: Predictor, writers: Sequence[LogWriter], every: int) -> None:
        if every < 1:
            raise ValueError(f"log_every is {every}: pass the batches between two numbers, 1 or more")
        self._model = model
        self._writers = writers
        self._every = every
        self._batches = 0
        self._examples = model.examples
        self._time = time.perf_counter()

    def batch_done(self, seen: Sequence[Accumulator], fit_state: Callable[[], FitState]) -> None:
        """Write the progressive metrics, if they are due."""
        self._batches += 1
        if self._batches % self._every:
            return
        now = time.perf_counter()
        rate = (self._model.examples - self._examples) / max(now - self._time, 1e-9)
        self._examples, self._time = self._model.examples, now
        one = seen[0]
        self._write(
            {
                "progressive/logloss": one.logloss,
                "progressive/auc": one.auc,
                "progressive/calibration": one.calibration,
                "progressive/examples_per_second": rate,
            }
        )

    def clock_done(self, fit_state: Callable[[], FitState]) -> None:
        """Do nothing: there was no batch."""

    def meet(self, fit_state: Callable[[], FitState]) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def pass_done(self, fit_state: FitState) -> None:
        """Write the metrics of the pass, and rows."""
        done = self._model.history.passes[-1]
        numbers = {f"rows/{table.name}": float(len(table)) for table in self._model.tables}
        for kind, metrics in (("pass", done.metrics), ("valid", done.valid)):
            if metrics is not None:
                for name in ("logloss", "auc", "calibration", "normalized_entropy"):
                    numbers[f"{kind}/{name}"] = getattr(metrics, name)
        if done.grouped is not None:
            numbers["valid/gauc"] = done.grouped.gauc
        self._write(numbers)
        self._examples, self._time = self._model.examples, time.perf_counter()

    def interrupted(self, fit_state: FitState) -> None:
        """Do nothing: written metrics stay."""

    def best_folder(self, pass_number: int) -> StorageDir | None:
        """Return None: there is no folder."""
        return None

    def _write(self, numbers: Mapping[str, float]) -> None:
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        for writer in self._writers:
            writer.numbers(self._model.examples, finite)
