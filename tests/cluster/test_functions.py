"""Functions of users on real servers: what they may run, exactly once across a failover, and long ones."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from shoal.cluster.launch.local_cluster import running

MODULE = """
import time
import numpy as np

def double(keys, weights, state):
    weights *= 2

def slow(keys, weights, state, seconds):
    time.sleep(seconds)
    weights += 1

def total(keys, weights, state):
    return weights.sum(axis=0, dtype=np.float64)
"""
KEYS = np.arange(200, dtype=np.uint64)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A directory with a module of that name, which this process has imported."""
    (tmp_path / "rows_of_a_user.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    yield importlib.import_module("rows_of_a_user")
    sys.modules.pop("rows_of_a_user")


@shoal.by_source
def square(keys, weights, state):
    weights **= 2


@pytest.mark.slow
def test_servers_run_what_they_were_told_to_and_nothing_else(module, tmp_path):
    with shoal.launch(1, slots=16, consistency=shoal.ASP(), allow_code=[tmp_path]) as store:
        table = store.table("t", optimizer=shoal.SGD(1.0))
        table.push(KEYS, np.full(200, -3, np.float32)).result()
        table.apply(module.double).result()
        assert table.reduce(module.total, np.add).tolist() == [1200.0]
        with pytest.raises(shoal.errors.UserCodeError, match="was sent as its source, which this server may not run"):
            table.apply(square).result()
        with pytest.raises(
            shoal.errors.UserCodeError, match=r"rows_of_others:total.*may not run: start all servers with"
        ):
            table.reduce(_renamed(module.total), np.add)
        assert (table.pull(KEYS) == 6).all()


@pytest.mark.slow
@pytest.mark.parametrize("local_steps", [False, True])
def test_a_cache_keeps_no_row_of_before_a_function_that_nobody_has_waited_for(module, tmp_path, local_steps):
    """`flush` waits for all calls: what is read after it is what the function has made."""
    cache = shoal.Cache(rows=400, staleness=3, local_steps=local_steps)
    with shoal.launch(1, slots=16, consistency=shoal.ASP(), allow_code=[tmp_path], cache=cache) as store:
        table = store.table("t", optimizer=shoal.SGD(1.0))
        table.push(KEYS, np.full(200, -3, np.float32)).result()
        assert (table.pull(KEYS) == 3).all()
        table.apply(module.double)
        store.flush()
        assert (table.pull(KEYS) == 6).all()
        table.push(KEYS, np.full(200, -1, np.float32)).result()
        store.flush()
        assert table.reduce(module.total, np.add).tolist() == [7 * 200]
        if local_steps:  # made of rows that the servers have
            assert (table.pull(KEYS) == 7).all()
            table.apply(module.double)
            store.flush()
            table.push(KEYS, np.full(200, -1, np.float32)).result()
            assert (table.pull(KEYS) == 15).all()


def _renamed(function):
    function.__module__ = "rows_of_others"
    return function


@pytest.mark.slow
def test_an_applied_function_acts_once_across_a_failover(module, tmp_path):
    with (
        running(2, replicas=1, slots=16, allow_code=[tmp_path, "source"]) as cluster,
        shoal.connect(cluster.address, consistency=shoal.ASP(), workers=1, timeout=TIMEOUT) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(1.0))
        table.push(KEYS, np.full(200, -2, np.float32)).result()
        applied = table.apply(module.slow, params={"seconds": 0.1})  # is under way on both servers
        cluster.servers[0].process.kill()
        assert applied.result() == 200
        assert table.apply(square, after=applied).result() == 200
        assert (table.pull(KEYS) == 9).all()


@pytest.mark.slow
def test_a_long_function_exceeds_the_deadline_and_keeps_the_server_alive(module, tmp_path):
    with (
        running(1, slots=16, allow_code=[tmp_path], heartbeat=0.4) as cluster,
        shoal.connect(cluster.address, consistency=shoal.ASP(), workers=1, timeout=TIMEOUT) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(1.0))
        table.push(KEYS[:1], np.full(1, -2, np.float32)).result()
        slow = table.apply(module.slow, params={"seconds": 3.0})  # longer than a silent server is believed to live
        with pytest.raises(shoal.DeadlineExceededError):
            slow.result(timeout=0.5)
        assert slow.result() == 1
        assert table.pull(KEYS[:1]).tolist() == [[3.0]]
