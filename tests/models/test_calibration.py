"""Calibration: Platt scaling against a general optimizer, isotonic regression against scikit-learn and a slow twin."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.metrics import logloss, probabilities
from shoal.models import calibration
from shoal.models.calibration import Isotonic, Platt, isotonic, platt


def planted(rng, n, slope=0.6, intercept=-0.7):
    """Draw margins whose labels follow the logistic curve of another slope and intercept."""
    margins = rng.normal(-1, 2, n)
    labels = (rng.random(n) < probabilities(slope * margins + intercept)).astype(np.float32)
    return margins, labels


def platt_loss(slope, intercept, margins, labels, weights):
    n1, n0 = weights[labels == 1].sum(), weights[labels == 0].sum()
    targets = np.where(labels == 1, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))
    m = slope * margins + intercept
    return np.sum(weights * (np.logaddexp(0, m) - m * targets))


def slow_isotonic(margins, labels, weights):
    """Pool adjacent violators as the textbook says it: back up after every merge."""
    blocks = []
    for a in np.unique(margins):
        same = margins == a
        blocks.append([a, a, float(weights[same].sum()), float((weights * labels)[same].sum())])
    i = 0
    while i + 1 < len(blocks):
        left, right = blocks[i], blocks[i + 1]
        if left[3] / left[2] >= right[3] / right[2]:
            blocks[i : i + 2] = [[left[0], right[1], left[2] + right[2], left[3] + right[3]]]
            i = max(i - 1, 0)
        else:
            i += 1
    return [(first, last, ones / total) for first, last, total, ones in blocks]


# ---- Platt -----------------------------------------------------------------------------------------------------------


def test_platt_finds_the_planted_curve(rng):
    found = platt(*planted(rng, 200_000))
    assert found.slope == pytest.approx(0.6, abs=0.02)
    assert found.intercept == pytest.approx(-0.7, abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6, 1e150])
def test_platt_is_the_minimum_whatever_the_scale_of_the_margins(rng, n, scale):
    optimize = pytest.importorskip("scipy.optimize")
    margins, labels = planted(rng, n)
    weights = rng.integers(0, 4, n) + 0.5
    found = platt(margins * scale, labels, weights)
    best = optimize.minimize(lambda x: platt_loss(*x, margins, labels, weights), [0.0, 0.0], tol=1e-12)
    assert platt_loss(found.slope * scale, found.intercept, margins, labels, weights) <= best.fun + 1e-9 * weights.sum()


def test_platt_cannot_be_made_better_in_any_direction(rng):
    margins, labels = planted(rng, 5000)
    weights = rng.random(5000)
    found = platt(margins, labels, weights)
    here = platt_loss(found.slope, found.intercept, margins, labels, weights)
    for ds, dc in [(1e-4, 0), (-1e-4, 0), (0, 1e-4), (0, -1e-4), (1e-4, 1e-4), (-1e-4, -1e-4)]:
        assert platt_loss(found.slope + ds, found.intercept + dc, margins, labels, weights) > here


def test_platt_of_separable_and_of_equal_margins_is_finite():
    apart = platt(np.array([-3.0, -2.0, 2.0, 3.0]), np.array([0, 0, 1, 1]))
    p = apart.apply(np.array([-3.0, -2.0, 2.0, 3.0]))
    assert np.all(np.diff(p) > 0)
    assert 0.1 < p[0] < p[-1] < 0.9  # towards the targets 1/4 and 3/4, not towards 0 and 1
    equal = platt(np.full(3, 1e9), np.array([0, 1, 1]))
    assert equal.slope == 0.0
    targets = [1 / 3, 3 / 4, 3 / 4]
    assert equal.apply(np.array([5.0]))[0] == pytest.approx(np.mean(targets))
    alone = platt(np.array([1.0, 2.0]), np.array([1, 1]))
    np.testing.assert_allclose(alone.apply(np.array([1.0, 2.0])), 3 / 4)


def test_a_weight_is_how_often_an_example_counts(rng):
    margins, labels = planted(rng, 300)
    weights = rng.integers(0, 4, 300)
    for fit in (platt, isotonic):
        once = fit(margins, labels, weights)
        often = fit(*(np.repeat(x, weights) for x in (margins, labels)))
        grid = np.linspace(-8, 8, 101)
        np.testing.assert_allclose(once.apply(grid), often.apply(grid), rtol=1e-9)


# ---- isotonic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [0, 1, 8])
@pytest.mark.parametrize("n", [1, 2, 7, 385, 20_000])
def test_isotonic_is_scikit_learns(rng, n, digits):
    sklearn = pytest.importorskip("sklearn.isotonic")
    margins, labels = planted(rng, n)
    margins = margins.round(digits)  # ties, or none
    weights = rng.random(n) + 0.1
    least = 1 / (weights.sum() + 2)
    theirs = sklearn.IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip")
    theirs.fit(margins, labels, sample_weight=weights)
    grid = np.concatenate([np.linspace(-12, 12, 999), margins])
    np.testing.assert_allclose(isotonic(margins, labels, weights).apply(grid), theirs.predict(grid), atol=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(-6, 6), st.integers(0, 1), st.integers(1, 5)),
        min_size=1,
        max_size=40,
    )
)
def test_isotonic_is_the_slow_twin(examples):
    margins, labels, weights = (np.array(x, np.float64) for x in zip(*examples, strict=True))
    found = isotonic(margins, labels, weights)
    least = 1 / (weights.sum() + 2)
    for first, last, p in slow_isotonic(margins, labels, weights):
        both = found.apply(np.array([first, last]))
        np.testing.assert_allclose(both, np.clip(p, least, 1 - least), rtol=1e-12)
    p = found.apply(np.linspace(-9, 9, 181))
    assert np.all(np.diff(p) >= -1e-15)


def test_isotonic_of_one_low_block_after_a_long_rise_is_linear_and_right():
    n = 100_000  # as many passes, were there only passes
    margins = np.repeat(np.arange(n, dtype=np.float64), 2)
    labels = np.tile([0, 1], n)
    weights = np.stack([np.arange(n, 0, -1), np.arange(1, n + 1)], axis=1).reshape(-1).astype(np.float64)
    margins, labels, weights = np.append(margins, n), np.append(labels, 0), np.append(weights, 1e12)
    found = isotonic(margins, labels, weights)
    assert len(found.at) < n
    mean = np.sum(weights * labels) / weights.sum()
    assert found.apply(np.array([float(n)]))[0] == pytest.approx(mean, rel=0.1)
    assert np.all(np.diff(found.probabilities) >= 0)


def test_isotonic_is_level_within_blocks_and_beyond_the_ends_and_linear_between():
    found = isotonic(np.array([0.0, 1.0, 2.0, 4.0]), np.array([0, 1, 0, 1]))
    least = 1 / 6
    p = found.apply(np.array([-5.0, 0.0, 0.5, 1.0, 1.7, 2.0, 3.0, 4.0, 99.0]))
    want = [least, least, (least + 0.5) / 2, 0.5, 0.5, 0.5, (0.5 + 1 - least) / 2, 1 - least, 1 - least]
    np.testing.assert_allclose(p, want, rtol=1e-15)


def test_probabilities_are_never_0_or_1(rng):
    for weight in (1e-20, 1.0, 1e20):
        found = isotonic(np.array([-1.0, 1.0]), np.array([0, 1]), np.full(2, weight))
        p = found.apply(np.array([-9.0, 9.0]))
        assert 0 < p[0] <= p[1] < 1
        assert np.all(np.isfinite(found.margins(np.array([-9.0, 9.0]))))


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_calibrating_makes_held_out_probabilities_come_true(rng, fit):
    margins, labels = planted(rng, 40_000)
    found = fit(margins[:20_000], labels[:20_000])
    margins, labels = margins[20_000:], labels[20_000:]
    p = found.apply(margins)
    assert labels.sum() / p.sum() == pytest.approx(1, abs=0.03)
    assert labels.sum() / probabilities(margins).sum() < 0.95
    assert logloss(labels, found.margins(margins)) < logloss(labels, margins) - 0.01
    np.testing.assert_allclose(probabilities(found.margins(margins)), p, rtol=1e-12)


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_json_keeps_every_bit(rng, fit):
    margins, labels = planted(rng, 500)
    found = fit(margins, labels)
    again = calibration.from_dict(json.loads(json.dumps(found.to_dict())))
    grid = rng.normal(0, 5, 1000)
    assert type(again) is type(found)
    np.testing.assert_array_equal(again.apply(grid), found.apply(grid))


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_the_order_of_the_examples_does_not_matter(rng, fit):
    margins, labels = planted(rng, 1000)
    shuffle = rng.permutation(1000)
    grid = np.linspace(-6, 6, 50)
    np.testing.assert_allclose(
        fit(margins, labels).apply(grid), fit(margins[shuffle], labels[shuffle]).apply(grid), rtol=1e-9
    )


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_what_cannot_be_calibrated_on_is_explained(fit):
    two = np.array([0.0, 1.0])
    for arguments, said in [
        ((two, np.array([1])), "labels \\(1,\\)"),
        ((two, two, np.ones(3)), "weights \\(3,\\)"),
        ((np.array([0.0, math.nan]), two), "margins has nan at position 1"),
        ((np.array([math.inf, 0.0]), two), "margins has inf at position 0"),
        ((two, np.array([0, 2])), "labels has 2 at position 1"),
        ((two, two, np.array([1, -1])), "weights has -1.0 at position 1"),
        ((two, two, np.zeros(2)), "weigh 0.0 together"),
        ((np.empty(0), np.empty(0)), "weigh 0.0 together"),
    ]:
        with pytest.raises(ValueError, match=said):
            fit(*arguments)


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"kind": "beta"},
        {"kind": "platt", "slope": 1.0},
        {"kind": "platt", "slope": math.nan, "intercept": 0.0},
        {"kind": "platt", "slope": None, "intercept": 0.0},
        {"kind": "isotonic", "at": [], "probabilities": []},
        {"kind": "isotonic", "at": [0.0, 0.0], "probabilities": [0.1, 0.2]},
        {"kind": "isotonic", "at": [0.0, 1.0], "probabilities": [0.2, 0.1]},
        {"kind": "isotonic", "at": [0.0, 1.0], "probabilities": [0.2, 1.0]},
        {"kind": "isotonic", "at": [0.0, 1.0], "probabilities": [0.2]},
        {"kind": "isotonic", "at": [[0.0]], "probabilities": [[0.2]]},
        {"kind": "isotonic", "at": [0.0]},
    ],
)
def test_a_damaged_description_is_refused(described):
    with pytest.raises(ValueError, match=r"pass|calibration|sort|fit"):
        calibration.from_dict(described)


def test_the_parts_are_exported():
    assert Platt(1.0, 0.0).apply(np.array([0.0]))[0] == 0.5
    assert Isotonic(np.array([0.0]), np.array([0.25])).apply(np.array([3.0]))[0] == 0.25
