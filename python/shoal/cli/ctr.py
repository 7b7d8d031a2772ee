"""``shoal train ctr``: train a click-through-rate model in PyTorch from a configuration file.

The file has all settings (`shoal.torch.config`, docs/ctr.md). Frequently varied settings have an option, which
overrides the file.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from shoal.base.interrupts import status_of
from shoal.base.logs import is_json
from shoal.cli.answers import DONE, Answer, warn
from shoal.cli.arguments import command, log_options, machine, open_reader
from shoal.cli.tracking import make_trackers, tracking_options
from shoal.cli.train import open_store, repeated, resuming
from shoal.cli.train_options import (
    add_cluster_options,
    add_progress_option,
    add_resume_options,
    add_tracking_options,
    parse_model_grid,
)
from shoal.cli.train_run import check_saver, describe_columns, exit_status, keeping_what_was_learned, saving
from shoal.cli.train_summary import (
    finished_already,
    fit_facts,
    grid_lines,
    pass_lines,
    rows_of,
    settings_name,
)

if TYPE_CHECKING:
    from shoal.data import Reader
    from shoal.torch.click_model import ClickModel
    from shoal.torch.config import Config

EXAMPLES = """\
examples:
  $ shoal train ctr --config ctr.toml --output clicks          # docs/ctr.md has a complete configuration
  $ shoal train ctr --config ctr.toml --architecture dcnv2 --dim 8 --lr 0.0005 --output other

  on two workers and two servers; [train] dense = "servers" keeps the dense part on the servers:
  $ shoal launch --servers 2 --workers 2 shoal train ctr --cluster --config ctr.toml --output shared

  a model for each combination of settings, trained in one pass; the best one is saved:
  $ shoal train ctr --config ctr.toml --grid dim=4,8 --grid lr=0.0005,0.001 --grid model.dropout=0,0.2 --output best

  continue after Ctrl-C or a crash from the last checkpoint:
  $ shoal train ctr --config ctr.toml --output clicks --resume

  use the result:
  $ shoal report clicks
  $ shoal evaluate clicks --data day_2.tsv

architectures: lr, fm, wide_deep, deepfm, dcnv2, dlrm, din, autoint. The command writes a checkpoint to the output
directory after every pass, and every N batches with checkpoint_every = N in [output]. Ctrl-C and SIGTERM also write
one; the exit status is then 130 or 143. On a cluster each worker trains on its split of the examples and worker 0 saves
the model; Ctrl-C then writes no checkpoint: the last one remains.
"""

# Options that override a key of the configuration.
_KEYS = {
    "architecture": ("model", "name"),
    "dim": ("model", "dim"),
    "data": ("data", "train"),
    "valid": ("data", "valid"),
    "format": ("data", "format"),
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "patience": ("train", "patience"),
    "seed": ("train", "seed"),
    "output": ("output", "dir"),
}


def add(kinds: Any) -> None:
    """Add the command below ``shoal train``."""
    ctr = command(
        kinds,
        "train ctr",
        "Train a click-through-rate model in PyTorch: DeepFM, DCN-V2, DLRM, ...",
        EXAMPLES,
        repeated(train_ctr),
    )
    ctr.add_argument("--config", required=True, metavar="FILE", help="configuration in TOML: data, model, training")
    ctr.add_argument("--architecture", metavar="NAME", help="deepfm, dcnv2, ...: name in [model]")
    ctr.add_argument("--output", metavar="DIR", help="directory of the model, a path or s3://...: dir in [output]")
    add_resume_options(ctr)
    ctr.add_argument("--data", nargs="+", metavar="FILE", help="training examples: train in [data]")
    ctr.add_argument("--valid", nargs="+", metavar="FILE", help="validation examples: valid in [data]")
    ctr.add_argument("--format", help="format of the files: format in [data]")
    ctr.add_argument("--dim", type=int, metavar="D", help="dimension of the embeddings: dim in [model]")
    ctr.add_argument("--epochs", type=int, metavar="N", help="maximum number of passes: epochs in [train]")
    ctr.add_argument("--batch-size", type=int, metavar="N", help="examples per batch: batch_size in [train]")
    ctr.add_argument("--lr", type=float, help="learning rate of the dense parameters: lr of optimizer in [train]")
    ctr.add_argument(
        "--patience", type=int, metavar="N", help="stop after N passes without an improvement: patience in [train]"
    )
    ctr.add_argument("--seed", type=int, help="seed of the fit: seed in [train]")
    ctr.add_argument(
        "--slots",
        type=int,
        default=1024,
        help="slots of the tables; results do not depend on the number (default: 1024)",
    )
    ctr.add_argument(
        "--grid",
        action="append",
        default=[],
        type=parse_model_grid,
        metavar="NAME=A,B,...",
        help="values of a setting to try, in all combinations with the other --grid options: architecture, dim, lr, or "
        "a path such as model.dropout, tables.optimizer.lr",
    )
    ctr.add_argument(
        "--save-all", action="store_true", help="with --grid: save every model, each to a subdirectory of DIR"
    )
    add_progress_option(ctr)
    add_tracking_options(ctr)
    machine(ctr)
    log_options(ctr, "worker")
    add_cluster_options(ctr)


def train_ctr(arguments: argparse.Namespace) -> Answer:
    """Train a click-through-rate model."""
    try:
        import torch
    except ImportError:
        raise ValueError("click-through-rate models require PyTorch: pip install 'shoal[torch]'") from None
    config = _configured(arguments)
    if config.output.dir is None:
        raise ValueError("the model needs a directory: pass --output DIR, or set dir in [output]")
    if config.train.patience is not None and not config.data.valid:
        raise ValueError("patience requires validation data: pass --valid, or set valid in [data]")
    train = open_config_reader(config, config.data.train)
    if not arguments.quiet:
        describe_columns(train, 'ignore = ["{}"] in [data]')
    valid = open_config_reader(config, config.data.valid) if config.data.valid else None
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads is {arguments.threads}: pass 1 or more")
        torch.set_num_threads(arguments.threads)
    if arguments.grid:
        return _trained_grid(arguments, config, train, valid)
    if arguments.save_all:
        raise ValueError("--save-all requires --grid")
    with open_store(arguments) as store:
        from contextlib import nullcontext

        from shoal.storage.base import remove_if_failed
        from shoal.storage.open import open_dir
        from shoal.torch.config import build

        model = build(config, store)
        with remove_if_failed(open_dir(config.output.dir)) if store.rank == 0 else nullcontext():
            return _trained(arguments, config, model, train, valid)


def _configured(arguments: argparse.Namespace) -> Config:
    from shoal.torch.config import read

    given = {key: value for name, key in _KEYS.items() if (value := getattr(arguments, name)) is not None}
    config = read(arguments.config, given)
    logging = _logging(config)
    given |= {("logging", name): value for name, value in tracking_options(arguments, logging).items()}
    config = read(arguments.config, given)
    if arguments.lr is not None:
        given["train", "optimizer"] = {**config.train.optimizer, "lr": arguments.lr}
        config = read(arguments.config, given)
    return config


def open_config_reader(config: Config, files: Any) -> Reader:
    """Create the reader of files in the format and with the columns of a configuration."""
    data = config.data
    how = argparse.Namespace(
        batch_size=config.train.batch_size, on_error=data.on_error, reader_threads=data.reader_threads
    )
    return open_reader(files, data.format, how, config.schema())


def _trained(
    arguments: argparse.Namespace, config: Config, model: ClickModel, train: Reader, valid: Reader | None
) -> Answer:
    from shoal.models import Checkpointing
    from shoal.models.fit_checkpoints import FitFinishedError

    assert config.output.dir is not None
    target = config.output.dir
    rank, workers = model.store.rank, model.store.num_workers
    if workers > 1:
        train = train.split(rank, workers)
        valid = None if valid is None else valid.split(rank, workers)
    trackers = (
        make_trackers(
            _logging(config),
            target,
            settings=_settings(config),
            resume=arguments.resume,
        )
        if rank == 0
        else []
    )
    interrupted: KeyboardInterrupt | None = None
    try:
        with contextlib.ExitStack() as runs, keeping_what_was_learned(lambda: [(model, target)]):
            model.fit(
                train,
                valid=valid,
                epochs=config.train.epochs,
                shuffle=config.train.shuffle,
                progress=arguments.progress if arguments.progress is not None else not (arguments.quiet or is_json()),
                checkpoint=Checkpointing(
                    target,
                    every=config.output.checkpoint_every,
                    resume=resuming(arguments),
                    overwrite=arguments.overwrite,
                ),
                early_stopping=config.train.early_stopping,
                callbacks=[runs.enter_context(tracker) for tracker in trackers],
            )
            for tracker in trackers:
                tracker.model_saved(target)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    except FitFinishedError:
        return finished_already(model, target)
    if model.examples == 0:
        raise interrupted or ValueError(f"{train.why_empty()}: the model was not trained")
    if interrupted is not None:
        warn(f"interrupted after {model.examples:,} examples; --resume continues from the checkpoint")
    status = DONE if interrupted is None else status_of(interrupted)
    facts = {"worker": rank, **fit_facts(model), "interrupted": interrupted is not None, "kind": config.model["name"]}
    if rank != 0:
        check_saver(model.store)
        lines = [f"{'model':<12} worker 0 of {workers} saves it"]
        return Answer("\n".join(lines), {"model": None, **facts}, status)
    return Answer(_text(config, model), facts | _model_facts(config, model), status)


def _trained_grid(arguments: argparse.Namespace, config: Config, train: Reader, valid: Reader | None) -> Answer:
    """Train a model for each combination of settings; save the best, or all."""
    from shoal.models import files
    from shoal.storage.open import open_dir
    from shoal.torch.grid import ClickModelGrid

    if config.output.checkpoint_every is not None or arguments.resume:
        raise ValueError("--grid writes no checkpoints: leave out --resume, and checkpoint_every in [output]")
    if arguments.cluster is not None:
        raise ValueError("--grid trains in one process: leave out --cluster, or train the best setting on the cluster")
    values = dict(arguments.grid)
    if len(values) < len(arguments.grid):
        raise ValueError("--grid names a setting twice: give all its values at once, as in dim=4,8")
    assert config.output.dir is not None
    target = open_dir(config.output.dir)
    progress = arguments.progress if arguments.progress is not None else not (arguments.quiet or is_json())
    interrupted: KeyboardInterrupt | None = None
    with ClickModelGrid(config, values, threads=arguments.threads, slots=arguments.slots) as grid:
        places = [target.child(settings_name(one)) if arguments.save_all else target for one in grid.settings]
        for place in places:
            files.check_target(place, overwrite=arguments.overwrite)
        try:
            grid.fit(train, valid=valid, progress=progress)
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
        if grid.examples == 0:
            raise interrupted or ValueError(f"{train.why_empty()}: nothing was learned")
        results = grid.results(config.train.metric)
        saved = results if arguments.save_all else results[:1]
        where = [target.child(settings_name(one.settings)) if arguments.save_all else target for one in saved]
        with saving(interrupted) as stopped:
            for result, place in zip(saved, where, strict=True):
                result.model.save(place, overwrite=arguments.overwrite)
                settings = _settings(grid.configs[grid.settings.index(result.settings)])
                for tracker in make_trackers(_logging(config), place, settings=settings):
                    tracker.log_fitted(result.model, place)
        if interrupted:
            warn(f"interrupted after {grid.examples:,} examples; the models as trained so far are in {target}")
        best = results[0]
        lines = [
            *grid_lines(results, "dense parameters", lambda model: model.dense_parameters),
            "",
            f"{'best':<12} {settings_name(best.settings)}",
            *pass_lines(best.model),
            f"{'model':<12} {where[0]}" if len(where) == 1 else f"{'models':<12} {target}, one folder each",
        ]
        facts = [
            {
                "settings": result.settings,
                "model": str(where[i]) if i < len(where) else None,
                "progressive": result.progressive,
                "valid": result.valid,
                "dense_parameters": result.model.dense_parameters,
                **fit_facts(result.model),
            }
            for i, result in enumerate(results)
        ]
        whole = {
            "model": str(where[0]),
            "interrupted": interrupted is not None,
            "examples": grid.examples,
            "grid": facts,
        }
        return Answer("\n".join(lines), whole, exit_status(stopped()))


def _logging(config: Config) -> dict[str, Any]:
    import msgspec

    logging: dict[str, Any] = msgspec.to_builtins(config.logging)
    return logging


def _settings(config: Config) -> dict[str, Any]:
    """Flatten the configuration for logs: "train.epochs" and so on."""
    import msgspec

    flat: dict[str, Any] = {}
    for section, values in msgspec.to_builtins(config).items():
        for name, value in values.items():
            if value not in (None, [], {}):
                flat[f"{section}.{name}"] = value
    return flat


def _text(config: Config, model: ClickModel) -> str:
    lines = pass_lines(model)
    for table in model.tables:
        stats = table.stats()
        lines.append(f"{'table':<12} {table.name}: {rows_of(stats, table.dim)}")
    lines.append(f"{'dense':<12} {model.dense_parameters:,} parameters of {config.model['name']}")
    lines.append(f"{'model':<12} {config.output.dir}")
    return "\n".join(lines)


def _model_facts(config: Config, model: ClickModel) -> dict[str, Any]:
    """Return the facts of the worker that saves the model."""
    return {
        "model": config.output.dir,
        "rows": {table.name: len(table) for table in model.tables},
        "bytes": sum(table.stats().bytes for table in model.tables),
        "dense_parameters": model.dense_parameters,
    }
