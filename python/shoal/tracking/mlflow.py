"""MLflow: a fit as a run, with the model and its report as artifacts, and a version in the registry.

    params       settings of the model and the fit; settings.json has them whole
    metrics      see base.py
    artifacts    settings.json; model/: the files of the model, MLmodel; report.html
    status       FINISHED, FAILED; KILLED after Ctrl-C and SIGTERM

``mlflow.pyfunc.load_model("models:/NAME/1")`` loads the artifact (mlflow_model.py).

A metric that the tracking server does not accept is lost, and a warning is logged: it does not end the fit. If the
model cannot be stored or registered, that is an error.

Threads: a tracker belongs to the thread that fits.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.base.machine import temporary_root
from shoal.errors import StorageError
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.local import LocalStore
from shoal.tools import reports
from shoal.tracking.base import Tracker

_log = logging.getLogger(__name__)

_BLOCK = 1 << 20  # bytes
_CONNECT_SECONDS = 10.0
_LONGEST_PARAM = 6000  # characters that MLflow accepts
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")  # MLflow refuses other characters in names of metrics and params


class MLflow(Tracker):
    """Writes runs of MLflow.

    Parameters
    ----------
    uri : str, optional
        Of the tracking server or its database; or a folder, in which a database ``mlflow.db`` is created. Default:
        MLflow's own setting.
    experiment : str
        Created if it does not exist.
    name : str, optional
        Of the run; default: MLflow chooses one.
    log_every : int
        Batches between two points of the progressive metrics.
    settings : mapping, optional
        Settings to write in addition to those of the model and the fit.
    log_model : bool
        Whether the files of the model and its report become artifacts of the run.
    register : str, optional
        The name of a registered model, of which the model becomes the next version. Needs ``log_model``.
    resume : bool
        Whether to continue the newest run of this name, if there is one.

    Attributes
    ----------
    run_id : str or None
        Of the last run.
    version : str or None
        The version of the registered model that the last run has made.

    Raises
    ------
    ImportError
        mlflow (extra ``mlflow``), or a dependency for that kind of URI, is not installed.
    StorageError
        The tracking server cannot be reached.
    ValueError
        MLflow refuses the URI, or settings contradict each other.

    Notes
    -----
    A folder with files of MLflow before 3.x is used unchanged; MLflow then requires the environment variable
    ``MLFLOW_ALLOW_FILE_STORE=true``.

    Examples
    --------
    >>> model.fit(data, callbacks=[shoal.tracking.MLflow("mlruns", register="ctr")])  # doctest: +SKIP
    """

    def __init__(
        self,
        uri: str | Path | None = None,
        experiment: str = "shoal",
        name: str | None = None,
        *,
        log_every: int = 100,
        settings: Mapping[str, Any] | None = None,
        log_model: bool = True,
        register: str | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__(log_every, settings)
        if register is not None and not log_model:
            raise ValueError(f"register is {register!r}, and the run has no model: pass log_model=True")
        if resume and (name is None or {'"', "'"} <= set(name)):
            raise ValueError(f"a run is resumed by its name, and name is {name!r}: pass one without quotation marks")
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ImportError("MLflow runs require mlflow: pip install 'shoal[mlflow]'") from error
        if log_model and find_spec("matplotlib") is None:  # now, not when the fit has ended
            raise ImportError("the report of a model requires matplotlib: pip install 'shoal[mlflow]'")
        self.run_id: str | None = None
        self.version: str | None = None
        self._refused = MlflowException
        self._metric, self._param = Metric, Param
        self._name, self._resume = name, resume
        self._log_model, self._register = log_model, register
        self._warned = False
        self._uri = uri
        store, artifacts = (None, None) if uri is None else _store_of(os.fspath(uri))
        try:
            self._client: Any = MlflowClient(tracking_uri=store)
            _check_reachable(self._client.tracking_uri)
            known = self._client.get_experiment_by_name(experiment)
            self._experiment: str = (
                self._client.create_experiment(experiment, artifact_location=artifacts)
                if known is None
                else known.experiment_id
            )
        except MlflowException as error:
            raise ValueError(f"MLflow refuses {uri!r}: {_one_line(error)}") from error
        except ImportError as error:
            raise ImportError(f"MLflow requires {error.name} for {uri!r}: pip install 'shoal[mlflow]'") from error

    def begin_run(self, settings: Mapping[str, Any]) -> None:
        """Begin a run, or continue the newest of its name, and write the settings that it does not have."""
        self.version = None
        self._warned = False
        try:
            run = self._newest() if self._resume else None
            if run is None:
                run = self._client.create_run(self._experiment, run_name=self._name)
            else:
                self._client.update_run(run.info.run_id, status="RUNNING")
            self.run_id = run.info.run_id
            there = run.data.params
            names = {_NOT_IN_NAMES.sub("_", name): str(value)[:_LONGEST_PARAM] for name, value in settings.items()}
            params = [self._param(name, value) for name, value in names.items() if name not in there]
            for first in range(0, len(params), 100):  # MLflow accepts 100 at once
                self._client.log_batch(self.run_id, params=params[first : first + 100])
            self._client.log_dict(self.run_id, dict(settings), "settings.json")
        except self._refused as error:
            raise StorageError(f"MLflow at {self._uri!r} does not begin a run: {_one_line(error)}") from error

    def _newest(self) -> Any:
        mark = '"' if "'" in (self._name or "") else "'"
        found = self._client.search_runs(
            [self._experiment],
            filter_string=f"attributes.run_name = {mark}{self._name}{mark}",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return found[0] if found else None

    def write(self, examples: int, numbers: Mapping[str, float]) -> None:
        """Write the metrics; log a warning, once for each run, if the server does not accept them."""
        now = int(1000 * time.time())
        metrics = [
            self._metric(_NOT_IN_NAMES.sub("_", name), number, now, examples) for name, number in numbers.items()
        ]
        try:
            self._client.log_batch(self.run_id, metrics=metrics)
        except self._refused as error:
            if not self._warned:
                self._warned = True
                _log.warning("metrics of the run %s are lost: %s", self.run_id, _one_line(error))

    def end_run(self, model: Any, saved: StoragePath | None, error: BaseException | None) -> None:
        """Store and register the fitted model, and end the run."""
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        try:
            if error is None and model is not None and self._log_model:
                if saved is None and not isinstance(model.store, LocalStore):
                    raise StorageError(
                        "MLflow stores a model of a cluster from its directory: save it in a with block of the "
                        "tracker, and call model_saved(directory); or pass log_model=False"
                    )
                self._store_model(model, saved)
        except BaseException:
            status = "FAILED"
            raise
        finally:
            try:
                self._client.set_terminated(self.run_id, status)
            except self._refused as refused:
                _log.warning("the run %s is not ended: %s", self.run_id, _one_line(refused))

    def _store_model(self, model: Any, saved: StoragePath | None) -> None:
        from mlflow.models import Model

        with tempfile.TemporaryDirectory(prefix="shoal-", dir=temporary_root()) as folder:
            copy = Path(folder) / "model"
            if saved is not None:
                copy_model(open_dir(saved), copy)
            else:
                model.save(copy)
            reports.report(copy, Path(folder) / "report.html")
            described = Model(run_id=self.run_id, artifact_path="model")
            described.add_flavor(
                "python_function", loader_module="shoal.tracking.mlflow_model", python_version=platform.python_version()
            )
            described.save(copy / "MLmodel")
            try:
                self._client.log_artifact(self.run_id, str(Path(folder) / "report.html"))
                self._client.log_artifacts(self.run_id, str(copy), "model")
                if self._register is not None:
                    self.version = self._registered(self._register)
            except self._refused as error:
                raise StorageError(f"MLflow at {self._uri!r} does not store the model: {_one_line(error)}") from error

    def _registered(self, name: str) -> str:
        try:
            self._client.create_registered_model(name)
        except self._refused as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = self._client.get_run(self.run_id).info.artifact_uri.rstrip("/") + "/model"
        made = self._client.create_model_version(name, source=source, run_id=self.run_id)
        return str(made.version)


def copy_model(source: StorageDir, target: Path) -> None:
    """Copy a model: by links where the file system has them."""
    target.mkdir()
    for name in source.names():
        try:
            if source.local is None:
                raise OSError
            (target / name).hardlink_to(source.local / name)
        except OSError:
            with source.open(name) as file, (target / name).open("wb") as copied:
                size = file.size
                for begin in range(0, size, _BLOCK):
                    block = bytearray(min(_BLOCK, size - begin))
                    file.read_into(memoryview(block), begin)
                    copied.write(block)
    for name in source.subdirectories():
        copy_model(source.child(name), target / name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _check_reachable(uri: str) -> None:
    """Check that a server listens, for which MLflow would try for minutes without a word."""
    address = urllib.parse.urlsplit(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    if address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(address.hostname):
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise StorageError(f"MLflow at {uri} cannot be reached ({error}): is the server running there?") from error


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
