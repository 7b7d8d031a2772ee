"""SavedModel: saving, loading, exporting and pickling a model.

    model directory
        model.json             description of the model, and the names of its other files; replaced atomically
        checkpoint-1f0c9a3e/   the tables, as `Store.save` writes them

Threads: one that saves; learning waits, predictions need not.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from shoal import _core
from shoal.base.machine import cores, temporary_root
from shoal.data import FeatureNames
from shoal.models import files
from shoal.models.history import History
from shoal.models.learner import FitState
from shoal.models.saved_predictor import SavedPredictor
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.local import LocalStore, local

# Attributes that a pickle omits: they are created again.
_OF_THIS_PROCESS = ("_store", "_owns_store", "_sorters", "_tables")


class SavedModel(SavedPredictor):
    """A predictor over tables that is saved as a model directory, loaded from one, and pickled."""

    _sorters: _core.ThreadPool
    _has_bias: bool
    _is_normalized: bool

    @property
    def kind_settings(self) -> dict[str, Any]:
        """The settings that only this kind of model has, which its file, its report and all workers of a fit have."""
        return {}

    @classmethod
    @abstractmethod
    def _from_file(cls, described: files.ModelFile, store: Store) -> Self:
        """Make the model that ``described`` describes, from tables that are in the store."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle or a copy: all of the model, with its rows as the files of a checkpoint."""
        if not isinstance(self._store, LocalStore):
            raise TypeError(
                f"the rows of this {type(self).__name__} are on a cluster and cannot be pickled: save the model, "
                f"and load it elsewhere"
            )
        state = {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}
        with tempfile.TemporaryDirectory(prefix="shoal-model-", dir=temporary_root()) as folder:
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
        """Restore the model in a local store of its own."""
        pickled = state.pop("_pickled")
        vars(self).update(state)
        threads = min(pickled["threads"], cores())
        self._store = local(threads=threads, slots=pickled["slots"], memory=pickled["memory"])
        self._owns_store = True
        self._sorters = _core.ThreadPool(1)
        with tempfile.TemporaryDirectory(prefix="shoal-model-", dir=temporary_root()) as folder:
            for name, content in pickled["files"].items():
                Path(folder, name).write_bytes(content)
            self._store.load(folder)
        self._tables = tuple(self._store.tables[name] for name in pickled["tables"])

    def save(
        self,
        directory: StoragePath,
        *,
        overwrite: bool = False,
        names: FeatureNames | None = None,
        fit_state: FitState | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Path | str:
        """Write the model; an interrupted save leaves the earlier model unchanged.

        Parameters
        ----------
        directory : path or URL
            Made if it does not exist. A URL such as ``"s3://bucket/model"`` needs fsspec (extra: fsspec).
        overwrite : bool
            Whether to replace an existing model.
        names : FeatureNames, optional
            Saved with the model: reports show features by them, `shoal.models.load_names` reads them. Names of a
            replaced model are removed with it.
        fit_state : FitState, optional
            Of an unfinished fit; `restore` returns it.
        storage_options : mapping, optional
            Options of the file system of a URL: see `shoal.Store.save`.

        Returns
        -------
        Path or str
            The directory, or its URL.

        Raises
        ------
        ValueError
            There is a model and ``overwrite`` is False, or there are other files, which are never replaced.
        SaveConflictError
            Another process has written there since this save began. Its files stay.
        StorageError
            A file cannot be written: the message names it. The earlier model stays.

        Notes
        -----
        Needs room for the old and the new weights. One writer at a time: on a cluster one worker calls it, between two
        ticks, as in ``if store.rank == 0``.
        """
        where = open_dir(directory, storage_options)
        described = self._described_with(fit_state)
        files.save(where, described, self._store, list(self._tables), overwrite=overwrite, names=names)
        return where.location

    def described(self) -> tuple[files.ModelFile, dict[str, bytes]]:
        """Return the description of the model for an export."""
        return self._described_with(None), {}

    def _described_with(self, fit_state: FitState | None) -> files.ModelFile:
        return self._model_file(
            bias=self._has_bias,
            normalized=self._is_normalized,
            fit_state=fit_state,
            multiclass=self.kind_settings or None,
        )

    def restore(
        self, directory: StoragePath, *, resume: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> FitState | None:
        """Replace this model by one that `save` wrote: its rows, and the record of its training.

        Parameters
        ----------
        directory : path or URL
        resume : bool
            Whether a fit is resumed: the calibration, which belongs to a finished fit, is not restored.
        storage_options : mapping, optional
            Options of the file system of a URL: see `shoal.Store.save`.

        Returns
        -------
        FitState or None
            The state of its fit; None: it has finished.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed. This model is unchanged.
        ValueError
            It is a model of another kind or of other tables, or was made with other settings. This model is unchanged.
        """
        where = open_dir(directory, storage_options)
        described = files.read(where)
        tables = described.table, *described.more_tables
        its = _named(described.model, tables, described.bias, described.multiclass)
        mine = _named(self.kind, [table.name for table in self._tables], self._has_bias, self.kind_settings)
        if its != mine:
            raise ValueError(f"{where} is a {its}, this is a {mine}: make it with the same settings")
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
            seed=store.tables[description["table"]].seed,
            examples=description["examples"],
            format=description["format"],
            schema=description["schema"],
            calibration=description["calibration"],
            history=History(),
            multiclass=description.get("multiclass"),
        )
        model = cls._from_file(described, store)
        model._owns_store = False
        model._remember(described, "the export")
        return model

    @classmethod
    def load(
        cls, directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Read a model; it predicts, bit for bit, as the saved one, and can learn further.

        Parameters
        ----------
        directory : path or URL
            As written by `save`.
        store : Store, optional
            The store of the tables; default: a new local store, closed by the model's `close`.
        storage_options : mapping, optional
            Options of the file system of a URL: see `shoal.Store.save`.

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
        target = files.store_for(where) if store is None else store
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


def _named(kind: str, tables: Iterable[str], bias: bool, multiclass: dict[str, Any] | None) -> str:
    """Describe what a model and the files that it is restored from have in common."""
    more = "".join(f", {name}={value!r}" for name, value in (multiclass or {}).items())
    return f"{kind} of {', '.join(tables)} with bias={bias}{more}"
