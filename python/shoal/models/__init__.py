"""Models: linear models and factorization machines over the tables of a store, and how they are trained and saved.

    predictor.py         Predictor: predicts from batches; each kind of model defines how they become margins
    model.py             Model: learns from batches; a kind defines how rows become margins, and slopes gradients
    linear_weights.py    the linear weights of a model: bias, weights, scales, largest weights
    logistic.py          logistic regression
    multiclass.py        logistic regression over any number of classes
    fm.py                factorization machine
    scales.py            the divisors of values in normalized models
    dbpg.py              delayed block proximal gradient: logistic regression to its optimum
    grid.py              several settings of logistic regression in one pass
    learner.py           the protocols of the training loop: Learner, FitObserver; FitState
    training.py          the training loop, for one or several models
    model_trainer.py     one model in the loop: metrics of its pass, early stopping
    evaluation.py        metrics of models in one pass over data
    measured.py          what metrics need of the examples that were predicted
    sources.py           checks and descriptions of the data of a fit
    plan.py              the settings of a fit: epochs, shuffling, early stopping; those of a model: sampling, warm-up
    progress.py          how far a fit is, in rows that outlive its workers; progress_rows.py: these rows
    team.py              the workers of a cluster that fit one model together
    shares.py            what workers have left of a pass, and its division; pass_reader.py: the batches of shares
    inputs.py            arrays and frames as batches
    callbacks.py         user code that runs during a fit
    preprocessing.py     from a reader to sorted batches: sampling of negatives, shuffling, sorting ahead
    history.py           learning curve and passes
    files.py             model directories, on disks and object stores
    saved_predictor.py   a predictor whose rows are in tables of a store
    saved_model.py       saving, loading, exporting and pickling a model
    fitting.py           a whole fit: agreed on, resumed or begun, trained, saved
    fit_checkpoints.py   checkpoints of a fit
    calibration.py       Platt scaling and isotonic regression
    progress_bar.py      a progress bar or lines on standard error

Threads: see the header of each module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.models import files
from shoal.models.callbacks import Callback, FitProgress
from shoal.models.dbpg import DBPG, SolverResult
from shoal.models.files import load_names
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.fm import FactorizationMachine
from shoal.models.grid import GridResult, LogisticRegressionGrid
from shoal.models.history import Fit, History, Pass, Point, merged
from shoal.models.linear_weights import BIAS_KEY
from shoal.models.logistic import LogisticRegression
from shoal.models.model import Model
from shoal.models.multiclass import MulticlassRegression
from shoal.models.plan import EarlyStopping, Plan, Plateau
from shoal.models.publishing import PublishDelta
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store

__all__ = [
    "BIAS_KEY",
    "DBPG",
    "Callback",
    "Checkpointing",
    "EarlyStopping",
    "FactorizationMachine",
    "Fit",
    "FitProgress",
    "GridResult",
    "History",
    "LogisticRegression",
    "LogisticRegressionGrid",
    "Model",
    "MulticlassRegression",
    "Pass",
    "Plan",
    "Plateau",
    "Point",
    "PublishDelta",
    "SolverResult",
    "exported",
    "load",
    "load_names",
    "merged",
]

_CLASSES: dict[str, type[Model]] = {
    one.kind: one for one in (LogisticRegression, FactorizationMachine, MulticlassRegression)
}


def exported(description: Mapping[str, Any], store: Store) -> Model:
    """Make the model of an export (`files.for_export`), over tables that are in the store.

    Raises
    ------
    ValueError
        It is of a kind that this version does not know, or requires PyTorch.
    """
    kind = description["kind"]
    if kind not in _CLASSES:
        raise ValueError(f"a {kind} is not made of tables alone: those are {', '.join(_CLASSES)}")
    return _CLASSES[kind].exported(description, store)


def load(
    directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
) -> Model:
    """Read a model of any kind; see `Model.load`."""
    where = open_dir(directory, storage_options)
    kind = files.read(where).model
    if kind == files.CLICK:
        raise ValueError(f"{where} is a click model, which requires PyTorch: load it with shoal.torch.load")
    return _CLASSES[kind].load(where, store=store)
