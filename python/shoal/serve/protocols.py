"""What clients of other servers send and expect, for the same models.

    TensorFlow Serving's REST API   {"instances": [{"site": "a.com"}]} or {"inputs": {"site": ["a.com"]}}
                                    {"predictions": [0.25]}               {"outputs": [0.25]}
    Open Inference Protocol, v2     a tensor for each column, as JSON or, behind the header's bytes, as raw data
    (KServe, Triton)                the tensor "probability"

A request becomes instances (`shoal.serve.instances`): a column, key or line of a tensor is read as in a body of JSON.

    tensor               shape                  instances
    a column's name      [n] or [n, 1]          a cell each; [n, m] a list of m cells
    keys, values, fields [n, m]                 m features each
    offsets, with them   [n + 1], and [m]       instance i has the features offsets[i] to offsets[i + 1]
    line                 [n]                    a line of text each, where the model takes lines

Threads: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from shoal.base.decoders import json_decoder
from shoal.data.columns import LIST, NUMERIC, PASSED_OVER, VECTOR
from shoal.serve.bodies import JSON, Answer, Read, encode, examples
from shoal.serve.instances import decode_instances, json_bytes
from shoal.serve.limits import Account, RequestError

if TYPE_CHECKING:
    from shoal.data import Batch
    from shoal.models.learner import Floats
    from shoal.serve.inputs import InputSpec
    from shoal.serve.served import Model

HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON before the raw data
_RAW = "application/octet-stream"
_DTYPES = {
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BOOL": np.dtype("?"),
}
_BYTES = "BYTES"
_SPARSE = ("keys", "values", "fields")
_MOST_DIMENSIONS = 8


class Request(NamedTuple):
    """A prediction request whose body has arrived."""

    body: bytes | bytearray
    headers: Mapping[str, str]
    name: str  # of the model
    model: Model
    account: Account
    unknown: set[str]  # columns that the model does not know: they are added

    def batch(self, instances: list[Any]) -> Batch:
        """Make a batch of instances."""
        return decode_instances(instances, self.model.inputs, self.account, self.unknown)


Reader = Callable[[Request], Read]


def native(request: Request) -> Read:
    """Read a body of shoal's own forms, by its content type; the answer is of the accepted type, or of the same."""
    sent = request.headers.get("content-type", JSON)
    accept = request.headers.get("accept", "")
    accept = sent if accept in ("", "*/*") else accept
    batch = examples(request.body, sent, request.model.inputs, request.account, request.unknown)
    return Read(batch, lambda version, predictions: Answer(*encode(version, predictions, accept), {}))


# ---- TensorFlow Serving ----------------------------------------------------------------------------------------------


class _Predict(msgspec.Struct, forbid_unknown_fields=True):
    """A body."""

    instances: list[Any] | None = None
    inputs: dict[str, Any] | list[Any] | None = None
    signature_name: str = ""


_PREDICT = json_decoder(_Predict)


def tensorflow(request: Request) -> Read:
    """Read a body of TensorFlow Serving's predict API, by rows or by columns."""
    request.account.decoded(json_bytes(request.body))
    asked = _decoded(_PREDICT, bytes(request.body))
    if (asked.instances is None) == (asked.inputs is None):
        raise RequestError('send either "instances", a list of rows, or "inputs", a list for each column')
    if asked.instances is not None:
        instances, key = asked.instances, "predictions"
    else:
        instances, key = _rows(asked.inputs), "outputs"

    def write(version: int, predictions: Floats) -> Answer:
        return Answer(msgspec.json.encode({key: predictions.tolist()}), JSON, {})

    return Read(request.batch(instances), write)


def _rows(columns: Any) -> list[Any]:
    """Return the rows of columns of equal length."""
    if not isinstance(columns, dict):
        return list(columns)
    for column, cells in columns.items():
        if not isinstance(cells, list):
            raise RequestError(f"input {column[:80]!r} is no list: send a cell for each row")
    lengths = {column: len(cells) for column, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise RequestError(f"the inputs have different lengths: {lengths!s:.200}")
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def model_status(versions: list[int]) -> dict[str, Any]:
    """Describe the loaded versions, as ``GET /v1/models/NAME`` does."""
    status = {"error_code": "OK", "error_message": ""}
    return {
        "model_version_status": [
            {"version": str(version), "state": "AVAILABLE", "status": status} for version in reversed(versions)
        ]
    }


def model_signature(name: str, model: Model) -> dict[str, Any]:
    """Describe inputs and outputs, as ``GET /v1/models/NAME/metadata`` does."""

    def described(tensor: _Described) -> dict[str, Any]:
        kind = {_BYTES: "DT_STRING", "UINT64": "DT_UINT64", "FP64": "DT_DOUBLE"}[tensor.datatype]
        dims = [{"size": str(size), "name": ""} for size in tensor.shape]
        return {"dtype": kind, "tensor_shape": {"dim": dims, "unknown_rank": False}, "name": tensor.name}

    signature = {
        "inputs": {one.name: described(one) for one in _inputs(model.inputs)},
        "outputs": {(one := _output(model)).name: described(one)},
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(model.version)},
        "metadata": {"signature_def": {"signature_def": {"serving_default": signature}}},
    }


# ---- Open Inference Protocol -----------------------------------------------------------------------------------------


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Infer(msgspec.Struct):
    """A body, or what stands before its raw data."""

    inputs: list[_Tensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


class _Described(NamedTuple):
    name: str
    datatype: str
    shape: list[int]


_INFER = json_decoder(_Infer)


def inference(request: Request) -> Read:
    """Read a body of the Open Inference Protocol's infer API."""
    body, model = request.body, request.model
    length = request.headers.get(HEADER_LENGTH, str(len(body)))
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > len(body):
        raise RequestError(f"a header of {length[:20]} bytes in a body of {len(body)}")
    head, raw = bytes(body[: int(length)]), memoryview(body)[int(length) :]
    request.account.decoded(json_bytes(head) + 32 * len(raw))
    asked = _decoded(_INFER, head)
    given: dict[str, list[Any]] = {}
    for tensor in asked.inputs:
        if tensor.name in given:
            raise RequestError(f"input {tensor.name[:80]!r} is there twice")
        size = tensor.parameters.get("binary_data_size")
        if size is not None:
            if not isinstance(size, int) or not 0 <= size <= len(raw):
                raise RequestError(
                    f"input {tensor.name[:80]!r} has {size!s:.20} bytes of data, and {len(raw)} are left"
                )
            given[tensor.name] = _cells(tensor, _unpacked(tensor, raw[:size]))
            raw = raw[size:]
        else:
            given[tensor.name] = _cells(tensor, _flat(tensor.data))
    if len(raw):
        raise RequestError(f"{len(raw)} bytes of data belong to no input")
    result = _output(model)
    for output in asked.outputs:
        if output.name != result.name:
            raise RequestError(f"there is no output {output.name[:80]!r}: it is {result.name!r}")
    is_raw = any(output.parameters.get("binary_data") for output in asked.outputs) or (
        not asked.outputs and bool(asked.parameters.get("binary_data_output"))
    )

    def write(version: int, predictions: Floats) -> Answer:
        output: dict[str, Any] = {"name": result.name, "shape": list(predictions.shape), "datatype": result.datatype}
        data = b""
        if is_raw:
            data = np.ascontiguousarray(predictions, "<f8").tobytes()
            output["parameters"] = {"binary_data_size": len(data)}
        else:
            output["data"] = predictions.reshape(-1).tolist()
        answer = {"model_name": request.name, "model_version": str(version), "id": asked.id, "outputs": [output]}
        text = msgspec.json.encode(answer)
        return Answer(text + data, _RAW, {HEADER_LENGTH: str(len(text))}) if is_raw else Answer(text, JSON, {})

    return Read(request.batch(_instances(given, model.inputs)), write)


def _cells(tensor: _Tensor, flat: list[Any]) -> list[Any]:
    """Return what the instances have of a tensor: a cell each, or a list."""
    name, shape = tensor.name[:80], tensor.shape
    if tensor.datatype != _BYTES and tensor.datatype not in _DTYPES:
        raise RequestError(f"input {name!r} is of {tensor.datatype[:20]!r}: send {_BYTES}, {', '.join(_DTYPES)}")
    if not 1 <= len(shape) <= _MOST_DIMENSIONS or min(shape) < 0:
        raise RequestError(f"input {name!r} has the shape {shape!s:.80}: the first dimension is that of instances")
    if prod(shape) != len(flat):
        raise RequestError(f"input {name!r} has the shape {shape!s:.80}, and {len(flat)} elements")
    if len(shape) == 1 or prod(shape[1:]) == 1:
        return flat
    width = prod(shape[1:])
    return [flat[i * width : (i + 1) * width] for i in range(shape[0])]


def _flat(nested: Any) -> list[Any]:
    """Return the elements of nested lists."""
    if not isinstance(nested, list):
        raise RequestError("an input without data: send a list of elements, or raw data and its size")
    data: list[Any] = nested
    for _ in range(_MOST_DIMENSIONS):
        if not any(isinstance(one, list) for one in data):
            return data
        if not all(isinstance(one, list) for one in data):
            break
        data = [element for one in data for element in one]
    raise RequestError("the data of an input is not an array: its lists are nested unequally, or too deeply")


def _unpacked(tensor: _Tensor, raw: memoryview) -> list[Any]:
    """Return the elements of raw data."""
    if tensor.datatype in _DTYPES:
        dtype = _DTYPES[tensor.datatype]
        if len(raw) % dtype.itemsize:
            raise RequestError(f"input {tensor.name[:80]!r}: {len(raw)} bytes are no whole number of elements")
        found: list[Any] = np.frombuffer(raw, dtype).tolist()
        return found
    texts, at = [], 0
    try:
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            at += 4
            if size > len(raw) - at:
                raise RequestError(f"input {tensor.name[:80]!r}: a text of {size} bytes, and {len(raw) - at} are left")
            texts.append(str(raw[at : at + size], "utf-8"))
            at += size
    except (struct.error, UnicodeDecodeError) as error:
        raise RequestError(f"input {tensor.name[:80]!r}: {error}") from None
    return texts


def _instances(given: dict[str, list[Any]], spec: InputSpec) -> list[Any]:
    """Make instances of tensors."""
    if not given:
        raise RequestError("no inputs: send a tensor for each column")
    if len(given) == 1 and "line" in given and spec.lines is not None and spec.role("line") == PASSED_OVER:
        return given["line"]
    offsets = given.pop("offsets", None) if "keys" in given else None
    if offsets is not None:
        features = {name: given[name] for name in given if name in _SPARSE}
        if any(len(one) != len(features["keys"]) for one in features.values()) or len(features) != len(given):
            raise RequestError("with offsets: send keys, values and fields of one length, and nothing else")
        if not all(isinstance(one, int) for one in offsets) or offsets != sorted(offsets) or not offsets:
            raise RequestError("offsets are whole numbers that do not fall")
        if offsets[0] != 0 or offsets[-1] != len(features["keys"]):
            raise RequestError(f"offsets run from 0 to the number of keys, {len(features['keys'])}")
        return [{name: one[a:b] for name, one in features.items()} for a, b in pairwise(offsets)]
    lengths = {name: len(cells) for name, cells in given.items()}
    if len(set(lengths.values())) > 1:
        raise RequestError(f"the inputs are of different numbers of instances: {lengths!s:.200}")
    by_keys = "keys" in given and spec.role("keys") in (PASSED_OVER, spec.others)
    for name, cells in given.items():
        if (by_keys and name in _SPARSE) or spec.role(name) in (LIST, VECTOR):
            given[name] = [cell if isinstance(cell, list) else [cell] for cell in cells]
    return [dict(zip(given, cells, strict=True)) for cells in zip(*given.values(), strict=True)]


def server_metadata() -> dict[str, Any]:
    """Describe the server, as ``GET /v2`` does."""
    return {"name": "shoal", "version": metadata.version("shoal"), "extensions": ["binary_tensor_data"]}


def model_metadata(name: str, versions: list[int], model: Model) -> dict[str, Any]:
    """Describe inputs and outputs, as ``GET /v2/models/NAME`` does."""
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": "shoal",
        "inputs": [one._asdict() for one in _inputs(model.inputs)],
        "outputs": [_output(model)._asdict()],
    }


def _inputs(spec: InputSpec) -> list[_Described]:
    """Return the tensors that a model takes: its columns, or else keys and lines."""
    found = []
    for column in spec.named():
        role = spec.role(column)
        kind = "FP64" if role in (NUMERIC, VECTOR) else _BYTES
        found.append(_Described(column, kind, [-1, -1] if role in (LIST, VECTOR) else [-1]))
    if not found:
        found = [_Described("keys", "UINT64", [-1, -1]), _Described("values", "FP64", [-1, -1])]
        if spec.needs_fields:
            found.append(_Described("fields", _BYTES, [-1, -1]))
    return found


def _output(model: Model) -> _Described:
    predictor = model.predictor
    if predictor.is_multiclass:
        return _Described("probabilities", "FP64", [-1, predictor.num_classes])
    return _Described("probability", "FP64", [-1])


def _decoded(decoder: Any, text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise RequestError(str(error)) from None
