"""The trackers of ``shoal train``, made from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.cli.options import option
from shoal.config import LoggingConfig

if TYPE_CHECKING:
    from shoal.storage.base import StoragePath
    from shoal.tracking import Tracker


def check_logging(config: LoggingConfig) -> None:
    """Raise ValueError if a setting has no effect without another one."""
    usual = LoggingConfig()
    changed = [name for name in LoggingConfig.__struct_fields__ if getattr(config, name) != getattr(usual, name)]
    for name in changed:
        shown = "--no-log-model" if name == "log_model" else option(name)
        if name in ("experiment", "register", "log_model") and config.mlflow is None:
            raise ValueError(f"{shown} requires --mlflow")
        if name == "log_every" and config.mlflow is None and config.tensorboard is None:
            raise ValueError(f"{shown} requires --mlflow or --tensorboard")


def make_trackers(
    config: LoggingConfig, output: StoragePath, *, settings: Mapping[str, Any] | None = None, resume: bool = False
) -> list[Tracker]:
    """Make the trackers; their runs have the name of the output directory."""
    if config.tensorboard is None and config.mlflow is None:
        return []
    from shoal.storage.open import open_dir
    from shoal.tracking import MLflow, TensorBoard

    name = str(open_dir(output)).rstrip("/").rpartition("/")[2] or "run"
    more: dict[str, Any] = {"settings": settings, "resume": resume, "log_every": config.log_every}
    made: list[Tracker] = []
    if config.tensorboard is not None:
        made.append(TensorBoard(config.tensorboard, name, **more))
    if config.mlflow is not None:
        kept: dict[str, Any] = {"register": config.register, "log_model": config.log_model}
        made.append(MLflow(config.mlflow, config.experiment, name, **kept, **more))
    return made
