"""What ``shoal train`` takes in addition to the configuration of a run: what is asked of one run only."""

from __future__ import annotations

from typing import Annotated

from shoal.base.settings import Setting
from shoal.cli.options import Imports
from shoal.config import Dir, LogFormat, TrainConfig


class TrainOptions(TrainConfig, frozen=True, kw_only=True):
    """The options of ``shoal train``."""

    resume: Annotated[
        bool | str,
        "continue the fit whose checkpoint is in the output directory, if there is one; appended: also if files have "
        "grown, or further files follow them, since it started",
        Setting(metavar="appended", const=True, in_file=False),
    ] = False
    init_from: Annotated[
        Dir | None,
        "begin with the weights of a model of the same architecture, and the state of optimizers that are the same",
        Setting(models=("ctr",), in_file=False),
    ] = None
    import_: Annotated[Imports, Setting(models=("ctr",))] = ()
    overwrite: Annotated[bool, "replace an existing model", Setting(in_file=False)] = False
    progress: Annotated[
        int | float | None,
        "print lines instead of a progress bar: every STEP examples (100000), or at powers of STEP (2.0)",
        Setting(metavar="STEP", in_file=False, check="shoal.metrics:Progressive"),
    ] = None
    grid: Annotated[
        tuple[str, ...],
        "values of a setting to try, in all combinations with the other --grid options: alpha, beta, l1 or l2 of lr; "
        "of ctr a key such as model.dropout or tables.optimizer.lr",
        Setting(metavar="NAME=A,B", models=("lr", "ctr"), in_file=False, check="shoal.cli.train_grid:parse_values"),
    ] = ()
    save_all: Annotated[
        bool,
        "with --grid: save every model, each to a subdirectory of the output directory",
        Setting(models=("lr", "ctr"), in_file=False),
    ] = False
    log_format: LogFormat = None
    json: Annotated[bool, "print one JSON object on standard output instead of text", Setting(in_file=False)] = False
    quiet: Annotated[bool, "print neither progress nor text", Setting(in_file=False)] = False
