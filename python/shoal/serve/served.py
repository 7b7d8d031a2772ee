"""ServedModel: the model of the current version of an export, and the swap to a newer one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shoal import models
from shoal.export.read import Export, ExportVersion, open_export
from shoal.models import files
from shoal.serve.inputs import InputSpec
from shoal.serve.store import ExportStore

if TYPE_CHECKING:
    from shoal.models.predictor import Predictor

__all__ = ["Model", "ServedModel"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model, and the version of its export; version 0, and no export, if it reads live tables."""

    version: int
    kind: str
    predictor: Predictor
    exported: ExportVersion | None
    inputs: InputSpec


def make_model(version: ExportVersion, threads: int | None) -> Model:
    """Make the model of an export, over its tables.

    Raises
    ------
    ValueError
        The export has no model: it is one of tables.
    ImportError
        It is a click model, and PyTorch is not installed.
    """
    description = version.model
    if description is None:
        raise ValueError(
            f"{version.storage_dir} is an export of tables, not of a model: export a model's directory "
            "(shoal export MODEL DIR)"
        )
    store = ExportStore(version, threads=threads)
    predictor: Predictor
    if description["kind"] == files.CLICK:
        from shoal.torch import config  # loads PyTorch, so only if there is a tower

        predictor = config.exported(description, version.layers.extra("tower.pt"), store)
    else:
        for name in (description["table"], *description["more_tables"]):
            store.exported(name)
        predictor = models.exported(description, store)
    return Model(version.version, description["kind"], predictor, version, InputSpec(predictor))


class ServedModel:
    """The current model of an export, replaced by `reload`. A context manager that closes itself.

    Parameters
    ----------
    directory : path or URL
        An export of a model, or a directory of them.
    threads : int, optional
        Threads that share the work of one prediction; default: 1, since requests run concurrently.
    verify : bool
        Whether every byte is checked before a version becomes current.
    cache, storage_options
        As for :func:`shoal.open_export`.

    Notes
    -----
    Safe from any thread. A request takes :attr:`now` once, and so is answered by one version throughout.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int | None = 1,
        verify: bool = True,
        cache: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._threads = threads
        self._export: Export = open_export(
            directory, threads=threads, verify=verify, cache=cache, storage_options=storage_options
        )
        self._turn = threading.Lock()
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None
        self.reloads = 0
        self.failures = 0
        self._failure = ""
        try:
            self._now = make_model(self._export.now, threads)
        except BaseException:
            self._export.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()

    @property
    def now(self) -> Model:
        """The current model."""
        return self._now

    def reload(self) -> bool:
        """Check for a newer version and make its model current; log that, or why it cannot be used.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        CorruptionError, ValueError
            There is one that cannot be used: the current one stays.
        """
        with self._turn:
            try:
                self._export.refresh()
                found = self._export.now
                if found is self._now.exported:
                    return False
                before, self._now = self._now, make_model(found, self._threads)
            except Exception as error:
                self.failures += 1
                self._log_failure(error)
                raise
            self.reloads += 1
            self._failure = ""
            _log.info("version %d replaces version %d", self._now.version, before.version)
            return True

    def _log_failure(self, error: Exception) -> None:
        """Log why the current version stays, once for each reason."""
        failure = " ".join(str(error).split()) or type(error).__name__
        if failure != self._failure:
            self._failure = failure
            _log.warning("version %d is kept: %s", self._now.version, failure)

    def watch(self, seconds: float) -> None:
        """Reload every ``seconds``, in a thread that ends with `close`."""
        if not seconds > 0:
            raise ValueError(f"the period of watch is {seconds!r} seconds: pass a number above 0")

        def look() -> None:
            while not self._stopped.wait(seconds):
                with contextlib.suppress(Exception):  # `reload` has logged it
                    self.reload()

        self._watcher = threading.Thread(target=look, name="shoal-serve-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching, and release the files once no request reads them."""
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()
        self._export.close()
