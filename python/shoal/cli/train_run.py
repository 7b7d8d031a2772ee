"""A run of ``shoal train``: its data, its store, its fit and its model, also after signals and failures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shoal.base.defaults import BATCH_SIZE
from shoal.base.interrupts import at_boundaries, status_of
from shoal.base.logs import is_json
from shoal.base.plural import counted
from shoal.base.progress import rows_bar
from shoal.base.settings import to_toml
from shoal.base.streams import escape_text
from shoal.cli.answers import DONE, Answer, warn
from shoal.cli.reading import (
    Reading,
    delayed,
    format_of,
    open_reader,
    schema_of,
    source_of,
    with_known_columns,
    without,
)
from shoal.cli.tracking import check_logging, make_trackers
from shoal.cli.train_summary import (
    count_names,
    filter_summary,
    finished_already,
    fit_facts,
    is_click,
    model_summary,
    name_lines,
    pass_lines,
    solver_summary,
)
from shoal.config import COLUMN_FORMATS, ConnectConfig, TrainConfig

if TYPE_CHECKING:
    from collections.abc import Generator

    from shoal.cli.train_options import TrainOptions
    from shoal.data import Batch, FeatureNames, Reader
    from shoal.models import Model
    from shoal.storage.base import StoragePath
    from shoal.store.base import Store
    from shoal.torch import ClickModel
    from shoal.tracking import Tracker

Run = Callable[["TrainOptions"], Answer]


# ---- the command -----------------------------------------------------------------------------------------------------


def restarted_with_workers(run: Run) -> Run:
    """Make a command begin again when the number of workers of its fit has changed, which then continues."""

    def repeat(options: TrainOptions) -> Answer:
        from msgspec.structs import replace

        from shoal.cluster.protocol.environment import find_worker_range, parse_workers
        from shoal.errors import DeadlineExceededError, WorkersChangedError

        given = options.cluster.workers
        workers = find_worker_range(os.environ) if given is None else parse_workers(given)
        if options.cluster.cluster is None or not isinstance(workers, tuple):
            # Workers of a stream end it together: one that begins, maybe in place of another, goes on up to there.
            is_stream = options.data.follow or any(name.startswith("kafka://") for name in options.data.data)
            with at_boundaries() if is_stream and options.cluster.cluster is not None else contextlib.nullcontext():
                return run(options)
        has_changed = False
        # From the connection on, until the fit can hand over its state, also in the job that continues it.
        with at_boundaries():
            while True:
                try:
                    return run(options)
                except WorkersChangedError as change:
                    if change.leaves:
                        return Answer(str(change), {"model": None, "left": True})
                    warn(f"{change.what}: this one connects again and continues the fit")
                    has_changed = True
                    options = replace(options, overwrite=True)  # what is there was written by this fit
                except DeadlineExceededError as late:
                    if not has_changed:
                        raise
                    raise DeadlineExceededError(
                        f"{late}: start more of them while this one waits; or start all again, with --resume if the "
                        "fit wrote checkpoints (--checkpoint-every)"
                    ) from late

    return repeat


def tidied(run: Run) -> Run:
    """Make a command that fails remove the empty directory of its output."""

    def tidy(options: TrainOptions) -> Answer:
        from shoal.storage.base import remove_if_failed
        from shoal.storage.open import open_dir

        with remove_if_failed(open_dir(output_of(options))):
            return run(options)

    return tidy


def output_of(options: TrainOptions) -> str:
    """Return the directory of the model."""
    if options.output.output is None:
        raise ValueError("the model needs a directory: pass --output DIR, or set output in [output]")
    return options.output.output


def open_store(options: TrainOptions) -> Store:
    """Open the store of the tables: in this process, or on a cluster."""
    from shoal.store.local import local

    config = options.cluster
    if config.cluster is None:
        usual = ConnectConfig()
        for name in ConnectConfig.__struct_fields__:
            if getattr(config, name) != getattr(usual, name):
                raise ValueError(f"--{'no-' * (name == 'shared_storage')}{name.replace('_', '-')} requires --cluster")
        return local(threads=options.threads, slots=options.tables.slots)
    from shoal.cluster.protocol.environment import parse_workers
    from shoal.cluster.worker.cache import parse_cache
    from shoal.cluster.worker.connect import connect
    from shoal.cluster.worker.filters import parse_filters
    from shoal.consistency import parse_consistency

    if config.tracing:
        from shoal.cluster.worker.tracing import set_up_exporter

        set_up_exporter()
    return connect(
        config.cluster or None,
        job=config.job,
        consistency=parse_consistency(config.consistency),
        workers=None if config.workers is None else parse_workers(config.workers),
        threads=options.threads,
        curve=config.curve,
        tracing=config.tracing or None,
        filters=None if config.filters is None else parse_filters(config.filters, options.train.seed),
        cache=None if config.cache is None else parse_cache(config.cache),
        shared_storage=config.shared_storage,
    )


# ---- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """The examples of a run."""

    train: Reader
    valid: Reader | None

    def check(self, options: TrainOptions, *, kept: bool = False) -> None:
        """Check what needs no training, and make the directory; ``kept``: a fit does that."""
        from shoal.models import files
        from shoal.storage.open import open_dir

        target = open_dir(output_of(options))
        check_logging(options.logging)
        if not options.quiet:
            describe_columns(self.train)
        if self.valid is None:
            for name in ("patience", "calibrate"):
                if getattr(options.train, name) is not None:
                    raise ValueError(f"--{name} requires --valid: examples that the model was not trained on")
        if options.save_all and not options.grid:
            raise ValueError("--save-all requires --grid")
        if not options.grid:
            if options.cluster.cluster is None:  # else it may be that of the predecessor of a worker
                files.check_target(target, overwrite=options.overwrite or bool(options.resume))
            if not kept:
                files.make_target(target)
            return
        if options.output.checkpoint_every is not None or options.output.keep_checkpoints or options.resume:
            raise ValueError(
                "--grid writes no checkpoints: leave out --checkpoint-every, --keep-checkpoints and --resume"
            )
        if options.cluster.cluster is not None:
            raise ValueError(
                "--grid trains in one process: leave out --cluster, or train the best setting on the cluster"
            )


def open_data(options: TrainOptions) -> Data:
    """Open the examples of a model over one table, after every check that needs no training."""
    from shoal.data import FeatureNames

    config = options.data
    if not config.data:
        raise ValueError("the run has no examples: pass --data FILE, or set data in [data]")
    if options.tables.expected_keys is not None and options.cluster.cluster is not None:
        raise ValueError("--expected-keys is for tables in this process: leave it out, servers grow by themselves")
    if options.grid and (options.tables.admit or options.tables.expire):
        raise ValueError(
            "--grid does not support --admit and --expire: find the best setting first, then train with them"
        )
    if options.grid and options.tables.table is not None:
        raise ValueError("--grid makes a table for each model: leave out --table")
    source = source_of(config)
    form = format_of(config.data, config.format, quiet=options.quiet)
    reading = Reading.of(config, options.train.batch_size or BATCH_SIZE)
    schema = schema_of(config, form)
    names = FeatureNames() if options.output.names else None
    train = delayed(open_reader(source, form, reading, schema, names), config)
    train = without(with_known_columns(train, config.ignore), config)
    schema |= {name: columns for name, columns in train.schema.items() if name == "categorical"}
    data = Data(train, open_reader(config.valid, form, reading, schema) if config.valid else None)
    check_names(options, train)
    data.check(options)
    return data


def describe_columns(data: Reader) -> None:
    """Say what becomes of the columns of the data, and warn of those that tell nothing: of a file, as it is read."""
    from shoal.data.columns import schema_items

    if data.format not in COLUMN_FORMATS or "categorical" not in data.schema:
        return
    items = [(name, value) for name, value in schema_items(data.schema) if name in _ROLES]
    warn(escape_text(f"columns: {'; '.join(f'{name} {value}' for name, value in items)}"))
    for column, texts, examples in nearly_unique(data):
        warn(
            f"column {column!r} has {texts:,} different texts in the first {examples:,} examples: if nearly every "
            f"example has its own, nothing is learned from it; leave it out with --ignore {escape_text(column)}"
        )


_ROLES = ("label", "weight", "categorical", "numeric", "lists", "vectors")


def nearly_unique(data: Reader) -> list[tuple[str, int, int]]:
    """Find the categorical columns in whose first batch nearly every example has a text of its own."""
    import numpy as np

    from shoal.data.interactions import field_of

    if not data.repeatable or data.schema.get("interactions"):
        return []
    first = data.with_names(None).unlabelled().with_fields()
    with contextlib.closing(cast("Generator[Batch]", iter(first))) as batches:
        batch = next(batches, None)
    if batch is None or len(batch) < _ENOUGH_EXAMPLES:
        return []
    assert batch.fields is not None
    found = []
    for name in data.schema["categorical"]:
        texts = len(np.unique(batch.keys[batch.fields == np.uint64(field_of(name))]))
        if texts > _UNIQUE_SHARE * len(batch):
            found.append((name, texts, len(batch)))
    return found


_ENOUGH_EXAMPLES = 1000
_UNIQUE_SHARE = 0.9


def names_later(options: TrainOptions) -> bool:
    """Whether features are named in a pass of their own: no process reads all data in one go while it fits."""
    output = options.output
    return output.names and (
        options.cluster.cluster is not None
        or output.checkpoint_every is not None
        or output.keep_checkpoints
        or output.record is not None
        or bool(options.resume)
    )


def check_names(options: TrainOptions, train: Reader) -> None:
    """Raise ValueError if features are to be named in a second pass over a stream."""
    if names_later(options) and not train.repeatable:
        raise ValueError(
            "--names of a stream, which is read once, needs one process and an uninterrupted fit: leave out --cluster, "
            "--checkpoint-every, --keep-checkpoints and --resume"
        )


# ---- the fit ---------------------------------------------------------------------------------------------------------


def progress_of(options: TrainOptions) -> bool | float:
    """Return how the fit shows its progress."""
    return options.progress if options.progress is not None else not (options.quiet or is_json())


def fitted(options: TrainOptions, model: Model | ClickModel, data: Data) -> Answer:
    """Fit a model of any kind, save it, track it and return the summary."""
    target = output_of(options)
    if options.tables.expected_keys is not None:
        for table in model.store.tables.values():
            table.reserve(options.tables.expected_keys)
    trackers = _trackers(options, model, target) if model.store.rank == 0 else []
    is_online = getattr(model, "solver", None) is None
    with contextlib.ExitStack() as runs:
        callbacks = [runs.enter_context(tracker) for tracker in trackers] if is_online else []
        answer = _fit_and_save(options, model, data, callbacks)
        if answer.status == DONE:
            for tracker in trackers:
                if is_online:
                    tracker.model_saved(target)
                else:
                    tracker.log_fitted(model, target)
    return answer


def _trackers(options: TrainOptions, model: Model | ClickModel, target: str) -> list[Tracker]:
    settings = flat_settings(options) if is_click(model) else None
    return make_trackers(options.logging, target, settings=settings, resume=bool(options.resume))


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a click model for its logs: "train.epochs" and so on."""
    import msgspec

    sections = ("data", "model", "train", "tables", "output", "logging")
    return {
        f"{section}.{name}": value
        for section in sections
        for name, value in (msgspec.to_builtins(getattr(config, section)) or {}).items()
        if value not in (None, [], {})
    }


def _fit_and_save(options: TrainOptions, model: Model | ClickModel, data: Data, callbacks: Sequence[Any]) -> Answer:
    """Fit a model of any kind, save it and return the summary. Of several workers, worker 0 evaluates and saves."""
    from shoal.errors import FitFinishedError
    from shoal.models import Checkpointing, files
    from shoal.models.plan import early_stopping_of
    from shoal.storage.open import open_dir

    target = output_of(options)
    rank, workers = model.store.rank, model.store.num_workers
    if not model.store.member.is_replacement:
        files.check_target(open_dir(target), overwrite=options.overwrite or bool(options.resume))
    has_dense = is_click(model)
    train, valid = data.train, data.valid
    if names_later(options):
        train = train.with_names(None)
    if workers > 1:
        train = train.split(rank, workers)
        is_measured_by_one = getattr(model, "solver", None) is not None
        if valid is not None:
            valid = (valid if rank == 0 else None) if is_measured_by_one else valid.split(rank, workers)
    _check_expiry(options, model, train)
    early_stopping = early_stopping_of(options.train)
    # The best weights of several workers are kept in a directory that all of them see.
    output = options.output
    kept = (
        has_dense
        or output.checkpoint_every is not None
        or output.keep_checkpoints
        or output.record is not None
        or bool(options.resume)
        or (workers > 1 and early_stopping is not None)
    )
    how: dict[str, Any] = {"epochs": options.train.epochs, "shuffle": options.train.shuffle}
    if kept:
        resume: Any = options.resume
        how["checkpoint"] = Checkpointing(
            target,
            every=output.checkpoint_every,
            keep=output.keep_checkpoints,
            resume=resume,
            overwrite=options.overwrite,
            record=output.record,
        )
    elif rank == 0:
        model.store.check_storage(target)
    if callbacks:
        how["callbacks"] = callbacks
    interrupted: KeyboardInterrupt | None = None
    over = False
    try:
        with keeping_what_was_learned(lambda: [(model, target)], train.names):
            model.fit(train, valid=valid, progress=progress_of(options), early_stopping=early_stopping, **how)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    except FitFinishedError:
        over = True
    check_learned(model.examples, train, interrupted)
    (extra, facts), (more, filters) = solver_summary(model), filter_summary(model.store)
    facts = {"worker": rank, "interrupted": interrupted is not None, **fit_facts(model), **facts, **filters}
    if rank != 0:
        if not kept:  # otherwise the fit has saved it, whoever led
            check_saver(model.store)
        if interrupted is not None:
            warn(f"interrupted after {counted(model.examples, 'example')}; worker 0 saves the model")
        lines = [*pass_lines(model), *extra, *more, f"{'model':<12} worker 0 of {workers} saves it"]
        return Answer("\n".join(lines), {"model": None, "names": None, **facts}, exit_status(interrupted))
    if over and _is_complete(options):
        return finished_already(model, target)
    whole = data.train
    interrupted = interrupted or calibrate(options, [model], data.valid)
    if names_later(options) and not interrupted:
        interrupted = name_features(whole, show=progress_of(options) is True)
    if kept and interrupted:
        whole = whole.with_names(None)  # what is left is the checkpoint
    with saving(interrupted) as stopped:
        is_saved = kept and (interrupted or (has_dense and whole.names is None))  # by the fit
        if not is_saved:
            model.save(target, overwrite=kept or options.overwrite, names=whole.names)
        keep_config(options, target)
    text = f"interrupted after {counted(model.examples, 'example')}"
    if interrupted and not kept:
        warn(
            f"{text}; the model as trained so far is in {target}; "
            "with --resume a fit also leaves a checkpoint to continue from"
        )
    elif interrupted and not files.is_model(open_dir(target)):
        warn(f"{text}, before a checkpoint was written in {target}")
    elif interrupted:
        warn(f"{text}; --resume continues from the checkpoint in {target}")
    described, told = model_summary(model)
    saved = f"{'model':<12} {target}"
    lines = [*pass_lines(model), *extra, *more, *described, *name_lines(whole), saved]
    facts |= {"model": str(target), "names": count_names(whole), "interrupted": interrupted is not None, **told}
    return Answer("\n".join(lines), facts, exit_status(stopped()))


def _check_expiry(options: TrainOptions, model: Model | ClickModel, train: Reader) -> None:
    """Raise ValueError if rows would never expire: a stream without an end has no end of a pass."""
    from shoal.data.stream import is_endless
    from shoal.lifecycle import MaxRows

    if options.output.checkpoint_every is not None or not is_endless(train):
        return
    for table in model.tables:
        rule = next((rule for rule in table.spec.expire if not isinstance(rule, MaxRows)), None)
        if rule is not None:
            raise ValueError(
                f"--expire of table {table.name!r} has {rule}, which is applied at the end of a pass or at "
                "checkpoints, and the stream has no end: pass --checkpoint-every BATCHES, or --expire rows:N"
            )


def keep_config(options: TrainConfig, target: StoragePath) -> None:
    """Write the configuration of the run beside the model, as --config reads it."""
    from shoal.models import files
    from shoal.storage.open import open_dir

    directory = open_dir(target)
    if files.is_model(directory):
        directory.publish(files.CONFIG_FILE, to_toml(options).encode(), before=directory.version(files.CONFIG_FILE))


@contextlib.contextmanager
def saving(interrupted: KeyboardInterrupt | None) -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Defer a first Ctrl-C or SIGTERM until the model is saved; ``interrupted`` is one that came before."""
    if interrupted is not None:
        yield lambda: interrupted
        return
    with at_boundaries() as stopped:
        yield stopped
        stopped()  # the model is saved: it changes the exit status alone


def exit_status(interrupted: KeyboardInterrupt | None) -> int:
    """Return the exit status of a fit that was interrupted, or was not."""
    return DONE if interrupted is None else status_of(interrupted)


@contextlib.contextmanager
def keeping_what_was_learned(
    learned: Callable[[], Sequence[tuple[Model | ClickModel, StoragePath]]], names: FeatureNames | None = None
) -> Iterator[None]:
    """Save the models of a fit that fails by its data, unless that would replace others.

    ``learned`` returns the models, and where each is to be saved; ``names`` are saved with them.
    """
    from shoal.errors import FitFinishedError, ShoalError
    from shoal.models import files
    from shoal.models.saved_model import SavedModel
    from shoal.storage.open import open_dir

    try:
        yield
    except FitFinishedError:
        raise
    except (ValueError, ShoalError, OSError):
        for model, where in learned():
            if model.examples == 0:
                continue
            examples = counted(model.examples, "example")
            if isinstance(model, SavedModel) and not files.is_model(open_dir(where)):
                if model.store.num_workers > 1:
                    warn(f"the fit fails after {examples}, which are lost; --checkpoint-every keeps some of them")
                    continue
                model.save(where, names=names)
                warn(f"the fit fails after {examples}; the model as trained so far is in {where}")
            elif files.read(where).fit_state is not None:
                warn(f"the fit fails after {examples}; --resume continues from the checkpoint in {where}")
            else:
                warn(f"the fit fails after {examples}, which are lost; the model in {where} is the one that was there")
        raise


def name_features(data: Reader, *, show: bool) -> KeyboardInterrupt | None:
    """Name the features of all data, in a pass of its own; return the interrupt, if any."""
    try:
        with rows_bar("names", 0, show=show) as add:
            for batch in data:
                add(len(batch))
    except KeyboardInterrupt as interrupt:
        warn("interrupted while the features were named: some have no name")
        return interrupt
    return None


def calibrate(options: TrainOptions, models: Sequence[Any], valid: Reader | None) -> KeyboardInterrupt | None:
    """Calibrate on the validation data, without changing the recorded metrics; return the interrupt, if any."""
    if options.train.calibrate is not None and valid is not None and not is_click(models[0]):
        try:
            for model in models:
                model.calibrate(valid, options.train.calibrate)
        except KeyboardInterrupt as interrupt:
            return interrupt
    return None


def check_saver(store: Store) -> None:
    """Raise WorkerLostError if the worker that saves the model is gone, in a worker that does not."""
    from shoal.errors import WorkerLostError

    if 0 in store.member.lost_workers:
        raise WorkerLostError(
            "worker 0, which saves the model, was lost: no model is saved. Train again, with --worker-restarts (shoal "
            "launch), or with --checkpoint-every and --resume"
        )


def check_learned(examples: int, train: Reader, interrupted: KeyboardInterrupt | None) -> None:
    """Raise the interrupt, or a ValueError that says why, if nothing was learned."""
    if examples == 0:
        raise interrupted or ValueError(f"{train.why_empty()}: the model was not trained")


def _is_complete(options: TrainOptions) -> bool:
    """Whether the model of a fit that is over has all that is asked for."""
    from shoal.models import files

    saved = files.read(output_of(options))
    return (options.train.calibrate is None or saved.calibration is not None) and not (
        options.output.names and saved.names is None
    )
