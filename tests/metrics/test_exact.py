"""The metrics against scikit-learn, against the sums as they are defined, and against hand-made examples."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oracle import metrics as slow
from shoal.metrics import Accumulator, Metrics, auc, calibration, curves, gauc, logit, logloss, measure, probabilities


def draw(n, seed=0, ties=False, rate=0.3):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n)
    if ties:
        a = np.round(a)
    return (rng.random(n) < rate).astype(np.float32), a


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
    assert auc(y, a) == pytest.approx(slow.auc(y, a), abs=1e-15)


def test_auc_of_one_class_is_nan():
    assert math.isnan(auc([1, 1], [0.1, 0.2]))
    assert math.isnan(auc([0], [0.1]))
    assert math.isnan(auc([], []))


def test_auc_below_a_half_is_never_flipped():
    assert auc([1, 1, 0, 0], [1.0, 2.0, 3.0, 4.0]) == 0.0


def test_auc_of_constant_scores_is_a_half():
    assert auc([0, 1, 1, 0, 1], [7.0] * 5) == 0.5


@pytest.mark.parametrize(
    ("labels", "scores", "weights", "what"),
    [
        (["0", "1"], ["a", "b"], None, "scores|margins"),
        ([0, 1], np.ones(2) * 1j, None, "(scores|margins) are an array of complex128"),
        ([0, 1], [[1], [1, 2]], None, "(scores|margins) are list"),
        ([0, 1], [10**400, 1], None, "(scores|margins) are list"),
        ([0, 1], [0.5, 0.5], ["1", "2"], "weights are an array of <U1"),
        ([0, 1], [0.5, 0.5], {1.0, 2.0}, "weights are set"),
        ([[0], [0, 1]], [0.5, 0.5], None, "labels are list"),
    ],
)
@pytest.mark.parametrize("metric", [auc, logloss, measure, Accumulator().update])
def test_what_are_no_numbers_is_refused_by_the_name_of_the_argument(metric, labels, scores, weights, what):
    with pytest.raises(TypeError, match=what):
        metric(labels, scores, weights)


def test_a_wrong_label_is_printed_as_a_number():
    with pytest.raises(ValueError, match=r"^label -1.0 at 0 \(1 of 2\)"):
        auc(np.array([-1, 1], np.float32), [0.5, 0.6])


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
@pytest.mark.parametrize("metric", [auc, logloss, calibration, measure, Accumulator().update])
def test_wrong_labels_and_shapes_are_named(metric, labels, scores, what):
    with pytest.raises(ValueError, match=what):
        metric(labels, scores)


# ---- weights ---------------------------------------------------------------------------------------------------------

GRID = st.integers(-4, 4).map(lambda x: x / 4)  # many ties
WEIGHT = st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0, 1e-6, 1e6, 0.1])
EXAMPLES = st.lists(st.tuples(st.integers(0, 1), GRID, WEIGHT, st.integers(0, 3)), min_size=0, max_size=40)


def columns(examples):
    return [np.array(column) for column in zip(*examples, strict=True)] if examples else [np.empty(0)] * 4


def same(a, b, abs=1e-12):
    return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, abs=abs, rel=1e-12)


@pytest.mark.parametrize("n", [3, 7, 385, 10_000])
@pytest.mark.parametrize("ties", [False, True])
def test_weighted_auc_and_logloss_are_those_of_scikit_learn(n, ties):
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="the oracle is scikit-learn")
    y, a = draw(n, seed=n, ties=ties)
    y[:2] = 0, 1
    w = np.random.default_rng(n).exponential(size=n)
    m = measure(y, a, w)
    assert m.auc == pytest.approx(sklearn_metrics.roc_auc_score(y, a, sample_weight=w), abs=1e-12)
    assert m.logloss == pytest.approx(sklearn_metrics.log_loss(y, probabilities(a), sample_weight=w), rel=1e-12)
    assert m.weight == pytest.approx(w.sum(), rel=1e-14)
    assert m.base_rate == pytest.approx(np.average(y, weights=w), rel=1e-12)


@given(EXAMPLES)
def test_weighted_auc_counts_every_pair_by_the_product_of_its_weights(examples):
    y, s, w, _ = columns(examples)
    assert same(auc(y, s, w), slow.auc(y, s, w))


@given(EXAMPLES)
def test_weighted_means_are_the_weighted_means(examples):
    y, a, w, _ = columns(examples)
    m = measure(y, a, w)
    if not np.any(w > 0):
        assert math.isnan(m.logloss)
        return
    assert same(m.logloss, slow.mean([slow.loss(*e) for e in zip(y, a, strict=True)], w))
    p = slow.mean([slow.probability(x) for x in a], w)
    assert same(m.calibration, slow.mean(y, w) / p)
    assert (m.logloss, m.calibration) == (logloss(y, a, w), calibration(y, a, w))


@given(st.lists(st.tuples(st.integers(0, 1), GRID, st.integers(0, 5)), min_size=1, max_size=40))
def test_a_whole_weight_is_as_many_copies(examples):
    y, a, w = columns(examples)
    once, copies = measure(y, a, w), measure(np.repeat(y, w), np.repeat(a, w))
    assert same(once.auc, copies.auc)
    assert same(once.logloss, copies.logloss)
    assert same(once.calibration, copies.calibration)
    assert once.weight == copies.examples


def test_no_weights_are_weights_of_one_and_0_is_not_there():
    y, a = draw(300)
    w = np.ones(300)
    m, weighted = measure(y, a), measure(y, a, w)
    assert (m.examples, m.weight, m.auc, m.logloss) == (300, 300.0, weighted.auc, weighted.logloss)
    w[::3] = 0
    kept = w > 0
    part = measure(y[kept], a[kept])
    left = measure(y, a, w)
    assert (left.auc, left.weight) == (part.auc, 200.0)
    assert left.logloss == pytest.approx(part.logloss, rel=1e-14)


def test_an_infinite_loss_of_weight_0_is_not_there():
    assert logloss([0, 1], [np.inf, 0.0], [0.0, 2.0]) == pytest.approx(math.log(2))
    assert logloss([0, 1], [np.inf, 0.0], [1.0, 2.0]) == math.inf


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([1.0, -0.5], r"weight -0.5 at 1 \(1 of 2\): weights are finite and not negative"),
        ([np.nan, 1.0], "weight nan at 0"),
        ([1.0, np.inf], "weight inf at 1"),
        ([1.0], r"weights \(1,\): pass one weight for each example"),
    ],
)
@pytest.mark.parametrize("metric", [auc, logloss, calibration, measure, curves, Accumulator().update])
def test_wrong_weights_are_named(metric, weights, what):
    with pytest.raises(ValueError, match=what):
        metric([0, 1], [0.5, 0.5], weights)


def test_metrics_tell_a_weight_that_is_not_the_number_of_examples():
    m = Metrics(logloss=0.5, auc=0.7, calibration=1.0, examples=10, base_rate=0.5, weight=1234.5)
    assert "(10 examples of weight 1,234.5, 50.00 % positive)" in str(m)
    assert Metrics(logloss=0.5, auc=0.7, calibration=1.0, examples=10, base_rate=0.5).weight == 10.0


# ---- GAUC ------------------------------------------------------------------------------------------------------------


@given(EXAMPLES, st.booleans())
def test_gauc_is_the_mean_of_the_groups_auc(examples, weighted):
    y, s, w, groups = columns(examples)
    w = w if weighted else None
    value, both, left_out = slow.gauc(y, s, groups, w)
    found = gauc(y, s, groups, w)
    assert same(found.gauc, value)
    assert (found.groups, found.left_out) == (both, left_out)


def test_gauc_of_one_group_is_auc_and_of_none_is_nan():
    y, s = draw(500, ties=True)
    assert gauc(y, s, np.zeros(500)).gauc == auc(y, s)
    assert math.isnan(gauc([], [], []).gauc)
    alone = gauc([1, 0], [0.5, 0.5], ["a", "b"])
    assert (math.isnan(alone.gauc), alone.groups, alone.left_out, alone.examples) == (True, 0, 2, 0)


def test_gauc_is_not_moved_by_shifting_a_groups_scores_where_auc_is():
    y, s = draw(1000)
    groups = np.random.default_rng(1).integers(0, 20, 1000)
    shifted = s + groups * 10.0
    assert gauc(y, s, groups) == gauc(y, shifted, groups)
    assert auc(y, s) != auc(y, shifted)


def test_a_group_is_not_drowned_by_the_weights_of_those_before_it():
    labels, scores, groups = [0, 1, 1, 0], [1.0, 2.0, 1.0, 2.0], [0, 0, 1, 1]
    found = gauc(labels, scores, groups, [1e15, 1e15, 1e-15, 1e-15])
    assert found.gauc == pytest.approx(1.0)
    assert gauc(labels, scores, [1, 1, 0, 0], [1e-15, 1e-15, 1e15, 1e15]).gauc == pytest.approx(0.0, abs=1e-15)


def test_gauc_names_groups_of_another_length():
    with pytest.raises(ValueError, match="one group for each example"):
        gauc([0, 1], [0.5, 0.6], [7])
    with pytest.raises(TypeError, match="groups cannot be sorted"):
        gauc([0, 1], [0.5, 0.6], ["ann", None])


# ---- curves ----------------------------------------------------------------------------------------------------------


@given(EXAMPLES, st.booleans())
def test_deciles_are_tenths_of_the_weight_with_ties_together(examples, weighted):
    y, a, w, _ = columns(examples)
    found = curves(y, a, w if weighted else None).deciles
    w = w if weighted else np.ones(len(y))
    if np.sum(w) == 0:
        assert found == ()
        return
    assert sum(d.weight for d in found) == pytest.approx(np.sum(w))
    assert sum(d.weight * d.mean_label for d in found) == pytest.approx(np.sum(w * y))
    assert all(d.low <= d.mean_probability * (1 + 1e-12) and d.mean_probability <= d.high * (1 + 1e-12) for d in found)
    assert all(a.high < b.low for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("n", [1, 9, 10, 11, 385])
@pytest.mark.parametrize("ties", [False, True])
def test_deciles_are_those_of_the_slow_twin(n, ties):
    y, a = draw(n, seed=n, ties=ties)
    found = curves(y, a).deciles
    expected = slow.deciles(y.tolist(), a.tolist())
    assert [d.weight for d in found] == [weight for weight, _, _ in expected]
    np.testing.assert_allclose([d.mean_probability for d in found], [p for _, p, _ in expected], rtol=1e-12)
    np.testing.assert_allclose([d.mean_label for d in found], [m for _, _, m in expected], rtol=1e-12)


@pytest.mark.parametrize("n", [3, 40, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_roc_curve_is_near_that_of_scikit_learn_and_encloses_nearly_its_area(n, weighted):
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="the oracle is scikit-learn")
    y, a = draw(n, seed=n, ties=n == 40)
    y[:2] = 0, 1
    w = np.random.default_rng(n).exponential(size=n) if weighted else None
    found = curves(y, a, w)
    fpr, tpr = np.array(found.fpr), np.array(found.tpr)
    exact_fpr, exact_tpr, _ = sklearn_metrics.roc_curve(y, a, sample_weight=w, drop_intermediate=False)
    assert len(fpr) <= 129
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    assert np.all(np.diff(fpr) >= 0)
    assert np.all(np.diff(tpr) >= 0)
    near = np.abs(exact_fpr[:, None] - fpr) + np.abs(exact_tpr[:, None] - tpr)
    assert near.min(axis=0).max() < 1e-12  # a kept point is a corner of the exact curve
    assert near.min(axis=1).max() <= 1 / 64  # and every corner is near a kept point
    assert np.trapezoid(tpr, fpr) == pytest.approx(auc(y, a, w), abs=1 / 64)


def test_curves_of_one_class_have_deciles_but_no_roc():
    one = curves([1, 1], [0.0, 1.0])
    assert (one.fpr, one.tpr) == ((), ())
    assert [d.mean_label for d in one.deciles] == [1.0, 1.0]
    assert curves([], []).deciles == ()


# ---- logit -----------------------------------------------------------------------------------------------------------


def test_logit_undoes_probabilities_and_refuses_what_is_none():
    a = np.linspace(-30, 15, 50)
    np.testing.assert_allclose(logit(probabilities(a)), a, rtol=1e-9, atol=1e-9)
    assert logit([0.0, 1.0]).tolist() == [-math.inf, math.inf]
    for wrong in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="at 1: probabilities are 0 to 1"):
            logit([0.5, wrong])
