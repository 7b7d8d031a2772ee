"""SavedClickModel: a click model's directory, its exports, and the weights that another model begins with.

    same rules of tables and dense part    rows and parameters with the state of their optimizers
    other rules                            weights alone: their optimizers begin anew

Invariants
    I1  The files that a directory's model.json names belong to one moment between two batches.

Threads: one at a time.
"""

from __future__ import annotations

import io
import itertools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import read_manifest
from shoal.data import FeatureNames
from shoal.models import files
from shoal.models.features import Features
from shoal.models.history import History, Record
from shoal.models.learner import FitState
from shoal.models.predictor import read_calibration
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.local import local
from shoal.table.table import Table
from shoal.torch.click_predictor import ClickPredictor
from shoal.torch.dense_part import DensePart
from shoal.torch.finite import check_finite
from shoal.torch.onnx_tower import onnx_tower
from shoal.torch.pipeline import Pipeline
from shoal.torch.tower import read_tower

log = logging.getLogger(__name__)

_TOWER = "tower.pt"  # next to the tables, in a folder of the best weights


class SavedClickModel(ClickPredictor):
    """A click model as files."""

    kind = files.CLICK

    made_by: dict[str, Any]
    _dense: DensePart
    _staleness: int
    _pipeline: Pipeline | None  # that learning reads from
    _rows_ahead: list[list[torch.Tensor]]  # of the fit that is resumed

    @property
    def pushed_tables(self) -> Sequence[Table]:
        """The tables of the sparse parts, and that of a dense part on servers."""
        return (*self._tables, *self._dense.tables)

    def save_weights(self, folder: StorageDir) -> None:
        """Write tables and tower into a new folder, without waiting for the disk."""
        self._store.flush()
        tables = self.pushed_tables
        self._store.save(folder, tables=[table.name for table in tables], durable=False)
        with folder.create(_TOWER, durable=False) as file:
            file.write(self._tower())

    def restore_weights(self, folder: StorageDir) -> None:
        """Restore the weights that `save_weights` wrote."""
        self._store.load(folder)
        self._take_tower(read_tower(folder.read(_TOWER), folder.address(_TOWER)), whole=False)

    @property
    @abstractmethod
    def _fit_settings(self) -> dict[str, Any]:
        """The settings of a fit besides those of its plan, its tables and its data, by name: of a resumed one too."""

    @property
    def _is_alone(self) -> bool:
        """Whether the file of the dense part has the rows pulled ahead: those of several workers are pulled anew."""
        return self._store.num_workers == 1

    def _tower(self) -> bytes:
        self._dense.refresh()
        check_finite(self.module)
        file = io.BytesIO()
        state: dict[str, Any] = {
            "optimizer": None if self._dense.optimizer is None else self._dense.optimizer.state_dict(),
            "steps": self._dense.steps.state(),
            "settings": self._fit_settings,
        }
        if self._staleness:
            rows = self._pipeline.rows_ahead() if self._pipeline is not None and self._is_alone else []
            state["ahead"] = rows
        with self._averaged():
            torch.save({"module": self.module.state_dict(), **state}, file)
        return file.getvalue()

    def _take_tower(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Set dense parameters; ``whole``: also their optimizer, and rows pulled ahead."""
        self.module.load_state_dict(state["module"])
        self._dense.steps.forget_averages()
        if whole:
            self._rows_ahead = state.get("ahead", []) if self._is_alone else []
            if self._dense.optimizer is not None:
                self._dense.optimizer.load_state_dict(state["optimizer"])
            self._dense.steps.set_state(state["steps"])

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
            Saved with the model: `shoal.models.load_names` reads them. Names of a replaced model are removed with it.
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
            There is a model and ``overwrite`` is False, there are other files, or the module has no table. Or a dense
            parameter is NaN or infinite: an earlier model stays.
        SaveConflictError
            Another process has written there since this save began. Its files stay.
        StorageError
            A file cannot be written: the message names it. The earlier model stays.
        """
        if not self._tables:
            raise ValueError("this module has no table of a store, and shoal saves tables: save it with torch.save")
        self._store.flush()
        described = self._model_file(bias=False, fit_state=fit_state, click=self.made_by)
        where = open_dir(directory, storage_options)
        # The optimizer's state of a dense part on servers is needed to continue the fit, not to predict.
        tables = [*self._tables, *(self._dense.tables if fit_state is not None else ())]
        files.save(where, described, self._store, tables, overwrite=overwrite, names=names, tower=self._tower())
        return where.location

    def described(self) -> tuple[files.ModelFile, dict[str, bytes]]:
        """Return the description of the model for an export, and its dense part."""
        return self._model_file(bias=False, fit_state=None, click=self.made_by), {"tower.pt": self._tower()}

    def onnx_tower(self) -> bytes:
        """Return the dense part as a file of ONNX: docs/export-format.md describes its inputs."""
        self._dense.refresh()
        features = self.features if isinstance(self.features, Features) else Features.numbered(self.features)
        with self._averaged():
            return onnx_tower(self.module, features)

    def restore(
        self, directory: StoragePath, *, resume: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> FitState | None:
        """Replace this model by one that `save` wrote: rows, dense parameters, the record.

        Parameters
        ----------
        directory : path or URL
        resume : bool
            Whether to restore the dense parameters' optimizer too.
        storage_options : mapping, optional
            Options of the file system of a URL: see `shoal.Store.save`.

        Returns
        -------
        FitState or None
            The state of its fit; None: it has finished.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed.
        ValueError
            It is no click model, or of another architecture, or a table there has another description than this
            module's, or ``resume`` finds a fit of other settings. Nothing has changed.
        """
        where = open_dir(directory, storage_options)
        described = files.read(where)
        if described.model != files.CLICK:
            raise ValueError(f"{where} is a {described.model}: load it with shoal.load")
        tower = read_tower(files.read_tower(where, described), where.address(described.tower or ""))
        if resume:
            self._check_described(described.click or {})
            self._check_settings(tower.get("settings", {}))
        _check_parameters(self.module.state_dict(), tower["module"], where)
        self._store.load(where.child(described.checkpoint))
        self._take_tower(tower, whole=resume)
        if not resume:
            self._dense.loaded()
        self._remember(described, where)
        return described.fit_state

    def _check_described(self, its: Mapping[str, Any]) -> None:
        """Raise ValueError if a configuration made another model of the fit that is to be resumed."""
        for name in ("model", "features"):
            now, before = self.made_by.get(name), its.get(name)
            if now is not None and before is not None and now != before:
                its, own = _first_different(before, now)
                raise ValueError(
                    f"the fit was begun with another setting of {name}: it was {its!r:.200}, and is {own!r:.200}: pass "
                    "the same to resume"
                )

    def _check_settings(self, its: Mapping[str, Any]) -> None:
        """Raise ValueError if the fit that is to be resumed has other settings."""
        for name, now in self._fit_settings.items():
            before = its.get(name, now)  # of an optimizer of an older torch, which has no such setting
            if now != before:
                raise ValueError(
                    f"the fit was begun with {name}={before!r}, now it is {now!r}: pass the same to resume, or begin "
                    "another fit"
                )

    def init_from(self, directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Begin with the weights of a saved model of the same architecture, whose record is not taken over.

        Parameters
        ----------
        directory : path or URL
        storage_options : mapping, optional
            Options of the file system of a URL: see `shoal.Store.save`.

        Raises
        ------
        CorruptionError
            A file is missing, cut short or changed.
        ValueError
            It is no click model, or of another architecture: the message names table or parameter.

        Notes
        -----
        With the same settings of all tables their rows come with the state of their optimizers, and so does the dense
        part if its optimizer is the same one. With others, such as other rates or rules, only weights do. On a cluster
        all workers call it.
        """
        where = open_dir(directory, storage_options)
        described = files.read(where)
        if described.model != files.CLICK:
            raise ValueError(f"{where} is a {described.model}: a click model begins with another click model")
        tower = read_tower(files.read_tower(where, described), where.address(described.tower or ""))
        _check_parameters(self.module.state_dict(), tower["module"], where)
        folder = where.child(described.checkpoint)
        there = {table.name: table.spec() for table in read_manifest(folder).tables}
        store = self._store
        for table in self.tables:
            its = there.get(table.name)
            if its is None or (its.dim, its.is_integer) != (table.dim, table.spec.is_integer):
                what = "no such table" if its is None else f"dim {its.dim}"
                raise ValueError(
                    f"table {table.name!r} has dim {table.dim}, and {where} has {what}: take another model"
                )
        has_same_rows = all(there[table.name] == table.spec for table in self.tables)
        if has_same_rows:
            store.load(folder)
        else:
            if store.rank == 0:
                log.info("tables have other settings than those of %s: only their weights are taken", where)
                _copy_weights(self._store, self.tables, folder)
            store.flush()
            store.barrier()
        is_same_rule = (described.click or {}).get("optimizer") == self.made_by.get("optimizer")
        self._take_tower(tower, whole=has_same_rows and is_same_rule)
        self._rows_ahead = []
        self._dense.loaded()

    def take_exported(self, description: Mapping[str, Any], tower: bytes | None) -> None:
        """Set the record of a model whose rows are in the tables, or not needed, and its dense parameters if any."""
        if tower is not None:
            state = read_tower(tower, "tower.pt")
            for name, its in state["module"].items():
                if name.endswith("_extra_state") and isinstance(its, dict):
                    its["rows"] = 0  # else they would be missed
            self._take_tower(state, whole=False)
        self._calibration = read_calibration(description["calibration"], "the export")
        self._record = Record(History(), description["examples"], description["format"], description["schema"])


def _first_different(first: Any, second: Any) -> tuple[Any, Any]:
    """Return the first parts of two descriptions that differ."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        name = next(name for name in {**first, **second} if first.get(name) != second.get(name))
        if isinstance(first.get(name), list) and isinstance(second.get(name), list):
            return _first_different(first[name], second[name])
        return {name: first.get(name)}, {name: second.get(name)}
    pairs = itertools.zip_longest(first, second)
    return next((one, other) for one, other in pairs if one != other)


def _check_parameters(own: Mapping[str, Any], parameters: Mapping[str, Any], where: StorageDir) -> None:
    for name in {**own, **parameters}:
        first, second = (getattr(state.get(name), "shape", None) for state in (own, parameters))
        if first != second:
            here, there = ("none" if one is None else list(one) for one in (first, second))
            raise ValueError(
                f"parameter {name!r} has the shape {here}, in {where} {there}: take a model of the same architecture"
            )


def _copy_weights(store: Store, tables: Sequence[Table], folder: StorageDir) -> None:
    """Set the weights of all rows of a checkpoint."""
    with local(threads=store.threads) as other:
        other.load(folder)
        for table in tables:
            for keys, rows in other.tables[table.name].items():
                table.assign(keys, rows)
