"""The pulls of a batch begin before the batch ahead of it was learned from, where that changes nothing that matters."""

import numpy as np
import pytest

import shoal
from shoal.data import Batch
from shoal.models.evaluation import begun_early
from shoal.table.table import Table

SIZE = 8


def batches(count):
    random = np.random.default_rng(5)
    return [
        Batch(
            random.integers(0, 2, SIZE).astype(np.float32),
            np.arange(SIZE + 1) * 3,
            random.integers(0, 40, 3 * SIZE).astype(np.uint64),
            None,
        )
        for _ in range(count)
    ]


class Recorder:
    """A model that may begin batches, but not those of ``late``."""

    def __init__(self, late=()):
        self.late, self.events = late, []

    def may_begin(self, batch, *, learns):
        return batch not in self.late

    def begin(self, prepared, clocks):
        self.events.append(f"begin {prepared}, {clocks} early")

    def forget(self, prepared):
        self.events.append(f"forget {prepared}")


def used(model, ready, learns=True):
    for batch, _ in begun_early(ready, [model], learns=learns):
        model.events.append(f"use {batch}")
    return model.events


def named(*names):
    yield from ((name, name) for name in names)


def test_a_batch_begins_before_the_one_ahead_is_used():
    assert used(Recorder(), named("a", "b", "c")) == [
        "begin a, 0 early", "begin b, 1 early", "use a", "begin c, 1 early", "use b", "use c", "forget c",
    ]  # fmt: skip


def test_predictions_are_all_of_one_clock():
    assert "begin b, 0 early" in used(Recorder(), named("a", "b"), learns=False)


def test_a_batch_that_may_not_begin_waits_for_none_behind_it():
    def ready():
        yield from named("a", "b")
        assert "use b" in model.events
        yield from named("c")

    model = Recorder(late=["b"])
    assert used(model, ready()) == ["begin a, 0 early", "use a", "use b", "begin c, 0 early", "use c", "forget c"]


def test_batches_are_used_before_the_error_that_followed_them():
    def ready():
        yield from named("a", "b")
        raise ValueError("line 3")

    model = Recorder()
    with pytest.raises(ValueError, match="line 3"):
        used(model, ready())
    assert model.events[-3:] == ["use a", "use b", "forget b"]


def test_what_was_begun_is_dropped_where_the_loop_ends():
    closed = []

    def ready():
        try:
            yield from named("a", "b", "c")
        finally:
            closed.append(True)

    model = Recorder()
    loop = begun_early(ready(), [model], learns=True)
    next(loop)
    loop.close()
    assert model.events[-2:] == ["forget a", "forget b"]
    assert closed


def clocks_early(monkeypatch, consistency, count, **options):
    """Fit on a cluster; return by how many clocks each pull of the weights was early, and the model's digest."""
    found = []
    pull = Table.begin_pull

    def begin_pull(self, batch, *, out=None, ahead=0):
        if self.name == "lr":
            found.append(ahead)
        return pull(self, batch, out=out, ahead=ahead)

    monkeypatch.setattr(Table, "begin_pull", begin_pull)
    with shoal.launch(consistency=consistency, **options) as store:
        model = shoal.LogisticRegression(store=store, warm_up=False)
        model.fit(batches(count), progress=False)
        return found, model.weights()


@pytest.mark.slow
def test_bsp_begins_no_pull_early_and_learns_what_one_process_learns(monkeypatch):
    early, (keys, weights) = clocks_early(monkeypatch, "bsp", 134)
    assert set(early) == {0}
    with shoal.local() as store:
        model = shoal.LogisticRegression(store=store, warm_up=False)
        expected = model.fit(batches(134), progress=False).weights()
    assert np.array_equal(keys, expected[0])
    assert np.array_equal(weights, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
def test_without_clocks_in_step_pulls_begin_early_once_batches_are_small(monkeypatch, consistency):
    early, _ = clocks_early(monkeypatch, consistency, 134)
    # The first batch that is at most 1/128 of what was learned from when it is begun.
    assert early[:129] == [0] * 129
    assert set(early[129:134]) == {1}


@pytest.mark.slow
def test_a_cache_hinders_early_pulls(monkeypatch):
    early, _ = clocks_early(monkeypatch, "asp", 134, cache=shoal.Cache(rows=100, staleness=1))
    assert set(early[:134]) == {0}


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_fit_that_fails_leaves_nothing_to_wait_for(consistency):
    bad = batches(4)
    bad[2].labels[0] = 5
    with shoal.launch(consistency=consistency) as store:
        model = shoal.LogisticRegression(store=store, warm_up=False)
        with pytest.raises(ValueError, match="got 5"):
            model.fit(bad, progress=False)
        store.flush(timeout=5.0)
        model.partial_fit(bad[0])
        assert store.clock == 3


@pytest.mark.slow
def test_a_model_may_be_measured_while_its_next_batch_has_begun():
    measured = []

    class Measuring(shoal.models.Callback):
        def batch_done(self, progress):
            if progress.examples % 400 == 0:
                measured.append(model.evaluate(batches(3)).logloss)

    with shoal.launch(consistency="asp") as store:
        model = shoal.LogisticRegression(store=store, warm_up=False)
        model.fit(batches(200), progress=False, callbacks=Measuring())
        assert measured
        assert not model._begun
