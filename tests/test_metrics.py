"""The metrics against scikit-learn, against the sums as they are defined, and against hand-made examples."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.metrics import Metrics, Progress, auc, calibration, logloss, measure, probabilities


def draw(n, seed=0, ties=False, rate=0.3):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n)
    if ties:
        a = np.round(a)
    return (rng.random(n) < rate).astype(np.float32), a


def auc_pair_by_pair(labels, scores):
    """Every (positive, negative) pair: 1 if in order, 1/2 if tied."""
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    return np.mean(pairs) if pairs else math.nan


# ---- AUC -------------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_a_tie():
    assert auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8]) == 0.875


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [2, 3, 7, 385, 10_000])
def test_auc_is_that_of_scikit_learn(n, ties):
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="the oracle is scikit-learn")
    y, a = draw(n, seed=n, ties=ties)
    y[:2] = 0, 1
    assert auc(y, a) == pytest.approx(sklearn_metrics.roc_auc_score(y, a), abs=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_auc_counts_every_pair_and_half_of_each_tie(seed):
    y, a = draw(60, seed=seed, ties=True)
    assert auc(y, a) == pytest.approx(auc_pair_by_pair(y, a), abs=1e-15)


def test_auc_of_one_class_is_nan():
    assert math.isnan(auc([1, 1], [0.1, 0.2]))
    assert math.isnan(auc([0], [0.1]))
    assert math.isnan(auc([], []))


def test_auc_below_a_half_is_never_flipped():
    assert auc([1, 1, 0, 0], [1.0, 2.0, 3.0, 4.0]) == 0.0


def test_auc_of_constant_scores_is_a_half():
    assert auc([0, 1, 1, 0, 1], [7.0] * 5) == 0.5


def test_auc_orders_infinities_and_refuses_nan():
    assert auc([0, 1, 0, 1], [-np.inf, 0.0, 0.0, np.inf]) == 0.875
    with pytest.raises(ValueError, match="scores at 1 is NaN"):
        auc([0, 1], [0.5, np.nan])


def test_a_rising_map_of_the_scores_leaves_auc_as_it_is():
    y, a = draw(1000)
    assert auc(y, a) == auc(y, np.arctan(a))


@given(hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-3, 3).map(lambda x: round(x, 1))), st.randoms())
def test_swapping_the_classes_mirrors_auc(scores, random):
    labels = np.array([random.random() < 0.5 for _ in scores], np.float32)
    there, back = auc(labels, scores), auc(1 - labels, scores)
    assert (math.isnan(there) and math.isnan(back)) or there + back == pytest.approx(1, abs=1e-12)


# ---- log-loss and calibration ----------------------------------------------------------------------------------------


def test_logloss_is_that_of_scikit_learn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="the oracle is scikit-learn")
    y, a = draw(1000)
    assert logloss(y, a) == pytest.approx(sklearn_metrics.log_loss(y, 1 / (1 + np.exp(-a))), rel=1e-13)


def test_logloss_of_the_worked_example():
    assert logloss([1], [2.0]) == pytest.approx(0.126928, abs=5e-7)
    assert probabilities([2.0])[0] - 1 == pytest.approx(-0.119203, abs=5e-7)


def test_logloss_is_exact_far_out_where_a_probability_is_one():
    assert logloss([0], [50.0]) == 50.0
    assert logloss([1], [50.0]) == pytest.approx(math.exp(-50), rel=1e-12)
    assert logloss([0, 1], [1000.0, -1000.0]) == 1000.0
    assert logloss([0, 1], [-np.inf, np.inf]) == 0.0


def test_probabilities_do_not_overflow_and_mirror():
    a = np.array([0.0, 1e-300, 40.0, 745.0, 1e6, np.inf])
    p, q = probabilities(a), probabilities(-a)
    assert np.all(np.isfinite(p))
    np.testing.assert_allclose(p + q, 1, rtol=1e-15)
    assert p[-1] == 1
    assert q[-1] == 0


def test_calibration_is_labels_over_predictions():
    y, a = draw(1000)
    assert calibration(y, a) == pytest.approx(y.sum() / (1 / (1 + np.exp(-a))).sum(), rel=1e-12)
    assert calibration([1, 0, 0, 0], [0.0] * 4) == 0.5


def test_the_base_rate_has_a_normalized_entropy_of_one():
    y = np.array([1, 0, 0, 0])
    assert measure(y, np.full(4, math.log(1 / 3))).normalized_entropy == pytest.approx(1, rel=1e-15)


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_measure_is_all_of_them_at_once():
    y, a = draw(500)
    m = measure(y, a)
    assert (m.logloss, m.auc, m.calibration) == (logloss(y, a), auc(y, a), calibration(y, a))
    assert (m.examples, m.base_rate) == (500, np.mean(y.astype(np.float64)))


def test_no_examples_measure_nan():
    m = measure([], [])
    assert m.examples == 0
    assert all(map(math.isnan, (m.logloss, m.auc, m.calibration, m.base_rate)))
    assert str(m).endswith("(0 examples, nan % positive)")


def test_metrics_print_readably_and_are_frozen():
    m = Metrics(logloss=0.45, auc=0.79, calibration=1.0, examples=1234567, base_rate=0.256)
    assert str(m) == (
        "logloss 0.450000  AUC 0.790000  calibration 1.0000  NE 0.7911  (1,234,567 examples, 25.60 % positive)"
    )
    with pytest.raises(AttributeError):
        m.auc = 1.0


@pytest.mark.parametrize(
    ("labels", "scores", "what"),
    [
        ([0, 1], [0.5], "pass two one-dimensional arrays of one length"),
        ([[0, 1]], [[0.5, 0.5]], "one-dimensional"),
        ([0, 2], [0.5, 0.5], r"label .*2.* at 1 \(1 of 2\): labels are 0 or 1"),
        ([0.0, np.nan], [0.5, 0.5], "labels are 0 or 1"),
        ([-1, 1], [0.5, 0.5], "at 0"),
    ],
)
@pytest.mark.parametrize("metric", [auc, logloss, calibration, measure, Progress().add])
def test_wrong_labels_and_shapes_are_named(metric, labels, scores, what):
    with pytest.raises(ValueError, match=what):
        metric(labels, scores)


# ---- Progress --------------------------------------------------------------------------------------------------------


def streamed(y, a, size=97):
    seen = Progress()
    for i in range(0, len(y), size):
        seen.add(y[i : i + size], a[i : i + size])
    return seen


def test_running_sums_equal_the_sums():
    y, a = draw(10_000)
    seen, m = streamed(y, a), measure(y, a)
    assert seen.logloss == pytest.approx(m.logloss, rel=1e-13)
    assert seen.calibration == pytest.approx(m.calibration, rel=1e-13)
    assert seen.metrics().base_rate == m.base_rate
    assert seen.examples == m.examples


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_streaming_auc_is_within_its_bound(scale, seed):
    y, a = draw(3000, seed=seed)
    a *= scale
    seen = streamed(y, a)
    assert abs(seen.auc - auc(y, a)) <= seen.auc_error + 1e-12
    if scale == 1.0:
        assert seen.auc_error < 1e-3


def test_the_bound_counts_the_pairs_of_a_bin():
    seen = Progress()
    seen.add([0, 1, 1], [0.0001, 0.0002, 5.0])
    assert seen.auc_error == 0.25
    assert seen.auc == 0.75


def test_margins_outside_of_the_histogram_count_in_its_last_bins():
    seen = Progress()
    seen.add([0, 1], [-1e30, np.inf])
    assert (seen.auc, seen.auc_error) == (1.0, 0.0)


def test_parts_merge_into_the_whole():
    y, a = draw(5000)
    whole, left, right = streamed(y, a), streamed(y[:1234], a[:1234]), streamed(y[1234:], a[1234:])
    left.merge(right)
    assert (left.auc, left.auc_error, left.examples) == (whole.auc, whole.auc_error, whole.examples)
    assert left.logloss == pytest.approx(whole.logloss, rel=1e-13)


def test_nothing_seen_is_nan():
    seen = Progress()
    assert all(map(math.isnan, (seen.logloss, seen.auc, seen.auc_error, seen.calibration)))
    assert seen.metrics().examples == 0


def test_a_batch_returns_the_sum_of_its_losses_or_takes_the_sums():
    seen = Progress()
    assert seen.add([0, 1], [0.0, 0.0]) == pytest.approx(2 * math.log(2))
    assert seen.add([0, 1], [0.0, 0.0], sums=(1.5, 0.5)) == 1.5
    assert seen.loss_sum == pytest.approx(2 * math.log(2) + 1.5)
    assert seen.probability_sum == 1.5
