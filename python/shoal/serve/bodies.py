"""The bodies of requests and answers: JSON, lines of text and Arrow."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from shoal import _core
from shoal.data import Batch
from shoal.serve.inputs import InputSpec
from shoal.serve.ipc import decode_arrow
from shoal.serve.limits import Account, RequestError

if TYPE_CHECKING:
    from shoal.models.learner import Floats

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"


def examples(
    body: bytes | bytearray, content_type: str, spec: InputSpec, account: Account, unknown: set[str] | None = None
) -> Batch:
    """Make a batch of the body of a request."""
    unknown = set() if unknown is None else unknown
    if is_arrow(content_type):
        try:
            return decode_arrow(body, spec, account, unknown)
        except RequestError:
            raise
        except (ValueError, TypeError, OverflowError, OSError) as error:  # the message of a reader
            raise RequestError(str(error)) from None
    return spec.read(
        _core.RequestBodies(), _core.ServingProtocol.SHOAL, body, account, unknown, content_type=content_type
    )


def is_arrow(content_type: str) -> bool:
    """Return whether a body is an Arrow stream."""
    return content_type.partition(";")[0].strip().lower() == ARROW


class Answer(NamedTuple):
    """The body of an answer, its content type, and headers."""

    data: bytes
    kind: str
    headers: dict[str, str]


class Read(NamedTuple):
    """The batch of a request, and what writes the answer from the version and its predictions."""

    batch: Batch
    write: Callable[[int, Floats], Answer]


def check_usable(probabilities: Floats) -> None:
    """Raise RequestError if an instance has no probability."""
    usable = np.isfinite(probabilities).reshape(len(probabilities), -1).all(axis=1)
    if len(bad := np.flatnonzero(~usable)):
        raise RequestError(f"instance {bad[0]}: the model has no probability for it, its values are too large")


def encode(version: int, probabilities: Floats, accept: str) -> tuple[bytes, str]:
    """Write predictions: the body, and its content type; those of several classes are a list for each instance."""
    if ARROW in accept:
        from shoal.data.record_batch import pyarrow

        arrow = pyarrow()
        column = probabilities
        if probabilities.ndim == 2:
            column = arrow.FixedSizeListArray.from_arrays(probabilities.reshape(-1), probabilities.shape[1])
        table = arrow.table({"probability": column}).replace_schema_metadata({"version": str(version)})
        sink = io.BytesIO()
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue(), ARROW
    return msgspec.json.encode({"version": version, "probabilities": probabilities.tolist()}), JSON
