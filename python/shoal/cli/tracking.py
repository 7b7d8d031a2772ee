"""The trackers of ``shoal train``, made from its options or from a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.storage.base import StoragePath
    from shoal.tracking import Tracker

_OF_MLFLOW = ("experiment", "register", "log_model")


def tracking_options(arguments: argparse.Namespace, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of tracking that were given, in addition to ``others``, which a configuration has."""
    names = ("tensorboard", "mlflow", *_OF_MLFLOW, "log_every")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    chosen = {name for name in ("mlflow", "tensorboard") if (given.get(name) or (others or {}).get(name)) is not None}
    for name in given:
        option = "--no-log-model" if name == "log_model" else f"--{name.replace('_', '-')}"
        if name in _OF_MLFLOW and "mlflow" not in chosen:
            raise ValueError(f"{option} requires --mlflow")
        if name == "log_every" and not chosen:
            raise ValueError(f"{option} requires --mlflow or --tensorboard")
    return given


def make_trackers(
    options: Mapping[str, Any], output: StoragePath, *, settings: Mapping[str, Any] | None = None, resume: bool = False
) -> list[Tracker]:
    """Make the trackers; their runs have the name of the output directory."""
    if options.get("tensorboard") is None and options.get("mlflow") is None:
        return []
    from shoal.storage.open import open_dir
    from shoal.tracking import MLflow, TensorBoard

    name = str(open_dir(output)).rstrip("/").rpartition("/")[2] or "run"
    more: dict[str, Any] = {"settings": settings, "resume": resume, "log_every": options.get("log_every", 100)}
    made: list[Tracker] = []
    if options.get("tensorboard") is not None:
        made.append(TensorBoard(options["tensorboard"], name, **more))
    if options.get("mlflow") is not None:
        given = {key: options[key] for key in _OF_MLFLOW if key in options}
        made.append(MLflow(options["mlflow"], name=name, **given, **more))
    return made
