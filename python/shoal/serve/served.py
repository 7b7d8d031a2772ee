"""ServedModel: the model of the current version of an export, and the swap to a newer one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shoal import _core, models
from shoal.errors import CorruptionError
from shoal.export.cache import Cache
from shoal.export.manifest import Copies
from shoal.export.read import Export, ExportVersion
from shoal.models import files
from shoal.models.onnx_predictor import OnnxPredictor, find_runtime
from shoal.serve.inputs import InputSpec
from shoal.serve.reloadable import Reloadable
from shoal.serve.store import ExportStore
from shoal.storage.open import open_dir

if TYPE_CHECKING:
    from shoal.data import Batch
    from shoal.models.learner import Floats
    from shoal.models.predictor import Predictor


class Model(msgspec.Struct, frozen=True, eq=False):
    """A model, and the version of its export; version 0, and no export, if it reads live tables."""

    version: int
    kind: str
    predictor: Predictor
    exported: ExportVersion | None
    inputs: InputSpec
    native: _core.ExportedModel | None = None  # None: Python computes it

    def probabilities(self, batch: Batch) -> Floats:
        """Compute the probabilities of a batch, as the predictor does."""
        if self.native is None or self.exported is None:
            return self.predictor.probabilities(batch)
        workers = self.exported.workers
        return self.native.probabilities(batch.indptr, batch.keys, batch.values, batch.fields, workers)

    def bytes(self, batch: Batch) -> int:
        """Return the memory that the engine takes for a prediction, at most."""
        return 0 if self.native is None else self.native.bytes(batch.indptr, batch.keys, batch.values, batch.fields)


def make_model(version: ExportVersion, threads: int | None) -> Model:
    """Make the model of an export, over its tables."""
    description = version.model
    if description is None:
        raise ValueError(
            f"{version.storage_dir} is an export of tables, not of a model: export a model's directory "
            "(shoal export MODEL --output DIR)"
        )
    try:
        predictor = _predictor(description, version, threads)
        native: _core.ExportedModel | None = None
        if isinstance(predictor, OnnxPredictor):
            native = predictor.native
        elif description["kind"] != files.CLICK:
            native = _core.TableModel(msgspec.json.encode(description), version.layers.natives)
        return Model(version.version, description["kind"], predictor, version, InputSpec(predictor), native)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"{version.storage_dir} cannot be served: the description of its model is damaged ({error!r:.200})"
        ) from error


def _predictor(description: Mapping[str, Any], version: ExportVersion, threads: int | None) -> Predictor:
    store = ExportStore(version, threads=threads)
    if description["kind"] == files.CLICK:
        names = (description["table"], *description["more_tables"])
        has_graph = description["click"] and files.ONNX_TOWER in version.layers.extras
        if has_graph and (runtime := find_runtime()) is not None:
            tower = version.layers.extra(files.ONNX_TOWER)
            tables, natives = map(store.exported, names), version.layers.natives
            return OnnxPredictor(description, tower, runtime, tables=tables, natives=natives, workers=version.workers)
        from shoal.torch import config  # loads PyTorch, so only if there is a tower that nothing else runs

        return config.exported(description, version.layers.extra("tower.pt"), store)
    for name in (description["table"], *description["more_tables"]):
        store.exported(name)
    return models.exported(description, store)


class _Maker:
    """Makes the model of each version that is about to become current, and keeps the last one that can be used."""

    made: Model

    def __init__(self, threads: int | None) -> None:
        self._threads = threads

    def __call__(self, version: ExportVersion) -> None:
        self.made = make_model(version, self._threads)


class ServedModel(Reloadable):
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
        As for :func:`shoal.export.open`.

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
        super().__init__()
        self._maker = _Maker(threads)
        self._export = Export(
            open_dir(directory, storage_options),
            threads=threads,
            verify=verify,
            cache=Cache(cache),
            check=self._maker,
        )
        self._now = self._maker.made

    @property
    def now(self) -> Model:
        """The current model."""
        return self._now

    def is_of(self, copies: Copies) -> bool:
        """Return whether the current model is of that export, in one of its directories."""
        return self._export.now.is_of(copies)

    def reload(self) -> bool:
        """Check for a newer version and make its model current; log that, or why it cannot be used.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        CorruptionError, ValueError
            There is a newer version that cannot be used; the current one is kept.
        """
        with self._change():
            before = self._now
            try:
                if not self._export.refresh():
                    return False
            except Exception as error:
                self._has_failed(f"version {before.version} is", error)
                raise
            self._now = self._maker.made
            self.changed()
            self._has_reloaded("version %d replaces version %d", self._now.version, before.version)
            return True

    def _release(self) -> None:
        self._export.close()
