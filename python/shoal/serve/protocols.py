"""What clients of other servers send and expect, for the same models.

    TensorFlow Serving's REST API   {"instances": [{"site": "a.com"}]} or {"inputs": {"site": ["a.com"]}}
                                    {"predictions": [0.25]}               {"outputs": [0.25]}
    Open Inference Protocol, v2     a tensor for each column, as JSON or, behind the header's bytes, as raw data
    (KServe, Triton)                the tensor "probability"

    tensor               shape                  instances
    a column's name      [n] or [n, 1]          a cell each; [n, m] a list of m cells
    keys, values, fields [n, m]                 m features each
    offsets, with them   [n + 1], and [m]       instance i has the features offsets[i] to offsets[i + 1]
    line                 [n]                    a line of text each, where the model takes lines

The engine reads and writes the bodies (`shoal._core.RequestBodies`).

Threads: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal import _core
from shoal.data.columns import LIST, NUMERIC, VECTOR
from shoal.serve.bodies import ARROW, JSON, Answer, Read, encode, examples, is_arrow
from shoal.serve.limits import Account

if TYPE_CHECKING:
    from shoal.models.learner import Floats
    from shoal.serve.inputs import InputSpec
    from shoal.serve.served import Model

HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON before the raw data
_BYTES = "BYTES"


class Request(NamedTuple):
    """A prediction request whose body has arrived."""

    body: bytes | bytearray
    headers: Mapping[str, str]
    name: str  # of the model
    model: Model
    account: Account
    unknown: set[str]  # columns that the model does not know: they are added


Reader = Callable[[Request], Read]


def native(request: Request) -> Read:
    """Read a body of shoal's own forms, by its content type; the answer is of the accepted type, or of the same."""
    sent = request.headers.get("content-type", JSON)
    accept = request.headers.get("accept", "")
    accept = sent if accept in ("", "*/*") else accept
    if not is_arrow(sent) and ARROW not in accept:
        return _read(request, _core.ServingProtocol.SHOAL, content_type=sent)
    batch = examples(request.body, sent, request.model.inputs, request.account, request.unknown)
    return Read(batch, lambda version, predictions: Answer(*encode(version, predictions, accept), {}))


def tensorflow(request: Request) -> Read:
    """Read a body of TensorFlow Serving's predict API, by rows or by columns."""
    return _read(request, _core.ServingProtocol.TENSORFLOW)


def inference(request: Request) -> Read:
    """Read a body of the Open Inference Protocol's infer API."""
    return _read(request, _core.ServingProtocol.INFERENCE, json_bytes=request.headers.get(HEADER_LENGTH, ""))


def _read(request: Request, protocol: _core.ServingProtocol, **how: str) -> Read:
    requests = _core.RequestBodies()
    is_multiclass = request.model.predictor.is_multiclass
    batch = request.model.inputs.read(
        requests, protocol, request.body, request.account, request.unknown, is_multiclass=is_multiclass, **how
    )

    def write(version: int, predictions: Floats) -> Answer:
        rows = np.ascontiguousarray(predictions, np.float64)
        body, kind, json_bytes = requests.write(version, request.name, rows, is_multiclass)
        return Answer(body, kind, {HEADER_LENGTH: str(json_bytes)} if json_bytes else {})

    return Read(batch, write)


class _Described(NamedTuple):
    name: str
    datatype: str
    shape: list[int]


# ---- TensorFlow Serving ----------------------------------------------------------------------------------------------


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
