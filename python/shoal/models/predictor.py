"""Predictor: the base of all models, which predict from batches: margins, probabilities, metrics, calibration.

A kind of predictor defines how a batch becomes margins (`_margins`), and how a batch is prepared ahead of time
(`prepare`); the rest is here.

Threads: predictions may be made from any thread, also while another one learns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shoal.data import Batch, Reader
from shoal.data.readers import NAMED_FORMATS
from shoal.errors import CorruptionError
from shoal.metrics import Accumulator, Metrics, StreamMetrics, probabilities
from shoal.models import evaluation, inputs, sources
from shoal.models.calibration import Calibration, from_dict, isotonic, platt
from shoal.models.history import History, Record
from shoal.models.learner import Floats, Prepared
from shoal.models.measured import Margins, MeasuredExamples
from shoal.models.plan import Plan
from shoal.table.table import Table

_FEATURES = ("categorical", "numeric", "lists", "vectors", "interactions")  # of a schema: the sources of keys
Method = Literal["isotonic", "platt"]


class Predictor(ABC):
    """A model that computes log-odds from batches, and was learned from a reader."""

    def __init__(self) -> None:
        self._record = Record()
        self._calibration: Calibration | None = None

    # ---- defined by a kind of predictor ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """All tables whose rows were learned."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """Prepare a batch for `margins`."""

    def refresh(self) -> None:  # noqa: B027
        """Make what it predicts with the newest, apart from rows, which each prediction reads."""

    @abstractmethod
    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Prepared]]:
        """Prepare each batch, ahead where it is faster; an error of ``batches`` is raised after all earlier batches."""

    @abstractmethod
    def _margins(self, batch: Batch, prepared: Prepared) -> Floats:
        """Compute the log-odds, float64[n], not calibrated."""

    @abstractmethod
    def check_fitted(self) -> None:
        """Raise ValueError if the model has not learned from any data."""

    # ---- properties --------------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """The record that the training loop writes."""
        return self._record

    @property
    def examples(self) -> int:
        """Examples learned from so far; an example counts once for each pass."""
        return self._record.examples

    @property
    def format(self) -> str | None:
        """Name of the format that the model was fitted on ("libsvm", "criteo"), if known."""
        return self._record.format

    @property
    def schema(self) -> dict[str, Any]:
        """Arguments of the function that made the reader: columns, interactions. See `shoal.data.Reader.schema`."""
        return dict(self._record.schema)

    @property
    def history(self) -> History:
        """Learning curve and summary of the passes of `fit`."""
        return self._record.history

    @property
    def calibration(self) -> Calibration | None:
        """The map that `calibrate` fitted; None before, and after further learning."""
        return self._calibration

    @property
    def is_normalized(self) -> bool:
        """Whether values are divided by their scales."""
        return False

    @property
    def can_normalize(self) -> bool:
        """Whether a model of this kind can be made that divides values by their scales."""
        return False

    def may_begin(self, batch: Batch, *, learns: bool) -> bool:
        """No: it begins when it is asked for."""
        return False

    def begin(self, prepared: Prepared, clocks: int) -> None:
        """Begin nothing."""
        return

    def forget(self, prepared: Prepared) -> None:
        """Drop nothing."""
        return

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return 2

    @property
    def is_multiclass(self) -> bool:
        """Whether the model computes a margin and a probability for each class, rather than the log-odds of label 1."""
        return False

    def accumulator(self) -> StreamMetrics:
        """Return an empty accumulator for the metrics of a pass."""
        return Accumulator()

    def examples_to_measure(self, models: int) -> MeasuredExamples:
        """Return an empty object for the examples that this kind of model, in all ``models``, is measured on."""
        return Margins(models, self.check_groups)

    def check_plan(self, plan: Plan) -> None:
        """Raise ValueError if a plan has a setting that this kind of model does not support."""
        if "accuracy" in plan.metrics:
            raise ValueError("metric is 'accuracy', which is of several classes: pass 'logloss' or 'auc'")
        if "gauc" in plan.metrics and not self.is_grouped:
            raise ValueError("metric is 'gauc', and nothing names the groups of examples: pass 'logloss' or 'auc'")

    @property
    def is_grouped(self) -> bool:
        """Whether examples have groups."""
        return False

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        """Return None: the features of a batch define no groups."""
        return None

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Whether any of the examples has a group; ``groups`` as from `groups`."""
        return True

    def check_groups(self, groups: npt.NDArray[np.uint64]) -> None:
        """Raise ValueError if none of the examples has a group; ``groups`` as from `groups`."""
        if not self.has_groups(groups):
            raise ValueError("no example has the field by which examples are grouped")

    def reading(self, data: Any) -> Any:
        """Return the data in the form that the model reads.

        A reader of all columns of which nothing is said reads those that the model has learned from, or else those of
        its first file. It may also get fields, or numbers of classes.
        """
        return data.with_columns(self._record.schema.get("categorical")) if isinstance(data, Reader) else data

    def nonfinite_rows(self) -> int:
        """Count the gradients that were dropped because they, or the new row, were not finite."""
        return sum(table.stats().nonfinite_rows for table in self.tables)

    def record_format(self, data: object) -> None:
        """Record the format of the data that is learned from."""
        self._record.format = getattr(data, "format", None) or self._record.format
        self._record.schema = getattr(data, "schema", None) or self._record.schema

    # ---- calibrating -------------------------------------------------------------------------------------------------

    def calibrate(self, data: Any, method: Method = "isotonic", *, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit a map from margins to probabilities that match observed frequencies, for all later predictions.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame
            Examples that the model has not learned from, with labels; their weights count.
        method : {"isotonic", "platt"}
            "isotonic": a non-decreasing function, for ten thousand examples or more. "platt": a logistic curve with two
            parameters.
        y, sample_weight : array-like of shape (n,), optional
            Of an array or a frame, as for `evaluate`.

        Returns
        -------
        Model
            Itself. The map is `calibration`; it is saved with the model. Further learning removes it, since it was
            fitted for the earlier weights.

        Raises
        ------
        ValueError
            There are no examples, the model has not learned from anything yet, or there is no such method.

        Notes
        -----
        Holds all margins and labels, 12 bytes an example, and about 60 more while they are sorted. The order of
        predictions is unchanged, except that isotonic calibration gives the examples of a block the same probability,
        which may change the AUC slightly.

        Examples
        --------
        >>> import numpy as np
        >>> from shoal import Batch, LogisticRegression
        >>> batch = Batch(np.array([1, 1, 0], np.float32), np.arange(4), np.array([7, 7, 7], np.uint64), None)
        >>> with LogisticRegression() as model:
        ...     _ = model.partial_fit(batch)
        ...     model.calibrate(batch, "isotonic").probabilities(batch).round(4).tolist()
        [0.6667, 0.6667, 0.6667]
        """
        fits: dict[str, Callable[..., Calibration]] = {"isotonic": isotonic, "platt": platt}
        if not isinstance(method, str):
            raise TypeError(f"method is a {type(method).__name__}: pass labels by their name, as in calibrate(X, y=y)")
        if method not in fits:
            raise ValueError(f"method is {method!r}: pass 'isotonic' or 'platt'")
        self.check_fitted()
        data = self._to_measure(data, y, sample_weight)
        self.check_format(data)
        batches = [data] if isinstance(data, Batch) else data
        sources.check_iterable(batches, "data", passes=1)
        before, self._calibration = self._calibration, None
        try:
            found = evaluation.predictions([self], batches)
            before = fits[method](found.margins[0], found.labels, found.weights)
        finally:
            self._calibration = before
        return self

    # ---- predicting --------------------------------------------------------------------------------------------------

    def margins(self, batch: Batch, prepared: Prepared) -> Floats:
        """Compute the margins of a batch that is prepared, calibrated if the predictor is."""
        margins = self._margins(batch, prepared)
        return margins if self._calibration is None else self._calibration.margins(margins)

    def decision_function(self, data: Any) -> Floats:
        """Compute the margins (log-odds) of examples, calibrated if the model is.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame
            An array has as many columns as the model has learned from; those of a frame are found by their names.
            Labels of a reader's data may be missing: `shoal.data.Reader.unlabelled`.

        Returns
        -------
        float64[n]

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        self.check_fitted()
        batches = inputs.prediction_data(self._record, data, labelled=False, classes=self.num_classes)
        if isinstance(batches, Reader):
            batches = batches.unlabelled()
        if isinstance(batches, Batch):
            return self.margins(batches, self.prepare(batches))
        sources.check_iterable(batches, "data", passes=1)
        batches = self.reading(batches)
        self.check_format(batches)
        return evaluation.predictions([self], batches).margins[0]

    def probabilities(self, data: Any) -> Floats:
        """Compute the probability of label 1 of each example: one number, as click-through rates are used.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        float64[n], of several classes float64[n, K]

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        return probabilities(self.decision_function(data))

    def predict_proba(self, data: Any) -> Floats:
        """Compute the probabilities of all classes, as in scikit-learn; those of an example sum to 1.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        float64[n, K]
            A column for each of `classes_`.

        Raises
        ------
        ValueError
            The model has not learned from anything yet, or learned from data with other features.
        """
        if self.is_multiclass:
            return self.probabilities(data)
        # Each is computed from its own margin: 1 - p would lose small probabilities.
        margins = self.decision_function(data)
        return np.stack([probabilities(-margins), probabilities(margins)], axis=1)

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The labels that the model was fitted on, of two the negative one first; 0, 1, ... for a reader."""
        return np.array(range(self.num_classes) if self._record.classes is None else self._record.classes)

    def predict(self, data: Any) -> npt.NDArray[Any]:
        """Return the likelier class of each example.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame

        Returns
        -------
        array of shape (n,)
            Values of `classes_`: the second one if the probability of label 1 is above one half.
        """
        chosen: npt.NDArray[Any] = self.classes_[(self.decision_function(data) > 0).astype(np.intp)]
        return chosen

    def score(self, data: Any, y: Any = None, *, sample_weight: Any = None) -> float:
        """Compute the accuracy: the fraction of examples, by weight, whose class is predicted correctly.

        Parameters
        ----------
        data, y, sample_weight
            As for `evaluate`, whose metrics suit rare events better.

        Returns
        -------
        float
        """
        self.check_fitted()
        batches = self._to_measure(data, y, sample_weight)
        found = evaluation.predictions([self], [batches] if isinstance(batches, Batch) else batches)
        right = (found.margins[0] > 0) == (found.labels == 1)
        if len(right) == 0:
            raise ValueError(f"{sources.why_empty(data)}: nothing was measured")
        return float(np.average(right, weights=found.weights))

    def evaluate(self, data: Any, y: Any = None, *, sample_weight: Any = None) -> Metrics:
        """Measure the predictions of labelled examples; nothing is learned.

        Parameters
        ----------
        data : Batch, Reader, iterable of Batch, array, sparse matrix or frame
        y : array-like of shape (n,), optional
            Labels of an array or a frame; not needed if a frame has the label column that the model was fitted on.
        sample_weight : array-like of shape (n,), optional
            Of an array or a frame.

        Returns
        -------
        Metrics
            Exact and by weight: holds all margins and labels, 12 bytes an example, and about 60 more while they are
            sorted for the AUC.

        Raises
        ------
        ValueError
            The model has not learned from anything yet.
        """
        self.check_fitted()
        return evaluation.measure([self], self._to_measure(data, y, sample_weight))[0].metrics

    def _to_measure(self, data: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return the labelled examples as batches."""
        found = inputs.prediction_data(self._record, data, y, sample_weight, labelled=True, classes=self.num_classes)
        return self.reading(found)

    def check_format(self, data: object) -> None:
        """Raise ValueError if the keys of ``data`` stand for other features than those that were learned."""
        check_same_features(self.format, self.schema, data)


def read_calibration(described: dict[str, Any] | None, where: object) -> Calibration | None:
    """Make the calibration that the file of a model describes; ``where`` names the file in errors."""
    if described is None:
        return None
    try:
        return from_dict(described)
    except ValueError as error:
        raise CorruptionError(f"{where}: {error}") from None


def check_same_features(learned: str | None, its: Mapping[str, Any], data: object) -> None:
    """Raise ValueError if the keys of ``data`` stand for other features than those of a format and a schema."""
    form = getattr(data, "format", None)
    if form is not None and learned is not None and _kind(learned) != _kind(form):
        raise ValueError(
            f"this model learned from {learned} data, its keys have no meaning for {form}: pass a reader of "
            f"{learned} data"
        )
    schema = getattr(data, "schema", {})
    for name in _FEATURES:
        if learned is not None and form is not None and _unordered(schema.get(name)) != _unordered(its.get(name)):
            raise ValueError(
                f"this model learned from data with {name}={its.get(name)!r}, and this reader has "
                f"{schema.get(name)!r}: pass the same, as in read_{form}(path, **model.schema)"
            )


def _unordered(columns: Any) -> Any:
    """Return names of columns in an order of their own: that of a file does not matter."""
    is_names = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    return sorted(columns) if is_names else columns


def _kind(form: str) -> str:
    return "columns" if form in NAMED_FORMATS else form
