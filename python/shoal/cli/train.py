"""``shoal train lr`` and ``shoal train fm``: train a model, or a grid of models, and save the result.

Each kind of model has a parser of its own; reading, passes, metrics and saving are the same for all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.base.interrupts import at_boundaries
from shoal.base.plural import counted
from shoal.cli.answers import DONE, Answer, warn
from shoal.cli.arguments import (
    columns,
    command,
    log_options,
    machine,
    reading,
)
from shoal.cli.tracking import make_trackers, tracking_options
from shoal.cli.train_grid import fitted_grid
from shoal.cli.train_options import (
    add_class_options,
    add_cluster_options,
    add_factor_options,
    add_fit_options,
    add_ftrl_options,
    add_lifecycle_options,
    add_normalized_option,
    add_solver_options,
    add_tracking_options,
    parse_grid,
)
from shoal.cli.train_run import (
    calibrate,
    check_learned,
    check_saver,
    choose_normalized,
    exit_status,
    keeping_what_was_learned,
    make_room,
    name_features,
    names_later,
    saving,
    training_data,
)
from shoal.cli.train_summary import (
    count_names,
    filter_summary,
    finished_already,
    fit_facts,
    model_facts,
    name_lines,
    pass_lines,
    solver_summary,
    table_lines,
)

if TYPE_CHECKING:
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.filters import Filters
    from shoal.data import Reader
    from shoal.models import DBPG, Model
    from shoal.models.fit_checkpoints import Resume
    from shoal.models.multiclass import MultiClass
    from shoal.store.base import Store

EXAMPLES = """\
examples:
  $ shoal train lr --data train.libsvm --format libsvm --output first
  $ shoal train lr --help                   # logistic regression
  $ shoal train fm --help                   # factorization machines
  $ shoal train ctr --help                  # deep click-through-rate models in PyTorch
"""

LR_EXAMPLES = """\
examples:
  one pass over a click log, validated on the next day:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv --alpha 0.05 --l1 1 --output ctr

  six settings in one pass, which parses the data once; the best on the next day is saved:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv \\
      --grid alpha=0.02,0.05,0.1 --grid l1=0,1 --output best

  a small file in shuffled small batches, until two passes bring no improvement (.gz, .bz2 and .xz work too):
  $ shoal train lr --data train.libsvm.gz --format libsvm --valid test.libsvm \\
      --epochs 50 --patience 2 --shuffle --batch-size 256 --output small

  CSV with a header, with the pairs of two columns as features; and standard input:
  $ shoal train lr --data ads_0.csv ads_1.csv --format csv --label click --numeric price --interactions site,user \\
      --output ads
  $ cat ads_0.csv | shoal train lr --data - --format csv --label click --output stream

  numeric columns as they are: by default each value is divided by the root mean square of its column, so that columns
  of any scale are learned; --ignore leaves columns out:
  $ shoal train lr --data ads_0.csv --format csv --label click --numeric price --no-normalized --ignore user \\
      --output sizes

  a tenth of the negative examples, with ten times the weight:
  $ shoal train lr --data day_0.tsv --format criteo --negative-rate 0.1 --output sampled

  with probabilities calibrated on the validation data:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv --calibrate isotonic --output sound

  with the progressive loss at powers of two, as Vowpal Wabbit prints it, instead of a progress bar:
  $ shoal train lr --data train.libsvm --format libsvm --progress 2.0 --output lines

  of five classes, whose numbers 0 to 4 are the labels:
  $ shoal train lr --data stars.csv --format csv --label stars --classes 5 --output stars

  to convergence under an L1 penalty, with the examples in memory:
  $ shoal train lr --data train.libsvm --format libsvm --solver dbpg --l1 2 --output sparse

  on a cluster of processes on this machine (several machines: run N times with --cluster tcp://HOST:PORT --workers N):
  $ shoal launch --servers 2 --workers 2 \\
      shoal train lr --cluster --data day_0.tsv --format criteo --output shared

  with compressed messages:
  $ shoal launch --servers 2 --workers 2 \\
      shoal train lr --cluster --data day_0.tsv --format criteo --output near --filter zeros,gradients=bfloat16

  rows only for keys that occur twice, removed when they are not used for 100,000 batches:
  $ shoal train lr --data day_0.tsv --format criteo --admit bloom:2:100000000 --expire ttl:100000 --output lean

  for scripts: replace the model, skip malformed lines, print JSON:
  $ shoal train lr --data day_0.tsv --format criteo --on-error skip --overwrite --output ctr --json --quiet

  with a checkpoint every 1000 batches; after a crash or Ctrl-C the same command continues, with the same result:
  $ shoal train lr --data day_0.tsv --format criteo --output long --checkpoint-every 1000 --resume

--output, --data and --valid also take URLs such as s3://bucket/name. Ctrl-C and SIGTERM save the model as trained so
far and exit with status 130 and 143. An existing model is replaced only with --overwrite, atomically and at the end; a
directory that holds anything else is never written to.
A grid needs the memory of one table per setting. On a cluster each worker trains on its split of the examples and
predicts its split of --valid; metrics are those of all workers, and worker 0 saves the model. Ctrl-C then writes no
checkpoint: the last one remains.
"""

FM_EXAMPLES = """\
examples:
  eight factors per key, one pass over a click log, validated on the next day:
  $ shoal train fm --data day_0.tsv --format criteo --valid day_1.tsv --dim 8 --output pairs

  a small file in shuffled small batches, until two passes bring no improvement:
  $ shoal train fm --data train.libsvm --format libsvm --valid test.libsvm --dim 4 --factors-lr 0.1 \\
      --epochs 50 --patience 2 --shuffle --batch-size 64 --output few

  with regularized factors, for many keys with little data:
  $ shoal train fm --data train.libsvm --format libsvm --factors-l2 0.03 --l2 1 --output careful

--alpha, --beta, --l1 and --l2 are the settings of FTRL for the linear weights; Adagrad trains the factors. Ctrl-C and
SIGTERM save the model as trained so far and exit with status 130 and 143.
"""


def add(commands: Any) -> Any:
    """Add the command and its kinds of models; return the object to which further kinds are added."""
    train = command(commands, "train", "Train a model.", EXAMPLES)
    kinds = train.add_subparsers(title="kinds of models", metavar="KIND", required=True)
    lr = command(
        kinds, "train lr", "Train a logistic regression with FTRL-Proximal.", LR_EXAMPLES, repeated(_tidy(train_lr))
    )
    add_fit_options(lr)
    add_ftrl_options(lr)
    add_normalized_option(lr)
    add_class_options(lr)
    add_solver_options(lr)
    add_lifecycle_options(lr)
    add_tracking_options(lr)
    lr.add_argument(
        "--grid",
        action="append",
        default=[],
        type=parse_grid,
        metavar="NAME=A,B,...",
        help="values of a setting (alpha, beta, l1, l2) to try, in all combinations with the other --grid options",
    )
    lr.add_argument(
        "--save-all", action="store_true", help="with --grid: save every model, each to a subdirectory of DIR"
    )
    columns(lr)
    reading(lr)
    machine(lr)
    log_options(lr, "worker")
    add_cluster_options(lr)
    fm = command(kinds, "train fm", "Train a factorization machine.", FM_EXAMPLES, repeated(_tidy(train_fm)))
    add_fit_options(fm)
    add_ftrl_options(fm)
    add_normalized_option(fm)
    add_lifecycle_options(fm)
    add_factor_options(fm)
    add_tracking_options(fm)
    columns(fm)
    reading(fm)
    machine(fm)
    log_options(fm, "worker")
    add_cluster_options(fm)
    return kinds


def open_store(arguments: argparse.Namespace) -> Store:
    """Open the store of the tables: in this process, or on a cluster."""
    from shoal.store.local import local

    if arguments.cluster is None:
        options = ("consistency", "workers", "job", "curve", "tracing", "cache", "filter", "shared_storage")
        given = [name.replace("shared_", "no-shared-") for name in options if getattr(arguments, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} requires --cluster")
        return local(threads=arguments.threads, slots=arguments.slots)
    from shoal.cluster.worker.connect import connect
    from shoal.consistency import BSP

    wanted = [pair for pairs in arguments.filter or () for pair in pairs]
    names = [name for name, _ in wanted]
    if len(set(names)) < len(names):
        raise ValueError(f"--filter names {max(names, key=names.count).replace('_', '-')} twice: name it once")
    if arguments.tracing:
        from shoal.cluster.worker.tracing import set_up_exporter

        set_up_exporter()
    return connect(
        arguments.cluster or None,
        job=arguments.job,
        consistency=arguments.consistency or BSP(),
        workers=arguments.workers,
        threads=arguments.threads,
        curve=arguments.curve,
        tracing=arguments.tracing,
        filters=_filters(dict(wanted), arguments.seed or 0) if wanted else None,
        cache=_cache(arguments.cache),
        shared_storage=arguments.shared_storage is None,
    )


def train_lr(arguments: argparse.Namespace) -> Answer:
    """Train a logistic regression, or a grid of them."""
    from shoal.models import LogisticRegression, LogisticRegressionGrid
    from shoal.optim import FTRL

    choose_normalized(arguments)
    if arguments.classes is not None:
        return _train_classes(arguments)
    if arguments.multi_class is not None:
        raise ValueError("--multi-class requires --classes")
    solver = _solver(arguments)
    if solver is not None:
        train, how = training_data(arguments, [arguments.output])
        with open_store(arguments) as store:
            return fitted(arguments, LogisticRegression(store=store, solver=solver, **_table_of(arguments)), train, how)
    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    if not arguments.grid:
        if arguments.save_all:
            raise ValueError("--save-all requires --grid")
        train, how = training_data(arguments, [arguments.output])
        with open_store(arguments) as store:
            return fitted(arguments, LogisticRegression(optimizer, store=store, **_table_of(arguments)), train, how)
    if arguments.checkpoint_every is not None or arguments.resume:
        raise ValueError("--grid writes no checkpoints: leave out --checkpoint-every and --resume")
    if arguments.admit or arguments.expire:
        raise ValueError(
            "--grid does not support --admit and --expire: find the best setting first, then train with them"
        )
    if arguments.table is not None:
        raise ValueError("--grid makes a table for each model: leave out --table")
    values = dict(arguments.grid)
    if len(values) < len(arguments.grid):
        raise ValueError("--grid names a setting twice: give all its values at once, as in alpha=0.05,0.1")
    if arguments.cluster is not None:
        raise ValueError("--grid trains in one process: leave out --cluster, or train the best setting on the cluster")
    with open_store(arguments) as store:
        grid = LogisticRegressionGrid(
            values,
            optimizer=optimizer,
            store=store,
            seed=arguments.seed,
            normalized=arguments.normalized,
            negative_rate=arguments.negative_rate,
            warm_up=not arguments.no_warm_up,
        )
        make_room(arguments, store)
        return fitted_grid(arguments, grid)


# Options of models of two classes, and their defaults.
_OF_TWO_CLASSES: dict[str, Any] = {
    "solver": "online",
    "grid": [],
    "save_all": False,
    "positive": None,
    "negative_rate": 1.0,
    "calibrate": None,
}


def _train_classes(arguments: argparse.Namespace) -> Answer:
    """Train a logistic regression of several classes."""
    from shoal.models import MulticlassRegression
    from shoal.optim import FTRL

    if arguments.classes < 3:
        raise ValueError(f"--classes is {arguments.classes}: pass 3 or more, or leave it out for labels of 0 and 1")
    for name, usual in _OF_TWO_CLASSES.items():
        if getattr(arguments, name) != usual:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for two classes and does not apply to --classes: leave it out")
    if arguments.metric == "auc":
        raise ValueError("--metric auc is for two classes: pass --metric logloss or accuracy")
    _solver(arguments)  # refuses its settings
    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    loss: MultiClass = arguments.multi_class or "multinomial"
    train, how = training_data(arguments, [arguments.output])
    with open_store(arguments) as store:
        model = MulticlassRegression(
            arguments.classes, optimizer=optimizer, store=store, loss=loss, **_table_of(arguments)
        )
        return fitted(arguments, model, train, how)


def train_fm(arguments: argparse.Namespace) -> Answer:
    """Train a factorization machine."""
    from shoal.models import FactorizationMachine
    from shoal.optim import FTRL, Adagrad, Normal

    choose_normalized(arguments)
    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    factors = Adagrad(lr=arguments.factors_lr, n0=arguments.factors_n0, weight_decay=arguments.factors_l2)
    init = Normal(arguments.init_std, seed=arguments.seed)
    train, how = training_data(arguments, [arguments.output])
    with open_store(arguments) as store:
        model = FactorizationMachine(
            arguments.dim, optimizer=optimizer, factors=factors, init=init, store=store, **_table_of(arguments)
        )
        return fitted(arguments, model, train, how)


def repeated(run: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
    """Make a command begin again when the number of workers of its fit has changed, which then continues."""

    def repeat(arguments: argparse.Namespace) -> Answer:
        from shoal.cluster.protocol.environment import find_worker_range
        from shoal.errors import DeadlineExceededError, WorkersChangedError

        workers = arguments.workers or find_worker_range(os.environ)
        if arguments.cluster is None or not isinstance(workers, tuple):
            return run(arguments)
        has_changed = False
        # From the connection on, until the fit can hand over its state, also in the job that continues it.
        with at_boundaries():
            while True:
                try:
                    return run(arguments)
                except WorkersChangedError as change:
                    if change.leaves:
                        return Answer(str(change), {"model": None, "left": True})
                    warn(f"{change.what}: this one connects again and continues the fit")
                    has_changed = arguments.overwrite = True  # what is there was written by this fit
                except DeadlineExceededError as late:
                    if not has_changed:
                        raise
                    raise DeadlineExceededError(
                        f"{late}: start more of them while this one waits; or start all again, with --resume if the "
                        "fit wrote checkpoints (--checkpoint-every)"
                    ) from late

    return repeat


def _tidy(run: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
    """Make a command that fails remove the empty directory of its output."""

    def tidy(arguments: argparse.Namespace) -> Answer:
        from shoal.storage.base import remove_if_failed
        from shoal.storage.open import open_dir

        with remove_if_failed(open_dir(arguments.output)):
            return run(arguments)

    return tidy


def fitted(arguments: argparse.Namespace, model: Model, train: Reader, how: dict[str, Any]) -> Answer:
    """Fit a model of any kind, save it, track it and return the summary."""
    make_room(arguments, model.store)
    options = tracking_options(arguments)
    trackers = make_trackers(options, arguments.output, resume=arguments.resume) if model.store.rank == 0 else []
    is_online = getattr(model, "solver", None) is None
    with contextlib.ExitStack() as runs:
        if is_online:
            how = how | {"callbacks": [runs.enter_context(tracker) for tracker in trackers]}
        answer = _fit_and_save(arguments, model, train, how)
        if answer.status == DONE:
            for tracker in trackers:
                if is_online:
                    tracker.model_saved(arguments.output)
                else:
                    tracker.log_fitted(model, arguments.output)
    return answer


def _fit_and_save(arguments: argparse.Namespace, model: Model, train: Reader, how: dict[str, Any]) -> Answer:
    """Fit a model of any kind, save it and return the summary. Of several workers, worker 0 evaluates and saves."""
    from shoal.models import Checkpointing, files
    from shoal.models.fit_checkpoints import FitFinishedError
    from shoal.storage.open import open_dir

    rank, workers = model.store.rank, model.store.num_workers
    whole, whole_valid = train, how["valid"]
    if names_later(arguments):
        train = train.with_names(None)
    if workers > 1:
        train = train.split(rank, workers)
        own_valid = whole_valid if rank == 0 else None  # a solver measures on one worker
        if whole_valid is not None and getattr(model, "solver", None) is None:
            own_valid = whole_valid.split(rank, workers)
        how = how | {"valid": own_valid}
    resume = resuming(arguments)
    # The best weights of several workers are kept in a directory that all of them see.
    patient = workers > 1 and how["early_stopping"] is not None
    kept = arguments.checkpoint_every is not None or bool(resume) or patient
    if kept:
        how["checkpoint"] = Checkpointing(
            arguments.output, every=arguments.checkpoint_every, resume=resume, overwrite=arguments.overwrite
        )
    elif rank == 0:
        model.store.check_storage(arguments.output)
    interrupted: KeyboardInterrupt | None = None
    over = False
    try:
        with keeping_what_was_learned(lambda: [(model, arguments.output)], train.names):
            model.fit(train, **how)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    except FitFinishedError:
        over = True
    check_learned(model.examples, train, interrupted)
    (extra, facts), (more, filters) = solver_summary(model), filter_summary(model.store)
    extra, facts = extra + more, facts | filters
    if rank != 0:
        check_saver(model.store)
        if interrupted is not None:
            warn(f"interrupted after {counted(model.examples, 'example')}; worker 0 saves the model")
        return Answer(
            "\n".join([*pass_lines(model), *extra, f"{'model':<12} worker 0 of {workers} saves it"]),
            {
                "model": None,
                "worker": rank,
                "interrupted": interrupted is not None,
                "names": None,
                **fit_facts(model),
                **facts,
            },
            exit_status(interrupted),
        )
    if over and _is_complete(arguments):
        return finished_already(model, arguments.output)
    interrupted = interrupted or calibrate(arguments, [model], whole_valid)
    if names_later(arguments) and not interrupted:
        interrupted = name_features(whole, show=how["progress"] is True)
    if kept and interrupted:
        whole = whole.with_names(None)  # what is left is the checkpoint
    with saving(interrupted) as stopped:
        target = arguments.output
        if not (kept and interrupted):
            target = model.save(target, overwrite=kept or arguments.overwrite, names=whole.names)
    if interrupted and not kept:
        warn(
            f"interrupted after {counted(model.examples, 'example')}; the model as trained so far is in {target}; "
            "with --resume a fit also leaves a checkpoint to continue from"
        )
    elif interrupted and not files.is_model(open_dir(target)):
        warn(f"interrupted after {model.examples:,} examples, before a checkpoint was written in {target}")
    elif interrupted:
        warn(
            f"interrupted after {counted(model.examples, 'example')}; "
            f"--resume continues from the checkpoint in {target}"
        )
    facts = model_facts(model) | facts
    lines = [*pass_lines(model), *extra, *table_lines(model, facts), *name_lines(whole), f"{'model':<12} {target}"]
    return Answer(
        "\n".join(lines),
        {
            "model": str(target),
            "worker": rank,
            "interrupted": interrupted is not None,
            "names": count_names(whole),
            **facts,
        },
        exit_status(stopped()),
    )


def _is_complete(arguments: argparse.Namespace) -> bool:
    """Whether the model of a fit that is over has all that is asked for."""
    from shoal.models import files

    saved = files.read(arguments.output)
    return (arguments.calibrate is None or saved.calibration is not None) and not (
        arguments.names and saved.names is None
    )


def resuming(arguments: argparse.Namespace) -> Resume:
    """Return whether the fit resumes, and whether its files may have grown."""
    if arguments.allow_appended and not arguments.resume:
        raise ValueError("--allow-appended requires --resume")
    return "appended" if arguments.allow_appended else bool(arguments.resume)


def _solver(arguments: argparse.Namespace) -> DBPG | None:
    """Return the batch solver, if it was requested."""
    from shoal.models import DBPG

    given = {name: value for name in _OF_DBPG if (value := getattr(arguments, name)) is not None}
    if arguments.solver == "online":
        if given:
            raise ValueError(f"--{next(iter(given))} requires --solver dbpg")
        return None
    for name, usual in {"grid": [], "alpha": 0.1, "beta": 1.0, "l2": 0.0}.items():
        if getattr(arguments, name) != usual:
            raise ValueError(f"--{name} does not apply to --solver dbpg: leave it out")
    for name, usual in {"epochs": 1, "shuffle": False, "patience": None}.items():
        if getattr(arguments, name) != usual:
            raise ValueError(f"--{name} does not apply to --solver dbpg: pass --passes and --tolerance")
    if arguments.normalized:
        raise ValueError("--normalized does not apply to --solver dbpg: leave it out")
    if given.get("slack", 0) < 0:
        given["slack"] = None
    return DBPG(l1=arguments.l1, **given)


_OF_DBPG = ("blocks", "delay", "slack", "tolerance", "passes")


def _cache(wanted: tuple[int, int, bool] | None) -> Cache | None:
    if wanted is None:
        return None
    from shoal.cluster.worker.cache import Cache

    return Cache(rows=wanted[0], staleness=wanted[1], local_steps=wanted[2])


def _filters(wanted: dict[str, str], seed: int) -> Filters:
    from shoal.cluster.worker.filters import Filters

    how: dict[str, Any] = {name: value or True for name, value in wanted.items()}
    if "threshold" in how:
        try:
            how["threshold"] = float(how["threshold"])
        except ValueError:
            raise ValueError(f"--filter threshold={how['threshold']} is not a number") from None
    return Filters(seed=seed, **how)


def _table_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **({} if arguments.table is None else {"table": arguments.table}),
        "seed": arguments.seed,
        "admit": arguments.admit,
        "expire": arguments.expire,
        "normalized": arguments.normalized,
        "warm_up": not arguments.no_warm_up,
        **({} if arguments.negative_rate == 1.0 else {"negative_rate": arguments.negative_rate}),
    }
