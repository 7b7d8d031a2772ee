"""The messages of the Open Inference Protocol over gRPC, as requests of the same protocol over HTTP and back.

    a tensor   its elements, in `contents` or `raw_input_contents`, follow the JSON of a body as binary data
    a call     becomes the path and the body of a request, which the routes of `shoal.serve.app` answer

So both have one decoder, one set of limits and the same errors.

The messages are made when the module is loaded, in a pool of descriptors of their own: they need no code that is
generated for a version of protobuf, and stand beside those of a client in the same process. They differ from the
specification in a way that bytes do not show: inputs and outputs of a request are bytes, which are parsed once they are
counted, and parameters are not declared, since none changes an answer.

Threads: pure functions.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from shoal.serve.app import Handler, Request, Response
from shoal.serve.inputs import MOST_COLUMNS
from shoal.serve.limits import Account, RequestError, TooLargeError
from shoal.serve.protocols import HEADER_LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE = "inference.GRPCInferenceService"

# A field each: name, type, number, and a star if it is repeated.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live bool 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready bool 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name string 1, version string 2, extensions string 3 *",
    "ModelReadyRequest": "name string 1, version string 2",
    "ModelReadyResponse": "ready bool 1",
    "ModelMetadataRequest": "name string 1, version string 2",
    "ModelMetadataResponse": "name string 1, versions string 2 *, platform string 3, inputs Described 4 *, "
    "outputs Described 5 *",
    "Described": "name string 1, datatype string 2, shape int64 3 *",
    "ModelInferRequest": "model_name string 1, model_version string 2, id string 3, inputs bytes 5 *, "
    "outputs bytes 6 *, raw_input_contents bytes 7 *",
    "Requested": "name string 1",
    "Tensor": "name string 1, datatype string 2, shape int64 3 *, contents Contents 5",
    "Contents": "bool_contents bool 1 *, int_contents int32 2 *, int64_contents int64 3 *, uint_contents uint32 4 *, "
    "uint64_contents uint64 5 *, fp32_contents float 6 *, fp64_contents double 7 *, bytes_contents bytes 8 *",
    "ModelInferResponse": "model_name string 1, model_version string 2, id string 3, outputs Tensor 5 *, "
    "raw_output_contents bytes 6 *",
}

# Where the elements of a datatype are, and their type as raw data; those of the first one have lengths.
_ELEMENTS = {
    "BYTES": ("bytes_contents", ""),
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "<i1"),
    "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP16": ("raw_input_contents", ""),  # there is no other place
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
}

# What is asked by GET, and its path.
_READS = {
    "ServerLive": "/v2/health/live",
    "ServerReady": "/v2/health/ready",
    "ServerMetadata": "/v2",
    "ModelReady": "/v2/models/{0.name}{version}/ready",
    "ModelMetadata": "/v2/models/{0.name}{version}",
}
INFER = "ModelInfer"
METHODS = (*_READS, INFER)

_PARSED_BYTES = 16  # for a byte of a message, at most: an empty field takes two, and 16 of the parser's, twice
_MOST_DIMENSIONS = 8


def _make_messages() -> dict[str, Any]:
    """Make a class for each message."""
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package="inference", syntax="proto3")
    one = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            called, kind, number, *star = field.split()
            label = one.LABEL_REPEATED if star else one.LABEL_OPTIONAL
            made = message.field.add(name=called, number=int(number), label=label)
            if kind in _MESSAGES:
                made.type, made.type_name = one.TYPE_MESSAGE, f".inference.{kind}"
            else:
                made.type = one.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES
    }


MESSAGES = _make_messages()


def answer(handler: Handler, method: str, message: bytes, headers: Mapping[str, str]) -> bytes:
    """Answer a call of the service: the reply's message.

    Raises
    ------
    RequestError
        There is an error instead, whose ``status`` is that of HTTP.
    """
    with Account(handler.budget) as account:
        try:
            if method == INFER:
                return _infer(handler, message, headers, account)
            asked = MESSAGES[f"{method}Request"].FromString(message)
        except DecodeError:
            raise RequestError(f"not a {method}Request of the Open Inference Protocol") from None
        path = _READS[method].format(asked, version=_version(getattr(asked, "version", "")))
        response = handler.answer(Request("GET", path, {}, b"", account))
        if method == "ModelReady":
            found: dict[str, Any] = {"ready": response.status == 200}
        else:
            found = msgspec.json.decode(_checked(response).body)
        reply: bytes = MESSAGES[f"{method}Response"](**found).SerializeToString()
        return reply


def _version(number: str) -> str:
    return f"/versions/{number}" if number else ""


def _checked(response: Response) -> Response:
    """Return a response that is not an error."""
    if response.status != 200:
        error = RequestError(msgspec.json.decode(response.body)["error"])
        error.status = response.status
        raise error
    return response


def _infer(handler: Handler, message: bytes, headers: Mapping[str, str], account: Account) -> bytes:
    with Account(handler.budget) as parsing:
        parsing.decoded(min(parsing.left, _PARSED_BYTES * len(message)))
        request = MESSAGES["ModelInferRequest"].FromString(message)
        is_raw = len(request.raw_input_contents) > 0
        body, size = _body(request, account)
    path = f"/v2/models/{request.model_name}{_version(request.model_version)}/infer"
    del request
    headers = {**headers, HEADER_LENGTH: str(size)}
    response = _checked(handler.answer(Request("POST", path, headers, body, account)))
    size = int(response.headers[HEADER_LENGTH])
    found = msgspec.json.decode(response.body[:size])
    for output in found["outputs"]:
        del output["parameters"]
    reply = MESSAGES["ModelInferResponse"](**found)
    raw = response.body[size:]
    if is_raw:
        reply.raw_output_contents.append(raw)
    else:
        reply.outputs[0].contents.fp64_contents.extend(np.frombuffer(raw, "<f8").tolist())
    written: bytes = reply.SerializeToString()
    return written


def _body(request: Any, account: Account) -> tuple[bytes, int]:
    """Return the body of the same request over HTTP, and the bytes of its JSON."""
    for what, tensors in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(tensors) > MOST_COLUMNS:
            raise TooLargeError(f"{len(tensors)} {what}: at most {MOST_COLUMNS} are accepted")
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise RequestError(f"{len(request.inputs)} inputs, and {len(raws)} raw_input_contents: send one for each")
    inputs, parts = [], []
    for i, data in enumerate(request.inputs):
        tensor = MESSAGES["Tensor"].FromString(data)
        if len(tensor.shape) > _MOST_DIMENSIONS:
            raise RequestError(f"input {tensor.name!r:.80} has {len(tensor.shape)} dimensions: at most 8 are accepted")
        parts.append(_elements(tensor, raws[i] if raws else None, account))
        inputs.append(
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(parts[-1])},
            }
        )
    outputs = [MESSAGES["Requested"].FromString(data).name for data in request.outputs]
    head = msgspec.json.encode(
        {
            "id": request.id,
            "inputs": inputs,
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            "parameters": {"binary_data_output": True},
        }
    )
    account.body(len(head))
    return b"".join([head, *parts]), len(head)


def _elements(tensor: Any, raw: bytes | None, account: Account) -> bytes:
    """Return the elements of an input as raw data, once they are counted."""
    there = [field.name for field, _ in tensor.contents.ListFields()]
    field, dtype = ("raw_input_contents", "") if raw is not None else _ELEMENTS.get(tensor.datatype, ("", ""))
    if field and there not in ([], [field]):
        what = f"input {tensor.name!r:.80} is of {tensor.datatype:.80}"
        raise RequestError(f"{what} and has {', '.join(there)}: send {field}, and nothing else")
    if raw is not None:
        account.body(len(raw))
        return raw
    values = getattr(tensor.contents, there[0]) if there and field else []
    if field == "bytes_contents":
        account.body(4 * len(values) + sum(map(len, values)))
        data = bytearray()
        for text in values:
            data += struct.pack("<I", len(text))
            data += text
        return bytes(data)
    account.body(np.dtype(dtype or "?").itemsize * len(values))
    try:
        return np.fromiter(values, dtype or "?", len(values)).tobytes()
    except OverflowError:
        raise RequestError(f"input {tensor.name!r:.80} has a number that is not of {tensor.datatype}") from None
