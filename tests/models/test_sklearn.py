"""The estimator for scikit-learn: its own checks, and the model beneath to the bit."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction import FeatureHasher
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import shoal
from shoal import Batch, LogisticRegression
from shoal.sklearn import FTRLClassifier
from tiers import long_after

STEPS = "an example twice is two examples of a batch, or of two batches: another sequence of steps than one of weight 2"


def planted(rng, n=600, columns=30):
    X = sparse.random(n, columns, density=0.2, format="csr", random_state=7, dtype=np.float32)
    y = (X @ np.sin(np.arange(columns)) + rng.normal(0, 0.1, n) > 0).astype(int)
    return X, y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "fails"),
    long_after(
        1,
        [
            ({}, {}),
            ({"l1": 0.01, "n_jobs": 2, "shuffle": False}, {}),
            (
                {"batch_size": 8},
                {
                    "check_sample_weight_equivalence_on_dense_data": STEPS,
                    "check_sample_weight_equivalence_on_sparse_data": STEPS,
                },
            ),
        ],
    ),
)
@pytest.mark.filterwarnings("ignore")  # of the checks, about what they skip
def test_scikit_learns_own_checks_pass(settings, fails):
    results = check_estimator(FTRLClassifier(**settings), expected_failed_checks=fails, on_skip=None)
    assert {result["check_name"] for result in results if result["status"] == "xfail"} == set(fails)
    assert sum(result["status"] == "passed" for result in results) > 50


def test_it_is_logistic_regression_by_ftrl_to_the_bit(rng):
    X, y = planted(rng)
    with LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.1)) as model:
        for begin in range(0, 600, 64):
            rows, labels = X[begin : begin + 64], y[begin : begin + 64].astype(np.float32)
            indptr, keys = rows.indptr.astype(np.int64), rows.indices.astype(np.uint64)
            model.partial_fit(Batch(labels, indptr, keys, rows.data))
        want = model.table.pull(np.arange(30, dtype=np.uint64))[:, 0], model.bias
        whole = Batch(np.zeros(600, np.float32), X.indptr.astype(np.int64), X.indices.astype(np.uint64), X.data)
        margins = model.decision_function(whole)
    got = FTRLClassifier(alpha=0.3, l1=0.1, batch_size=64, epochs=1, shuffle=False).fit(X, y)
    np.testing.assert_allclose(got.coef_[0], want[0], rtol=1e-5)  # the seed of the accumulators' rounding is another
    assert got.intercept_ == pytest.approx([want[1]], rel=1e-5)
    np.testing.assert_allclose(got.decision_function(X), margins, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(X @ got.coef_[0] + got.intercept_, got.decision_function(X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_kind_of_matrix_gives_the_same_bits(rng):
    X, y = planted(rng)
    wide = sparse.csr_matrix(X)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    want = FTRLClassifier(random_state=1).fit(X, y).decision_function(X).tobytes()
    for same in (X.toarray(), X.toarray().astype(np.float64), X.tocsc(), X.tocoo(), wide, sparse.csr_array(X)):
        model = FTRLClassifier(random_state=1).fit(same, y)
        assert model.decision_function(same).tobytes() == want
    assert FTRLClassifier(random_state=1, n_jobs=2).fit(X, y).decision_function(X).tobytes() == want
    assert FTRLClassifier(random_state=2).fit(X, y).decision_function(X).tobytes() != want


def test_hashed_text_goes_in_as_it_is(rng):
    words = np.array(["red", "green", "blue", "cheap", "dear"])
    texts = [rng.choice(words, 3).tolist() for _ in range(400)]
    y = np.array(["bought" if "cheap" in text else "left" for text in texts])
    X = FeatureHasher(2**20, input_type="string").transform(texts)
    model = FTRLClassifier(random_state=0).fit(X, y)
    assert model.score(X, y) == 1.0
    assert model.classes_.tolist() == ["bought", "left"]
    assert np.count_nonzero(model.coef_) == 5


def test_partial_fit_is_a_stream_of_what_fit_takes_whole(rng):
    X, y = planted(rng)
    whole = FTRLClassifier(epochs=1, shuffle=False, batch_size=50, random_state=3).fit(X, y)
    stream = FTRLClassifier(batch_size=50, random_state=3)
    for begin in range(0, 600, 150):
        stream.partial_fit(X[begin : begin + 150], y[begin : begin + 150], classes=[0, 1] if begin == 0 else None)
    np.testing.assert_array_equal(stream.coef_, whole.coef_)
    stream.partial_fit(X[:3], [1, 1, 1])
    assert not np.array_equal(stream.coef_, whole.coef_)


@pytest.mark.slow
def test_weights_are_how_often_an_example_counts(rng):
    X, y = planted(rng, 200)
    weights = rng.integers(0, 3, 200)
    settings = {"batch_size": 10**6, "shuffle": False, "random_state": 0}
    weighted = FTRLClassifier(**settings).fit(X, y, sample_weight=weights)
    often = FTRLClassifier(**settings).fit(X[np.repeat(np.arange(200), weights)], np.repeat(y, weights))
    np.testing.assert_allclose(weighted.decision_function(X), often.decision_function(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="egative"):
        FTRLClassifier().fit(X, y, sample_weight=-weights)


def test_probabilities_are_of_both_classes_and_keep_the_small_ones(rng):
    X, y = planted(rng)
    model = FTRLClassifier(random_state=0).fit(X, y)
    X = X * (60 / np.abs(model.decision_function(X)).max())
    p = model.predict_proba(X)
    assert p.shape == (600, 2)
    np.testing.assert_allclose(p.sum(1), 1)
    assert 0 < p.min() < 1e-20
    np.testing.assert_array_equal(model.predict(X), p.argmax(1))


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_a_pickle_predicts_and_learns_on_bit_for_bit(rng, copied):
    X, y = planted(rng)
    model = FTRLClassifier(l1=0.5, random_state=1).fit(X, y)
    again = copied(model)
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    for one in (model, again):
        one.partial_fit(X[::-1], y[::-1])
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    np.testing.assert_array_equal(again.coef_, model.coef_)
    assert again.get_params() == model.get_params()
    unfitted = clone(model)
    assert unfitted.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        unfitted.predict(X)
    with pytest.raises(NotFittedError):
        _ = copied(unfitted).coef_


@pytest.mark.long
def test_it_works_in_pipelines_and_searches():
    X, y = load_breast_cancer(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), FTRLClassifier(random_state=0))
    assert cross_val_score(pipeline, X, y).mean() > 0.96
    grid = {"ftrlclassifier__alpha": [1e-4, 0.1], "ftrlclassifier__l1": [0.0, 1.0]}
    search = GridSearchCV(pipeline, grid, cv=3, scoring="roc_auc").fit(X, y)
    assert search.best_params_["ftrlclassifier__alpha"] == 0.1
    assert search.best_score_ > 0.99
    other_processes = GridSearchCV(pipeline, grid, cv=3, scoring="roc_auc", n_jobs=2).fit(X, y)
    np.testing.assert_array_equal(other_processes.cv_results_["mean_test_score"], search.cv_results_["mean_test_score"])


def test_misuse_is_explained(rng):
    X, y = planted(rng, 50)
    for settings, said in [
        ({"alpha": -1.0}, "alpha"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"n_jobs": 0}, "n_jobs is 0"),
    ]:
        with pytest.raises(ValueError, match=said):
            FTRLClassifier(**settings).fit(X, y)
    for epochs in (None, 1.5, "3"):
        for labels in (y, np.arange(50) % 3):
            with pytest.raises(ValueError, match=f"epochs is {epochs!r}: pass 1 or more"):
                FTRLClassifier(epochs=epochs).fit(X, labels)
    with pytest.raises(ValueError, match="only one class"):
        FTRLClassifier().fit(X, np.ones(50))
    with pytest.raises(ValueError, match="classes must be passed"):
        FTRLClassifier().partial_fit(X, y)
    model = FTRLClassifier().partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match="is not what the first call"):
        model.partial_fit(X, y, classes=[0, 2])
    with pytest.raises(ValueError, match="y has 7, which is not one of the classes"):
        model.partial_fit(X, np.where(y == 1, 7, y))
    with pytest.raises(ValueError, match="infinity or a value too large"), np.errstate(over="ignore"):
        FTRLClassifier().fit(X.toarray().astype(np.float64) * 1e300, y)
    with pytest.raises(ValueError, match="30 features"):
        model.predict(X[:, :5])


def test_a_fit_that_fails_leaves_the_model_that_was_there(rng):
    X, y = planted(rng)
    model = FTRLClassifier(random_state=0).fit(X, y)
    before = model.coef_
    with pytest.raises(ValueError, match="alpha"):
        model.set_params(alpha=-1.0).fit(X, y)
    np.testing.assert_array_equal(model.coef_, before)


@pytest.mark.slow
def test_shoal_does_not_import_it_and_its_absence_names_the_extra():
    code = (
        "import sys, shoal; assert 'sklearn' not in sys.modules; sys.modules['sklearn'] = None\n"
        "try:\n    import shoal.sklearn\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'shoal[sklearn]'" in done.stdout
