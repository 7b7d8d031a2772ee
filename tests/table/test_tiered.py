"""Tables larger than memory, with memory for a part of the rows: every call against a table in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from forks import in_child
from oracle.hashing import LAST_KEY, keys_of
from shoal.table.spec import TableSpec

ADAGRAD = shoal.Adagrad(lr=0.1)
MEMORY = 200_000
KEYS = np.concatenate(
    [
        np.array([0, 1, LAST_KEY, LAST_KEY - 1, 2**63], np.uint64),
        keys_of([0, 1, 2**64 - 1, 2**63]),
        np.arange(10, 6000, dtype=np.uint64),
    ]
)


def pair(path, *, memory=MEMORY, slots=16, **description):
    """Make two stores with a table of the same description: in memory, and tiered."""
    description = {"dim": 8, "optimizer": ADAGRAD, "init": shoal.Normal(0.1, seed=3), **description}
    plain, tiered = shoal.local(slots=slots, threads=2), shoal.local(slots=slots, threads=2)
    plain.table("t", **description)
    tiered.table("t", **description, storage=shoal.Tiered(path, memory=memory))
    return plain, tiered


def train(stores, rng, steps=30, most=300):
    """Pull and push random batches, with duplicates, in both stores."""
    for _ in range(steps):
        keys = KEYS[rng.integers(0, len(KEYS), rng.integers(0, most))]
        grads = None
        for store in stores:
            table = store.tables["t"]
            batch = table.key_batch(keys)
            rows = table.pull_unique(batch)
            grads = rng.normal(size=rows.shape).astype(np.float32) if grads is None else grads
            table.push_unique(batch, grads).result()
            store.tick()


def assert_equal(stores):
    plain, tiered = (store.tables["t"] for store in stores)
    assert plain.digest() == tiered.digest()
    assert len(plain) == len(tiered)
    assert plain.shard.step == tiered.shard.step
    assert tiered.shard.verify() == ""


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"dim": 1, "optimizer": shoal.FTRL(l1=0.1), "init": shoal.Zeros(), "memory": 70_000},
        {"dim": 4, "optimizer": shoal.Adam(), "dtype": "bfloat16", "memory": 100_000},
        {"admit": shoal.AfterCount(2), "expire": shoal.TimeToLive(20), "memory": 120_000},
    ],
    ids=["adagrad", "ftrl", "bfloat16", "lifecycle"],
)
def test_random_training_gives_the_bits_of_a_table_in_memory(tmp_path, description):
    stores = pair(tmp_path, **description)
    plain, tiered = (store.tables["t"] for store in stores)
    rng = np.random.default_rng(1)
    for _ in range(3):
        train(stores, rng, 20)
        some = KEYS[rng.integers(0, len(KEYS), 200)]
        assert plain.erase(some[:20]) == tiered.erase(some[:20])
        np.testing.assert_array_equal(plain.contains(some), tiered.contains(some))
        assert plain.state(some).keys() == tiered.state(some).keys()
        for name, values in plain.state(some).items():
            np.testing.assert_array_equal(values, tiered.state(some)[name])
        rows = rng.normal(size=(200, plain.dim)).astype(np.float32)
        plain.assign(np.unique(some), rows[: len(np.unique(some))])
        tiered.assign(np.unique(some), rows[: len(np.unique(some))])
        assert_equal(stores)
    tier = tiered.stats().tier
    assert tier.misses > 0
    assert tier.merges > 0
    assert plain.stats().tier is None
    assert tiered.stats().rows == plain.stats().rows


def test_integers_and_functions_of_all_rows(tmp_path):
    stores = pair(tmp_path, dim=2, dtype="int64", optimizer=shoal.Add(), init=shoal.Zeros(), memory=100_000)
    plain, tiered = (store.tables["t"] for store in stores)
    for first in range(0, 6000, 250):
        for table in (plain, tiered):
            keys = KEYS[first : first + 250]
            table.push(keys, np.full((len(keys), 2), first, np.int64)).result()
    assert tiered.stats().tier.misses == 0
    np.testing.assert_array_equal(plain.pull(KEYS[:250]), tiered.pull(KEYS[:250]))
    assert_equal(stores)


def test_reductions_and_functions_of_users(tmp_path):
    stores = pair(tmp_path)
    plain, tiered = (store.tables["t"] for store in stores)
    train(stores, np.random.default_rng(2), 40)
    np.testing.assert_array_equal(plain.sum(), tiered.sum())
    assert plain.norm() == tiered.norm()
    assert plain.count(above=0.3) == tiered.count(above=0.3)
    for one, other in zip(plain.topk(10), tiered.topk(10), strict=True):
        np.testing.assert_array_equal(one, other)

    def totals(keys, weights, state):
        return np.array([len(keys), weights.sum(dtype=np.float64)])

    def tilt(keys, weights, state, *, by):
        weights[:, 0] += by

    def fail(keys, weights, state):
        raise RuntimeError("on purpose")

    for keys in (None, KEYS[::7]):
        np.testing.assert_array_equal(plain.reduce(totals, np.add, keys), tiered.reduce(totals, np.add, keys))
        assert (
            plain.apply(tilt, keys, params={"by": 0.5}).result()
            == tiered.apply(tilt, keys, params={"by": 0.5}).result()
        )
        assert_equal(stores)
    with pytest.raises(shoal.errors.UserCodeError, match="on purpose"):
        tiered.apply(fail).result()
    assert_equal(stores)
    assert plain.decay(0.5) == tiered.decay(0.5)
    assert_equal(stores)
    assert plain.shrink(0.01) == tiered.shrink(0.01)
    assert_equal(stores)
    assert tiered.stats().tier.memory_bytes <= MEMORY
    np.testing.assert_array_equal(
        np.concatenate([keys for keys, _ in plain.items()]), np.concatenate([keys for keys, _ in tiered.items()])
    )


def test_sweeps_see_the_rows_on_disk(tmp_path):
    stores = pair(tmp_path, expire=(shoal.TimeToLive(10), shoal.DecayedScore(decay=0.9, floor=0.2)))
    train(stores, np.random.default_rng(3), 40)
    forecasts = [store.tables["t"].sweep(dry_run=True) for store in stores]
    assert repr(forecasts[0].dropped) == repr(forecasts[1].dropped)
    assert repr(forecasts[0].thresholds) == repr(forecasts[1].thresholds)
    swept = [store.sweep() for store in stores]
    assert swept[0].rows_dropped == swept[1].rows_dropped > 0
    assert_equal(stores)


def test_checkpoints_go_both_ways_and_deltas_follow(tmp_path):
    stores = pair(tmp_path / "tier")
    rng = np.random.default_rng(4)
    train(stores, rng, 40)
    stores[1].save(tmp_path / "full", track=True)
    digest = stores[0].tables["t"].digest()
    train(stores, rng, 2)
    stores[1].save(tmp_path / "delta", since=tmp_path / "full", track=True)
    now = stores[0].tables["t"].digest()
    assert digest != now
    for where, expected in ((tmp_path / "full", digest), (tmp_path / "delta", now)):
        with shoal.local(slots=4) as other:
            other.load(where)
            assert other.tables["t"].digest() == expected
        with shoal.local(slots=64) as other:
            description = {"dim": 8, "optimizer": ADAGRAD, "init": shoal.Normal(0.1, seed=3)}
            table = other.table("t", **description, storage=shoal.Tiered(tmp_path / "tier", memory=500_000))
            other.load(where)
            assert table.digest() == expected
            assert table.stats().tier.memory_bytes <= 500_000
    # The other way, over rows that are there.
    stores[0].save(tmp_path / "plain")
    train(stores[1:], rng, 5)
    stores[1].load(tmp_path / "plain")
    assert_equal(stores)
    train(stores, rng, 10)
    assert_equal(stores)


def test_exports_have_all_rows(tmp_path):
    stores = pair(tmp_path / "tier")
    train(stores, np.random.default_rng(5), 40)
    for name, store in zip(("plain", "tiered"), stores, strict=True):
        store.export(tmp_path / name)
    with shoal.export.open(tmp_path / "plain") as one, shoal.export.open(tmp_path / "tiered") as other:
        assert len(one.table("t")) == len(other.table("t"))
        np.testing.assert_array_equal(one.table("t").pull(KEYS), other.table("t").pull(KEYS))


def test_a_model_trains_on_a_tiered_table(tmp_path):
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 2, 2000).astype(np.float32)
    keys = rng.integers(0, 20_000, (2000, 10)).astype(np.uint64)
    digests = []
    for storage in (None, shoal.Tiered(tmp_path, memory="256KiB")):
        with shoal.local(slots=16) as store:
            table = store.table("lr", optimizer=shoal.FTRL(), storage=storage)
            for first in range(0, 2000, 200):
                some = keys[first : first + 200].ravel()
                weights = table.pull(some).reshape(200, 10)
                error = 1 / (1 + np.exp(-weights.sum(1))) - labels[first : first + 200]
                table.push(some, np.repeat(error, 10).astype(np.float32)).result()
            digests.append(table.digest())
    assert digests[0] == digests[1]


def test_prefetched_rows_are_read_once_and_change_no_bit(tmp_path):
    stores = pair(tmp_path)
    plain, tiered = (store.tables["t"] for store in stores)
    train(stores, np.random.default_rng(11), 40)
    assert tiered.stats().tier.prefetched == 0
    rng = np.random.default_rng(12)
    before = tiered.stats().tier
    batches = [KEYS[rng.integers(0, len(KEYS), 200)] for _ in range(31)]
    for i, keys in enumerate(batches[:-1]):
        for table in (plain, tiered):
            table.prefetch(batches[i + 1] if i % 2 else table.key_batch(batches[i + 1]))
            rows = table.pull(keys)
            table.push(keys, np.ones_like(rows)).result()
    assert_equal(stores)
    tier = tiered.stats().tier
    missed = tier.misses - before.misses
    assert missed > 1000
    assert tier.prefetched > 0.9 * missed  # not those of the first batch, and those evicted meanwhile
    assert tier.reads - before.reads < 1.1 * missed
    stores[1].close()
    with pytest.raises(shoal.errors.ClosedError):
        tiered.prefetch(KEYS)


def test_an_error_of_a_prefetch_is_raised_by_the_call_that_needs_the_rows(tmp_path):
    stores = pair(tmp_path)
    tiered = stores[1].tables["t"]
    train(stores, np.random.default_rng(13), 40)
    settle(tiered)
    file = tier_file(tmp_path)
    content = os.pread(file, 1 << 24, 0)
    os.pwrite(file, bytes(len(content)), 0)
    tiered.prefetch(KEYS[::9])
    with pytest.raises(shoal.CorruptionError, match="is damaged"):
        tiered.pull(KEYS[::9])
    os.pwrite(file, content, 0)
    os.close(file)
    np.testing.assert_array_equal(tiered.pull(KEYS[::9]), stores[0].tables["t"].pull(KEYS[::9]))
    assert_equal(stores)


@pytest.mark.parametrize("threads", [1, 2])
def test_fits_read_ahead(tmp_path, threads):
    rng = np.random.default_rng(14)
    keys = rng.integers(0, 20_000, 40_000).astype(np.uint64)
    batches = [
        shoal.Batch(
            rng.integers(0, 2, 200).astype(np.float32), np.arange(0, 2001, 10), keys[first : first + 2000], None, None
        )
        for first in range(0, 40_000, 2000)
    ]
    digests = []
    for storage in (None, shoal.Tiered(tmp_path, memory="384KiB")):
        with shoal.local(slots=16, threads=threads) as store:
            optimizer = shoal.FTRL()
            table = store.table("lr", optimizer=optimizer, storage=storage)
            model = shoal.LogisticRegression(optimizer=optimizer, store=store)
            model.fit(batches, epochs=2, progress=False)
            digests.append(table.digest())
            if storage is not None:
                tier = table.stats().tier
                assert tier.prefetched > 0.8 * tier.misses > 0
    assert digests[0] == digests[1]


def test_what_cannot_be_tiered_is_refused(tmp_path):
    storage = shoal.Tiered(tmp_path, memory="1MiB")
    with shoal.local(memory=10**8) as store, pytest.raises(ValueError, match="in a store with a memory budget"):
        store.table("t", storage=storage)
    with shoal.local(slots=1024) as store:
        with pytest.raises(ValueError, match="needs at least 4194304 bytes of memory for 1024 slots, got 1048576"):
            store.table("t", storage=storage)
        assert not store.tables
    with shoal.local(slots=16) as store:
        with pytest.raises(ValueError, match="has no MaxRows rule"):
            store.table("t", storage=storage, expire=shoal.MaxRows(1000))
        store.table("t", dim=2, storage=storage)
        assert store.table("t", dim=2) is store.table("t", dim=2, storage=storage)
        with pytest.raises(ValueError, match="exists with storage"):
            store.table("t", dim=2, storage=shoal.Tiered(tmp_path, memory="2MiB"))
        store.table("u", dim=2)
        with pytest.raises(ValueError, match=r"storage None instead of .*: make it with its storage first"):
            store.table("u", dim=2, storage=storage)
        (tmp_path / "file").touch()
        with pytest.raises(shoal.errors.StorageError, match=r"the tier of a table cannot be in .*file: .*File exists"):
            store.table("file", dim=4, storage=shoal.Tiered(tmp_path / "file", memory="8MiB"))
        with pytest.raises(TypeError, match="path must be that of a directory, got 5"):
            shoal.Tiered(5, memory="8MiB")  # type: ignore[arg-type]
        with pytest.raises(shoal.errors.StorageError, match="cannot be created"):
            store.table("v", storage=shoal.Tiered("/proc", memory="1MiB"))
        with pytest.raises(TypeError, match=r"must be a shoal.Tiered, got '/data': pass shoal.Tiered\('/data', memory"):
            store.table("v", storage="/data")
    for memory in ("8 bytes", 0, True, 1.5):
        with pytest.raises(ValueError, match="8GiB"):
            shoal.Tiered(tmp_path, memory=memory)


def test_a_batch_that_does_not_fit_changes_nothing(tmp_path):
    stores = pair(tmp_path)
    train(stores, np.random.default_rng(7), 10)
    keys = np.arange(10_000, dtype=np.uint64)
    with pytest.raises(shoal.MemoryBudgetExceededError, match="10000 different keys does not fit in the 200000 bytes"):
        stores[1].tables["t"].push(keys, np.ones((10_000, 8), np.float32)).result()
    assert_equal(stores)
    train(stores, np.random.default_rng(8), 10)
    assert_equal(stores)


def test_the_step_of_an_optimizer_may_not_use_a_tiered_table(tmp_path):
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(lr=1.0), storage=shoal.Tiered(tmp_path, memory="1MiB"))
        keys = np.arange(10, dtype=np.uint64)
        table.push(keys, np.ones((10, 2), np.float32)).result()

        def ask(keys, weights, state):
            return table.pull(keys).sum()

        with pytest.raises(shoal.errors.UserCodeError, match="may not use a tiered table"):
            table.reduce(ask, np.add)


def settle(table: shoal.Table) -> None:
    """Wait until the tier has merged what it merges between calls."""
    deadline = time.monotonic() + 30
    merges = -1
    while merges != (merges := table.stats().tier.merges):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def tier_file(path: Path) -> int | None:
    """Open the only tier's file of this process, which has no name."""
    for fd in os.listdir("/proc/self/fd"):
        name = Path("/proc/self/fd", fd)
        if name.is_symlink() and "(deleted)" in (target := os.readlink(name)) and str(path) in target:
            return os.open(name, os.O_RDWR)
    return None


def test_damage_is_named_and_disk_space_is_given_back(tmp_path):
    stores = pair(tmp_path)
    train(stores, np.random.default_rng(9), 40)
    assert list(tmp_path.iterdir()) == []
    settle(stores[1].tables["t"])
    file = tier_file(tmp_path)
    assert 0 < os.fstat(file).st_size <= stores[1].tables["t"].stats().tier.disk_bytes
    before = os.pread(file, 64, 8192)
    os.pwrite(file, bytes(64), 8192)
    with pytest.raises(shoal.CorruptionError, match=r"damaged: slot \d+, page \d+ of \d+, byte 8192 .*checkpoint"):
        stores[1].tables["t"].digest()
    os.pwrite(file, before, 8192)
    assert_equal(stores)
    os.ftruncate(file, 4096)
    with pytest.raises(shoal.errors.StorageError, match="was truncated"):
        stores[1].tables["t"].digest()
    os.close(file)
    stores[1].close()
    assert tier_file(tmp_path) is None


def test_the_file_of_a_tier_has_few_extents(tmp_path):
    stores = pair(tmp_path)
    train(stores, np.random.default_rng(9), 40)
    file = tier_file(tmp_path)
    size = os.fstat(file).st_size
    assert size % (1 << 20) == 0, "the file grows by a MiB, which is written in one piece"
    position, holes = 0, 0
    while position < size:
        position = os.lseek(file, position, os.SEEK_HOLE)
        holes += position < size
        position = size if position >= size else os.lseek(file, position, os.SEEK_DATA)
    os.close(file)
    assert holes == 0


def test_a_forked_child_leaves_the_rows_of_its_parent(tmp_path):
    stores = pair(tmp_path)
    train(stores, np.random.default_rng(10), 40)
    tiered = stores[1]

    def work():
        with pytest.raises(shoal.errors.WrongProcessError):
            tiered.tables["t"].pull(KEYS[:10])
        tiered.close()
        return "closed"

    assert in_child(work) == "closed"
    assert_equal(stores)


FULL_DISK = """
import resource, sys
import numpy as np
import shoal
store = shoal.local(slots=16)
table = store.table("t", dim=8, optimizer=shoal.Adagrad(lr=0.1), storage=shoal.Tiered(sys.argv[1], memory=200_000))
plain = shoal.local(slots=16).table("t", dim=8, optimizer=shoal.Adagrad(lr=0.1))
rng = np.random.default_rng(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, resource.RLIM_INFINITY))
failed = 0
for first in range(0, 40_000, 200):
    keys = np.arange(first, first + 200, dtype=np.uint64)
    grads = rng.normal(size=(200, 8)).astype(np.float32)
    try:
        table.push(keys, grads).result()
    except shoal.errors.StorageError as error:
        assert "cannot write" in str(error) and sys.argv[1] in str(error) and "no row is lost" in str(error), error
        failed += 1
        if failed == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        table.push(keys, grads).result() if failed == 2 else None
        if failed != 2:
            continue
    plain.push(keys, grads).result()
assert failed == 2, failed
assert table.digest() == plain.digest()
assert table.shard.verify() == ""
print("done")
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "done\n", run.stderr


KILLED = """
import sys
import numpy as np
import shoal
store = shoal.local(slots=16)
table = store.table("t", dim=8, optimizer=shoal.Adagrad(lr=0.1), storage=shoal.Tiered(sys.argv[1], memory=200_000))
keys = np.arange(3000, dtype=np.uint64)
for first in range(0, 3000, 200):
    table.push(keys[first : first + 200], np.ones((200, 8), np.float32)[: len(keys[first : first + 200])]).result()
store.save(sys.argv[2])
print(table.digest(), flush=True)
while True:
    some = np.random.default_rng().integers(0, 10**6, 500).astype(np.uint64)
    table.push(some, np.ones((500, 8), np.float32)).result()
"""


@pytest.mark.slow
def test_after_a_kill_nothing_is_left_but_the_checkpoint(tmp_path):
    (tmp_path / "tier").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "tier"), str(tmp_path / "saved")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        digest = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert list((tmp_path / "tier").iterdir()) == []
    with shoal.local(slots=16) as store:
        table = store.table("t", dim=8, optimizer=ADAGRAD, storage=shoal.Tiered(tmp_path / "tier", memory=200_000))
        store.load(tmp_path / "saved")
        assert str(table.digest()) == digest


def test_a_cluster_refuses_a_storage(tmp_path):
    refuse = shoal.Store._make_tiered
    spec = TableSpec(name="t", dim=1, optimizer=shoal.FTRL(), init=shoal.Zeros(), dtype="float32", seed=0)
    with pytest.raises(
        ValueError, match=r"a storage is that of a table of shoal.local\(\); start the servers .* with --tier"
    ):
        refuse(None, spec, shoal.Tiered(tmp_path, memory="1GiB"))
