"""The commands of a cluster's roles: what they take from their arguments and from Volcano, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.cli import main

VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "3", "VC_SERVER_NUM": "2", "VC_SCHEDULER_HOSTS": "scheduler-0.job"}


class Caught(Exception):
    pass


def catching(monkeypatch, name):
    """Put something in place of a role that only tells what it was made with."""
    made = {}

    def make(address, **settings):
        made.update(settings, address=address)
        raise Caught

    monkeypatch.setattr(name, make)
    return made


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["scheduler", "--bind", "tcp://127.0.0.1:*"], "requires the number of servers: pass --servers N"),
        (["scheduler", "--servers", "2"], "pass --bind tcp://HOST:5570"),
        (["scheduler", "--servers", "0", "--bind", "tcp://127.0.0.1:*"], "got 0 and 1"),
        (["scheduler", "--servers", "1", "--bind", "127.0.0.1"], "write tcp://HOST:PORT"),
        (["scheduler", "--servers", "1", "--slots", "5", "--bind", "tcp://127.0.0.1:*"], "power of two"),
        (
            ["scheduler", "--servers", "1", "--heartbeat", "0", "--bind", "tcp://127.0.0.1:*"],
            "'0' is not a number of seconds above 0",
        ),
        (["server"], "pass --connect tcp://HOST:PORT"),
        (["server", "--connect", "tcp://127.0.0.1:1", "--threads", "0"], "at least one thread"),
        (["server", "--connect", "tcp://127.0.0.1"], "write tcp://HOST:PORT"),
        (["server", "--connect", "tcp://127.0.0.1:1", "--memory", "much"], "'much' is not a size: write it as 8GiB"),
        (["server", "--connect", "tcp://127.0.0.1:1", "--memory", "-1G"], "--memory"),
        (["server", "--connect", "tcp://127.0.0.1:1", "--storage-root", ""], "a storage root is empty"),
        (["server", "--storage-option", "endpoint_url"], "'endpoint_url' is not NAME=VALUE"),
        (["server", "--memory", "1G", "--slot-memory", "1M"], "not allowed with argument --memory"),
        (
            ["scheduler", "--servers", "2", "--replicas", "2", "--bind", "tcp://127.0.0.1:*"],
            "replicas must be a number from 0 to 1",
        ),
        (["scheduler", "--servers", "2", "--copy-rate", "fast"], "'fast' is not a size: write it as 8GiB"),
        (["launch", "--memory", "1000", "train.py"], "at least 1048576 bytes for 1024 slots, got 1000"),
        (["launch", "--servers", "0", "train.py"], "--servers 0 --workers 1: pass 1 or more of each"),
        (["launch", "--workers", "0", "train.py"], "--servers 1 --workers 0"),
        (["launch", "--restarts", "-1", "train.py"], "--restarts -1: pass 0 or more"),
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
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    given = ["--storage-root", "/a", "--storage-root=s3://b", "--storage-option", "endpoint_url=http://minio:9000"]
    with pytest.raises(Caught):
        main(["server", "--connect", "tcp://127.0.0.1:1", *given, "--storage-option", 'client_kwargs={"x": 1}'])
    assert made["storage_roots"] == ["/a", "s3://b"]
    assert made["storage_options"] == {"endpoint_url": "http://minio:9000", "client_kwargs": {"x": 1}}


def test_a_scheduler_is_told_of_copies_and_how_fast_they_are_made(monkeypatch):
    made = catching(monkeypatch, "shoal.cluster.scheduler.scheduler.Scheduler")
    with pytest.raises(Caught):
        main(["scheduler", "--bind", "tcp://127.0.0.1:*", "--servers", "2", "--replicas", "1", "--copy-rate", "5MiB"])
    assert (made["replicas"], made["copy_rate"]) == (1, 5 << 20)
    with pytest.raises(Caught):
        main(["scheduler", "--bind", "tcp://127.0.0.1:*", "--servers", "2"])
    assert (made["replicas"], made["copy_rate"]) == (0, 32 << 20)


def test_a_server_states_its_node_by_an_option_or_the_environment(monkeypatch):
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    for arguments, variable, node in [([], "", None), ([], "pod-7", "pod-7"), (["--node", "rack"], "pod-7", "rack")]:
        monkeypatch.setenv("SHOAL_NODE", variable)
        with pytest.raises(Caught):
            main(["server", "--connect", "tcp://127.0.0.1:1", *arguments])
        assert made["node"] == node


def test_a_server_is_a_spare_only_if_it_is_asked_to_be(monkeypatch):
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    for arguments, spare in (([], False), (["--spare"], True)):
        with pytest.raises(Caught):
            main(["server", "--connect", "tcp://127.0.0.1:1", *arguments])
        assert made["spare"] is spare


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
    made = catching(monkeypatch, "shoal.cluster.scheduler.scheduler.Scheduler")
    with pytest.raises(Caught):
        main(["scheduler"])
    assert (made["address"], made["servers"], made["workers"]) == ("tcp://*:5570", 2, 3)
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    with pytest.raises(Caught):
        main(["server"])
    assert (made["address"], made["rank"], made["threads"]) == ("tcp://scheduler-0.job:5570", 1, 1)


def test_what_is_given_comes_before_what_volcano_says(monkeypatch):
    for name, value in VOLCANO.items():
        monkeypatch.setenv(name, value)
    made = catching(monkeypatch, "shoal.cluster.scheduler.scheduler.Scheduler")
    with pytest.raises(Caught):
        main(["scheduler", "--bind", "tcp://10.0.0.1:7", "--servers", "5", "--workers", "6"])
    assert (made["address"], made["servers"], made["workers"]) == ("tcp://10.0.0.1:7", 5, 6)
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    with pytest.raises(Caught):
        main(["server", "--connect", "tcp://10.0.0.1:7", "--rank", "0"])
    assert (made["address"], made["rank"]) == ("tcp://10.0.0.1:7", 0)


def test_too_many_workers_under_mpirun_are_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "SIZE": "5", "LOCAL_SIZE": "5"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["launch", "--servers", "2", "--workers", "3", "train.py"]) == 2
    assert "which leaves 2 for workers: leave --workers out" in capsys.readouterr().err


def test_without_a_word_of_where_the_scheduler_is_mpirun_on_many_machines_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "SIZE": "5", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["launch", "--servers", "2", "train.py"]) == 2
    assert "pass --connect tcp://HOST:5570" in capsys.readouterr().err


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
    made = catching(monkeypatch, "shoal.cluster.server.server.Server")
    with pytest.raises(Caught):
        main(["server", "--connect", "tcp://127.0.0.1:1", "--memory", text])
    assert (made["memory"], made["slot_memory"]) == (bytes_, None)
