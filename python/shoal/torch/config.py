"""Click models from the configuration of ``shoal train ctr``: its checks that need PyTorch, and the model it describes.

    [data]     the data, and the fields that the model uses
    [model]    the architecture, and its sizes
    [tables]   optimizer, initial rows and dtype of the tables; [tables.rules.NAME] of one of them
    [train]    batches, passes, dense optimizer, early stopping

`shoal.config.TrainConfig` has the settings, docs/ctr.md and docs/settings.md their descriptions.

Threads: configurations are immutable; `build` belongs to the caller's thread, whose torch generator it draws from.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import torch
from torch import nn

from shoal import optim, schedules
from shoal.base.machine import local_path
from shoal.base.settings import check_names, read_file
from shoal.base.settings import read as read_settings
from shoal.base.suggest import nearest
from shoal.config import COLUMN_FORMATS, DataConfig, TableConfig, TableSettings, TrainConfig
from shoal.lifecycle import parse_admission, parse_expiry
from shoal.models import files
from shoal.optim import Init, Normal, Optimizer
from shoal.schedules import Schedule
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.torch.click_model import ClickModel
from shoal.torch.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer, with_defaults
from shoal.torch.dense_part import DenseSharing
from shoal.torch.fields import Fields, to_json
from shoal.torch.models import MODELS
from shoal.torch.other_columns import with_other_columns
from shoal.torch.tables import TableRule, tables
from shoal.torch.tower import check_module, described_by

Spec = Mapping[str, Any]  # {"name": "Adagrad", "lr": 0.02}
Run = TypeVar("Run", bound=TrainConfig)
_OF_DATA = ("make", "fields", "item", "dense")  # parameters of models that follow from [data]


def fields_of(data: DataConfig) -> Fields:
    """Return the fields that a model of these data uses."""
    form = "csv" if data.format == "tsv" else data.format or ""
    fields = Fields(
        names=list(data.fields) or _usual_fields(data),
        form=form,
        dense=list(data.dense),
        log=data.log,
        history=data.history,
        item=data.item,
        group=data.group,
    )
    if data.format in COLUMN_FORMATS:
        lists = {} if data.history is None else {data.history: data.item}
        try:
            fields.check_columns({"categorical": data.categorical, "numeric": data.numeric, "lists": lists})
        except ValueError as error:
            raise ValueError(f"[data] {str(error).replace('names has', 'fields has', 1)}") from None
    return fields


def _usual_fields(data: DataConfig) -> list[str]:
    if data.format == "criteo":
        return [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    taken = {*data.dense, data.history}
    names = [name for name in (*data.categorical, *data.numeric) if name not in taken]
    if not names:
        what = "categorical and numeric, or fields" if data.format in COLUMN_FORMATS else "fields"
        raise ValueError(f"[data] names no fields of {data.format} data: give {what}")
    return names


def made_by(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `build`, as JSON."""
    tables, train = config.tables, config.train
    names = [*TableSettings.__struct_fields__, "linear_optimizer"]
    return {
        "model": config.model,
        "fields": to_json(fields_of(config.data)),
        "tables": {
            **{name: value for name in names if (value := getattr(tables, name)) is not None},
            "rules": tables.rules or {},
        },
        "optimizer": train.optimizer or ADAM,
        "seed": train.seed,
        "staleness": train.staleness,
        "dense": train.dense,
        "precision": train.precision,
    }


ADAM = {"name": "Adam", "lr": 0.001}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> TrainConfig:
    """Read a configuration of a click model."""
    try:
        return parse(read_file(str(local_path(path))))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(os.fspath(path)) else f"{os.fspath(path)}: {text}") from None


def parse(raw: Mapping[str, Any]) -> TrainConfig:
    """Check the content of a configuration of a click model."""
    return checked(read_settings(TrainConfig, raw))


def checked(config: Run) -> Run:
    """Return the configuration of a click model with the columns of its data that it does not name, checked."""
    data = with_other_columns(config.data)
    config = msgspec.structs.replace(config, data=data, model=_model(config.model or {}))
    if data.format == "libsvm":
        raise ValueError(f"[data] format is libsvm, which has no fields: it is one of {', '.join(_FORMATS)}")
    if data.format is None:
        raise ValueError(f"[data] has no format: it is one of {', '.join(_FORMATS)}")
    if data.format in COLUMN_FORMATS and data.label is None:
        raise ValueError(f"[data] has no label: {data.format} needs the name of a column")
    _ = fields_of(data), _rule(config.tables)
    for name, rule in (config.tables.rules or {}).items():
        stem, _, number = name.partition("-")
        if stem not in _TABLES or (number and not number.isdecimal()):
            check_names([name], _TABLES, "[tables.rules]")
        _rule(_table_settings(name, rule), f"[tables.rules.{name}]")
    optimizer = config.train.optimizer or ADAM
    if config.train.dense == "servers":
        _optimizer(optimizer, "[train]")
    else:
        _check_dense(optimizer)
    return config


_FORMATS = ("libffm", "vw", "criteo", *COLUMN_FORMATS)
_TABLES = ("linear", "embedding")  # names of tables that models make


def _table_settings(name: str, rule: Any) -> TableSettings:
    if not isinstance(rule, Mapping):
        raise ValueError(f"[tables.rules] {name} is {rule!r}: it must be a section")
    return read_settings(TableSettings, rule, f"[tables.rules.{name}]")


def _known(given: Iterable[str], known: Sequence[str], where: str, what: str = "key") -> None:
    """Raise ValueError for an unknown name; the message has the nearest known one."""
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = "there are" if near is None else f"did you mean {near!r}? There are"
            raise ValueError(f"{where} has no {what} {name!r}: {hint} {', '.join(known)}")


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error).partition(" - at `$")[0]
        words = [word for one in (kind, *get_args(kind)) if get_origin(one) is Literal for word in get_args(one)]
        names = f": it is one of {', '.join(words)}" if words and text.startswith("Invalid enum") else ""
        raise ValueError(f"{where}: {text[:1].lower()}{text[1:]}{names}") from None


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


def build(config: TrainConfig | Mapping[str, Any], store: Store) -> ClickModel:
    """Make the model that a configuration describes, with its tables in ``store``.

    Dense parameters are drawn from a generator of the configuration's seed; torch's own generator continues from there,
    so that dropout is repeatable too.
    """
    described = made_by(config) if isinstance(config, TrainConfig) else dict(config)
    module, fields = _make_module(described, store)
    dense: DenseSharing = described["dense"]
    optimizer: Optimizer | functools.partial[torch.optim.Optimizer]
    if dense == "servers":
        optimizer = _optimizer(described["optimizer"], "[train]")
    else:
        rule, how = _dense(described["optimizer"])
        optimizer = functools.partial(rule, **how)
    how = {name: described[name] for name in ("seed", "staleness", "precision")}
    rate = config.train.negative_rate if isinstance(config, TrainConfig) else 1.0
    model = ClickModel(module, fields=fields, store=store, optimizer=optimizer, dense=dense, negative_rate=rate, **how)
    model.made_by = described
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
    rules = read_settings(TableConfig, made_by["tables"], "[tables]")
    seed = made_by["seed"]
    usual = _rule(rules, seed=seed)
    names = ("optimizer", "dtype", "admit", "expire")
    given = {name: value for name in names if (value := getattr(usual, name)) is not None}
    make = tables(
        store,
        **given,
        init=usual.init or Normal(0.01, seed=seed),
        linear_optimizer=None if rules.linear_optimizer is None else _optimizer(rules.linear_optimizer, "[tables]"),
        rules={
            table: _rule(_table_settings(table, rule), f"[tables.rules.{table}]", seed=seed)
            for table, rule in (rules.rules or {}).items()
        },
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
        admit=None if settings.admit is None else parse_admission(settings.admit),
        expire=None if settings.expire is None else tuple(map(parse_expiry, settings.expire)),
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
