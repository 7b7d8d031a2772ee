"""Totals and histograms of accumulators, added up as rows of a table, are those of the merge."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.base.exact_sum import ExactSum
from shoal.metrics import Accumulator, MulticlassAccumulator

BITS = 4
CLASSES = 3
MAX = 1 << 63


def binary(batch):
    examples, sums, weighted = batch
    y, a, w = (np.array([one[i] for one in examples], np.float64) for i in range(3))
    return lambda seen: seen.update(y, a, w if weighted else None, sums=sums)


def of_classes(batch):
    examples, sums, weighted = batch
    y = np.array([one[0] for one in examples], np.int64)
    a = np.array([(one[1], 0.5, -one[1]) for one in examples], np.float64).reshape(-1, CLASSES)
    w = np.array([one[2] for one in examples], np.float64)
    return lambda seen: seen.update(y, a, w if weighted else None, sums=sums[:1])


# Sums and weights are multiples of 2^-64 and 2^-40, some with all bits of a float64.
SUM = st.builds(
    lambda digits, exponent: math.ldexp(digits, exponent), st.integers(0, (1 << 53) - 1), st.integers(-64, 6)
)
WEIGHT = st.one_of(st.integers(0, 3).map(float), st.integers(0, 1 << 44).map(lambda units: units * 2.0**-40))
EXAMPLE = st.tuples(st.integers(0, 1), st.floats(-20, 20), WEIGHT)
BATCH = st.tuples(st.lists(EXAMPLE, max_size=6), st.tuples(SUM, SUM), st.booleans())
UNWEIGHTED = st.tuples(st.lists(EXAMPLE, max_size=6), st.tuples(SUM, SUM), st.just(value=False))
WORKERS = st.lists(st.one_of(st.lists(BATCH, max_size=4), st.lists(UNWEIGHTED, max_size=4)), min_size=1, max_size=5)

KINDS = pytest.mark.parametrize(
    ("make", "counted"),
    [(lambda: Accumulator(BITS), binary), (lambda: MulticlassAccumulator(CLASSES), of_classes)],
    ids=["binary", "classes"],
)


def add_in_any_order(differences, random):
    random.shuffle(differences)
    with np.errstate(over="ignore"):
        return sum(differences[1:], differences[0])


@pytest.mark.slow
@KINDS
@given(workers=WORKERS, random=st.randoms())
@example(workers=[[([(0, 0.0, 1.0)], (0.0, 0.0), True)], []], random=None)  # weights of 1 are weights
def test_added_totals_and_histograms_are_those_of_the_merge(make, counted, workers, random):
    merged, totals, histograms = make(), [make().totals()], [make().histogram()]
    for batches in workers:
        seen = make()
        for batch in batches:
            before = seen.totals(), seen.histogram()
            counted(batch)(seen)
            totals.append(seen.totals() - before[0])
            histograms.append(seen.histogram() - before[1])
        merged.merge(seen)
    taken = make()
    if random is None:
        taken.take(sum(totals), sum(histograms))
    else:
        taken.take(add_in_any_order(totals, random), add_in_any_order(histograms, random))
    assert taken.to_dict() == merged.to_dict()
    assert set(taken.bins) <= set(merged.bins)  # fewer if the weights of a bin are 0
    np.testing.assert_equal([taken.auc, taken.quality, taken.logloss], [merged.auc, merged.quality, merged.logloss])
    counted(([(1, 3.0, 2.0)], (1.0, 1.0), True))(merged)  # it goes on as the merge does
    counted(([(1, 3.0, 2.0)], (1.0, 1.0), True))(taken)
    assert taken.to_dict() == merged.to_dict()


@given(st.lists(st.lists(st.floats(0, 1e15), max_size=4), max_size=6))
def test_digits_of_sums_lose_less_than_one_unit_a_sum(parts):
    exact = [ExactSum() for _ in parts]
    for part, values in zip(exact, parts, strict=True):
        for value in values:
            part.add(value)
    wholes = [part.whole() for part in exact]
    assert all(0 <= digit < 1 << 32 for whole in wholes for digit in whole)
    total = ExactSum.of_whole([sum(column) for column in zip((0,) * 5, *wholes, strict=True)])
    lost = sum(Fraction(x) for part in parts for x in part) - Fraction(total._units, 1 << 1074)
    assert lost >= 0
    assert lost * (1 << 64) < max(len(parts), 1)


@pytest.mark.parametrize("value", [math.inf, 2.0**63, 1e300])
def test_sums_of_two_to_the_63_are_infinite_however_they_are_divided(value):
    assert ExactSum(value).whole() == (1, 0, 0, 0, 0)
    half = ExactSum(2.0**62).whole()
    assert half == (0, 0, 0, 0, 1 << 30)
    assert float(ExactSum.of_whole(half)) == 2.0**62
    for parts in ([half, half], [half, ExactSum(value).whole()], [ExactSum(value).whole()] * 3):
        total = ExactSum.of_whole([sum(column) for column in zip(*parts, strict=True)])
        assert float(total) == math.inf
        assert total.whole() == (1, 0, 0, 0, 0)


def test_digits_of_a_billion_sums_fit_int64():
    most = [digit * (1 << 30) for digit in ExactSum(1.0 - 2.0**-53).whole()]
    assert max(most) < MAX
    assert float(ExactSum.of_whole(most)) == (1 << 30) * (1.0 - 2.0**-53)


@pytest.mark.parametrize("weighted", [False, True])
def test_examples_that_the_histogram_lacks_are_unplaced(rng, weighted):
    y, a = (rng.random(300) < 0.3).astype(np.float64), rng.normal(size=300)
    w = rng.integers(1, 5, 300) / 4 if weighted else np.ones(300)
    placed, seen = Accumulator(), Accumulator()
    for one in (placed, seen):
        one.update(y[:200], a[:200], w[:200] if weighted else None)
    totals, histogram = seen.totals(), seen.histogram()
    seen.update(y[200:], a[200:], w[200:] if weighted else None)
    totals[:-1] = seen.totals()[:-1]
    taken = Accumulator()
    taken.take(totals, histogram)
    assert (taken.examples, taken.unplaced, taken.auc) == (300, 100, placed.auc)
    assert (taken.logloss, taken.base_rate) == (seen.logloss, seen.base_rate)
    assert taken.totals().tolist() == totals.tolist()
    assert Accumulator.from_dict(taken.to_dict()).to_dict() == taken.to_dict()
    taken.merge(taken)
    assert (taken.examples, taken.unplaced) == (600, 200)


def test_what_is_taken_is_not_shared():
    seen, taken = Accumulator(BITS), Accumulator(BITS)
    histogram = seen.histogram()
    taken.take(seen.totals(), histogram)
    taken.update([1], [0.0])
    assert not histogram.any()


def test_counts_above_what_float64_counts_stay_finite():
    seen, taken = Accumulator(BITS), Accumulator(BITS)
    seen.update([0, 1], [0.0, 0.0], [1e30, 0.3])
    histogram = seen.histogram()
    assert sorted(histogram[histogram != 0].tolist()) == [int(0.3 * 2**40), 1 << 53]
    taken.take(seen.totals(), histogram)
    assert taken.weight == math.inf
    assert taken.auc == 0.5


def test_totals_of_every_kind_fit_a_row_and_are_read_from_its_beginning(rng):
    binary, classes = Accumulator(BITS), MulticlassAccumulator(7)
    binary.update([0, 1, 1], [0.0, 1.0, -2.0], [1.0, 2.5, 0.0])
    classes.update([2, 6], rng.normal(size=(2, 7)))
    for seen, count in ((binary, 23), (classes, 16)):
        assert len(seen.totals()) == count
        taken = seen.empty()
        taken.take(np.append(seen.totals(), np.full(27 - count, 7)), seen.histogram())
        assert taken.totals().tolist() == seen.totals().tolist()


@pytest.mark.parametrize(
    ("seen", "margins"), [(Accumulator(BITS), [0.5, 1.0]), (MulticlassAccumulator(CLASSES), np.zeros((2, CLASSES)))]
)
def test_a_copy_counts_on_its_own(seen, margins):
    before = seen.to_dict()
    copy.copy(seen).update([0, 1], margins)
    assert seen.to_dict() == before
    assert repr(seen).startswith(f"<{type(seen).__name__}: logloss nan")


@pytest.mark.parametrize(("margins", "loss"), [([0.0, -np.inf, 0.0], math.inf), ([0.0, 0.0, -np.inf], math.log(2.0))])
def test_a_class_of_probability_0_has_an_infinite_loss_or_none(margins, loss):
    assert MulticlassAccumulator(CLASSES).update([1], [margins]) == pytest.approx(loss)


@pytest.mark.parametrize("margins", [[np.nan, 0.0, 0.0], [0.0, np.inf, 0.0], [-np.inf] * 3])
def test_margins_without_a_softmax_are_refused_by_their_place(margins):
    seen = MulticlassAccumulator(CLASSES)
    with pytest.raises(ValueError, match=r"at 1 \(1 of 2\) have no softmax"):
        seen.update([0, 0], [[0.0, 0.0, 0.0], margins], [1.0, 0.0])
    assert seen.examples == 0


def test_a_loss_that_is_known_already_and_no_number_is_refused():
    seen = MulticlassAccumulator(CLASSES)
    with pytest.raises(ValueError, match="not numbers"):
        seen.update([0], [[math.nan, 0.0, 0.0]], sums=(math.nan,))
    assert seen.examples == 0


@pytest.mark.parametrize("wrong", [None, "3", 2.5, True, math.nan])
@pytest.mark.parametrize("make", [Accumulator, MulticlassAccumulator])
def test_a_number_of_bits_or_classes_is_whole(make, wrong):
    with pytest.raises(TypeError, match=r"^(bits|classes) is "):
        make(wrong)


@pytest.mark.parametrize("other", [None, Accumulator().result(), MulticlassAccumulator(CLASSES)])
def test_what_is_merged_is_an_accumulator_of_the_same_kind(other):
    with pytest.raises(TypeError, match=r"^Accumulator merges another one"):
        Accumulator().merge(other)


def test_totals_that_are_no_int64_are_refused():
    seen = Accumulator(4)
    for totals, histogram in ((None, seen.histogram()), (seen.totals(), [0]), (seen.totals() * 1.0, seen.histogram())):
        with pytest.raises(TypeError, match=r"the (totals|histogram) must be int64\[n\], got"):
            seen.take(totals, histogram)
    assert seen.examples == 0


@pytest.mark.parametrize("other", [Accumulator(BITS + 1), MulticlassAccumulator(CLASSES)])
def test_totals_and_histograms_of_others_are_refused(other):
    seen = Accumulator(BITS)
    with pytest.raises(ValueError, match=r"histogram \(\d+,\): pass those of accumulators like this one"):
        seen.take(other.totals(), other.histogram())
    assert seen.to_dict() == Accumulator(BITS).to_dict()
