"""NumPy's scalars are numbers wherever Python's are: settings, sizes, counts and times."""

import fractions
import json
import pickle

import msgspec
import numpy as np
import pytest

import shoal
from shoal import schedules
from shoal.base.scalars import plain, whole
from shoal.base.sizes import memory_bytes
from shoal.metrics import Progressive
from shoal.models import EarlyStopping
from shoal.models.plan import Plan

WHOLE = (np.int64, np.int32, np.uint8, np.uint64)
REAL = (np.float64, np.float32, np.float16)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_number_of_numpy_becomes_one_of_python(kind):
    assert type(plain(kind(4))) is int
    assert plain(kind(4)) == 4


@pytest.mark.parametrize("kind", REAL)
def test_a_real_number_of_numpy_becomes_one_of_python(kind):
    assert type(plain(kind(0.5))) is float
    assert plain(kind(0.5)) == 0.5


def test_what_is_no_number_stays_as_it_is():
    array = np.ones(3)
    for value in (array, None, "4", [4], True, 4, 0.5, array[:1]):
        assert plain(value) is value
    assert plain(np.bool_(True)) is True
    assert plain(fractions.Fraction(1, 2)) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda one: shoal.FTRL(alpha=one, beta=one, l1=one, l2=one),
        lambda one: shoal.Adam(one, clip_value=one, clip_norm=one),
        lambda one: shoal.SGD(one, schedule=schedules.Cosine(one)),
        lambda one: shoal.Constant(one),
        lambda one: shoal.Normal(one, seed=one),
        lambda one: shoal.SSP(staleness=one),
        lambda one: shoal.AfterCount(one),
        lambda one: shoal.TimeToLive(one),
        lambda one: shoal.MinNorm(one),
        lambda one: shoal.MaxRows(one),
        lambda one: shoal.models.DBPG(l1=one, blocks=one, tolerance=one, passes=one),
        lambda one: shoal.Filters(threshold=one, seed=one),
        lambda one: Plan(epochs=one, patience=one, min_delta=one, seed=one),
    ],
)
def test_descriptions_are_equal_and_plain_whatever_their_numbers_are(make):
    usual = make(1)
    for kind in WHOLE:
        made = make(kind(1))
        assert (made, hash(made), repr(made)) == (usual, hash(usual), repr(usual))
        assert pickle.loads(pickle.dumps(made)) == usual
        if hasattr(made, "params"):
            assert json.loads(msgspec.json.encode(made.params())) == usual.params()


def test_settings_of_real_numbers_are_those_of_python():
    made = shoal.FTRL(alpha=np.float64(0.1), l1=np.float32(0.5))
    assert made == shoal.FTRL(alpha=0.1, l1=0.5)
    assert "np." not in repr(made)


def test_stores_tables_and_models_take_them(tmp_path):
    four = np.int64(4)
    with shoal.local(threads=np.int64(1), slots=np.int64(16), memory=np.int64(1 << 30)) as store:
        table = store.table("t", dim=four, seed=np.uint64(7), optimizer=shoal.SGD(np.float32(1)))
        table.push(np.arange(3, dtype=np.uint64), np.ones((3, 4), np.float32)).result()
        dense = store.dense("d", (np.int64(2), four), optimizer=shoal.SGD(lr=1.0))
        assert dense.pull().shape == (2, 4)
        store.save(tmp_path / "c")
        assert store.export(tmp_path / "e", version=np.int64(9)).version == 9
    with shoal.export.open(tmp_path / "e", threads=np.int64(1)) as export:
        assert export.version == 9
    X = np.eye(4, dtype=np.float32)
    with shoal.FactorizationMachine(four, seed=np.int64(1), class_weight={0: np.float32(1), 1: np.int64(2)}) as model:
        model.fit(
            X,
            [0, 1, 0, 1],
            epochs=np.int64(2),
            batch_size=np.int64(2),
            progress=np.float64(2.0),
            shuffle=np.int64(2),
        )
        model.save(tmp_path / "m")
    with shoal.load(tmp_path / "m") as loaded:
        assert loaded.tables[1].dim == 4


def test_the_settings_of_a_grid_are_plain():
    with shoal.models.LogisticRegressionGrid({"alpha": np.array([0.1, 0.2]), "l1": np.arange(2)}) as grid:
        assert json.loads(json.dumps(grid.settings))[3] == {"alpha": 0.2, "l1": 1}


def test_progress_estimates_and_sketches_take_them():
    assert Progressive(np.int64(10))._next == 10
    plan = shoal.tools.estimate(np.int64(10**9), dim=np.int32(4), servers=np.int64(2))
    assert plan == shoal.tools.estimate(10**9, dim=4, servers=2)
    json.dumps(msgspec.to_builtins(plan))


@pytest.mark.parametrize("value", [np.bool_(True), True, np.array([1, 2]), "4"])
def test_what_is_no_number_is_refused_as_before(value):
    with pytest.raises((TypeError, ValueError)):
        shoal.TimeToLive(value)


def fitted(**how):
    with shoal.LogisticRegression() as model:
        model.fit(np.eye(2), [0, 1], progress=False, **how)


def table(**how):
    with shoal.local() as store:
        store.table("t", **how)


def test_a_buffer_to_shuffle_in_may_be_larger_than_any_data():
    fitted(shuffle=10**30)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fitted(epochs="4"), "epochs is '4': pass a whole number"),
        (lambda: fitted(epochs=4.0), "epochs is 4.0: pass a whole number"),
        (lambda: fitted(epochs=True), "epochs is True: pass a whole number"),
        (lambda: fitted(batch_size=64.0), "batch_size is 64.0: pass a whole number, 1 or more"),
        (lambda: fitted(batch_size=True), "batch_size is True: pass a whole number, 1 or more"),
        (lambda: EarlyStopping("3"), "patience is '3': pass a whole number"),
        (lambda: fitted(shuffle=1.5), "shuffle is 1.5: pass True or False or a whole number"),
        (lambda: shoal.LogisticRegression(negative_rate="0.5"), "negative_rate is '0.5': pass a number"),
        (lambda: shoal.read_libsvm("x", batch_size=64.0), "batch_size is 64.0: pass a whole number"),
        (lambda: shoal.read_libsvm("x", reader_threads="2"), "reader_threads is '2': pass a whole number"),
        (lambda: table(dim=True), "dim is True: pass a whole number"),
        (lambda: table(dim=4.0), "dim is 4.0: pass a whole number"),
        (lambda: table(dim=2, dtype="float16", seed="1"), "seed is '1': pass a whole number"),
        (lambda: shoal.local(threads=True), "threads is True: pass a whole number"),
        (lambda: shoal.launch(servers="2").__enter__(), "servers is '2': pass a whole number, 1 or more"),
        (lambda: shoal.launch(servers=2, replicas=1.0).__enter__(), "replicas is 1.0: pass a whole number, 0 or more"),
        (lambda: shoal.models.DBPG(passes=1.5), "passes is 1.5: pass a whole number"),
        (lambda: shoal.models.DBPG(slack="0.1"), "slack is '0.1': pass a number or None"),
        (lambda: shoal.Filters(zeros="no"), "zeros is 'no': pass True or False"),
        (lambda: shoal.Filters(threshold=None), "threshold is None: pass a number"),
        (lambda: shoal.SSP("4"), "staleness is '4': pass a whole number"),
        (lambda: shoal.Cache(rows=1.5, staleness=1), "rows is 1.5: pass a whole number"),
        (lambda: shoal.Cache(rows=1, staleness=True), "staleness is True: pass a whole number"),
        (lambda: shoal.SGD(lr="fast"), "lr is 'fast': pass a number"),
        (lambda: shoal.SGD(lr=True), "lr is True: pass a number"),
        (lambda: shoal.Normal(0.1, seed=1.0), "seed is 1.0: pass a whole number"),
        (lambda: shoal.MaxRows(10.5), "rows is 10.5: pass a whole number"),
        (lambda: shoal.load(b"model"), "b'model' is not a path: pass a str or a Path"),
        (lambda: shoal.LogisticRegression().save(None), "None is not a path: pass a str or a Path"),
        (lambda: whole("ahead", "9" * 200, 1), "ahead is '" + "9" * 79 + ": pass a whole number, 1 or more"),
    ],
)
def test_a_parameter_of_another_type_is_named_with_its_value_and_what_to_pass(make, says):
    with pytest.raises(TypeError) as caught:
        make()
    assert says in str(caught.value)
    assert "interpreted as an integer" not in str(caught.value)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [("8GiB", 8 << 30), ("1.5m", 3 << 19), (np.int64(77), 77), (77, 77)])
def test_a_size_is_a_number_or_a_text(given, expected):
    assert memory_bytes(given) == expected


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "0", "many", None, 1 << 63])
def test_what_is_no_size_is_refused_with_the_remedy(given):
    with pytest.raises(ValueError, match="8GiB"):
        memory_bytes(given)


def test_memory_is_a_size_everywhere(tmp_path):
    with shoal.local(memory="64 MiB") as store:
        assert store.memory == 64 << 20
    assert shoal.Tiered(tmp_path, memory="64 MiB").memory_bytes == 64 << 20
    assert shoal.tools.estimate(10**9, memory="64GiB") == shoal.tools.estimate(10**9, memory=64 << 30)
    assert shoal.tools.estimate(10**9, tier="4GiB") == shoal.tools.estimate(10**9, tier=4 << 30)
    from shoal.cluster.launch.local_cluster import slot_memory

    assert slot_memory("64MiB", 1024) == 1 << 16  # of launch(), launch_workers() and the clusters of Ray
