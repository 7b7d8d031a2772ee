"""``shoal train``: learn a model from a file, or many with a grid, and save it.

A kind of model has a parser of its own (``train lr``); reading, passes, metrics and saving are the same for all.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.interrupts import at_boundaries, status_of
from shoal.base.plural import counted
from shoal.cli.answers import DONE, Answer, complain
from shoal.cli.arguments import (
    FORMATS,
    admission,
    columns,
    command,
    expiry,
    format_of,
    machine,
    open_reader,
    reading,
    schema_of,
)

if TYPE_CHECKING:
    from shoal.cluster.worker.filters import Filters
    from shoal.consistency import Consistency
    from shoal.data import Reader
    from shoal.models import DBPG, GridResult, LogisticRegressionGrid, Model
    from shoal.models.fit_checkpoints import Resume
    from shoal.models.predictor import Predictor
    from shoal.storage.base import StoragePath
    from shoal.store.base import Store
    from shoal.table.stats import TableStats

EXAMPLES = """\
examples:
  $ shoal train lr --train train.libsvm --format libsvm --model first
  $ shoal train lr --help                   # all settings of logistic regression
  $ shoal train fm --help                   # and of factorization machines
  $ shoal train ctr --help                  # deep click models, with PyTorch
"""

LR_EXAMPLES = """\
examples:
  one pass over a click log, as is customary, measured on the next day:
  $ shoal train lr --train day_0.tsv --format criteo --valid day_1.tsv --alpha 0.05 --l1 1 --model ctr

  six settings in one pass, which parses and sorts the data once; the best on the next day is saved:
  $ shoal train lr --train day_0.tsv --format criteo --valid day_1.tsv \\
      --grid alpha=0.02,0.05,0.1 --grid l1=0,1 --model best

  a small file in small batches, shuffled, until two passes in a row are not better (.gz, .bz2 and .xz work too):
  $ shoal train lr --train train.libsvm.gz --format libsvm --valid test.libsvm \\
      --epochs 50 --patience 2 --shuffle --batch-size 256 --model small

  a table with a header, with the pairs of two columns as features, and standard input:
  $ shoal train lr --train ads_0.csv ads_1.csv --format csv --label click --numeric price --interactions site,user \\
      --model ads
  $ cat ads_0.csv | shoal train lr --train - --format csv --label click --model stream

  with a column in cents, and one of milliseconds, whose sizes the model learns too:
  $ shoal train lr --train ads_0.csv --format csv --label click --numeric price --normalized --model sizes

  a tenth of the negatives, each of which weighs ten times as much:
  $ shoal train lr --train day_0.tsv --format criteo --negative-rate 0.1 --model sampled

  with probabilities that come true, as fitted on held-out data:
  $ shoal train lr --train day_0.tsv --format criteo --valid day_1.tsv --calibrate isotonic --model sound

  with the progressive loss at the powers of two, as Vowpal Wabbit prints it, in place of the bar:
  $ shoal train lr --train train.libsvm --format libsvm --progress 2.0 --model told

  to the optimum of an L1 penalty instead, from examples that are held in memory:
  $ shoal train lr --train train.libsvm --format libsvm --solver dbpg --l1 2 --model sparse

  on a cluster, here one of this machine (on others: --cluster tcp://HOST:PORT --workers N, N times):
  $ shoal launch --servers 2 --workers 2 \\
      shoal train lr --cluster --train day_0.tsv --format criteo --model shared

  with fewer bytes on the wire, some of them rounded:
  $ shoal launch --servers 2 --workers 2 \\
      shoal train lr --cluster --train day_0.tsv --format criteo --model near --filter zeros,gradients=bfloat16

  rows only for what occurs twice, and none for what was not seen for 100,000 batches:
  $ shoal train lr --train day_0.tsv --format criteo --admit bloom:2:100000000 --expire ttl:100000 --model lean

  in place of the model that is there, leaving out malformed lines, for a script:
  $ shoal train lr --train day_0.tsv --format criteo --on-error skip --overwrite --model ctr --json --quiet

  with a checkpoint every 1000 batches; after a crash, a kill or Ctrl-C the same command goes on, to the same bits:
  $ shoal train lr --train day_0.tsv --format criteo --model long --every 1000 --resume

--model s3://bucket/long keeps the model, and checkpoints, on an object store; --train and --valid take such URLs too.
Ctrl-C and SIGTERM save what has been learned up to then, and end with status 130 and 143. A model that is there is
refused unless --overwrite is given, and is then replaced at the very end, at one moment; any other directory is never
written to.
A grid takes the memory of as many tables as it has settings. On a cluster every worker learns its share of the
examples; the first one measures --valid and saves.
"""

FM_EXAMPLES = """\
examples:
  eight factors a key, one pass over a click log, measured on the next day:
  $ shoal train fm --train day_0.tsv --format criteo --valid day_1.tsv --dim 8 --model pairs

  a small file in small batches, shuffled, until two passes in a row are not better:
  $ shoal train fm --train train.libsvm --format libsvm --valid test.libsvm --dim 4 --factors-lr 0.1 \\
      --epochs 50 --patience 2 --shuffle --batch-size 64 --model few

  factors that are held back, where there is little data for many keys:
  $ shoal train fm --train train.libsvm --format libsvm --factors-l2 0.03 --l2 1 --model careful

--alpha, --beta, --l1 and --l2 are FTRL's, for the linear weights; the factors have Adagrad. Ctrl-C and SIGTERM save
what has been learned up to then, and end with status 130 and 143.
"""


def add(commands: Any) -> Any:
    """Add the command, with one below it for each kind of model; return where other kinds may be added."""
    train = command(commands, "train", "Train a model on a file of examples.", EXAMPLES)
    kinds = train.add_subparsers(title="models", metavar="MODEL", required=True)
    lr = command(
        kinds, "train lr", "Train logistic regression by FTRL-Proximal and save it.", LR_EXAMPLES, _tidy(train_lr)
    )
    learning(lr)
    ftrl(lr)
    normalizing(lr)
    solving(lr)
    lifecycle(lr)
    lr.add_argument(
        "--grid",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=A,B,...",
        help="try these values of a setting (alpha, beta, l1, l2), with all combinations of those of other --grid",
    )
    lr.add_argument("--save-all", action="store_true", help="of a grid: each model, into a folder of DIR")
    columns(lr)
    reading(lr)
    machine(lr)
    clustered(lr)
    fm = command(kinds, "train fm", "Train a factorization machine and save it.", FM_EXAMPLES, _tidy(train_fm))
    learning(fm)
    ftrl(fm)
    normalizing(fm)
    lifecycle(fm)
    factors(fm)
    columns(fm)
    reading(fm)
    machine(fm)
    clustered(fm)
    return kinds


def learning(parser: argparse.ArgumentParser) -> None:
    """Add what all kinds of models take: data, passes, where the model goes."""
    parser.add_argument(
        "--train", required=True, nargs="+", metavar="FILE", help="what to learn from: files, patterns, URLs, or -"
    )
    parser.add_argument("--format", choices=FORMATS, help="of the files (default: guessed from a line and the name)")
    parser.add_argument("--valid", nargs="+", metavar="FILE", help="measured after every pass")
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="where the model goes, a path or s3://...; made if it is not there",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is there")
    parser.add_argument(
        "--every", type=int, metavar="N", help="write a checkpoint into DIR after every N batches and every pass"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the fit whose checkpoint is in DIR, if any")
    parser.add_argument(
        "--allow-appended",
        action="store_true",
        help="with --resume: files may be longer now than when the fit was begun, and more may stand behind them",
    )
    parser.add_argument(
        "--names", action="store_true", help="keep with the model what each key stood for; report and inspect show it"
    )
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="passes at most (default: %(default)s)")
    parser.add_argument(
        "--shuffle",
        type=int,
        nargs="?",
        const=True,
        default=False,
        metavar="K",
        help="shuffle among K batches that are held in memory (without K: 16)",
    )
    parser.add_argument(
        "--negative-rate", type=float, default=1.0, metavar="R", help="learn from this share of the negatives only"
    )
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="do not cut the first batches into smaller ones, which a model that knows little learns more from",
    )
    parser.add_argument(
        "--patience", type=int, metavar="N", help="stop when N passes in a row are not better on --valid than the best"
    )
    parser.add_argument(
        "--min-delta", type=float, default=0.0, metavar="D", help="better means by more than this (default: 0)"
    )
    parser.add_argument(
        "--metric", choices=("logloss", "auc"), default="logloss", help="what is better (default: logloss)"
    )
    parser.add_argument(
        "--calibrate",
        choices=("isotonic", "platt"),
        help="fit probabilities to --valid in the end, and save that with the model",
    )
    progressing(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of shuffle, sample and rounding of accumulators (default: %(default)s)"
    )
    parser.add_argument(
        "--slots", type=int, default=1024, help="parts of the table; any gives equal bits (default: 1024)"
    )


def progressing(parser: argparse.ArgumentParser) -> None:
    """Add how progress is shown."""
    parser.add_argument(
        "--progress",
        type=_step,
        metavar="STEP",
        help="lines in place of the bar: 100000 is every so many examples, 2.0 at the powers of two",
    )


def ftrl(parser: argparse.ArgumentParser) -> None:
    """Add the settings of FTRL."""
    parser.add_argument("--alpha", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--beta", type=float, default=1.0, help="slows the first steps (default: %(default)s)")
    parser.add_argument("--l1", type=float, default=0.0, help="weights with less evidence are 0 (default: %(default)s)")
    parser.add_argument("--l2", type=float, default=0.0, help="shrinks all weights (default: %(default)s)")


def normalizing(parser: argparse.ArgumentParser) -> None:
    """Add whether values are divided by their scales."""
    parser.add_argument(
        "--normalized",
        action="store_true",
        help="divide each value by the root mean square of its feature, learned and kept with the model: for numeric "
        "columns that are not about 1 in size",
    )


def solving(parser: argparse.ArgumentParser) -> None:
    """Add the solver, and the settings of the one that goes to the optimum."""
    group = parser.add_argument_group(
        "the solver",
        "dbpg holds the examples in memory and goes to the optimum of their losses' sum plus l1 times the weights' "
        "sizes; --alpha, --beta, --l2, --epochs, --shuffle and --patience have no meaning there.",
    )
    group.add_argument(
        "--solver", choices=("online", "dbpg"), default="online", help="how to learn (default: %(default)s)"
    )
    group.add_argument("--blocks", type=int, metavar="N", help="dbpg: parts of the features (default: 16)")
    group.add_argument("--delay", type=int, metavar="N", help="dbpg: blocks that a gradient may lag (default: 0)")
    group.add_argument(
        "--slack", type=float, metavar="S", help="dbpg: of the KKT filter, 0 to 1 (default: 0.1); below 0: no filter"
    )
    group.add_argument(
        "--tolerance", type=float, metavar="T", help="dbpg: stop when the violation has this share (default: 0.001)"
    )
    group.add_argument("--passes", type=int, metavar="N", help="dbpg: the most over all blocks (default: 100)")


def lifecycle(parser: argparse.ArgumentParser) -> None:
    """Add which keys get rows, and which rows go."""
    parser.add_argument(
        "--admit",
        type=admission,
        metavar="RULE",
        help="give a key its row after N occurrences: count:N, bloom:N:CAPACITY; or by chance: probability:P",
    )
    parser.add_argument(
        "--expire",
        action="append",
        default=[],
        type=expiry,
        metavar="RULE",
        help="at the end of a pass drop rows not seen for C batches: ttl:C; beyond so many: rows:N; with small "
        "weights: norm:F; with a low decayed count: score:DECAY:F; again for more",
    )


def factors(parser: argparse.ArgumentParser) -> None:
    """Add the settings of factors and of their Adagrad."""
    parser.add_argument("--dim", type=int, default=8, metavar="D", help="factors of a key (default: %(default)s)")
    parser.add_argument(
        "--factors-lr", type=float, default=0.02, metavar="LR", help="their learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--factors-n0",
        type=float,
        default=1.0,
        metavar="N0",
        help="where their sums of squares start: larger slows the first steps (default: %(default)s)",
    )
    parser.add_argument(
        "--factors-l2", type=float, default=0.0, metavar="L2", help="shrinks them (default: %(default)s)"
    )
    parser.add_argument(
        "--init-std", type=float, default=0.01, metavar="S", help="they start at random, this large (default: 0.01)"
    )


def clustered(parser: argparse.ArgumentParser) -> None:
    """Add what says where the tables live."""
    group = parser.add_argument_group(
        "on a cluster", "Each worker runs this command, and learns its share of the files."
    )
    group.add_argument(
        "--cluster",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="tcp://HOST:PORT of the scheduler, whose servers hold the tables (default: as the environment says)",
    )
    group.add_argument(
        "--consistency",
        type=_consistency,
        metavar="RULE",
        help="bsp (default): workers make each step together; ssp:N: up to N batches apart; asp: as they come",
    )
    group.add_argument("--workers", type=int, metavar="N", help="how many there are (default: as the environment says)")
    group.add_argument("--curve", metavar="DIR", help="keys of the cluster")
    group.add_argument(
        "--no-shared-storage",
        dest="shared_storage",
        action="store_const",
        const=False,
        help="the servers do not see the files of this machine: it writes and reads all rows itself",
    )
    group.add_argument(
        "--filter",
        action="append",
        type=_filter,
        metavar="NAME[=VALUE],...",
        help="send fewer bytes; exact: key-caching, zeros; unbiased: gradients=bfloat16 or float16, weights=the same, "
        "threshold=T",
    )


def open_store(arguments: argparse.Namespace) -> Store:
    """Open the store that holds the tables: of this process, or of a cluster."""
    from shoal.store.local import local

    if arguments.cluster is None:
        options = ("consistency", "workers", "curve", "filter", "shared_storage")
        given = [name.replace("shared_", "no-shared-") for name in options if getattr(arguments, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} is for a cluster: pass --cluster tcp://HOST:PORT too")
        return local(threads=arguments.threads, slots=arguments.slots)
    from shoal.cluster import connect
    from shoal.consistency import BSP

    wanted = [pair for pairs in arguments.filter or () for pair in pairs]
    names = [name for name, _ in wanted]
    if len(set(names)) < len(names):
        raise ValueError(f"--filter names {max(names, key=names.count).replace('_', '-')} twice: say it once")
    return connect(
        arguments.cluster or None,
        consistency=arguments.consistency or BSP(),
        workers=arguments.workers,
        threads=arguments.threads,
        curve=arguments.curve,
        filters=_filters(dict(wanted), arguments.seed or 0) if wanted else None,
        shared_storage=arguments.shared_storage is None,
    )


def train_lr(arguments: argparse.Namespace) -> Answer:
    """Train a logistic regression, or a grid of them."""
    from shoal.models import LogisticRegression, LogisticRegressionGrid
    from shoal.optim import FTRL

    solver = _solver(arguments)
    if solver is not None:
        train, how = _data(arguments, [arguments.model])
        with open_store(arguments) as store:
            return fitted(arguments, LogisticRegression(None, store, solver=solver, **_table_of(arguments)), train, how)
    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    if not arguments.grid:
        if arguments.save_all:
            raise ValueError("--save-all goes with --grid: one model is saved anyway")
        train, how = _data(arguments, [arguments.model])
        with open_store(arguments) as store:
            return fitted(arguments, LogisticRegression(optimizer, store, **_table_of(arguments)), train, how)
    if arguments.every is not None or arguments.resume:
        raise ValueError("--grid keeps no checkpoints: leave out --every and --resume")
    if arguments.admit or arguments.expire:
        raise ValueError("--grid has no --admit and --expire: find the setting first, then train it with them")
    values = dict(arguments.grid)
    if len(values) < len(arguments.grid):
        raise ValueError("--grid names a setting twice: give all its values at once, as in alpha=0.05,0.1")
    if arguments.cluster is not None:
        raise ValueError("--grid learns in one process: leave out --cluster, or train the best setting there")
    with open_store(arguments) as store:
        grid = LogisticRegressionGrid(values, optimizer, store, seed=arguments.seed, normalized=arguments.normalized)
        return _fitted_grid(arguments, grid)


def train_fm(arguments: argparse.Namespace) -> Answer:
    """Train a factorization machine."""
    from shoal.models import FactorizationMachine
    from shoal.optim import FTRL, Adagrad, Normal

    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    factors = Adagrad(lr=arguments.factors_lr, n0=arguments.factors_n0, weight_decay=arguments.factors_l2)
    init = Normal(arguments.init_std, seed=arguments.seed)
    train, how = _data(arguments, [arguments.model])
    with open_store(arguments) as store:
        model = FactorizationMachine(arguments.dim, optimizer, factors, init, store, **_table_of(arguments))
        return fitted(arguments, model, train, how)


def _tidy(run: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
    """Have a command that fails leave no empty directory where its model would be."""

    def tidy(arguments: argparse.Namespace) -> Answer:
        from shoal.storage.base import remove_if_failed
        from shoal.storage.open import open_dir

        with remove_if_failed(open_dir(arguments.model)):
            return run(arguments)

    return tidy


def fitted(arguments: argparse.Namespace, model: Model, train: Reader, how: dict[str, Any]) -> Answer:
    """Fit a model of any kind, save it, and tell how it went. Of several workers the first measures and saves."""
    from shoal.models import files
    from shoal.models.fit_checkpoints import FitFinishedError
    from shoal.storage.open import open_dir

    rank, workers = model.store.rank, model.store.num_workers
    if workers > 1:
        train = train.split(rank, workers)
        how = how | {"valid": how["valid"] if rank == 0 else None}
    resume = resuming(arguments)
    kept = arguments.every is not None or bool(resume)
    if kept:
        how = how | {
            "directory": arguments.model,
            "checkpoint_every": arguments.every,
            "resume": resume,
            "overwrite": arguments.overwrite,
        }
    elif rank == 0:
        model.store.check_storage(arguments.model)
    interrupted: KeyboardInterrupt | None = None
    over = False
    try:
        model.fit(train, **how)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    except FitFinishedError:
        over = True
    _check_learned(model.examples, train, interrupted)
    (told, facts), (more, filters) = _solved(model), _saved_bytes(model.store)
    told, facts = told + more, facts | filters
    if rank != 0:
        if interrupted is not None:
            complain(f"interrupted after {counted(model.examples, 'example')}; worker 0 saves the model")
        return Answer(
            "\n".join([*pass_lines(model), *told, *_names(train), f"{'model':<12} saved by worker 0 of {workers}"]),
            {
                "model": None,
                "worker": rank,
                "interrupted": interrupted is not None,
                "names": _named(train),
                **_learned(model),
                **facts,
            },
            _status(interrupted),
        )
    if over and (arguments.calibrate is None or files.read(arguments.model).calibration is not None):
        return is_over(model, arguments.model)
    interrupted = interrupted or _calibrate(arguments, [model], how["valid"])
    with _saving(interrupted) as stopped:
        target = arguments.model
        if not (kept and interrupted):
            target = model.save(target, overwrite=kept or arguments.overwrite, names=train.names)
    if interrupted and not kept:
        complain(
            f"interrupted after {counted(model.examples, 'example')}; the model of that moment is in {target}; a fit "
            "with --resume leaves a checkpoint there, to go on from"
        )
    elif interrupted and not files.is_model(open_dir(target)):
        complain(f"interrupted after {model.examples:,} examples, before a checkpoint was written in {target}")
    elif interrupted:
        complain(
            f"interrupted after {counted(model.examples, 'example')}; --resume goes on from the checkpoint in {target}"
        )
    return Answer(
        "\n".join([*pass_lines(model), *told, *_table(model), *_names(train), f"{'model':<12} {target}"]),
        {
            "model": str(target),
            "worker": rank,
            "interrupted": interrupted is not None,
            "names": _named(train),
            **_facts(model),
            **facts,
        },
        _status(stopped()),
    )


def resuming(arguments: argparse.Namespace) -> Resume:
    """Tell how a fit goes on, if it does."""
    if arguments.allow_appended and not arguments.resume:
        raise ValueError("--allow-appended is for a fit that goes on: pass --resume too")
    return "appended" if arguments.allow_appended else bool(arguments.resume)


@contextlib.contextmanager
def _saving(interrupted: KeyboardInterrupt | None) -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Let what a fit came to be saved before a first Ctrl-C or SIGTERM counts; one that came earlier was the first."""
    if interrupted is not None:
        yield lambda: interrupted
        return
    with at_boundaries() as stopped:
        yield stopped


def _status(interrupted: KeyboardInterrupt | None) -> int:
    return DONE if interrupted is None else status_of(interrupted)


def is_over(model: Predictor, directory: str) -> Answer:
    """Tell whoever starts a fit again until it is done that it is."""
    return Answer(
        f"the fit in {directory} is over already, after {counted(model.examples, 'example')}: nothing was learned now",
        {"model": directory, "interrupted": False, "over": True, "examples": model.examples},
    )


def _data(arguments: argparse.Namespace, targets: Sequence[StoragePath]) -> tuple[Reader, dict[str, Any]]:
    """Return what to learn from and how, after all that can be wrong before hours of training."""
    from shoal.data import FeatureNames
    from shoal.models import files

    if arguments.names and (arguments.every is not None or arguments.resume):
        raise ValueError("--names are known when a fit has read all of its data: leave out --every and --resume")
    for target in targets:
        files.check_target(target, overwrite=arguments.overwrite or arguments.resume)
    form = format_of(arguments, arguments.train)
    schema = schema_of(arguments)
    names = FeatureNames() if arguments.names else None
    train = open_reader(arguments.train, form, arguments, schema, names)
    valid = None if arguments.valid is None else open_reader(arguments.valid, form, arguments, schema)
    if arguments.patience is not None and valid is None:
        raise ValueError("--patience needs --valid: something to measure after each pass")
    if arguments.calibrate is not None and valid is None:
        raise ValueError("--calibrate needs --valid: examples that the model has not learned from")
    for target in targets:
        files.make_target(target)
    return train, {
        "valid": valid,
        "epochs": arguments.epochs,
        "shuffle": arguments.shuffle,
        "negative_rate": arguments.negative_rate,
        "warm_up": not arguments.no_warm_up,
        "seed": arguments.seed,
        "patience": arguments.patience,
        "min_delta": arguments.min_delta,
        "metric": arguments.metric,
        "progress": arguments.progress if arguments.progress is not None else not arguments.quiet,
    }


def _check_learned(examples: int, train: Reader, interrupted: KeyboardInterrupt | None) -> None:
    if examples == 0:
        raise interrupted or ValueError(f"{train.why_empty()}: nothing was learned")


def _calibrate(
    arguments: argparse.Namespace, models: Sequence[Model], valid: Reader | None
) -> KeyboardInterrupt | None:
    """Calibrate on the held-out data; what was measured on it before stays as it was. Returns what broke it off."""
    if arguments.calibrate is not None and valid is not None:
        try:
            for model in models:
                model.calibrate(valid, arguments.calibrate)
        except KeyboardInterrupt as interrupt:
            return interrupt
    return None


def pass_lines(model: Predictor) -> list[str]:
    """Tell of each pass of a model, and what was kept of them."""
    lines = []
    history = model.history
    # A solver makes hundreds of passes over the same examples: the last one tells where it came to.
    for done in history.passes if getattr(model, "solved", None) is None else history.passes[-1:]:
        rate = done.metrics.examples / max(done.seconds, 1e-9)
        kind = "progressive" if done.number == 1 else f"pass {done.number}"
        lines.append(f"{kind:<12} {done.metrics}, {rate:,.0f} examples/s")
        if done.skipped:
            lines.append(f"{'skipped':<12} {counted(done.skipped, 'malformed line')}")
        if done.valid is not None:
            lines.append(f"{'valid':<12} {done.valid}")
        if done.grouped is not None:
            of = f"{done.grouped.groups:,} groups, {done.grouped.left_out:,} of one class left out"
            lines.append(f"{'':<12} GAUC {done.grouped.gauc:.6f}  ({of})")
    if history.best_pass is not None:
        lines.append(
            f"{'kept':<12} the weights of pass {history.best_pass} of {len(history.passes)}, the best on --valid"
        )
    if model.calibration is not None:
        lines.append(f"{'calibrated':<12} on --valid by {model.calibration}, which the figures above are not")
    return lines


def _solved(model: Model) -> tuple[list[str], dict[str, Any]]:
    """Tell how the solver ended that goes to the optimum."""
    solved = getattr(model, "solved", None)
    if solved is None:
        return [], {}
    how = "the optimum" if solved.converged else "stopped before the optimum"
    return [
        f"{'solver':<12} {how}, after {counted(solved.passes, 'pass')}, violation {solved.violation:.3g} of the first; "
        f"{solved.sent:,} keys sent, {solved.passed_over:,} passed over"
    ], {"solved": solved._asdict()}


def _saved_bytes(store: Store) -> tuple[list[str], dict[str, Any]]:
    """Tell what filters saved, of this worker."""
    metrics: dict[str, dict[str, float]] = getattr(store, "filter_metrics", dict)()
    if not metrics:
        return [], {}
    kinds = ("key", "gradient", "weight")
    saved = {kind: sum(table.get(f"{kind}_bytes_saved", 0) for table in metrics.values()) for kind in kinds}
    total = ", ".join(f"{saved[kind] / 1e6:.1f} MB of {kind}s" for kind in kinds)
    return [f"{'filters':<12} saved this worker {total}"], {"filters": metrics}


def rows_of(stats: TableStats, dim: int) -> str:
    """Tell of a table's rows, and of their bytes: of few rows what all take, most of which is the table's own."""
    size = f"{stats.bytes_per_row:.1f} bytes each" if stats.rows >= _MANY_ROWS else f"{stats.bytes:,} bytes in all"
    return f"{counted(stats.rows, 'row')} of {dim}, {size}"


_MANY_ROWS = 10_000


def _table(model: Model) -> list[str]:
    lines = []
    for table in model.tables:
        stats = table.stats()
        lines.append(f"{'table':<12} {rows_of(stats, table.dim)}")
    nonzero = len(model.weights()[0])
    lines.append(f"{'weights':<12} {nonzero:,} are not zero, bias {model.bias:.4f}")
    return lines


def _named(train: Reader) -> int | None:
    return None if train.names is None else len(train.names)


def _names(train: Reader) -> list[str]:
    if train.names is None:
        return []
    full = ", the most that are kept" if train.names.full else ""
    return [f"{'names':<12} {len(train.names):,} features{full}"]


def _learned(model: Model) -> dict[str, Any]:
    return {
        "examples": model.examples,
        "fits": model.history.fits,
        "passes": model.history.passes,
        "best_pass": model.history.best_pass,
    }


def _facts(model: Model) -> dict[str, Any]:
    stats = [table.stats() for table in model.tables]
    return _learned(model) | {
        "rows": stats[0].rows,
        "bytes": sum(one.bytes for one in stats),
        "nonzero_weights": len(model.weights()[0]),
        "bias": model.bias,
        "calibration": None if model.calibration is None else model.calibration.to_dict()["kind"],
    }


# ---- a grid ----------------------------------------------------------------------------------------------------------


def _fitted_grid(arguments: argparse.Namespace, grid: LogisticRegressionGrid) -> Answer:
    from shoal.storage.open import open_dir

    target = open_dir(arguments.model)
    folders = [target.child(_name(settings)) for settings in grid.settings] if arguments.save_all else [target]
    train, how = _data(arguments, folders)
    interrupted: KeyboardInterrupt | None = None
    try:
        grid.fit(train, **how)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    _check_learned(grid.examples, train, interrupted)
    results = grid.results(arguments.metric)
    saved = results if arguments.save_all else results[:1]
    where = [target.child(_name(result.settings)) if arguments.save_all else target for result in saved]
    interrupted = interrupted or _calibrate(arguments, [result.model for result in saved], how["valid"])
    with _saving(interrupted) as stopped:
        for result, folder in zip(saved, where, strict=True):
            result.model.save(folder, overwrite=arguments.overwrite, names=train.names)
    if interrupted:
        complain(f"interrupted after {grid.examples:,} examples; the models of that moment are in {target}")
    best = results[0]
    lines = [
        *_results(results),
        "",
        f"{'best':<12} {_name(best.settings)}",
        *pass_lines(best.model),
        *_table(best.model),
    ]
    lines += _names(train)
    lines.append(f"{'model':<12} {where[0]}" if len(where) == 1 else f"{'models':<12} {target}, one folder each")
    facts = [
        {
            "settings": result.settings,
            "model": str(where[i]) if i < len(where) else None,
            "progressive": result.progressive,
            "valid": result.valid,
            **_facts(result.model),
        }
        for i, result in enumerate(results)
    ]
    return Answer(
        "\n".join(lines),
        {
            "model": str(where[0]),
            "interrupted": interrupted is not None,
            "names": _named(train),
            "examples": grid.examples,
            "grid": facts,
        },
        _status(stopped()),
    )


def _results(results: Sequence[GridResult]) -> list[str]:
    """Lay the results out as a table, the best first."""
    names = list(results[0].settings)
    rows = [[*names, "logloss", "AUC", "valid logloss", "valid AUC", "weights"]]
    for result in results:
        valid = ["", ""] if result.valid is None else [f"{result.valid.logloss:.6f}", f"{result.valid.auc:.6f}"]
        rows.append(
            [
                *(_number(value) for value in result.settings.values()),
                f"{result.progressive.logloss:.6f}",
                f"{result.progressive.auc:.6f}",
                *valid,
                f"{len(result.model.weights()[0]):,}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _name(settings: dict[str, float]) -> str:
    """Name settings as one word: alpha=0.05,l1=1."""
    return ",".join(f"{name}={_number(value)}" for name, value in settings.items())


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _setting(text: str) -> tuple[str, list[float]]:
    """Read alpha=0.05,0.1."""
    name, equals, values = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting with numbers: write it as alpha=0.05,0.1") from None


def _solver(arguments: argparse.Namespace) -> DBPG | None:
    """Return the solver that goes to the optimum, if that is wanted."""
    from shoal.models import DBPG

    given = {name: value for name in _OF_DBPG if (value := getattr(arguments, name)) is not None}
    if arguments.solver == "online":
        if given:
            raise ValueError(f"--{next(iter(given))} is for --solver dbpg")
        return None
    for name, usual in {"grid": [], "alpha": 0.1, "beta": 1.0, "l2": 0.0}.items():
        if getattr(arguments, name) != usual:
            raise ValueError(f"--{name} is for the online solver: leave it out with --solver dbpg")
    for name, usual in {"epochs": 1, "shuffle": False, "patience": None}.items():
        if getattr(arguments, name) != usual:
            raise ValueError(f"--solver dbpg stops by itself: pass --passes and --tolerance in place of --{name}")
    if arguments.normalized:
        raise ValueError("--normalized is for the online solver: leave it out with --solver dbpg")
    if given.get("slack", 0) < 0:
        given["slack"] = None
    return DBPG(l1=arguments.l1, **given)


_OF_DBPG = ("blocks", "delay", "slack", "tolerance", "passes")


def _filter(text: str) -> list[tuple[str, str]]:
    """Read key-caching,zeros,gradients=bfloat16,threshold=0.1."""
    pairs = []
    for each in text.split(","):
        name, equals, value = each.partition("=")
        if bool(equals) != (name in ("gradients", "weights", "threshold")) or name not in _FILTERS:
            raise argparse.ArgumentTypeError(
                f"{each!r} is no filter: pass key-caching, zeros, gradients=bfloat16, weights=bfloat16 or threshold=0.1"
            )
        pairs.append((name.replace("-", "_"), value))
    return pairs


_FILTERS = ("key-caching", "zeros", "gradients", "weights", "threshold")


def _filters(wanted: dict[str, str], seed: int) -> Filters:
    from shoal.cluster.worker.filters import Filters

    how: dict[str, Any] = {name: value or True for name, value in wanted.items()}
    if "threshold" in how:
        try:
            how["threshold"] = float(how["threshold"])
        except ValueError:
            raise ValueError(f"--filter threshold={how['threshold']} is no number") from None
    return Filters(seed=seed, **how)


def _table_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "admit": arguments.admit,
        "expire": arguments.expire,
        "normalized": arguments.normalized,
    }


def _consistency(text: str) -> Consistency:
    """Read bsp, ssp:4 or asp."""
    from shoal.consistency import ASP, BSP, SSP

    name, colon, staleness = text.partition(":")
    if (name, colon) in (("bsp", ""), ("asp", "")):
        return BSP() if name == "bsp" else ASP()
    if (name, colon) == ("ssp", ":") and staleness.isascii() and staleness.isdigit():
        return SSP(int(staleness))
    raise argparse.ArgumentTypeError(f"{text!r} is none of bsp, ssp:N (such as ssp:4) and asp")


def _step(text: str) -> int | float:
    """Read an int or, with a point in it, a float that may be passed to `shoal.metrics.Progressive`."""
    from shoal.metrics import Progressive

    try:
        step = float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: pass 100000, or a factor as 2.0") from None
    try:
        Progressive(step)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return step
