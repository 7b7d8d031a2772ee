"""SavedModel: how a model is saved, loaded, exported and pickled.

    model directory
        model.json             what the model is and which files hold its weights and names; replaced atomically
        checkpoint-1f0c9a3e/   the tables, as `Store.save` writes them

Threads: one that saves; learning waits, predictions need not.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from shoal import _core
from shoal.base.machine import cores
from shoal.data import FeatureNames
from shoal.models import files
from shoal.models.history import History
from shoal.models.learner import FitState
from shoal.models.saved_predictor import SavedPredictor
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.local import LocalStore, local

__all__ = ["SavedModel"]

# What a pickle does not hold: it is made anew.
_OF_THIS_PROCESS = ("_store", "_owns_store", "_sorters", "_tables")


class SavedModel(SavedPredictor):
    """A predictor over tables that is saved as a model directory, loaded from one, and pickled."""

    _sorters: _core.ThreadPool
    _has_bias: bool
    _is_normalized: bool

    @classmethod
    @abstractmethod
    def _from_file(cls, described: files.ModelFile, store: Store) -> Self:
        """Make the model that ``described`` describes, from tables that are in the store."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a copy holds: all of the model, with its rows as the files of a checkpoint.

        Raises
        ------
        TypeError
            The rows are on a cluster.
        """
        if not isinstance(self._store, LocalStore):
            raise TypeError(
                f"the rows of this {type(self).__name__} are on a cluster and cannot be pickled: save the model, "
                f"and load it elsewhere"
            )
        state = {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}
        with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
            checkpoint = Path(folder, "checkpoint")
            self._store.save(checkpoint, tables=[table.name for table in self._tables], durable=False)
            state["_pickled"] = {
                "tables": [table.name for table in self._tables],
                "threads": self._store.threads,
                "slots": self._store.slots,
                "memory": self._store.memory,
                "files": {path.name: path.read_bytes() for path in checkpoint.iterdir()},
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the model anew, in a local store of its own."""
        pickled = state.pop("_pickled")
        vars(self).update(state)
        threads = min(pickled["threads"], cores())
        self._store = local(threads=threads, slots=pickled["slots"], memory=pickled["memory"])
        self._owns_store = True
        self._sorters = _core.ThreadPool(1)
        with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
            for name, content in pickled["files"].items():
                Path(folder, name).write_bytes(content)
            self._store.load(folder)
        self._tables = tuple(self._store.tables[name] for name in pickled["tables"])

    def save(
        self,
        directory: StoragePath,
        *,
        overwrite: bool = True,
        names: FeatureNames | None = None,
        fit_state: FitState | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Path | str:
        """Write the model; a save that is cut off leaves the model that was there before.

        Parameters
        ----------
        directory : path or URL
            Made if it does not exist. A URL such as ``"s3://bucket/model"`` needs fsspec (extra: fsspec).
        overwrite : bool
            Whether to replace a model that is there.
        names : FeatureNames, optional
            To be saved with the model: reports show features by them, `shoal.models.load_names` reads them. Names that
            were saved with a model which is replaced are gone with it.
        fit_state : FitState, optional
            Of a fit that is not over: `restore` returns it again.
        storage_options : mapping, optional
            Of the file system that a URL is opened by: see `shoal.Store.save`.

        Returns
        -------
        Path or str
            The directory, or its URL.

        Raises
        ------
        ValueError
            There is a model and ``overwrite`` is False, or there is something else: that is never replaced.
        SaveConflictError
            Another process has written there since this save began. That one stays.
        StorageError
            A file cannot be written: the message names it. What was there before stays.

        Notes
        -----
        Needs room for the old and the new weights. One writer at a time: on a cluster one worker calls it, between two
        ticks, as in ``if store.rank == 0``.
        """
        where = open_dir(directory, storage_options)
        described = self._model_file(bias=self._has_bias, normalized=self._is_normalized, fit_state=fit_state)
        files.save(where, described, self._store, list(self._tables), overwrite=overwrite, names=names)
        return where.location

    def restore(
        self, directory: StoragePath, *, resume: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> FitState | None:
        """Take a model that `save` wrote in place of this one: rows, and the record of what was learned from.

        Parameters
        ----------
        directory : path or URL
        resume : bool
            Whether a fit is resumed: the calibration, which is of a finished fit, is left out.
        storage_options : mapping, optional
            Of the file system that a URL is opened by: see `shoal.Store.save`.

        Returns
        -------
        FitState or None
            Where its fit stands; None: it is over.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed. Nothing was taken.
        ValueError
            It is a model of another kind or of other tables, or was made with other settings. Nothing was taken.
        """
        where = open_dir(directory, storage_options)
        described = files.read(where)
        named = [described.model, str(described.bias), described.table, *described.more_tables]
        mine = [self.kind, str(self._has_bias), *(table.name for table in self._tables)]
        if named != mine:
            raise ValueError(
                f"{where} is a {described.model} of tables {', '.join(named[2:])} with bias={described.bias}, this is "
                f"a {self.kind} of {', '.join(mine[2:])} with bias={self._has_bias}: make it with the same settings"
            )
        self._store.load(where.child(described.checkpoint))
        self._remember(described, where)
        if resume:
            self._calibration = None
        return described.fit_state

    @classmethod
    def exported(cls, description: Mapping[str, Any], store: Store) -> Self:
        """Make the model of an export, over tables that are in the store; it only predicts."""
        described = files.ModelFile(
            model=description["kind"],
            table=description["table"],
            more_tables=tuple(description["more_tables"]),
            bias=description["bias"],
            normalized=description.get("normalized", False),  # missing from exports of older versions
            optimizer="",
            params={},
            seed=0,
            examples=description["examples"],
            format=description["format"],
            schema=description["schema"],
            calibration=description["calibration"],
            history=History(),
        )
        model = cls._from_file(described, store)
        model._owns_store = False
        model._remember(described, "the export")
        return model

    @classmethod
    def load(
        cls, directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a model; it predicts, bit for bit, as the one that was saved, and may learn on.

        Parameters
        ----------
        directory : path or URL
            As written by `save`.
        store : Store, optional
            Where the tables go; without one into a new local store, closed by the model's `close`.
        storage_options : mapping, optional
            Of the file system that a URL is opened by: see `shoal.Store.save`.

        Returns
        -------
        Model

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed: the message names it.
        ValueError
            It is a model of another kind, or the store has a table of one of its names already.
        """
        where = open_dir(directory, storage_options)
        found = files.read(where).model
        if found != cls.kind:
            raise ValueError(f"{where} is a {found}, not a {cls.kind}: load it with shoal.models.load")
        target = local() if store is None else store
        try:
            described = files.load(where, target)
            model = cls._from_file(described, target)
            model._remember(described, where)
        except BaseException:
            if store is None:
                target.close()
            raise
        model._owns_store = store is None
        return model
