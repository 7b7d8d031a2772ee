"""The settings of a fit: passes, order of the examples, sampling, early stopping.

A plan derives each pass's batches from the reader's: files in another order, negatives sampled, examples shuffled
(preprocessing.py). The batches are a function of the data, the seed and the number of the pass.

Threads: a plan is immutable; the batches of a pass belong to the thread that iterates them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, Self, get_args

import msgspec
import numpy as np

from shoal.base.scalars import make_plain, whole
from shoal.config import FitConfig
from shoal.data import Batch, Reader
from shoal.data.rebatch import Cursor
from shoal.metrics import GroupedAUC, Metrics
from shoal.models import preprocessing

Metric = Literal["logloss", "auc", "gauc", "accuracy"]

# Sampling numbers the examples of each pass from a multiple of this: a pass has fewer examples.
_PASS_BITS = 40


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """The end of a fit whose validation metric improves no more; the model then has the weights of its best pass.

    Parameters
    ----------
    patience : int
        Passes in a row without improvement on ``valid`` after which the fit ends.
    metric : {"logloss", "auc", "gauc", "accuracy"}
        "auc" is of two classes, "gauc" of data with groups, "accuracy" of several classes.
    min_delta : float
        The smallest change of ``metric`` that counts as an improvement.

    Raises
    ------
    ValueError
        ``patience`` is below 1, there is no such metric, or ``min_delta`` is negative.
    """

    patience: int
    metric: Metric = field(default="logloss", kw_only=True)
    min_delta: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        make_plain(self)
        if self.patience < 1:
            raise ValueError(
                f"patience is {self.patience}: pass the number of passes to wait for an improvement, 1 or more"
            )
        if not self.min_delta >= 0.0:
            raise ValueError(f"min_delta is {self.min_delta}: pass 0 or more")
        if self.metric not in get_args(Metric):
            raise ValueError(
                f"metric is {self.metric!r}: pass 'logloss' or 'auc', with groups 'gauc', of several classes 'accuracy'"
            )


class Plateau(msgspec.Struct, frozen=True, kw_only=True):
    """Learning rates that fall when the validation metric improves no more, those of tables and of a dense part.

    Parameters
    ----------
    factor : float
        Of the rates at each reduction, above 0 and below 1.
    patience : int
        After more passes than this in a row without an improvement the rates are reduced, and the count begins again.
    min_rate : float
        No rate falls below this.
    metric, min_delta
        As of `EarlyStopping`.

    Raises
    ------
    ValueError
        A number is out of range, or there is no such metric.
    """

    factor: float = 0.1
    patience: int = 0
    min_rate: float = 1e-6
    metric: Metric = "logloss"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        if not 0.0 < self.factor < 1.0:
            raise ValueError(f"factor of a plateau is {self.factor}: pass a number above 0 and below 1")
        if self.patience < 0:
            raise ValueError(f"patience of a plateau is {self.patience}: pass the number of passes, 0 or more")
        if not 0.0 <= self.min_rate < np.inf:
            raise ValueError(f"min_rate of a plateau is {self.min_rate}: pass 0 or more")
        EarlyStopping(1, metric=self.metric, min_delta=self.min_delta)

    def scale(self, gains: Iterable[float]) -> float:
        """Return the factor of the rates after passes with these gains, of which the greatest is the best."""
        best, waited, reductions = -np.inf, 0, 0
        for gain in gains:
            if gain > best + self.min_delta:
                best, waited = gain, 0
                continue
            waited += 1
            if waited > self.patience:
                waited, reductions = 0, reductions + 1
        return self.factor**reductions

    def scale_of(self, rate: float, scale: float) -> float:
        """Return the factor of a rate that would be multiplied by ``scale``, and does not fall below `min_rate`."""
        return max(scale, min(1.0, self.min_rate / rate)) if rate > 0 else 1.0


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model that say how it learns from examples; those of the last fit belong to a saved model."""

    negative_rate: float = 1.0
    warm_up: bool = True
    seed: int = 0
    class_weight: Mapping[Any, float] | str | None = None
    plateau: Plateau | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        preprocessing.Sampling(self.negative_rate, self.seed)
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}: pass 0 to 2**64 - 1")


def early_stopping_of(config: FitConfig) -> EarlyStopping | None:
    """Return when a fit with these settings ends early."""
    if config.patience is None:
        return None
    return EarlyStopping(config.patience, metric=config.metric, min_delta=config.min_delta)


class Block(NamedTuple):
    """What a plan makes batches of by itself: one batch of the reader, or those that it shuffles together.

    ``read`` is the number of the reader's examples before it, ``cursor`` the reader's there, but of the first block of
    an iteration, and of other data.
    """

    number: int
    read: int
    cursor: Cursor


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `shoal.models.Model.fit`: passes, order, sampling and early stopping."""

    epochs: int = 1
    shuffle: bool | int = False
    negative_rate: float = 1.0
    warm_up: bool = True
    seed: int = 0
    patience: int | None = None
    min_delta: float = 0.0
    metric: Metric = "logloss"
    class_weight: tuple[float, ...] | None = None
    plateau: Plateau | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        whole("epochs", self.epochs, 1)
        preprocessing.shuffle_buffer(self.shuffle)
        Learning(negative_rate=self.negative_rate, seed=self.seed)
        EarlyStopping(1 if self.patience is None else self.patience, metric=self.metric, min_delta=self.min_delta)
        if self.class_weight is not None and not all(0 <= weight < np.inf for weight in self.class_weight):
            raise ValueError(f"class_weight is {self.class_weight}: pass finite numbers, 0 or more")

    @classmethod
    def of(
        cls,
        learning: Learning,
        epochs: int,
        shuffle: bool | int,
        early_stopping: EarlyStopping | None,
        class_weight: tuple[float, ...] | None = None,
    ) -> Self:
        """Return the plan of a fit with these settings."""
        if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
            raise TypeError(f"early_stopping is {early_stopping!r}: pass shoal.models.EarlyStopping(patience)")
        return cls(
            epochs=epochs,
            shuffle=shuffle,
            negative_rate=learning.negative_rate,
            warm_up=learning.warm_up,
            seed=learning.seed,
            plateau=learning.plateau,
            class_weight=class_weight,
            **({} if early_stopping is None else asdict(early_stopping)),
        )

    def learning(self, classes: Sequence[Any] | None) -> Learning:
        """Return the settings of a model of these classes that has learned by this plan."""
        weights = self.class_weight
        named = None if weights is None else dict(zip(classes or range(len(weights)), weights, strict=True))
        return Learning(
            negative_rate=self.negative_rate,
            warm_up=self.warm_up,
            seed=self.seed,
            class_weight=named,
            plateau=self.plateau,
        )

    def source(self, reader: Iterable[Batch], epoch: int) -> Iterable[Batch]:
        """Return the data of a pass, counted from 0: with shuffling a reader's files in another order each time."""
        if not preprocessing.shuffle_buffer(self.shuffle) or not isinstance(reader, Reader) or reader.resumed:
            return reader
        files = len(reader.paths)
        order = np.random.default_rng([self.seed, epoch, 1]).permutation(files)
        return reader if files == 1 else reader.in_order(order.tolist())

    @property
    def common(self) -> dict[str, object]:
        """The settings that all workers of a fit need to have in common, by name."""
        names = ("epochs", "negative_rate", "patience", "min_delta", "metric", "plateau")
        return {name: getattr(self, name) for name in names}

    @property
    def metrics(self) -> set[Metric]:
        """The metrics of validation data that the fit depends on."""
        stops: set[Metric] = set() if self.patience is None else {self.metric}
        return stops if self.plateau is None else stops | {self.plateau.metric}

    @property
    def shuffles(self) -> bool:
        """Whether the order of examples changes."""
        return bool(preprocessing.shuffle_buffer(self.shuffle))

    def batches(
        self,
        reader: Iterable[Batch],
        epoch: int,
        known: int,
        *,
        block: int = 0,
        read: int = 0,
        learned: int = 0,
        workers: int = 1,
    ) -> Generator[tuple[Batch, Block]]:
        """Return the batches of a pass, counted from 0, from a block on, for models that have learned from ``known``.

        ``read`` and ``learned`` are the examples of the reader, and of batches, before that block. The reader has the
        examples of one of ``workers``.
        """
        buffer = preprocessing.shuffle_buffer(self.shuffle)
        size = max(1, buffer)
        cursor = Cursor()
        failed: Exception | None = None
        with closing(preprocessing.examples_of(reader)) as source:
            while True:
                place = Block(block, read, cursor)
                taken: list[Batch] = []
                try:
                    for batch in islice(source, size):
                        taken.append(self._chosen(batch, (epoch << _PASS_BITS) + read))
                        read += len(batch)
                except Exception as error:
                    failed = error  # after the batches before it
                if isinstance(reader, Reader):
                    cursor = reader.cursor
                made: Iterable[Batch] = taken
                if buffer:
                    made = preprocessing.shuffled(taken, [self.seed, epoch, block])
                if self.warm_up:
                    made = preprocessing.warmed_up(made, known + workers * learned, workers)
                for batch in made:
                    learned += len(batch)
                    yield batch, place
                if failed is not None:
                    raise failed
                if len(taken) < size:
                    return
                block += 1

    def _chosen(self, batch: Batch, first: int) -> Batch:
        """Sample and weigh a batch of the reader whose first example has the number ``first``; a shuffle holds less."""
        if self.negative_rate < 1.0:
            batch = preprocessing.Sampling(self.negative_rate, self.seed).apply(batch, first)
        return batch if self.class_weight is None else preprocessing.class_weighted(batch, self.class_weight)

    def settings(self) -> list[tuple[str, str]]:
        """Return the settings as names and values to be printed."""
        buffer = preprocessing.shuffle_buffer(self.shuffle)
        passes = f"{self.epochs:,}"
        if self.patience is not None:
            named = {"logloss": "log-loss", "auc": "AUC", "gauc": "GAUC"}.get(self.metric, self.metric)
            step = f" of more than {self.min_delta:g}" if self.min_delta else ""
            passes += f" at most, stopping after {self.patience:,} without progress{step} in held-out {named}"
        plateau = self.plateau
        drawn = bool(buffer) or self.negative_rate < 1.0
        return [
            ("epochs", passes),
            ("shuffle", f"among {buffer:,} batches" if buffer else "no"),
            ("warm-up", "small batches at first" if self.warm_up else "no"),
            *([("class weights", _listed(self.class_weight))] if self.class_weight else []),
            *(
                [("rates", f"times {plateau.factor:g} after {plateau.patience + 1:,} passes without progress")]
                if plateau is not None
                else []
            ),
            ("negatives", "all" if self.negative_rate == 1.0 else f"{100 * self.negative_rate:g} %, reweighted"),
            *([("seed of the order and the choice", f"{self.seed}")] if drawn else []),
        ]


class FitInput(NamedTuple):
    """What models learn from, and are measured on after each pass, by which plan."""

    reader: Any
    valid: Any
    plan: Plan


def gain_of(metric: Metric, metrics: Metrics, grouped: GroupedAUC | None) -> float:
    """Return the quantity that early stopping maximizes."""
    if metric == "gauc":
        found = None if grouped is None else grouped.gauc
    else:
        found = -metrics.logloss if metric == "logloss" else getattr(metrics, metric)
    assert found is not None, "learners refuse plans with a metric that they do not have"
    return float(found)


def _listed(weights: tuple[float, ...]) -> str:
    return (" and " if len(weights) == 2 else ", ").join(f"{weight:g}" for weight in weights)
