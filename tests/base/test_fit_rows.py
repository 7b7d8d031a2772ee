"""What rows of a fit say of its passes: the same as the accumulators whose totals were added up in them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fit_by_hand import sums_row
from shoal.base.fit_rows import DIM, HEADER, SUMS, Header, PassMetrics, place
from shoal.metrics import Accumulator
from shoal.metrics.multiclass import MulticlassAccumulator


def of_whole(workers):
    whole = workers[0].empty()
    for one in workers:
        whole.merge(one)
    return whole


@pytest.mark.slow
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.floats(-30, 30)), max_size=9), min_size=1, max_size=4),
    st.sampled_from([0, 3]),
)
def test_a_row_of_sums_says_what_the_merged_accumulators_say(batches, classes):
    workers = []
    for batch in batches:
        one = MulticlassAccumulator(classes) if classes else Accumulator()
        margins = np.array([(margin, -margin, 1.0) for _, margin in batch]).reshape(-1, 3)
        labels = np.array([label for label, _ in batch])
        weights = 0.25 + np.arange(len(batch))
        one.update(labels, margins, weights) if classes else one.update(labels % 2, margins[:, 0], weights)
        workers.append(one)
    whole, row = of_whole(workers), sums_row(*workers, repeated=7)
    found = PassMetrics.from_row(row.tolist(), classes)
    assert (found.examples, found.repeated) == (whole.examples, 7)
    if not whole.examples:
        assert found[2:] == (None, None, None)
        return
    assert found.loss == pytest.approx(whole.logloss, rel=1e-9, abs=1e-15)
    assert found.accuracy == (pytest.approx(whole.accuracy) if classes else None)
    own = [(one.examples, one.auc) for one in workers if one.auc == one.auc]
    mean = sum(n * auc for n, auc in own) / sum(n for n, _ in own) if own else None
    assert found.auc == (None if mean is None else pytest.approx(mean, abs=1e-5))


def test_a_loss_without_bound_is_infinite():
    seen = Accumulator()
    seen.update([1.0], [-np.inf])
    assert PassMetrics.from_row(sums_row(seen).tolist(), 0).loss == np.inf


def test_a_header_is_read_as_it_was_written_and_lies_beside_the_sums():
    header = Header(job=9, fit=2, epoch=3, epochs=5, known=1 << 40, models=2, classes=4, is_over=1)
    assert len(header.to_row()) == DIM
    assert Header.from_row(header.to_row()) == header
    assert place(HEADER) >> 50 == place(SUMS, (1 << 16) - 1, (1 << 12) - 1) >> 50 == 0  # the first of 2^14 slots
