"""Progressive validation: when a line comes, and what it tells."""

import math

import numpy as np
import pytest

from shoal.metrics import Accumulator, Progressive, logloss


def reported(lines, sizes, weights=None):
    rng = np.random.default_rng(0)
    n = sum(sizes)
    y, a = (rng.random(n) < 0.3).astype(np.float32), rng.normal(size=n)
    w = np.ones(n) if weights is None else weights[:n]
    seen, out, at = Accumulator(), [], 0
    for size in sizes:
        part = slice(at, at + size)
        seen.update(y[part], a[part], w[part])
        at += size
        if line := lines.update(seen):
            out.append(line)
    if line := lines.finish(seen):
        out.append(line)
    return out, y, a, w


def test_lines_come_at_the_powers_of_two_and_at_the_end():
    out, *_ = reported(Progressive(), [1] * 100)
    assert [line.examples for line in out] == [1, 2, 4, 8, 16, 32, 64, 100]


def test_lines_come_every_so_many_examples():
    out, *_ = reported(Progressive(30), [1] * 100)
    assert [line.examples for line in out] == [30, 60, 90, 100]


@pytest.mark.parametrize("every", [0, 1.0, True, "3", None])
def test_an_interval_that_is_none_is_refused_with_what_to_pass(every):
    with pytest.raises(ValueError, match=f"every is {every!r}: pass a number of examples"):
        Progressive(every)


def test_a_batch_is_not_taken_apart_and_gives_one_line_at_most():
    assert [line.examples for line in reported(Progressive(), [10] * 5)[0]] == [10, 20, 40, 50]
    assert [line.examples for line in reported(Progressive(4), [10] * 3)[0]] == [10, 20, 30]


def test_the_smallest_factor_gives_a_line_for_each_batch():
    seen, lines = Accumulator(), Progressive(1 + 2**-52)
    for examples in (1000, 2000, 3000):
        seen.update(np.zeros(1000), np.zeros(1000))
        assert lines.update(seen).examples == examples
        assert lines.update(seen) is None


def test_a_line_is_of_an_accumulator_not_of_its_result():
    with pytest.raises(TypeError, match="seen is a Metrics: pass the accumulator"):
        Progressive().update(Accumulator().result())


def test_other_factors_step_as_far():
    assert [line.examples for line in reported(Progressive(10.0), [1] * 1000)[0]] == [1, 10, 100, 1000]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_line_has_the_mean_since_the_start_and_since_the_line_before(weighted):
    weights = np.random.default_rng(1).exponential(size=1000) if weighted else None
    out, y, a, w = reported(Progressive(), [7] * 100, weights)
    before = 0
    for line in out:
        assert line.logloss == pytest.approx(logloss(y[: line.examples], a[: line.examples], w[: line.examples]))
        window = slice(before, line.examples)
        assert line.since_last == pytest.approx(logloss(y[window], a[window], w[window]), rel=1e-9)
        assert line.weight == pytest.approx(w[: line.examples].sum())
        before = line.examples


def test_nothing_is_told_of_nothing():
    lines, seen = Progressive(), Accumulator()
    assert lines.update(seen) is None
    assert lines.finish(seen) is None
    seen.update([0], [0.0], [0.0])
    line = lines.update(seen)
    assert math.isnan(line.logloss)
    assert math.isnan(line.since_last)
    assert lines.finish(seen) is None


def test_lines_stand_under_their_header():
    (line,) = reported(Progressive(), [1])[0]
    widths = {len(row.rstrip()) for row in [str(line), Progressive.HEADER.splitlines()[1]]}
    assert len(widths) == 1
    assert str(line).split()[2:] == ["1", "1", "nan"]


@pytest.mark.parametrize("wrong", [0, -1, 1.0, 0.5, math.nan, math.inf, True])
def test_a_step_that_goes_nowhere_is_refused(wrong):
    with pytest.raises(ValueError, match="a number of examples"):
        Progressive(wrong)
