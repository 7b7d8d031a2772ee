"""Permutation importance: how much worse a model predicts when the cells of a column are those of other examples.

    block of examples --> margins --> metric                          ------+
         |                                                                  +--> loss, for each block and repeat
         +--> a column's cells permuted --> margins --> metric        ------+

Threads: one, which predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.defaults import BATCH_SIZE
from shoal.base.plural import counted
from shoal.base.progress import rows_bar
from shoal.base.scalars import whole
from shoal.data import Batch, Reader
from shoal.data.readers import field_number
from shoal.data.rebatch import joined, rows_of
from shoal.metrics import auc, logloss
from shoal.models.learner import Floats
from shoal.models.predictor import Predictor

if TYPE_CHECKING:
    from shoal.torch import Features

Metric = Literal["logloss", "auc"]
BLOCK = 100_000


class FeatureImportance(msgspec.Struct, frozen=True, kw_only=True):
    """The importance of one feature, or of several that have a column in common.

    Attributes
    ----------
    name : str
    columns : tuple of str
        Whose cells were permuted, those of an example together.
    importance : float
        How much the log-loss rises, or the AUC falls.
    low, high : float
        The 95 % interval.
    """

    name: str
    columns: tuple[str, ...]
    importance: float
    low: float
    high: float


class Importances(msgspec.Struct, frozen=True, kw_only=True):
    """What `importance` returns.

    Attributes
    ----------
    metric : str
    value : float
        The metric of the data as it is, the mean of the blocks.
    examples, blocks, repeats : int
    features : tuple of FeatureImportance
        The most important first.
    """

    metric: Metric
    value: float
    examples: int
    blocks: int
    repeats: int
    features: tuple[FeatureImportance, ...]


def importance(
    model: Any,
    data: Reader | Iterable[Batch],
    *,
    repeats: int = 5,
    metric: Metric = "logloss",
    seed: int = 0,
    block: int = BLOCK,
    progress: bool = False,
) -> Importances:
    """Measure how much a model relies on each of its features.

    Parameters
    ----------
    model : LogisticRegression, FactorizationMachine or ClickModel
    data : Reader or iterable of Batch
        Labelled examples; batches have fields (`shoal.data.Reader.with_fields`).
    repeats : int
        Permutations of each feature in each block.
    metric : {"logloss", "auc"}
    seed : int
        Of the permutations: the same data, block and seed give the same result.
    block : int
        Examples among which cells are permuted, and which are in memory at a time, up to one and a half times as many.
    progress : bool
        Whether to show a bar.

    Returns
    -------
    Importances

    Raises
    ------
    ValueError
        The data has no fields (libsvm, interactions), the model has several classes, or there is no example.

    Notes
    -----
    All cells of a column in an example move together: the items of a list, and the side columns and weights of a
    sequence with it. Crosses are made of the permuted features. Features that have a column in common, such as a number
    and its buckets, are measured as one.

    With d_i the loss by permuting in one repeat of one block, i = 1, ..., n, and w_i the share of the block's examples
    over the repeats, so that they add up to 1, the importance is m = Σ w_i d_i, and its interval m ± t s with
    s² = n / (n - 1) Σ w_i² (d_i - m)² and t the 97.5 % quantile of Student's distribution of n - 1 degrees of freedom.
    Of a single block it is the uncertainty of the permutations alone. Repeats of a block share its examples, so that of
    few blocks the interval is rather too narrow.

    Breiman, "Random forests", Machine Learning 45 (2001). Examples with permuted cells may be unlike any real ones, and
    of features that say the same each seems unimportant.
    """
    repeats, block = whole("repeats", repeats, 1), whole("block", block, 2)
    if metric not in _LOSS_BY:
        raise ValueError(f"metric is {metric!r}: pass logloss or auc")
    if model.is_multiclass:
        raise ValueError(f"{metric} is of two classes, and this model has {model.num_classes}")
    model.check_fitted()
    if isinstance(data, Reader):
        data = model.reading(data).with_columns().with_fields()
        model.check_format(data)
    units = _Units(model, data)
    measure, sign = _LOSS_BY[metric]
    sizes: list[int] = []
    values: list[float] = []
    losses: dict[str, dict[int, list[float]]] = {}  # by unit and block
    with rows_bar("importance", 0, show=progress) as add:
        for number, examples in enumerate(_blocks(data, block)):
            sizes.append(len(examples))
            values.append(measure(examples.labels, _margins(model, examples), examples.weights))
            for name, fields in units.of(examples).items():
                generator = np.random.default_rng([seed, number, *name.encode()])
                is_moved = np.isin(cast("npt.NDArray[np.uint64]", examples.fields), fields)
                found = losses.setdefault(name, {})[number] = []
                for _ in range(repeats):
                    permuted = _permuted(examples, is_moved, generator.permutation(len(examples)))
                    now = measure(permuted.labels, _margins(model, permuted), permuted.weights)
                    found.append(sign * (now - values[-1]))
                    add(len(examples))
    if not sizes:
        raise ValueError("the data has no examples: nothing was measured")
    shares = np.array(sizes) / sum(sizes)
    features = []
    for name, by_block in losses.items():
        # A feature that a block lacks loses nothing there.
        all_blocks = np.array([by_block.get(number, [0.0] * repeats) for number in range(len(sizes))])
        mean, half = _interval(all_blocks.reshape(-1), np.repeat(shares / repeats, repeats))
        features.append(
            FeatureImportance(
                name=name, columns=units.columns_of(name), importance=mean, low=mean - half, high=mean + half
            )
        )
    return Importances(
        metric=metric,
        value=_interval(np.array(values), shares)[0],
        examples=sum(sizes),
        blocks=len(sizes),
        repeats=repeats,
        features=tuple(sorted(features, key=lambda one: (-one.importance, one.name))),
    )


_LOSS_BY: dict[str, tuple[Callable[..., float], float]] = {"logloss": (logloss, 1.0), "auc": (auc, -1.0)}


# ---- features --------------------------------------------------------------------------------------------------------


class _Units:
    """The columns that are permuted together, by a name."""

    def __init__(self, model: Predictor, data: object) -> None:
        features = getattr(model, "features", None)
        if isinstance(features, int):
            raise ValueError("this model has features without names: describe them by shoal.torch.Features")
        self._columns: dict[str, tuple[str, ...]] | None = None  # None: any field of the data
        if features is not None:
            self._columns = _columns_of(features)
            self._number: Callable[[str], int] = features.number
            return
        form, schema = (data.format, data.schema) if isinstance(data, Reader) else (model.format or "", model.schema)
        columns = [name for role in _ROLES for name in schema.get(role) or ()]
        if form == "criteo":
            columns = [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        self._names = {field_number(form, name): name for name in columns}

    def of(self, batch: Batch) -> Mapping[str, npt.NDArray[np.uint64]]:
        """Return the numbers of the fields of each."""
        if batch.fields is None:
            raise ValueError("these batches have no fields: take them from reader.with_fields()")
        if self._columns is not None:
            return {
                name: np.array([self._number(column) for column in columns], np.uint64)
                for name, columns in self._columns.items()
            }
        fields = np.unique(batch.fields)
        return {self._names.get(number, str(number)): fields[i : i + 1] for i, number in enumerate(fields.tolist())}

    def columns_of(self, name: str) -> tuple[str, ...]:
        """Return the columns of one."""
        return (name,) if self._columns is None else self._columns[name]


_ROLES = ("categorical", "numeric", "lists", "vectors")


def _columns_of(features: Features) -> dict[str, tuple[str, ...]]:
    """Return the columns of each feature; features with one in common are one."""
    from shoal.models.features import column_of, sides_of

    found: list[tuple[list[str], dict[str, None]]] = []
    for one in features.all:
        if one.type == "cross":
            continue
        columns = dict.fromkeys(
            name for name in (column_of(one), one.weights, *sides_of(one), *one.side_numeric) if name is not None
        )
        names = [one.name]
        for group in [group for group in found if group[1].keys() & columns.keys()]:
            found.remove(group)
            names, columns = [*group[0], *names], {**group[1], **columns}
        found.append((names, columns))
    return {", ".join(names): tuple(columns) for names, columns in found}


# ---- examples --------------------------------------------------------------------------------------------------------


def _blocks(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Join batches to blocks; the last one has half of the size to one and a half, if there are several."""
    waiting: list[Batch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += len(batch)
        while 2 * count >= 3 * size:
            whole_block = joined(waiting)
            yield rows_of(whole_block, 0, size)
            waiting, count = [rows_of(whole_block, size, count)], count - size
    if count:
        yield joined(waiting)


def _permuted(batch: Batch, is_moved: npt.NDArray[np.bool_], order: npt.NDArray[np.int64]) -> Batch:
    """Return a batch whose example i has the features that are moved of example ``order[i]``, and its own others."""
    example = np.repeat(np.arange(len(batch)), np.diff(batch.indptr))
    target = np.empty(len(batch), np.int64)
    target[order] = np.arange(len(batch))
    now = np.where(is_moved, target[example], example)
    at = np.argsort(now, kind="stable")
    indptr = np.zeros(len(batch) + 1, np.int64)
    np.cumsum(np.bincount(now, minlength=len(batch)), out=indptr[1:])
    return Batch(
        batch.labels,
        indptr,
        batch.keys[at],
        None if batch.values is None else batch.values[at],
        batch.weights,
        cast("npt.NDArray[np.uint64]", batch.fields)[at],
    )


def _margins(model: Predictor, batch: Batch) -> Floats:
    some = range(0, len(batch), BATCH_SIZE)
    return np.concatenate(
        [model.decision_function(rows_of(batch, begin, min(begin + BATCH_SIZE, len(batch)))) for begin in some]
    )


# ---- the interval ----------------------------------------------------------------------------------------------------


def _interval(losses: Floats, shares: Floats) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval; blocks of one class have no AUC, and are left out."""
    known = ~np.isnan(losses)
    losses, shares = losses[known], shares[known]
    n = len(losses)
    if n == 0:
        return math.nan, math.nan
    shares = shares / shares.sum()
    mean = float(shares @ losses)
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(n / (n - 1) * float(np.square(shares) @ np.square(losses - mean)))
    return mean, _student(n - 1) * deviation


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution: exact to three digits, then by Cornish and Fisher."""
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def as_text(found: Importances) -> str:
    """Return importances as a table."""
    blocks = "" if found.blocks == 1 else f" in {found.blocks:,} blocks"
    what = "the log-loss rises" if found.metric == "logloss" else "the AUC falls"
    lines = [
        f"{found.metric} {found.value:.6f}  ({counted(found.examples, 'example')}{blocks})",
        f"how much {what} if a feature is permuted, by {counted(found.repeats, 'repeat')}"
        + (", and the 95 % interval:" if found.repeats * found.blocks > 1 else ":"),
    ]
    for one in found.features:
        interval = "" if math.isnan(one.low) else f"[{one.low:+.6f}, {one.high:+.6f}]  "
        lines.append(f"    {one.importance:<+11.6f} {interval}{one.name}")
    return "\n".join(lines)
