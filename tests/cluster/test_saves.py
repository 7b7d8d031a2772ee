"""Saves on a cluster: what servers write side by side is what one process would have written, or nothing is."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cluster_standin
import shoal
from cluster_fakes import TIMEOUT, Wire, declare_dead, scheduler
from cluster_standin import cluster
from places import BUCKET, object_store, options
from processes import server_processes
from saved_pieces import (
    KEYS,
    SLOTS,
    chain,
    clocks,
    pieces_of,
    tables_of,
)
from shoal import checkpoint
from shoal.cluster.protocol import tasks
from shoal.cluster.server import save_task
from shoal.cluster.server import tasks as runner
from shoal.storage.local import LocalDir
from shoal.storage.open import open_dir
from stores import joined
from threads import refuse_threads


def same(folder: Path, other: Path) -> None:
    one, two = pieces_of(folder), pieces_of(other)
    assert one.keys() == two.keys()
    assert [key for key in one if one[key] != two[key]] == []


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.name.endswith(save_task.SLOT_FILE))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: a server was told to write, and it may."""
    begun, may = threading.Event(), threading.Event()
    write_slots = save_task.write_slots

    def wait(*given: Any, **how: Any) -> Any:
        begun.set()
        deadline = time.monotonic() + TIMEOUT
        while not may.wait(0.01):
            how["on_progress"](0)
            assert time.monotonic() < deadline
        return write_slots(*given, **how)

    monkeypatch.setattr(save_task, "write_slots", wait)
    yield begun, may
    may.set()


# ---- the same as a local save ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of one process: 0 is full, 1 and 2 are deltas, 3 is what they come to."""
    folder = tmp_path_factory.mktemp("alone")
    with shoal.local(slots=SLOTS, threads=1) as store:
        chain(store, folder)
        store.save(folder / "3")
    return folder


@pytest.mark.parametrize(("servers", "endpoints"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_any_number_of_servers_writes_the_bytes_of_a_local_save_while_pushes_go_on(
    alone: Path, servers: int, endpoints: int, held: Any, tmp_path: Path
) -> None:
    begun, may = held
    with cluster(servers, endpoints, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        clocks(store, 0, 3)
        handle = store.save(tmp_path / "0", track=True, wait=False)
        assert begun.wait(TIMEOUT)
        assert not (tmp_path / "0" / "manifest.json").exists()
        clocks(store, 3, 5)
        may.set()
        handle.result()
        same(tmp_path / "0", alone / "0")
        assert checkpoint.verify(tmp_path / "0").clock == 3
        store.save(tmp_path / "1", since=tmp_path / "0")
        same(tmp_path / "1", alone / "1")
        store.sweep()
        clocks(store, 5, 7)
        store.save(tmp_path / "2", since=tmp_path / "1", durable=False)
        same(tmp_path / "2", alone / "2")
        store.save(tmp_path / "3", tables=["wide"])
        digest = store.tables["wide"].digest()
    with shoal.local(slots=8) as store:
        store.load(tmp_path / "2")
        assert store.tables["wide"].digest() == digest
        store.load(tmp_path / "3")
        assert store.tables["wide"].digest() == digest
    shoal.checkpoint.compact(tmp_path / "2", tmp_path / "whole")
    same(tmp_path / "whole", alone / "3")


@pytest.mark.slow
def test_a_chain_of_one_process_goes_on_on_a_cluster_and_back(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    with cluster(3, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.load(tmp_path / "1", track=True)
        store.tables["wide"].push(KEYS[:30], np.ones((30, 3), np.float32))
        store.tick()
        store.tables["wide"].erase(KEYS[100:120])
        store.save(tmp_path / "here", since=tmp_path / "1")
        digest = store.tables["wide"].digest()
        store.load(tmp_path / "1")
        with pytest.raises(ValueError, match=r"the changes of table 'wide' since .* are not known: .* track=True"):
            store.save(tmp_path / "no", since=tmp_path / "1")
    with shoal.local(slots=SLOTS) as store:
        store.load(tmp_path / "here", track=True)
        assert store.tables["wide"].digest() == digest
        store.tables["wide"].push(KEYS[:3], np.ones((3, 3), np.float32)).result()
        store.save(tmp_path / "local", since=tmp_path / "here")
        digest = store.tables["wide"].digest()
    with cluster(2, slots=8) as made, joined(made.address, 1) as (store,):
        store.load(tmp_path / "local")
        assert store.tables["wide"].digest() == digest
    assert not (tmp_path / "no" / "manifest.json").exists()


@pytest.mark.slow
def test_all_servers_save_one_clock_of_all_workers(held: Any, tmp_path: Path) -> None:
    begun, may = held
    with cluster(2, 2, slots=16) as made, joined(made.address, 3, consistency=shoal.BSP()) as stores:
        tables = [store.table("t", optimizer=shoal.SGD(lr=1.0)) for store in stores]

        def clock() -> None:
            for store, table in zip(stores, tables, strict=True):
                table.push(KEYS, np.ones(len(KEYS), np.float32))
                store.tick()

        for _ in range(4):
            clock()
        handle = stores[1].save(tmp_path, wait=False)
        assert begun.wait(TIMEOUT)
        for _ in range(3):
            clock()
        may.set()
        handle.result()
        assert tables[0].pull(KEYS).ravel().tolist() == [-21.0] * len(KEYS)
    assert checkpoint.read_manifest(tmp_path).clock == 4
    with shoal.local() as store:
        store.load(tmp_path)
        assert store.tables["t"].pull(KEYS).ravel().tolist() == [-12.0] * len(KEYS)
        assert store.tables["t"].stats().step == 4


def test_a_save_waits_for_its_clock_and_sees_nothing_of_it(tmp_path: Path) -> None:
    with cluster(2, slots=16) as made, joined(made.address, 2, consistency=shoal.BSP()) as (one, two):
        table, _ = (store.table("t", optimizer=shoal.SGD(lr=1.0)) for store in (one, two))
        table.push(KEYS, np.ones(len(KEYS), np.float32))
        one.tick()
        table.push(KEYS, np.ones(len(KEYS), np.float32)).result()
        saving = threading.Thread(target=one.save, args=(tmp_path,))
        saving.start()
        services = [service for server in made.servers for service in server.services]
        until(lambda: all(service.metrics()["requests"].get("save begin", 0) for service in services))
        assert saving.is_alive()  # the other worker has not ended the clock before
        two.tick()
        saving.join(TIMEOUT)
    with shoal.local() as store:
        store.load(tmp_path)
        assert store.tables["t"].pull(KEYS[:2]).ravel().tolist() == [-1.0, -1.0]


def test_a_store_without_tables_is_saved_and_loaded(tmp_path: Path) -> None:
    with cluster(2, slots=16) as made, joined(made.address, 1) as (store,):
        store.tick()
        store.save(tmp_path / "nothing")
        store.load(tmp_path / "nothing")
    assert checkpoint.read_manifest(tmp_path / "nothing").tables == []
    assert checkpoint.read_manifest(tmp_path / "nothing").clock == 1


@pytest.mark.slow
def test_servers_write_to_an_object_store(tmp_path: Path) -> None:
    with object_store() as address, cluster(2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        clocks(store, 0, 2)
        store.save(f"s3://{BUCKET}/cluster", storage_options=options(address))
        digest = store.tables["wide"].digest()
        names = open_dir(f"s3://{BUCKET}/cluster", options(address)).names()
        assert {name.split("-")[2] for name in names if "-" in name} == {"0", "16"}
        assert not [name for name in names if "look" in name]
        with shoal.local() as other:
            other.load(f"s3://{BUCKET}/cluster", storage_options=options(address))
            assert other.tables["wide"].digest() == digest
        with pytest.raises(TypeError, match="storage_options are sent to the servers"):
            store.save("memory://no", storage_options={"a": object()})


def test_without_shared_storage_the_worker_writes_all_rows(alone: Path, tmp_path: Path) -> None:
    with cluster(2, slots=SLOTS) as made, joined(made.address, 1, shared_storage=False) as (store,):
        for server in made.servers:
            for working in server._working:
                working.stop()  # nobody asks them
        clocks(store, 0, 3)
        store.save(tmp_path / "0")
        same(tmp_path / "0", alone / "0")
        for how in ({"track": True}, {"since": tmp_path / "0"}):
            with pytest.raises(ValueError, match="connected with shared_storage=False"):
                store.save(tmp_path / "1", **how)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_that_is_loaded_anew_or_swept_meanwhile_is_saved_as_it_was(
    alone: Path, held: Any, tmp_path: Path
) -> None:
    begun, may = held
    with cluster(2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        clocks(store, 0, 3)
        handle = store.save(tmp_path / "0", wait=False)
        assert begun.wait(TIMEOUT)
        store.load(alone / "2")
        may.set()
        handle.result()
        same(tmp_path / "0", alone / "0")
        # The rows that were loaded are another shard's: a save of them is free to begin.
        store.save(tmp_path / "1")
    with shoal.local() as store:
        store.load(tmp_path / "1")
        digest = store.tables["wide"].digest()
        store.load(alone / "2")
        assert store.tables["wide"].digest() == digest


@contextlib.contextmanager
def two_workers(held: Any, folder: Path) -> Iterator[tuple[Any, Any]]:
    """A worker whose save the servers have begun to write, and another one."""
    begun, _ = held
    with cluster(2, slots=16) as made, joined(made.address, 2, consistency=shoal.ASP()) as (one, two):
        for store in (one, two):
            tables_of(store)
        handle = one.save(folder, wait=False)
        assert begun.wait(TIMEOUT)
        yield two, handle


def test_of_two_workers_that_save_at_once_one_is_told(held: Any, tmp_path: Path) -> None:
    _, may = held
    with two_workers(held, tmp_path / "one") as (two, handle):
        with pytest.raises(
            shoal.errors.SaveConflictError, match=r"worker 0 is saving these tables, as server 0 at tcp://"
        ):
            two.save(tmp_path / "two")
        may.set()
        handle.result()
        two.save(tmp_path / "two")
    assert checkpoint.verify(tmp_path / "two").tables


@pytest.mark.slow
def test_a_server_whose_disk_refuses_leaves_the_checkpoint_that_was_there(
    alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_slots = save_task.write_slots

    def fail(place: Any, stems: Any, version: Any, taken: Any, slots: list[int], *given: Any, **how: Any) -> Any:
        written = write_slots(place, stems, version, taken, slots, *given, **how)
        if slots[0]:
            raise shoal.errors.StorageError("the disk is full: make room")
        return written

    with cluster(2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        clocks(store, 0, 3)
        store.save(tmp_path, track=True)
        before = leftovers(tmp_path)
        clocks(store, 3, 4)
        with monkeypatch.context() as patch:
            patch.setattr(save_task, "write_slots", fail)
            with pytest.raises(shoal.errors.StorageError, match=r"^server 1 at tcp://127.0.0.1:\d+: the disk is full"):
                store.save(tmp_path, overwrite=True)
            with pytest.raises(shoal.errors.StorageError, match="server 1 at"):
                store.save(tmp_path / "delta", since=tmp_path)
        assert leftovers(tmp_path) == before
        assert leftovers(tmp_path / "delta") == []
        same(tmp_path, alone / "0")
        # What had changed before the save that failed counts still.
        clocks(store, 4, 5)
        store.save(tmp_path / "delta", since=tmp_path)
        assert pieces_of(tmp_path / "delta") == pieces_of(alone / "1")


@pytest.mark.slow
def test_a_place_that_a_server_does_not_see_is_found_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tasks, "VISIBILITY_SECONDS", 0.2)
    written: list[Any] = []
    monkeypatch.setattr(save_task, "write_slots", lambda *given, **how: written.append(given))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen = []

    def other_place(where: str, given: Any) -> Any:
        seen.append(where)
        return open_dir(where if len(seen) % 2 else elsewhere, given)

    with cluster(2, slots=16) as made, joined(made.address, 1) as (store,):
        tables_of(store)
        monkeypatch.setattr(runner, "open_dir", other_place)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(shoal.errors.StorageError) as caught:
            store.save("here")
        assert seen == [str(tmp_path / "here")] * 2  # the whole path: a server's directory is another
    assert "server" in str(caught.value)
    assert f"does not see {tmp_path / 'here'}" in str(caught.value)
    assert "all machines share" in str(caught.value)
    assert leftovers(tmp_path / "here") == leftovers(elsewhere) == written == []


@pytest.mark.slow
def test_what_a_dead_worker_held_is_waited_for_until_the_servers_know_it_is_dead(
    held: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, may = held
    with two_workers(held, tmp_path / "one") as (two, handle):
        two.member.gone[two.member.job, 0] = None  # as it hears before the servers do
        monkeypatch.setattr(type(two.channel.client), "timeout", 0.3)
        with pytest.raises(shoal.errors.SaveConflictError, match="worker 0 is saving these tables"):
            two.save(tmp_path / "two")  # they never hear
        monkeypatch.undo()
        threading.Timer(0.2, may.set).start()
        two.save(tmp_path / "two")
        handle.result()
    assert checkpoint.verify(tmp_path / "two").tables


def test_a_worker_that_dies_is_not_waited_for(held: Any, tmp_path: Path) -> None:
    begun, may = held
    with cluster(2, slots=16) as made, contextlib.ExitStack() as stack:
        one, two = stack.enter_context(joined(made.address, 2, consistency=shoal.ASP()))
        for store in (one, two):
            tables_of(store)
        handle = one.save(tmp_path / "one", wait=False)
        assert begun.wait(TIMEOUT)
        one._scheduler.close()  # as if its process had gone
        declare_dead(made.scheduler, "worker", 0)
        until(lambda: 0 in two.member.lost_workers)
        may.set()
        two.save(tmp_path / "two")
        with pytest.raises(shoal.ShoalError):
            handle.result()
        one._open = False  # nobody says goodbye for it
        one._finalizer.detach()
        one._closing.close()
    assert not (tmp_path / "one" / "manifest.json").exists()
    assert checkpoint.verify(tmp_path / "two").tables


@pytest.mark.slow
def test_a_server_that_is_cut_off_fails_the_save_by_name(
    alone: Path, monkeypatch: pytest.MonkeyPatch, held: Any, tmp_path: Path
) -> None:
    begun, may = held
    wires = []

    def through_a_wire(service: Any, context: Any, address: str, **how: Any) -> Any:
        loop = start_loop(service, context, address, **how)
        wires.append(Wire(loop.address))

        class Far:
            address = wires[-1].address
            stop = staticmethod(loop.stop)

        return Far

    start_loop = cluster_standin.start_loop
    monkeypatch.setattr(cluster_standin, "start_loop", through_a_wire)
    with cluster(2, slots=SLOTS) as made, joined(made.address, 1, timeout=4.0) as (store,):
        clocks(store, 0, 3)
        may.set()
        store.save(tmp_path)
        before = leftovers(tmp_path)
        may.clear()
        begun.clear()
        handle = store.save(tmp_path, wait=False, overwrite=True)
        assert begun.wait(TIMEOUT)
        wires[1].cut()
        with pytest.raises(shoal.errors.DeadlineExceededError, match=rf"server 1 at {wires[1].address}"):
            handle.result()
        wires[1].mend()
        same(tmp_path, alone / "0")

        def saves_begun() -> int:
            (service,) = made.servers[1].services
            return service.metrics()["requests"]["save begin"]

        earlier = saves_begun()
        again = store.save(tmp_path / "again", wait=False)
        until(lambda: saves_begun() > earlier)  # which ends the save that it was not told to give up
        may.set()
        again.result()
        same(tmp_path / "again", alone / "0")
        until(lambda: leftovers(tmp_path) == before)
    for wire in wires:
        wire.close()


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_is_killed_fails_the_save_by_name(tmp_path: Path) -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    ones = np.ones((len(keys), 16), np.float32)
    with (
        server_processes(2, storage_roots=[tmp_path]) as made,
        shoal.connect(made.address, consistency=shoal.ASP(), timeout=TIMEOUT) as store,
    ):
        table = store.table("t", dim=16, optimizer=shoal.SGD(lr=1.0))
        table.assign(keys, ones)
        store.save(tmp_path)
        before = (tmp_path / "manifest.json").read_bytes()
        table.push(keys, ones).result()
        handle = store.save(tmp_path, wait=False, overwrite=True)
        made.servers[1].process.kill()
        declare_dead(made.scheduler, "server", 1)
        with pytest.raises(shoal.errors.ServerLostError, match="server 1 at"):
            handle.result()
        assert (tmp_path / "manifest.json").read_bytes() == before
    with shoal.local() as store:
        store.load(tmp_path)
        assert np.all(store.tables["t"].pull(keys) == 1)
        store.save(tmp_path, overwrite=True)  # which removes whatever was left
    assert len({name.split("-")[0] for name in leftovers(tmp_path)}) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_a_server_that_may_not_write_there_is_named_before_anything_is_written() -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        server_of_nobody() as address,
        shoal.connect(address, consistency=shoal.ASP(), timeout=TIMEOUT) as store,
    ):
        Path(name).chmod(0o755)  # who is nobody sees what is there
        store.table("t").push(KEYS, np.ones(len(KEYS), np.float32)).result()
        with pytest.raises(shoal.errors.StorageError, match=r"server 0 at tcp.* cannot be written: Permission denied"):
            store.save(name)
        assert leftovers(Path(name)) == []


@contextlib.contextmanager
def server_of_nobody() -> Iterator[str]:
    """A cluster whose server is a process of another user: the scheduler's address."""
    with scheduler(1) as one:
        code = (
            "import os, sys; from shoal.cluster.server.server import Server; from shoal.config import ServerConfig; "
            "server = Server(ServerConfig(scheduler=sys.argv[1], storage_roots=['/'])); "
            "os.seteuid(65534); server.run()"
        )
        command = [sys.executable, "-c", code, one.address]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                yield one.address
            finally:
                server.kill()


def test_a_check_of_the_storage_that_is_killed_does_not_keep_a_model_from_its_directory(tmp_path, monkeypatch):
    """Its file is left where the model will be; one that a server makes for the check is left as well."""
    place = tmp_path / "model"
    place.mkdir()
    with cluster(2, 1, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.table("any")
        with monkeypatch.context() as patch:
            patch.setattr(LocalDir, "remove", lambda self, name: None)
            store.check_storage(place)
        (left,) = place.iterdir()
        shutil.copy(left, place / left.name.replace("-look", "-17-look"))
        with shoal.LogisticRegression(store=store) as model:
            model.partial_fit(shoal.Batch(np.array([1, 0], np.float32), np.array([0, 2, 4]), KEYS[:4], None))
            model.save(place)
    assert not [path for path in place.iterdir() if "look" in path.name]
    with shoal.LogisticRegression.load(place) as model:
        assert model.examples == 2


def test_a_server_that_can_start_no_thread_refuses_a_save_and_carries_out_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(1, 2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.table("t").push(KEYS, np.ones(len(KEYS), np.float32))
        store.tick()
        with monkeypatch.context() as patched:
            refuse_threads(patched, lambda thread: thread.name == "shoal-task")
            with pytest.raises(shoal.ShoalError, match="cannot begin a save or load: can't start new thread"):
                store.save(tmp_path / "model")
        store.save(tmp_path / "model")
    with shoal.local() as alone:
        alone.load(tmp_path / "model")
        assert len(alone.tables["t"]) == len(KEYS)
