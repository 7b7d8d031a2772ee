"""The rate of a job, computed from given rates; and the measurement of rates."""

import json

import pytest
from msgspec import structs

import shoal
from shoal.base.sizes import parse_bandwidth
from shoal.cli import main
from shoal.tools import jobs, sizing

RATES = shoal.tools.JobRates(
    parsed_per_second=1e8,
    sorted_per_second=5e7,
    learned_per_second=4e7,
    touched_per_second=2e7,
    created_per_second=8e6,
    worker_clock_seconds=1e-3,
    server_clock_seconds=1e-3,
    wait_seconds=1e-3,
    bytes_per_key=20.0,
)
# A batch has 1e6 features, of which 4e5 are different keys: 10 ms to parse, 20 to sort, 25 + 1 to learn from, and
# 20 + 1 ms of a server to look up and step its rows, 50 + 1 if they are new.
BATCH = {"batch_size": 100_000, "features": 10, "distinct": 0.4}


def clock_ms(**job):
    return 1e3 * shoal.tools.estimate_job(RATES, **BATCH | job).clock_seconds


def test_under_bsp_a_clock_is_the_chain_of_learning_servers_and_waits():
    job = shoal.tools.estimate_job(RATES, workers=1, **BATCH)
    assert job.clock_seconds == pytest.approx((26 + 21 + 1) * 1e-3)
    assert job.examples_per_second == pytest.approx(100_000 / 48e-3)
    assert (job.bound, job.network_share) == ("chain", 0.0)
    assert (job.worker_share, job.server_share) == (pytest.approx(26 / 48), pytest.approx(21 / 48))
    assert clock_ms(workers=3) == pytest.approx(26 + 3 * 21 + 1)
    assert clock_ms(workers=3, servers=2) == pytest.approx(26 + 3 * 11 + 1)
    assert clock_ms(workers=3, consistency="ssp:0") == clock_ms(workers=3)


@pytest.mark.parametrize("consistency", ["ssp:2", "asp"])
def test_once_pulls_begin_early_a_clock_is_the_longest_side(consistency):
    assert clock_ms(workers=1, consistency=consistency) == pytest.approx(26)
    assert clock_ms(workers=3, consistency=consistency) == pytest.approx(63)
    job = shoal.tools.estimate_job(RATES, workers=3, consistency=consistency, **BATCH)
    assert (job.bound, job.servers_wanted) == ("servers", 3)  # 3 x (20 / 3 + 1) = 23 ms
    # 128 clocks of 100,000 examples come first: of 25.6 million examples that is half.
    half = clock_ms(workers=1, consistency=consistency, examples=25_600_000)
    assert half == pytest.approx((48 + 26) / 2)
    assert clock_ms(workers=1, consistency=consistency, examples=1_000_000) == pytest.approx(48)
    # One of two workers is at the server for 21 of 48 ms; the other waits for it.
    assert clock_ms(workers=2, consistency=consistency, examples=1_000_000) == pytest.approx(48 + 21 * 21 / 48)


def test_rows_that_a_pass_creates_take_the_time_of_new_ones():
    # Of 4e6 rows that ten batches push, a half is new: (20 + 50) / 2 + 1.
    assert clock_ms(workers=1, examples=1_000_000, keys=2_000_000) == pytest.approx(26 + 36 + 1)
    assert clock_ms(workers=1, examples=1_000_000, keys=10**9) == pytest.approx(26 + 51 + 1)


def test_a_network_takes_the_time_of_its_bytes_and_servers_share_those_of_workers():
    link = {"bandwidth": parse_bandwidth("1Gbit")}  # 8e6 bytes: 64 ms
    assert clock_ms(workers=1, **link) == pytest.approx(48 + 64)
    assert clock_ms(workers=1, consistency="asp", **link) == pytest.approx(64)
    assert clock_ms(workers=4, consistency="asp", **link) == pytest.approx(256)
    assert clock_ms(workers=4, servers=2, consistency="asp", **link) == pytest.approx(128)
    job = shoal.tools.estimate_job(RATES, workers=4, consistency="asp", **BATCH, **link)
    assert (job.bound, job.servers_wanted) == ("network", 4)


def test_processes_that_share_cores_take_at_least_their_cpu_time():
    spent = 2 * (10 + 20 + 26 + 2 * 11)
    assert clock_ms(workers=2, servers=2, cores=4, consistency="asp") == pytest.approx(spent / 4)
    assert clock_ms(workers=2, servers=2, cores=3, consistency="asp") == pytest.approx(1.2 * spent / 3)
    assert clock_ms(workers=2, servers=2, cores=3) == pytest.approx(1.35 * 1.2 * spent / 3)
    assert clock_ms(workers=2, servers=2, cores=1000) == clock_ms(workers=2, servers=2)


def test_no_number_of_servers_keeps_up_where_requests_alone_take_longer():
    job = shoal.tools.estimate_job(RATES, workers=200, **BATCH)
    assert job.servers_wanted is None


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"servers": 0}, "servers must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"cores": 0}, "cores must be"),
        ({"examples": -1}, "examples must be"),
        ({"distinct": 0}, "distinct is the share"),
        ({"distinct": 1.5}, "distinct is the share"),
        ({"bandwidth": 0}, "bandwidth must be a number of bytes"),
        ({"consistency": "fast"}, "not a consistency"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, reported):
    with pytest.raises(ValueError, match=reported):
        shoal.tools.estimate_job(RATES, **{"workers": 1} | wrong)


def test_a_rate_is_a_number_above_0():
    with pytest.raises(ValueError, match="wait_seconds must be a number above 0"):
        structs.replace(RATES, wait_seconds=-1.0)


@pytest.mark.parametrize(
    ("text", "rate"), [("10Gbit", 1.25e9), ("1.5 gbit/s", 1.875e8), ("100Mbit", 1.25e7), ("8kbit", 1e3)]
)
def test_the_rate_of_a_network_is_read(text, rate):
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["10", "10GB", "fast", "0Gbit", ""])
def test_other_text_is_no_rate_of_a_network(text):
    with pytest.raises(ValueError, match="is not the rate of a network: write it as 10Gbit"):
        parse_bandwidth(text)


@pytest.mark.slow
def test_rates_are_measured(monkeypatch):
    monkeypatch.setattr(jobs, "_SAMPLE_FEATURES", 1_000_000)
    rates = shoal.tools.measure_job_rates(batch_size=1024, features=10, distinct=0.5)
    assert 10 < rates.bytes_per_key < 40  # key and weight, key and gradient: 24, where nothing is encoded
    assert all(value > 0 for value in structs.asdict(rates).values())


@pytest.mark.slow
def test_the_command_tells_rate_bound_and_servers_and_uses_rates_again(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rates.json"
    monkeypatch.setattr(jobs, "measure_job_rates", lambda **_: RATES)
    monkeypatch.setitem(sizing.measure_rates.__kwdefaults__, "sample_bytes", 4 << 20)
    asked = ["estimate", "--keys", "1000", "--servers", "1", "--workers", "3", "--batch-size", "100000"]
    asked += ["--features", "10", "--distinct", "0.4", "--consistency", "asp"]
    assert main([*asked, "--json"]) == 0
    reported = capsys.readouterr().out
    facts = json.loads(reported)
    assert facts["job"]["servers_wanted"] == 3
    file.write_text(reported)
    assert main([*asked, "--rates", str(file)]) == 0
    told = capsys.readouterr().out
    assert "4,761,905 examples/s with 3 workers and 1 server under asp, 63.0 ms a clock" in told
    assert "3 servers keep up with 3 workers; the bound is the servers" in told
    assert main([*asked, "--rates", str(file), "--network", "100Mbit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["bound"] == "network"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--workers", "2", "--no-measure"], "leave out --no-measure"),
        (["--workers", "2", "--dim", "16"], "linear models in memory"),
        (["--cores", "2"], "--cores describes a job: pass --workers"),
        (["--workers", "2", "--network", "10"], "is not the rate of a network"),
        (["--workers", "2", "--distinct", "2"], "pass"),
        (["--workers", "0"], "pass"),
        (["--workers", "2", "--consistency", "fast"], "not a consistency"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, reported, capsys):
    try:
        status = main(["estimate", "--keys", "9", "--no-measure", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert reported in capsys.readouterr().err
