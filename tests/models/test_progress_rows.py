"""The rows of a fit: where they lie, what a clock writes, and notes that are complete or not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from shoal import _core
from shoal.base.fit_rows import COUNTS, DIM, HEADER, NOTE, SAVED_SHARE, SAVED_SUMS, SHARE, STATE, SUMS, WORKER
from shoal.models.progress_rows import ProgressRows, key, keys_of

TOGETHER = (HEADER, WORKER, SHARE, SAVED_SHARE, SUMS, SAVED_SUMS)


@pytest.fixture
def rows() -> Iterator[ProgressRows]:
    with shoal.local(slots=16) as store:
        yield ProgressRows(store, "model")


# ---- places ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(TOGETHER), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.integers(1, 14))
def test_what_a_clock_writes_is_in_the_first_slot_of_any_number_of_slots(
    kind: int, first: int, second: int, bits: int
) -> None:
    hashes = _core.mix(keys_of(kind, first, second, 3, begin=(1 << 12) - 3))
    assert not any(hashes >> np.uint64(64 - bits))


@given(st.lists(st.tuples(st.integers(1, 9), *[st.integers(0, 2**16 - 1)] * 2, st.integers(0, 2**12 - 1)), unique=True))
def test_no_two_rows_have_one_key(places: list[tuple[int, int, int, int]]) -> None:
    keys = [int(keys_of(kind, first, second, 1, begin=block)[0]) for kind, first, second, block in places]
    assert len(set(keys)) == len(places)


@pytest.mark.parametrize("kind", [COUNTS, STATE, NOTE])
def test_rows_of_many_blocks_are_on_all_servers(kind: int) -> None:
    hashes = _core.mix(keys_of(kind, 1, 2, 1000))
    assert len(set((hashes >> np.uint64(60)).tolist())) == 16


# ---- within clocks ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6))
def test_a_row_that_is_set_again_and_again_is_the_last_one(values: list[int]) -> None:
    with shoal.local(slots=2) as store:
        rows, at = ProgressRows(store, "model"), key(SHARE, 1, 2)
        for number, value in enumerate(values):
            rows.set(at, np.full(DIM, value, np.int64))
            if number % 2:
                rows.push()
        rows.push()
        assert rows.pull([at])[0].tolist() == [values[-1] if values else 0] * DIM


def test_a_successor_sets_the_row_that_it_has_read(rows: ProgressRows) -> None:
    at = key(WORKER, 0, 1)
    rows.set(at, np.arange(DIM))
    rows.push()
    after = ProgressRows(rows._store, "model")
    after.knows(at, after.pull([at])[0])
    after.set(at, np.arange(DIM) * 2)
    after.push()
    assert rows.pull([at])[0].tolist() == list(range(0, 2 * DIM, 2))


def test_without_bsp_rows_are_never_ahead_of_what_they_account_for() -> None:
    """Those of a clock are sent when all servers have its gradients, the last ones when the rows settle."""
    with (
        cluster(2, 1, slots=16) as made,
        shoal.connect(made.address, workers=1, threads=1, timeout=TIMEOUT, consistency=shoal.ASP()) as store,
    ):
        rows = ProgressRows(store, "model")
        rows._lags = True  # there is no other worker
        at = key(SHARE)
        for clock in range(1, 4):
            rows.set(at, np.full(DIM, clock, np.int64))
            rows.push()
            assert rows.pull([at])[0, 0] <= store.counted_clock
            store.tick()
        rows.settle()
        assert rows.pull([at])[0, 0] == 3


# ---- notes -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.binary(max_size=700), st.integers(0, 2**62)), min_size=1, max_size=4))
def test_a_note_is_the_newest_one_and_leaves_no_row_of_those_before(notes: list[tuple[bytes, int]]) -> None:
    with shoal.local(slots=2) as store:
        rows = ProgressRows(store, "model")
        for content, tag in notes:
            rows.put_note(2, 5, content, tag)
            assert rows.note(2, 5, tag) == content
            assert rows.note(2, 5, tag + 1) is None
        assert len(rows.table) == 1 + -(-len(notes[-1][0]) // (DIM * 8))
        rows.drop_notes(2, [4, 5])
        assert rows.note(2, 5, notes[-1][1]) is None
        assert len(rows.table) == 0


def test_a_note_that_nobody_has_written_is_not_there(rows: ProgressRows) -> None:
    assert rows.note(1, 0, 0) is None


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_writer_that_dies_leaves_the_note_before_or_the_new_one(
    rows: ProgressRows, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the blocks, then the first row, and then erases those of the note before."""
    rows.put_note(1, 0, b"before" * 100, tag=1)
    assign, left = ProgressRows.assign, list(range(writes))

    def dying(self: ProgressRows, keys: Any, values: Any) -> None:
        if not left:
            raise InterruptedError
        left.pop()
        assign(self, keys, values)

    def dies(self: ProgressRows, keys: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(ProgressRows, "assign", dying)
        patched.setattr(ProgressRows, "erase", dies)
        with pytest.raises(InterruptedError):
            rows.put_note(1, 0, b"after" * 300, tag=2)
    found = rows.note(1, 0, 1), rows.note(1, 0, 2)
    assert found == ((b"before" * 100, None) if writes < 2 else (None, b"after" * 300))
    rows.put_note(1, 0, b"again", tag=3)
    assert rows.note(1, 0, 3) == b"again"


def test_a_note_whose_blocks_are_not_those_of_its_first_row_is_not_there(rows: ProgressRows) -> None:
    rows.put_note(1, 0, b"content" * 100, tag=1)
    (first,) = rows._note_keys(1, 0, 1, 1)
    rows.assign([int(first)], np.zeros((1, DIM), np.int64))
    assert rows.note(1, 0, 1) is None
