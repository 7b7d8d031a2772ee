"""LiveModel: a model whose rows are in the tables of a running cluster.

Each prediction reads its rows from the servers, so it follows training without exports. If the connection fails for
good, it is made anew in the background, also to a cluster that was started again; requests get status 503 meanwhile.

Threads: any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal import models
from shoal.models import files
from shoal.serve.inputs import InputSpec
from shoal.serve.reloadable import Reloadable
from shoal.serve.served import Model
from shoal.store.base import Store

__all__ = ["LiveModel", "by_keys"]

_RETRY_SECONDS = 1.0  # between two attempts to connect


def by_keys(table: str) -> dict[str, Any]:
    """Describe a logistic regression with a bias over the keys of a table."""
    return {
        "kind": files.LOGISTIC,
        "table": table,
        "more_tables": [],
        "bias": True,
        "format": None,
        "schema": {},
        "calibration": None,
        "examples": 0,
    }


class LiveModel(Reloadable):
    """A model over the tables of a cluster, as they are. A context manager that closes itself.

    Parameters
    ----------
    connect : callable
        Returns a new store, such as ``shoal.connect(address, mode="read")``, which this object closes.
    description : mapping
        The description of an exported model, or `by_keys`.

    Raises
    ------
    ValueError
        The tables are missing or those of another model, or it is a click model, whose dense part is no table.
    ShoalError
        The cluster cannot be reached.

    Notes
    -----
    Safe from any thread.
    """

    def __init__(self, connect: Callable[[], Store], description: Mapping[str, Any]) -> None:
        if description["kind"] == files.CLICK:
            raise ValueError(
                "a click model is not served from live tables: its dense part is in the export alone; export it often"
            )
        super().__init__()
        self._connect = connect
        self._description = dict(description)
        self._wake = threading.Event()
        self._store, self._now = self._made()
        self._watcher = threading.Thread(target=self._run, name="shoal-serve-live", daemon=True)
        self._watcher.start()

    @property
    def now(self) -> Model:
        """The model; its version is 0."""
        return self._now

    def _made(self) -> tuple[Store, Model]:
        with contextlib.ExitStack() as undo:
            store = undo.enter_context(self._connect())
            for name in (self._description["table"], *self._description["more_tables"]):
                store.table(name)
            predictor = models.exported(self._description, store)
            model = Model(0, self._description["kind"], predictor, None, InputSpec(predictor))
            undo.pop_all()
        return store, model

    def reload(self) -> bool:
        """Connect again if the tables cannot be read.

        Returns
        -------
        bool
            Whether that was necessary.

        Raises
        ------
        ShoalError, ValueError
            The cluster cannot be reached, or has no such tables now.
        """
        with self._turn:
            try:
                self._now.predictor.tables[0].contains(np.zeros(1, np.uint64))
                return False
            except Exception as error:
                why = error
            try:
                before = self._store
                self._store, self._now = self._made()  # one after the other: requests use the second alone
            except Exception as error:
                self._has_failed("the tables cannot be read, the model is", error)
                raise
            self._has_reloaded("connected again, after: %s", " ".join(str(why).split()))
            before.close()
            return True

    def failed(self) -> None:
        """Note that a prediction has failed: the connection is checked in the background."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._stopped.is_set():
                return
            self._wake.clear()
            try:
                self.reload()
            except Exception:  # logged
                self._stopped.wait(_RETRY_SECONDS)
                self._wake.set()

    def close(self) -> None:
        """Leave the cluster."""
        self._stopped.set()
        self._wake.set()
        super().close()

    def _release(self) -> None:
        self._store.close()
