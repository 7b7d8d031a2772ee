"""The commands of a cluster's roles: what they take from their arguments and from Volcano, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.sizes import memory_bytes
from shoal.cli import main

VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "3", "VC_SERVER_NUM": "2", "VC_SCHEDULER_HOSTS": "scheduler-0.job"}


def config_of(monkeypatch, *arguments):
    """Run a command up to its process; return the configuration of that."""
    found = []

    def run(config, *_, **__):
        found.append(config)

    monkeypatch.setattr("shoal.cluster.launch.roles.run", run)
    assert main(list(arguments)) == 0
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["scheduler", "--bind", "tcp://127.0.0.1:*"], "requires the number of servers: pass --servers N"),
        (["scheduler", "--servers", "2"], "pass --bind tcp://HOST:5570"),
        (["scheduler", "--servers", "0", "--bind", "tcp://127.0.0.1:*"], "--servers is 0: pass 1 or more"),
        (["scheduler", "--servers", "1", "--bind", "127.0.0.1"], "write tcp://HOST:PORT"),
        (["scheduler", "--servers", "1", "--slots", "5", "--bind", "tcp://127.0.0.1:*"], "power of two"),
        (
            ["scheduler", "--servers", "1", "--heartbeat", "0", "--bind", "tcp://127.0.0.1:*"],
            "--heartbeat is 0.0: pass a number above 0",
        ),
        (["server"], "pass --scheduler tcp://HOST:PORT"),
        (["server", "--scheduler", "tcp://127.0.0.1:1", "--threads", "0"], "--threads is 0: pass 1 or more"),
        (["server", "--scheduler", "tcp://127.0.0.1"], "write tcp://HOST:PORT"),
        (["server", "--scheduler", "tcp://127.0.0.1:1", "--memory", "much"], "'much' is not a size: write it as 8GiB"),
        (["server", "--scheduler", "tcp://127.0.0.1:1", "--memory", "-1G"], "--memory"),
        (["server", "--scheduler", "tcp://127.0.0.1:1", "--storage-roots", ""], "a storage root is empty"),
        (["server", "--storage-options", "endpoint_url"], "'endpoint_url' is not NAME=VALUE"),
        (["server", "--memory", "1G", "--slot-memory", "1M"], "pass one of them"),
        (
            ["scheduler", "--servers", "2", "--replicas", "2", "--bind", "tcp://127.0.0.1:*"],
            "replicas must be a number from 0 to 1",
        ),
        (["scheduler", "--servers", "2", "--copy-rate", "fast"], "'fast' is not a size: write it as 8GiB"),
        (["launch", "--memory", "1000", "train.py"], "at least 1048576 bytes for 1024 slots, got 1000"),
        (["launch", "--servers", "0", "train.py"], "--servers is 0: pass 1 or more"),
        (["launch", "--workers", "0", "train.py"], "--workers is 0: pass 1 or more"),
        (["launch", "--restarts", "-1", "train.py"], "--restarts is -1: pass 0 or more"),
    ],
)
def test_arguments_that_make_no_role_are_refused_with_the_remedy(capsys, arguments, text):
    try:
        status = main(arguments)
    except SystemExit as left:  # argparse's own
        status = left.code
    assert status == 2
    assert text in capsys.readouterr().err


def test_a_server_is_told_where_and_how_it_may_store_by_options_that_repeat(monkeypatch):
    given = ["--storage-roots", "/a", "--storage-roots=s3://b", "--storage-options", "endpoint_url=http://minio:9000"]
    made = config_of(
        monkeypatch, "server", "--scheduler", "tcp://127.0.0.1:1", *given, "--storage-options", 'client_kwargs={"x": 1}'
    )
    assert made.storage_roots == ("/a", "s3://b")
    assert made.storage_options == {"endpoint_url": "http://minio:9000", "client_kwargs": {"x": 1}}


def test_a_scheduler_is_told_of_copies_and_how_fast_they_are_made(monkeypatch):
    made = config_of(
        monkeypatch,
        "scheduler",
        "--bind",
        "tcp://127.0.0.1:*",
        "--servers",
        "2",
        "--replicas",
        "1",
        "--copy-rate",
        "5MiB",
    )
    assert (made.replicas, made.copy_rate) == (1, "5MiB")
    made = config_of(monkeypatch, "scheduler", "--bind", "tcp://127.0.0.1:*", "--servers", "2")
    assert (made.replicas, made.copy_rate) == (0, None)


def test_a_server_states_its_node_by_an_option_or_the_environment(monkeypatch):
    for arguments, variable, node in [([], "", None), ([], "pod-7", "pod-7"), (["--node", "rack"], "pod-7", "rack")]:
        monkeypatch.setenv("SHOAL_NODE", variable)
        made = config_of(monkeypatch, "server", "--scheduler", "tcp://127.0.0.1:1", *arguments)
        assert made.node == node


def test_a_server_is_a_spare_only_if_it_is_asked_to_be(monkeypatch):
    for arguments, spare in (([], False), (["--spare"], True)):
        made = config_of(monkeypatch, "server", "--scheduler", "tcp://127.0.0.1:1", *arguments)
        assert made.spare is spare


def test_copies_under_mpirun_are_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "SIZE": "5", "LOCAL_SIZE": "5"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["launch", "--servers", "2", "--replicas", "1", "train.py"]) == 2
    assert "--replicas 1: mpirun ends all processes when one of them dies" in capsys.readouterr().err
    assert main(["launch", "--servers", "2", "--restarts", "1", "train.py"]) == 2
    assert "--restarts 1: mpirun starts no process again" in capsys.readouterr().err


def test_under_volcano_a_scheduler_and_a_server_need_no_arguments(monkeypatch):
    for name, value in VOLCANO.items():
        monkeypatch.setenv(name, value)
    made = config_of(monkeypatch, "scheduler")
    assert (made.bind, made.servers, made.workers) == ("tcp://*:5570", 2, 3)
    made = config_of(monkeypatch, "server")
    assert (made.scheduler, made.rank, made.threads) == ("tcp://scheduler-0.job:5570", 1, 1)


def test_what_is_given_comes_before_what_volcano_says(monkeypatch):
    for name, value in VOLCANO.items():
        monkeypatch.setenv(name, value)
    made = config_of(monkeypatch, "scheduler", "--bind", "tcp://10.0.0.1:7", "--servers", "5", "--workers", "6")
    assert (made.bind, made.servers, made.workers) == ("tcp://10.0.0.1:7", 5, 6)
    made = config_of(monkeypatch, "server", "--scheduler", "tcp://10.0.0.1:7", "--rank", "0")
    assert (made.scheduler, made.rank) == ("tcp://10.0.0.1:7", 0)


def test_too_many_workers_under_mpirun_are_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "SIZE": "5", "LOCAL_SIZE": "5"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["launch", "--servers", "2", "--workers", "3", "train.py"]) == 2
    assert "which leaves 2 for workers: leave --workers out" in capsys.readouterr().err


def test_without_a_word_of_where_the_scheduler_is_mpirun_on_many_machines_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "SIZE": "5", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["launch", "--servers", "2", "train.py"]) == 2
    assert "pass --scheduler tcp://HOST:5570" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux does")
@pytest.mark.parametrize(("status", "starts"), [(1, 3), (2, 1)])
def test_a_program_that_fails_is_started_again_as_often_as_asked_unless_its_input_is_wrong(
    tmp_path, monkeypatch, capsys, status, starts
):
    monkeypatch.chdir(tmp_path)
    Path("fail.py").write_text(
        f"import sys\nwith open('starts', 'a') as file:\n    file.write('x')\nsys.exit({status})\n"
    )
    assert main(["launch", "--restarts", "2", "fail.py"]) == status
    assert Path("starts").read_text() == "x" * starts
    assert capsys.readouterr().err.count("all processes start again") == starts - 1


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("100000", 100_000), ("8G", 8 << 30), ("8GiB", 8 << 30), ("1.5g", 3 << 29), ("512 MB", 512 << 20), ("7b", 7)],
)
def test_sizes_are_read_as_people_write_them(monkeypatch, text, bytes_):
    made = config_of(monkeypatch, "server", "--scheduler", "tcp://127.0.0.1:1", "--memory", text)
    assert (memory_bytes(made.memory), made.slot_memory) == (bytes_, None)


@pytest.mark.slow
def test_several_workers_whose_data_fails_say_what_is_lost_and_what_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("".join(f"{i % 2} {i % 50}:1\n" for i in range(4000)) + "1 x:y\n")
    shoal, data = [sys.executable, "-m", "shoal"], ["--data", "bad", "--format", "libsvm", "--batch-size", "64"]
    launch = [*shoal, "launch", "--workers", "2", "--", *shoal, "train", "lr", "--cluster", "--quiet", *data]
    for more, text in (
        (["--output", "m"], r"fails after 1,\d+ examples, which are lost; --checkpoint-every keeps some of them"),
        (["--output", "k", "--checkpoint-every", "10"], r"fails after 1,\d+ examples; --resume continues from the"),
    ):
        done = subprocess.run([*launch, *more], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert re.search(text, done.stderr)
        assert "bad, line 4001" in done.stderr
    assert not Path("m").exists()
    assert Path("k").exists()
