"""The status of a cluster: what the scheduler reports to workers and to processes that are no members."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, FakeServer, HeldPort, scheduler
from fit_by_hand import sums_row, write_fit
from membership_world import together
from processes import server_processes
from replicas_world import command, declare_dead, started
from shoal.base.fit_rows import Header
from shoal.cli import cluster_status, main
from shoal.cluster.protocol.messages import (
    Drain,
    Figures,
    Heartbeat,
    JobConsistency,
    Join,
    Request,
    StreamProgress,
    decode,
    encode,
)
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import FitModelStatus, FitStatus, GetStatus, StatusReply, WorkerStatus, as_dict
from shoal.consistency import ASP
from shoal.metrics import Accumulator


def until(what):
    deadline = time.monotonic() + TIMEOUT
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def test_an_observer_sees_a_cluster_form_and_is_no_member_itself():
    with scheduler(2, workers=1) as running, SchedulerClient(running.address, "observer") as observer:
        status = observer.call(GetStatus(), StatusReply, TIMEOUT)
        assert (status.epoch, status.num_servers, status.servers, status.workers) == (0, 2, (), ())
        with FakeServer(running.address), FakeServer(running.address):
            status = until(lambda: (found := observer.call(GetStatus(), StatusReply, TIMEOUT)).epoch and found)
            assert [server.rank for server in status.servers] == [0, 1]
            ends = [slots for server in status.servers for one in server.endpoints for slots in one.slots]
            assert ends == [(0, 512), (512, 1024)]
            assert status.job is None
            with (
                SchedulerClient(running.address, "worker", about="me", beat=lambda: {"clock": 17}) as worker,
                SchedulerClient(running.address, "worker", about="late") as late,
            ):
                joined = worker.join(Join(workers=1, rules=JobConsistency.of(ASP())), TIMEOUT)
                late.hello(TIMEOUT)
                waiting = threading.Thread(target=join, args=(late,))
                waiting.start()
                asked = GetStatus()
                status = until(lambda: (found := observer.call(asked, StatusReply, TIMEOUT)).workers[1:] and found)
                assert status.job.consistency == "ASP()"
                assert [(one.about, one.rank, one.is_connected) for one in status.workers] == [
                    ("me", 0, True),
                    ("late", None, True),
                ]
                assert status.workers[0].incarnation == joined.incarnation
                assert worker.call(asked, StatusReply, TIMEOUT).cluster == status.cluster
                late.close()
                waiting.join(TIMEOUT)
        assert len(running.membership._peers.known) <= 4


def join(client):
    with contextlib.suppress(shoal.ShoalError):  # it is closed while it waits
        client.join(Join(workers=1, rules=JobConsistency.of(ASP())), TIMEOUT)


def test_the_status_has_the_clocks_of_heartbeats_and_names_what_was_lost():
    world, (one, two) = together(workers=2)
    two.alive = False
    world.membership.disconnected(two.route, world.now)

    def status(sender=b"nobody"):
        asked = Request(sender, 1, GetStatus())
        ((route, reply),) = world.membership.handle(b"r", "h", asked, world.now)
        assert (route, reply.number) == (b"r", 1)
        return reply.body

    before = len(world.membership._peers.known)
    assert [worker.is_connected for worker in status().workers] == [True, False]
    assert status().workers[1].heard_seconds <= 1.0
    world.go(2.0)
    assert status().job.vacant == (1,)
    assert [worker.rank for worker in status().workers] == [0]
    assert status().uptime_seconds == pytest.approx(world.now, abs=0.1)
    world.processes[0].alive = False
    world.go(6.0)
    assert "is lost with its rows" in status().lost
    assert status().servers == ()
    assert len(world.membership._peers.known) < before
    assert not one.fenced


def test_the_status_has_copies_moves_and_failovers():
    world = started(1, servers=3)

    def status():
        ((_, reply),) = world.membership.handle(b"r", "h", Request(b"r", 1, GetStatus()), world.now)
        return decode(encode(reply)).body

    before = status()
    assert before.replicas == 1
    assert [(arc.server, arc.copies) for arc in before.arcs[::4]] == [(0, (1,)), (1, (2,)), (1, (2,)), (2, (0,))]
    assert all(arc.term == 1 for arc in before.arcs)
    assert sum(stream.copies for stream in before.streams) == len(before.arcs)
    assert before.failovers == ()
    server = world.servers()[0]
    stream = world.membership.map.streams[-1]
    owner = world.server_of(stream.primary)
    progress = StreamProgress(stream.id, 3, 4096)
    world.membership.handle(owner.route, "h", Heartbeat(owner.sender, 0, 0, (progress,)), world.now)
    assert sum(one.lag_bytes for one in status().streams) == 4096
    declare_dead(world, server)
    assert status().failovers[0].seconds is None
    world.settle()
    after = status()
    assert all(len(arc.copies) == 1 and arc.server != 0 for arc in after.arcs)
    (failover,) = after.failovers
    assert (failover.server, failover.why) == (0, "it does not answer")
    assert failover.seconds <= 1.0 <= failover.ago_seconds
    assert failover.silent_seconds == 1.25
    assert failover.seconds <= failover.copied_seconds <= failover.ago_seconds
    text = cluster_status._text("tcp://h:1", after)
    assert "replicas 1: all slots have their copies" in text
    assert "died 20 s ago, it does not answer" in text
    total = failover.seconds + 1.25
    assert f"were not served for {total:.3f} s: 1.250 s until it was declared dead, {failover.seconds:.3f} s" in text
    assert f"all slots had their copies again {failover.copied_seconds:.3f} s after" in text
    notes = "\n".join(world.membership.notes)
    assert f"are served again, {failover.seconds:.3f} s after it was declared dead and {total:.3f} s after its" in notes
    assert (
        f"all slots have their copies again, {failover.copied_seconds:.3f} s after server 0 was declared dead" in notes
    )
    world.join_server()
    world.settle()
    command(world, Drain(2))
    assert "server 2 is drained" in cluster_status._text("tcp://h:1", status())


def test_the_status_has_the_fits_of_the_server_that_serves_their_rows():
    world, _ = together(servers=2)
    job = world.membership.state.jobs[""].job.number

    def report(rank, *fits):
        (server,) = (one for one in world.membership._peers.servers.values() if one.rank == rank)
        beat = Heartbeat(server.sender, 0, figures=Figures(fits=fits))
        world.membership.handle(server.link.route, "h", beat, world.now)

    def fit(examples, job=job, name="ads", state="running", models=1):
        seen = FitModelStatus(examples, examples // 8, 0.5, 0.75, None)
        return FitStatus(name, job, 1, state, 2, 5, 1000, models, (seen,) * models)

    def status():
        ((_, reply),) = world.membership.handle(b"r", "h", Request(b"r", 1, GetStatus()), world.now)
        return decode(encode(reply)).body

    report(0, fit(4))
    report(1, fit(9, name="done", state="over"), fit(2), fit(1, job=job + 1, name="gone", models=2))
    found = status()
    assert [(one.name, one.state, one.models[0].examples) for one in found.fits] == [
        ("ads", "running", 4),  # of the server with the first slot
        ("done", "over", 9),
        ("gone", "stopped", 1),
    ]
    text = cluster_status._text("tcp://h:1", found)
    assert "\nfit of ads: pass 2 of 5, 4 examples, loss 0.5000, AUC 0.7500\n" in text
    assert "\nfit of done is over: pass 2 of 5, 9 examples (1 of them twice), loss 0.5000, AUC 0.7500\n" in text
    assert "\nfit of gone has stopped: pass 2 of 5, 2 models\n  model 0: 1 examples, loss" in text
    values = world.membership.metrics()
    assert values["fit_pass"] == {"ads": 2, "done": 2, "gone": 2}
    assert values["fit_examples"] == {"ads": 4, "done": 9, "gone/0": 1, "gone/1": 1}
    assert values["fit_auc"] == dict.fromkeys(values["fit_examples"], 0.75)
    assert "fit_accuracy" not in values
    report(0, *(fit(1, name=f"f{k:02}", state="over" if k < 60 else "running") for k in range(64)))
    assert [one.name for one in status().fits[:5]] == ["ads", "f60", "f61", "f62", "f63"]
    assert len(status().fits) == 64


def test_the_command_names_what_drain_takes(capsys):
    assert main(["cluster", "tcp://127.0.0.1:1", "drain"]) == 2
    assert "drain takes the rank of a server" in capsys.readouterr().err


def test_the_command_drains_and_rebalances(capsys):
    with scheduler(2) as running, FakeServer(running.address), FakeServer(running.address):
        until(lambda: running.membership.map is not None)
        assert main(["cluster", running.address, "rebalance"]) == 0
        assert "slots move until all endpoints have equally many" in capsys.readouterr().out
        assert main(["cluster", running.address, "rebalance", "--by", "rows"]) == 0
        assert "slots move until all endpoints have equal sums of weights" in capsys.readouterr().out
        assert main(["cluster", running.address, "status", "--by", "rows"]) == 2
        assert "--by is for rebalance" in capsys.readouterr().err
        assert main(["cluster", running.address, "drain", "7"]) != 0
        assert "the cluster has no server 7" in capsys.readouterr().err


def test_a_record_becomes_a_dict():
    assert as_dict(WorkerStatus(None, "w", "h", 1, 2, True, 0.5)) == {
        "rank": None,
        "about": "w",
        "host": "h",
        "incarnation": 1,
        "clock": 2,
        "is_connected": True,
        "heard_seconds": 0.5,
        "job": "",
    }


def test_the_command_says_where_no_scheduler_answers(capsys):
    assert main(["cluster", "tcp://127.0.0.1:1", "status", "--timeout", "0.2"]) == 1
    assert "no scheduler answers at tcp://127.0.0.1:1" in capsys.readouterr().err


def test_watch_clears_a_terminal_and_nothing_else(capsys, monkeypatch):
    def sleep(interval):
        assert interval == 7
        pauses.append(interval)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    with scheduler(2) as running:
        monkeypatch.setattr(cluster_status, "time", SimpleNamespace(sleep=sleep))
        for is_terminal, option, clears in (
            (True, None, 2),
            (False, None, 0),
            (True, "--json", 0),
            (True, "--quiet", 0),
        ):
            pauses = []
            monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
            command = ["cluster", running.address, "status", "--watch", "7", *filter(None, [option])]
            assert main(command) == 130
            reported = capsys.readouterr()
            assert reported.err == ""
            assert reported.out.count("\x1b[2J") == clears
            assert reported.out.count(running.membership.state.cluster) == (0 if option == "--quiet" else 2)
        assert main(["cluster", running.address, "stop", "--watch"]) == 2
        assert "--watch is for status: remove it from stop" in capsys.readouterr().err


@pytest.mark.slow
def test_watch_goes_on_while_the_scheduler_is_away_and_ends_quietly():
    with HeldPort() as held, contextlib.ExitStack() as ended:
        command = [sys.executable, "-m", "shoal", "cluster", held.address, "status"]
        command += ["--json", "--watch", "0.05", "--timeout", "0.5"]
        with scheduler(2, bind=held.address) as one:
            watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ended.callback(watch.wait, TIMEOUT)
            ended.callback(watch.kill)
            for _ in range(2):
                assert json.loads(watch.stdout.readline())["cluster"] == one.membership.state.cluster
        away = watch.stderr.readline()
        with scheduler(2, bind=held.address) as two:  # of another cluster
            until(lambda: json.loads(watch.stdout.readline())["cluster"] == two.membership.state.cluster)
            watch.send_signal(signal.SIGINT)
            _, rest = watch.communicate(timeout=TIMEOUT)
    assert (watch.returncode, rest) == (130, "")
    assert f"no scheduler answers at {held.address}" in away
    assert away.endswith("asking again until it answers\n")


def test_watch_ends_if_no_scheduler_answers_at_first(capsys):
    assert main(["cluster", "tcp://127.0.0.1:1", "status", "--watch", "--timeout", "0.2"]) == 1
    assert "no scheduler answers at tcp://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_and_the_store_report_members_slots_and_clocks(capsys):
    with (
        server_processes(2, workers=1) as cluster,
        shoal.connect(cluster.address, timeout=TIMEOUT) as store,
    ):
        table = store.table("user", optimizer=shoal.SGD(lr=1.0))
        table.push(np.arange(5, dtype=np.uint64), np.ones((5, 1), np.float32)).result()
        store.tick()
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "cluster", cluster.address, "status", "--json"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
        facts = json.loads(done.stdout)
        status = store.cluster()
        assert facts.keys() == status.keys()
        assert facts["cluster"] == status["cluster"]
        assert status["tables"] == ["user"]
        assert [server["endpoints"][0]["slots"] for server in status["servers"]] == [[[0, 512]], [[512, 1024]]]
        assert status["job"]["consistency"] == "BSP(reduce='sum')"
        assert main(["cluster", cluster.address, "status", "--timeout", str(TIMEOUT)]) == 0
        text = capsys.readouterr().out
        assert f"at {cluster.address}: epoch 1, 1024 slots; scheduler up" in text
        assert "BSP(reduce='sum'), 1 of 1 workers" in text
        assert f"{status['servers'][1]['endpoints'][0]['address']} slots 512-1023" in text
        assert "tables: user" in text


@pytest.mark.slow
def test_who_watches_sees_the_rows_of_a_fit(capsys):
    with (
        server_processes(2, heartbeat=1.0) as cluster,
        shoal.connect(cluster.address, consistency=shoal.ASP(), timeout=TIMEOUT) as store,
    ):
        header = Header(job=store.cluster()["job"]["number"], fit=1, epoch=1, epochs=3, models=1, known=600)
        workers = [Accumulator(), Accumulator()]
        for k, one in enumerate(workers):
            one.update([0, 1, 1], [0.5, 0.25, k])
        write_fit(store, "m", header, sums_row(*workers, repeated=2))
        before = store.tables["m-progress"].stats().pulls
        (fit,) = until(lambda: store.cluster()["fits"])
        assert store.tables["m-progress"].stats().pulls == before
        (model,) = fit.pop("models")
        assert fit == {
            "name": "m", "job": header.job, "fit": 1, "state": "running", "pass_number": 2, "passes": 3, "known": 600,
            "num_models": 1,
        }  # fmt: skip
        assert (model["examples"], model["repeated"], model["accuracy"]) == (6, 2, None)
        assert model["auc"] == pytest.approx(0.25)
        assert main(["cluster", cluster.address, "status", "--timeout", str(TIMEOUT)]) == 0
        assert "fit of m: pass 2 of 3, 6 examples (2 of them twice), loss 0." in capsys.readouterr().out
        header.is_over = 1
        write_fit(store, "m", header)
        until(lambda: [one for one in store.cluster()["fits"] if one["state"] == "over"])
