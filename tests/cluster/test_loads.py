"""Loads on a cluster: what servers read side by side is what one process would have read, or nothing is changed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tqdm import tqdm

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import Cluster, cluster
from places import BUCKET, options
from processes import server_processes
from saved_pieces import KEYS, SLOTS, chain, clocks, pieces_of, tables_of
from shoal import checkpoint
from shoal.cluster.protocol import tasks
from shoal.cluster.server import load_task
from shoal.cluster.server import tasks as runner
from shoal.cluster.worker import tasks as coordination
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.cluster.worker.remote_load import RemoteLoadTarget
from shoal.errors import (
    CorruptionError,
    DeadlineExceededError,
    MemoryBudgetExceededError,
    ProtocolError,
    ServerLostError,
    ShoalError,
    StorageError,
)
from shoal.storage.local import LocalDir
from shoal.storage.open import open_dir
from stores import joined
from tiers import long_after


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Checkpoints of one process by their number of slots: 0 is full, 1 and 2 are deltas, "anew" is 2 in others."""
    made: dict[int, Path] = {}

    def of(slots: int) -> Path:
        if slots not in made:
            made[slots] = folder = tmp_path_factory.mktemp(f"of-{slots}")
            with shoal.local(slots=slots, threads=1) as store:
                chain(store, folder)
            with shoal.local(slots=SLOTS, threads=1) as store:
                store.load(folder / "2")
                store.save(folder / "anew")
        return made[slots]

    return of


def requests(made: Cluster) -> dict[str, int]:
    """How many of each there were at all endpoints."""
    counts: dict[str, int] = {}
    for server in made.servers:
        for service in server.services:
            for name, count in service.metrics()["requests"].items():
                counts[name] = counts.get(name, 0) + count
    return counts


def waiting(store: shoal.Store) -> dict[str, tuple[int, int]]:
    return {name: (len(table), table.stats().waiting) for name, table in store.tables.items()}


@contextlib.contextmanager
def one_cluster(workers: int = 1, **how: Any) -> Iterator[tuple[Cluster, list[Any]]]:
    with cluster(2, slots=SLOTS, **how) as made, joined(made.address, workers, consistency=shoal.ASP()) as stores:
        yield made, stores


def fails_at_the_second(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have server 1 fail when both have read all of it: a server that still reads keeps its rows a little longer."""
    fill = load_task.restore_tables
    both = threading.Barrier(2)

    def some(histories: Any, rows: Any, *given: Any) -> Any:
        counts = fill(histories, rows, *given)
        both.wait(TIMEOUT)
        if rows[0]._session.slots[0]:
            raise error
        return counts

    monkeypatch.setattr(load_task, "restore_tables", some)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: a server was told to read, and it may."""
    begun, may = threading.Event(), threading.Event()
    fill = load_task.restore_tables

    def wait(histories: Any, rows: Any, threads: int, reported: Any) -> Any:
        begun.set()
        deadline = time.monotonic() + TIMEOUT
        while not may.wait(0.01):
            reported(0)
            assert time.monotonic() < deadline
        return fill(histories, rows, threads, reported)

    monkeypatch.setattr(load_task, "restore_tables", wait)
    yield begun, may
    may.set()


# ---- the same as a local load ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "endpoints", "slots"),
    long_after(
        3,
        [
            *((1, 1, 4), (2, 2, SLOTS), (3, 1, 256)),
            *((1, 1, SLOTS), (1, 1, 256), (2, 2, 4), (2, 2, 256), (3, 1, 4), (3, 1, SLOTS)),
        ],
    ),
)
def test_any_number_of_servers_reads_a_chain_of_any_number_of_slots_as_a_local_load_does(
    chains: Any, slots: int, servers: int, endpoints: int, tmp_path: Path
) -> None:
    folder = chains(slots)
    with shoal.local(slots=SLOTS) as alone:
        alone.load(folder / "2")
        expected = waiting(alone)
    assert expected["ruled"][1] == 0  # its filter counts nothing by key
    with cluster(servers, endpoints, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.load(folder / "2", track=True)
        assert waiting(store) == expected
        store.save(tmp_path)
        counts = requests(made)
        assert "load rows" not in counts
        assert "load filter" not in counts
    again, anew = pieces_of(tmp_path), pieces_of(folder / "anew")
    again.pop("clock"), anew.pop("clock")
    assert again == anew


@pytest.mark.slow
def test_a_server_opens_the_files_of_its_own_slots_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        clocks(store, 0, 2)
        store.save(tmp_path)
        digest = store.tables["wide"].digest()
    opened: list[str] = []
    opens = LocalDir.open

    def noted(place: Any, name: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            opened.append(name)
        return opens(place, name)

    monkeypatch.setattr(LocalDir, "open", noted)
    with one_cluster() as (_, (store,)):
        store.load(tmp_path)
        assert store.tables["wide"].digest() == digest
    # Names end with the table, the first slot of who wrote it, and a number. Looked at once, then read.
    assert {name.split("-", 1)[1] for name in opened} == {"0-0-0.slots", "1-0-0.slots", "0-16-0.slots", "1-16-0.slots"}
    assert all(opened.count(name) == 2 for name in opened)


def test_exact_counts_of_waiting_keys_are_restored_once(tmp_path: Path) -> None:
    with shoal.local(slots=4) as alone:
        table = alone.table("t", admit=shoal.AfterCount(3))
        table.push(KEYS, np.ones(len(KEYS), np.float32)).result()
        alone.save(tmp_path)
    with cluster(3, slots=SLOTS) as made, joined(made.address, 1) as (store,):
        store.load(tmp_path)
        assert waiting(store) == {"t": (0, len(KEYS))}
        for _ in range(2):
            store.tables["t"].push(KEYS, np.ones(len(KEYS), np.float32))
            store.tick()
        assert waiting(store) == {"t": (len(KEYS), 0)}


def test_a_checkpoint_of_no_tables_is_loaded(tmp_path: Path) -> None:
    with shoal.local() as alone:
        alone.save(tmp_path)
    with one_cluster() as (_, (store,)):
        store.load(tmp_path)
        assert dict(store.tables) == {}


@pytest.mark.slow
def test_rows_take_the_place_of_those_that_are_there_and_other_tables_stay(chains: Any) -> None:
    folder = chains(SLOTS)
    with shoal.local(slots=SLOTS) as alone:
        alone.load(folder / "0")
        digest = alone.tables["wide"].digest()
    with one_cluster() as (_, (store,)):
        clocks(store, 7, 9)
        other = store.table("other", optimizer=shoal.SGD(lr=1.0))
        other.push(KEYS, np.ones(len(KEYS), np.float32))
        store.tick()
        store.load(folder / "0")
        assert store.tables["wide"].digest() == digest
        assert np.all(other.pull(KEYS) == -1)


@pytest.mark.slow
def test_servers_read_from_an_object_store(chains: Any, s3: str, tmp_path: Path) -> None:
    root = f"s3://{BUCKET}/{tmp_path.name}"
    with shoal.local(slots=8) as alone:
        how = {"storage_options": options(s3)}
        alone.load(chains(8) / "2")
        alone.save(f"{root}/full", track=True, **how)
        alone.tables["wide"].push(KEYS[:9], np.ones((9, 3), np.float32)).result()
        alone.save(f"{root}/delta", since=f"{root}/full", **how)
        with one_cluster() as (made, (store,)):
            store.load(f"{root}/delta", **how)
            assert store.tables["wide"].digest() == alone.tables["wide"].digest()
            assert "load rows" not in requests(made)


@pytest.mark.slow
def test_without_shared_storage_worker_0_sends_all_rows(chains: Any) -> None:
    with shoal.local(slots=SLOTS) as alone:
        alone.load(chains(4) / "2")
        digest, counts = alone.tables["wide"].digest(), waiting(alone)
    with cluster(2, slots=SLOTS) as made, joined(made.address, 1, shared_storage=False) as (store,):
        for server in made.servers:
            for working in server._working:
                working.stop()  # nobody asks them
        store.load(chains(4) / "2")
        assert (store.tables["wide"].digest(), waiting(store)) == (digest, counts)
        assert "save begin" not in requests(made)


def test_workers_of_different_clocks_load_together(chains: Any) -> None:
    folder = chains(SLOTS)  # before the threads: the first call writes it
    with cluster(2, slots=SLOTS) as made, joined(made.address, 2, consistency=shoal.BSP()) as stores:

        def work(store: Any) -> int:
            tables_of(store)
            if store.rank == 0:
                store.tick()
            store.load(folder / "0")
            if store.rank == 1:
                store.tick()
            return len(store.tables["wide"])

        with ThreadPoolExecutor(2) as pool:
            rows = set(pool.map(work, stores))
    assert rows == {checkpoint.read_manifest(folder / "0").tables[0].rows}


def test_the_bar_counts_the_rows_of_all_servers(chains: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar(tqdm):  # type: ignore[misc, name-defined]
        def close(self) -> None:
            if self not in bars:
                bars.append(self)
            super().close()

    monkeypatch.setattr("tqdm.tqdm", Bar)
    with one_cluster() as (_, (store,)):
        store.load(chains(SLOTS) / "2", progress=True)
    (bar,) = bars
    assert bar.n == bar.total == sum(table.size for table in checkpoint.read_manifest(chains(SLOTS) / "2").tables) > 0


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["nothing", "another"])
def test_a_server_that_does_not_see_the_checkpoint_is_named_before_anything_is_changed(
    chains: Any, elsewhere: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tasks, "VISIBILITY_SECONDS", 0.2)
    folder = chains(SLOTS)
    if elsewhere == "another":
        with shoal.local(slots=SLOTS) as alone:
            clocks(alone, 0, 1)
            alone.save(tmp_path)
    read: list[Any] = []
    monkeypatch.setattr(load_task, "restore_tables", lambda *given: read.append(given))
    with one_cluster(2) as (made, stores):
        for store in stores:
            clocks(store, 0, 1)
        digest = stores[0].tables["wide"].digest()
        seen = []

        def other_place(where: str, given: Any) -> Any:
            seen.append(where)
            return open_dir(where if len(seen) % 2 else tmp_path, given)

        monkeypatch.setattr(runner, "open_dir", other_place)
        monkeypatch.chdir(folder)

        def load(store: Any) -> Exception:
            with pytest.raises(ShoalError) as caught:
                store.load("2")
            return caught.value

        with ThreadPoolExecutor(2) as pool:
            zero, one = pool.map(load, stores)
        assert seen == [str(folder / "2")] * 2  # the whole path: a server's directory is another
        assert type(zero) is StorageError
        for text in ("server", f"worker 0 has found in {folder / '2'}", "that all machines share", str(tmp_path)):
            assert text in str(zero)
        assert ("with digest" if elsewhere == "another" else "is missing") in str(zero)
        assert "was not loaded: table 'wide' has" in str(one)
        assert "see the error of worker 0" in str(one)
        assert read == []
        for store in stores:
            assert store.tables["wide"].digest() == digest
        assert "load end" not in requests(made)


@pytest.mark.slow
def test_a_server_waits_until_it_sees_what_was_just_written(chains: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    read = LocalDir.read

    def late(place: Any, name: str, **how: Any) -> Any:
        if threading.current_thread().name == "shoal-task":
            calls.append(name)
            if len(calls) < 4:
                raise FileNotFoundError(name)
        return read(place, name, **how)

    monkeypatch.setattr(LocalDir, "read", late)
    with one_cluster() as (_, (store,)):
        store.load(chains(SLOTS) / "0")
        assert len(store.tables["wide"])
    assert len(calls) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        StorageError("the disk does not answer"),
        CorruptionError("0-0.slots is damaged"),
        MemoryBudgetExceededError("no room"),
        ImportError("install fsspec"),
        RuntimeError("what nobody expects"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_stops_one_server_stops_the_load_by_name_and_nothing_of_it_stays(
    chains: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chains(SLOTS)
    with one_cluster(slot_memory=[200_000, 200_000]) as (made, (store,)):
        clocks(store, 0, 1)
        digest = store.tables["wide"].digest()
        with monkeypatch.context() as patch:
            fails_at_the_second(patch, error)
            kind = ShoalError if isinstance(error, RuntimeError) else type(error)
            with pytest.raises(kind, match=rf"^server 1 at tcp://127.0.0.1:\d+: .*{error}"):
                store.load(folder / "2")
        assert store.tables["wide"].digest() == digest
        assert "load end" not in requests(made)
        for k in range(3):
            store.load(folder / str(k))
        loaded = store.tables["wide"].digest()
    with shoal.local(slots=SLOTS) as alone:
        alone.load(folder / "2")
        assert alone.tables["wide"].digest() == loaded


def test_rows_of_a_load_that_failed_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shoal.local(slots=SLOTS) as alone:
        table = alone.table("t", dim=16)
        table.assign(KEYS, np.ones((len(KEYS), 16), np.float32))
        alone.save(tmp_path)
        share = table.stats().bytes * 8 // 5 // SLOTS  # once what comes, not twice
    with one_cluster(slot_memory=[share] * 2) as (_, (store,)):
        with monkeypatch.context() as patch:
            fails_at_the_second(patch, StorageError("no"))
            for _ in range(3):
                with pytest.raises(StorageError, match="server 1 at"):
                    store.load(tmp_path)
        store.load(tmp_path)
        assert len(store.tables["t"]) == len(KEYS)


def test_a_damaged_file_is_named_by_the_server_that_reads_it(chains: Any, tmp_path: Path) -> None:
    with shoal.local(slots=SLOTS) as alone:
        alone.load(chains(SLOTS) / "0")
        alone.save(tmp_path)
    (slots,) = (path for path in tmp_path.glob("*-0-0.slots"))
    damaged = bytearray(slots.read_bytes())
    damaged[-70] ^= 1
    slots.write_bytes(damaged)
    with one_cluster() as (_, (store,)):
        with pytest.raises(CorruptionError, match=rf"^server 1 at tcp\S+ {slots} is damaged: the checksum of slot \d+"):
            store.load(tmp_path)
        assert len(store.tables["wide"]) == 0


def test_rows_that_are_not_what_the_manifest_says_are_refused(chains: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = load_task.restore_tables
    monkeypatch.setattr(load_task, "restore_tables", lambda *given: [rows // 2 for rows in fill(*given)])
    with one_cluster() as (_, (store,)):
        with pytest.raises(CorruptionError, match=r"table 'wide' adds up to \d+ rows instead of \d+"):
            store.load(chains(SLOTS) / "0")
        assert len(store.tables["wide"]) == 0


@pytest.mark.slow
def test_a_server_that_makes_no_progress_is_named(chains: Any, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "STALL_SECONDS", 0.3)
    with one_cluster() as (_, (store,)):
        tables_of(store)
        monkeypatch.setattr(type(store.channel.client), "timeout", 0.3)
        with pytest.raises(
            DeadlineExceededError, match=r"server 0 at tcp\S+ has made no progress with the load for \d+ s"
        ):
            store.load(chains(SLOTS) / "0")


@pytest.mark.parametrize("moved", [True, False])
def test_a_refusal_is_named_a_change_of_the_cluster_where_slots_have_moved(
    chains: Any, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    def refused(self: RemoteLoadTarget) -> None:
        raise ProtocolError("server 1 refused the load end: no load of this worker is under way")

    monkeypatch.setattr(RemoteLoadTarget, "finish", refused)
    with one_cluster() as (_, (store,)):
        map = store.channel.map
        newest = msgspec.structs.replace(map, epoch=map.epoch + moved)
        monkeypatch.setattr("shoal.cluster.worker.cluster_store.ask_map", lambda *_: newest)
        wanted = shoal.errors.ClusterChangedError if moved else ProtocolError
        with pytest.raises(wanted, match="slots have moved .* load again .*refused" if moved else "^server 1 refused"):
            store.load(chains(SLOTS) / "0")


@pytest.mark.slow
def test_a_load_whose_worker_dies_is_made_by_the_next_one(chains: Any, held: Any) -> None:
    begun, may = held
    with cluster(2, slots=SLOTS) as made, contextlib.ExitStack() as stack:
        zero, one = stack.enter_context(joined(made.address, 2, consistency=shoal.ASP()))
        for store in (zero, one):
            clocks(store, 0, 1)
        with ThreadPoolExecutor(2) as pool:
            loads = [pool.submit(store.load, chains(SLOTS) / "2") for store in (zero, one)]
            assert begun.wait(TIMEOUT)
            zero._scheduler.close()  # as if its process had gone
            declare_dead(made.scheduler, "worker", 0)
            with pytest.raises(ShoalError):
                loads[0].result(TIMEOUT)
            assert "load end" not in requests(made)
            may.set()
            loads[1].result(TIMEOUT)
        with shoal.local(slots=SLOTS) as alone:
            alone.load(chains(SLOTS) / "2")
            assert one.tables["wide"].digest() == alone.tables["wide"].digest()
        clocks(one, 1, 2)  # goes on
        zero._open = False  # nobody says goodbye for it
        zero._finalizer.detach()
        zero._closing.close()


@pytest.mark.slow
def test_no_worker_pushes_before_all_have_counted_the_loaded_rows(chains: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = threading.Event()
    check = ClusterStore._check_loaded

    def late(self: ClusterStore, *arguments: Any) -> None:
        pushed.wait(0.3)  # as long as worker 0 would need to go on
        check(self, *arguments)

    monkeypatch.setattr(ClusterStore, "_check_loaded", late)

    def load_and_push(store: Any) -> None:
        store.load(chains(SLOTS) / "2")
        if store.rank == 0:
            store.tables["wide"].push(np.array([2**63 + 7], np.uint64), np.ones((1, 3), np.float32))
            store.flush()
            pushed.set()

    with one_cluster(2) as (_, stores), ThreadPoolExecutor(2) as pool:
        list(pool.map(load_and_push, stores))


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_hangs_fails_the_load_in_every_worker(how: signal.Signals, tmp_path: Path) -> None:
    keys = np.arange(200_000, dtype=np.uint64)
    with shoal.local() as alone:
        alone.table("t", dim=16).assign(keys, np.ones((len(keys), 16), np.float32))
        alone.save(tmp_path)
    with (
        server_processes(2, storage_roots=[tmp_path]) as made,
        joined(made.address, 2, consistency=shoal.ASP()) as stores,
        ThreadPoolExecutor(2) as pool,
    ):
        loaded = threading.Barrier(3)

        def load(store: Any) -> None:
            store.load(tmp_path)
            loaded.wait(TIMEOUT)
            while True:  # one after the other, so that it dies in the middle of one
                store.load(tmp_path)

        loads = [pool.submit(load, store) for store in stores]
        loaded.wait(TIMEOUT)
        made.servers[1].process.send_signal(how)
        declare_dead(made.scheduler, "server", 1)
        try:
            for one in loads:
                with pytest.raises(ServerLostError, match="server 1 at"):
                    one.result(TIMEOUT)
        finally:
            made.servers[1].process.kill()
