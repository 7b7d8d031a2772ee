"""The configuration of `shoal train ctr`: a TOML file, every key of which is checked, and the model it describes.

    [data]     the data, and the fields that the model uses
    [model]    the architecture, and its sizes
    [tables]   optimizer, initial rows and dtype of the tables; [tables.NAME] of one of them
    [train]    batches, passes, dense optimizer, early stopping
    [logging]  TensorBoard, MLflow (shoal.tracking)
    [output]   directory of the model and its checkpoints

Every section is a struct below, every key a member with its description: docs/ctr.md lists them, as a test checks.
An unknown key is an error that names the nearest known one.

Threads: configurations are immutable; `build` belongs to the caller's thread, whose torch generator it draws from.
"""

from __future__ import annotations

import functools
import inspect
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import torch
from msgspec import Meta, Struct
from torch import nn

from shoal import lifecycle, optim, schedules
from shoal.base.machine import local_path
from shoal.base.suggest import nearest
from shoal.lifecycle import Admission, Expiry
from shoal.models import files
from shoal.models.plan import EarlyStopping
from shoal.optim import Init, Normal, Optimizer
from shoal.schedules import Schedule
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.torch.click_model import ClickModel, Precision
from shoal.torch.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer, with_defaults
from shoal.torch.dense_part import DenseSharing
from shoal.torch.fields import Fields, to_json
from shoal.torch.models import MODELS
from shoal.torch.other_columns import with_other_columns
from shoal.torch.tables import TableRule, tables
from shoal.torch.tower import check_module, described_by

Spec = dict[str, Any]  # {"name": "Adagrad", "lr": 0.02}
_COLUMNS = ("csv", "tsv", "parquet")
_OF_DATA = ("make", "fields", "item", "dense")  # parameters of models that follow from [data]


class Data(Struct, frozen=True, kw_only=True):
    """The data, and the fields that the model uses."""

    train: Annotated[list[str], Meta(description="File, pattern or URL of the training data, or a list of them.")]
    format: Annotated[
        Literal["libffm", "vw", "criteo", "csv", "tsv", "parquet"], Meta(description="Format of all files.")
    ]
    valid: Annotated[list[str], Meta(description="Held-out file or files, evaluated after every pass.")] = []
    label: Annotated[str | None, Meta(description="Column of labels (csv, tsv, parquet).")] = None
    categorical: Annotated[list[str], Meta(description="Categorical columns (csv, tsv, parquet).")] = []
    ignore: Annotated[list[str], Meta(description="Columns that are not categorical by default.")] = []
    numeric: Annotated[list[str], Meta(description="Numeric columns (csv, tsv, parquet).")] = []
    weight: Annotated[str | None, Meta(description="Column of the weights of examples.")] = None
    positive: Annotated[str | None, Meta(description="Text of the positive label. Default: labels are numbers.")] = None
    columns: Annotated[list[str], Meta(description="Names of the columns of csv and tsv files without a header.")] = []
    na_values: Annotated[list[str], Meta(description="Additional texts that mark a missing cell.")] = []
    fields: Annotated[
        list[str],
        Meta(
            description="Fields of the model, in order. Default: all categorical and numeric columns that are not "
            "dense, or the 39 columns of criteo."
        ),
    ] = []
    dense: Annotated[list[str], Meta(description="Numeric columns that are inputs of the dense part.")] = []
    log: Annotated[bool, Meta(description="Transform dense columns to sign(x) ln(1 + |x|).")] = False
    history: Annotated[str | None, Meta(description="Column of lists of items, for din.")] = None
    item: Annotated[str | None, Meta(description="Field whose rows the items of the history share.")] = None
    list_separator: Annotated[str, Meta(description="Separator of the items of a history in csv and tsv.")] = "|"
    group: Annotated[str | None, Meta(description="Field that groups examples for GAUC, such as the user.")] = None
    on_error: Annotated[
        Literal["raise", "skip"], Meta(description="How malformed lines are handled: raise or skip.")
    ] = "raise"
    reader_threads: Annotated[int, Meta(ge=1, description="Threads that parse the files.")] = 1


class TableSettings(Struct, frozen=True, kw_only=True):
    """The settings of a table; default: those of `[tables]`."""

    optimizer: Annotated[Spec | None, Meta(description="Update rule: its name and settings.")] = None
    init: Annotated[Spec | None, Meta(description="Initial rows: Zeros, Constant, Uniform or Normal.")] = None
    dtype: Annotated[Literal["float32", "float16", "bfloat16"] | None, Meta(description="Storage type of rows.")] = None
    admit: Annotated[Spec | None, Meta(description="Admission rule: which keys get a row.")] = None
    expire: Annotated[
        list[Spec] | None, Meta(description="Expiry rules: which rows are removed at the end of a pass; [] for none.")
    ] = None


class Tables(TableSettings, frozen=True, kw_only=True):
    """The settings of the tables."""

    linear_optimizer: Annotated[Spec | None, Meta(description="Update rule of the linear weights, if different.")] = (
        None
    )
    rules: dict[str, TableSettings] = {}


class Train(Struct, frozen=True, kw_only=True):
    """The settings of the training."""

    batch_size: Annotated[int, Meta(ge=1, description="Examples per batch.")] = 4096
    epochs: Annotated[int, Meta(ge=1, description="Maximum number of passes over the data.")] = 1
    optimizer: Annotated[
        Spec,
        Meta(
            description="Optimizer of the dense part and its settings: a class of torch.optim, or of shoal where dense "
            "is servers."
        ),
    ] = msgspec.field(default_factory=lambda: {"name": "Adam", "lr": 0.001})
    dense: Annotated[
        DenseSharing,
        Meta(
            description="How several workers share the dense part: allreduce (each worker has a copy, gradients are "
            "summed) or servers (the servers hold it)."
        ),
    ] = "allreduce"
    staleness: Annotated[int, Meta(ge=0, description="Number of batches by which rows are pulled ahead.")] = 0
    precision: Annotated[
        Precision,
        Meta(
            description="Precision of matrix products in training: float32 or bfloat16. Rows, dense parameters and "
            "predictions stay in float32."
        ),
    ] = "float32"
    shuffle: Annotated[int, Meta(ge=0, description="Batches in the shuffle buffer; 0: no shuffle.")] = 0
    negative_rate: Annotated[float, Meta(description="Share of the negatives to learn from, reweighted.")] = 1.0
    patience: Annotated[
        int | None,
        Meta(description="Stop after this many passes in a row without improvement on valid; keep the best pass."),
    ] = None
    min_delta: Annotated[float, Meta(description="Smallest change of the metric that counts as an improvement.")] = 0.0
    metric: Annotated[Literal["logloss", "auc"], Meta(description="Metric for patience.")] = "logloss"
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1, description="Seed of initial values, shuffle and sampling.")] = 0

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """When a fit with these settings ends early."""
        if self.patience is None:
            return None
        return EarlyStopping(self.patience, metric=self.metric, min_delta=self.min_delta)


class Logging(Struct, frozen=True, kw_only=True):
    """The trackers of the training."""

    log_every: Annotated[int, Meta(ge=1, description="Batches between two log entries.")] = 100
    tensorboard: Annotated[
        str | None, Meta(description="Directory of TensorBoard's event files, with a subdirectory for each run.")
    ] = None
    mlflow: Annotated[str | None, Meta(description="URI of MLflow's tracking server, or a folder for a database.")] = (
        None
    )
    experiment: Annotated[str, Meta(description="Name of the MLflow experiment.")] = "shoal"
    register: Annotated[
        str | None, Meta(description="Registered model of MLflow, of which the model becomes the next version.")
    ] = None
    log_model: Annotated[bool, Meta(description="Store the model and its report as artifacts of the MLflow run.")] = (
        True
    )


class Output(Struct, frozen=True, kw_only=True):
    """The output directory of the model."""

    dir: Annotated[str | None, Meta(description="Directory or URL of the model and its checkpoints.")] = None
    checkpoint_every: Annotated[
        int | None, Meta(description="Batches between two checkpoints, besides one after each pass.")
    ] = None


class Config(Struct, frozen=True, kw_only=True):
    """A whole configuration."""

    data: Data
    model: dict[str, Any]
    tables: Tables = Tables()
    train: Train = Train()
    logging: Logging = Logging()
    output: Output = Output()

    @property
    def fields(self) -> Fields:
        """The fields that the model uses."""
        data = self.data
        names = data.fields or self._usual_fields()
        form = "csv" if data.format == "tsv" else data.format
        fields = Fields(
            names=names,
            form=form,
            dense=data.dense,
            log=data.log,
            history=data.history,
            item=data.item,
            group=data.group,
        )
        if data.format in _COLUMNS:
            lists = {} if data.history is None else {data.history: data.item}
            try:
                fields.check_columns({"categorical": data.categorical, "numeric": data.numeric, "lists": lists})
            except ValueError as error:
                raise ValueError(f"[data] {str(error).replace('names has', 'fields has', 1)}") from None
        return fields

    def _usual_fields(self) -> list[str]:
        data = self.data
        if data.format == "criteo":
            return [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        taken = {*data.dense, data.history}
        names = [name for name in (*data.categorical, *data.numeric) if name not in taken]
        if not names:
            what = "categorical and numeric, or fields" if data.format in _COLUMNS else "fields"
            raise ValueError(f"[data] names no fields of {data.format} data: give {what}")
        return names

    def schema(self) -> dict[str, Any]:
        """Return the options of the function that makes the reader, except files and batch size."""
        data = self.data
        options: dict[str, Any] = {}
        for name in ("label", "weight", "positive", "columns", "na_values", "categorical", "numeric"):
            value = getattr(data, name)
            if value and data.format not in _COLUMNS:
                raise ValueError(f"[data] {name} is for {', '.join(_COLUMNS)}, not for {data.format}: leave it out")
            if value:
                options[name] = value
        if data.format not in _COLUMNS:
            return options
        if data.label is None:
            raise ValueError(f"[data] has no label: {data.format} needs the name of a column")
        options["categorical"] = list(data.categorical)
        if data.history is not None:
            options["lists"] = {data.history: data.item or data.history}
            if data.format != "parquet":
                options["list_separator"] = data.list_separator
        return options

    def made_by(self) -> dict[str, Any]:
        """Return the arguments of `build`, as JSON."""
        return {
            "model": self.model,
            "fields": to_json(self.fields),
            "tables": msgspec.to_builtins(self.tables),
            "optimizer": self.train.optimizer,
            "seed": self.train.seed,
            "staleness": self.train.staleness,
            "dense": self.train.dense,
            "precision": self.train.precision,
        }


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], more: Mapping[tuple[str, str], Any] | None = None) -> Config:
    """Read a configuration."""
    try:
        raw = tomllib.loads(local_path(path).read_text(encoding="utf-8"))
        return parse(raw, with_other_columns(raw, more or {}))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def parse(raw: Mapping[str, Any], more: Mapping[tuple[str, str], Any] | None = None) -> Config:
    """Check a configuration that was read; see `read`."""
    sections = {name: dict(_table(value, f"[{name}]")) for name, value in raw.items()}
    for (section, key), value in (more or {}).items():
        sections.setdefault(section, {})[key] = value
    _known(sections, _keys(Config), "the configuration", "section")
    for name, kind in (("data", Data), ("train", Train), ("logging", Logging), ("output", Output)):
        _known(sections.get(name, {}), _keys(kind), f"[{name}]")
    given = sections.get("tables", {})
    rules = {name: value for name, value in given.items() if name not in _keys(Tables) and isinstance(value, dict)}
    usual = {name: value for name, value in given.items() if name not in rules}
    _known(usual, [name for name in _keys(Tables) if name != "rules"], "[tables]")
    for name, rule in rules.items():
        stem, _, number = name.partition("-")
        if stem not in _TABLES or (number and not number.isdecimal()):
            _known([name], [*_TABLES, *_keys(TableSettings)], "[tables]", "table")
        _known(rule, _keys(TableSettings), f"[tables.{name}]")
    sections["tables"] = {**usual, "rules": rules}
    sections["model"] = _model(sections.get("model", {}))
    for name in ("data", "model"):
        if name not in sections:
            raise ValueError(f"there is no section [{name}]")
    data = sections["data"]
    data |= {key: [data[key]] for key in ("train", "valid") if isinstance(data.get(key), str)}  # one file
    config = _converted(sections, Config)
    _ = config.schema(), config.fields, _rule(config.tables)
    if config.train.dense == "servers":
        _optimizer(config.train.optimizer, "[train]")
    else:
        _check_dense(config.train.optimizer)
    for name, rule in config.tables.rules.items():
        _rule(rule, f"[tables.{name}]")
    return config


_TABLES = ("linear", "embedding")  # names of tables that models make


def _keys(kind: type[Struct]) -> list[str]:
    return list(kind.__struct_fields__)


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}: it must be a section")
    return value


def _known(given: Iterable[str], known: Sequence[str], where: str, what: str = "key") -> None:
    """Raise ValueError for an unknown name; the message has the nearest known one."""
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = "there are" if near is None else f"did you mean {near!r}? There are"
            raise ValueError(f"{where} has no {what} {name!r}: {hint} {', '.join(known)}")


def _converted(value: Any, kind: Any, where: str = "") -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        section, _, key = place.rstrip("`").lstrip(".").partition(".")
        at = where or (f"[{section}] {key}".rstrip() if section else "the configuration")
        names = (
            _choices(kind, [section, key] if section and not where else []) if text.startswith("Invalid enum") else ""
        )
        raise ValueError(f"{at}: {text[:1].lower()}{text[1:]}{names}") from None


def _choices(kind: Any, path: list[str]) -> str:
    """Return the words that are valid at a place of a configuration, for an error message."""
    for name in path:
        kind = get_type_hints(kind).get(name)
    words = [word for one in (kind, *get_args(kind)) if get_origin(one) is Literal for word in get_args(one)]
    return f": it is one of {', '.join(words)}" if words else ""


def _model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings of a model against the parameters of its class."""
    if "name" not in given:
        raise ValueError(f"[model] has no name: it is one of {', '.join(MODELS)}")
    name = given["name"]
    _known([str(name)], list(MODELS), "[model]", "model")
    takes = _takes(MODELS[name])
    out: dict[str, Any] = {"name": name}
    _known([key for key in given if key != "name"], list(takes), f"[model] of {name}")
    for key, value in given.items():
        if key != "name":
            out[key] = _converted(value, takes[key], f"[model] {key}")
    return out


def _takes(kind: type[nn.Module]) -> dict[str, Any]:
    """Return the settings of a model with their types."""
    hints = get_type_hints(kind.__init__)
    return {name: hints[name] for name in inspect.signature(kind).parameters if name not in _OF_DATA}


# ---- building --------------------------------------------------------------------------------------------------------


def build(config: Config | Mapping[str, Any], store: Store) -> ClickModel:
    """Make the model that a configuration describes, with its tables in ``store``.

    Dense parameters are drawn from a generator of the configuration's seed; torch's own generator continues from there,
    so that dropout is repeatable too.
    """
    made_by = config.made_by() if isinstance(config, Config) else dict(config)
    module, fields = _make_module(made_by, store)
    dense: DenseSharing = made_by.get("dense", "allreduce")  # missing in older models, as are staleness and precision
    optimizer: Optimizer | functools.partial[torch.optim.Optimizer]
    if dense == "servers":
        optimizer = _optimizer(made_by["optimizer"], "[train]")
    else:
        rule, how = _dense(made_by["optimizer"])
        optimizer = functools.partial(rule, **how)
    how = {name: made_by[name] for name in ("seed", "staleness", "precision") if name in made_by}
    rate = config.train.negative_rate if isinstance(config, Config) else 1.0
    model = ClickModel(module, fields=fields, store=store, optimizer=optimizer, dense=dense, negative_rate=rate, **how)
    model.made_by = made_by
    return model


def _make_module(made_by: Mapping[str, Any], store: Store) -> tuple[nn.Module, Fields]:
    """Make the module that a configuration describes, with its tables in ``store``; and its fields."""
    settings = dict(made_by["model"])
    kind = MODELS[settings.pop("name")]
    fields = Fields(**made_by["fields"])
    takes = inspect.signature(kind).parameters
    name = made_by["model"]["name"]
    if fields.dense:
        if "dense" not in takes:
            raise ValueError(f"model {name} takes no dense columns: name them among [data] fields, or take another")
        settings["dense"] = len(fields.dense)
    if (fields.history is None) == ("item" in takes):
        which = "needs [data] history and item" if "item" in takes else "takes no history"
        raise ValueError(f"model {name} {which}")
    if fields.history is not None:
        settings["item"] = fields.item_index
    rules = _converted(made_by["tables"], Tables)
    seed = made_by["seed"]
    usual = _rule(rules, seed=seed)
    names = ("optimizer", "dtype", "admit", "expire")
    given = {name: value for name in names if (value := getattr(usual, name)) is not None}
    make = tables(
        store,
        **given,
        init=usual.init or Normal(0.01, seed=seed),
        linear_optimizer=None if rules.linear_optimizer is None else _optimizer(rules.linear_optimizer, "[tables]"),
        rules={table: _rule(rule, f"[tables.{table}]", seed=seed) for table, rule in rules.rules.items()},
        seed=seed,
    )
    torch.manual_seed(seed)
    return kind(make, len(fields), **settings), fields


def load(
    directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
) -> ClickModel:
    """Read a click model that was trained by a configuration; it predicts, bit for bit, as the saved one.

    Parameters
    ----------
    directory : path or URL
    store : Store, optional
        The store of the tables; default: a new local store, closed by the model's `close`.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Returns
    -------
    ClickModel

    Raises
    ------
    CorruptionError
        A file is missing, truncated or changed.
    ValueError
        It is not a click model, or the caller made its module: make the module, and call `ClickModel.restore`.
    """
    where = open_dir(directory, storage_options)
    described = files.read(where)
    if described.model != files.CLICK:
        raise ValueError(f"{where} is a {described.model}: load it with shoal.models.load")
    if not described.click:
        raise ValueError(
            f"the module of {where} was not made by a configuration: make it over the same tables, and "
            f"call ClickModel(module, fields=fields, store=store).restore({str(where)!r})"
        )
    target = files.store_for(where) if store is None else store
    try:
        tower = files.read_tower(where, described)
        check_module(functools.partial(_make_module, described.click), tower, where.address(described.tower or ""))
        with torch.random.fork_rng(devices=[]), described_by(where.address(files.MODEL_FILE)):
            model = build(described.click, target)
        model.restore(where)
    except BaseException:
        if store is None:
            target.close()
        raise
    if store is None:
        model.own_store()
    return model


def exported(description: Mapping[str, Any], tower: bytes, store: Store) -> ClickModel:
    """Make the click model of an export, of a description by `shoal.models.files.for_export`; it only predicts."""
    if not description["click"]:
        raise ValueError("the module of this click model was not made by a configuration, so it cannot be rebuilt")
    check_module(functools.partial(_make_module, description["click"]), tower, "tower.pt")
    with torch.random.fork_rng(devices=[]):
        model = build(description["click"], store)
    model.take_exported(description, tower)
    return model


def _rule(settings: TableSettings, where: str = "[tables]", *, seed: int = 0) -> TableRule:
    return TableRule(
        optimizer=None if settings.optimizer is None else _optimizer(settings.optimizer, where),
        init=None if settings.init is None else _init(settings.init, where, seed),
        dtype=settings.dtype,
        admit=None if settings.admit is None else _described(settings.admit, f"{where} admit", _ADMISSIONS, {}),
        expire=None
        if settings.expire is None
        else tuple(_described(one, f"{where} expire", _EXPIRIES, {}) for one in settings.expire),
    )


def _optimizer(spec: Spec, where: str) -> Optimizer:
    settings = dict(spec)
    if isinstance(schedule := settings.get("schedule"), dict):
        settings["schedule"] = _described(schedule, f"{where} schedule", _kinds_of(Schedule, schedules), {})
    made: Optimizer = _described(settings, f"{where} optimizer", _kinds_of(Optimizer), {})
    return made


def _init(spec: Spec, where: str, seed: int) -> Init:
    made: Init = _described(spec, f"{where} init", _kinds_of(Init), {"seed": seed})
    return made


def _kinds_of(base: type, module: ModuleType = optim) -> dict[str, Any]:
    found = vars(module)
    return {
        name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, base) and kind != base
    }


_ADMISSIONS = _kinds_of(Admission, lifecycle)
_EXPIRIES = _kinds_of(Expiry, lifecycle)


def _named(spec: Spec, where: str, kinds: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Find the class that a spec names, and its settings, whose names are checked."""
    settings = dict(spec)
    name = settings.pop("name", None)
    if name is None:
        raise ValueError(f'{where} has no name: write {{ name = "{next(iter(kinds))}", ... }}')
    _known([str(name)], list(kinds), where, "kind")
    parameters = inspect.signature(kinds[name]).parameters
    _known(settings, [one for one in parameters if one != "params"], f"{where} {name}")
    return kinds[name], settings


def _described(spec: Spec, where: str, kinds: Mapping[str, Any], usual: Mapping[str, Any]) -> Any:
    kind, settings = _named(spec, where, kinds)
    takes = inspect.signature(kind).parameters
    try:
        return kind(**{**{name: value for name, value in usual.items() if name in takes}, **settings})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _dense(spec: Spec) -> tuple[Any, dict[str, Any]]:
    """Find the class of the optimizer of the dense parameters, and its settings."""
    kind, settings = _named(spec, "[train] optimizer", {name: dense_optimizer(name) for name in DENSE_OPTIMIZERS})
    return kind, with_defaults(kind, settings)


def _check_dense(spec: Spec) -> None:
    """Raise ValueError if the settings of the dense optimizer are invalid."""
    kind, settings = _dense(spec)
    try:
        kind([nn.Parameter(torch.zeros(1))], **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[train] optimizer: {error}") from None
