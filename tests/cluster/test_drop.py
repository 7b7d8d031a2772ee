"""Stores that nobody closes, and arguments that no store can take."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster

SURROGATE = "bad\ud800"
KEYS = np.arange(5, dtype=np.uint64)
ONES = np.ones((5, 2), np.float32)


class Three:
    """Data in three parts."""

    def splits(self, split_bytes):
        return [self] * 3

    def position(self):
        return {"files": [("three", 3)]}


def drop(things):
    things.clear()
    gc.collect()


def meet_for_ever(store):
    while True:
        store.barrier(TIMEOUT)


@pytest.fixture(scope="module")
def running():
    with cluster(1) as made:
        yield made


@pytest.mark.slow
def test_a_store_that_was_dropped_leaves_and_says_that_it_was_not_closed(running):
    store = shoal.connect(running.address, timeout=TIMEOUT)
    table = store.table("t", dim=2)
    table.push(KEYS, ONES).result()
    gone, link, keeper = weakref.ref(store), store._scheduler, store.channel._background
    del store
    gc.collect()
    table.pull(KEYS)  # a table is as good as its store
    left = [table]
    del table
    with pytest.warns(ResourceWarning, match=r"unclosed ClusterStore\('tcp://.*', worker 0 of 1\): use it in a with"):
        drop(left)
    assert gone() is None
    link.wait_for_end(TIMEOUT)
    keeper.join(TIMEOUT)
    assert not link._thread.is_alive()
    assert not keeper.is_alive()
    with shoal.connect(running.address, timeout=TIMEOUT) as store:  # the place is free at once
        assert store.rank == 0


def test_a_store_whose_calls_have_failed_for_good_can_be_dropped_too(running):
    with cluster(1) as other:
        store = shoal.connect(other.address, timeout=TIMEOUT)
        link = store._scheduler
        other.scheduler.stop()
        link._thread.join(0.01)
        for _ in range(2):
            with pytest.raises(shoal.NotConnectedError):
                meet_for_ever(store)
        left = [store]
        del store
        with pytest.warns(ResourceWarning, match="unclosed"):
            drop(left)
        link.wait_for_end(TIMEOUT)
        assert not link._thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_a_process_that_ends_without_closing_its_store_has_left(running, end):
    program = f"import shoal; store = shoal.connect({running.address!r}, timeout=120); store.table('x', dim=1); {end}"
    done = subprocess.run([sys.executable, "-c", program], timeout=TIMEOUT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3 if end else 0, "")
    assert running.scheduler.membership.workers == {}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "store.close()", "store.tick(); store.flush()"])
def test_a_process_that_ends_without_closing_its_store_says_that_pushes_are_lost(running, end):
    program = f"""
import numpy as np, shoal
store = shoal.connect({running.address!r}, timeout=120)
store.table("x").push(np.arange(9), np.ones(9, np.float32)).result()
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=TIMEOUT, capture_output=True, text=True)
    assert (done.returncode, "pushes of it are lost" in done.stderr) == (0, not end), done.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rank": 2**70}, "rank must be from 0 to .*, got 1180591620717411303424"),
        ({"rank": -1}, "rank must be from 0"),
        ({"rank": True}, "rank must be from 0"),
        ({"rank": "0"}, "rank must be from 0 to .*, got '0'"),
        ({"workers": 10**8}, "workers must be from 1 to .*, got 100000000"),
        ({"workers": 0}, "workers must be from 1"),
        ({"workers": 1.5}, "workers must be from 1 to .*, got 1.5"),
        ({"timeout": True}, "timeout must be a number of seconds"),
        ({"timeout": float("nan")}, "timeout must be a number of seconds"),
        ({"shared_storage": "no"}, "shared_storage is True or False"),
        ({"curve": SURROGATE}, "surrogates"),
        ({"curve": "a\0b"}, "null"),
        ({"filters": {SURROGATE: shoal.Filters()}}, "surrogates"),
        ({"filters": {5: shoal.Filters()}}, "5"),
        ({"address": 5}, "an address is a str"),
        ({"address": "tcp://h\ud800st:1"}, "not an address"),
        ({"address": "tcp://h\0st:1"}, "not an address"),
        ({"address": "tcp://é.example:1"}, "not an address"),
    ],
)
def test_arguments_that_no_store_can_take_are_refused_before_anything_is_sent(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        shoal.connect(**{"address": "tcp://127.0.0.1:9", "timeout": 0.01, **arguments})


def test_whatever_a_caller_passes_is_the_callers_error_and_the_store_goes_on(running, tmp_path):
    with shoal.connect(running.address, timeout=TIMEOUT, rank=np.int64(0)) as store:
        table = store.table("t", dim=2)
        nan = float("nan")
        calls = [
            lambda: store.table(SURROGATE, dim=1),
            lambda: store.table(5, dim=1),
            lambda: store.table("x" * 5000, dim=1),
            lambda: store.table("d", dim=2**70),
            lambda: store.table("d", dim=1, seed=2**70),
            lambda: store.table("d", dim=1, dtype=SURROGATE),
            lambda: store.dense(SURROGATE, (3,)),
            lambda: store.save(tmp_path / SURROGATE),
            lambda: store.load(tmp_path / SURROGATE),
            lambda: store.save("a\0b"),
            lambda: store.save(5),
            lambda: store.save("memory://x", storage_options={"a": object()}),
            lambda: store.save("memory://x", storage_options={SURROGATE: SURROGATE}),
            *(lambda wrong=wrong: list(store.splits(Three(), reissue=wrong)) for wrong in (nan, "a", -1, 2**5000)),
            lambda: list(store.splits(5)),
            *(
                lambda call=call, seconds=seconds: call(seconds)
                for call in (store.barrier, store.flush, lambda wait: table.push(KEYS, ONES).result(wait))
                for seconds in (nan, "a")
            ),
        ]
        for number, call in enumerate(calls):
            with pytest.raises((ValueError, TypeError)):
                print(number, call())
        for seconds in (1e300, float("inf")):
            store.barrier(seconds)
            store.flush(seconds)
            table.push(KEYS, ONES).result(seconds)
        store.tick()
        assert np.all(table.pull(KEYS) != 0)
        assert store._scheduler._thread.is_alive()
        assert store.channel._background.is_alive()
