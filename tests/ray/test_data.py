"""Datasets of Ray: the keys and the models of shoal's own readers, without copies, in bounded memory."""

from __future__ import annotations

import pickle
import re
import runpy
import sys
import threading

import numpy as np
import pytest

from paths import ROOT

pytest.importorskip("ray", reason="ray is an extra")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
csv = pytest.importorskip("pyarrow.csv")

import ray.data  # noqa: E402

import shoal  # noqa: E402
from oracle.text import bits, rows_of_batch  # noqa: E402
from ray_nodes import PAGE_BLOCKS, PATIENCE, page_blocks, page_names, run_page_block  # noqa: E402
from shoal.data.hashing import MISSING_TEXT  # noqa: E402
from shoal.ray.data import Hash, HashColumns  # noqa: E402

ROWS = 3000
ROLES = {"label": "click", "categorical": ["site", "ad"], "numeric": ["price"]}


def ads(rows=ROWS, seed=1):
    rng = np.random.default_rng(seed)
    site, ad = rng.integers(0, 40, rows), rng.integers(0, 9, rows)
    return pa.table(
        {
            "click": (rng.random(rows) < 1 / (1 + np.exp(-np.sin(site)))).astype(np.int64),
            "site": pa.array([None if s == 3 else f"site-{s}.com" for s in site]),
            "ad": ad,
            "price": pa.array(rng.random(rows), mask=rng.random(rows) < 0.1),
            "weight": rng.integers(0, 3, rows).astype(np.float64),
        }
    )


class Blocks:
    """A shard that is a list of tables; counts the blocks that were taken."""

    def __init__(self, *tables):
        self.tables = tables
        self.taken = threading.Semaphore(0)
        self.asked = 0

    def iter_batches(self, *, batch_size, batch_format, prefetch_batches):
        assert (batch_size, batch_format) == (None, "pyarrow")
        for table in self.tables:
            self.asked += 1
            self.taken.release()
            yield table


def rows(batches):
    return bits([row for batch in batches for row in rows_of_batch(batch)])


def address(array):
    return array.__array_interface__["data"][0]


def buffers_of(table):
    """The ranges of memory of a table."""
    columns = [chunk for column in table.columns for chunk in column.chunks]
    held = [buffer for chunk in columns for buffer in chunk.buffers() if buffer is not None]
    return [(buffer.address, buffer.address + buffer.size) for buffer in held]


def within(array, table):
    return any(begin <= address(array) and address(array) + array.nbytes <= end for begin, end in buffers_of(table))


# ---- keys ----


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("before", [False, True], ids=["hashed by the worker", "hashed before"])
@pytest.mark.parametrize(
    "more",
    [{}, {"weight": "weight"}, {"interactions": [("site", "ad")]}, {"positive": "1"}],
    ids=["plain", "weight", "interactions", "positive"],
)
def test_a_dataset_has_the_examples_of_the_same_parquet_file(tmp_path, before, more):
    pq.write_table(ads(), tmp_path / "ads.parquet")
    want = rows(shoal.read_parquet(tmp_path / "ads.parquet", batch_size=700, **ROLES, **more))
    hashed = Hash(**ROLES, **more)
    blocks = [ads().slice(begin, 1100) for begin in range(0, ROWS, 1100)]
    shard = Blocks(*(hashed(block) for block in blocks) if before else blocks)
    reader = hashed.read(shard, batch_size=700)
    assert rows(reader) == want
    assert rows(reader) == want  # a second pass
    assert [len(batch) for batch in reader] == [700] * 4 + [200]


def test_fields_are_those_of_the_reader(tmp_path):
    pq.write_table(ads(), tmp_path / "ads.parquet")
    want = [batch.fields for batch in shoal.read_parquet(tmp_path / "ads.parquet", **ROLES).with_fields()]
    hashed = Hash(**ROLES, with_fields=True)
    for shard in (Blocks(ads()), Blocks(hashed(ads()))):
        got = [batch.fields for batch in hashed.read(shard).with_fields()]
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))
    with pytest.raises(ValueError, match="pass with_fields=True"):
        list(Hash(**ROLES).read(Blocks(Hash(**ROLES)(ads()))).with_fields())


def test_columns_of_keys_are_the_rows_of_an_embedding():
    made = HashColumns(["site", "ad"])(ads())
    field = int(shoal.hash_strings(["site"])[0])
    texts = [MISSING_TEXT if text is None else text for text in ads()["site"].to_pylist()]
    np.testing.assert_array_equal(made["site"].to_numpy().view(np.uint64), shoal.hash_strings(texts, field))
    assert made.schema.names == ads().schema.names
    assert made["site"].type == made["ad"].type == pa.int64()
    assert made["price"].equals(ads()["price"])


@pytest.mark.parametrize("step", [Hash(label="click"), HashColumns(["site"])], ids=lambda step: type(step).__name__)
def test_steps_warn_once_of_ids_that_a_column_of_floats_has_rounded(step, caplog):
    table = pa.table({"click": [1, 0], "site": [2.0**53, 7.0]})
    for _ in range(2):
        step(table)
    (record,) = caplog.records
    assert record.getMessage().startswith("column 'site' holds double, such as 9007199254740992: ")


def test_a_dataset_without_labels_is_predicted_as_a_file_is(tmp_path):
    pq.write_table(ads().drop(["click"]), tmp_path / "new.parquet")
    hashed = Hash(**ROLES)
    with shoal.LogisticRegression() as model:
        model.fit(hashed.read(Blocks(ads())), progress=False)
        want = model.probabilities(shoal.read_parquet(tmp_path / "new.parquet", **ROLES))
        np.testing.assert_array_equal(model.probabilities(hashed.read(Blocks(ads().drop(["click"])))), want)
        np.testing.assert_array_equal(model.probabilities(hashed.read(Blocks(hashed(ads())))), want)


# ---- no copies ----


@pytest.mark.parametrize("size", [500, 1000])
def test_the_keys_of_a_hashed_block_are_the_arrays_of_its_batches(size):
    hashed = Hash(**ROLES, with_fields=True)
    block = hashed(ads(1000))
    batches = list(hashed.read(Blocks(block), batch_size=size).with_fields())
    assert len(batches) == 1000 // size
    for batch in batches:
        for array in (batch.keys, batch.values, batch.fields, batch.labels):
            assert within(array, block)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
def test_a_block_is_hashed_where_its_texts_are(kind):
    texts = pa.table({"y": np.zeros(10_000, np.int64), "text": pa.array(["x" * 2000] * 10_000, kind)})
    pool = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(pool)
    pa.set_memory_pool(watched)
    try:
        made = HashColumns(["text"])(texts)
        batches = list(Hash(label="y").read(Blocks(texts)))
    finally:
        pa.set_memory_pool(pool)
    assert made["text"].type == pa.int64()
    assert sum(map(len, batches)) == 10_000
    assert watched.max_memory() < texts.nbytes / 50
    assert within(made["y"].chunk(0).to_numpy(), texts)  # other columns stay as they are


def test_read_only_arrays_are_learned_from():
    hashed = Hash(**ROLES)
    sink = pa.BufferOutputStream()
    table = hashed(ads())
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    block = pa.ipc.open_stream(sink.getvalue()).read_all()
    (batch,) = hashed.read(Blocks(block))
    assert not batch.keys.flags.writeable
    with shoal.LogisticRegression() as one, shoal.LogisticRegression() as two:
        one.fit(hashed.read(Blocks(block)), progress=False)
        two.fit(hashed.read(Blocks(ads())), progress=False)
        np.testing.assert_array_equal(one.probabilities([batch]), two.probabilities([batch]))


# ---- bounds ----


def test_a_slow_consumer_holds_back_the_blocks():
    shard = Blocks(*[ads(100)] * 200)
    batches = iter(Hash(**ROLES).read(shard, batch_size=100))
    next(batches)
    for _ in range(4):  # one in hand, two groups that wait, one for which there is no room
        assert shard.taken.acquire(timeout=60)
    assert shard.asked <= 5
    for _ in range(50):
        next(batches)
    assert shard.asked <= 55
    batches.close()


def test_a_pass_can_be_left_and_resumed():
    hashed = Hash(**ROLES)
    reader = hashed.read(Blocks(*[ads(1000, seed) for seed in range(3)]), batch_size=300)
    want = rows(reader)
    seen = []
    for batch in reader:
        seen.append(batch)
        if len(seen) == 4:
            break
    position = reader.position()
    assert rows([*seen, *reader.resume(position)]) == want


# ---- errors ----


def test_what_cannot_be_read_is_an_error_that_names_it():
    hashed = Hash(**ROLES)
    with pytest.raises(TypeError, match="pass batch_format='pyarrow' to map_batches"):
        hashed({"click": np.zeros(3)})
    with pytest.raises(TypeError, match="pass a list of names"):
        HashColumns("site")
    with pytest.raises(ValueError, match="column 'sit' is not there: the columns are click, site"):
        HashColumns(["sit"])(ads())
    with pytest.raises(ValueError, match="row 1 of a block, column 'click': the label is 7"):
        hashed(ads(3).set_column(0, "click", pa.array([0, 7, 1])))
    with pytest.raises(ValueError, match="a dataset of Ray, row 4, column 'click': the label is 7"):
        list(hashed.read(Blocks(ads(3), ads(3).set_column(0, "click", pa.array([0, 7, 1])))))
    with pytest.raises(ValueError, match="column 'ad' is not there"):
        list(hashed.read(Blocks(ads(3).drop(["ad"]))))
    with pytest.raises(TypeError, match=r"shard is a Table: pass a ray\.data\.Dataset"):
        hashed.read(ads())
    with pytest.raises(ValueError, match="prefetch_batches is -1"):
        hashed.read(Blocks(), prefetch_batches=-1)
    with pytest.raises(ValueError, match="Ray divides a dataset"):
        hashed.read(Blocks()).split(0, 2)
    with pytest.raises(ValueError, match="interaction belongs to no field"):
        Hash(label="y", interactions=[("a", "b")], categorical=["a", "b"], with_fields=True)


def test_steps_can_be_pickled():
    hashed = pickle.loads(pickle.dumps(Hash(**ROLES, lists={"seen": "ad"}, vectors=["dwell"])))
    assert hashed == Hash(**ROLES, lists={"seen": "ad"}, vectors=["dwell"])


def test_vectors_are_hashed_before_or_there():
    table = pa.table({"click": [1, 0], "dwell": pa.array([[0.5, None], []], pa.list_(pa.float32())), "ad": ["a", "b"]})
    roles = {"label": "click", "vectors": ["dwell"]}
    (want,) = shoal.read_arrow(table, **roles).with_fields()
    hashed = Hash(**roles, with_fields=True)
    for blocks in (Blocks(table), Blocks(hashed(table))):
        (batch,) = hashed.read(blocks).with_fields()
        for name in ("indptr", "keys", "values", "fields"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(want, name))
    with pytest.raises(ValueError, match="vectors has 'keys', which is the name of a column of hashed blocks"):
        Hash(label="y", vectors=["keys"])


def test_a_dataset_of_no_rows_has_no_batches():
    hashed = Hash(**ROLES)
    empty = ads().slice(0, 0)
    assert list(hashed.read(Blocks(empty, hashed(empty)))) == []
    assert hashed(empty).schema == hashed(ads()).schema
    assert list(hashed.read(Blocks())) == []


# ---- with Ray ----

on_ray = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::Warning:ray\..*")]


def marked(test):
    for mark in on_ray:
        test = mark(test)
    return test


@pytest.fixture
def ordered(ray_cluster):
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    yield
    context.execution_options.preserve_order = False


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        table = ads(800, seed=number)
        pq.write_table(table, tmp_path / f"ads_{number}.parquet", row_group_size=300)
        csv.write_csv(table, tmp_path / f"ads_{number}.csv")
    return tmp_path


def learned(reader):
    with shoal.LogisticRegression() as model:
        model.fit(reader, progress=False)
        return {name: table.digest() for name, table in model.store.tables.items()}


@marked
@pytest.mark.parametrize(("form", "before"), [("parquet", True), ("csv", False)])
def test_a_model_learns_from_ray_data_what_it_learns_from_the_files(ordered, folder, form, before):
    read = {"parquet": shoal.read_parquet, "csv": shoal.read_csv}[form]
    want = learned(read(folder / f"ads_*.{form}", **ROLES, batch_size=512))
    hashed = Hash(**ROLES)
    paths = [str(folder / f"ads_{number}.{form}") for number in range(4)]
    if form == "csv":
        dataset = ray.data.read_csv(paths, convert_options=csv.ConvertOptions(strings_can_be_null=True))
    else:
        dataset = ray.data.read_parquet(paths)
    if before:
        dataset = dataset.map_batches(hashed, batch_format="pyarrow", zero_copy_batch=True)
    assert learned(hashed.read(dataset, batch_size=512)) == want


@marked
def test_tensors_of_keys_are_embedded(ordered):
    torch = pytest.importorskip("torch", reason="torch is an extra")
    table = ads(500)
    dataset = ray.data.from_arrow(table).map_batches(HashColumns(["site", "ad"]), batch_format="pyarrow")
    with shoal.local() as store:
        site = shoal.torch.Embedding(store.table("site", dim=2, optimizer=shoal.SGD(lr=1.0)))
        for batch in dataset.select_columns(["site", "ad"]).iter_torch_batches(batch_size=256):
            assert batch["site"].dtype == torch.int64
            site(batch["site"]).sum().backward()
        keys = HashColumns(["site"])(table)["site"].to_numpy()
        assert len(store.tables["site"]) == len(np.unique(keys))


@marked
def test_batches_of_a_dataset_are_views_of_rays_shared_memory(ordered):
    hashed = Hash(**ROLES)
    dataset = ray.data.from_arrow(ads(20_000)).map_batches(
        hashed, batch_format="pyarrow", batch_size=None, zero_copy_batch=True
    )
    blocks = []

    class Recorded:
        def iter_batches(self, **how):
            for block in dataset.iter_batches(**how):
                blocks.append(block)
                yield block

    batches = list(hashed.read(Recorded(), batch_size=512))  # which divides its chunks
    assert sum(map(len, batches)) == 20_000
    for batch in batches:
        for array in (batch.keys, batch.values, batch.labels):
            assert any(within(array, block) for block in blocks)
            assert not array.flags.writeable


@marked
def test_tasks_of_ray_wait_for_a_slow_worker(ordered, tmp_path):
    blocks, each = 60, 2**20  # bytes

    def make(rows):
        (number,) = rows["id"].to_pylist()
        (tmp_path / str(number)).touch()
        return pa.table({"click": [0], "site": ["x" * each]})

    context = ray.data.DataContext.get_current()
    before = context.execution_options.resource_limits
    context.execution_options.resource_limits = before.copy(object_store_memory=8 * each)
    try:
        dataset = ray.data.range(blocks, override_num_blocks=blocks).map_batches(make, batch_format="pyarrow")
        ahead = []
        for number, _ in enumerate(Hash(label="click", categorical=["site"]).read(dataset, batch_size=1)):
            ahead.append(len(list(tmp_path.iterdir())) - number)
    finally:
        context.execution_options.resource_limits = before
    assert len(ahead) == blocks
    assert max(ahead) < blocks / 2


@marked
def test_an_error_in_a_block_reaches_the_driver(ordered):
    dataset = ray.data.from_arrow(ads(3).set_column(0, "click", pa.array([0, 7, 1])))
    step = dataset.map_batches(Hash(**ROLES), batch_format="pyarrow")
    with pytest.raises(Exception, match="row 1 of a block, column 'click': the label is 7"):
        list(Hash(**ROLES).read(step))


@pytest.mark.long
@marked
def test_the_example_is_that_of_the_documentation_and_runs(ray_cluster, tmp_path, monkeypatch, capsys):
    root = ROOT
    example = re.search(r"```python\n(.*?)```", (root / "docs" / "ray.md").read_text(), re.DOTALL)[1]
    assert len(example.splitlines()) <= 20
    script = root / "examples" / "ray_lr.py"
    lines = {line.partition("  #")[0].strip().replace(" -> None", "") for line in script.read_text().splitlines()}
    shown = example.replace('["ads_0.parquet", "ads_1.parquet"]', "files").replace("import shoal.ray", "import shoal")
    assert {line.partition("  #")[0].strip() for line in shown.splitlines()} <= lines
    monkeypatch.setattr(sys, "argv", [str(script), "--output", str(tmp_path / "runs")])
    runpy.run_path(str(script), run_name="__main__")
    auc, directory = re.search(r"AUC (0\.\d+); (.*)", capsys.readouterr().out).groups()
    assert float(auc) > 0.6
    with shoal.local() as store:
        store.load(directory)
        assert sum(len(table) for table in store.tables.values()) > 200


@marked
def test_the_blocks_of_the_documentation_about_clusters_and_data_run(ordered, folder):
    """Those about Ray Serve and Ray Tune run in the tests of these."""
    pytest.importorskip("torch", reason="torch is an extra")
    assert [mark for text in page_blocks() for mark in PAGE_BLOCKS if mark in text] == list(PAGE_BLOCKS)
    for number in range(2):
        table = pq.read_table(folder / f"ads_{number}.parquet").rename_columns({"ad": "user"})
        pq.write_table(table, folder / f"ads_{number}.parquet")
    names = page_names()
    run_page_block("shoal.ray.start(", names, {"servers=2": f"servers=2, timeout={PATIENCE}"})
    assert names["table"].dim == 4
    run_page_block("prepared =", names, {'"ads_0.parquet"': repr(str(folder / "ads_0.parquet"))})
    roles = {"label": "click", "categorical": ["site", "user"], "numeric": ["price"]}
    want = learned(shoal.read_parquet(folder / "ads_0.parquet", **roles, batch_size=1024))
    assert learned(names["batches"]) == want
    run_page_block("iter_torch_batches", names, {})
    assert names["vectors"].shape == (800 % 256, 4)
