"""The compared programs: each finds settings on a part of the training examples, then learns from all of them.

    shoal                    LogisticRegression by FTRL: alpha, l2, batch size, passes
    scikit-learn             LogisticRegression by L-BFGS, to the optimum: C
    Vowpal Wabbit            its default update: learning rate, l2, passes
    Vowpal Wabbit --ftrl     alpha, l2, passes

All learn from the same features with the same values, including a constant one, with one thread each. If examples are
in the order of time, a setting of all programs that learn example by example decides whether they keep this order;
otherwise examples are shuffled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import shoal
from quality.search import LEAST, Settings, climb
from quality.sets import FEW, Split, batches
from shoal import Batch
from shoal.metrics import auc, logloss
from shoal.models import EarlyStopping
from shoal.models.plan import Metric
from shoal.models.preprocessing import take

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Settings, their gain on the validation examples, and how many were tried."""

    settings: Settings
    gain: float
    tried: int


class Program(Protocol):
    """A program that learns and predicts."""

    name: str

    def search(self, split: Split, metric: Metric) -> Found:
        """Find settings without using the test part."""

    def margins(self, train: Batch, test: Batch, settings: Settings) -> Floats:
        """Learn from ``train`` and return the margins of ``test``."""


def _gain(program: Program, split: Split, metric: Metric) -> Callable[[Settings], float]:
    """Return the objective of the search: the mean gain over the validation parts."""
    parts = split.parts()

    def gain(settings: Settings) -> float:
        gains = []
        for learn, choose in parts:
            margins = program.margins(learn, choose, settings)
            gains.append(auc(choose.labels, margins) if metric == "auc" else -logloss(choose.labels, margins))
        return statistics.fmean(gains)

    return gain


def _orders(split: Split) -> list[str]:
    return ["mixed", "time"] if split.in_time else ["mixed"]


class Shoal:
    """The number of passes is the best on the validation examples, evaluated after each pass."""

    name = "shoal"

    PASSES = 32
    ALPHA = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    L2 = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
    BATCH = (16, 64, 256, 1024, 4096)

    def search(self, split: Split, metric: Metric) -> Found:
        """Climb from the best point of a coarse grid, which is trained at once, for each order."""
        parts = split.parts()
        start, tried = self._start(split, *parts[0], metric)
        passes: dict[tuple[Any, ...], int] = {}

        def gain(settings: Settings) -> float:
            curves = []  # the gain after each pass, of each part
            for learn, choose in parts:
                with _fitted(learn, settings, self.PASSES, batches(choose, 8192), metric) as model:
                    seen = [one.valid for one in model.history.passes if one.valid is not None]
                    curves.append([one.auc if metric == "auc" else -one.logloss for one in seen])
            together = [statistics.fmean(gains) for gains in zip(*curves, strict=False)]  # up to the shortest
            best = max(together)
            passes[tuple(settings.values())] = together.index(best) + 1
            return best

        axes = {"alpha": self.ALPHA, "l2": self.L2, "batch": self.BATCH, "order": _orders(split)}
        best, found, climbed = climb(axes, start, gain)
        return Found(settings={**best, "passes": passes[tuple(best.values())]}, gain=found, tried=tried + climbed)

    def _start(self, split: Split, learn: Batch, choose: Batch, metric: Metric) -> tuple[Settings, int]:
        """Return the best point of a coarse grid for each order, and the number of settings tried."""
        size = 256 if len(learn) > FEW else 16
        training, seen = batches(learn, size), batches(choose, 8192)
        found: list[tuple[float, Settings]] = []
        tried = 0
        for order in _orders(split):
            with (
                shoal.local(slots=64, threads=1) as store,
                shoal.models.LogisticRegressionGrid(
                    {"alpha": self.ALPHA[1::2], "l2": self.L2[::3]}, store=store
                ) as grid,
            ):
                grid.fit(
                    training,
                    epochs=8,
                    valid=seen,
                    shuffle=len(training) if order == "mixed" else False,
                    progress=False,
                    early_stopping=EarlyStopping(2, metric=metric),
                )
                best = grid.results(metric)[0]
                gain = best.measured.auc if metric == "auc" else -best.measured.logloss
                found.append((gain, {**best.settings, "batch": size, "order": order}))
                tried += len(grid)
        return max(found, key=lambda one: one[0])[1], tried

    def margins(self, train: Batch, test: Batch, settings: Settings) -> Floats:
        """Learn from all examples, for the given number of passes."""
        with _fitted(train, settings, settings["passes"]) as model:
            return model.decision_function(batches(test, 8192))


@contextmanager
def _fitted(
    train: Batch,
    settings: Settings,
    passes: int,
    seen: list[Batch] | None = None,
    metric: Metric = "logloss",
) -> Iterator[shoal.LogisticRegression]:
    """Return a trained model; from its best pass if there are validation examples."""
    training = batches(train, settings["batch"])
    stopping = None if seen is None else EarlyStopping(3, min_delta=LEAST / 10, metric=metric)
    with shoal.local(slots=64, threads=1) as store:
        model = shoal.LogisticRegression(shoal.FTRL(alpha=settings["alpha"], l2=settings["l2"]), store=store)
        model.fit(
            training,
            epochs=passes,
            valid=seen,
            shuffle=len(training) if settings["order"] == "mixed" else False,
            progress=False,
            early_stopping=stopping,
        )
        yield model


class ScikitLearn:
    """The optimum of the loss with l2, by L-BFGS."""

    name = "scikit-learn"

    C = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

    def search(self, split: Split, metric: Metric) -> Found:
        """Find C."""
        found = climb({"C": self.C}, {"C": 1.0}, _gain(self, split, metric))
        return Found(settings=found[0], gain=found[1], tried=found[2])

    def margins(self, train: Batch, test: Batch, settings: Settings) -> Floats:
        """Learn to the optimum."""
        from sklearn.linear_model import LogisticRegression

        columns = np.unique(train.keys)
        model = LogisticRegression(C=settings["C"], max_iter=5000)
        model.fit(_matrix(train, columns), train.labels)
        return np.asarray(model.decision_function(_matrix(test, columns)))


def _matrix(examples: Batch, columns: npt.NDArray[np.uint64]) -> Any:
    """Return a sparse matrix for scikit-learn; features without a column are left out."""
    from scipy.sparse import csr_matrix

    numbers, known = numbered(examples.keys, columns)
    values = np.ones(len(numbers)) if examples.values is None else examples.values.astype(np.float64)
    return csr_matrix((values * known, numbers, examples.indptr), shape=(len(examples), len(columns)))


def numbered(
    keys: npt.NDArray[np.uint64], columns: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the column number of each key, and whether it has one (otherwise the number belongs to another key)."""
    numbers = np.minimum(np.searchsorted(columns, keys), len(columns) - 1)
    return numbers, columns[numbers] == keys


class VowpalWabbit:
    """Its command line, with text files: features are numbers below 2^b, so no two share a weight.

    Its own passes over its cache are used; its hold-out set is disabled.
    """

    CONSTANT = 11_650_396  # the number of Vowpal Wabbit's constant feature, before it is cut to b bits
    PASSES = (1, 2, 4, 8, 16, 32)

    def __init__(self, folder: Path, ftrl: bool) -> None:
        self.name = "Vowpal Wabbit --ftrl" if ftrl else "Vowpal Wabbit"
        self._folder = folder / self.name.replace(" ", "")
        self._folder.mkdir()
        self._ftrl = ftrl
        self._texts: dict[tuple[int, str], Path] = {}  # by (identity of the examples, order)
        self._kept: list[Batch] = []  # keeps the identities unique

    def search(self, split: Split, metric: Metric) -> Found:
        """Climb from its default settings, for each order."""
        if self._ftrl:
            axes: dict[str, tuple[float, ...]] = {"alpha": Shoal.ALPHA, "l2": Shoal.L2}
            start = {"alpha": 0.1, "l2": 0.0}
        else:
            axes = {
                "learning_rate": (0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 3.0, 10.0),
                "l2": (0.0, 1e-8, 3e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4),
            }
            start = {"learning_rate": 0.5, "l2": 0.0}
        orders, gain = _orders(split), _gain(self, split, metric)
        found = [
            climb({**axes, "passes": self.PASSES, "order": orders}, {**start, "passes": 4, "order": order}, gain)
            for order in orders
        ]
        best = max(found, key=lambda one: one[1])
        return Found(settings=best[0], gain=best[1], tried=sum(one[2] for one in found))

    def margins(self, train: Batch, test: Batch, settings: Settings) -> Floats:
        """Write the examples as text, once, learn and predict."""
        import vowpalwabbit

        columns = np.unique(train.keys)
        bits = next(b for b in range(8, 32) if 2**b > len(columns) <= self.CONSTANT % 2**b)
        text = self._text(train, settings["order"], columns)
        asked = self._text(test, "time", columns)
        if self._ftrl:
            update = f"--ftrl --ftrl_alpha {settings['alpha']} --ftrl_beta 1 --l2 {settings['l2']}"
        else:
            update = f"--learning_rate {settings['learning_rate']} --l2 {settings['l2']}"
        model, raw = self._folder / "model", self._folder / "raw"
        vowpalwabbit.Workspace(
            f"{update} -b {bits} --loss_function logistic --holdout_off --quiet -d {text} --cache_file {text}.cache "
            f"--passes {settings['passes']} -f {model}"
        ).finish()
        vowpalwabbit.Workspace(f"-t -i {model} -d {asked} -r {raw} --quiet").finish()
        return np.loadtxt(raw, usecols=0, ndmin=1)

    def _text(self, examples: Batch, order: str, columns: npt.NDArray[np.uint64]) -> Path:
        place = (id(examples), order)
        if place not in self._texts:
            self._kept.append(examples)
            self._texts[place] = self._folder / f"{len(self._texts)}.vw"
            mixed = np.random.default_rng(3).permutation(len(examples))
            write(self._texts[place], take(examples, mixed) if order == "mixed" else examples, columns)
        return self._texts[place]


def write(path: Path, examples: Batch, columns: npt.NDArray[np.uint64]) -> None:
    """Write Vowpal Wabbit's text; features without a column are left out."""
    numbers, known = numbered(examples.keys, columns)
    if examples.values is None:
        words = [f" {number}" for number in numbers.tolist()]
    else:
        words = [f" {n}:{value:.9g}" for n, value in zip(numbers.tolist(), examples.values.tolist(), strict=True)]
    ends, there = examples.indptr.tolist(), known.tolist()
    with path.open("w") as text:
        for i, label in enumerate(examples.labels.tolist()):
            text.write("1 |" if label == 1.0 else "-1 |")
            text.writelines(words[j] for j in range(ends[i], ends[i + 1]) if there[j])
            text.write("\n")


PEERS: dict[str, Callable[[Path], list[Program]]] = {
    "sklearn": lambda folder: [ScikitLearn()],
    "vowpalwabbit": lambda folder: [VowpalWabbit(folder, ftrl=False), VowpalWabbit(folder, ftrl=True)],
}
