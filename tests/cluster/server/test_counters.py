"""Metrics of servers and workers that are computed in Python, and their names."""

import contextlib
import re
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from channel_peer import ME, Peer, batch_of
from maps import map_of
from paths import ROOT
from shoal.cluster.protocol import messages, metrics
from shoal.cluster.protocol.health import _cumulative
from shoal.cluster.server.counters import _COUNTERS, _GAUGES, ReplicationLag, ServerCounters
from shoal.cluster.worker.channel import Channel, Role
from shoal.store.activity import Activity
from shoal.table.spec import MAX_NAME_LENGTH

TIER = [name for name in [*_COUNTERS, *_GAUGES] if name.startswith("tier_")]
ZERO = dict.fromkeys({*_COUNTERS, *_GAUGES} - {*TIER}, 0)


class Endpoint:
    """A service of which only the metrics are used; `arcs` has the numbers of tables by first slot."""

    def __init__(self):
        self.arcs = {}
        self.busy = False

    def metrics(self, patience):
        if self.busy:
            return None
        return {
            "messages": 3, "deferrals": 2, "requests": {"pull": 3}, "push_staleness": {0: 1},
            "pull_staleness": {}, "narrowed_squared_error": 0.5,
        }  # fmt: skip

    def table_loads(self, patience):
        if self.busy:
            return None
        return [(first, id, ZERO | load) for first, tables in self.arcs.items() for id, load in tables.items()]

    def arc_loads(self, patience):
        return None if self.busy else [(first, first + 8, 0, 0, 0) for first in self.arcs]

    def hot_keys(self, most, patience):
        return None if self.busy else ([(1, 2**64 - 1, 30), (1, 7, 10), (9, 8, 9), (1, 9, 3)], 100)

    def replication(self, patience):
        return {"replicas": [], "streams": [], "held": 0}


def test_counts_of_an_arc_that_comes_or_goes_do_not_change_the_counter_of_a_process():
    endpoint = Endpoint()
    counters = ServerCounters({"a": endpoint}, lambda: {1: "w"})
    loop = SimpleNamespace(durations=lambda: {"pull": (0.25, {1024: 2})})

    def pushed():
        return counters.read([loop, loop])["table_rows_pushed"]["w"]

    endpoint.arcs[0] = {}
    assert pushed() == 0
    endpoint.arcs[0] = {1: {"rows_pushed": 5, "rows": 4, "bytes": 40}}
    assert pushed() == 5  # a new table of an arc that is known
    endpoint.arcs[8] = {1: {"rows_pushed": 1000, "rows": 1, "bytes": 10}}
    assert pushed() == 5  # it came with its counts
    endpoint.arcs[8] = {1: {"rows_pushed": 1003, "rows": 2, "bytes": 20}}
    assert pushed() == 8
    found = counters.read([loop, loop])
    assert (found["table_rows"], found["table_bytes"], found["rows"]) == ({"w": 6}, {"w": 60}, 6)
    assert found["request_duration"] == {"pull": metrics.Durations(0.5, {1024: 4})}
    assert (found["deferrals"], found["weight_squared_error"]) == (2, 0.5)
    endpoint.busy = True
    assert pushed() == 8
    found = counters.read([loop, loop])
    assert (found["deferrals"], found["weight_squared_error"], found["messages"]) == (2, 0.5, 3)
    endpoint.busy = False
    del endpoint.arcs[8]
    assert pushed() == 8
    endpoint.arcs[8] = {1: {"rows_pushed": 1003}}
    assert pushed() == 8


def test_an_endpoint_that_was_busy_from_the_beginning_has_no_metrics_yet():
    one, other = Endpoint(), Endpoint()
    one.busy = True
    counters = ServerCounters({"a": one, "b": other}, lambda: {1: "w"})
    assert counters.read([])["messages"] == 3
    other.busy = True
    assert "rows" not in ServerCounters({"b": other}, dict).figures([]).numbers


def test_the_shares_of_hot_keys_are_of_all_endpoints_and_omit_chance_and_erased_tables():
    endpoints = {"a": Endpoint(), "b": Endpoint(), "c": Endpoint()}
    counters = ServerCounters(endpoints, lambda: {1: "w:x"})
    endpoints["c"].busy = True
    assert counters.hot_keys() == {("w:x", 2**64 - 1): 0.3, ("w:x", 7): 0.1, ("w:x", 9): 0.03}
    del endpoints["b"], endpoints["c"]
    alone = ServerCounters(endpoints, lambda: {1: "w:x"})
    assert alone.hot_keys() == {("w:x", 2**64 - 1): 0.3, ("w:x", 7): 0.1}  # three samples may be chance
    loop = SimpleNamespace(durations=dict)
    endpoints["a"].arcs[0] = {}
    assert alone.figures([loop]).numbers["hot:18446744073709551615:w:x"] == 0.3


def test_the_longest_name_of_a_table_fits_into_a_heartbeat():
    name = "é" * MAX_NAME_LENGTH
    endpoint = Endpoint()
    endpoint.arcs[0] = {1: {"rows": 4}}
    figures = ServerCounters({"a": endpoint}, lambda: {1: name}).figures([SimpleNamespace(durations=dict)])
    assert f"hot:18446744073709551615:{name}" in figures.numbers
    heartbeat = messages.Heartbeat(b"0123456789abcdef", 4, figures=figures)
    assert messages.decode(messages.encode(heartbeat)).figures == figures


def test_the_lag_is_the_age_of_the_oldest_change_that_is_not_acknowledged():
    lag = ReplicationLag()
    assert lag.update(1.0, 10, 10) == 0
    assert lag.update(2.0, 12, 10) == 0
    assert lag.update(3.0, 20, 10) == 1
    assert lag.update(4.0, 20, 12) == 1  # what came at 3 is missing
    assert lag.update(9.0, 20, 12) == 6
    assert lag.update(9.5, 20, 20) == 0
    for k in range(5000):  # no memory without bound
        last = lag.update(10.0 + k, 21 + k, 20)
    assert last == 4999
    assert len(lag._samples) < 2000
    counters = ServerCounters({}, dict)
    counters.note_stream(3, 1.0, 5, 0)
    counters.note_stream(3, 2.0, 5, 0)
    assert counters.read([])["replication_lag"] == 1
    counters.keep_streams(set())
    assert counters.read([])["replication_lag"] == 0


def test_buckets_are_cumulative_and_their_bounds_are_seconds():
    found = dict(_cumulative({0: 1, 1024: 2, 1 << 40: 3}, metrics.NANOSECONDS))
    assert found["1.024e-06"] == 1
    assert found["2.048e-06"] == 3
    assert found[metrics.NANOSECONDS[-1][1]] == 3
    assert found["+Inf"] == 6
    assert list(found.values()) == sorted(found.values())


def test_calls_and_their_keys_are_counted():
    peer = Peer(0, 16)
    with contextlib.closing(peer), contextlib.closing(Channel(Role(ME, map_of(1, peer.range)))) as channel:
        batch = batch_of([1, 2, 3, 4, 4, 4, 3, 3, 2, 1])
        for _ in range(2):
            channel.calls.pull(0, batch, np.empty((4, 2), np.float32), 2).result()
        found = channel.durations()
        numbers = channel.metrics()
    assert set(found) == {"pull"}
    counts = found["pull"].counts  # by the least nanoseconds of a bucket, counted from 1
    assert sum(counts.values()) == 2
    least = sum((nanoseconds - 1) * count for nanoseconds, count in counts.items()) / 1e9
    assert least <= found["pull"].seconds <= 2 * least + 2e-9
    assert all(nanoseconds.bit_count() == 1 for nanoseconds in counts)
    assert (numbers["keys"], numbers["unique_keys"]) == (20, 8)


def test_training_is_counted():
    now = [0.0]
    activity = Activity(lambda: now[0])
    activity.learned(0)
    assert activity.values() == {"examples": 0, "late_examples": 0}
    losses = iter([(0.7, None), (0.6, 0.8)])
    for _ in range(3):
        activity.learned(5, lambda: next(losses))  # computed once per second
    assert activity.values() == {"examples": 15, "late_examples": 0, "loss": 0.7}
    now[0] = 2.0
    activity.learned(5, lambda: next(losses))
    activity.learned(5)
    activity.saved(1.5)
    now[0] = 5.0
    assert activity.values() == {
        "examples": 25, "late_examples": 0, "loss": 0.6, "auc": 0.8, "checkpoint_age": 3.0, "checkpoint_duration": 0.5
    }  # fmt: skip


def test_a_fit_and_a_save_leave_their_traces(tmp_path):
    rng = np.random.default_rng(0)
    with shoal.LogisticRegression() as model:
        x = rng.normal(size=(300, 4)).astype(np.float32)
        model.fit(x, (x[:, 0] > 0).astype(np.float32), progress=False)
        model.store.save(tmp_path / "saved")
        found = model.store.activity.values()
    assert found["examples"] >= 300
    assert found["checkpoint_duration"] > 0


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_the_documentation_lists_every_metric(role):
    listed = (ROOT / "docs" / "monitoring.md").read_text()
    for key, one in getattr(metrics, role.upper()).items():
        assert f"`{one.full_name(role, key)}{'_total' * (one.kind == 'counter')}" in listed


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_names_follow_the_rules_of_prometheus(role):
    all_of = getattr(metrics, role.upper())
    names = [one.full_name(role, key) for key, one in all_of.items()]
    assert len(set(names)) == len(names)
    for key, one in all_of.items():
        name = one.full_name(role, key)
        assert re.fullmatch(r"shoal_[a-z]+(_[a-z]+)*", name)
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))  # suffixes that are added
        assert not re.search(r"_(ms|us|ns|kb|mb)$|millis|kilo", name)  # base units
        assert one.help[0].isupper()
        assert not one.help.endswith(".")
        assert one.label in ("", "op", "table", "worker", "server", "model")


def test_tiers_have_numbers_of_the_tables_that_have_one_and_counters_do_not_decrease():
    endpoint = Endpoint()
    counters = ServerCounters({"a": endpoint}, lambda: {1: "w", 2: "in memory"})
    disk = dict.fromkeys(TIER, 0) | {"tier_is_direct": 1}

    def found():
        return {name: value for name, value in counters.read([]).items() if name.startswith("tier_")}

    endpoint.arcs[0] = {2: {}}
    assert found() == {name: {} for name in TIER}
    endpoint.arcs[0] = {1: disk | {"tier_misses": 5, "tier_disk_bytes": 100}, 2: {}}
    assert (found()["tier_misses"], found()["tier_disk_bytes"], found()["tier_hits"]) == (
        {"w": 5},
        {"w": 100},
        {"w": 0},
    )
    endpoint.arcs[8] = {1: disk | {"tier_misses": 1000, "tier_disk_bytes": 50}}
    assert (found()["tier_misses"], found()["tier_disk_bytes"]) == ({"w": 5}, {"w": 150})
    endpoint.arcs[0] = {1: disk | {"tier_misses": 2}}  # its tier has been made anew
    endpoint.arcs[8] = {1: disk | {"tier_misses": 1001}}
    assert found()["tier_misses"] == {"w": 6}
    assert {name for name in metrics.SERVER if name.startswith("tier_")} == found().keys()
