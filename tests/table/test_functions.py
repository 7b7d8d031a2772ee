"""Functions of users over rows: compared with NumPy on what a table holds, and their failures."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.cluster.server.code import AllowedCode
from shoal.user_functions import SourceFunction, describe, run_rows, set_resolver
from stores import KINDS, opened
from tiers import rounds

EDGES = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)


def total(keys, weights, state):
    assert weights.shape[0] == len(keys) == len(np.unique(keys))
    return weights.sum(axis=0, dtype=np.float64)


def number(keys, weights, state):
    return len(keys)


def add_key(keys, weights, state, factor=1.0):
    weights += factor * (keys % np.uint64(5)).astype(np.float32)[:, None]


def halve_state(keys, weights, state):
    for column in state.values():
        column *= 0.5


def fail_at_nine(keys, weights, state):
    weights[:] = 1
    if (keys == 9).any():
        raise ArithmeticError("nine")


def fill(store, name="t", rows=500, dim=3, optimizer=None, **how):
    table = store.table(name, dim=dim, optimizer=optimizer or shoal.Adagrad(lr=0.5), **how)
    random = np.random.default_rng(3)
    keys = np.concatenate([EDGES, random.integers(0, 2**64, rows, np.uint64)])
    table.push(keys, random.standard_normal((len(keys), dim)).astype(np.float32)).result()
    return table, keys


def test_a_state_column_that_is_assigned_to_is_changed():
    def assign(keys, weights, state):
        state["n"] = state["n"] * 0 + 5

    def misspell(keys, weights, state):
        state["m"] = weights

    with shoal.local(slots=16) as store:
        table, keys = fill(store)
        table.apply(assign).result()
        assert (table.state(keys)["n"] == 5).all()
        with pytest.raises(shoal.errors.UserCodeError, match="no state column 'm': there is n"):
            table.apply(misspell).result()


@pytest.mark.parametrize("kind", KINDS)
class TestBothKinds:
    def test_a_reduction_sees_every_row_once(self, kind):
        with opened(kind, slots=16) as store:
            table, keys = fill(store)
            assert np.allclose(table.reduce(total, np.add), table.pull(keys).sum(axis=0, dtype=np.float64))
            count = table.reduce(number, np.add)
            assert (count, type(count)) == (len(keys), np.int64)
            some = np.concatenate([keys[:7], keys[:3], np.array([12345], np.uint64)])  # duplicates, one without a row
            assert table.reduce(number, np.add, keys=some) == 7
            assert table.reduce(number, np.add, keys=some[:0]) is None
            assert table.reduce(number, np.add, initial=10) == len(keys) + 10
            empty = store.table("empty")
            assert empty.reduce(number, np.add, initial=0) == 0

    def test_an_applied_function_changes_weights_and_state(self, kind):
        with opened(kind, slots=16) as store:
            table, keys = fill(store)
            before, state = table.pull(keys), table.state(keys)["n"]
            assert table.apply(add_key, params={"factor": 2.0}).result() == (keys % np.uint64(5) != 0).sum()
            assert np.array_equal(table.pull(keys), before + 2 * (keys % np.uint64(5)).astype(np.float32)[:, None])
            assert table.apply(halve_state, keys[:5]).result() == 5
            state[:5] *= 0.5
            assert np.array_equal(table.state(keys)["n"], state)
            assert table.apply(halve_state, np.array([12345], np.uint64)).result() == 0
            assert not table.contains(np.array([12345], np.uint64)).any()

    def test_derived_weights_move_z_and_state_moves_weights(self, kind):
        with opened(kind, slots=16) as store:
            table, keys = fill(store, dim=1, optimizer=shoal.FTRL(alpha=0.5, l1=0.0))
            want = table.pull(keys) + (keys % np.uint64(5)).astype(np.float32)[:, None]
            table.apply(add_key).result()
            assert np.allclose(table.pull(keys), want, rtol=1e-5)
            n = table.state(keys)["n"]
            table.apply(halve_state, keys).result()  # z and n
            assert np.array_equal(table.state(keys)["n"], n * np.float32(0.5))

    def test_a_failure_has_its_traceback_and_leaves_the_slot_as_it_was(self, kind):
        with opened(kind, slots=16) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            keys = np.arange(100, dtype=np.uint64)
            table.push(keys, np.ones(100, np.float32)).result()
            with pytest.raises(shoal.errors.UserCodeError, match=r"(?s)failed:.*fail_at_nine.*ArithmeticError: nine"):
                table.apply(fail_at_nine).result()
            slots = shoal.data.mix(keys) >> np.uint64(60)
            same = slots == slots[9]
            assert same.sum() > 1
            assert (table.pull(keys)[same] == -1).all()
            with pytest.raises(shoal.errors.UserCodeError, match="ArithmeticError: nine"):
                table.reduce(fail_at_nine, np.add, keys[9:10])
            table.push(keys, np.ones(100, np.float32)).result()

    def test_values_must_be_of_one_shape_and_numbers(self, kind):
        with opened(kind, slots=16) as store:
            table, _ = fill(store)
            with pytest.raises(
                shoal.errors.UserCodeError, match="returns a number or an array of float64 or int64, got str"
            ):
                table.reduce(_text, np.add)
            with pytest.raises(ValueError, match=r"values of one shape and type, got float64\[\d+, 3\]"):
                table.reduce(_rows, np.add)
            with pytest.raises(shoal.errors.UserCodeError, match="applied returned ndarray: it must change"):
                table.apply(_rows).result()
            with pytest.raises(shoal.errors.UserCodeError, match="unexpected keyword argument 'k'"):
                table.reduce(number, np.add, params={"k": 1})

    def test_rows_that_would_not_be_finite_are_left_unchanged_and_counted(self, kind):
        with opened(kind, slots=16) as store:
            table, keys = fill(store)
            before = table.pull(keys)
            assert table.apply(_poison).result() == len(keys) - 1
            assert np.array_equal(table.pull(keys)[3], before[3])
            assert table.stats().nonfinite_rows == 1

    def test_calls_come_after_others_and_fail_with_them(self, kind):
        with opened(kind, slots=16) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            keys = np.arange(20, dtype=np.uint64)
            pushed = table.push(keys, np.ones(20, np.float32))
            assert table.apply(_set_one, after=pushed).result() == 20
            if kind == "local":
                return
            failed = table.apply(fail_at_nine)
            with pytest.raises(shoal.errors.DependencyError, match="was not executed"):
                table.push(keys, np.ones(20, np.float32), after=failed).result()
            with pytest.raises(shoal.errors.UserCodeError):
                store.flush()  # nobody has asked for the error of `failed`
            assert (table.pull(keys) == 1).all()


def _text(keys, weights, state):
    return "text"


def _rows(keys, weights, state):
    return weights.astype(np.float64)


def _poison(keys, weights, state):
    weights += 1
    weights[keys == 2**64 - 1] = np.nan


def _set_one(keys, weights, state):
    weights[:] = 1


def test_bits_are_the_same_in_one_process_and_on_servers():
    seen = set()
    for kind in KINDS:
        with opened(kind, slots=64) as store:
            table, _ = fill(store, rows=3000, dtype="bfloat16", dim=2)
            table.apply(add_key, params={"factor": 1e-3}).result()
            value = table.reduce(_cosines, lambda a, b: 0.9 * a - b)  # not associative
            seen.add((table.digest(), value.tobytes()))
    assert len(seen) == 1


def _cosines(keys, weights, state):
    return np.cos(weights[0].astype(np.float64)) * len(keys)


@settings(max_examples=rounds(25), deadline=None)
@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=40, unique=True),
    st.lists(st.integers(0, 2**64 - 1), max_size=40),
    st.sampled_from([2, 8]),
)
def test_functions_of_given_keys_are_those_of_the_rows_that_exist(stored, asked, slots):
    with shoal.local(slots=slots) as store:
        table = store.table("t")
        table.assign(np.array(stored, np.uint64), np.ones(len(stored), np.float32))
        keys = np.array(asked + stored[::2], np.uint64)
        want = set(stored) & set(keys.tolist())
        assert table.reduce(number, np.add, keys=keys, initial=0) == len(want)
        assert table.apply(add_key, keys, params={"factor": 1.0}).result() == sum(key % 5 != 0 for key in want)


def test_a_delta_checkpoint_has_the_rows_that_a_function_changed(tmp_path):
    with shoal.local(slots=16) as store:
        table, keys = fill(store)
        store.save(tmp_path / "base", track=True)
        table.apply(add_key, keys[:50]).result()
        store.save(tmp_path / "delta", since=tmp_path / "base")
        want = table.digest()
    with shoal.local(slots=16) as store:
        store.load(tmp_path / "delta")
        assert store.tables["t"].digest() == want


def test_a_function_may_read_tables_but_not_change_them():
    with shoal.local(slots=4) as store:
        table, keys = fill(store)
        other, _ = fill(store, "other")

        def reads(_, weights, state):
            return other.pull(keys[:1])[0, 0] + table.pull(keys[:1])[0, 0]

        table.reduce(reads, np.add)

        def pushes(_, weights, state):
            other.push(keys, np.ones((len(keys), 3), np.float32))

        with pytest.raises(shoal.errors.UserCodeError, match="may not change, save or sweep a table"):
            table.apply(pushes).result()


def test_readers_and_writers_continue_while_a_function_runs():
    with shoal.local(slots=2) as store:
        table, keys = fill(store)
        entered, leave = threading.Event(), threading.Event()

        def waits(_, weights, state):
            entered.set()
            assert leave.wait(30)

        worker = threading.Thread(target=lambda: table.apply(waits).result())
        worker.start()
        assert entered.wait(30)
        table.pull(keys)
        leave.set()
        worker.join(30)
        assert not worker.is_alive()


def test_wrong_arguments_are_refused():
    with shoal.local() as store:
        table, _ = fill(store)
        with pytest.raises(TypeError, match="is called with keys, weights and state, got 3"):
            table.reduce(3, np.add)
        with pytest.raises(TypeError, match=r"params are numbers, texts and truth values by name, got 'k': \[1\]"):
            table.apply(add_key, params={"k": [1]})
        pairs = store.table("pairs", dim=2, optimizer=shoal.Proximal(), init=shoal.Zeros())
        pairs.push(EDGES, np.ones((4, 2), np.float32)).result()
        with pytest.raises(ValueError, match="only a step may change them"):
            pairs.apply(_set_one).result()


class TestSource:
    def test_the_source_of_a_function_is_enough_to_run_it(self):
        @shoal.by_source
        def norms(keys, weights, state):
            import math

            return math.sqrt(np.square(weights).sum())

        assert "shoal" not in norms.source
        with shoal.local() as store:
            table, _ = fill(store)
            assert table.reduce(norms, np.hypot) == pytest.approx(table.norm())

    def test_what_cannot_be_sent_is_refused(self):
        factor = 2

        def closes(keys, weights, state):
            weights *= factor

        with pytest.raises(ValueError, match=r"uses 'factor' of an enclosing function"):
            shoal.by_source(closes)
        with pytest.raises(ValueError, match=r"not defined by a def statement|cannot be read"):
            shoal.by_source(lambda keys, weights, state: 0)
        with pytest.raises(ValueError, match="cannot be read"):
            shoal.by_source(np.add)
        with opened("connected") as store:
            table, _ = fill(store)
            with pytest.raises(ValueError, match=r"cannot be imported by servers: put it into a module of its own"):
                table.apply(closes)


class TestAllowed:
    def test_servers_run_what_they_were_told_to(self, tmp_path, monkeypatch):
        (tmp_path / "functions_of_a_user.py").write_text(
            "import os\nimport numpy as np\ndef double(keys, weights, state):\n    weights *= 2\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        path = {"path": "functions_of_a_user:double"}
        source = {"name": "f", "source": "def f(keys, weights, state): return 1"}
        nothing, listed = AllowedCode(), AllowedCode([tmp_path, "source"])
        with pytest.raises(
            shoal.errors.UserCodeError, match="may not run: start all servers with --allow-code functions"
        ):
            nothing.function(path)
        with pytest.raises(shoal.errors.UserCodeError, match="may not run: start all servers with --allow-code source"):
            nothing.function(source)
        assert listed.function(path).__name__ == "double"
        assert listed.function(source)(None, None, None) == 1
        for wrong in ("functions_of_a_user:os.system", "functions_of_a_user:missing", "functions_of_a_user:np.add"):
            with pytest.raises(shoal.errors.UserCodeError, match="has no such function"):
                listed.function({"path": wrong})
        with pytest.raises(shoal.errors.UserCodeError, match="may not run"):
            listed.function({"path": "os:system"})

    def test_a_process_without_a_resolver_runs_nothing_that_others_describe(self):
        set_resolver(AllowedCode().function)
        text = describe(SourceFunction("f", "def f(k, w, s): return 1")).text.replace(b'"f"', b'"g"')
        succeeded, words = run_rows(text, False, np.zeros(1, np.uint64), np.zeros((1, 1), np.float32), {})
        assert not succeeded
        assert b"may not run" in words.tobytes()
