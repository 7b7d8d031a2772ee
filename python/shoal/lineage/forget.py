"""The model that training without some examples gives: the part of the fit from the first of them on, made again.

    kept checkpoints      |-------|-------|-------|-------|
    examples to forget                  x       x
    made again                    [=======================]   without them, from the checkpoint before the first

Threads: the caller's.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from shoal.base.plural import counted
from shoal.data import Batch, Reader
from shoal.data.files import files_of
from shoal.data.places import Spans, lines_in, places_of, spans_of
from shoal.lineage.past import Past
from shoal.models import files
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.tools.load import load

_PIECE = 1 << 22


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What was forgotten, from which data by which settings, and what a third party gets who does the same.

    Attributes
    ----------
    features : list of str
        Examples with any of them are left out, and keys that the fit had left out already.
    examples : list of str
        Lines whose examples are left out, as ``FILE:LINE`` or ``FILE:FIRST-LAST``, and ``FILE:1-`` of a whole file;
        with those that the fit had left out already. ``left-out.txt`` beside the certificate has them too.
    examples_left_out : int
        In each pass, of those that the fit had learned from.
    first : int
        Examples that the model had learned from before the first of them.
    made_again_from : int
        Examples of the kept checkpoint from which the fit was made again.
    examples_before, examples_after : int
        Examples that the model had learned from, and the one without these. A fit that was interrupted is made whole,
        as it is by the command of ``to_check``: then the second number may be the greater one.
    data : list of dict
        Each file's name, size in bytes and SHA-256.
    settings : str
        SHA-256 of the model's kind, its tables' settings, the format and schema of the data and the plan of the fit.
    rows_before, rows_after : dict
        By table, `shoal.Table.digest` of the model and of the one without these examples.
    to_check : str
        A command that trains the same model from the beginning, without these examples; the digests of its tables are
        ``rows_after``.
    """

    features: list[str]
    examples: list[str]
    examples_left_out: int
    first: int
    made_again_from: int
    examples_before: int
    examples_after: int
    data: list[dict[str, Any]]
    settings: str
    rows_before: dict[str, str]
    rows_after: dict[str, str]
    to_check: str


def forget(
    model: StoragePath,
    features: Sequence[str],
    output: StoragePath,
    *,
    examples: Sequence[str] = (),
    overwrite: bool = False,
) -> Certificate:
    """Write the model that training without some examples gives, and a certificate of it.

    Parameters
    ----------
    model : path
        A model whose fit kept its checkpoints.
    features : sequence of str
        Examples with any of them are left out: ``["user=u17"]``; empty: what ``examples`` names.
    output : path
        The directory of the new model, which also keeps its checkpoints, and has ``certificate.json``.
    examples : sequence of str
        Places of others that are left out, as `shoal.data.Reader.without` takes them: ``"day_1.csv:7"``, as
        `explain` names the file and the line, or ``"day_1.csv"``, a whole file or a pattern of names.
    overwrite : bool
        Whether to replace a model that is there.

    Returns
    -------
    Certificate

    Raises
    ------
    ValueError
        The model has no kept checkpoints, its data has changed, no example has any of the features, a line that is
        named is none or holds no example, or ``output`` is the model itself or holds anything but a model.

    Notes
    -----
    Blocks for a pass over the data and the share of the fit that is made again. The bits of the new model are those of
    a fit of the same data by a reader `shoal.data.Reader.without` these features and examples, from its beginning on.
    """
    past, place = Past(model), open_dir(output)
    if place.is_same(past.directory):
        raise ValueError(
            f"{place} is the model itself: choose another directory, and replace the model when it is good"
        )
    files.check_target(place, overwrite=overwrite)
    if not (features or examples):
        raise ValueError("nothing is named: pass a list of features such as 'user=u17', or of places of examples")
    keys = past.keys(features) if features else {}
    lines = spans_of(examples, past.data.paths)
    _check_lines(past, lines)
    data = past.data.without(keys.values(), examples=places_of(lines))
    first, count = _first(past, data)
    if first is None:
        named = " or ".join([*map(repr, features), *(f"is of {one!r}" for one in examples)])
        raise ValueError(f"no example of {past.data.path} has {named}: nothing is forgotten")
    begin = past.checkpoint_before(first)
    files.drop_kept(place)
    with past.made_again(past.kept[begin], data=data, to=place, keep=True) as made:
        after, settings = {table.name: table.digest() for table in made.tables}, _settings(past, made)
        examples_after = made.examples
    for learned, one in past.kept.items():
        if learned <= begin:
            files.copy(one, place.child(f"kept-{learned:012}"))
    with load(past.directory) as before:
        rows = {table.name: table.digest() for table in before.tables}
    left_out = data.fingerprint()
    names = [*features, *(str(key) for key in left_out.get("without", ()) if key not in keys.values())]
    places = places_of(left_out.get("without_lines", {}))
    certificate = Certificate(
        features=names,
        examples=places,
        examples_left_out=count,
        first=first,
        made_again_from=begin,
        examples_before=past.described.examples,
        examples_after=examples_after,
        data=[_digest(past.data, number) for number in range(len(past.data.paths))],
        settings=settings,
        rows_before=rows,
        rows_after=after,
        to_check=_command(past, names, place.address(files.LEFT_OUT_FILE) if places else None),
    )
    _publish(place, files.LEFT_OUT_FILE, "".join(f"{one}\n" for one in places).encode("utf-8", "surrogateescape"))
    _publish(place, files.CERTIFICATE_FILE, msgspec.json.format(msgspec.json.encode(certificate), indent=2))
    return certificate


def _publish(place: StorageDir, name: str, text: bytes) -> None:
    place.publish(name, text, before=place.version(name))


def _check_lines(past: Past, lines: Mapping[str, Spans]) -> None:
    """Check that each line that is named holds an example of the data of the fit."""
    for number, name in enumerate(past.data.paths):
        if name not in lines or (named := lines_in(lines[name])) is None:
            continue
        of_file = past.file(number)
        others = of_file.without(examples=places_of({name: lines[name]}))
        missing = named - sum(map(len, of_file)) + sum(map(len, others))
        if missing:
            raise ValueError(
                f"{name}: of {counted(named, 'line')} that {'is' if named == 1 else 'are'} named, {missing:,} hold no "
                "example that the fit has learned from: a header, empty or malformed lines, those left out before, or "
                "lines behind the end"
            )


def _first(past: Past, data: Reader) -> tuple[int | None, int]:
    """Find how many examples were learned from before the first batch that would differ; and count what is left out."""
    count = sum(len(batch) - len(other) for batch, other in zip(past.data, data, strict=True))
    if not count:
        return None, 0
    others = past.clocks(data)
    with closing(others):
        for place, batches in past.clocks():
            _, without = next(others, (None, []))
            if len(batches) != len(without) or not all(map(_is_same, batches, without)):
                return place.begin, count
    return past.described.examples, count  # all are behind the last example that was learned from


def _is_same(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same examples, which one lacks only if it has fewer, or weighs them otherwise."""
    return (
        np.array_equal(one.indptr, other.indptr)
        and np.array_equal(one.keys, other.keys)
        and np.array_equal(one.labels, other.labels)
        and (one.weights is None) == (other.weights is None)
        and (one.weights is None or other.weights is None or np.array_equal(one.weights, other.weights))
    )


def _digest(data: Reader, number: int) -> dict[str, Any]:
    """Describe a file by its whole contents."""
    name, digest, size = data.paths[number], hashlib.sha256(), 0
    with files_of(name)[0].open() as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return {"name": name, "bytes": size, "sha256": digest.hexdigest()}


def _settings(past: Past, made: Any) -> str:
    """Digest all that the rows depend on besides the data."""
    described = past.described
    known = (
        described.model,
        [(table.name, table.dim, str(table.spec)) for table in made.tables],
        described.format,
        described.schema,
        described.click,
        past.fit.plan,
        past.fit.batch_size,
    )
    return hashlib.sha256(msgspec.json.encode(known, enc_hook=str)).hexdigest()


def _command(past: Past, features: Sequence[str], lines: str | None) -> str:
    """Return what trains the same model from its beginning; ``lines``: the address of a file of places."""
    if past.directory.version(files.CONFIG_FILE) is None:
        what = ", ".join([*features, *([] if lines is None else [f"the examples of {lines}"])])
        return f"fit the same model to a reader.without(...) of {what}, and compare Table.digest()"
    kind = {files.CLICK: "ctr", files.FACTORIZATION: "fm"}.get(past.described.model, "lr")
    config = past.directory.address(files.CONFIG_FILE)
    left_out = [word for feature in features for word in ("--without", feature)]
    left_out += [] if lines is None else ["--without-examples", lines]
    command = ["shoal", "train", kind, "--config", config, *left_out, "--output", "CHECK"]
    if past.fit.consistency:  # of a cluster, whose address means nothing now
        command = ["shoal", "launch", "--workers", str(past.workers), "--", *command, "--cluster"]
    return shlex.join(command)
