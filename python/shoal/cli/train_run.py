"""What the commands of ``shoal train`` share: the data, the checks before and after a fit, saving under signals."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from shoal.base.interrupts import at_boundaries, status_of
from shoal.base.logs import is_json
from shoal.base.plural import counted
from shoal.base.progress import rows_bar
from shoal.base.streams import escape_text
from shoal.cli.answers import DONE, warn
from shoal.cli.arguments import COLUMN_FORMATS, format_of, open_reader, schema_of, with_known_columns

if TYPE_CHECKING:
    from collections.abc import Generator

    from shoal.data import Batch, FeatureNames, Reader
    from shoal.models import Model
    from shoal.storage.base import StoragePath
    from shoal.store.base import Store
    from shoal.torch import ClickModel


@contextlib.contextmanager
def saving(interrupted: KeyboardInterrupt | None) -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Defer a first Ctrl-C or SIGTERM until the model is saved; ``interrupted`` is one that came before."""
    if interrupted is not None:
        yield lambda: interrupted
        return
    with at_boundaries() as stopped:
        yield stopped


def exit_status(interrupted: KeyboardInterrupt | None) -> int:
    """Return the exit status of a fit that was interrupted, or was not."""
    return DONE if interrupted is None else status_of(interrupted)


def training_data(arguments: argparse.Namespace, targets: Sequence[StoragePath]) -> tuple[Reader, dict[str, Any]]:
    """Return the training data and the arguments of the fit, after every check that needs no training."""
    from shoal.data import FeatureNames
    from shoal.models import EarlyStopping, files

    if arguments.expected_keys is not None and arguments.cluster is not None:
        raise ValueError("--expected-keys is for tables in this process: leave it out, servers grow by themselves")
    for target in targets:
        files.check_target(target, overwrite=arguments.overwrite or arguments.resume)
    form = format_of(arguments, arguments.data)
    schema = schema_of(arguments)
    names = FeatureNames() if arguments.names else None
    train = open_reader(arguments.data, form, arguments, schema, names)
    train = with_known_columns(train, arguments.ignore or ())
    schema |= {name: columns for name, columns in train.schema.items() if name == "categorical"}
    if not arguments.quiet:
        describe_columns(train)
    valid = None if arguments.valid is None else open_reader(arguments.valid, form, arguments, schema)
    if arguments.checkpoint_every is not None and arguments.checkpoint_every < 1:
        raise ValueError(f"--checkpoint-every is {arguments.checkpoint_every}: pass 1 or more")
    if arguments.patience is not None and valid is None:
        raise ValueError("--patience requires --valid")
    if arguments.calibrate is not None and valid is None:
        raise ValueError("--calibrate requires --valid: examples that the model was not trained on")
    if names_later(arguments) and not train.repeatable:
        raise ValueError(
            "--names of a stream, which is read once, needs one process and an uninterrupted fit: leave out --cluster, "
            "--checkpoint-every and --resume"
        )
    for target in targets:
        files.make_target(target)
    return train, {
        "valid": valid,
        "epochs": arguments.epochs,
        "shuffle": arguments.shuffle,
        "early_stopping": None
        if arguments.patience is None
        else EarlyStopping(arguments.patience, metric=arguments.metric, min_delta=arguments.min_delta),
        "progress": arguments.progress if arguments.progress is not None else not (arguments.quiet or is_json()),
    }


def choose_normalized(arguments: argparse.Namespace) -> None:
    """Normalize values unless the options say otherwise: if columns are numeric, and messages are exact."""
    if arguments.normalized is None:
        is_online = getattr(arguments, "solver", "online") == "online"
        arguments.normalized = bool(arguments.numeric) and is_online and not arguments.filter


def describe_columns(data: Reader, ignore: str = "--ignore {}") -> None:
    """Say what becomes of the columns of the data, and warn of those that tell nothing: of a file, as it is read."""
    from shoal.data.columns import schema_items

    if data.format not in COLUMN_FORMATS or "categorical" not in data.schema:
        return
    items = [(name, value) for name, value in schema_items(data.schema) if name in _ROLES]
    warn(escape_text(f"columns: {'; '.join(f'{name} {value}' for name, value in items)}"))
    for column, texts, examples in nearly_unique(data):
        warn(
            f"column {column!r} has {texts:,} different texts in the first {examples:,} examples: if nearly every "
            f"example has its own, nothing is learned from it; leave it out with {ignore.format(escape_text(column))}"
        )


_ROLES = ("label", "weight", "categorical", "numeric", "lists")


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


def names_later(arguments: argparse.Namespace) -> bool:
    """Whether features are named in a pass of their own: no process reads all data in one go while it fits."""
    return arguments.names and (
        arguments.cluster is not None or arguments.checkpoint_every is not None or bool(arguments.resume)
    )


@contextlib.contextmanager
def keeping_what_was_learned(
    learned: Callable[[], Sequence[tuple[Model | ClickModel, StoragePath]]], names: FeatureNames | None = None
) -> Iterator[None]:
    """Save the models of a fit that fails by its data, unless that would replace others."""
    from shoal.errors import ShoalError
    from shoal.models import files
    from shoal.models.fit_checkpoints import FitFinishedError
    from shoal.models.saved_model import SavedModel
    from shoal.storage.open import open_dir

    try:
        yield
    except FitFinishedError:
        raise
    except (ValueError, ShoalError, OSError):
        for model, where in learned():
            if model.examples == 0 or model.store.num_workers > 1:
                continue
            examples = counted(model.examples, "example")
            if isinstance(model, SavedModel) and not files.is_model(open_dir(where)):
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


def calibrate(arguments: argparse.Namespace, models: Sequence[Model], valid: Reader | None) -> KeyboardInterrupt | None:
    """Calibrate on the validation data, without changing the recorded metrics; return the interrupt, if any."""
    if arguments.calibrate is not None and valid is not None:
        try:
            for model in models:
                model.calibrate(valid, arguments.calibrate)
        except KeyboardInterrupt as interrupt:
            return interrupt
    return None


def check_saver(store: Store) -> None:
    """Raise WorkerLostError if the worker that saves the model is gone, in a worker that does not."""
    from shoal.errors import WorkerLostError

    if 0 in store.lost_workers:
        raise WorkerLostError(
            "worker 0, which saves the model, was lost: no model is saved. Train again, with --worker-restarts (shoal "
            "launch), or with --checkpoint-every and --resume"
        )


def check_learned(examples: int, train: Reader, interrupted: KeyboardInterrupt | None) -> None:
    """Raise the interrupt, or a ValueError that says why, if nothing was learned."""
    if examples == 0:
        raise interrupted or ValueError(f"{train.why_empty()}: the model was not trained")


def make_room(arguments: argparse.Namespace, store: Store) -> None:
    """Make room in the tables of a new model for the rows that are expected."""
    if arguments.expected_keys is not None:
        for table in store.tables.values():
            table.reserve(arguments.expected_keys)
