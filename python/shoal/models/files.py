"""Model directories: a description and a checkpoint, replaced atomically.

    DIR/
        model.json              {"crc32c": "<of body>", "body": {"format": "shoal model", "version": 1, ...}}
        checkpoint-1f0c9a3e/    a checkpoint of its tables (docs/checkpoint-format.md); model.json names it
        names-1f0c9a3e.names    names of its features, if they were saved; model.json names it too
        tower-1f0c9a3e.pt       dense parameters of a click model in PyTorch, its optimizer and its random numbers
        kept-000000080000/      a model: this one after 80,000 examples, whose fit keeps its checkpoints
        best-000003/            weights of the best pass of a fit that is not over; `standing` of model.json names the
                                pass

A directory is a `StorageDir`, of this machine or of an object store.

Invariants
    I1  model.json names a complete checkpoint, complete names and a complete tower at every moment. Saving writes the
        new ones next to the old ones, under names of its own (eight random digits), publishes a new model.json, and
        then removes the old ones (`shoal.storage.transaction.ManifestTransaction`).
    I2  A directory that is not empty and has no model.json is never written to.

The next save removes the files of a killed one, which model.json does not name.

Threads and processes: one writer at a time; of two concurrent saves one succeeds, and the other raises an error. A
reader whose checkpoint a save has removed meanwhile reads model.json again.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal import _core, checkpoint
from shoal.checkpoint.format import MANIFEST
from shoal.data import FeatureNames
from shoal.errors import CorruptionError, ShoalError
from shoal.models.history import History
from shoal.models.learner import FitState
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.checksummed_json import UNREADABLE, encode_checksummed
from shoal.storage.open import open_dir
from shoal.storage.sharing import share_files
from shoal.storage.transaction import ManifestTransaction, check_replaceable
from shoal.store.base import Store
from shoal.store.local import LocalStore, local
from shoal.table.table import Table

MODEL_FILE = "model.json"
CERTIFICATE_FILE = "certificate.json"  # of a model that was trained without some examples (shoal.lineage)
LEFT_OUT_FILE = "left-out.txt"  # the places of these examples, where they are lines and files
CONFIG_FILE = "config.toml"  # the configuration of the run that has saved the model
ONNX_TOWER = "tower.onnx"  # an extra of an export: the dense part of a click model as ONNX
EVENT_TIME = "event_time"  # in the description of an export: `Record.event_time`
FORMAT = "shoal model"
VERSION = 1
LOGISTIC = "logistic regression"
FACTORIZATION = "factorization machine"
MULTICLASS = "multiclass regression"
CLICK = "click model"
KINDS = (LOGISTIC, FACTORIZATION, MULTICLASS, CLICK)

_MAY_BE_MISSING = frozenset(
    (
        "valid",
        "curves",
        "window_weight",
        "best_pass",
        "patience",
        "data",
        "batch_size",
        "grouped",
        "source",
        "valid_source",
        "class_weight",
        "plateau",
        "accuracy",
    )
)

_CHECKPOINT = re.compile(r"checkpoint-[0-9a-f]{6,}")
_NAMES = re.compile(r"names-[0-9a-f]{6,}\.(names|json)")
_TOWER = re.compile(r"tower-[0-9a-f]{6,}\.pt")
_BEST = re.compile(r"best-\d{6,}")
_KEPT = re.compile(r"kept-(\d{12,})")
_LOOK = re.compile(r"check-[0-9a-f]{16}(-\d+)?-look\.slots")  # of a check of the storage that was killed
_EXTRAS = re.compile("|".join(map(re.escape, (CONFIG_FILE, CERTIFICATE_FILE, LEFT_OUT_FILE))))
_SLOTS = 1024  # of a store by default


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model: all but its weights."""

    format_name: str = msgspec.field(name="format", default=FORMAT)
    version: int = VERSION
    model: str = LOGISTIC
    checkpoint: str = ""
    names: str | None = None
    table: str
    more_tables: tuple[str, ...] = ()
    bias: bool
    normalized: bool = False
    optimizer: str
    params: dict[str, float]
    seed: int
    examples: int
    format: str | None = msgspec.field(name="reader_format")
    schema: dict[str, Any] = {}
    calibration: dict[str, Any] | None = None
    history: History
    classes: tuple[Any, ...] | None = None  # the labels of y that are 0, 1, ...
    columns: int | None = None  # of the array that the model has learned from
    tower: str | None = None
    tower_crc32c: str | None = None
    click: dict[str, Any] | None = None  # the settings that make a click model
    multiclass: dict[str, Any] | None = None  # `SavedModel.kind_settings`: classes and loss of several classes
    fit_state: FitState | None = msgspec.field(default=None, name="standing")  # of a fit that is not over


def is_model(where: StoragePath) -> bool:
    """Return whether there is a model, intact or damaged."""
    return open_dir(where).version(MODEL_FILE) is not None


def checkpoint_in(where: StoragePath) -> tuple[StorageDir, ModelFile | None]:
    """Find the checkpoint of a directory: the directory itself, or the one that its model names."""
    place = open_dir(where)
    if place.kind() != "directory":
        raise ValueError(f"{place}: there is no such directory")
    if not is_model(place) and place.version(MANIFEST) is not None:
        return place, None
    described = read(place)
    return place.child(described.checkpoint), described


def store_for(where: StoragePath, *, threads: int | None = None) -> LocalStore:
    """Make a local store with as many slots as the tables of a model or a checkpoint were saved from.

    Rules divide their limits among the slots, so a table that was created in few slots may not exist in many.
    """
    return local(threads=threads, slots=slots_of(where))


def slots_of(where: StoragePath) -> int:
    """Return the slots of the store that a model or a checkpoint was saved from."""
    try:
        return checkpoint.read_manifest(checkpoint_in(where)[0]).slots
    except (ShoalError, OSError, ValueError):  # loading says what is wrong
        return _SLOTS


def check_target(where: StoragePath, *, overwrite: bool) -> None:
    """Check that a model may be written to a directory; nothing is changed."""
    place = open_dir(where)
    if place.kind() == "file":
        raise ValueError(f"{place} is a file: a model is a directory, choose another name")
    check_replaceable(place, MODEL_FILE, "a model", _is_ours, overwrite=overwrite)


def make_target(where: StoragePath) -> None:
    """Make a directory for a model and check that files can be written there, before hours of training."""
    place = open_dir(where)
    place.make()
    look = f".{MODEL_FILE}.{secrets.token_hex(4)}.tmp"
    with place.create(look, durable=False) as file:
        file.write(b"look")
    place.remove(look)


def _is_ours(name: str) -> bool:
    """Return whether model.json may contain this name."""
    return any(pattern.fullmatch(name) for pattern in (_CHECKPOINT, _NAMES, _TOWER, _BEST, _KEPT, _LOOK, _EXTRAS))


def best_folder(pass_number: int) -> str:
    """Return the name of the folder for the weights of a fit's best pass so far."""
    return f"best-{pass_number:06}"


def save(
    where: StoragePath,
    described: ModelFile,
    store: Store,
    tables: list[Table],
    *,
    overwrite: bool,
    names: FeatureNames | None = None,
    tower: bytes | None = None,
) -> None:
    """Write a model; see `shoal.models.Model.save`. ``tower`` is a click model's dense part, as torch writes it."""
    place = open_dir(where)
    check_target(place, overwrite=overwrite)
    best = described.fit_state.best.number if described.fit_state is not None else 0
    kept = best_folder(best) if best else None
    with ManifestTransaction(
        place,
        MODEL_FILE,
        lambda name: _is_ours(name) and name != kept and not _KEPT.fullmatch(name),
        with_subdirectories=True,
    ) as new:
        named = msgspec.structs.replace(
            described,
            checkpoint=f"checkpoint-{new.stem}",
            names=None if names is None else f"names-{new.stem}.names",
            tower=None if tower is None else f"tower-{new.stem}.pt",
            tower_crc32c=None if tower is None else f"{_core.crc32c(tower):08x}",
        )
        rows = [] if described.fit_state is None else [described.fit_state.table]
        store.save(place.child(named.checkpoint), tables=[*(table.name for table in tables), *rows])
        if names is not None and named.names is not None:
            _write(place, named.names, *names.to_parts())
        if tower is not None and named.tower is not None:
            _write(place, named.tower, tower)
        new.publish(msgspec.json.encode(named))


def _write(place: StorageDir, name: str, *parts: bytes | memoryview) -> None:
    with place.create(name) as file:
        for part in parts:
            file.write(part)


# ---- kept checkpoints ------------------------------------------------------------------------------------------------


def keep(where: StoragePath) -> None:
    """Keep a model as it is now: as one of its own, in a folder that is named by its examples."""
    place = open_dir(where)
    copy(place, place.child(f"kept-{read(place).examples:012}"))


def kept(where: StoragePath) -> dict[int, StorageDir]:
    """Find the kept checkpoints of a model, by the examples they have learned from, the fewest first."""
    place = open_dir(where)
    found = (_KEPT.fullmatch(name) for name in place.subdirectories_with(MODEL_FILE))
    return {examples: place.child(f"kept-{examples:012}") for examples in sorted(int(one[1]) for one in found if one)}


def drop_kept(where: StoragePath) -> None:
    """Remove the kept checkpoints of a model, also those that are not complete."""
    place = open_dir(where)
    for name in place.subdirectories():
        if _KEPT.fullmatch(name):
            place.child(name).clear()


def copy(where: StoragePath, to: StoragePath) -> None:
    """Copy a model into another directory, which is a model once all is there; on one disk files are shared."""
    place, target = open_dir(where), open_dir(to)
    described = read(place)
    target.clear()
    share_files(place.child(described.checkpoint), target.child(described.checkpoint))
    share_files(place, target, [name for name in (described.names, described.tower, CONFIG_FILE) if name is not None])
    if described.fit_state is not None and described.fit_state.best.number:
        best = best_folder(described.fit_state.best.number)
        share_files(place.child(best), target.child(best))
    target.publish(MODEL_FILE, place.read(MODEL_FILE), before=None)


@contextlib.contextmanager
def copied_from(where: StorageDir, copy: StorageDir) -> Iterator[None]:
    """Name a model in errors about files of its copy."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(str(error).replace(str(copy), str(where))) from None


def rewrite(where: StoragePath, described: ModelFile) -> None:
    """Replace the description of a model, which keeps its files."""
    place = open_dir(where)
    body = encode_checksummed(msgspec.json.encode(described))
    place.publish(MODEL_FILE, body, before=place.version(MODEL_FILE))


def read(where: StoragePath) -> ModelFile:
    """Read and check the description of a model."""
    place = open_dir(where)
    path = place.address(MODEL_FILE)
    missing = "the directory is not a model, or its first save was interrupted"
    if place.version(MANIFEST) is not None and place.version(MODEL_FILE) is None:
        missing = "the directory is a checkpoint or an export, not a model"
    body = place.read_checksummed(MODEL_FILE, missing=missing, what="model")
    try:
        head: Any = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    if (
        not isinstance(head, dict)
        or (head.get("format"), head.get("version")) != (FORMAT, VERSION)
        or head.get("model") not in KINDS
    ):
        raise CorruptionError(f"{path} is not a {' or '.join(KINDS)} of version {VERSION}: load it with a newer shoal")
    try:
        # Of several classes an accuracy of null is that of no examples.
        may_be_missing = _MAY_BE_MISSING - {"accuracy"} if head["model"] == MULTICLASS else _MAY_BE_MISSING
        head["history"] = _nan_for_null(head["history"], may_be_missing)
        described = msgspec.convert(head, ModelFile)
    except (KeyError, msgspec.MsgspecError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from None
    if not _CHECKPOINT.fullmatch(described.checkpoint):
        raise CorruptionError(f"{path} names {described.checkpoint!r}, which is not a checkpoint of a model")
    if described.names is not None and not _NAMES.fullmatch(described.names):
        raise CorruptionError(f"{path} names {described.names!r}, which is not a file of feature names")
    if described.tower is not None and not _TOWER.fullmatch(described.tower):
        raise CorruptionError(f"{path} names {described.tower!r}, which is not a file of a tower")
    return described


def describe(described: ModelFile) -> dict[str, Any]:
    """Return the description of a model in an export, as JSON: what predicts from its tables needs to know."""
    return {
        "kind": described.model,
        "table": described.table,
        "more_tables": list(described.more_tables),
        "bias": described.bias,
        "normalized": described.normalized,
        "format": described.format,
        "schema": described.schema,
        "calibration": described.calibration,
        "examples": described.examples,
        "click": described.click,
        **({} if described.multiclass is None else {"multiclass": described.multiclass}),
    }


def for_export(where: StoragePath, described: ModelFile) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the parts of an export that predict with a model's tables: a description, and files by name."""
    return describe(described), {} if described.tower is None else {"tower.pt": read_tower(where, described)}


def read_tower(where: StoragePath, described: ModelFile) -> bytes:
    """Read the dense part of a click model."""
    place = open_dir(where)
    if described.tower is None:
        raise CorruptionError(f"{place.address(MODEL_FILE)} does not name a tower")
    path = place.address(described.tower)
    try:
        tower = place.read(described.tower)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing: the model is incomplete") from None
    if f"{_core.crc32c(tower):08x}" != described.tower_crc32c:
        raise CorruptionError(f"{path} is damaged: its checksum does not match")
    return tower


def load(where: StoragePath, store: Store) -> ModelFile:
    """Read a model's weights into ``store``, which has no table of its names yet, and return its description."""
    if not isinstance(store, Store):
        raise TypeError(f"store is a {type(store).__name__}: pass a store, such as shoal.local(), or None")
    place = open_dir(where)
    described = read(place)
    names = (described.table, *described.more_tables)
    for name in names:
        if name in store.tables:
            raise ValueError(
                f"the store has a table {name!r} already, which loading {place} would overwrite: load into "
                f"another store"
            )
    try:
        store.load(place.child(described.checkpoint))
    except (CorruptionError, FileNotFoundError) as error:
        if read(place).checkpoint == described.checkpoint:
            if isinstance(error, FileNotFoundError):
                raise CorruptionError(f"{error.filename} is missing: the model is incomplete") from None
            raise
        return load(place, store)  # a save came between
    for name in names:
        if name not in store.tables:
            raise CorruptionError(f"{place.address(described.checkpoint)} has no table {name!r}")
    return described


def load_names(directory: StoragePath, *, storage_options: Mapping[str, Any] | None = None) -> FeatureNames | None:
    """Read the names of features that were saved with a model.

    Parameters
    ----------
    directory : path or URL
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Returns
    -------
    FeatureNames or None
        None: the model was saved without names.

    Raises
    ------
    CorruptionError
        A file is missing or was changed.
    """
    place = open_dir(directory, storage_options)
    described = read(place)
    if described.names is None:
        return None
    try:
        raw = place.read(described.names)
    except FileNotFoundError:
        if read(place).names != described.names:
            return load_names(place)  # a save came between
        raise CorruptionError(f"{place.address(described.names)} is missing: there are no names") from None
    return FeatureNames.from_bytes(raw, place.address(described.names))


def _nan_for_null(value: Any, may_be_missing: frozenset[str], name: str = "") -> Any:
    """Restore NaN, which JSON has as null, except in fields that may be missing."""
    if isinstance(value, dict):
        return {key: _nan_for_null(inner, may_be_missing, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_nan_for_null(inner, may_be_missing) for inner in value]
    return math.nan if value is None and name not in may_be_missing else value
