"""Regression over several classes: a float64 oracle, torch's cross-entropy, scikit-learn's optimum, numerics."""

import copy
import pickle

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import LogisticRegression as SklearnRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import shoal
from shoal import Batch, LogisticRegression
from shoal.metrics.multiclass import multinomial_losses
from shoal.models import MulticlassRegression
from shoal.sklearn import FTRLClassifier


def drawn(rng, n, classes, columns=6, weighted=True):
    """Examples with duplicate keys, values, weights of which some are 0; and the dense matrix of the same."""
    counts = rng.integers(0, 5, n)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    keys = rng.integers(0, columns, indptr[-1]).astype(np.uint64)
    values = rng.normal(size=len(keys)).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], n).astype(np.float32) if weighted else None
    batch = Batch(rng.integers(0, classes, n).astype(np.float32), indptr, keys, values, weights)
    X = np.zeros((n, columns))
    np.add.at(X, (np.repeat(np.arange(n), counts), keys.astype(int)), values.astype(float))
    return batch, X


def oracle_step(W, b, X, batch, loss, lr):
    """One step of plain gradient descent in float64: loss before it, and the weights after it."""
    y, v = batch.labels.astype(int), np.ones(len(batch)) if batch.weights is None else batch.weights.astype(float)
    A = X @ W + b
    one = np.eye(W.shape[1])[y]
    if loss == "multinomial":
        losses = -log_softmax(A, axis=1)[np.arange(len(y)), y]
        slopes = softmax(A, axis=1) - one
    else:
        losses = (np.logaddexp(0, A) - one * A).sum(axis=1)
        slopes = 1 / (1 + np.exp(-A)) - one
    G = v[:, None] * slopes
    return (v @ losses) / v.sum(), W - lr * X.T @ G, b - lr * G.sum(axis=0)


@pytest.mark.parametrize("loss", ["multinomial", "ovr"])
@pytest.mark.parametrize(("n", "classes"), [(1, 2), (7, 3), (385, 5)])
def test_steps_are_those_of_the_oracle(rng, loss, n, classes):
    W, b = np.zeros((6, classes)), np.zeros(classes)
    with MulticlassRegression(classes, optimizer=shoal.SGD(lr=0.05), loss=loss) as model:
        for _ in range(4):
            batch, X = drawn(rng, n, classes)
            batch = Batch(batch.labels, batch.indptr, batch.keys, batch.values, batch.weights + np.float32(0.25))
            want, W, b = oracle_step(W, b, X, batch, loss, 0.05)
            assert model.partial_fit(batch) == pytest.approx(want, rel=1e-5)
        np.testing.assert_allclose(model.table.pull(np.arange(6, dtype=np.uint64)), W, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(model.bias, b, rtol=1e-4, atol=1e-5)
        p = model.predict_proba(batch)
    A = X @ W + b
    s = 1 / (1 + np.exp(-A))
    want = softmax(A, axis=1) if loss == "multinomial" else s / s.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(p, want, rtol=1e-4, atol=1e-6)


def test_losses_and_slopes_are_those_of_torchs_cross_entropy(rng):
    torch = pytest.importorskip("torch", reason="torch is an extra")
    margins, classes = rng.normal(scale=8, size=(50, 7)), rng.integers(0, 7, 50)
    weights = rng.random(50).astype(np.float32)
    a = torch.from_numpy(margins).requires_grad_()
    losses = torch.nn.functional.cross_entropy(a, torch.from_numpy(classes), reduction="none")
    total = (losses * torch.from_numpy(weights)).sum()
    total.backward()
    loss, slopes = multinomial_losses(margins, classes, weights.astype(np.float64))
    assert loss == pytest.approx(total.item(), rel=1e-13)
    np.testing.assert_allclose(slopes, a.grad.numpy(), rtol=1e-10, atol=1e-15)


def test_margins_of_any_size_lose_neither_loss_nor_gradient():
    margins = np.array([[1000.0, 0.0, -1000.0], [0.0, 0.0, 1000.0], [40.0, 0.0, 0.0], [-1e308, 0.0, 1e3]])
    loss, slopes = multinomial_losses(margins, np.array([0, 0, 0, 2]))
    assert np.isfinite(slopes).all()
    np.testing.assert_array_equal(slopes.sum(axis=1), 0)
    assert loss == pytest.approx(1000.0 + 2 * np.exp(-40.0), rel=1e-15)
    # p - 1 is 0 in float64 where p = 1 - 8.5e-18; the slope is not.
    assert slopes[2, 0] == pytest.approx(-2 * np.exp(-40.0), rel=1e-12, abs=0)
    small, _ = multinomial_losses(margins[2:3], np.array([0]))
    assert small == pytest.approx(2 * np.exp(-40.0), rel=1e-12, abs=0)


def test_ovr_has_probabilities_where_all_classes_are_unlikely():
    batch = Batch(np.zeros(1, np.float32), np.array([0, 1]), np.array([5], np.uint64), np.array([-2000.0], np.float32))
    with MulticlassRegression(3, optimizer=shoal.SGD(lr=1.0), bias=False, loss="ovr") as model:
        model.table.push(np.array([5], np.uint64), np.array([[-1.0, -1.0, -2.0]], np.float32)).result()
        p = model.predict_proba(batch)
    np.testing.assert_allclose(p, [[0.5, 0.5, 0.0]])


def test_two_classes_of_softmax_are_one_logistic_regression(rng):
    """With half the rate: the difference of two margins moves twice as far."""
    with (
        MulticlassRegression(2, optimizer=shoal.SGD(lr=0.05)) as softmaxed,
        LogisticRegression(shoal.SGD(lr=0.1)) as binary,
    ):
        for _ in range(5):
            batch, _ = drawn(rng, 40, 2)
            assert softmaxed.partial_fit(batch) == pytest.approx(binary.partial_fit(batch), rel=1e-5)
        np.testing.assert_allclose(softmaxed.predict_proba(batch)[:, 1], binary.probabilities(batch), rtol=1e-4)


def test_ovr_is_a_binary_regression_for_each_class(rng):
    batches = [drawn(rng, 60, 3)[0] for _ in range(4)]
    with MulticlassRegression(3, optimizer=shoal.FTRL(alpha=0.3, l1=0.1), loss="ovr") as model:
        for batch in batches:
            model.partial_fit(batch)
        margins = model.decision_function(batches[0])
    for k in range(3):
        with LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.1)) as one:
            for b in batches:
                one.partial_fit(Batch((b.labels == k).astype(np.float32), b.indptr, b.keys, b.values, b.weights))
            np.testing.assert_allclose(margins[:, k], one.decision_function(batches[0]), rtol=1e-4, atol=1e-5)


def test_the_optimum_is_that_of_scikit_learn():
    """Both minimise the sum of losses plus |w|^2 / 2. SGD decays the bias too, so there is none."""
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X).astype(np.float32)
    want = SklearnRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(X, y)
    rows, columns = X.shape
    keys = np.tile(np.arange(columns, dtype=np.uint64), rows)
    batch = Batch(y.astype(np.float32), np.arange(0, X.size + 1, columns), keys, X.ravel())
    with MulticlassRegression(3, optimizer=shoal.SGD(lr=0.02, weight_decay=1.0), bias=False) as model:
        for _ in range(600):
            model.partial_fit(batch)
        W = model.table.pull(np.arange(columns, dtype=np.uint64)).T

        def objective(W):
            return rows * log_loss(y, softmax(X @ W.T, axis=1)) + 0.5 * (W**2).sum()

        gap = objective(W.astype(float)) / objective(want.coef_) - 1
        assert abs(gap) < 1e-5
        np.testing.assert_allclose(model.predict_proba(batch), want.predict_proba(X), atol=1e-3)


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_a_copy_learns_on_bit_for_bit(rng, copied):
    batches = [drawn(rng, 50, 4)[0] for _ in range(3)]
    with MulticlassRegression(4, loss="ovr") as model:
        model.partial_fit(batches[0])
        with copied(model) as again:
            assert (again.classes, again.loss) == (4, "ovr")
            for one in (model, again):
                one.partial_fit(batches[1])
            np.testing.assert_array_equal(again.decision_function(batches[2]), model.decision_function(batches[2]))


@pytest.mark.slow
def test_a_worker_of_a_cluster_has_the_bits_of_a_local_store(rng):
    batches = [drawn(rng, 50, 3)[0] for _ in range(3)]
    found = []
    with shoal.launch(servers=2) as cluster, shoal.local() as local:
        for store in (cluster, local):
            model = MulticlassRegression(3, store=store)
            for batch in batches:
                model.partial_fit(batch)
            found.append(model.decision_function(batches[0]).tobytes())
        with pytest.raises(TypeError, match="on a cluster"):
            pickle.dumps(MulticlassRegression(3, store=cluster))
    assert found[0] == found[1]


def test_mistakes_are_refused_before_anything_is_learned(rng):
    for classes in (1, 4097):
        with pytest.raises(ValueError, match=f"classes is {classes}"):
            MulticlassRegression(classes)
    with pytest.raises(ValueError, match="loss is 'hinge'"):
        MulticlassRegression(3, loss="hinge")
    batch, _ = drawn(rng, 9, 3)
    with MulticlassRegression(3) as model:
        for label in (3, -1, 0.5, np.nan):
            labels = batch.labels.copy()
            labels[4] = label
            with pytest.raises(ValueError, match=rf"label {label}.* at 4 .*: labels are numbers of classes, 0 to 2"):
                model.partial_fit(Batch(labels, batch.indptr, batch.keys, batch.values))
        for weight in (-1, np.inf, np.nan):
            weights = np.ones(9, np.float32)
            weights[2] = weight
            with pytest.raises(ValueError, match=r"at 2 .*: weights are finite"):
                model.partial_fit(Batch(batch.labels, batch.indptr, batch.keys, batch.values, weights))
        assert len(model.table) == 0
        none = np.zeros(0, np.float32)
        assert np.isnan(model.partial_fit(Batch(none, np.zeros(1, np.int64), np.zeros(0, np.uint64), None)))


# ---- the estimator ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the checks, about what they skip
def test_scikit_learns_own_checks_pass_with_several_classes():
    results = check_estimator(FTRLClassifier(multi_class="ovr"), on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 50


@pytest.fixture(scope="module")
def digits():
    """Images, their names, and how many of them scikit-learn's own classifier recognizes."""
    X, y = load_digits(return_X_y=True)
    names = np.array([f"digit {i}" for i in range(10)])[y]
    theirs = make_pipeline(StandardScaler(), SklearnRegression(max_iter=300))
    return X, names, cross_val_score(theirs, X, names, cv=3).mean()


@pytest.mark.slow
@pytest.mark.parametrize("multi_class", ["multinomial", "ovr"])
def test_digits_are_recognized_as_well_as_by_scikit_learn(multi_class, digits):
    X, names, theirs = digits
    model = FTRLClassifier(random_state=0, multi_class=multi_class)
    pipeline = make_pipeline(StandardScaler(), model)
    worse = {"multinomial": 0.01, "ovr": 0.03}[multi_class]
    assert cross_val_score(pipeline, X, names, cv=3).mean() > theirs - worse
    fitted = pipeline.fit(X, names)[-1]
    Z = StandardScaler().fit_transform(X)
    assert fitted.classes_.tolist() == sorted(set(names))
    assert fitted.coef_.shape == (10, 64)
    assert fitted.intercept_.shape == (10,)
    np.testing.assert_allclose(fitted.decision_function(Z), Z @ fitted.coef_.T + fitted.intercept_, atol=1e-3)
    p = fitted.predict_proba(Z)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    assert (fitted.predict(Z) == fitted.classes_[p.argmax(axis=1)]).all()


def test_several_classes_stream_by_partial_fit_and_are_refused_by_name(rng):
    X, y = rng.normal(size=(90, 4)), np.arange(90) % 3 * 10
    whole = FTRLClassifier(epochs=1, shuffle=False, batch_size=30, random_state=3).fit(X, y)
    stream = FTRLClassifier(batch_size=30, random_state=3)
    for begin in (0, 60):
        stream.partial_fit(X[begin : begin + 60], y[begin : begin + 60], classes=[0, 10, 20] if begin == 0 else None)
    np.testing.assert_array_equal(stream.coef_, whole.coef_)
    with pytest.raises(ValueError, match="y has 30, which is not one of the classes"):
        stream.partial_fit(X, y + 10)
    with pytest.raises(ValueError, match="multi_class is 'hinge'"):
        FTRLClassifier(multi_class="hinge").fit(X, y)
    with pytest.raises(ValueError, match="epochs is 0"):
        FTRLClassifier(epochs=0).fit(X, y)
