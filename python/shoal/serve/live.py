"""LiveModel: a model whose rows are in the tables of a running cluster.

Each prediction reads its rows from the servers, so it follows training without exports. The dense part of a click model
is read at an interval, in the background. If the connection fails for good, it is made anew in the background, also to
a cluster that was started again; requests get status 503 meanwhile.

Threads: any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from shoal import models
from shoal.models import files
from shoal.serve.inputs import InputSpec
from shoal.serve.reloadable import Reloadable
from shoal.serve.served import Model
from shoal.store.base import Store

if TYPE_CHECKING:
    from shoal.models.predictor import Predictor
    from shoal.torch.live import LiveClickModel

DENSE_SECONDS = 1.0  # between two reads of the dense part of a click model
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
    dense_seconds : float
        Interval at which the dense part of a click model is read again.

    Raises
    ------
    ValueError
        The tables are missing or belong to another model, or a click model has its dense part not on the servers.
    ShoalError
        The cluster cannot be reached.

    Notes
    -----
    Safe from any thread.
    """

    def __init__(
        self, connect: Callable[[], Store], description: Mapping[str, Any], *, dense_seconds: float = DENSE_SECONDS
    ) -> None:
        if not dense_seconds > 0:
            raise ValueError(f"dense_seconds is {dense_seconds!r}: pass a number above 0")
        super().__init__()
        self._connect = connect
        self._description = dict(description)
        self._interval = dense_seconds if description["kind"] == files.CLICK else None
        self._click: LiveClickModel | None = None  # the predictor, if it is a click model
        self._wake = threading.Event()
        self._store, self._now = self._made()
        self._former: Store | None = None  # whose connection was lost
        self._watcher = threading.Thread(target=self._run, name="shoal-serve-live", daemon=True)
        self._watcher.start()

    @property
    def now(self) -> Model:
        """The model; its version is 0."""
        return self._now

    def _made(self) -> tuple[Store, Model]:
        with contextlib.ExitStack() as undo:
            store = undo.enter_context(self._connect())
            predictor: Predictor
            if self._description["kind"] == files.CLICK:
                from shoal.torch.live import LiveClickModel  # loads PyTorch, so only if there is a tower

                predictor = self._click = LiveClickModel.of(self._description, store)
            else:
                for name in (self._description["table"], *self._description["more_tables"]):
                    store.table(name)
                predictor = models.exported(self._description, store)
            model = Model(0, self._description["kind"], predictor, None, InputSpec(predictor))
            undo.pop_all()
        return store, model

    def reload(self) -> bool:
        """Read the dense part of a click model again; connect again if the tables cannot be read.

        Returns
        -------
        bool
            Whether there was a newer dense part, or a new connection was necessary.

        Raises
        ------
        ShoalError, ValueError
            The cluster cannot be reached, or has no such tables now.
        """
        with self._change():
            try:
                return self._read_again()
            except Exception as error:
                why = error
            try:
                before = self._store
                self._store, self._now = self._made()  # one after the other: new requests use the second alone
            except Exception as error:
                self._has_failed("the tables cannot be read, the model is", error)
                raise
            self._has_reloaded("connected again, after: %s", " ".join(str(why).split()))
            self._release_former()
            self._former = before  # of requests that have begun: they say why it fails
            return True

    def _read_again(self) -> bool:
        """Read from the servers, of a click model the dense part; return whether that is newer."""
        if self._click is None:
            self._now.predictor.tables[0].contains(np.zeros(1, np.uint64))
            return False
        found = self._click.refreshed()
        if found is None:
            return False
        self._click = found
        self._now = structs.replace(self._now, predictor=found)
        return True

    def failed(self) -> None:
        """Note that a prediction has failed: the connection is checked in the background."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval)
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
        self._release_former()
        self._store.close()

    def _release_former(self) -> None:
        if self._former is not None:
            self._former.close()
