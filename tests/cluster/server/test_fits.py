"""The fits that a server reports are those whose rows its endpoints serve."""

import numpy as np
import pytest

from fit_by_hand import sums_row
from shoal import _core
from shoal.base.fit_rows import DIM, HEADER, SUMS, Header, place
from shoal.cluster.protocol.messages import Figures, checked_figures
from shoal.cluster.protocol.status import FitModelStatus
from shoal.cluster.server.fits import FitReader
from shoal.metrics import Accumulator


class Endpoint:
    """A service of which only rows are read; None: it does not serve them."""

    def __init__(self, rows=None, dim=DIM):
        self.rows = rows
        self.dim = dim
        self.is_busy = False

    def peek(self, table, keys, patience):
        if self.is_busy:
            return None
        if self.rows is None:
            return np.empty((0, 0), np.int64)
        found = [self.rows.get((table, hash), [0] * self.dim) for hash in _core.mix(keys).tolist()]
        return np.array(found, np.int64)

    def put(self, table, header, sums=()):
        self.rows[table, place(HEADER)] = header.to_row()
        for number, row in enumerate(sums):
            self.rows[table, place(SUMS, number, header.epoch)] = row


def learned(labels, margins, repeated=0):
    seen = Accumulator()
    seen.update(labels, margins)
    return sums_row(seen, repeated=repeated).tolist()


RUNNING = Header(job=77, fit=1, epoch=1, epochs=3, models=1, known=1000)


def test_a_fit_is_read_where_it_is_served_and_stays_while_that_endpoint_is_busy():
    here, elsewhere = Endpoint({}), Endpoint()
    reader = FitReader({"a": elsewhere, "b": here}, lambda: {4: "ads-progress", 5: "ads"})
    assert reader.read() == ()
    here.put(4, RUNNING, [learned([0, 1, 1, 0], [0.0] * 4, repeated=2)])
    (fit,) = reader.read()
    assert (fit.name, fit.job, fit.fit, fit.state) == ("ads", 77, 1, "running")
    assert (fit.pass_number, fit.passes, fit.known, fit.num_models) == (2, 3, 1000, 1)
    assert fit.models == (FitModelStatus(4, 2, pytest.approx(np.log(2)), 0.5, None),)
    figures = Figures(fits=(fit,))
    assert checked_figures(figures) == figures
    here.put(4, RUNNING, [learned([0] * 8, [1.0] * 8)])
    here.is_busy = True
    assert reader.read() == (fit,)
    here.is_busy = False
    assert [one.models[0].examples for one in reader.read()] == [8]
    here.rows = None  # the slot has moved
    assert reader.read() == ()


def test_a_fit_that_is_over_shows_its_last_pass():
    here = Endpoint({})
    reader = FitReader({"a": here}, lambda: {4: "ads-progress"})
    here.put(4, Header(job=77, fit=1, epoch=2, epochs=3, models=1, known=8), [learned([0, 1], [0.0, 0.0])])
    here.put(4, Header(job=77, fit=1, epoch=3, epochs=3, models=1, known=10))
    (fit,) = reader.read()
    assert (fit.state, fit.pass_number, fit.known, fit.models[0].examples) == ("running", 3, 8, 2)
    here.put(4, Header(job=77, fit=1, epoch=3, epochs=9, models=1, known=10, is_over=1))  # it has stopped early
    (fit,) = reader.read()
    assert (fit.state, fit.pass_number, fit.passes, fit.models[0].examples) == ("over", 3, 9, 2)


@pytest.mark.parametrize("row", [[0] * DIM, [3] * DIM, [-1] * DIM, [1 << 62] * DIM, [1] * 4])
def test_a_table_of_a_user_is_no_fit_or_does_no_harm(row):
    here = Endpoint({(1, place(HEADER)): row}, dim=len(row))
    found = FitReader({"a": here}, lambda: {1: "my-progress"}).read()
    assert len(found) == (row[0] == 3)
    checked_figures(Figures(fits=found))


def test_a_server_reports_some_models_and_fits_and_those_that_run_first():
    here = Endpoint({})
    names = {k: f"f{k:03}-progress" for k in range(80)}
    for k in names:
        many = Header(job=1, fit=1, epochs=1, models=100, is_over=int(k < 40), known=1)
        here.put(k, many, [learned([0], [0.0])] * 100)
    found = FitReader({"a": here}, lambda: names).read()
    assert [fit.name for fit in found[:41:40]] == ["f040", "f000"]
    assert len(found) == 64
    assert {(fit.num_models, len(fit.models)) for fit in found} == {(100, 16)}
