"""The data of a fit: checks before it begins, names and descriptions for records and messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.data import Batch, Reader, hash_strings
from shoal.data.interactions import field_of
from shoal.data.stream import is_divided, is_endless
from shoal.errors import ShoalError
from shoal.models.learner import Evaluable


def fingerprint(data: object) -> dict[str, Any] | None:
    """Describe the data of a reader; None of anything else."""
    return data.fingerprint() if isinstance(data, Reader) else None


def identity(data: object) -> str:
    """Return a text that is equal for readers of the same examples; empty if that cannot be told."""
    try:
        known = fingerprint(data)
    except (OSError, ShoalError):  # which reading will raise
        return ""
    if known is None or not all("head" in file for file in known["files"]):
        return ""
    return hashlib.blake2b(msgspec.json.encode(known), digest_size=16).hexdigest()


def path_of(data: object) -> str | None:
    """Name the files of a reader; None of anything else."""
    path = getattr(data, "path", None)
    return None if path is None else os.fspath(path)


def feature_name(reader: object, key: int) -> str:
    """Return the best name that a reader has for a feature: a collected name, a column of numbers, or the key."""
    names = getattr(reader, "names", None) or {}
    if key in names:
        return str(names[key])
    schema = getattr(reader, "schema", {})
    for column in (*schema.get("numeric", ()), *schema.get("vectors", ())):
        if int(hash_strings([""], field_of(column))[0]) == key:
            return repr(column)
    return str(key)


def why_empty(data: object) -> str:
    """Explain why data had no examples."""
    return data.why_empty() if isinstance(data, Reader) else "the data has no examples"


def check_stream(data: object) -> None:
    """Raise ValueError if a pass over a stream, with a certain text as label 1, has found no positives."""
    if isinstance(data, Reader) and not data.repeatable and (positive := data.schema.get("positive")) is not None:
        raise ValueError(f"no label of {data.path} is {positive!r}, which positive (--positive) names")


def check_valid(model: Evaluable, valid: Iterable[Batch]) -> None:
    """Check, before hours of training, that the data has the examples and groups that validation needs.

    One batch is read, or those up to the first one with a group; data that can be read only once is not touched.
    """
    if not (isinstance(valid, Sequence) or (isinstance(valid, Reader) and valid.repeatable)):
        return
    examples = 0
    groups: npt.NDArray[np.uint64] | None = None
    for batch in valid:
        examples += len(batch)
        groups = model.groups(batch)
        if len(batch) and (groups is None or model.has_groups(groups)):
            return
    if examples == 0:
        raise ValueError(f"valid: {why_empty(valid)}, so nothing can be measured")
    if groups is not None:
        model.check_groups(groups)


def check_endless(data: object, valid: object, *, shuffles: bool) -> None:
    """Raise ValueError for what a stream that is read in parts cannot be used for."""
    if shuffles and is_divided(data):
        raise ValueError(f"{path_of(data)} is learned from as it arrives: leave out shuffle")
    if is_endless(valid):
        raise ValueError(f"valid is {path_of(valid)}, which never ends: pass examples that do")


def check_iterable(data: object, what: str, passes: int) -> None:
    """Raise an error that names the remedy if ``data`` cannot be iterated ``passes`` times as batches."""
    if isinstance(data, str | os.PathLike):
        raise TypeError(f"{what} is a path: pass a reader of it, such as shoal.read_libsvm({os.fspath(data)!r})")
    if isinstance(data, Batch):
        raise TypeError(f"{what} is a Batch: pass a reader or a list of batches, or call partial_fit(batch)")
    if not isinstance(data, Iterable):
        raise TypeError(f"{what} is a {type(data).__name__}: pass a reader or another iterable of shoal.Batch")
    if passes > 1 and isinstance(data, Reader) and not data.repeatable:
        raise ValueError(
            f"{what} is {data.path}, a stream, which is read once, and there are to be {passes} passes: write the data "
            "to a file, or make one pass"
        )
    if passes > 1 and iter(data) is data:
        raise ValueError(
            f"{what} is an iterator and ends after one pass of {passes}: pass a reader or a list of batches"
        )
