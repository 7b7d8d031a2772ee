"""Model directories: a description beside a checkpoint, replaced as one.

    DIR/
        model.json            {"crc32c": "<of body>", "body": {"format": "shoal model", "version": 1, ...}}
        checkpoint-000001/    a checkpoint of its tables (docs/checkpoint-format.md); model.json names it
        names-000001.json     names of its features, if they were saved; model.json names it too
        tower-000001.pt       dense parameters of a click model in PyTorch, its optimizer and its random numbers
        best-000003/          weights of the best pass of a fit that is not over; standing of model.json tells the pass

Invariants
    I1  model.json names a complete checkpoint, complete names and a complete tower at every moment. Saving writes the
        new ones beside the old ones, puts a new model.json in place by one rename, and then removes the old ones.
    I2  A directory that is not empty and has no model.json is never written to.

What a cut-off save leaves behind (what no model.json names) the next save removes.

Threads and processes: one writer at a time. A reader that finds its checkpoint gone because a save came between looks
once more.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from shoal import _core
from shoal.data import FeatureNames
from shoal.errors import CorruptionError
from shoal.models.history import History
from shoal.models.learner import Standing
from shoal.sealed import make_directory, read_sealed, write_atomically, write_sealed
from shoal.store import Store
from shoal.table import Table

MODEL_FILE = "model.json"
FORMAT = "shoal model"
VERSION = 1
LOGISTIC = "logistic regression"
FACTORIZATION = "factorization machine"
CLICK = "click model"
KINDS = (LOGISTIC, FACTORIZATION, CLICK)

_MAY_BE_MISSING = ("valid", "curves", "window_weight", "best_pass", "patience", "data", "batch_size", "grouped")

_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})")
_NAMES = re.compile(r"names-(\d{6,})\.json")
_TOWER = re.compile(r"tower-(\d{6,})\.pt")
_BEST = re.compile(r"best-(\d{6,})")
_LEFT_BEHIND = re.compile(
    rf"\.({re.escape(MODEL_FILE)}|{_NAMES.pattern}|{_TOWER.pattern})\.[0-9a-f]{{8}}\.tmp"
)  # by one that was killed


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is, apart from its weights."""

    format_name: str = msgspec.field(name="format", default=FORMAT)
    version: int = VERSION
    model: str = LOGISTIC
    checkpoint: str = ""
    names: str | None = None
    table: str
    more_tables: tuple[str, ...] = ()
    bias: bool
    optimizer: str
    params: dict[str, float]
    seed: int
    examples: int
    format: str | None = msgspec.field(name="reader_format")
    schema: dict[str, Any] = {}
    calibration: dict[str, Any] | None = None
    history: History
    tower: str | None = None
    tower_crc32c: str | None = None
    click: dict[str, Any] | None = None  # what a click model is made by
    standing: Standing | None = None  # of a fit that is not over


def is_model(directory: Path) -> bool:
    """Tell whether there is a model, whole or damaged."""
    return (directory / MODEL_FILE).is_file()


def check_target(directory: Path, *, overwrite: bool) -> None:
    """Say why a model may not be written to ``directory``; nothing is changed.

    Raises
    ------
    ValueError
        There is a model and ``overwrite`` is False, or something else.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file: a model is a directory, choose another name")
    if is_model(directory):
        if not overwrite:
            raise ValueError(
                f"{directory} holds a model already: pass overwrite=True (--overwrite), or choose another name"
            )
    elif any(not (_is_ours(p) or _LEFT_BEHIND.fullmatch(p.name)) for p in directory.iterdir()):
        raise ValueError(f"{directory} is neither empty nor a model: choose another name")


def _is_ours(path: Path) -> bool:
    """Tell whether this is something that model.json may name."""
    return any(pattern.fullmatch(path.name) for pattern in (_CHECKPOINT, _NAMES, _TOWER, _BEST))


def best_folder(pass_number: int) -> str:
    """Name the folder of the weights of a fit's best pass so far."""
    return f"best-{pass_number:06}"


def save(
    directory: Path,
    described: ModelFile,
    store: Store,
    tables: list[Table],
    *,
    overwrite: bool,
    names: FeatureNames | None = None,
    tower: bytes | None = None,
) -> Path:
    """Write a model; see `shoal.models.Model.save`. ``tower`` is a click model's dense part, as torch writes it."""
    check_target(directory, overwrite=overwrite)
    make_directory(directory)
    taken = [int(found[1]) for path in directory.iterdir() if (found := _CHECKPOINT.fullmatch(path.name))]
    number = f"{max(taken, default=0) + 1:06}"
    new = msgspec.structs.replace(
        described,
        checkpoint=f"checkpoint-{number}",
        names=None if names is None else f"names-{number}.json",
        tower=None if tower is None else f"tower-{number}.pt",
        tower_crc32c=None if tower is None else f"{_core.crc32c(tower):08x}",
    )
    try:
        store.save(directory / new.checkpoint, tables=[table.name for table in tables])
        if names is not None and new.names is not None:
            names.save(directory / new.names)
        if tower is not None and new.tower is not None:
            write_atomically(directory / new.tower, tower)
        write_sealed(directory / MODEL_FILE, msgspec.json.encode(new))
    finally:
        _remove_unnamed(directory)
    return directory


def _remove_unnamed(directory: Path) -> None:
    """Remove what model.json does not name; a model.json that cannot be read might name anything."""
    kept: tuple[str | None, ...] = ()
    if is_model(directory):
        try:
            described = read(directory)
        except CorruptionError:
            return
        best = described.standing.best_pass if described.standing is not None else 0
        kept = described.checkpoint, described.names, described.tower, best_folder(best) if best else None
    for path in directory.iterdir():
        if path.name in kept or not (_is_ours(path) or _LEFT_BEHIND.fullmatch(path.name)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read(directory: Path) -> ModelFile:
    """Read and check what a model is.

    Raises
    ------
    CorruptionError
        model.json is missing, changed, or of a version that this one does not know.
    """
    path = directory / MODEL_FILE
    body = read_sealed(path, missing="this is no model, or its first save was cut off")
    head: Any = msgspec.json.decode(body)
    if (
        not isinstance(head, dict)
        or (head.get("format"), head.get("version")) != (FORMAT, VERSION)
        or head.get("model") not in KINDS
    ):
        raise CorruptionError(f"{path} is no {' or '.join(KINDS)} of version {VERSION}: load it with a newer shoal")
    try:
        head["history"] = _nan_for_null(head["history"])
        described = msgspec.convert(head, ModelFile)
    except (KeyError, msgspec.MsgspecError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    if not _CHECKPOINT.fullmatch(described.checkpoint):
        raise CorruptionError(f"{path} names no checkpoint but {described.checkpoint!r}")
    if described.names is not None and not _NAMES.fullmatch(described.names):
        raise CorruptionError(f"{path} names no names of features but {described.names!r}")
    if described.tower is not None and not _TOWER.fullmatch(described.tower):
        raise CorruptionError(f"{path} names no tower but {described.tower!r}")
    return described


def for_export(directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tell what an export must know of a model to predict with its tables: a description, and files by name.

    Raises
    ------
    CorruptionError
        The model is damaged.
    """
    described = read(directory)
    told = {
        "kind": described.model,
        "table": described.table,
        "more_tables": list(described.more_tables),
        "bias": described.bias,
        "format": described.format,
        "schema": described.schema,
        "calibration": described.calibration,
        "examples": described.examples,
        "click": described.click,
    }
    return told, {} if described.tower is None else {"tower.pt": read_tower(directory, described)}


def read_tower(directory: Path, described: ModelFile) -> bytes:
    """Read the dense part of a click model.

    Raises
    ------
    CorruptionError
        It is missing or was changed.
    """
    if described.tower is None:
        raise CorruptionError(f"{directory / MODEL_FILE} names no tower")
    path = directory / described.tower
    try:
        tower = path.read_bytes()
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing: the model is not whole") from None
    if f"{_core.crc32c(tower):08x}" != described.tower_crc32c:
        raise CorruptionError(f"{path} is damaged: its checksum does not match")
    return tower


def load(directory: Path, store: Store) -> ModelFile:
    """Read a model's weights into ``store``, which has no table of its names yet, and return what it is.

    Raises
    ------
    CorruptionError
        A file is missing, cut short or changed. Nothing was loaded.
    ValueError
        The store has a table of one of the model's names.
    """
    described = read(directory)
    names = (described.table, *described.more_tables)
    for name in names:
        if name in store.tables:
            raise ValueError(
                f"the store has a table {name!r} already, which loading {directory} would overwrite: load into "
                f"another store"
            )
    try:
        store.load(directory / described.checkpoint)
    except CorruptionError:
        if read(directory).checkpoint == described.checkpoint:
            raise
        return load(directory, store)  # a save came between
    for name in names:
        if name not in store.tables:
            raise CorruptionError(f"{directory / described.checkpoint} has no table {name!r}")
    return described


def load_names(directory: str | os.PathLike[str]) -> FeatureNames | None:
    """Read the names of features that were saved with a model.

    Parameters
    ----------
    directory : path

    Returns
    -------
    FeatureNames or None
        None: the model was saved without.

    Raises
    ------
    CorruptionError
        A file is missing or was changed.
    """
    where = Path(directory)
    described = read(where)
    if described.names is None:
        return None
    try:
        return FeatureNames.load(where / described.names)
    except CorruptionError:
        if read(where).names == described.names:
            raise
        return load_names(where)  # a save came between


def _nan_for_null(value: Any, name: str = "") -> Any:
    """Undo what JSON does to NaN, but for what may be missing."""
    if isinstance(value, dict):
        return {key: _nan_for_null(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_nan_for_null(inner) for inner in value]
    return math.nan if value is None and name not in _MAY_BE_MISSING else value
