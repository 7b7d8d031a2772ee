"""Reports: the history, the settings and the metrics of a model, as one HTML file.

    model directory --> history, settings, counts, largest weights --+--> page.py --> report.html
    held-out data ----> margins --> metrics, deciles, ROC -----------+      |
                                                                          charts.py

Threads: `report` makes a store of its own; any thread may call it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal import checkpoint, models
from shoal.data import Batch, Reader, columns
from shoal.models import Fit, Model, evaluation, files
from shoal.models.predictor import Predictor
from shoal.models.segments import Segmentation, by_segment
from shoal.optim import Optimizer
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.storage.output import check_output
from shoal.store.base import Store
from shoal.tools.reports import charts
from shoal.tools.reports.page import Facts, HeldOut, page

if TYPE_CHECKING:
    from shoal.torch import ClickModel, Features

FILE = "report.html"
TOP = 30


def report(
    model_dir: StoragePath,
    out: str | os.PathLike[str] | None = None,
    data: Iterable[Batch] | None = None,
    *,
    data_name: str | None = None,
    segments: Mapping[str, Segmentation] | None = None,
    names: Mapping[int, str] | None = None,
    overwrite: bool = False,
    top: int = TOP,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Path | str:
    """Write a report of a model: one HTML file that loads no other files.

    Parameters
    ----------
    model_dir : path or URL
        Of any kind of model, as its `save` writes it.
    out : path or URL, optional
        The file; if not given, ``report.html`` in the model's directory, which replaces an earlier report there.
    data : Reader or iterable of Batch, optional
        Held-out examples of the model's format, measured exactly. Without them the report shows what the model
        recorded about its validation data.
    data_name : str, optional
        Name of the data in the report; default: the name of the reader's file, or "held out".
    segments : mapping of str to Segmentation, optional
        Of the examples of ``data``, by column, from `shoal.models.segments.read_segments`: metrics are also shown for
        the texts of these columns.
    names : mapping of int to str, optional
        Names of features by their keys; default: those that were saved with the model. Other features are shown as
        numbers.
    overwrite : bool
        Whether to replace an existing file ``out``.
    top : int
        How many of the largest weights to show; 0 for none.
    threads : int, optional
        Threads of the store; default: all cores.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Returns
    -------
    Path or str
        The file, or its URL.

    Raises
    ------
    CorruptionError
        A file of the model is missing, cut short or changed.
    ValueError
        ``out`` is a directory, exists, or belongs to a model; ``top`` is negative, or the data is of another format.
    StorageError
        The file cannot be written.
    ImportError
        matplotlib is missing: ``pip install 'shoal[plot]'``.

    Notes
    -----
    Reads the whole model into memory, and keeps 12 bytes for each example of ``data``, more while sorting.
    """
    charts.require()
    directory = open_dir(model_dir, storage_options)
    target = directory.child(FILE) if out is None else open_dir(out, storage_options)
    if top < 0:
        raise ValueError(f"top is {top}: pass 0 or more")
    if out is not None:
        read = data.paths if isinstance(data, Reader) else ()
        check_output(out, overwrite=overwrite, inputs=read, storage_options=storage_options)
    elif target.kind() == "directory":
        raise ValueError(f"{target} is a directory: name a file")
    with files.store_for(directory, threads=threads) as store:
        model = _loaded(directory, store)
        held_out = None if data is None else _held_out(model, data, data_name, segments or {})
        if names is None:
            names = models.load_names(directory) or {}
        facts = _facts(directory, model, held_out, names, top)
    folder, name = directory, target.name
    if out is not None:
        path = os.fspath(out) if target.local is None else os.path.realpath(target.local)  # a symbolic link stays
        folder, name = open_dir(os.path.dirname(path) or ".", storage_options), os.path.basename(path)
    folder.publish(name, page(facts).encode(), before=folder.version(name))
    return target.location


def _loaded(directory: StorageDir, store: Store) -> Model | ClickModel:
    if files.read(directory).model != files.CLICK:
        return models.load(directory, store=store)
    from shoal.torch import load

    return load(directory, store=store)


def _held_out(
    model: Predictor, data: Iterable[Batch], name: str | None, segments: Mapping[str, Segmentation]
) -> HeldOut:
    model.check_fitted()
    measured_by = {}
    if segments and not model.is_multiclass:
        measured, found = evaluation.measure_with_predictions(model, model.reading(data))
        measured_by = {column: by_segment(one, found) for column, one in segments.items()}
    else:
        measured = evaluation.measure([model], model.reading(data))[0]
    path = getattr(data, "path", None)
    return HeldOut(
        name=name or (Path(path).name if path is not None else "held out"),
        metrics=measured.metrics,
        curves=measured.curves,
        calibrated=model.calibration is not None,
        segments=measured_by,
    )


class _KindSections(msgspec.Struct, frozen=True, kw_only=True):
    """What only this kind of model has."""

    rule: str
    settings: list[tuple[str, str]]
    nonzero: int | None = None
    weights: list[tuple[str, float]] = msgspec.field(default_factory=list)


def _of_model(model: Model, names: Mapping[int, str], top: int) -> _KindSections:
    largest, weights = model.top(top, names=names)
    if weights.ndim == 1:
        bias = f"{model.bias:.4f}"
    else:  # of each feature the largest weight
        of = np.abs(weights).argmax(axis=1)
        largest = [f"{name}, class {one}" for name, one in zip(largest, model.classes_[of].tolist(), strict=True)]
        weights, bias = weights[np.arange(len(of)), of], "one for each class"
    return _KindSections(
        rule=_rule(model.optimizer),
        settings=[
            *((name, str(value)) for name, value in model.kind_settings.items()),
            ("bias", bias if model.has_bias else "no"),
        ],
        nonzero=model.count_nonzero(),
        weights=list(zip(largest, weights.tolist(), strict=True)),
    )


def _of_click(model: ClickModel) -> _KindSections:
    made_by = model.made_by
    network = dict(made_by["model"])
    return _KindSections(
        rule=str(network.pop("name")),
        settings=[
            *((name.replace("_", " "), str(value)) for name, value in network.items()),
            ("dense parameters", f"{model.dense_parameters:,}"),
            ("dense optimizer", ", ".join(f"{name} {value}" for name, value in made_by["optimizer"].items())),
            *_of_features(model.features),
        ],
    )


def _of_features(features: Features | int) -> list[tuple[str, str]]:
    """Return the features by type, the labels and the group."""
    if isinstance(features, int):
        return [("categories", str(features))]
    by_type: dict[str, list[str]] = {}
    for one in features.all:
        by_type.setdefault(one.type, []).append(one.name)
    found = {**by_type, "labels": list(features.tasks), "group": [features.group] if features.group else []}
    return [(name, ", ".join(names)) for name, names in found.items() if names]


def _facts(
    directory: StorageDir, model: Model | ClickModel, held_out: HeldOut | None, names: Mapping[int, str], top: int
) -> Facts:
    own = _of_model(model, names, top) if isinstance(model, Model) else _of_click(model)
    manifest = checkpoint.read_manifest(directory.child(files.read(directory).checkpoint))
    on_disk = sum(file.bytes for table in manifest.tables for file in table.files)
    stats = [table.stats() for table in model.tables]
    rows = stats[0].rows
    in_memory = sum(one.bytes for one in stats)
    passes = model.history.passes
    fits = model.history.fits
    settings = [
        ("model", model.kind),
        *own.settings,
        *(
            (
                f"table {table.name!r}",
                f"dim {table.dim}, {table.spec.dtype}, seed {table.seed}, {_rule(table.optimizer)}",
            )
            for table in model.tables
        ),
        ("slots", f"{manifest.slots:,}"),
        ("calibration", "no" if model.calibration is None else str(model.calibration)),
        *(fits[-1].settings() if fits else []),
        *([("fits before this one", _earlier(fits))] if len(fits) > 1 else []),
    ]
    examples = sum(done.metrics.examples for done in passes)
    positives = sum(done.metrics.base_rate * done.metrics.weight for done in passes if done.metrics.weight > 0)
    weight = sum(done.metrics.weight for done in passes)
    features = sum(done.features for done in passes)
    data = [
        *([("file", fits[-1].data)] if fits and fits[-1].data is not None else []),
        *([("validation data", fits[-1].valid)] if fits and fits[-1].valid is not None else []),
        *([] if held_out is None else [("held out", f"{held_out.name}, {held_out.metrics.examples:,} examples")]),
        ("format", model.format or "unknown"),
        *columns.schema_items(model.schema),
        ("passes", f"{len(passes):,}"),
        ("examples learned from", f"{model.examples:,}"),
        *([("positives", f"{100 * positives / weight:.2f} %")] if weight > 0 and not model.is_multiclass else []),
        *([("features per example", f"{features / examples:.1f}")] if features and examples else []),
        ("malformed lines skipped", f"{sum(done.skipped for done in passes):,}"),
        ("time of the passes", f"{sum(done.seconds for done in passes):,.1f} s"),
        ("rows", f"{rows:,}"),
        ("in memory", f"{in_memory:,} bytes" + (f", {in_memory / rows:.1f} per row" if rows else "")),
        ("on disk", f"{on_disk:,} bytes" + (f", {on_disk / rows:.1f} per row" if rows else "")),
    ]
    return Facts(
        title=directory.real().name or str(directory),
        subtitle=f"{model.kind}, {own.rule}, {model.examples:,} examples in {len(passes)} "
        f"{'pass' if len(passes) == 1 else 'passes'}",
        rows=rows,
        nonzero=own.nonzero,
        history=model.history,
        held_out=held_out,
        settings=settings,
        data=data,
        weights=own.weights,
        version=importlib.metadata.version("shoal"),
        calibration=None if model.calibration is None else str(model.calibration),
        classes=model.num_classes if model.is_multiclass else None,
    )


def _earlier(fits: Sequence[Fit]) -> str:
    last = fits[-1].settings()
    others = sum(fit.settings() != last for fit in fits[:-1])
    return f"{len(fits) - 1:,}, " + (f"{others:,} with other settings" if others else "with the same settings")


def _rule(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value:g}' for name, value in optimizer.params().items())})"
