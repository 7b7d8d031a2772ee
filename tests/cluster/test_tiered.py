"""Servers whose rows are on disk as well, against a cluster and a store in memory."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.cluster.launch.local_cluster import running
from shoal.table.tiered import parse_tier

TIMEOUT = 120.0
TABLES = {
    "wide": {"dim": 16, "optimizer": shoal.Adagrad(lr=0.1), "init": shoal.Normal(0.1, seed=3)},
    "narrow": {
        "dim": 1,
        "optimizer": shoal.FTRL(l1=0.1),
        "admit": shoal.AfterCount(2),
        "expire": shoal.TimeToLive(30),
    },
    "bounded": {"dim": 4, "optimizer": shoal.SGD(lr=0.1), "expire": shoal.MaxRows(2000)},
}


def tables_of(store):
    return {name: store.table(name, **description) for name, description in TABLES.items()}


def train(store, seed, steps=40, most=400):
    """Push random batches to all tables, a step at a time."""
    rng = np.random.default_rng(seed)
    tables = tables_of(store)
    for _ in range(steps):
        for table in tables.values():
            keys = rng.integers(0, 8000, rng.integers(1, most)).astype(np.uint64)
            rows = table.pull(keys)
            table.push(keys, (0.1 * rows + rng.normal(size=rows.shape)).astype(np.float32))
        store.tick()
    return tables


def digests(store):
    return {name: (table.digest(), len(table)) for name, table in tables_of(store).items()}


def tier_bytes(path: Path) -> int:
    """Add up the files of tiers below a path that processes have open: they have no names."""
    found = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for fd in (process / "fd").iterdir():
                target = os.readlink(fd)
                if target.startswith(str(path)) and "(deleted)" in target:
                    found += os.stat(fd).st_size
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for files as Linux has them")
def test_tables_of_a_cluster_have_the_bits_of_tables_in_memory(tmp_path):
    (tmp_path / "tier" / "server-0").mkdir(parents=True)
    left = tmp_path / "tier" / "server-0" / "shoal-tier-abcdef"
    left.touch()
    with shoal.local(slots=16) as local:
        train(local, 1)
        expected = digests(local)
        local.save(tmp_path / "local")
        tier = shoal.Tiered(tmp_path / "tier", memory="192KiB")
        with shoal.launch(servers=2, slots=16, tier=tier, timeout=TIMEOUT, storage_roots=[tmp_path]) as store:
            assert not left.exists()
            tables = train(store, 1)
            assert digests(store) == expected
            assert tier_bytes(tmp_path / "tier") > 500_000
            store.save(tmp_path / "cluster", track=True)
            for one in (local, store):
                train(one, 2, 10)
                keys = np.arange(0, 8000, 3, dtype=np.uint64)
                one.tables["wide"].erase(keys)
                one.tables["wide"].assign(keys[:100], np.full((100, 16), 0.25, np.float32))
                one.sweep()
                one.tick()  # under BSP the sweep is executed with the step
            assert digests(store) == digests(local)
            np.testing.assert_array_equal(tables["wide"].sum(), local.tables["wide"].sum())
            assert tables["wide"].topk(5)[0].tolist() == local.tables["wide"].topk(5)[0].tolist()
            store.save(tmp_path / "delta", since=tmp_path / "cluster")
            later = digests(local)
            store.load(tmp_path / "local")
            assert digests(store) == expected
        assert tier_bytes(tmp_path / "tier") == 0
        with shoal.local(slots=4) as other:
            other.load(tmp_path / "delta")
            assert digests(other) == later


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for files as Linux has them")
def test_a_copy_takes_over_from_a_killed_server_with_a_tier_of_its_own(tmp_path):
    with shoal.local(slots=16) as local:
        train(local, 1)
        train(local, 2)
        expected = digests(local)
    tier = shoal.Tiered(tmp_path / "tier", memory="192KiB")
    with (
        running(2, slots=16, tier=tier, replicas=1, timeout=TIMEOUT) as cluster,
        shoal.connect(cluster.address, timeout=TIMEOUT) as store,
    ):
        train(store, 1)
        cluster.servers[0].signal(signal.SIGKILL)
        train(store, 2)
        assert digests(store) == expected
        assert tier_bytes(tmp_path / "tier") > 500_000


@pytest.mark.slow
@pytest.mark.parametrize("filters", [None, shoal.Filters(key_caching=True)])
def test_workers_tell_servers_the_keys_of_their_next_step(tmp_path, filters):
    tier = shoal.Tiered(tmp_path, memory="256KiB")
    keys = np.arange(8000, dtype=np.uint64)
    rng = np.random.default_rng(3)
    batches = [keys[rng.integers(0, len(keys), 200)] for _ in range(31)]
    found = []
    for storage in (None, tier):
        with shoal.launch(servers=2, slots=16, tier=storage, timeout=TIMEOUT, filters=filters) as store:
            table = store.table("t", dim=16, optimizer=shoal.Adagrad(lr=0.1))
            for part in keys.reshape(40, 200):
                table.push(part, np.ones((len(part), 16), np.float32))
                store.tick()
            before = table.stats().tier
            for now, ahead in itertools.pairwise(batches):
                table.prefetch(ahead)
                rows = table.pull(now)
                table.push(now, 0.1 * rows)
                store.tick()
            found.append(table.digest())
            assert table.reader.reads_ahead() == (storage is not None)
            after = table.stats().tier
            if storage is None:
                assert before is None
                assert after is None
                continue
            missed = after.misses - before.misses
            assert missed > 1000
            assert after.prefetched - before.prefetched > 0.5 * missed
            assert after.reads - before.reads < 1.2 * missed  # none twice
            assert after.rows_on_disk + after.rows_in_memory >= 8000
            if filters is not None:  # the prefetch has sent the list: pull and push name it
                counts = store.filter_metrics()["t"]
                assert counts["lists_named"] >= 2 * 59  # of each server: all but the first pull
                assert counts.get("lists_lost", 0) == 0
    assert found[0] == found[1]


@pytest.mark.slow
def test_fits_on_clusters_read_ahead(tmp_path):
    rng = np.random.default_rng(14)
    keys = rng.integers(0, 20_000, 40_000).astype(np.uint64)
    labels = rng.integers(0, 2, 4000).astype(np.float32)
    found = []
    for tier in (None, shoal.Tiered(tmp_path, memory="384KiB")):
        with shoal.launch(servers=1, slots=16, tier=tier, timeout=TIMEOUT) as store:
            model = shoal.LogisticRegression(optimizer=shoal.FTRL(), store=store)
            batches = [
                shoal.Batch(labels[i : i + 200], np.arange(0, 2001, 10), keys[10 * i : 10 * i + 2000], None)
                for i in range(0, 4000, 200)
            ]
            model.fit(batches, epochs=2, progress=False)
            found.append(model.table.digest())
            if tier is not None:
                assert model.table.stats().tier.prefetched > 0
    assert found[0] == found[1]


def test_what_servers_cannot_have_is_refused(tmp_path):
    tier = shoal.Tiered(tmp_path, memory="1MiB")
    with pytest.raises(ValueError, match="leave memory= or tier= out"):
        shoal.launch(tier=tier, memory=10**8)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(shoal.ShoalError, match="the tier of this server cannot be in"):
        shoal.launch(tier=shoal.Tiered(file, memory="1MiB"), timeout=TIMEOUT)
    assert parse_tier("C:/tier:8GiB") == shoal.Tiered("C:/tier", memory="8GiB")
    for text in ("/mnt/tier", ":8GiB", "/mnt/tier:much"):
        with pytest.raises(ValueError, match=r"DIR:SIZE|size"):
            parse_tier(text)
