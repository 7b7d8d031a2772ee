"""An estimator for scikit-learn: logistic regression by FTRL-Proximal, for pipelines and searches over sparse matrices.

    X (dense, CSR, CSC, FeatureHasher's) --rows--> Batch: the index of a column is its key --> LogisticRegression

The extra ``sklearn`` installs the dependencies of this module; ``import shoal`` does not import it.

Threads: as scikit-learn's own estimators, one thread at a time. A fitted estimator that a fork inherits raises
`shoal.errors.WrongProcessError`; a pickled one, as joblib sends it, works in any process.
"""

from __future__ import annotations

from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt

from shoal.data.arrays import MatrixReader
from shoal.models import LogisticRegression, MulticlassRegression
from shoal.models.multiclass import MultiClass
from shoal.optim import FTRL
from shoal.store.local import local

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("shoal.sklearn needs scikit-learn 1.6 or later: pip install 'shoal[sklearn]'") from error

__all__ = ["FTRLClassifier"]

_SLOTS = 64  # columns are fewer than the keys of a click log


class FTRLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Logistic regression by FTRL-Proximal (McMahan et al., KDD 2013), of two or more classes.

    Parameters
    ----------
    alpha : float
        Learning rate; the setting to tune first, by factors of 2.
    beta : float
        Shortens the first steps of a weight.
    l1 : float
        Weights with less evidence than this are exactly 0.
    l2 : float
        Shrinks all weights.
    epochs : int
        Passes over the data of `fit`.
    batch_size : int
        Examples per step: a batch makes one step per column, with the sum of the gradients.
    fit_intercept : bool
        Whether there is a constant feature.
    multi_class : {"multinomial", "ovr"}
        The loss of three and more classes: cross-entropy of softmax; or that of a binary regression for each class
        against the others, whose probabilities are scaled to a sum of 1. Two classes are one binary regression.
    shuffle : bool
        Whether `fit` permutes the examples in each pass.
    n_jobs : int or None
        Number of threads: None is 1, -1 all cores. The result is bit-identical.
    random_state : int, RandomState instance or None
        Seed of the order and of the rounding of FTRL's accumulators.

    Attributes
    ----------
    classes_ : ndarray of shape (classes,)
        The classes. With two, `decision_function` is positive for the second one.
    n_features_in_ : int
    feature_names_in_ : ndarray, one name for each feature
        Only if ``X`` had names.
    coef_ : float32[1, features] or float32[classes, features]
        One row for two classes, otherwise a row for each. Computed on access.
    intercept_ : float64[1] or float64[classes]

    Notes
    -----
    Values are float32. The table has a row for each column that had a value other than 0: 16 bytes, plus spare
    capacity. A pickle contains the rows with their optimizer state: further learning of a loaded estimator is
    bit-identical.

    Examples
    --------
    >>> import numpy as np
    >>> from shoal.sklearn import FTRLClassifier
    >>> X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.1, 1.0]])
    >>> model = FTRLClassifier(alpha=0.5, random_state=0).fit(X, ["no", "yes", "no", "yes"])
    >>> model.predict([[0.0, 2.0]]).tolist()
    ['yes']
    """

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        epochs: int = 10,
        batch_size: int = 32,
        fit_intercept: bool = True,
        multi_class: MultiClass = "multinomial",
        shuffle: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.alpha = alpha
        self.beta = beta
        self.l1 = l1
        self.l2 = l2
        self.epochs = epochs
        self.batch_size = batch_size
        self.fit_intercept = fit_intercept
        self.multi_class = multi_class
        self.shuffle = shuffle
        self.n_jobs = n_jobs
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ---- learning ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from all examples, from scratch.

        Parameters
        ----------
        X : array or sparse matrix of shape (n, features)
            Finite; rounded to float32.
        y : array-like of shape (n,)
            Two or more classes.
        sample_weight : array-like of shape (n,), optional
            How often each example counts, 0 or more.

        Returns
        -------
        FTRLClassifier
            Itself.

        Raises
        ------
        ValueError
            There is only one class, or a number is out of its range.
        """
        if not isinstance(self.epochs, int | np.integer) or self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs!r}: pass 1 or more")
        X, y, weights = self._checked(X, y, sample_weight, reset=True)
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind not in ("binary", "multiclass"):
            raise ValueError(f"Unknown label type: {kind}. Maybe you are trying to fit a classifier on a regression.")
        classes = _several(np.unique(y))
        rng = check_random_state(self.random_state)
        model = self._new_model(rng, len(classes))
        labels = np.searchsorted(classes, y).astype(np.float32)
        rows = MatrixReader(X, labels, weights, self.batch_size, rng if self.shuffle else None)
        if isinstance(model, LogisticRegression):
            model.fit(rows, epochs=self.epochs, progress=False)
        else:  # without the metrics of passes, which take a third of the time of batches as small as these
            for _ in range(self.epochs):
                for batch in rows:
                    model.partial_fit(batch)
        self.classes_, self._model = classes, model
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn from further examples, in their order, once.

        Parameters
        ----------
        X : array or sparse matrix of shape (n, features)
        y : array-like of shape (n,)
            Labels, which need not contain all classes.
        classes : array-like of shape (classes,)
            Required in the first call, which also fixes the settings; may be omitted later.
        sample_weight : array-like of shape (n,), optional

        Returns
        -------
        FTRLClassifier
            Itself.

        Raises
        ------
        ValueError
            The first call lacks ``classes``, a later call has other classes, or a label is not one of them.
        """
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        given = None if classes is None else _several(np.unique(classes))
        if not first and given is not None and not np.array_equal(given, self.classes_):
            raise ValueError(f"classes={classes} is not what the first call to partial_fit had: {self.classes_}")
        X, y, weights = self._checked(X, y, sample_weight, reset=first)
        known = given if first and given is not None else self.classes_
        strange = np.setdiff1d(y, known)
        if len(strange):
            raise ValueError(f"y has {strange.tolist()[0]!r}, which is not one of the classes {known}")
        model = self._new_model(check_random_state(self.random_state), len(known)) if first else self._model
        for batch in MatrixReader(X, np.searchsorted(known, y).astype(np.float32), weights, self.batch_size):
            model.partial_fit(batch)
        self.classes_, self._model = known, model
        return self

    def _new_model(self, rng: np.random.RandomState, classes: int) -> LogisticRegression | MulticlassRegression:
        if self.multi_class not in get_args(MultiClass):
            raise ValueError(f"multi_class is {self.multi_class!r}: pass 'multinomial' or 'ovr'")
        optimizer = FTRL(alpha=self.alpha, beta=self.beta, l1=self.l1, l2=self.l2)
        store, seed = local(threads=_threads(self.n_jobs), slots=_SLOTS), int(rng.randint(2**31 - 1))
        if classes == 2:
            return LogisticRegression(optimizer, store=store, bias=self.fit_intercept, seed=seed, warm_up=False)
        return MulticlassRegression(
            classes, optimizer=optimizer, store=store, bias=self.fit_intercept, loss=self.multi_class, seed=seed
        )

    def _checked(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        if not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size!r}: pass 1 or more")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, reset=reset)
        if sample_weight is None:
            return X, y, None
        return X, y, _check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)

    # ---- predicting --------------------------------------------------------------------------------------------------

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """Compute the log-odds of ``classes_[1]``, or the margins of three and more classes.

        Parameters
        ----------
        X : array or sparse matrix of shape (n, features)

        Returns
        -------
        float64[n] or float64[n, classes]
        """
        check_is_fitted(self)
        return self._model.decision_function(self._rows(X))

    def _rows(self, X: Any) -> MatrixReader:
        return MatrixReader(validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the class of each example: of two, ``classes_[1]`` if its log-odds are above 0, else the likeliest.

        Parameters
        ----------
        X : array or sparse matrix of shape (n, features)

        Returns
        -------
        ndarray of shape (n,)
        """
        margins = self.decision_function(X)
        best = (margins > 0).astype(np.intp) if margins.ndim == 1 else margins.argmax(axis=1)
        chosen: npt.NDArray[Any] = self.classes_[best]
        return chosen

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """Compute the probabilities of all classes.

        Parameters
        ----------
        X : array or sparse matrix of shape (n, features)

        Returns
        -------
        float64[n, classes]
            In the order of ``classes_``.
        """
        check_is_fitted(self)
        return self._model.predict_proba(self._rows(X))

    @property
    def coef_(self) -> npt.NDArray[np.float32]:
        """The weight of every column, for each row of margins."""
        check_is_fitted(self)
        return np.ascontiguousarray(self._model.table.pull(np.arange(self.n_features_in_, dtype=np.uint64)).T)

    @property
    def intercept_(self) -> npt.NDArray[np.float64]:
        """The weights of the constant feature; 0 without one."""
        check_is_fitted(self)
        return np.atleast_1d(np.array(self._model.bias))


def _threads(n_jobs: int | None) -> int | None:
    if n_jobs is not None and (not isinstance(n_jobs, int | np.integer) or not (n_jobs == -1 or n_jobs >= 1)):
        raise ValueError(f"n_jobs is {n_jobs!r}: pass None for one thread, a number of threads, or -1 for all cores")
    return 1 if n_jobs is None else None if n_jobs == -1 else int(n_jobs)


def _several(classes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if len(classes) == 1:
        raise ValueError(f"there is only one class, {classes.tolist()[0]!r}: pass examples of two or more")
    return classes
