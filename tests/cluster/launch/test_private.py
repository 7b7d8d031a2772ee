"""The sockets of a launch: in a directory that only its user can enter, and that does not stay behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from shoal.cli import main
from shoal.cluster.launch.local_cluster import LocalCluster, running
from shoal.cluster.protocol import private
from shoal.cluster.protocol.address import all_refuse, answers, check, complete, own_host, socket_path, try_out
from shoal.cluster.protocol.private import is_private, make_private, remove_private
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig
from shoal.errors import NotConnectedError, StorageError

KEYS = np.arange(100, dtype=np.uint64)
GRADS = np.ones((100, 2), np.float32)
_CONNECT = """
import os, socket, sys
tried, user = socket.socket(socket.AF_UNIX), int(sys.argv[2])
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
tried.connect(sys.argv[1])
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Make directories in a place of temporary files of which the test sees all."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:  # pytest's are long
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def table_of(store: shoal.Store) -> shoal.Table:
    return store.table("user", dim=2, optimizer=shoal.SGD(lr=1.0))


def sockets_of(cluster: LocalCluster) -> list[Path]:
    """The paths of all addresses at which the processes of a cluster listen."""
    endpoints = [endpoint for server in cluster.status()["servers"] for endpoint in server["endpoints"]]
    found = [socket_path(address) for address in (cluster.address, *(one["address"] for one in endpoints))]
    return [Path(path) for path in found if path is not None]


def test_all_sockets_are_in_one_directory_of_the_user_which_ends_with_the_launch(places):
    with running(2, threads=2) as cluster:
        sockets = sockets_of(cluster)
        assert len(sockets) == 1 + 2 * 2
        (directory,) = {path.parent for path in sockets}
        assert directory.parent == places
        state = directory.stat()
        assert (stat.S_IMODE(state.st_mode), state.st_uid) == (0o700, os.geteuid())
        for role in cluster.roles:
            assert tcp_ports(role.process.pid) == []
    assert list(places.iterdir()) == []


def tcp_ports(pid: int) -> list[str]:
    """The addresses at which a process listens by TCP, as Linux writes them."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().split("\n")
    ]
    return [words[1] for words in lines if len(words) > 9 and words[3] == "0A" and f"socket:[{words[9]}]" in links]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_cannot_connect(places):
    places.chmod(0o755)  # else it would not even come here
    with running() as cluster:
        for path in sockets_of(cluster):
            tried = [
                subprocess.run(
                    [sys.executable, "-S", "-E", "-c", _CONNECT, path, str(user)],
                    timeout=TIMEOUT,
                    stderr=subprocess.PIPE,
                    text=True,
                ).stderr
                for user in (os.geteuid(), 65534)
            ]
            assert tried[0] == ""
            assert "PermissionError: [Errno 13]" in tried[1]


@pytest.mark.slow
def test_two_launches_at_once_do_not_meet(places):
    with shoal.launch(2) as one, shoal.launch(2) as other:
        assert len(list(places.iterdir())) == 2
        for store, value in ((one, 1.0), (other, 2.0)):
            table_of(store).push(KEYS, value * GRADS).result(TIMEOUT)
            store.tick()
        assert np.all(table_of(one).pull(KEYS) == -1)
        assert np.all(table_of(other).pull(KEYS) == -2)
    assert list(places.iterdir()) == []


@pytest.mark.slow
def test_who_has_sockets_of_the_user_may_save_anywhere(places, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with shoal.launch() as store:
        table_of(store).push(KEYS, GRADS).result(TIMEOUT)
        store.save(tmp_path / "there")
        store.load(tmp_path / "there")
    with shoal.launch(storage_roots=["."]) as store:
        table_of(store)
        with pytest.raises(StorageError, match="is outside of"):
            store.save(tmp_path / "no")
    for settings in ({"address": "tcp://127.0.0.1:*"}, {"bind": "tcp://127.0.0.1:*"}):  # others reach the cluster
        with running(**settings) as cluster, shoal.connect(cluster.address, workers=1, rank=0) as store:
            table_of(store)
            with pytest.raises(StorageError, match="is outside of"):
                store.save(tmp_path / "no")


def test_a_directory_for_temporary_files_with_a_long_path_is_not_used(places, monkeypatch):
    deep = places / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with shoal.launch() as store:
        assert table_of(store).pull(KEYS).shape == (100, 2)
        (directory,) = {Path(path).parent for path in map(socket_path, addresses(store)) if path}
        assert directory.parent == Path("/tmp")
        assert list(deep.iterdir()) == []
    assert not directory.exists()


def addresses(store: shoal.Store) -> list[str]:
    """The addresses of the servers of a store's cluster."""
    return [one["address"] for server in store.cluster()["servers"] for one in server["endpoints"]]


def test_without_a_place_for_sockets_the_processes_listen_at_ports(monkeypatch, tmp_path):
    monkeypatch.setattr(private, "_holds_sockets", lambda directory: False)
    with shoal.launch() as store:
        assert all(address.startswith("tcp://127.0.0.1:") for address in addresses(store))
        table_of(store)
        with pytest.raises(StorageError, match="is outside of"):
            store.save(tmp_path / "no")


def test_a_place_that_others_may_change_is_not_used(places):
    (places / "open").mkdir()
    (places / "open").chmod(0o777)
    assert not is_private(make_in(places / "open"))
    (places / "open").chmod(0o1777)  # others cannot rename what is not theirs
    assert is_private(make_in(places / "open"))


def make_in(place: Path) -> str:
    return tempfile.mkdtemp(dir=place)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o701, 0o710, 0o777])
def test_a_directory_that_others_may_enter_is_not_private(mode, places):
    directory = make_in(places)
    assert is_private(directory)
    os.chmod(directory, mode)
    assert not is_private(directory)


def test_a_link_a_file_nothing_and_what_another_user_owns_are_not_private(places, monkeypatch):
    directory = make_in(places)
    (places / "link").symlink_to(directory)
    (places / "file").touch(mode=0o600)
    assert not any(is_private(str(places / name)) for name in ("link", "file", "none"))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not is_private(directory)


def test_the_directory_made_is_removed_if_it_holds_no_sockets(places, monkeypatch):
    monkeypatch.setattr(private, "_holds_sockets", lambda directory: not directory.startswith(str(places)))
    directory = make_private()
    assert directory is not None
    assert os.path.dirname(directory) == "/tmp"
    remove_private(directory)
    assert list(places.iterdir()) == []


def test_a_scheduler_listens_where_one_has_died_and_not_where_one_lives(places):
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(places / "scheduler"))  # its file stays
    address = f"ipc://{places}/scheduler"
    assert all_refuse([address], TIMEOUT)
    assert not answers(address, TIMEOUT)
    with Scheduler(SchedulerConfig(bind=address, servers=1)) as scheduler:
        assert scheduler.address == address
        assert not all_refuse([address], TIMEOUT)
        assert try_out(address, TIMEOUT) is None
        with pytest.raises(OSError, match=f"cannot listen at {address}: .*another program listens there"):
            Scheduler(SchedulerConfig(bind=address, servers=1))
        assert try_out(address, TIMEOUT) is None
    (places / "scheduler").unlink(missing_ok=True)
    assert try_out(address, TIMEOUT) == "no such file or directory"
    assert not all_refuse([address], TIMEOUT)  # perhaps somebody has removed the file of one that lives


@pytest.mark.slow
def test_what_listens_at_a_path_need_not_be_a_server(places):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(places / "s"))
        other.listen(0)
        assert try_out(f"ipc://{places}/s", 0.2) == "no answer in 0.2 s"
        for _ in range(3):  # its queue is full
            try_out(f"ipc://{places}/s", 0.2)
        assert try_out(f"ipc://{places}/s", 0.2) == "no answer in 0.2 s"


def test_a_scheduler_listens_in_no_directory_that_others_may_enter(places):
    places.chmod(0o755)
    config = SchedulerConfig(bind=f"ipc://{places}/scheduler", servers=1)
    with pytest.raises(
        ValueError, match=f"other users may enter {places}: choose a directory of your own of mode 0700"
    ):
        Scheduler(config)
    with Scheduler(SchedulerConfig(bind=config.bind, servers=1, insecure=True)) as scheduler:
        assert scheduler.address == config.bind


@pytest.mark.parametrize(
    "address", ["ipc://", "ipc://a/b", "ipc:///", "ipc:///a/", "ipc:///a\n", "ipc://@a", "ipc://*"]
)
def test_what_is_no_address_of_a_socket(address):
    with pytest.raises(ValueError, match="is not an address"):
        check(address)


def test_a_socket_s_address_is_complete_and_of_this_machine():
    check("ipc:///a/b c/é")
    assert complete("ipc:///a/b", "10.0.0.7") == "ipc:///a/b"
    assert own_host("ipc:///a/b") == "127.0.0.1"
    assert try_out(f"ipc:///{'a' * 200}", 1.0) is not None


@pytest.mark.slow
def test_the_cluster_works_on_when_its_directory_is_removed(places):
    with running(2) as cluster, shoal.connect(cluster.address, workers=1, rank=0, consistency="asp") as store:
        table = table_of(store)
        table.pull(KEYS)  # connects
        remove_private(str(sockets_of(cluster)[0].parent))
        table.push(KEYS, GRADS).result(TIMEOUT)
        assert np.all(table.pull(KEYS) == -1)
        with pytest.raises(NotConnectedError, match=f"no scheduler answers at {cluster.address}"):
            shoal.connect(cluster.address, workers=1, rank=0, timeout=0.5)
    assert list(places.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_launcher_that_is_killed_leaves_no_directory_behind(whole, places, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(places))
    code = "import shoal, time\nwith shoal.launch(2) as store: print(store.rank, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline()
        assert len(list(places.iterdir())) == 1
        (os.killpg if whole else os.kill)(launcher.pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT
    while list(places.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_commands_take_the_address_of_a_socket(places, capsys):
    with running(servers=1) as cluster:
        assert main(["cluster", cluster.address, "status"]) == 0
        assert f"cluster {cluster.status()['cluster']} at {cluster.address}" in capsys.readouterr().out
        assert main(["doctor", cluster.address]) in (0, 1)  # of the machine it may find something
        said = capsys.readouterr().out
        assert f"{cluster.address}: 1 of 1 servers" in said
        assert "server-" in said
        assert "answers after" in said
    assert main(["doctor", cluster.address, "--timeout", "0.2"]) == 1
    assert "remedy: start it, as the same user of the same machine" in capsys.readouterr().out
