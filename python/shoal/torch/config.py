"""Click models from the configuration of ``shoal train ctr``: its checks that need PyTorch, and the model it describes.

    [data]          the data
    [[features]]    what the model reads of an example; or columns of [data] by their roles
    [model]         the architecture, and its sizes
    [tables]        optimizer, initial rows and dtype of the tables; [tables.rules.NAME] of one of them
    [train]         batches, passes, dense optimizer, early stopping

`shoal.config.TrainConfig` has the settings, docs/ctr.md and docs/settings.md their descriptions.

Threads: configurations are immutable; `build` belongs to the caller's thread, whose torch generator it draws from.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import torch
from torch import nn

from shoal import optim, schedules
from shoal.base import own_code
from shoal.base.machine import local_path
from shoal.base.settings import check_names, read_file
from shoal.base.settings import read as read_settings
from shoal.config import COLUMN_FORMATS, DataConfig, Feature, TableConfig, TableSettings, TrainConfig
from shoal.data import Reader
from shoal.lifecycle import parse_admission, parse_expiry
from shoal.models import files
from shoal.models.features import Features
from shoal.optim import Init, Normal, Optimizer
from shoal.schedules import Schedule
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.store.local import local
from shoal.torch.click_model import ClickModel
from shoal.torch.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer, with_defaults
from shoal.torch.dense_part import DenseSharing
from shoal.torch.model import Model
from shoal.torch.models import MODELS
from shoal.torch.other_columns import with_other_columns
from shoal.torch.recipe import described as described_recipe
from shoal.torch.recipe import recipe_of
from shoal.torch.tables import TableRule, tables
from shoal.torch.tower import check_module, described_by

log = logging.getLogger(__name__)

Spec = Mapping[str, Any]  # {"name": "Adagrad", "lr": 0.02}
Run = TypeVar("Run", bound=TrainConfig)


def features_of(config: TrainConfig) -> Features:
    """Return the features that a model of a configuration reads."""
    data = config.data
    form = "csv" if data.format == "tsv" else data.format or ""
    if config.features:
        described: list[Any] = list(config.features)
        for name in _OF_OLD:
            if getattr(data, name):
                raise ValueError(f"[data] has {name}, and there are [[features]], which say it: leave one of them out")
    else:
        described = _described_in(data)
    features = Features(described, form=form, group=data.group, labels=data.labels)
    if not config.features and data.format in COLUMN_FORMATS:
        lists = {} if data.history is None else {data.history: data.item}
        try:
            features.check_columns({"categorical": data.categorical, "numeric": data.numeric, "lists": lists})
        except ValueError as error:
            raise ValueError(f"[data] {error}") from None
    return features


_OF_OLD = ("fields", "categorical", "numeric", "dense", "log", "history", "item")


def _described_in(data: DataConfig) -> list[Feature]:
    """Return the features that the section [data] names: columns by their roles."""
    if (data.history is None) != (data.item is None):
        raise ValueError(
            f"[data] history is {data.history!r} and item {data.item!r}: a history needs the item it is about"
        )
    numeric = set(data.numeric) if data.format in COLUMN_FORMATS else set()
    names = list(data.fields) or _usual_fields(data)
    described = [
        Feature(name=name, type="number", embed=True) if name in numeric else Feature(name=name) for name in names
    ]
    described += [Feature(name=name, type="number", log=data.log) for name in data.dense]
    if data.history is not None:
        described.append(Feature(name=data.history, type="sequence", share=data.item))
    return described


def _usual_fields(data: DataConfig) -> list[str]:
    if data.format == "criteo":
        return [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    taken = {*data.dense, data.history}
    names = [name for name in (*data.categorical, *data.numeric) if name not in taken]
    if not names:
        what = (
            "[[features]], or categorical and numeric" if data.format in COLUMN_FORMATS else "[[features]], or fields"
        )
        raise ValueError(f"[data] names no fields of {data.format} data: give {what}")
    return names


def schema_of(config: TrainConfig) -> dict[str, Any]:
    """Return the columns of the features as arguments of the function that makes the reader."""
    if not config.features or config.data.format not in COLUMN_FORMATS:
        return {}
    return {name: columns for name, columns in features_of(config).columns.items() if columns or name == "categorical"}


def made_by(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `build`, as JSON."""
    tables, train = config.tables, config.train
    names = [*TableSettings.__struct_fields__, "linear_optimizer"]
    return {
        "model": config.model,
        "features": features_of(config).to_json(),
        "tables": {
            **{name: value for name in names if (value := getattr(tables, name)) is not None},
            "rules": tables.rules or {},
        },
        "optimizer": train.optimizer or ADAM,
        "recipe": described_recipe(train),
        "seed": train.seed,
        "staleness": train.staleness,
        "dense": train.dense,
        "precision": train.precision,
        **_code_of(config.model or {}),
    }


def _code_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the code of a user's own model is from."""
    name = str(model["name"])
    return {"code": own_code.recorded(_kind_of(name))} if own_code.is_own(name) else {}


def with_intervals(config: Run, data: Reader) -> Run:
    """Return the configuration with the intervals of buckets by quantiles, found in the first training examples."""
    features = features_of(config)
    if not features.needs_data:
        return config
    if not data.repeatable:
        raise ValueError("[[features]] has quantiles, which are found before a stream is read: give edges")
    found = features.fitted(data.unlabelled().with_fields())
    return msgspec.structs.replace(config, features=tuple(found.to_json()["features"]))


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
    data = config.data if config.features else with_other_columns(config.data)
    if data.labels:
        first = next(iter(data.labels.values()))
        label = first.get("column") if isinstance(first, Mapping) else first
        if data.label not in (None, label):
            raise ValueError(f"[data] label is {data.label!r}, and the first of the labels {label!r}: leave label out")
        data = msgspec.structs.replace(data, label=label)
    config = msgspec.structs.replace(config, data=data, model=_model(config.model or {}))
    if data.format == "libsvm":
        raise ValueError(f"[data] format is libsvm, which has no fields: it is one of {', '.join(_FORMATS)}")
    if data.format is None:
        raise ValueError(f"[data] has no format: it is one of {', '.join(_FORMATS)}")
    if data.format in COLUMN_FORMATS and data.label is None:
        raise ValueError(f"[data] has no label: {data.format} needs the name of a column")
    _ = features_of(config), _rule(config.tables)
    is_own = own_code.is_own(str((config.model or {})["name"]))
    for name, rule in (config.tables.rules or {}).items():
        stem, _, number = name.partition("-")
        if not is_own and (stem not in _TABLES or (number and not number.isdecimal())):
            check_names([name], _TABLES, "[tables.rules]")
        _rule(_table_settings(name, rule), f"[tables.rules.{name}]")
    optimizer = config.train.optimizer or ADAM
    if config.train.dense == "servers":
        _optimizer(optimizer, "[train]")
    else:
        _check_dense(optimizer)
    recipe_of(described_recipe(config.train))
    if config.train.metric == "gauc" and data.group is None:
        raise ValueError("[train] metric is gauc, and [data] names no group: name a field, such as that of the user")
    return config


_FORMATS = ("libffm", "vw", "criteo", *COLUMN_FORMATS)
_TABLES = ("linear", "embedding")  # names of tables that models make


def _table_settings(name: str, rule: Any) -> TableSettings:
    if not isinstance(rule, Mapping):
        raise ValueError(f"[tables.rules] {name} is {rule!r}: it must be a section")
    return read_settings(TableSettings, rule, f"[tables.rules.{name}]")


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
        raise ValueError(f"[model] has no name: it is one of {', '.join(MODELS)}, or your own, mypkg.module:Class")
    name = given["name"]
    takes = _takes(_kind_of(name))
    out: dict[str, Any] = {"name": name}
    check_names([key for key in given if key != "name"], takes, f"[model] of {name}")
    for key, value in given.items():
        if key != "name":
            out[key] = _converted(value, takes[key], f"[model] {key}")
    return out


def _kind_of(name: Any) -> type[Model]:
    """Return the class of a model by its name, or that of a user's own."""
    if not own_code.is_own(str(name)):
        check_names([str(name)], MODELS, "[model]", "model")
        return MODELS[name]
    kind = own_code.named(name, "[model] name")
    if not (isinstance(kind, type) and issubclass(kind, Model)):
        raise ValueError(f"[model] name is {name!r}, which is no subclass of shoal.torch.Model")
    return kind


def _takes(kind: type[Model]) -> dict[str, Any]:
    """Return the settings of a model with their types."""
    hints = get_type_hints(kind.__init__)
    takes: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes |= get_type_hints(get_args(hints[name])[0]) if get_args(hints.get(name)) else {}
        elif name not in ("make", "features"):
            takes[name] = hints.get(name, Any)
    return takes


# ---- building --------------------------------------------------------------------------------------------------------


def build(config: TrainConfig | Mapping[str, Any], store: Store) -> ClickModel:
    """Make the model that a configuration describes, with its tables in ``store``.

    Dense parameters are drawn from a generator of the configuration's seed; torch's own generator continues from there,
    so that dropout is repeatable too.
    """
    described = made_by(config) if isinstance(config, TrainConfig) else dict(config)
    if "code" in described and (now := _code_of(described["model"])["code"]) != described["code"]:
        log.warning(
            "the code of %s has changed since the model was saved: %s, now %s",
            described["model"]["name"],
            described["code"],
            now,
        )
    module = _make_module(described, store)
    dense: DenseSharing = described["dense"]
    optimizer: Optimizer | functools.partial[torch.optim.Optimizer]
    if dense == "servers":
        optimizer = _optimizer(described["optimizer"], "[train]")
    else:
        rule, how = _dense(described["optimizer"])
        optimizer = functools.partial(rule, **how)
    how = {name: described[name] for name in ("seed", "staleness", "precision")}
    rate = config.train.negative_rate if isinstance(config, TrainConfig) else 1.0
    how |= {"negative_rate": rate, "recipe": recipe_of(described["recipe"])}
    model = ClickModel(module, store=store, optimizer=optimizer, dense=dense, **how)
    model.made_by = described
    return model


def _make_module(made_by: Mapping[str, Any], store: Store) -> Model:
    """Make the module that a configuration describes, with its tables in ``store``."""
    settings = dict(made_by["model"])
    kind = _kind_of(settings.pop("name"))
    features = Features.from_json(made_by["features"])
    if features.needs_data:
        raise ValueError("there are buckets by quantiles whose intervals are not known yet: call with_intervals first")
    rules = read_settings(TableConfig, made_by["tables"], "[tables]")
    seed = made_by["seed"]
    usual = _rule(rules, seed=seed)
    names = ("optimizer", "dtype", "admit", "expire")
    given = {name: value for name in names if (value := getattr(usual, name)) is not None}
    make = tables(
        store,
        **given,
        init=usual.init or Normal(0.01, seed=seed),
        frozen=usual.frozen,
        linear_optimizer=None if rules.linear_optimizer is None else _optimizer(rules.linear_optimizer, "[tables]"),
        rules={
            table: _rule(_table_settings(table, rule), f"[tables.rules.{table}]", seed=seed)
            for table, rule in (rules.rules or {}).items()
        },
        seed=seed,
    )
    torch.manual_seed(seed)
    return kind(make, features, **settings)  # type: ignore[call-arg, arg-type]


def load(
    directory: StoragePath,
    *,
    store: Store | None = None,
    resume: bool = False,
    imports: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> ClickModel:
    """Read a click model that was trained by a configuration; it predicts, bit for bit, as the saved one.

    Parameters
    ----------
    directory : path or URL
    store : Store, optional
        The store of the tables; default: a new local store, closed by the model's `close`.
    resume : bool
        Whether to restore the optimizer of the dense part too, to train the model further as without a break.
    imports : iterable of str
        Packages whose code a model of your own may be made of: see `shoal.torch.Model`. They are allowed in this
        process from now on.
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
    own_code.allow(imports)
    where = open_dir(directory, storage_options)
    described = files.read(where)
    if described.model != files.CLICK:
        raise ValueError(f"{where} is a {described.model}: load it with shoal.models.load")
    if not described.click:
        raise ValueError(
            f"the module of {where} was not made by a configuration: make it over the same tables, and "
            f"call ClickModel(module, store=store).restore({str(where)!r})"
        )
    target = files.store_for(where) if store is None else store
    try:
        _allow(described.click)
        tower = files.read_tower(where, described)
        check_module(functools.partial(_make_module, described.click), tower, where.address(described.tower or ""))
        with torch.random.fork_rng(devices=[]), described_by(where.address(files.MODEL_FILE)):
            model = build(described.click, target)
        model.restore(where, resume=resume)
    except BaseException:
        if store is None:
            target.close()
        raise
    if store is None:
        model.own_store()
    return model


def _allow(made_by: Mapping[str, Any]) -> None:
    """Raise ValueError if the module is of code that is not allowed here."""
    model = made_by.get("model")
    name = str(model.get("name", "")) if isinstance(model, Mapping) else ""
    if own_code.is_own(name):
        _kind_of(name)


def exported(description: Mapping[str, Any], tower: bytes, store: Store) -> ClickModel:
    """Make the click model of an export, of a description by `shoal.models.files.for_export`; it only predicts."""
    if not description["click"]:
        raise ValueError("the module of this click model was not made by a configuration, so it cannot be rebuilt")
    _allow(description["click"])
    check_module(functools.partial(_make_module, description["click"]), tower, "tower.pt")
    with torch.random.fork_rng(devices=[]):
        model = build(description["click"], store)
    model.take_exported(description, tower)
    return model


def onnx_of(description: Mapping[str, Any], tower: bytes) -> bytes:
    """Return the dense part of an export, of a description by `shoal.models.files.for_export`, as a file of ONNX."""
    with local(threads=1, slots=2) as store:
        return exported(description, tower, store).onnx_tower()


def _rule(settings: TableSettings, where: str = "[tables]", *, seed: int = 0) -> TableRule:
    return TableRule(
        optimizer=None if settings.optimizer is None else _optimizer(settings.optimizer, where),
        init=None if settings.init is None else _init(settings.init, where, seed),
        dtype=settings.dtype,
        admit=None if settings.admit is None else parse_admission(settings.admit),
        expire=None if settings.expire is None else tuple(map(parse_expiry, settings.expire)),
        frozen=settings.frozen,
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
    check_names([str(name)], kinds, where, "kind")
    parameters = inspect.signature(kinds[name]).parameters
    check_names(settings, [one for one in parameters if one != "params"], f"{where} {name}")
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
