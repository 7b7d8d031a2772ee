"""Room for rows that are forecast in a pass."""

import numpy as np
import pytest

import shoal
from shoal.models.room import RoomForRows, forecast
from shoal.table.table import Table


@pytest.mark.parametrize("power", [0.0, 0.5, 0.8, 1.0])
def test_a_power_law_is_forecast(power):
    rows = [round(1e5 * (e / 1000) ** power) for e in (1000, 2100, 4200)]
    assert forecast((1000, rows[0]), (2100, rows[1])) == pytest.approx(rows[2], rel=0.06)


def test_no_more_than_twice_the_rows_are_forecast():
    assert forecast((1000, 10), (2000, 10_000)) == 19_000
    for first, second in (((0, 0), (10, 5)), ((10, 5), (10, 5)), ((5, 7), (10, 7)), ((5, 100), (10, 101))):
        assert forecast(first, second) == second[1]


class Reader:
    """Batches of new keys, with the share of them that has been read."""

    def __init__(self, batches):
        self._batches = batches
        self._read = 0

    def __iter__(self):
        self._read = 0
        for batch in self._batches:
            self._read += 1
            yield batch

    def progress(self):
        return self._read / len(self._batches)


def batches(count, keys=2000, seed=5):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (count, 20)).astype(np.float32)
    indptr = np.arange(0, keys + 1, keys // 20)
    return [
        shoal.Batch(labels[k], indptr, rng.integers(0, 1 << 60, keys).astype(np.uint64), None) for k in range(count)
    ]


@pytest.fixture
def reserved(monkeypatch):
    rows = []
    monkeypatch.setattr(
        Table, "reserve", lambda self, count, reserve=Table.reserve: (rows.append(count), reserve(self, count))
    )
    return rows


@pytest.mark.slow
def test_a_fit_makes_room_and_has_the_bits_of_one_that_does_not(reserved):
    digests = []
    for room in (True, False):
        with shoal.local(slots=16) as store:
            model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
            model.fit(Reader(batches(320)) if room else batches(320), progress=False)
            digests.append(model.table.digest())
            rows = len(model.table)
            assert len(reserved) == 3
    assert [rows / room for room in reserved] == pytest.approx([4.2, 2.1, 1.05], rel=0.02)
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_tables_that_are_small_or_bounded_are_left_alone(reserved):
    for how in ({}, {"memory": 1 << 30}):
        with shoal.local(slots=16, **how) as store:
            shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store).fit(
                Reader(batches(320 if how else 20)), progress=False
            )
    with shoal.local(slots=16) as store:
        table = store.table("t", optimizer=shoal.FTRL(), expire=shoal.MaxRows(1_000_000))
        reader = Reader(batches(320))
        room = RoomForRows([store], reader)
        for batch in reader:
            table.push(batch.keys, np.ones((len(batch.keys), 1), np.float32))
            room.learned(len(batch))
    assert reserved == []


def test_keys_that_stop_coming_take_no_further_room(reserved):
    some = batches(40)
    with shoal.local(slots=16) as store:
        model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
        model.fit(Reader(8 * some), progress=False)
        assert reserved == [pytest.approx(1.9 * len(model.table), rel=0.01)]


def test_a_reader_that_is_far_ahead_makes_no_room(reserved):
    class Ahead(Reader):
        def progress(self):
            return min(1.0, 6 * super().progress())

    with shoal.local(slots=16) as store:
        shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store).fit(Ahead(batches(4, 40_000)), progress=False)
    assert reserved == []


@pytest.mark.slow
def test_room_that_there_is_no_memory_for_is_not_made(monkeypatch):
    monkeypatch.setattr("shoal.table.shard.available_bytes", lambda: 1)
    with shoal.local(slots=16) as store:
        model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
        model.fit(Reader(batches(320)), progress=False)
        assert len(model.table) > 600_000


def test_a_reader_without_progress_is_no_error():
    with shoal.local() as store:
        room = RoomForRows([store], object())
        room.learned(10)
