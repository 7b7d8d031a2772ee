"""Several named jobs on one cluster: each has its own workers, clocks and consistency, on separate or shared tables."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, FakeServer, scheduler
from cluster_standin import Cluster, cluster
from killed_workers import Calls, KilledError
from processes import server_processes
from shoal.cli import cluster_status, main
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.launch.workers import run_workers
from shoal.cluster.protocol.messages import (
    Barrier,
    BarrierReply,
    EndJob,
    JobConsistency,
    Join,
    Leave,
    LeaveReply,
    StartJob,
)
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.cluster.worker.cluster_store import ClusterStore

KEYS = np.arange(64, dtype=np.uint64)
SMALL = shoal.SGD(lr=0.5)


def connect(address: str, job: str | None = None, workers: int = 2, mode: Any = None, **how: Any) -> ClusterStore:
    consistency = shoal.BSP() if mode is None else mode
    return shoal.connect(address, job=job, workers=workers, consistency=consistency, threads=1, timeout=TIMEOUT, **how)


def together(programs: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time; return their results."""
    with ThreadPoolExecutor(len(programs)) as pool:
        return [end.result(2 * TIMEOUT) for end in [pool.submit(program) for program in programs]]


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + TIMEOUT
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def train(store: ClusterStore, name: str, clocks: int) -> str:
    """Push numbers that depend on rank and clock; return the digest of the table."""
    with store:
        table = store.table(name, dim=3, optimizer=shoal.FTRL(alpha=0.1))
        for clock in range(clocks):
            draw = np.random.default_rng([store.rank, clock])
            keys = draw.integers(0, 200, 40).astype(np.uint64)
            table.pull(keys)
            table.push(keys, draw.normal(size=(40, 3)).astype(np.float32)).result()
            store.tick()
        store.barrier()
        digest = table.digest()
        store.barrier()
        return digest


def whole(name: str, workers: int, clocks: int) -> str:
    """Return the digest of a job that runs alone."""
    with cluster(2) as alone:
        first, *_ = together(
            [lambda: train(connect(alone.address, None, workers), name, clocks) for _ in range(workers)]
        )
    return str(first)


@pytest.mark.slow
def test_jobs_of_different_consistency_run_at_once_on_tables_of_their_own() -> None:
    with cluster(2) as made:

        def one() -> str:
            return train(connect(made.address, "daily", 2), "daily", 20)

        def other() -> str:
            return train(connect(made.address, "online", 3, shoal.ASP()), "online", 30)

        def unnamed() -> str:
            return train(connect(made.address, None, 1, shoal.SSP(2)), "unnamed", 10)

        found = together([one, one, other, other, other, unnamed])
        assert found[0] == found[1] == whole("daily", 2, 20)
        assert made.scheduler.membership.named_jobs == []


@pytest.mark.slow
def test_a_table_of_two_jobs_holds_the_exact_sum_of_what_both_pushed() -> None:
    def count(store: ClusterStore, clocks: int) -> tuple[int, int]:
        """Add powers of a number of its own; return the sum, and the greatest number that it saw."""
        with store:
            table = store.table("ledger", dim=1, dtype="int64")
            added, seen = 0, 0
            for clock in range(clocks):
                rows = table.pull(KEYS)
                assert (rows >= seen).all()  # nothing of either job is undone
                seen = int(rows.min())
                amount = (clock + 1) * (1 + store.rank) * (1 if store.member.job_name else 10**9)
                table.push(KEYS, np.full((len(KEYS), 1), amount, np.int64)).result()
                added += amount
                store.tick()
            store.barrier()
            return added, seen

    with cluster(2, replacement_seconds=0.0) as made:
        sums = together(
            [
                lambda: count(connect(made.address, None, 2), 12),
                lambda: count(connect(made.address, None, 2), 12),
                lambda: count(connect(made.address, "online", 2, shoal.ASP()), 20),
                lambda: count(connect(made.address, "online", 2, shoal.ASP()), 20),
                lambda: count(connect(made.address, "bounded", 1, shoal.SSP(1)), 20),
            ]
        )
        with shoal.connect(made.address, mode="read", timeout=TIMEOUT) as reader:
            total = sum(added for added, _ in sums)
            assert reader.table("ledger").pull(KEYS).ravel().tolist() == [total] * len(KEYS)


def test_under_bsp_a_job_sees_its_own_clocks_whatever_the_other_one_ticks() -> None:
    with cluster(2) as made, connect(made.address, "a", 1) as one, connect(made.address, "b", 1) as two:
        table, same = (store.table("t", dim=1, optimizer=SMALL) for store in (one, two))
        ones = np.ones((len(KEYS), 1), np.float32)
        table.push(KEYS, ones).result()
        for _ in range(3):
            two.tick()
        assert (same.pull(KEYS) == 0).all()  # clocks of b apply no push of a
        one.tick()
        assert (table.pull(KEYS) == -0.5).all()
        assert (same.pull(KEYS) == -0.5).all()
        assert (one.clock, two.clock) == (1, 3)
        assert (one.rank, two.rank) == (0, 0)
        assert one.member.job != two.member.job


def test_a_name_is_free_when_its_last_worker_has_left() -> None:
    with cluster(1) as made:
        numbers = []
        for mode in (shoal.BSP(), shoal.ASP(), shoal.SSP(1)):
            with connect(made.address, "again", 1, mode) as store:
                assert (store.rank, store.num_workers, store.clock, store.member.job_name) == (0, 1, 0, "again")
                store.tick()
                numbers.append(store.member.job)
                assert made.scheduler.membership.named_jobs == ["again"]
        assert len(set(numbers)) == 3
        assert made.scheduler.membership.named_jobs == []
        assert made.servers[0].services[0].metrics()["jobs"] == {}


def test_workers_of_a_job_that_disagree_are_told_what_both_have_asked_for() -> None:
    with scheduler(1) as forming, FakeServer(forming.address):
        waiting = threading.Thread(target=lambda: _join_and_leave(forming.address))
        waiting.start()
        until(lambda: forming.membership.named_jobs)
        with pytest.raises(ValueError, match=r"job 'a' has 2 workers, and .* asks for 3 workers: pass the same"):
            connect(forming.address, "a", 3, shoal.ASP())
        with pytest.raises(ValueError, match=r"job 'a' has ASP\(\), and .* asks for BSP\(reduce='sum'\)"):
            connect(forming.address, "a", 2)
        _join_and_leave(forming.address)
        waiting.join(TIMEOUT)
        until(lambda: not forming.membership.named_jobs)


def _join_and_leave(address: str) -> None:
    with SchedulerClient(address, "worker") as client:
        client.join(Join(workers=2, rules=JobConsistency.of(shoal.ASP()), job="a"), TIMEOUT)
        client.call(Leave(), LeaveReply, TIMEOUT)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"job": "a"}, "job 'a' needs its number of workers: pass workers=N .--workers N."),
        ({"job": "a", "workers": (2, 8)}, r"the number of workers of job 'a' cannot change, got workers=\(2, 8\)"),
        ({"job": "a b", "workers": 1}, "up to 64 letters, digits, dots, dashes and underscores, got 'a b'"),
        ({"job": "x" * 65, "workers": 1}, "up to 64 letters"),
        ({"job": "a", "workers": 2, "rank": 2}, "rank 2 is out of range for 2 workers"),
        ({"job": "a", "mode": "read"}, "job describes a worker, and mode='read' connects a reader"),
    ],
)
def test_what_a_named_job_cannot_be_is_refused(how: dict[str, Any], text: str) -> None:
    with scheduler(1) as running, pytest.raises(ValueError, match=text):
        shoal.connect(running.address, timeout=TIMEOUT, threads=1, **how)


@pytest.mark.slow
def test_commands_train_as_jobs_of_their_names_on_tables_of_their_own(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "log.libsvm"
    log.write_text("".join(f"{number % 2} {number}:1\n" for number in range(400)))
    train = ["train", "lr", "--data", str(log), "--format", "libsvm", "--quiet", "--batch-size", "50"]
    with cluster(2) as made, connect(made.address, None, 1) as store:
        joined = ["--cluster", made.address, "--workers", "1"]
        for name in ("daily", "hourly"):
            assert main([*train, *joined, "--job", name, "--table", name, "--output", str(tmp_path / name)]) == 0
            with shoal.LogisticRegression.load(tmp_path / name) as model:
                assert model.table.name == name
                assert model.examples == 400
        assert main([*train, *joined, "--job", "stars", "--classes", "3", "--output", str(tmp_path / "stars")]) == 0
        with shoal.models.load(tmp_path / "stars") as model:
            assert (model.table.dim, model.examples) == (3, 400)
        assert {"daily", "hourly", "multiclass"} <= set(store.cluster()["tables"])
    for more, text in (
        (["--job", "daily"], "--job requires --cluster"),
        (["--table", "t", "--grid", "alpha=0.1,0.2"], "--grid makes a table for each model: leave out --table"),
    ):
        assert main([*train, *more, "--output", str(tmp_path / "none")]) == 2
        assert text in capsys.readouterr().err


def test_a_job_that_is_no_text_is_refused() -> None:
    with scheduler(1) as running, pytest.raises(TypeError, match="job is the name of a job, got 7"):
        shoal.connect(running.address, job=7, workers=1, timeout=TIMEOUT)


def test_the_scheduler_refuses_what_a_client_did_not_check_and_more_jobs_than_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.cluster.scheduler.jobs._MAX_NAMES", 1)
    with scheduler(1) as running, SchedulerClient(running.address, "worker") as client:
        for arguments, text in (
            ({"job": "a"}, "job 'a' needs its number of workers"),
            ({"job": "a", "workers": 2, "most": 8}, "the number of workers of job 'a' cannot change, got 2 to 8"),
            ({"job": "a b", "workers": 2}, "job = 'a b'"),
        ):
            with pytest.raises(ValueError, match=text):
                client.join(Join(rules=JobConsistency.of(shoal.ASP()), **arguments), TIMEOUT)
        assert running.membership.named_jobs == []
        waiting = threading.Thread(target=_join_quietly, args=(client,))
        waiting.start()
        until(lambda: running.membership.named_jobs == ["a"])
        with (
            SchedulerClient(running.address, "worker") as late,
            pytest.raises(ValueError, match="there are 1 named jobs, the maximum: job 'b' can begin when one has"),
        ):
            late.join(Join(workers=1, rules=JobConsistency.of(shoal.ASP()), job="b"), TIMEOUT)
        client.close()
        waiting.join(TIMEOUT)


def _join_quietly(client: SchedulerClient) -> None:
    with contextlib.suppress(shoal.ShoalError):  # it is closed while it waits
        client.join(Join(workers=2, rules=JobConsistency.of(shoal.ASP()), job="a"), TIMEOUT)


def test_barriers_and_splits_of_the_data_are_those_of_a_job(tmp_path: Path) -> None:
    data = tmp_path / "data.libsvm"
    data.write_text("".join(f"{k % 2} {k}:1\n" for k in range(400)))

    def read(store: ClusterStore) -> int:
        with store:
            reader = shoal.read_libsvm(data, batch_size=20)
            lines = sum(len(batch.labels) for split in store.splits(reader, split_bytes=500) for batch in split)
            store.barrier()
            return lines

    with cluster(1) as made:
        jobs = [("a", 2, shoal.ASP()), ("a", 2, shoal.ASP()), ("b", 1, shoal.BSP()), (None, 1, shoal.ASP())]
        lines = together([lambda one=one: read(connect(made.address, *one)) for one in jobs])
        assert [lines[0] + lines[1], *lines[2:]] == [400, 400, 400]  # each job has read all of it, once


def test_status_and_metrics_show_the_workers_of_each_job() -> None:
    with cluster(1) as made, connect(made.address, None, 1), connect(made.address, "a.b", 1, shoal.ASP()) as store:
        status = store.cluster()
        assert (status["job"]["name"], status["job"]["consistency"]) == ("", "BSP(reduce='sum')")
        assert [(one["name"], one["consistency"], one["size"]) for one in status["jobs"]] == [("a.b", "ASP()", 1)]
        assert [(one["job"], one["rank"]) for one in status["workers"]] == [("", 0), ("a.b", 0)]
        metrics = made.scheduler.membership.metrics()
        assert set(metrics["worker_clock"]) == {"0", "a.b/0"}
        view = made.scheduler.membership.view()
        assert [one["rank"] for one in view["workers"]] == [0, "a.b/0"]
        assert made.scheduler.counters()["workers"] == 2
        with SchedulerClient(made.address, "observer") as observer:
            text = cluster_status._text(made.address, observer.call(GetStatus(), StatusReply, TIMEOUT))
        assert f"job {store.member.job} 'a.b': ASP(), 1 of 1 workers" in text
        assert "worker  a.b/0" in text
        (figures,) = made.servers[0].services[0].metrics()["jobs"].values()
        assert figures == {"applied": 0, "floor": 0, "clocks": {0: 0}}
        assert "of job 'a.b'" in repr(store)


def test_each_job_saves_its_tables_and_shared_ones_while_the_other_trains(tmp_path: Path) -> None:
    with cluster(2) as made, connect(made.address, "a", 1) as one, connect(made.address, "b", 1, shoal.ASP()) as two:
        own, shared = (one.table(name, dim=1, optimizer=SMALL) for name in ("own", "shared"))
        theirs = two.table("shared", dim=1, optimizer=SMALL)
        ones = np.ones((len(KEYS), 1), np.float32)
        for table in (own, shared):
            table.push(KEYS, ones).result()
        theirs.push(KEYS, ones).result()
        one.save(tmp_path / "before")
        one.tick()
        one.save(tmp_path / "after")
        two.save(tmp_path / "theirs")
        with (
            one._snapshots([(shared, "plain")], None),
            pytest.raises(
                shoal.errors.SaveConflictError, match=f"worker 0 of another job, number {one.member.job}, is saving"
            ),
        ):
            two.save(tmp_path / "late")
        for name, expected in (("before", (0.0, -0.5)), ("after", (-0.5, -1.0)), ("theirs", (-0.5, -1.0))):
            with shoal.local() as store:
                store.load(tmp_path / name)
                found = [store.tables[table].pull(KEYS) for table in ("own", "shared") if table in store.tables]
                assert [set(rows.ravel().tolist()) for rows in found] == [{value} for value in expected[-len(found) :]]


def test_a_worker_of_a_named_job_is_replaced_and_the_other_job_waits_for_nothing() -> None:
    with cluster(1, replacement_seconds=TIMEOUT) as made, connect(made.address, None, 1) as other:
        one, two = together([lambda rank=rank: connect(made.address, "a", 2, rank=rank) for rank in range(2)])
        with one:
            table = one.table("t", dim=1, optimizer=SMALL)
            ones = np.ones((len(KEYS), 1), np.float32)
            two.table("t", dim=1, optimizer=SMALL).push(KEYS, ones).result()
            table.push(KEYS, ones).result()
            one.tick()
            _kill(made, two)
            until(lambda: one.cluster()["jobs"][0]["awaited"])
            own = other.table("t", dim=1, optimizer=SMALL)
            for _ in range(3):  # while the job 'a' waits
                own.push(KEYS, ones).result()
                other.tick()
                other.barrier()
            assert (own.pull(KEYS) == -1.5).all()
            with connect(made.address, "a", 2, rank=1) as again:
                assert (again.rank, again.member.is_replacement, again.clock) == (1, True, 0)
                again.table("t", dim=1, optimizer=SMALL).push(KEYS, ones).result()
                again.tick()
                assert (table.pull(KEYS) == -2.5).all()  # the dead worker had not ticked: what it pushed does not count


def test_a_dead_worker_is_lost_to_its_own_job_alone() -> None:
    with cluster(1) as made, connect(made.address, None, 1) as other:
        one, two = together([lambda rank=rank: connect(made.address, "a", 2, rank=rank) for rank in range(2)])
        with one:
            table = one.table("t", dim=1, optimizer=SMALL)
            table.push(KEYS, np.ones((len(KEYS), 1), np.float32)).result()
            _kill(made, two)
            one.tick()
            one.barrier()  # neither a clock nor a barrier waits for it
            assert (table.pull(KEYS) == -0.5).all()
            other.tick()
            other.barrier()
            until(lambda: one.member.lost_workers)
            assert (one.member.lost_workers, other.member.lost_workers) == ({1}, frozenset())
            assert one.cluster()["jobs"][0]["vacant"] == [1]
            with connect(made.address, "a", 2) as third:
                assert (third.rank, third.clock, third.member.job) == (1, 1, one.member.job)


def _kill(made: Cluster, store: ClusterStore) -> None:
    """Have a worker send nothing more, and the scheduler declare it dead."""
    sender = store._scheduler.sender
    Calls(store, 1)
    with contextlib.suppress(KilledError), store:
        store.tick()
    store._scheduler.close()
    known = made.scheduler.membership._peers.known

    def is_gone() -> bool:
        if sender in known:
            known[sender].link.last_heard = -1e9
            made.scheduler._wake()
        return sender not in known

    until(is_gone)


def test_a_scheduler_that_is_started_again_has_the_jobs_that_it_had(tmp_path: Path) -> None:
    with scheduler(1, journal=tmp_path) as one:
        server = FakeServer(one.address)
        clients = [SchedulerClient(one.address, "worker") for _ in range(3)]
        joins = [
            Join(workers=1, rules=JobConsistency.of(shoal.BSP())),
            Join(workers=2, rules=JobConsistency.of(shoal.ASP()), job="a"),
            Join(workers=2, rules=JobConsistency.of(shoal.ASP()), job="a"),
        ]
        joined = together([lambda k=k: clients[k].join(joins[k], TIMEOUT) for k in range(3)])
        assert joined[1].job == joined[2].job != joined[0].job
        asked = clients[1].ask(Barrier("b"))
        until(lambda: one.membership.state.jobs["a"].job.barriers)
        one._membership.stop = lambda now: []  # as if it were killed
    with server, contextlib.ExitStack() as open_clients:
        for client in clients:
            open_clients.enter_context(client)
        with scheduler(1, journal=tmp_path, bind="tcp://127.0.0.1:*") as anew:
            assert anew.membership.named_jobs == ["a"]
            assert anew.membership.state.jobs["a"].job.number == joined[1].job
            assert anew.membership.state.jobs[""].job.number == joined[0].job
            second = clients[2].ask(Barrier("b"))
            for client, number in ((clients[1], asked), (clients[2], second)):
                assert client.answer(number, BarrierReply, timeout=TIMEOUT) == BarrierReply()
            clients[0].call(Leave(), LeaveReply, TIMEOUT)
            assert anew.membership.named_jobs == ["a"]  # the end of one job ends no other
            assert all(client.fault is None for client in clients[1:])
            for client in clients[1:]:
                client.call(Leave(), LeaveReply, TIMEOUT)
            until(lambda: not anew.membership.named_jobs)
    starts = [order.body for order in server.orders if isinstance(order.body, StartJob)]
    assert sorted(start.named for start in starts) == [False, True]
    assert [order.body for order in server.orders if isinstance(order.body, EndJob)] == [EndJob(joined[1].job)]


KILLED = """
import sys, numpy as np, shoal
with shoal.connect(sys.argv[1], job="victim", workers=2, consistency=shoal.ASP(), threads=1, timeout=60) as store:
    own, shared = (store.table(name, dim=1, dtype="int64") for name in ("own", "shared"))
    keys = np.arange(64, dtype=np.uint64)
    while True:
        for table in (own, shared):
            table.push(keys, np.ones((64, 1), np.int64)).result()
        store.tick()
        print("clock", flush=True)
"""


@contextlib.contextmanager
def victims(address: str) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen([sys.executable, "-c", KILLED, address], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.slow
def test_a_job_whose_processes_are_killed_changes_no_bit_of_another_one() -> None:
    """Both workers of the job die by SIGKILL, one after the other, while the other job trains under BSP."""
    with server_processes(2) as made, victims(made.address) as processes:

        def trained() -> str:
            return train(connect(made.address, "daily", 2), "daily", 60)

        def kill() -> None:
            for process in processes:
                assert process.stdout is not None
                for _ in range(5):
                    assert process.stdout.readline() == "clock\n"
                process.send_signal(signal.SIGKILL)

        first, second, _ = together([trained, trained, kill])
        assert first == second == whole("daily", 2, 60)
        with shoal.connect(made.address, mode="read", timeout=TIMEOUT) as reader:
            rows = [np.asarray(reader.table(name).pull(KEYS)).ravel() for name in ("own", "shared")]
        assert all((one >= 10).all() and len(set(one.tolist())) <= 2 for one in rows)


def _bits(
    address: str, job: str | None, mode: Any, name: str, clocks: int, kill: Callable[[ClusterStore], None]
) -> str:
    store = connect(address, job, 2, mode)
    if store.rank == 0 and job is None:
        tick = store.tick

        def and_kill() -> None:
            kill(store)
            tick()

        store.tick = and_kill  # type: ignore[method-assign]
    return train(store, name, clocks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "server"])
def test_two_jobs_go_on_with_the_same_bits_when_the_scheduler_or_a_server_is_killed(victim: str) -> None:
    def run(victim: str) -> list[str]:
        killed = []
        with running(2, heartbeat=0.5, replicas=1) as launched:

            def kill(store: ClusterStore) -> None:
                if store.clock in (10, 25) and victim:
                    until(lambda: all(arc["copies"] for arc in store.cluster()["arcs"]))
                    child = launched.scheduler if victim == "scheduler" else launched.servers[store.clock // 20]
                    assert child is not None
                    child.signal(signal.SIGKILL)
                    killed.append(child)
                    until(lambda: child not in (launched.scheduler, *launched.servers))

            jobs = [(None, shoal.BSP(), "one"), ("other", shoal.BSP(), "two")]
            found = together(
                [lambda job=job: _bits(launched.address, *job, 40, kill) for job in jobs for _ in range(2)]
            )
            with shoal.connect(launched.address, mode="read", timeout=TIMEOUT) as reader:
                assert [table.digest() for table in map(reader.table, ("one", "two"))] == found[::2]
            assert len(killed) == (2 if victim else 0)
            return [str(digest) for digest in found]

    assert run(victim) == run("")


@pytest.mark.slow
def test_a_launched_cluster_goes_on_until_the_named_jobs_of_others_have_ended(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text("import shoal\nwith shoal.connect(): pass\n")
    reported: list[str] = []
    with running(1, workers=1) as launched, connect(launched.address, "online", 1, shoal.ASP()) as store:
        table = store.table("t", dim=1, optimizer=SMALL)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(
                run_workers, launched, [str(program)], 1, lambda line: None, lambda line: None, warn=reported.append
            )
            until(lambda: reported)
            assert not ended.done()
            table.push(KEYS, np.ones((len(KEYS), 1), np.float32)).result()
            assert (table.pull(KEYS) == -0.5).all()
            store.close()
            assert ended.result(TIMEOUT) is None
    assert reported == ["the workers have ended; the cluster goes on until its other jobs end: online"]
