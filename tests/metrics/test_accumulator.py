"""The mergeable metrics: the exact AUC lies between their bounds, and any split merges into the same whole."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import metrics as slow
from shoal import _core
from shoal.base.exact_sum import ExactSum
from shoal.metrics import Accumulator, auc, curves, measure, probabilities


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n)
    return (rng.random(n) < 0.3).astype(np.float32), a


def streamed(y, a, size=97):
    seen = Accumulator()
    for i in range(0, len(y), size):
        seen.update(y[i : i + size], a[i : i + size])
    return seen


def test_running_sums_equal_the_sums():
    y, a = draw(10_000)
    seen, m = streamed(y, a), measure(y, a)
    assert seen.logloss == pytest.approx(m.logloss, rel=1e-13)
    assert seen.calibration == pytest.approx(m.calibration, rel=1e-13)
    assert seen.result().base_rate == m.base_rate
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
    seen = Accumulator()
    seen.update([0, 1, 1], [0.0001, 0.0002, 5.0])
    assert seen.auc_error == 0.25
    assert seen.auc == 0.75


def test_margins_outside_of_the_histogram_count_in_its_last_bins():
    seen = Accumulator()
    seen.update([0, 1], [-1e30, np.inf])
    assert (seen.auc, seen.auc_error) == (1.0, 0.0)


def test_parts_merge_into_the_whole():
    y, a = draw(5000)
    whole, left, right = streamed(y, a), streamed(y[:1234], a[:1234]), streamed(y[1234:], a[1234:])
    left.merge(right)
    assert (left.auc, left.auc_error, left.examples) == (whole.auc, whole.auc_error, whole.examples)
    assert left.logloss == pytest.approx(whole.logloss, rel=1e-13)


def test_nothing_seen_is_nan():
    seen = Accumulator()
    assert all(map(math.isnan, (seen.logloss, seen.auc, seen.auc_error, seen.calibration)))
    assert seen.result().examples == 0


def test_a_batch_returns_the_sum_of_its_losses_or_takes_the_sums():
    seen = Accumulator()
    assert seen.update([0, 1], [0.0, 0.0]) == pytest.approx(2 * math.log(2))
    assert seen.update([0, 1], [0.0, 0.0], sums=(1.5, 0.5)) == 1.5
    assert seen.loss_sum == pytest.approx(2 * math.log(2) + 1.5)
    assert seen.probability_sum == 1.5


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.floats(allow_nan=True)), max_size=20))
def test_arrays_of_a_model_count_as_lists_do(examples):
    y, a = ([float(one[i]) for one in examples] for i in (0, 1))
    arrays, lists = Accumulator(3), Accumulator(3)
    reported = []
    for seen, labels, margins in ((arrays, np.array(y, np.float32), np.array(a)), (lists, y, a)):
        try:
            reported.append(seen.update(labels, margins, sums=(1.5, 0.5)))
        except ValueError as error:
            reported.append(str(error).replace("np.float32", "").replace("np.float64", ""))
    assert reported[0] == reported[1]
    assert arrays.to_dict() == lists.to_dict()


# ---- bounds ----------------------------------------------------------------------------------------------------------

MARGIN = st.one_of(
    st.floats(-20, 20), st.sampled_from([0.0, -0.0, 1e-300, np.inf, -np.inf, 15.999, 16.0, -16.0, 1.7e308])
)
WEIGHT = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e6))
EXAMPLES = st.lists(st.tuples(st.integers(0, 1), MARGIN, WEIGHT), max_size=40)
BITS = st.sampled_from([1, 3, 10, 16])


def columns(examples):
    return [np.array(column, np.float64) for column in zip(*examples, strict=True)] if examples else [np.empty(0)] * 3


@given(EXAMPLES, BITS, st.booleans())
def test_the_exact_auc_lies_between_the_bounds(examples, bits, weighted):
    y, a, w = columns(examples)
    w = w if weighted else None
    seen = Accumulator(bits)
    seen.update(y, a, w)
    exact = auc(y, a, w)
    if math.isnan(exact):
        assert all(map(math.isnan, (seen.auc, seen.auc_lower, seen.auc_upper, seen.auc_error)))
        return
    rounding = 1e-12 if weighted else 0.0
    assert 0 <= seen.auc_lower <= exact + rounding
    assert exact - rounding <= seen.auc_upper <= 1
    assert abs(seen.auc - exact) <= seen.auc_error + 1e-12


@given(EXAMPLES)
def test_the_bounds_are_those_of_the_worst_orders_within_the_bins(examples):
    y, a, w = columns(examples)
    a = (
        np.round(np.clip(a, -99, 99) * 4) / 4
    )  # a bin begins where a margin + 16 does: nearer to 0 than 1e-15 that is rounded
    seen = Accumulator(4)
    seen.update(y, a, w)
    bins = np.clip(np.floor(a / 2), -8, 7)
    for found, tied in [(seen.auc_lower, 0.0), (seen.auc, 0.5), (seen.auc_upper, 1.0)]:
        expected = slow.auc(y, bins, w, tied)
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_one_more_bit_about_halves_the_error():
    y, a = draw(200_000)
    errors = []
    for bits in (8, 9, 10, 11):
        seen = Accumulator(bits)
        seen.update(y, a)
        errors.append(seen.auc_error)
    assert all(1.8 < wide / narrow < 2.2 for wide, narrow in itertools.pairwise(errors))


def test_the_auc_of_more_examples_than_int64_has_pairs_for():
    seen = Accumulator(4)
    seen.update([0, 1, 0, 1], [-1.0, -1.0, 1.0, 1.0])
    for _ in range(33):
        seen.merge(seen)
    assert seen.examples == 1 << 35
    assert (seen.auc_lower, seen.auc, seen.auc_upper) == (0.25, 0.5, 0.75)


# ---- merging ---------------------------------------------------------------------------------------------------------

PARTS = st.lists(st.lists(st.tuples(st.integers(0, 1), MARGIN, st.integers(0, 8)), max_size=8), min_size=1, max_size=5)


def accumulated(parts, weighted, bits=10):
    out = []
    for part in parts:
        y, a, w = columns(part)
        out.append(Accumulator(bits))
        out[-1].update(y, a, w if weighted else None)
    return out


def merged(parts):
    whole = Accumulator(parts[0].bits)
    for part in parts:
        whole.merge(part)
    return whole


@given(PARTS, st.booleans(), st.randoms())
def test_any_order_and_nesting_of_merges_gives_the_same_bits(parts, weighted, random):
    left = merged(accumulated(parts, weighted)).to_dict()
    shuffled = accumulated(parts, weighted)
    random.shuffle(shuffled)
    while len(shuffled) > 1:  # a random tree
        i = random.randrange(len(shuffled) - 1)
        shuffled[i].merge(shuffled.pop(i + 1))
    assert merged(shuffled).to_dict() == left


@given(PARTS, st.booleans())
def test_any_split_of_examples_gives_the_same_histogram(parts, weighted):
    whole = accumulated([list(itertools.chain(*parts))], weighted)[0].to_dict()
    split = merged(accumulated(parts, weighted)).to_dict()
    for same in ("examples", "bins", "counts"):
        assert split[same] == whole[same]


def test_sums_of_batches_are_added_without_rounding():
    rng = np.random.default_rng(3)
    numbers = (10.0 ** rng.uniform(-300, 300, 1000)).tolist()
    for order in (numbers, numbers[::-1]):
        total = ExactSum()
        for x in order:
            total.add(x)
        assert float(total) == math.fsum(numbers)
    assert float(ExactSum(5e-324)) == 5e-324
    assert float(ExactSum(0.1)) == 0.1


def test_a_sum_beyond_all_floats_is_infinite():
    total = ExactSum(1.7e308)
    total.add(1.7e308)
    assert float(total) == math.inf
    total = ExactSum(math.inf)
    total.add(1.0)
    assert float(total) == math.inf
    assert float(ExactSum.from_text(total.to_text())) == math.inf
    whole = ExactSum(1.0)
    whole.merge(total)
    assert float(whole) == math.inf


def test_weighted_and_unweighted_parts_merge():
    y, a = draw(1000)
    w = np.random.default_rng(5).exponential(size=1000)
    left, right = Accumulator(), Accumulator()
    left.update(y[:500], a[:500])
    right.update(y[500:], a[500:], w[500:])
    left.merge(right)
    w[:500] = 1
    m = measure(y, a, w)
    assert left.weight == pytest.approx(m.weight, rel=1e-14)
    assert left.logloss == pytest.approx(m.logloss, rel=1e-12)
    assert left.calibration == pytest.approx(m.calibration, rel=1e-12)
    assert left.base_rate == pytest.approx(m.base_rate, rel=1e-12)
    assert left.auc == pytest.approx(m.auc, abs=left.auc_error + 1e-12)


def test_histograms_of_different_bits_do_not_merge():
    with pytest.raises(ValueError, match="bits are 10 and 12"):
        Accumulator(10).merge(Accumulator(12))
    for wrong in (0, 25):
        with pytest.raises(ValueError, match=f"bits is {wrong}: pass 1 to 24"):
            Accumulator(wrong)


@pytest.mark.parametrize("wrong", [([2], [0.0]), ([0], [np.nan]), ([0, 1], [0.0])])
def test_what_is_refused_counts_nothing(wrong):
    seen = Accumulator(4)
    with pytest.raises(ValueError, match=r"labels|NaN"):
        seen.update(*wrong)
    with pytest.raises(ValueError, match="weight"):
        seen.update([0], [0.0], [-1.0])
    assert seen.to_dict() == Accumulator(4).to_dict()


# ---- sending ---------------------------------------------------------------------------------------------------------


@given(PARTS, st.booleans())
def test_what_went_through_json_is_the_same_and_merges_on(parts, weighted):
    seen = merged(accumulated(parts, weighted))
    again = Accumulator.from_dict(json.loads(json.dumps(seen.to_dict(), allow_nan=False)))
    assert again.to_dict() == seen.to_dict()
    seen.merge(seen)
    again.merge(again)
    assert again.to_dict() == seen.to_dict()


def test_the_description_of_an_accumulator_stays_readable():
    # A description as version 1 wrote it: 2 examples, p = 1/2 each, in the bins around 0.
    old = {
        "kind": "shoal metrics",
        "version": 1,
        "bits": 1,
        "examples": 2,
        "unplaced": 0,
        "weighted": False,
        "sums": {
            "weight": ExactSum(2.0).to_text(),
            "positive_weight": ExactSum(1.0).to_text(),
            "loss": ExactSum(2 * math.log(2)).to_text(),
            "probability": "4" + "0" * 268,
        },
        "bins": [1, 3],
        "counts": [1, 1],
    }
    seen = Accumulator.from_dict(old)
    assert (seen.probability_sum, seen.logloss, seen.calibration, seen.auc) == (1.0, math.log(2), 1.0, 0.5)
    fresh = Accumulator(1)
    fresh.update([0, 1], [0.0, 0.0])
    assert fresh.to_dict() == old


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"examples": 3}, "examples is 3, but 2 are counted"),
        ({"kind": "other"}, "not a shoal metrics of version 1"),
        ({"version": 2}, "not a shoal metrics of version 1"),
        ({"bits": 40}, "bits is 40"),
        ({"bits": "4"}, "bits is '4'"),
        ({"examples": -1}, "examples is -1"),
        ({"unplaced": 1}, "examples is 2, but 2 are counted"),
        ({"unplaced": -1}, "unplaced is -1"),
        ({"sums": {}}, "lacks something"),
        ({"sums": {"weight": "0x1", "positive_weight": "0", "loss": "0", "probability": "0"}}, "not an exact sum"),
        ({"sums": {"weight": 1.0, "positive_weight": "0", "loss": "0", "probability": "0"}}, "not an exact sum"),
        ({"bins": [0]}, r"bins \(1,\) and counts \(2,\)"),
        ({"bins": 3}, r"bins \(\)"),
        ({"bins": [3, 1]}, "ascending"),
        ({"bins": [1, 1]}, "ascending"),
        ({"bins": [-1, 1]}, "from 0 to 31"),
        ({"bins": [1, 32]}, "from 0 to 31"),
        ({"bins": [0.5, 1.5]}, "whole numbers"),
        ({"counts": [1, 0]}, "above 0"),
        ({"counts": [1, -1]}, "above 0"),
        ({"counts": [1.5, 1]}, "int64 above 0"),
        ({"counts": ["a", "b"]}, "int64 above 0"),
    ],
)
def test_a_wrong_description_is_refused(change, what):
    seen = Accumulator(4)
    seen.update([0, 1], [-1.0, 1.0])
    with pytest.raises(ValueError, match=what):
        Accumulator.from_dict(seen.to_dict() | change)


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_description_is_a_dict():
    with pytest.raises(ValueError, match="not a shoal metrics"):
        Accumulator.from_dict([1, 2])


def test_an_accumulator_can_be_pickled_to_another_process():
    seen = Accumulator(6)
    seen.update([0, 1], [-1.0, 2.0], [0.5, 3.0])
    assert pickle.loads(pickle.dumps(seen)).to_dict() == seen.to_dict()


def test_curves_of_a_stream_are_near_the_exact_ones():
    y, a = draw(20_000)
    seen = Accumulator()
    seen.update(y, a)
    near, exact = seen.curves(), curves(y, a)
    for found, expected in zip(near.deciles, exact.deciles, strict=True):
        assert found.weight == pytest.approx(expected.weight, abs=30)
        assert found.mean_probability == pytest.approx(expected.mean_probability, rel=3e-3)
        assert found.mean_label == pytest.approx(expected.mean_label, abs=5e-3)
    assert np.trapezoid(near.tpr, near.fpr) == pytest.approx(auc(y, a), abs=1 / 64)


@pytest.mark.parametrize("bits", [1, 4, 9, 16])
def test_predicted_odds_of_curves_are_within_the_stated_factor(bits):
    rng = np.random.default_rng(bits)
    first = -int(rng.integers(1 << (bits - 1))) * 32 / (1 << bits)  # where a bin begins: the farthest from its middle
    errors = []
    for margin in [first, *rng.uniform(-16, 0, 50)]:  # odds below 1: p / (1 - p) keeps its digits
        seen = Accumulator(bits)
        seen.update([1], [margin])
        (decile,) = seen.curves().deciles
        odds = decile.mean_probability / (1 - decile.mean_probability)
        errors.append(abs(np.log(odds) - margin))
    assert max(errors) <= 2.0 ** (4 - bits) * (1 + 1e-6)
    assert max(errors) >= 2.0 ** (4 - bits) * (1 - 1e-6)  # no smaller factor is true


def test_a_bin_stands_at_its_middle_and_what_lies_outside_at_the_ends():
    seen = Accumulator(5)  # bins of width 1
    seen.update([0, 1, 1], [0.1, -100.0, 100.0])
    p = [d.mean_probability for d in seen.curves().deciles]
    np.testing.assert_allclose(p, probabilities([-15.5, 0.5, 15.5]), rtol=1e-12)


@pytest.mark.combined
@pytest.mark.parametrize("bits", [1, 10, 16])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_examples_by_threads_count_as_in_one_batch(bits, weighted):
    """In any order with `update`, and with the same bits for any number of threads."""
    y, a = draw(400_000, 3)
    a *= np.random.default_rng(4).choice([1e-3, 1.0, 20.0], len(a))
    w = np.random.default_rng(5).integers(0, 9, len(a)).astype(np.float32) if weighted else None
    half = len(a) // 2
    whole, found = Accumulator(bits), []
    for part in (slice(half), slice(half, None)):
        whole.update(y[part], a[part], None if w is None else w[part])
    for pool in (_core.ThreadPool(1), _core.ThreadPool(2), _core.ThreadPool(3)):
        seen = Accumulator(bits)
        loss = seen.update_with(pool, y[:half], a[:half], None if w is None else w[:half])
        assert loss == pytest.approx(measure(y[:half], a[:half], w if w is None else w[:half]).logloss * seen.weight)
        assert seen.update_with(pool, y[:0], a[:0], None if w is None else w[:0]) == 0
        seen.update(y[half:-10], a[half:-10], None if w is None else w[half:-10])
        seen.update_with(pool, y[-10:], a[-10:], None if w is None else w[-10:])
        found.append(seen.to_dict())
        assert seen.loss_sum == pytest.approx(whole.loss_sum, rel=1e-14)
        assert seen.probability_sum == pytest.approx(whole.probability_sum, rel=1e-14)
        assert (seen.weight, seen.base_rate, seen.auc) == (whole.weight, whole.base_rate, whole.auc)
        assert [seen.to_dict()[same] for same in ("examples", "bins", "counts")] == [
            whole.to_dict()[same] for same in ("examples", "bins", "counts")
        ]
    assert found[0] == found[1] == found[2]


def test_by_threads_infinite_margins_count_and_nan_is_refused():
    pool = _core.ThreadPool(2)
    y, a = np.array([1, 0, 1, 0], np.float32), np.array([np.inf, np.inf, -np.inf, 1.0])
    for weights in (None, np.ones(4, np.float32), np.array([1, 0, 0, 2], np.float32)):
        seen, expected = Accumulator(), Accumulator()
        assert seen.update_with(pool, y, a, weights) == expected.update(y, a, weights)
        assert seen.to_dict() == expected.to_dict()
    seen = Accumulator()
    with pytest.raises(ValueError, match="margins at 2 is NaN"):
        seen.update_with(pool, y, np.array([0, 0, np.nan, 0]))
    with pytest.raises(ValueError, match=r"labels must be 0 or 1, got 2.* at position 3"):
        seen.update_with(pool, np.array([0, 1, 1, 2], np.float32), np.zeros(4))
    with pytest.raises(ValueError, match="weights must be one for each"):
        seen.update_with(pool, y, np.zeros(4), np.ones(3, np.float32))
    assert (seen.examples, seen.weight, seen.loss_sum) == (0, 0.0, 0.0)


def test_arrays_with_gaps_are_counted_as_contiguous_ones(rng):
    labels, margins, weights = rng.random(200) < 0.3, rng.normal(0, 9, 200), rng.random(200)
    for gap in (None, weights):
        wide, narrow = Accumulator(bits=6), Accumulator(bits=6)
        wide.update(labels[::2], margins[::2], None if gap is None else gap[::2])
        narrow.update(labels[::2].copy(), margins[::2].copy(), None if gap is None else gap[::2].copy())
        assert wide.to_dict() == narrow.to_dict()
