"""Optimizers of one's own: compared with the engine's rules bit for bit, and with what must hold when they fail."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import shoal
from shoal import user_optimizer
from shoal.cli import main
from shoal.user_optimizer import make_user_optimizer

EDGES = np.array([0, 2**64 - 1, 1, 2**63], np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MySGD(shoal.UserOptimizer):
    lr: float = 0.1

    def step(self, weights, state, grads, steps):
        weights -= self.lr * grads


@dataclass(frozen=True, slots=True, kw_only=True)
class MyMomentum(shoal.UserOptimizer):
    lr: float = 0.1
    mu: float = 0.9
    nesterov: bool = False

    def initial_state(self):
        return {"v": 0.0}

    def step(self, weights, state, grads, steps):
        (v,) = state
        v *= self.mu
        v += grads
        weights -= self.lr * (grads + self.mu * v) if self.nesterov else self.lr * v


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(shoal.UserOptimizer):
    """Keeps what a step is given, and counts in its state."""

    first: float = 2.5
    row_steps: ClassVar[bool] = True
    seen: ClassVar[list] = []

    def initial_state(self):
        return {"a": self.first, "b": -1.0, "c": 0.0, "d": 7.0}

    def step(self, weights, state, grads, steps):
        self.seen.append((weights, state, grads, steps))
        state[2] += steps
        state[3] = weights
        weights += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fails(shoal.UserOptimizer):
    """Fails in a chunk in which some row has the gradient 13, after it has changed the arrays."""

    def initial_state(self):
        return {"v": 0.0}

    def step(self, weights, state, grads, steps):
        weights -= grads
        state += 1
        if (grads == 13).any():
            raise ArithmeticError("thirteen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(shoal.UserOptimizer):
    """Calls what a test gives it."""

    call: ClassVar[list] = []

    def step(self, weights, state, grads, steps):
        return self.call[0](weights, state, grads, steps)


def some_keys(rng, n, unique=False):
    keys = np.concatenate([EDGES, rng.integers(0, 2**64, n, np.uint64)])[: max(n, 0)]
    return np.unique(keys) if unique else keys[rng.integers(0, max(len(keys), 1), n)]


TWINS = {
    "sgd": (shoal.SGD(0.1), MySGD()),
    "sgd clipped": (shoal.SGD(0.1, clip_value=0.6, clip_norm=0.8), MySGD(clip_value=0.6, clip_norm=0.8)),
    "momentum": (shoal.Momentum(0.1), MyMomentum()),
    "nesterov": (shoal.Momentum(0.1, nesterov=True), MyMomentum(nesterov=True)),
}
SETTINGS = {
    "plain": {},
    "16 bits": {"dtype": "bfloat16"},
    "admission": {"admit": shoal.AfterCount(3)},
    "expiry": {"expire": (shoal.TimeToLive(3), shoal.MaxRows(300))},
}


@pytest.mark.combined(2)
@pytest.mark.parametrize("dim", [2, 7, 385])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize(("ours", "theirs"), TWINS.values(), ids=TWINS.keys())
def test_the_same_formula_has_the_same_bits_as_a_rule_of_the_engine(ours, theirs, setting, dim, rng):
    digests = []
    seed = int(rng.integers(2**32))
    for optimizer, threads, slots in ((ours, 1, 64), (theirs, 1, 64), (theirs, 3, 64), (theirs, 2, 2)):
        random = np.random.default_rng(seed)
        if slots == 2 and "expire" in setting:
            continue  # MaxRows is a limit of each slot
        with shoal.local(threads=threads, slots=slots) as store:
            table = store.table("t", dim=dim, optimizer=optimizer, init=shoal.Uniform(0.1, seed=5), seed=9, **setting)
            for n in (0, 1, 7, 500, 500, 200):
                keys = some_keys(random, n)
                table.push(keys, random.standard_normal((n, dim)).astype(np.float32)).result()
                store.tick()
            store.sweep()
            batch = store.key_batch(keys)
            table.push_per_key(batch, random.standard_normal((n, dim)).astype(np.float32)).result()
            rows = table.push_pull(keys, random.standard_normal((n, dim)).astype(np.float32)).result()
            np.testing.assert_array_equal(rows, table.pull(keys))
            digests.append((table.digest(), len(table), table.stats().step, table.stats().refused))
            assert table.shard.verify() == ""
    assert len(set(digests)) == 1


def test_a_large_push_of_narrow_rows_has_the_same_bits_for_any_number_of_threads(rng):
    keys = some_keys(rng, 150_000)  # several chunks for each of several threads
    grads = rng.standard_normal((3, len(keys))).astype(np.float32)
    digests = set()
    for optimizer, threads in ((shoal.Momentum(0.1), 2), (MyMomentum(), 1), (MyMomentum(), 4)):
        with shoal.local(threads=threads) as store:
            table = store.table("t", optimizer=optimizer)
            for one in grads:
                table.push(keys, one).result()
            digests.add(table.digest())
    assert len(digests) == 1


def test_a_step_gets_the_rows_in_hash_order_with_state_and_step_numbers():
    Recorder.seen.clear()
    keys = np.array([7, 3, 7, 9], np.uint64)
    with shoal.local(slots=2) as store:
        table = store.table("t", dim=2, optimizer=Recorder(), init=shoal.Constant(0.5))
        table.push(keys, np.arange(8, dtype=np.float32).reshape(4, 2)).result()
        table.push(keys[:1], np.ones((1, 2), np.float32)).result()
        (weights, state, grads, steps), (_, later, _, last) = Recorder.seen
        assert (weights.shape, state.shape, grads.shape, steps.shape) == ((3, 2), (4, 3, 2), (3, 2), (3, 1))
        assert (weights.dtype, state.dtype, grads.dtype, steps.dtype) == ("f4", "f4", "f4", "i8")
        order = store.key_batch(keys).keys.tolist()
        assert grads.tolist() == [{7: [4, 6], 3: [2, 3], 9: [6, 7]}[key] for key in order]
        assert steps.tolist() == [[1]] * 3
        assert last.tolist() == [[2]]
        assert not steps.flags.writeable
        assert weights.tolist() == [[1.5, 1.5]] * 3  # arrays that a step has kept stay as they were
        assert later[:, 0].tolist() == [[2.5, 2.5], [-1, -1], [3, 3], [1.5, 1.5]]
        state = table.state(keys)
        assert list(state) == ["w", "a", "b", "c", "d", "t"]
        assert {name: column[0, 0] for name, column in state.items()} == {
            "w": 2.5, "a": 2.5, "b": -1, "c": 3, "d": 1.5, "t": 2,
        }  # fmt: skip
        unseen = table.state(np.array([4], np.uint64))
        assert {name: column[0, 0] for name, column in unseen.items()} == {
            "w": 0.5, "a": 2.5, "b": -1, "c": 0, "d": 7, "t": 0,
        }  # fmt: skip


def test_an_optimizer_without_row_steps_gets_the_number_of_the_push():
    numbers = []
    Calls.call[:] = [lambda weights, state, grads, steps: numbers.append((steps.shape, steps[-1, 0].item()))]
    with shoal.local() as store:
        table = store.table("t", optimizer=Calls())
        for n in (3, 0, 2):
            table.push(np.arange(n, dtype=np.uint64), np.ones(n, np.float32)).result()
        assert numbers == [((3, 1), 1), ((2, 1), 3)]
        assert table.stats().step == 3


@pytest.mark.parametrize("setting", [{}, {"admit": shoal.AfterCount(2)}], ids=["plain", "admission"])
def test_a_step_that_raises_changes_nothing(setting, rng):
    keys = some_keys(rng, 100_000, unique=True)  # several chunks, of which one fails
    grads = rng.standard_normal(len(keys)).astype(np.float32)
    bad = grads.copy()
    bad[len(bad) // 2] = 13
    with shoal.local(threads=2) as store:
        table = store.table("t", optimizer=Fails(), **setting)
        half = keys[::2]
        table.push(half, grads[::2]).result()
        before = (table.digest(), len(table), table.stats().step, str(table.stats()))
        with pytest.raises(ArithmeticError, match="thirteen") as raised:
            table.push(keys, bad)
        assert "the push has changed nothing" in "".join(raised.value.__notes__)
        assert (table.digest(), len(table), table.stats().step, str(table.stats())) == before
        table.push(keys, grads).result()
        with shoal.local() as other:
            twin = other.table("t", optimizer=Fails(), **setting)
            twin.push(half, grads[::2]).result()
            twin.push(keys, grads).result()
            assert (table.digest(), table.stats().step) == (twin.digest(), twin.stats().step)


def test_a_step_that_returns_something_is_refused():
    Calls.call[:] = [lambda weights, state, grads, steps: weights - grads]
    with shoal.local() as store:
        table = store.table("t", optimizer=Calls())
        with pytest.raises(TypeError, match="step returned ndarray: it must change weights and state in place"):
            table.push(EDGES, np.ones(4, np.float32))
        assert len(table) == 0


def test_rows_that_are_not_finite_or_have_no_gradient_keep_every_bit():
    def step(weights, state, grads, steps):
        weights += 1
        weights[grads == 2] = np.nan

    Calls.call[:] = [step]
    with shoal.local() as store:
        table = store.table("t", dim=2, optimizer=Calls(), init=shoal.Constant(5.0))
        grads = np.array([[0, 0], [1, 2], [1, np.inf], [0, 1]], np.float32)
        table.push(EDGES, grads).result()
        assert table.pull(EDGES).tolist() == [[5, 5], [5, 5], [5, 5], [6, 6]]
        assert table.stats().nonfinite_rows == 2
        assert len(table) == 4


def test_a_step_may_read_tables_but_not_change_them(tmp_path):
    with shoal.local() as store:
        other = store.table("other", optimizer=shoal.SGD(1.0))
        other.push(EDGES, np.full(4, -3, np.float32)).result()
        table = store.table("t", optimizer=Calls())

        def step(weights, state, grads, steps):
            weights += other.pull(EDGES)[0] + table.pull(EDGES)[0]

        Calls.call[:] = [step]
        table.push(EDGES, np.ones(4, np.float32)).result()
        assert table.pull(EDGES).tolist() == [[3]] * 4
        for change in (
            lambda *_: table.push(EDGES, np.ones(4, np.float32)),
            lambda *_: table.assign(EDGES, np.ones(4, np.float32)),
            lambda *_: other.erase(EDGES),
            lambda *_: table.decay(0.5),
            lambda *_: store.save(tmp_path / "inside"),
        ):
            Calls.call[:] = [change]
            with pytest.raises(ValueError, match="step of an optimizer, or a function of rows, may not"):
                table.push(EDGES, np.ones(4, np.float32))
        assert table.pull(EDGES).tolist() == [[3]] * 4
        assert len(other) == 4


def test_pushes_of_several_threads_and_saves_exclude_each_other(tmp_path):
    """Whole numbers: their sum does not depend on the order. A lost update would."""
    keys = np.arange(2000, dtype=np.uint64)
    with shoal.local(threads=2, slots=4) as store:
        table = store.table("t", optimizer=MySGD(lr=1.0))

        def push():
            for _ in range(20):
                table.push(keys, np.full(len(keys), -1, np.float32)).result()

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(3):
            store.save(tmp_path / str(number))
            table.assign(np.array([2**40 + number], np.uint64), np.ones(1, np.float32))
        for thread in threads:
            thread.join(60)
        assert np.all(table.pull(keys) == 60)
        for number in range(3):
            with shoal.local(slots=4) as loaded:
                loaded.load(tmp_path / str(number))
                found = np.unique(loaded.tables["t"].pull(keys))
                assert len(found) == 1  # a save sees whole pushes


def test_a_memory_budget_refuses_a_push_and_nothing_has_changed(rng):
    with shoal.local(slots=2, threads=1, memory=6 << 20) as store:
        table = store.table("t", dim=64, optimizer=MyMomentum())
        table.push(EDGES, np.ones((4, 64), np.float32)).result()
        before = (table.digest(), table.stats().step)
        with pytest.raises(shoal.MemoryBudgetExceededError):
            table.push(some_keys(rng, 50_000, unique=True), np.ones((50_000, 64), np.float32)[:50_000])
        assert (table.digest(), table.stats().step) == before


def test_a_dense_table_has_such_an_optimizer(rng):
    grads = rng.standard_normal((30, 40)).astype(np.float32)
    with shoal.local() as store:
        ours = store.dense("ours", (30, 40), optimizer=shoal.Momentum(0.1), block=64)
        theirs = store.dense("theirs", (30, 40), optimizer=MyMomentum(), block=64)
        for dense in (ours, theirs):
            dense.push(grads).result()
            dense.push(grads).result()
        np.testing.assert_array_equal(ours.pull(), theirs.pull())


class TestDescriptions:
    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"a": 0, "b": 0, "c": 0, "d": 0, "e": 0}, "has 5 state columns: 4 is the maximum"),
            ({"two words": 0.0}, "must be an identifier"),
            ({"w": 0.0}, "take another name"),
            ({"x" * 33: 0.0}, "of 32 ASCII letters"),
            ({"a": float("nan")}, "needs a finite float32 for state0.a"),
        ],
    )
    def test_invalid_state_is_refused(self, state, message):
        @dataclass(frozen=True, slots=True, kw_only=True)
        class Bad(shoal.UserOptimizer):
            def initial_state(self):
                return state

            def step(self, weights, state, grads, steps):
                pass

        with pytest.raises(ValueError, match=message):
            Bad()

    def test_other_mistakes_name_themselves(self):
        with pytest.raises(TypeError, match="abstract"):
            shoal.UserOptimizer()
        with pytest.raises(TypeError, match="MySGD needs a number for lr, got str 'fast'"):
            MySGD(lr="fast")
        with pytest.raises(ValueError, match="MySGD takes no schedule"):
            MySGD(schedule=shoal.schedules.Warmup(9))
        with pytest.raises(ValueError, match="clip_norm must be > 0"):
            MySGD(clip_norm=0.0)

        class Old(MySGD):
            version = 0

        with pytest.raises(ValueError, match="Old needs a version from 1, got 0"):
            Old()

    def test_parameters_are_part_of_the_description(self):
        with shoal.local() as store:
            store.table("t", optimizer=MySGD(lr=0.5))
            assert store.table("t", optimizer=MySGD(lr=0.5)).optimizer == MySGD(lr=0.5)
            with pytest.raises(ValueError, match=r"lr=0.5\) instead of MySGD\(.*lr=0.1\)"):
                store.table("t", optimizer=MySGD())


class TestCheckpoints:
    @pytest.fixture
    def saved(self, tmp_path):
        with shoal.local() as store:
            table = store.table("t", optimizer=MyMomentum(lr=0.5, nesterov=True))
            table.push(EDGES, np.ones(4, np.float32)).result()
            store.save(tmp_path / "saved")
            table.push(EDGES, np.ones(4, np.float32)).result()
            return tmp_path / "saved", table.pull(EDGES), table.digest()

    def test_a_loaded_table_continues(self, saved):
        directory, rows, digest = saved
        with shoal.local(slots=1024) as store:
            store.load(directory)
            table = store.tables["t"]
            assert table.optimizer == MyMomentum(lr=0.5, nesterov=True)
            table.push(EDGES, np.ones(4, np.float32)).result()
            np.testing.assert_array_equal(table.pull(EDGES), rows)
            assert table.digest() == digest

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda kind: user_optimizer._classes.pop(kind), "import .*test_user_optimizer first"),
            (lambda kind: setattr(user_optimizer._classes[kind], "version", 2), "this process has version 2 of it"),
            (
                lambda kind: setattr(user_optimizer._classes[kind], "initial_state", lambda self: {"u": 0.0}),
                "other state columns: raise the version",
            ),
            (lambda kind: user_optimizer._classes.update({kind: MySGD}), "does not take its parameters"),
        ],
        ids=["missing", "version", "state", "parameters"],
    )
    def test_a_table_without_its_class_can_be_read_but_not_trained(
        self, saved, change, reason, tmp_path, monkeypatch, capsys
    ):
        @dataclass(frozen=True, slots=True, kw_only=True)
        class Replaced(MyMomentum):
            pass

        path = f"{__name__}:MyMomentum"
        Replaced.__qualname__ = "MyMomentum"
        monkeypatch.setattr(user_optimizer, "_classes", {path: Replaced})
        monkeypatch.setattr(user_optimizer, "_optimizers", {})
        change(path)
        directory, _, _ = saved
        with shoal.local() as store:
            store.load(directory)
            table = store.tables["t"]
            rows, digest = table.pull(EDGES), table.digest()
            assert rows.tolist() != [[0]] * 4
            with pytest.raises(shoal.errors.UserCodeError, match=f"optimizer is {path} version 1: .*{reason}"):
                table.push(EDGES, np.ones(4, np.float32))
            assert table.digest() == digest
            with pytest.raises(ValueError, match=f"{path} version 1, which cannot step here"):
                store.table("t", optimizer=MyMomentum(lr=0.5, nesterov=True))
            store.save(tmp_path / "again")
        monkeypatch.undo()
        with shoal.local() as store:
            store.load(tmp_path / "again")
            assert store.tables["t"].optimizer == MyMomentum(lr=0.5, nesterov=True)
        assert main(["inspect", str(directory)]) == 0
        assert (
            f"UserOptimizer(class.{path}=1, row_steps=0, param.lr=0.5, param.mu=0.9, param.nesterov=1, state0.v=0)"
            in capsys.readouterr().out
        )

    def test_another_description_is_refused_and_nothing_is_loaded(self, saved):
        directory, _, _ = saved
        with shoal.local() as store:
            table = store.table("t", optimizer=MyMomentum(lr=0.25, nesterov=True))
            with pytest.raises(ValueError, match=r"lr=0\.5.*lr=0\.25"):
                store.load(directory)
            assert len(table) == 0

    def test_descriptions_that_contradict_themselves_are_refused(self):
        params = MyMomentum().engine_params()
        assert make_user_optimizer(params) == MyMomentum()
        for wrong, message in (
            ({"class.a:B": 1.0}, "has one class, got "),
            ({f"class.{__name__}:MyMomentum": 0.5}, "needs a whole number from 1"),
            ({"beta": 1.0}, "has no parameter beta"),
        ):
            with pytest.raises(ValueError, match=message):
                make_user_optimizer(params | wrong)
