"""InputSpec: the inputs of a model, by the format and the schema of its training data.

    form of an instance   taken by models of
    keys                  every format
    columns by name       csv, Parquet, Arrow; Criteo
    tables                csv, Parquet, Arrow
    lines of text         libsvm, libffm, vw, Criteo

The engine decodes JSON, text and csv (`InputSpec.read`), and ipc.py Arrow. A table or lines in a body are read as in a
file.

Threads: an InputSpec is immutable, except that any thread may add to ``rounded``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal import _core
from shoal.data import Batch
from shoal.data.columns import CATEGORICAL, LABEL, LIST, NUMERIC, PASSED_OVER, VECTOR, Columns, listed, missing_texts
from shoal.data.interactions import named_pairs
from shoal.data.readers import NAMED_FORMATS, READERS, field_number
from shoal.data.rows import CRITEO
from shoal.serve.limits import RequestError, TooLargeError

if TYPE_CHECKING:
    from shoal.models.predictor import Predictor
    from shoal.serve.limits import Account

MOST_COLUMNS = 10_000  # of a table in a body
_NAME_LENGTH = 80  # of an unknown column in a message
_LINES = READERS.keys() - NAMED_FORMATS
_DECODED_BYTES = 10  # for a byte of a body, at most: a feature has two bytes of text or more
_FEATURE_BYTES = 32  # of a feature in a batch and in the key batch made of it
CRITEO_COLUMNS = (*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


class Examples(msgspec.Struct, frozen=True, eq=False):
    """Some instances of a request as rows of features."""

    # Their numbers in the request, ascending.
    instances: npt.NDArray[np.int64]
    indptr: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    # None: all are 1.
    values: npt.NDArray[np.float32] | None
    # None if the model needs none.
    fields: npt.NDArray[np.uint64] | None


class InputSpec:
    """The inputs of a model."""

    def __init__(self, model: Predictor) -> None:
        schema: Mapping[str, Any] = model.schema
        self.format = model.format
        features = getattr(model, "features", None)
        self.fields_of = None if features is None or isinstance(features, int) else str(features.form)
        self.columns = _columns(model.format, schema)
        self._roles = {} if self.columns is None else _roles(self.columns)
        every = self.columns is not None and self.columns.categorical is None
        self.others = CATEGORICAL if every else PASSED_OVER
        self.missing = frozenset(missing_texts(model.format, schema))
        self.header: list[str] | None = schema.get("columns")  # of files without one
        self.separator: str = schema.get("sep", ",")
        pairs = schema.get("interactions", ())
        form = self.fields_of or model.format
        numbers = [[field_number(str(form), name) for name in pair] for pair in named_pairs(pairs)]
        self.pairs = np.array(numbers, np.uint64).reshape(-1, 2)
        self.lines = model.format in _LINES
        described = msgspec.json.encode({"format": model.format, "schema": schema})
        self.native = _core.InputSchema(described, self.fields_of or "")
        self.rounded: set[str] = set()  # columns of Arrow whose numbers were warned of, see `featured`
        self._row_bytes = _FEATURE_BYTES + 4 * sum(table.dim for table in model.tables)

    @property
    def needs_fields(self) -> bool:
        """Whether the model uses the field of each feature."""
        return self.fields_of is not None

    @property
    def is_criteo(self) -> bool:
        """Whether instances may be columns of Criteo's logs."""
        return self.format == CRITEO.name

    def role(self, name: str) -> int:
        """Return the role of a column: CATEGORICAL, NUMERIC, LIST, VECTOR, LABEL or PASSED_OVER."""
        return self._roles.get(name, self.others)

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return those of the names of columns that the model does not know."""
        if self.others != PASSED_OVER:
            return []
        return [name for name in names if name not in self._roles and name not in (self.header or ())]

    def read(
        self,
        requests: _core.RequestBodies,
        protocol: _core.ServingProtocol,
        body: bytes | bytearray,
        account: Account,
        unknown: set[str],
        **how: Any,
    ) -> Batch:
        """Make a batch of a body in a protocol, and add the columns that the model does not know to ``unknown``.

        ``how``: what `shoal._core.RequestBodies.read` takes further.
        """
        limit = account.left
        account.decoded(min(limit, _DECODED_BYTES * len(body)))
        try:
            indptr, keys, values, fields, found = requests.read(self.native, protocol, body, **how, limit=limit)
        except _core.TooLargeError as error:
            raise TooLargeError(str(error)) from None
        except ValueError as error:
            raise RequestError(str(error)) from None
        unknown.update(found)
        return Batch(np.zeros(len(indptr) - 1, np.float32), indptr, keys, values, None, fields)

    def check_known(self, unknown: Collection[str]) -> None:
        """Raise RequestError if there are columns that the model does not know."""
        if unknown:
            names = listed([name[:_NAME_LENGTH] for name in sorted(unknown)])
            what = f"columns {names} are" if len(unknown) > 1 else f"column {names} is"
            raise RequestError(f"{what} not known to the model: its columns are {listed(self.named())}")

    def named(self) -> list[str]:
        """Return the names of the columns that are known to be features."""
        if self.is_criteo:
            return list(CRITEO_COLUMNS)
        if self.columns is None:
            return []
        pairs = [name for pair in named_pairs(self.columns.interactions) for name in pair]
        asked = self.columns
        known = (*(asked.categorical or ()), *asked.numeric, *asked.lists, *asked.vectors, *map(str, pairs))
        return list(dict.fromkeys(known))

    def describe(self) -> dict[str, Any]:
        """Describe the inputs, as JSON."""
        keys = {"keys": "whole numbers", "values": "numbers, 1 if left out"}
        if self.needs_fields:
            keys["fields"] = f"the field of each key, as {self.fields_of} data names it"
        description: dict[str, Any] = {"format": self.format, "keys": keys}
        if self.columns is not None:
            description["columns"] = {name: _ROLES[self.role(name)] for name in self.named()}
            description["other_columns"] = _ROLES[self.others]
        elif self.is_criteo:
            description["columns"] = {
                name: "whole number" if name.startswith("I") else "text" for name in CRITEO_COLUMNS
            }
        if self.columns is not None:
            what = "with a header" if self.header is None else f"of {len(self.header)} columns, without a header"
            description["csv"] = f"rows {what}, separated by {self.separator!r}"
        if self.lines:
            description["lines"] = f"{self.format}, with or without a label"
        return description

    def __str__(self) -> str:
        return self.native.takes()

    def batch(self, examples: Examples, account: Account, *, crossed: bool = True) -> Examples:
        """Add the interactions, unless the features have them already."""
        account.decoded(len(examples.keys) * self._row_bytes)
        if crossed or not len(self.pairs):
            return examples if self.needs_fields else structs.replace(examples, fields=None)
        assert examples.fields is not None
        account.decoded(_count_pairs(examples, self.pairs) * self._row_bytes)
        made = _core.interact(examples.indptr, examples.keys, examples.values, examples.fields, self.pairs.reshape(-1))
        return Examples(examples.instances, *made, None)


_ROLES = {
    CATEGORICAL: "text",
    NUMERIC: "number",
    LIST: "list of texts",
    VECTOR: "list of numbers",
    LABEL: "label",
    PASSED_OVER: "passed over",
}


def to_batch(parts: list[Examples], rows: int) -> Batch:
    """Concatenate the instances of a request, in their order."""
    labels = np.zeros(rows, np.float32)
    if len(parts) == 1:
        (one,) = parts
        return Batch(labels, one.indptr, one.keys, one.values, None, one.fields)
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    order = np.argsort(np.concatenate([part.instances for part in parts]), kind="stable")
    lengths, begins = lengths[order], begins[order]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    taken = np.repeat(begins - indptr[:-1], lengths) + np.arange(indptr[-1])
    keys = np.concatenate([part.keys for part in parts])[taken]
    values = None
    if any(part.values is not None for part in parts):
        ones = [np.ones(len(part.keys), np.float32) if part.values is None else part.values for part in parts]
        values = np.concatenate(ones)[taken]
    fields = None
    if all(part.fields is not None for part in parts):
        fields = np.concatenate([part.fields for part in parts if part.fields is not None])[taken]
    return Batch(labels, indptr, keys, values, None, fields)


def _count_pairs(examples: Examples, pairs: npt.NDArray[np.uint64]) -> int:
    """Return an upper bound of the number of features that the pairs make."""
    assert examples.fields is not None
    rows = len(examples.indptr) - 1
    row = np.repeat(np.arange(rows), np.diff(examples.indptr))
    counts = {
        int(field): np.bincount(row[examples.fields == field], minlength=rows).astype(np.float64)
        for field in np.unique(pairs)
    }
    return int(sum(float(counts[int(a)] @ counts[int(b)]) for a, b in pairs))


def _columns(form: str | None, schema: Mapping[str, Any]) -> Columns | None:
    if form not in NAMED_FORMATS:
        return None
    return Columns(
        label=schema.get("label"),
        categorical=schema.get("categorical"),
        numeric=schema.get("numeric", ()),
        weight=schema.get("weight"),
        lists=schema.get("lists", {}),
        vectors=schema.get("vectors", ()),
        labels=schema.get("labels", ()),
        interactions=[tuple(pair) for pair in schema.get("interactions", ())],
    )


def _roles(columns: Columns) -> dict[str, int]:
    return {
        **dict.fromkeys(columns.categorical or (), CATEGORICAL),
        **dict.fromkeys(columns.numeric, NUMERIC),
        **dict.fromkeys(columns.lists, LIST),
        **dict.fromkeys(columns.vectors, VECTOR),
        **dict.fromkeys(columns.labels, PASSED_OVER),
        **({} if columns.weight is None else {columns.weight: PASSED_OVER}),
        **({} if columns.label is None else {columns.label: LABEL}),
    }
