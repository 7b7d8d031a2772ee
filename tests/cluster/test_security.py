"""Who gets into a cluster: those with its keys; without keys nobody from another machine, unless it was asked for."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.cluster.launch import local_cluster
from shoal.cluster.protocol.address import check_bind, is_loopback
from shoal.cluster.protocol.curve import make_keys
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.cluster.server.server import Server
from shoal.config import SchedulerConfig, ServerConfig
from shoal.errors import NotConnectedError

KEYS = np.arange(1000, dtype=np.uint64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    make_keys(folder)
    return folder


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "::ffff:127.0.0.1"])
def test_an_address_of_this_machine_alone_needs_no_keys(host):
    assert is_loopback(host)
    check_bind(f"tcp://[{host}]:5570" if ":" in host else f"tcp://{host}:5570", secured=False, insecure=False)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "*", "", "[::]", "10.0.0.1", "127.example.org", "localhost.example.org", "eth0", "[fe80::1%eth0]"],
)
def test_any_other_needs_keys_or_a_word(host):
    bind = f"tcp://{host}:5570"
    with pytest.raises(
        ValueError, match=r"shoal keygen --output DIR and pass --curve DIR \(curve=\), .* or pass --insecure"
    ):
        check_bind(bind, secured=False, insecure=False)
    check_bind(bind, secured=True, insecure=False)
    check_bind(bind, secured=False, insecure=True)


def test_scheduler_and_server_refuse_such_an_address_before_they_do_anything(folder):
    with pytest.raises(ValueError, match=r"tcp://0\.0\.0\.0:\* is reached from other machines"):
        Scheduler(SchedulerConfig(bind="tcp://0.0.0.0:*", servers=1))
    with pytest.raises(ValueError, match="is reached from other machines"):
        Server(ServerConfig(scheduler="tcp://127.0.0.1:1", bind="tcp://*:0", timeout=0.1))
    with pytest.raises(ValueError, match="is reached from other machines"):
        Server(
            ServerConfig(scheduler="tcp://scheduler.example:5570", timeout=0.1)
        )  # which would listen on all interfaces
    with Scheduler(SchedulerConfig(bind="tcp://0.0.0.0:*", servers=1, insecure=True)):
        pass
    with Scheduler(SchedulerConfig(bind="tcp://0.0.0.0:*", servers=1, curve=folder)):
        pass


def test_the_commands_refuse_it_too(capsys):
    assert cli.main(["scheduler", "--bind", "tcp://0.0.0.0:*", "--servers", "1"]) == 2
    assert "is reached from other machines" in capsys.readouterr().err
    assert cli.main(["server", "--scheduler", "tcp://10.0.0.1:5570"]) == 2
    assert "is reached from other machines" in capsys.readouterr().err
    role = [sys.executable, "-m", "shoal", "scheduler", "--bind", "tcp://0.0.0.0:*", "--servers", "1", "--insecure"]
    with subprocess.Popen(role, stdout=subprocess.PIPE, text=True) as process:
        assert "scheduler at tcp://0.0.0.0:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.slow
def test_a_cluster_with_keys_serves_those_who_have_them_and_nobody_else(folder, tmp_path):
    make_keys(tmp_path / "others")
    for role in ("scheduler", "server"):  # strangers who know whom they speak to
        (tmp_path / "others" / f"{role}.key").write_bytes((folder / f"{role}.key").read_bytes())
    with local_cluster.running(1, threads=2, curve=str(folder)) as cluster:
        with pytest.raises(NotConnectedError, match=r"does it require keys \(curve=\)\?"):
            shoal.connect(cluster.address, timeout=3.0)
        with pytest.raises(NotConnectedError, match=r"does it have the same keys\?"):
            shoal.connect(cluster.address, timeout=3.0, curve=tmp_path / "others")
        with shoal.connect(cluster.address, curve=folder) as store:
            table = store.table("t", dim=4, optimizer=shoal.SGD(lr=1.0))
            table.push(KEYS, np.ones((len(KEYS), 4), np.float32)).result()
            store.tick()
            assert (table.pull(KEYS) == -1).all()


@pytest.mark.slow
def test_a_program_that_is_launched_with_keys_finds_them(folder, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
            import numpy as np, os, shoal
            with shoal.connect() as store:
                table = store.table("t", dim=1, optimizer=shoal.SGD(lr=1.0))
                table.push(np.array([7], np.uint64), np.array([[2]], np.float32)).result()
                store.tick()
                print(table.pull(np.array([7], np.uint64)), os.environ["SHOAL_CURVE"])
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "launch", "--curve", os.path.relpath(folder), program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done
    assert f"[[-2.]] {folder}" in done.stdout


@pytest.mark.slow
def test_a_launched_store_uses_the_keys_of_the_environment(folder, monkeypatch):
    monkeypatch.setenv("SHOAL_CURVE", str(folder))
    with shoal.launch() as store:
        monkeypatch.delenv("SHOAL_CURVE")
        address = store._scheduler.address
        with pytest.raises(NotConnectedError, match="require keys"):
            shoal.connect(address, timeout=3.0)
        table = store.table("t", dim=1, optimizer=shoal.SGD(lr=1.0))
        assert (table.pull(KEYS) == 0).all()
