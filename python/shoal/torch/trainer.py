"""Training a click model from a reader: the loop of `shoal.models.training`, with a `ClickModel` as the learner.

    reader --> Fields --> ClickModel.learn, a batch a step --> checkpoints, callbacks, trackers

Threads: the caller's. Another one prepares batches ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.data import Batch
from shoal.models import training
from shoal.models.callbacks import Callback, Callbacks, FitProgress
from shoal.models.fit_checkpoints import FitCheckpointer, Resume, begin_or_resume
from shoal.models.learner import FitObserver
from shoal.models.pass_coordinator import PassCoordinator
from shoal.models.plan import Metric, Plan
from shoal.models.takeover import Publisher, taken_over
from shoal.optim import Optimizer
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store
from shoal.torch.click_model import ClickModel, Precision
from shoal.torch.dense_part import DenseSharing, MakeOptimizer
from shoal.torch.fields import Fields

log = logging.getLogger(__name__)


def train(
    module: nn.Module,
    reader: Iterable[Batch],
    *,
    fields: Fields | int,
    store: Store,
    valid: Iterable[Batch] | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | Optimizer | None = None,
    dense: DenseSharing = "allreduce",
    epochs: int = 1,
    shuffle: bool | int = False,
    negative_rate: float = 1.0,
    seed: int = 0,
    patience: int | None = None,
    min_delta: float = 0.0,
    metric: Metric = "logloss",
    progress: bool | float = True,
    directory: StoragePath | None = None,
    checkpoint_every: int | None = None,
    resume: Resume = False,
    overwrite: bool = False,
    callbacks: Callback | Callable[[FitProgress], None] | Iterable[Any] = (),
    staleness: int = 0,
    precision: Precision = "float32",
    storage_options: Mapping[str, Any] | None = None,
) -> ClickModel:
    """Train a torch module over a store's tables.

    Parameters
    ----------
    module, fields, store, optimizer, dense
        As `ClickModel`. Batch size and order of the files are the reader's.
    reader : Reader or iterable of Batch
        Iterated once for each pass.
    valid : Reader or iterable of Batch, optional
        Measured after every pass: log-loss, AUC, calibration, and GAUC if ``fields`` names a group.
    epochs, shuffle, negative_rate, seed, patience, min_delta, metric, progress
        As `shoal.models.Model.fit`. ``seed`` is that of the shuffle and of the choice of negatives: initial values are
        drawn when the module is made.
    directory : path or URL, optional
        Directory of the checkpoints, and of the model at the end.
    checkpoint_every : int, optional
        Batches between two checkpoints, in addition to one after each pass.
    resume : bool or "appended"
        Resume the fit whose checkpoint is in ``directory``; without one a fit begins. "appended" allows that files
        have grown and that files were added at the end of the list.
    overwrite : bool
        Whether to replace a model that is in ``directory``.
    callbacks : function, Callback, or list of them, optional
        As `shoal.models.Model.fit`.
    staleness, precision
        As `ClickModel`.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Returns
    -------
    ClickModel

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C or SIGTERM, at the end of the current batch; with ``directory`` a checkpoint was written, to be resumed.
    ValueError
        A setting is invalid, a line is malformed, or a batch does not fit the fields.
    """
    model = ClickModel(module, fields, store, optimizer, dense=dense, staleness=staleness, precision=precision)
    fit(
        model,
        reader,
        valid,
        Plan(
            epochs=epochs,
            shuffle=shuffle,
            negative_rate=negative_rate,
            warm_up=False,
            seed=seed,
            patience=patience,
            min_delta=min_delta,
            metric=metric,
        ),
        progress=progress,
        checkpointer=None
        if directory is None
        else FitCheckpointer(model, open_dir(directory, storage_options), checkpoint_every, overwrite=overwrite),
        resume=resume,
        callbacks=callbacks,
    )
    return model


def fit(
    model: ClickModel,
    reader: Iterable[Batch],
    valid: Iterable[Batch] | None,
    plan: Plan,
    *,
    progress: bool | float = True,
    checkpointer: FitCheckpointer | None = None,
    resume: Resume = False,
    callbacks: Callback | Callable[[FitProgress], None] | Iterable[Any] = (),
) -> None:
    """Train a click model; see `train`."""
    if plan.warm_up:
        raise ValueError("click models learn from batches as they are: pass warm_up=False")
    if model.store.num_workers > 1 and model.staleness and checkpointer is not None and checkpointer.is_within_passes:
        raise ValueError(
            f"staleness is {model.staleness}, and a checkpoint within a pass would need the rows that each of "
            f"{model.store.num_workers} workers has pulled ahead: leave checkpoint_every out, or pass staleness=0"
        )
    if model.store.taking_splits and model.store.num_workers > 1:
        raise ValueError(
            "click models of several workers step together: pass each worker reader.split(store.rank, "
            "store.num_workers) instead of a loop over store.splits"
        )
    watching = Callbacks(model, callbacks)
    reader, valid = model.reading(reader), model.reading(valid)
    remedy = "; one with staleness=0 can" if model.staleness else '; one with dense="servers" can'
    made = PassCoordinator(
        model.store,
        model.name,
        can_replace=model.can_be_replaced,
        can_change=not model.staleness,
        can_lose=model.can_lose_workers,
        remedy=remedy,
    )
    with made.fitting(plan.common) as coordinator, contextlib.ExitStack() as leaving:
        coordinator.needs_all = True
        leaving.callback(model.leave)
        has_begun, fit_states = taken_over([model], coordinator, reader, plan)
        if not has_begun:
            fit_state = begin_or_resume(
                model, reader, valid, plan, checkpointer, resume=resume, coordinator=coordinator
            )
            fit_states = None if fit_state is None else [fit_state]
        elif fit_states is not None and checkpointer is not None:
            checkpointer.begin(coordinator)
        is_over = has_begun and fit_states is None
        model.join(coordinator, has_begun=has_begun, is_over=is_over)
        if is_over:
            return
        if model.store.rank == 0 and (lazy := model.lazy_tables):
            log.warning(
                "the rows of %s have the learning rate of the dense part, and move only in steps that have their keys: "
                "if it was tuned for a dense Adam, try rates 3 to 10 times as large for the tables",
                ", ".join(lazy),
            )
        publisher = Publisher([model], coordinator)
        observers: list[FitObserver] = [*([] if checkpointer is None else [checkpointer])]
        if watching:
            observers.append(watching)
        training.train(
            [model],
            reader,
            valid,
            plan,
            progress=progress,
            observers=observers,
            fit_states=fit_states,
            coordinator=coordinator,
            publisher=publisher,
        )
        if checkpointer is not None:
            checkpointer.save()
        publisher.end()
