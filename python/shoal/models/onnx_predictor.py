"""OnnxPredictor: the predictions of a click model's export without PyTorch.

The engine arranges batches, looks rows up, and has ONNX Runtime compute the dense part (csrc/predict/click_model.h).

Threads: any.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal import _core
from shoal.data import Batch
from shoal.errors import CorruptionError
from shoal.models.features import Features
from shoal.models.files import ONNX_TOWER
from shoal.models.history import History, Record
from shoal.models.learner import Floats
from shoal.models.predictor import Predictor, read_calibration
from shoal.table.table import Table


@functools.cache
def find_runtime() -> _core.OnnxRuntime | None:
    """Open ONNX Runtime's library, that of the package onnxruntime or else the system's; None: there is none.

    Raises
    ------
    ImportError
        The library cannot be used.
    """
    found = importlib.util.find_spec("onnxruntime")
    places = [] if found is None or found.origin is None else [*Path(found.origin).parent.glob("capi/libonnxruntime.*")]
    try:
        return _core.OnnxRuntime.open(str(max(places, default="")))
    except RuntimeError as error:
        raise ImportError(f"{error}: pip install --upgrade onnxruntime") from None


class OnnxPredictor(Predictor):
    """A click model that only predicts, over tables of an export.

    Parameters
    ----------
    description : mapping
        Of the model in the export: see `shoal.models.files.describe`.
    tower : bytes
        The file of ONNX beside it.
    runtime : _core.OnnxRuntime
    tables : iterable of Table
    natives : mapping of str to _core.ExportReader
        The same tables.
    workers : _core.ThreadPool
        That share the lookups of one prediction.

    Attributes
    ----------
    native : _core.ClickModel

    Raises
    ------
    CorruptionError
        The file is no graph of this model.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        tower: bytes,
        runtime: _core.OnnxRuntime,
        *,
        tables: Iterable[Table],
        natives: Mapping[str, _core.ExportReader],
        workers: _core.ThreadPool,
    ) -> None:
        super().__init__()
        self._calibration = read_calibration(description["calibration"], "the export")
        self._record = Record(History(), description["examples"], description["format"], description["schema"])
        self.features = Features.from_json(description["click"]["features"])
        self._tables = tuple(tables)
        self._workers = workers
        try:
            self.native = _core.ClickModel(msgspec.json.encode(description), dict(natives), tower, runtime)
        except (ValueError, RuntimeError) as error:
            raise CorruptionError(f"{ONNX_TOWER} is not the dense part of this model: {error}") from None

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of the export."""
        return self._tables

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch: it is arranged with the prediction."""
        return batch

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Batch]]:
        """Return each batch twice."""
        for batch in batches:
            yield batch, batch

    def check_fitted(self) -> None:
        """Do nothing: an export is of a model that has learned."""

    def _margins(self, batch: Batch, prepared: Batch) -> Floats:
        return self.native.margins(batch.indptr, batch.keys, batch.values, batch.fields, self._workers)
