"""What requests bring and answers take away: JSON and Arrow, examples by key or by the names of their columns."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.data import Batch, Reader, read_arrow

if TYPE_CHECKING:
    from shoal.models.predictor import Floats, Predictor

__all__ = ["ARROW", "JSON", "BadRequest", "answer", "examples"]

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_UNTOLD = ("", "application/x-www-form-urlencoded")  # a body's type where nobody thought of it: curl -d says so of all
_LABEL = "label"  # of a column that is not there: predictions take none


class BadRequest(ValueError):
    """What was sent cannot be predicted from: the message says why."""


class Sparse(msgspec.Struct, forbid_unknown_fields=True):
    """An example by its keys."""

    keys: list[int]
    values: list[float] | None = None


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A body of JSON."""

    instances: list[msgspec.Raw]


class _Instances(msgspec.Struct):
    instances: list[dict[str, Any]]


class _SparseInstances(msgspec.Struct):
    instances: list[Sparse]


def examples(body: bytes, content_type: str, model: Predictor) -> Batch:
    """Make a batch of what was sent.

    Parameters
    ----------
    body : bytes
    content_type : str
        `JSON`: ``{"instances": [...]}``, of ``{"keys": [...], "values": [...]}`` or of ``{"column": cell, ...}``.
        `ARROW`: a stream of record batches with columns ``keys`` and ``values`` (lists), or with the model's own.
    model : Predictor
        Whose schema says what the columns are.

    Raises
    ------
    BadRequest
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == ARROW:
            return _of_arrow(body, model)
        if kind in (JSON, *_UNTOLD):
            return _of_json(body, model)
    except BadRequest:
        raise
    except (ValueError, TypeError, OverflowError, OSError) as error:  # a reader's words, or Arrow's
        raise BadRequest(str(error)) from None
    raise BadRequest(f"a body of {kind}: send {JSON} or {ARROW}")


def _of_json(body: bytes, model: Predictor) -> Batch:
    whole = msgspec.json.decode(body, type=Request)
    if not whole.instances:
        raise BadRequest("no instances: send at least one")
    first = msgspec.json.decode(whole.instances[0])
    if not isinstance(first, dict):
        raise BadRequest('an instance is an object: {"keys": [...]} or {"column": cell, ...}')
    if "keys" in first:
        found = msgspec.json.decode(body, type=_SparseInstances).instances
        lengths = np.fromiter(map(len, (one.keys for one in found)), np.int64, len(found))
        keys = np.array(list(itertools.chain.from_iterable(one.keys for one in found)), dtype=object)
        values = None
        if any(one.values is not None for one in found):
            for number, one in enumerate(found):
                if one.values is not None and len(one.values) != len(one.keys):
                    raise BadRequest(f"instance {number} has {len(one.keys)} keys and {len(one.values)} values")
            cells = (one.values if one.values is not None else [1.0] * len(one.keys) for one in found)
            with np.errstate(over="ignore"):  # what becomes infinite is refused below
                values = np.array(list(itertools.chain.from_iterable(cells)), np.float32)
        return _batch(lengths, keys.astype(np.uint64), values, model)
    from shoal.data.arrow import pyarrow

    rows = msgspec.json.decode(body, type=_Instances).instances
    return _of_columns(pyarrow().Table.from_pylist(rows), model)


def _of_arrow(body: bytes, model: Predictor) -> Batch:
    from shoal.data.arrow import pyarrow

    arrow = pyarrow()
    table = arrow.ipc.open_stream(io.BytesIO(body)).read_all().combine_chunks()
    if table.num_rows == 0:
        raise BadRequest("no rows: send at least one")
    if "keys" not in table.column_names or "keys" in (model.schema.get("categorical") or ()):
        return _of_columns(table, model)

    def flat(name: str, dtype: Any) -> tuple[Any, Any]:
        column = table.column(name).combine_chunks()
        if column.null_count:
            raise BadRequest(f"column {name!r} has nulls: send empty lists")
        cells = column.cast(arrow.list_(arrow.from_numpy_dtype(dtype)))
        return cells.value_lengths().to_numpy(zero_copy_only=False), cells.flatten().to_numpy(zero_copy_only=False)

    lengths, keys = flat("keys", np.uint64)
    values = None
    if "values" in table.column_names:
        counts, values = flat("values", np.float32)
        if not np.array_equal(lengths, counts):
            raise BadRequest("keys and values are not of one length in every row")
    return _batch(lengths, keys, values, model)


def _batch(lengths: Any, keys: Any, values: Any, model: Predictor) -> Batch:
    if model.schema.get("fields") or getattr(model, "fields", None) is not None:
        raise BadRequest("this model takes the fields of its features: send columns by name")
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if values is not None and not np.isfinite(values).all():
        raise BadRequest("values must be finite")
    return Batch(np.zeros(len(lengths), np.float32), indptr, np.ascontiguousarray(keys, np.uint64), values)


def _of_columns(table: Any, model: Predictor) -> Batch:
    """Read named columns as the model's training data was read."""
    from shoal.data.arrow import pyarrow

    schema: Mapping[str, Any] = model.schema
    if "label" not in schema:
        raise BadRequest(f"this model learned from {model.format or 'batches'}, which has no columns: send keys")
    label = schema["label"]
    table = table.drop_columns([name for name in (label, schema.get("weight")) if name in table.column_names])
    arrow = pyarrow()
    named = [*(schema.get("categorical") or ()), *schema.get("numeric", ()), *schema.get("lists", {})]
    for name in named:
        if name not in table.column_names:  # an example that does not tell it
            table = table.append_column(name, arrow.nulls(table.num_rows, arrow.string()))
    table = table.append_column(label, arrow.array(np.zeros(table.num_rows, np.float32)))
    how = {name: schema[name] for name in ("categorical", "numeric", "lists", "interactions") if name in schema}
    reader = model.reading(read_arrow(table, label=label, batch_size=max(1, table.num_rows), **how))
    assert isinstance(reader, Reader)
    (batch,) = list(reader)
    return batch


def answer(version: int, probabilities: Floats, accept: str) -> tuple[bytes, str]:
    """Write predictions: the body, and what it is."""
    if ARROW in accept:
        from shoal.data.arrow import pyarrow

        arrow = pyarrow()
        table = arrow.table({"probability": probabilities}).replace_schema_metadata({"version": str(version)})
        sink = io.BytesIO()
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue(), ARROW
    return msgspec.json.encode({"version": version, "probabilities": probabilities.tolist()}), JSON
