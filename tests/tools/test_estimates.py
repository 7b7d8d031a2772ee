"""Estimates of planned tables, beside tables that are made."""

import json
import subprocess
import sys

import numpy as np
import pytest

import shoal
from shoal.tools import sizing
from tiers import long_after

RATES = shoal.tools.Rates(
    inserts_per_second=4e6,
    pulls_per_second=5e7,
    pushes_per_second=4e7,
    save_bytes_per_second=5e8,
    load_bytes_per_second=8e8,
)
KEYS = 1_000_000


def filled(store, keys, **description):
    """A table with so many keys, as training makes it."""
    table = store.table("t", **description)
    for begin in range(0, keys, 65536):
        some = np.arange(begin, min(begin + 65536, keys), dtype=np.uint64)
        table.push(some, np.ones((len(some), table.dim), np.float32)).result()
    return table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "description"),
    long_after(
        3,
        [
            (KEYS, {}),
            (2_500_000, {}),
            (KEYS, {"dim": 16, "optimizer": shoal.Adagrad()}),
            (KEYS, {"dim": 16, "optimizer": shoal.RowWiseAdagrad(), "dtype": "bfloat16"}),
            (300_000, {"dim": 64, "optimizer": shoal.Adam(), "init": shoal.Uniform(0.01)}),
            (KEYS, {"dim": 3, "optimizer": shoal.SGD()}),
            (KEYS, {"optimizer": shoal.Adam(per_row_step=True)}),
        ],
    ),
    ids=str,
)
def test_memory_and_checkpoint_are_within_a_tenth_of_those_of_a_table_that_is_made(keys, description, tmp_path):
    plan = shoal.tools.estimate(keys, **description)
    with shoal.local(slots=1024) as store:
        table = filled(store, keys, **description)
        assert plan.table_bytes == pytest.approx(table.stats().bytes, rel=0.1)
        assert plan.bytes_per_key == plan.table_bytes / keys
        store.save(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert plan.checkpoint_bytes == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize(("keys", "slots"), [(200_000, 16), (KEYS, 4096)])
def test_more_slots_and_fewer_are_counted(keys, slots):
    plan = shoal.tools.estimate(keys, slots=slots)
    with shoal.local(slots=slots) as store:
        assert plan.table_bytes == pytest.approx(filled(store, keys).stats().bytes, rel=0.1)


def test_servers_are_as_many_as_their_memory_asks_for():
    one = shoal.tools.estimate(10**9)
    assert (one.servers, round(one.bytes_per_key, 1), one.row_bytes) == (1, 19.5, 8)
    assert one.table_bytes < one.server_bytes < one.table_bytes * 1.02
    for gib, servers in ((64, 1), (24, 1), (16, 2), (4, 5)):
        plan = shoal.tools.estimate(10**9, memory=gib << 30)
        assert plan.servers == servers
        assert plan.server_bytes <= (gib << 30) * 15 / 16
        assert plan.table_bytes == one.table_bytes
    assert shoal.tools.estimate(10**9, memory=one.server_bytes).servers == 2  # a sixteenth is the system's
    assert shoal.tools.estimate(10**9, memory=one.server_bytes * 16 // 15 + 16).servers == 1
    with pytest.raises(ValueError, match="choose more slots, or larger servers"):
        shoal.tools.estimate(10**12, memory=1 << 30)
    assert shoal.tools.estimate(10**12, memory=2 << 30, slots=16384).servers > 8192


def test_copies_take_as_much_memory_as_the_rows_and_more_servers():
    alone, twice = (shoal.tools.estimate(10**9, servers=4, replicas=replicas) for replicas in (0, 1))
    share = alone.table_bytes // 4
    assert twice.table_bytes == alone.table_bytes
    assert twice.server_bytes - alone.server_bytes == pytest.approx(share, rel=1e-6)
    assert shoal.tools.estimate(10**6, replicas=2).servers == 3
    assert shoal.tools.estimate(10**6, replicas=2, memory=8 << 30).servers == 3
    few, many = (shoal.tools.estimate(10**9, replicas=replicas, memory=8 << 30).servers for replicas in (0, 1))
    assert 2 * few - 1 <= many <= 2 * few + 1
    with pytest.raises(ValueError, match="replicas=2 takes more than 2 servers, got servers=2"):
        shoal.tools.estimate(10**6, servers=2, replicas=2)


def test_times_are_rates_times_rows_shared_by_the_servers():
    plan = shoal.tools.estimate(10**9, rates=RATES, examples=4 * 10**9, features=10)
    assert plan.fill_seconds == 250
    assert plan.pass_seconds == pytest.approx(4e10 * (1 / 5e7 + 1 / 4e7))
    assert plan.save_seconds == pytest.approx(16e9 / 5e8, rel=0.01)
    assert plan.load_seconds == pytest.approx(20, rel=0.01)
    four = shoal.tools.estimate(10**9, rates=RATES, examples=4 * 10**9, features=10, servers=4)
    assert (four.fill_seconds, four.pass_seconds) == (250 / 4, plan.pass_seconds / 4)
    assert shoal.tools.estimate(10**9).fill_seconds is None


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"keys": 0}, "keys must be a whole number of at least 1, got 0"),
        ({"keys": 1e9}, "keys must be a whole number"),
        ({"keys": 9, "servers": 0}, "servers must be a whole number of at least 1"),
        ({"keys": 9, "servers": 2000}, "2000 servers are more than 1024 slots"),
        ({"keys": 9, "servers": 2, "memory": 1 << 34}, "leave out servers, or memory"),
        ({"keys": 9, "examples": -1}, "examples must be"),
        ({"keys": 9, "features": 0}, "features must be"),
        ({"keys": 9, "dim": 0}, "dim from 1 to 4096"),
        ({"keys": 9, "slots": 1000}, "power of two"),
        ({"keys": 9, "dtype": "int8"}, "dtype out of"),
    ],
)
def test_what_makes_no_table_is_refused(asked, reported):
    with pytest.raises(ValueError, match=reported):
        shoal.tools.estimate(**asked)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "fast"])
def test_a_rate_is_a_number_above_0(value):
    with pytest.raises(ValueError, match="pulls_per_second must be a number above 0"):
        shoal.tools.Rates(
            inserts_per_second=1,
            pulls_per_second=value,
            pushes_per_second=1,
            save_bytes_per_second=1,
            load_bytes_per_second=1,
        )


@pytest.mark.slow
def test_rates_are_measured_and_leave_nothing_behind(tmp_path):
    rates = shoal.tools.measure_rates(dim=4, optimizer=shoal.Adagrad(), directory=tmp_path, sample_bytes=4 << 20)
    assert all(getattr(rates, name) > 1000 for name in rates.__slots__)
    assert list(tmp_path.iterdir()) == []
    assert sizing.SAMPLE_BYTES > 64 << 20  # beyond caches


def cli(*arguments):
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "shoal", "estimate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_tells_memory_servers_checkpoint_and_time(tmp_path):
    plan = shoal.tools.estimate(2 * 10**9, dim=16, optimizer=shoal.Adagrad(), memory=24 << 30, rates=RATES)
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"rates": {name: getattr(RATES, name) for name in RATES.__slots__}}))
    asked = ["--keys", "2e9", "--dim", 16, "--optimizer", "adagrad", "--memory", "24GiB", "--rates", rates]
    reported = cli(*asked)
    assert reported.returncode == 0, reported.stderr
    assert "2,000,000,000 keys, 16 weights in float32 under Adagrad: 128 bytes per row" in reported.stdout
    assert f"{plan.table_bytes / 1e9:,.1f} GB in {plan.servers} servers of 24.0 GiB" in reported.stdout
    assert f"checkpoint  {plan.checkpoint_bytes / 1e9:,.1f} GB" in reported.stdout
    assert "to insert every key" in reported.stdout
    facts = json.loads(cli(*asked, "--json", "--examples", "1e9").stdout)
    assert facts["servers"] == plan.servers
    assert facts["table_bytes"] == plan.table_bytes
    assert facts["fill_seconds"] == plan.fill_seconds
    assert facts["pass_seconds"] > 0


def test_the_command_measures_and_its_rates_can_be_used_again(tmp_path, monkeypatch, capsys):
    from shoal.cli import main

    monkeypatch.setattr(sizing, "measure_rates", lambda **_: RATES)
    assert main(["estimate", "--keys", "1e8", "--json"]) == 0
    reported = capsys.readouterr().out
    (tmp_path / "rates.json").write_text(reported)
    assert main(["estimate", "--keys", "100000000", "--rates", str(tmp_path / "rates.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(reported)
    assert main(["estimate", "--keys", "1e8", "--no-measure"]) == 0
    assert "time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--keys", "many"], "'many' is not a whole number"),
        (["--keys", "1.5"], "is not a whole number"),
        (["--keys", "0", "--no-measure"], "keys must be a whole number of at least 1"),
        (["--keys", "9", "--optimizer", "magic"], "unknown optimizer 'magic'; choose from adagrad, adam, adamw, ftrl"),
        (["--keys", "9", "--rates", "nowhere.json"], "nowhere.json"),
        (["--keys", "9", "--memory", "1", "--no-measure"], "choose more slots, or larger servers"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, reported):
    done = cli(*arguments)
    assert done.returncode == 2
    assert reported in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_without_rates_is_named(tmp_path):
    file = tmp_path / "other.json"
    file.write_text("{}")
    done = cli("--keys", 9, "--rates", file)
    assert done.returncode == 2
    assert f"{file} has no rates" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "description", [{"dim": 16, "optimizer": shoal.Adagrad()}, {"dim": 3, "optimizer": shoal.SGD()}], ids=str
)
def test_tiers_are_near_those_of_a_table_that_is_made(description, tmp_path):
    keys, memory = 200_000, 3_000_000
    plan = shoal.tools.estimate(keys, **description, slots=16, tier=memory)
    assert plan.tier.memory_bytes == memory
    with shoal.local(slots=16) as store:
        table = store.table("t", **description, storage=shoal.Tiered(tmp_path, memory=memory))
        for begin in range(0, keys, 4096):
            some = np.arange(begin, min(begin + 4096, keys), dtype=np.uint64)
            table.push(some, np.ones((len(some), table.dim), np.float32)).result()
        table.decay(0.5)  # all rows are on disk, and none has been changed since
        tier = table.stats().tier
    assert plan.tier.disk_bytes == pytest.approx(
        tier.disk_bytes, rel=0.25
    )  # the first slots fit in memory until others follow
    assert plan.tier.index_bytes == pytest.approx(tier.index_bytes, rel=0.1)
    assert plan.tier.rows_in_memory == pytest.approx(tier.rows_in_memory, rel=0.5)


def test_a_tier_has_copies_too_and_its_limits_are_named():
    one = shoal.tools.estimate(10**9, dim=16, optimizer=shoal.Adagrad(), tier=16 << 30)
    two = shoal.tools.estimate(10**9, dim=16, optimizer=shoal.Adagrad(), tier=16 << 30, servers=2, replicas=1)
    assert two.tier.disk_bytes == pytest.approx(2 * one.tier.disk_bytes, rel=1e-6)
    assert two.tier.share_in_memory == pytest.approx(one.tier.share_in_memory, rel=1e-3)
    assert one.tier.reads_per_second(1000) == pytest.approx(1000 * (1 - one.tier.share_in_memory))
    assert 0.05 < one.tier.share_in_memory < 0.12
    assert one.server_bytes < 20 << 30 < one.table_bytes
    assert one.fill_seconds is None
    with pytest.raises(ValueError, match="leave out memory, or tier"):
        shoal.tools.estimate(1000, memory=1 << 34, tier=1 << 30)
    with pytest.raises(ValueError, match="at least 4194304 bytes for 1024 slots, got 1000"):
        shoal.tools.estimate(1000, tier=1000)
    with pytest.raises(ValueError, match="the index of 1,000,000,000 rows on disk takes"):
        shoal.tools.estimate(10**9, dim=16, tier=1 << 30)


def test_the_command_says_when_a_tier_does_not_pay():
    def said(*arguments):
        command = [sys.executable, "-m", "shoal", "estimate", "--keys", "1e8", "--tier", "4GiB", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    assert "too narrow for a tier to pay" in said()
    wide = said("--dim", "16", "--optimizer", "adagrad")
    assert "reads/s for 100,000 different keys a second" in wide
    assert "too narrow" not in wide
