"""The rows that a worker keeps: the engine's cache is its slow twin, and what it promises."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from oracle import row_cache
from shoal import _core
from table_specs import native_spec

SLOTS = 8


def hashes_of(keys):
    return np.sort(_core.mix(np.asarray(keys, np.uint64)))


def same(ours, theirs):
    """Whether two answers have the same types, shapes and bits."""
    if ours is None or theirs is None:
        return ours is theirs
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    return ours == theirs


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 9, 30, 100]), st.sampled_from([1, 3, 16]), st.booleans(),
    st.sampled_from([4, 12, 60, 400]), st.booleans(),
)  # fmt: skip
def test_the_cache_does_what_its_slow_twin_does(seed, room, dim, counted, keys, local_steps):
    rng = np.random.default_rng(seed)
    spec = native_spec(dim, shoal.SGD(lr=0.3), admit=shoal.AfterCount(2) if counted else None)
    ours = _core.RowCache(spec, room, local_steps)
    theirs = row_cache.RowCache(room, dim, counted, 0.3 if local_steps else None)
    open_pulls, clock, reader, batches = [], 0, 0, []
    pool = hashes_of(np.arange(keys))
    pool[0] = 0  # as an entry that nobody has used
    for _ in range(60):
        what = rng.choice(["read", "read", "fill", "fill", "add", "add", "older", "rows", "forget", "tick"])
        some = pool[np.sort(rng.choice(keys, rng.integers(0, min(keys, 40) + 1), replace=False))]
        if what == "read":
            reader += 1
            rows = [np.zeros((len(some), dim), np.float32) for _ in range(2)]
            args = (int(rng.integers(max(0, clock - 2), clock + 1)), reader, bool(rng.random() < 0.8))
            got = [cache.read(some, *args, out, SLOTS) for cache, out in zip((ours, theirs), rows, strict=True)]
            assert same(*got)
            assert same(*rows)
            if len(got[0][0]):
                open_pulls.append((reader, got[0][1], clock))
            batches.append(some)
        elif what == "fill" and open_pulls:
            number, fetched, begun = open_pulls.pop(rng.integers(len(open_pulls)))
            answer = rng.normal(size=(len(fetched), dim)).astype(np.float32)
            kept = bool(rng.random() < 0.8)
            for cache in (ours, theirs):
                cache.fill(fetched, number, begun, kept, answer)
        elif what == "add":
            if batches and rng.random() < 0.7:  # one of the last that were read, perhaps with rows replaced since
                some = batches[-rng.integers(1, min(len(batches), 6) + 1)].copy()
                if len(some) > 2 and rng.random() < 0.2:  # another batch with the same ends
                    some[1:-1] = np.sort(rng.integers(some[0] + 1, some[-1], len(some) - 2, dtype=np.uint64))
                    some = some[np.append(True, np.diff(some) > 0)]
            grads = rng.normal(size=(len(some), dim)).astype(np.float32)
            counts = rng.integers(1, 5, len(some)).astype(np.uint32) if counted else None
            assert same(*(cache.add(some, grads, counts, clock, SLOTS) for cache in (ours, theirs)))
        elif what == "older":
            assert same(*(cache.send_older(max(0, clock - 1), SLOTS) for cache in (ours, theirs)))
        elif what == "rows":
            assert same(*(cache.send_rows(some, SLOTS) for cache in (ours, theirs)))
        elif what == "forget" and rng.random() < 0.3:
            ours.forget()
            theirs.forget()
        elif what == "tick":
            clock += 1
        assert ours.sums == theirs.sums
        assert ours.verify()
    assert same(*(cache.send_older(2**32 - 1, SLOTS) for cache in (ours, theirs)))
    assert ours.sums == 0


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
def test_every_gradient_leaves_once(seed):
    rng = np.random.default_rng(seed)
    cache = _core.RowCache(native_spec(2, admit=shoal.AfterCount(2)), 20)
    sent, pushed = {}, {}

    def take(sums):
        if sums is not None:
            hashes, begins, grads, counts = sums
            assert (np.diff(hashes.astype(object)) > 0).all()
            assert begins.tolist() == [int((hashes < slot << 61).sum()) for slot in range(8)] + [len(hashes)]
            for hash, grad, count in zip(hashes.tolist(), grads.tolist(), counts.tolist(), strict=True):
                old = sent.get(hash, (0, 0, 0))
                sent[hash] = (old[0] + grad[0], old[1] + grad[1], old[2] + count)

    for clock in range(30):
        some = hashes_of(rng.choice(60, rng.integers(1, 30), replace=False))
        rows = np.empty((len(some), 2), np.float32)
        fetched = cache.read(some, clock, clock + 1, True, rows, SLOTS)
        take(fetched[5])
        cache.fill(fetched[1], clock + 1, clock, True, np.zeros((len(fetched[1]), 2), np.float32))
        grads = rng.integers(-9, 9, (len(some), 2)).astype(np.float32)
        take(cache.add(some, grads, np.ones(len(some), np.uint32), clock, SLOTS))
        for hash, grad in zip(some.tolist(), grads.tolist(), strict=True):
            old = pushed.get(hash, (0, 0, 0))
            pushed[hash] = (old[0] + grad[0], old[1] + grad[1], old[2] + 1)
        if rng.random() < 0.5:
            take(cache.send_older(max(0, clock - 2), SLOTS))
    take(cache.send_older(2**32 - 1, SLOTS))
    assert sent == pushed


def test_rows_that_are_used_often_stay_when_there_is_no_room():
    rng = np.random.default_rng(5)
    cache = _core.RowCache(native_spec(), 400)
    hot = np.arange(200)
    for clock in range(60):
        cold = 1000 + rng.choice(10**6, 800, replace=False)
        some = hashes_of(np.concatenate([hot, cold]))
        before = cache.stats()["hits"]
        rows = np.empty((len(some), 1), np.float32)
        fetched = cache.read(some, 0, clock + 1, True, rows, SLOTS)[1]
        cache.fill(fetched, clock + 1, clock, True, np.zeros((len(fetched), 1), np.float32))
    assert cache.stats()["hits"] - before >= 180
    assert cache.stats()["refused"] > 0
    assert cache.stats()["evicted"] > 0


def test_a_cache_takes_the_memory_that_its_document_states():
    for dim in (1, 16, 64):
        for optimizer in (shoal.FTRL(), shoal.Adam(), shoal.RowWiseAdagrad()):
            cache = shoal.Cache(rows=10**6, staleness=4)
            steps = cache.makes_steps(optimizer, dim)
            stats = _core.RowCache(native_spec(dim, optimizer), cache.rows, steps).stats()
            assert stats["capacity"] >= 10**6
            stated = cache.bytes(dim, optimizer)
            assert stated <= stats["bytes"] <= stated * 1.01 + 2**21
            assert steps or stated == replace(cache, local_steps=False).bytes(dim, optimizer) == 10**6 * (24 + 8 * dim)


@pytest.mark.parametrize(("rows", "staleness"), [(0, 1), (2**31 + 1, 1), (1, -1), (1, 2**31)])
def test_numbers_of_a_cache_that_make_no_sense_are_refused(rows, staleness):
    with pytest.raises(ValueError, match="a cache needs"):
        shoal.Cache(rows=rows, staleness=staleness)
    if rows == 0:
        with pytest.raises(ValueError, match="room for 1 to"):
            _core.RowCache(native_spec(), rows)


def test_gradients_are_not_held_back_for_longer_than_the_job_allows():
    cache = shoal.Cache(rows=10, staleness=5)
    cache.check(shoal.SSP(5))
    cache.check(shoal.ASP())
    cache.check(shoal.BSP())
    with pytest.raises(ValueError, match=r"staleness=5 holds gradients back for longer than SSP\(staleness=4\) allows"):
        cache.check(shoal.SSP(4))
