"""OnnxPredictor: the predictions of a click model's export without PyTorch: ONNX Runtime computes the dense part.

    batch --arrangement.py--> keys, numbers --tables--> rows --tower.onnx--> margins

The graph names its inputs, and its metadata say which keys' rows those of rows are (docs/export-format.md).

Threads: any; the session of ONNX Runtime may run in several at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.data import Batch
from shoal.errors import CorruptionError
from shoal.models.arrangement import Arranged, ArrangedItems, arrange
from shoal.models.features import Features
from shoal.models.files import ONNX_TOWER
from shoal.models.history import History, Record
from shoal.models.learner import Floats
from shoal.models.predictor import Predictor, read_calibration
from shoal.table.table import Table

SOURCES = "shoal.rows"  # in the file's metadata: of each input of rows, which keys they are of


class Source(msgspec.Struct, frozen=True):
    """Which keys' rows an input of a graph is: those of fixed fields, or of items, or of their side column."""

    table: str
    fields: tuple[str, ...] = ()
    items: str | None = None
    side: str | None = None


def can_run() -> bool:
    """Whether ONNX Runtime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


class OnnxPredictor(Predictor):
    """A click model that only predicts, over tables of an export.

    Parameters
    ----------
    description : mapping
        Of the model in the export: see `shoal.models.files.describe`.
    tower : bytes
        The file of ONNX beside it.
    tables : iterable of Table
    threads : int
        That share the work of one prediction.

    Raises
    ------
    CorruptionError
        The file is no graph of this model.
    """

    def __init__(self, description: Mapping[str, Any], tower: bytes, tables: Iterable[Table], threads: int) -> None:
        super().__init__()
        import onnxruntime

        self._calibration = read_calibration(description["calibration"], "the export")
        self._record = Record(History(), description["examples"], description["format"], description["schema"])
        self.features = Features.from_json(description["click"]["features"])
        self._tables = {table.name: table for table in tables}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        try:
            self._session = onnxruntime.InferenceSession(tower, options, providers=["CPUExecutionProvider"])
            metadata = self._session.get_modelmeta().custom_metadata_map
            self._sources = msgspec.json.decode(metadata[SOURCES], type=dict[str, Source])
            self._numbers = [one.name for one in self._session.get_inputs() if one.name not in self._sources]
            self._check()
        except Exception as error:
            raise CorruptionError(f"{ONNX_TOWER} is not the dense part of this model ({error!r:.200})") from None
        self._output = self._session.get_outputs()[0].name

    def _check(self) -> None:
        """Raise an error if an input is none of the model's."""
        features = self.features
        jagged = {one.name for one in (*features.lists, *features.sequences)}
        for source in self._sources.values():
            _ = self._tables[source.table], [features.index_of(name) for name in source.fields]
            if not source.fields and source.items not in jagged:
                raise ValueError(f"it takes rows of the items of {source.items!r}")
        for name in self._numbers:
            kind, _, of = name.partition("/")
            if name not in ("values", "dense") and not (kind in ("offsets", "weights", "numeric") and of in jagged):
                raise ValueError(f"it takes {name!r}")

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of the export."""
        return tuple(self._tables.values())

    def prepare(self, batch: Batch) -> Arranged:
        """Arrange a batch."""
        return arrange(batch, self.features)

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Arranged]]:
        """Arrange each batch."""
        for batch in batches:
            yield batch, self.prepare(batch)

    def check_fitted(self) -> None:
        """Do nothing: an export is of a model that has learned."""

    def _margins(self, batch: Batch, prepared: Arranged) -> Floats:
        rows = {name: self._rows(source, prepared) for name, source in self._sources.items()}
        numbers = {name: _numbers(name, prepared) for name in self._numbers}
        (found,) = self._session.run([self._output], {**rows, **numbers})
        margins: Floats = found.astype(np.float64)
        return margins

    def _rows(self, source: Source, x: Arranged) -> npt.NDArray[np.float32]:
        if source.items is None:
            columns = [self.features.index_of(name) for name in source.fields]
            keys = x.keys if columns == list(range(x.keys.shape[1])) else x.keys[:, columns]
        else:
            items = _items(x, source.items)
            keys = items.keys if source.side is None else items.side[source.side]
        table = self._tables[source.table]
        rows: npt.NDArray[np.float32] = table.pull(keys.reshape(-1)).reshape(*keys.shape, table.dim)
        return rows


def _items(x: Arranged, name: str) -> ArrangedItems:
    return x.lists[name] if name in x.lists else x.sequences[name]


def _numbers(name: str, x: Arranged) -> npt.NDArray[Any]:
    """Return an input that is no rows."""
    kind, _, of = name.partition("/")
    found: npt.NDArray[Any] | None
    if kind == "values":
        found = np.ones(x.keys.shape, np.float32) if x.values is None else x.values
    elif kind == "dense":
        found = x.dense
    elif kind == "offsets":
        found = _items(x, of).offsets
    elif kind == "weights":
        items = _items(x, of)
        found = np.ones(len(items.keys), np.float32) if items.weights is None else items.weights
    else:
        found = _items(x, of).numeric
    if found is None:
        raise ValueError(f"this batch has no {name!r}, which the dense part takes")
    return found
