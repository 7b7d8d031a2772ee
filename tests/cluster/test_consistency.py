"""The descriptions of consistency: what they are equal to, what they refuse, what they tell a server."""

import pickle

import pytest

import shoal
from shoal.consistency import parse_consistency


def test_descriptions_are_values():
    assert shoal.BSP() == shoal.BSP(reduce="sum") != shoal.BSP(reduce="mean")
    assert shoal.SSP(4) == shoal.SSP(staleness=4) != shoal.SSP(5)
    assert len({shoal.BSP(), shoal.BSP(), shoal.SSP(0), shoal.ASP(), shoal.ASP()}) == 3
    for one in (shoal.BSP(reduce="mean"), shoal.SSP(3), shoal.ASP()):
        assert pickle.loads(pickle.dumps(one)) == one


def test_they_say_in_plain_values_what_a_server_does():
    plain = [
        (one.mode, one.waits, one.mean) for one in (shoal.BSP(), shoal.BSP(reduce="mean"), shoal.SSP(7), shoal.ASP())
    ]
    assert plain == [("bsp", 0, False), ("bsp", 0, True), ("ssp", 7, False), ("asp", 0, False)]


def test_their_text_is_read_back():
    for one in (shoal.BSP(), shoal.BSP(reduce="mean"), shoal.SSP(7), shoal.ASP()):
        assert parse_consistency(one.text) == one


def test_a_staleness_of_nothing_is_bulk_synchronous():
    choices = (shoal.BSP(), shoal.BSP(reduce="mean"), shoal.SSP(0), shoal.SSP(1), shoal.ASP())
    assert [one.is_bulk for one in choices] == [True, True, True, False, False]


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_a_staleness_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="staleness from 0 to 2147483647"):
        shoal.SSP(bad)


def test_a_reduction_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'sum' or 'mean', got reduce='max'"):
        shoal.BSP(reduce="max")


def test_a_lost_server_is_a_lost_connection_and_all_are_shoals():
    assert issubclass(shoal.ServerLostError, shoal.NotConnectedError)
    for kind in (
        shoal.DeadlineExceededError,
        shoal.errors.ProtocolError,
        shoal.NotConnectedError,
        shoal.errors.FencedError,
    ):
        assert issubclass(kind, shoal.ShoalError)
