"""Refusals are counted, and the log has one line of a reason in ten seconds at most."""

import logging

from shoal.cluster.protocol.refusals import INTERVAL, Refusals

LOG = logging.getLogger("shoal.test.refusals")


def test_the_first_of_a_reason_is_logged_and_a_later_line_counts_those_that_were_not(caplog):
    now = [100.0]
    refusals = Refusals(LOG, clock=lambda: now[0])
    for k in range(1000):
        refusals.add("garbage", f"10.0.0.{k % 7}: rubbish {k}")
        refusals.add("key", "another reason", level=logging.ERROR)
        now[0] += INTERVAL / 999.5
    assert refusals.counts() == {"garbage": 1000, "key": 1000}
    now[0] += INTERVAL
    refusals.add("garbage", "and\n\x1b[2Jpainted" + "x" * 10_000)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[:2] == [("WARNING", "10.0.0.0: rubbish 0"), ("ERROR", "another reason")]
    assert len(lines) == 3
    assert lines[2][1].startswith("and??[2Jpaintedxxx")
    assert lines[2][1].endswith("x (and 999 more of this kind since the last such line)")
    assert len(lines[2][1]) < 600


def test_a_defect_is_logged_with_its_traceback(caplog):
    refusals = Refusals(LOG)
    for _ in range(3):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            refusals.add("failed", "a message met a defect", trace=True)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
