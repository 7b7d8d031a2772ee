"""``shoal train ctr``: train a click model in PyTorch by a configuration.

The file says everything (shoal.torch.config, docs/ctr.md); what a run varies most has an option too, which wins.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shoal.base.interrupts import status_of
from shoal.cli.answers import DONE, Answer, complain
from shoal.cli.arguments import command, machine, open_reader
from shoal.cli.train import clustered, is_over, open_store, pass_lines, progressing, resuming, rows_of

if TYPE_CHECKING:
    from shoal.data import Reader
    from shoal.torch.config import Config
    from shoal.torch.logs import LogWriter
    from shoal.torch.trainer import ClickModel

EXAMPLES = """\
examples:
  $ shoal train ctr --config ctr.toml --out clicks          # docs/ctr.md has a whole configuration
  $ shoal train ctr --model dcnv2 --config ctr.toml --dim 8 --lr 0.0005 --out other

  after Ctrl-C or a crash, from the last checkpoint:
  $ shoal train ctr --config ctr.toml --out clicks --resume

  what came of it:
  $ shoal report clicks
  $ shoal evaluate --model clicks --data day_2.tsv

models: lr, fm, wide_deep, deepfm, dcnv2, dlrm, din, autoint. The directory holds a checkpoint after every pass (and
every N batches, with checkpoint_every = N in [output]), which is replaced at one moment. Ctrl-C and SIGTERM write one
too and end with status 130 and 143.
"""

# Options that stand for a key of the configuration.
_KEYS = {
    "model": ("model", "name"),
    "dim": ("model", "dim"),
    "train": ("data", "train"),
    "valid": ("data", "valid"),
    "format": ("data", "format"),
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "patience": ("train", "patience"),
    "seed": ("train", "seed"),
    "out": ("output", "dir"),
    "tensorboard": ("logging", "tensorboard"),
    "mlflow": ("logging", "mlflow"),
}


def add(kinds: Any) -> None:
    """Add the command below ``shoal train``."""
    ctr = command(kinds, "train ctr", "Train a click model in PyTorch: DeepFM, DCN-V2, DLRM, ...", EXAMPLES, train_ctr)
    ctr.add_argument("--config", required=True, metavar="FILE", help="what to learn from, and how: TOML")
    ctr.add_argument("--model", metavar="NAME", help="deepfm, dcnv2, ...: name in [model]")
    ctr.add_argument("--out", metavar="DIR", help="where the model goes, a path or s3://...: dir in [output]")
    ctr.add_argument("--resume", action="store_true", help="go on with the fit whose checkpoint is in DIR, if any")
    ctr.add_argument(
        "--allow-appended",
        action="store_true",
        help="with --resume: files may be longer now than when the fit was begun, and more may stand behind them",
    )
    ctr.add_argument("--overwrite", action="store_true", help="replace a model that is there")
    ctr.add_argument("--train", nargs="+", metavar="FILE", help="train in [data]")
    ctr.add_argument("--valid", nargs="+", metavar="FILE", help="valid in [data]")
    ctr.add_argument("--format", help="format in [data]")
    ctr.add_argument("--dim", type=int, metavar="D", help="floats of a row: dim in [model]")
    ctr.add_argument("--epochs", type=int, metavar="N", help="passes at most: epochs in [train]")
    ctr.add_argument("--batch-size", type=int, metavar="N", help="examples: batch_size in [train]")
    ctr.add_argument("--lr", type=float, help="learning rate of the dense part: lr of optimizer in [train]")
    ctr.add_argument("--patience", type=int, metavar="N", help="patience in [train]")
    ctr.add_argument("--seed", type=int, help="seed in [train]")
    ctr.add_argument("--tensorboard", metavar="DIR", help="tensorboard in [logging]")
    ctr.add_argument("--mlflow", metavar="URI", help="mlflow in [logging]")
    ctr.add_argument("--slots", type=int, default=1024, help="parts of the tables: any gives equal bits")
    progressing(ctr)
    machine(ctr)
    clustered(ctr)


def train_ctr(arguments: argparse.Namespace) -> Answer:
    """Train a click model."""
    try:
        import torch
    except ImportError:
        raise ValueError("click models take PyTorch: pip install 'shoal[torch]'") from None
    config = _configured(arguments)
    if config.output.dir is None:
        raise ValueError("the model needs a directory: pass --out DIR, or dir in [output]")
    if config.train.patience is not None and not config.data.valid:
        raise ValueError("patience needs held-out data: pass --valid, or valid in [data]")
    train = _reader(config, config.data.train)
    valid = _reader(config, config.data.valid) if config.data.valid else None
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads is {arguments.threads}: pass 1 or more")
        torch.set_num_threads(arguments.threads)
    with open_store(arguments) as store:
        from shoal.storage.base import remove_if_failed
        from shoal.storage.open import open_dir
        from shoal.torch.config import build

        model = build(config, store)
        with remove_if_failed(open_dir(config.output.dir)):
            return _trained(arguments, config, model, train, valid)


def _configured(arguments: argparse.Namespace) -> Config:
    from shoal.torch.config import read

    given = {key: value for name, key in _KEYS.items() if (value := getattr(arguments, name)) is not None}
    config = read(arguments.config, given)
    if arguments.lr is not None:
        given["train", "optimizer"] = {**config.train.optimizer, "lr": arguments.lr}
        config = read(arguments.config, given)
    return config


def _reader(config: Config, files: list[str]) -> Reader:
    data = config.data
    how = argparse.Namespace(batch_size=config.train.batch_size, on_error=data.on_error, parsers=data.reader_threads)
    return open_reader(files, data.format, how, config.schema())


def _writers(config: Config, *, resume: bool) -> list[LogWriter]:
    from shoal.storage.open import open_dir
    from shoal.torch.logs import MLflow, TensorBoard

    writers: list[LogWriter] = []
    if config.logging.tensorboard is not None:
        name = str(open_dir(config.output.dir or "run")).rstrip("/").rpartition("/")[2] or "run"
        writers.append(TensorBoard(config.logging.tensorboard, name, resume=resume))
    if config.logging.mlflow is not None:
        writers.append(MLflow(config.logging.mlflow, config.logging.experiment))
    return writers


def _trained(
    arguments: argparse.Namespace, config: Config, model: ClickModel, train: Reader, valid: Reader | None
) -> Answer:
    from shoal.models.fit_checkpoints import FitCheckpointer, FitFinishedError
    from shoal.models.plan import Plan
    from shoal.torch.trainer import fit

    settings = config.train
    plan = Plan(
        epochs=settings.epochs,
        shuffle=settings.shuffle,
        negative_rate=settings.negative_rate,
        warm_up=False,
        seed=settings.seed,
        patience=settings.patience,
        min_delta=settings.min_delta,
        metric=settings.metric,
    )
    assert config.output.dir is not None
    checkpointer = FitCheckpointer(
        model, config.output.dir, config.output.checkpoint_every, overwrite=arguments.overwrite
    )
    writers = _writers(config, resume=arguments.resume)
    interrupted: KeyboardInterrupt | None = None
    try:
        for writer in writers:
            writer.settings(_settings(config))
        fit(
            model,
            train,
            valid,
            plan,
            progress=arguments.progress if arguments.progress is not None else not arguments.quiet,
            checkpointer=checkpointer,
            resume=resuming(arguments),
            writers=writers,
            log_every=config.logging.log_every,
        )
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    except FitFinishedError:
        return is_over(model, config.output.dir)
    finally:
        for writer in writers:
            writer.close()
    if model.examples == 0:
        raise interrupted or ValueError(f"{train.why_empty()}: nothing was learned")
    if interrupted is not None:
        complain(f"interrupted after {model.examples:,} examples; --resume goes on from the checkpoint")
    facts = _facts(config, model, interrupted is not None)
    return Answer(_text(config, model), facts, DONE if interrupted is None else status_of(interrupted))


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


def _facts(config: Config, model: ClickModel, interrupted: bool) -> dict[str, Any]:
    return {
        "model": config.output.dir,
        "kind": config.model["name"],
        "interrupted": interrupted,
        "examples": model.examples,
        "fits": model.history.fits,
        "passes": model.history.passes,
        "best_pass": model.history.best_pass,
        "rows": {table.name: len(table) for table in model.tables},
        "bytes": sum(table.stats().bytes for table in model.tables),
        "dense_parameters": model.dense_parameters,
    }
