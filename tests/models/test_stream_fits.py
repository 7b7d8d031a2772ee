"""Fits of streams: each example once, to the bits of a fit of files, whoever dies, joins, leaves or resumes."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fork_server
import shoal
from changing_workers import CountedRegression, Span
from changing_workers import run as changing
from cluster_fakes import TIMEOUT, HeldPort
from killed_workers import run
from mock_kafka import PARTITIONS, brokers, produce
from shoal.base.interrupts import Terminated
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.data import Following
from shoal.models import Callback, Checkpointing, PublishDelta
from shoal.serve.app import Handler
from shoal.serve.limits import Limits
from shoal.serve.versions import ServedVersions
from tiers import long_after

BATCH, EACH = 20, 130  # examples of a batch, and of a partition


def lines_of(partition: int) -> list[bytes]:
    draw = np.random.default_rng(partition)
    keys = draw.integers(0, 100, (EACH, 4))
    return [b"%d " % draw.integers(0, 2) + b" ".join(b"%d:1" % key for key in np.unique(row)) for row in keys]


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    pytest.importorskip("confluent_kafka")
    with brokers() as addresses:
        for partition in range(PARTITIONS):
            produce(addresses, "clicks", lines_of(partition), partition)
        yield addresses


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The lines of each partition."""
    folder = tmp_path_factory.mktemp("clicks")
    for partition in range(PARTITIONS):
        (folder / f"{partition}").write_bytes(b"".join(line + b"\n" for line in lines_of(partition)))
    return [folder / f"{partition}" for partition in range(PARTITIONS)]


def topic(servers: str, **how: Any) -> shoal.data.Reader:
    return shoal.read_kafka(servers, "clicks", **{"until": "end", "batch_size": BATCH, "max_delay": None} | how)


def learn(store: shoal.Store, reader: shoal.data.Reader, *, warm_up: bool = False, **how: Any) -> tuple[Any, ...]:
    with shoal.LogisticRegression(store=store, warm_up=warm_up) as model:
        if store.num_workers > 1:
            reader = reader.split(store.rank, store.num_workers)
        model.fit(reader, progress=False, **how)
        store.barrier()
        done = model.history.passes[-1]
        return model.table.digest(), model.examples, done.metrics.examples, done.metrics.logloss, done.skipped


class StopAfter(Callback):
    """Sends this process a signal after some batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def batch_done(self, progress: Any) -> None:
        if progress.batches == self._batches:
            os.kill(os.getpid(), signal.SIGTERM)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fit_of_a_topic_has_the_bits_of_a_fit_of_batches_in_turns(servers: str, files: list[Path]) -> None:
    each = [list(shoal.read_libsvm(file, batch_size=BATCH)) for file in files]
    with shoal.local() as store:
        whole = learn(store, [batch for turn in zip(*each, strict=True) for batch in turn])
    with shoal.local() as store:
        assert learn(store, topic(servers)) == whole


def test_a_fit_of_a_topic_leaves_examples_out(servers: str, files: list[Path]) -> None:
    each = [list(shoal.read_libsvm(file, batch_size=BATCH).without([7])) for file in files]
    with shoal.local() as store:
        whole = learn(store, [batch for turn in zip(*each, strict=True) for batch in turn])
    with shoal.local() as store:
        assert learn(store, topic(servers).without([7])) == whole
        assert whole[1] < PARTITIONS * EACH


def test_a_fit_of_a_folder_leaves_out_whole_batches(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1 3:1\n" * 2 * BATCH + "1 4:1\n0 3:1\n" * BATCH)
    reader = shoal.read_libsvm(Following(tmp_path), batch_size=BATCH).with_max_delay(0.05).without([3])
    out = tmp_path / "model"
    with shoal.LogisticRegression(warm_up=False) as model:
        with pytest.raises(Terminated):
            model.fit(reader, callbacks=[StopAfter(2)], checkpoint=Checkpointing(out), progress=False)
        assert model.examples == BATCH
        assert model.table.contains(np.array([3, 4], np.uint64)).tolist() == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [False, True])
def test_workers_with_a_partition_each_have_the_bits_of_a_fit_of_files(
    servers: str, files: list[Path], warm_up: bool
) -> None:
    whole = run(PARTITIONS, {}, lambda store: learn(store, shoal.read_libsvm(files, batch_size=BATCH), warm_up=warm_up))
    found = run(PARTITIONS, {}, lambda store: learn(store, topic(servers), warm_up=warm_up))
    assert [one for one, _ in found] == [one for one, _ in whole]
    assert found[0][0][1] == PARTITIONS * EACH


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [False, True])
def test_a_worker_that_is_killed_changes_no_bit(servers: str, warm_up: bool) -> None:
    whole = run(2, {}, lambda store: learn(store, topic(servers), warm_up=warm_up))
    calls = [made for _, made in whole]
    draw = random.Random(5)
    for _ in range(3):
        deaths = {rank: draw.randrange(8, calls[rank]) for rank in draw.choice([[0], [1], [0, 1]])}
        killed = run(2, deaths, lambda store: learn(store, topic(servers), warm_up=warm_up))
        assert [one for one, _ in killed] == [one for one, _ in whole], deaths
    assert whole[0][0][1] == PARTITIONS * EACH


@pytest.mark.slow
@pytest.mark.parametrize("mode", [shoal.SSP(2), shoal.ASP()])
def test_without_bsp_every_example_is_learned_from(servers: str, mode: Any) -> None:
    found = run(2, {}, lambda store: learn(store, topic(servers)), mode)
    assert {one[1] for one, _ in found} == {PARTITIONS * EACH}


@pytest.mark.slow
def test_more_workers_than_partitions_wait_for_the_others(servers: str) -> None:
    found = run(PARTITIONS + 1, {}, lambda store: learn(store, topic(servers)))
    assert {one[1] for one, _ in found} == {PARTITIONS * EACH}


# ---- a stop and a resume ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("batches", [1, 7, 20])
@pytest.mark.parametrize("how", [{}, {"warm_up": True}, {"negative_rate": 0.5}])
def test_a_stopped_fit_of_a_topic_resumes_to_the_same_bits(
    servers: str, tmp_path: Path, batches: int, how: dict[str, Any]
) -> None:
    reader = topic(servers)
    found = []
    for stops in (0, batches):
        with shoal.LogisticRegression(**{"warm_up": False} | how) as model:
            checkpoint = Checkpointing(tmp_path / f"{stops}", resume=True)
            if stops:
                with pytest.raises(Terminated):
                    model.fit(reader, checkpoint=checkpoint, callbacks=StopAfter(stops), progress=False)
                assert 0 < model.examples < PARTITIONS * EACH
        with shoal.LogisticRegression(**{"warm_up": False} | how) as model:
            model.fit(reader, checkpoint=checkpoint, progress=False)
            found.append((model.table.digest(), model.examples, model.history.passes[-1].metrics))
    assert found[0] == found[1]


@pytest.mark.slow
def test_what_arrives_after_a_stop_is_read_by_the_fit_that_resumes(servers: str, tmp_path: Path) -> None:
    """Batches are cut by a delay: each example counts once, however they are cut when they are read again."""
    reader = shoal.read_kafka(servers, "growing", batch_size=64, max_delay=0.05)
    sent = 0
    for _ in range(4):
        for partition in range(2):
            produce(servers, "growing", lines_of(0)[:37], partition)
        sent += 74
        with shoal.LogisticRegression() as model:
            stop = Stop(sent)
            with pytest.raises(Terminated):
                model.fit(reader, checkpoint=Checkpointing(tmp_path / "m", resume=True), callbacks=stop, progress=False)
            assert model.examples == sent


class Stop(Callback):
    """Ends a fit that has learned from so many examples, and then seen nothing more for a while."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._quiet = 0

    def stream_idle(self, progress: Any) -> None:
        self._quiet += 1
        if progress.examples >= self._examples and self._quiet >= 5:
            os.kill(os.getpid(), signal.SIGTERM)
            self._quiet = -1000


@pytest.mark.slow
def test_a_folder_is_followed_over_stops(tmp_path: Path) -> None:
    folder = tmp_path / "clicks"
    folder.mkdir()
    reader = shoal.read_libsvm(Following(folder), batch_size=BATCH).with_max_delay(0.05)
    sent = 0
    for hour in range(40):  # more than one row has
        (folder / f"{hour:02}").write_bytes(b"".join(line + b"\n" for line in lines_of(hour)[:7]))
    sent += 40 * 7
    for hour in range(40, 43):
        with shoal.LogisticRegression() as model:
            checkpoint = Checkpointing(tmp_path / "m", resume=True)
            with pytest.raises(Terminated):
                model.fit(reader, checkpoint=checkpoint, callbacks=Stop(sent), progress=False)
            assert model.examples == sent
        (folder / f"{hour:02}").write_bytes(b"".join(line + b"\n" for line in lines_of(hour)[:7]))
        sent += 7


def test_rows_of_a_stream_without_an_end_expire_at_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "0").write_text("1 7:1\n0 7:1\n" + "1 9:1\n0 9:1\n" * 5)
    reader = shoal.read_libsvm(Following(tmp_path / "clicks"), batch_size=2).with_max_delay(0.01)
    for every, is_kept in ((2, False), (50, True)):
        out = tmp_path / f"every-{every}"
        with shoal.LogisticRegression(expire=shoal.TimeToLive(2), warm_up=False) as model:
            with pytest.raises(Terminated):
                model.fit(reader, checkpoint=Checkpointing(out, every=every), callbacks=Stop(12), progress=False)
            for one in (model, shoal.load(out)):
                assert one.tables[0].contains(np.array([7, 9], np.uint64)).tolist() == [is_kept, True]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_model_of_a_followed_folder_names_its_columns(tmp_path: Path, form: str) -> None:
    folder, clicks = tmp_path / "clicks", {"click": [1, 0, 1], "ad": ["a", "b", "c"], "site": ["x", "y", "x"]}
    folder.mkdir()
    read: Any = shoal.read_csv
    if form == "parquet":
        read = shoal.read_parquet
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(clicks), folder / "0")
    else:
        (folder / "0").write_text("click,ad,site\n1,a,x\n0,b,y\n1,c,x\n")
    for _ in range(2):  # the second fit resumes, and nothing new arrives
        reader = read(Following(folder), label="click").with_max_delay(0.05)
        checkpoint = Checkpointing(tmp_path / "m", resume=True)
        with shoal.LogisticRegression() as model, pytest.raises(Terminated):
            model.fit(reader, checkpoint=checkpoint, callbacks=Stop(3), progress=False)
        with shoal.load(tmp_path / "m") as model:
            assert model.schema == {"label": "click", "categorical": ["ad", "site"]}
            assert model.evaluate(read(folder / "0", label="click")).examples == 3


@pytest.mark.slow
def test_a_quiet_pipe_ends_by_a_signal(tmp_path: Path) -> None:
    out, into = os.pipe()
    with open(out, "rb") as reader, open(into, "wb", buffering=0) as writer:
        writer.write(b"".join(line + b"\n" for line in lines_of(0)))
        with shoal.LogisticRegression() as model, pytest.raises(Terminated):
            model.fit(shoal.read_libsvm(reader).with_max_delay(0.1), callbacks=Stop(EACH), progress=False)
        assert model.examples == EACH


def test_what_a_stream_cannot_do_is_refused(servers: str, tmp_path: Path) -> None:
    with shoal.LogisticRegression() as model:
        with pytest.raises(ValueError, match="leave out shuffle"):
            model.fit(topic(servers), shuffle=True)
        with pytest.raises(ValueError, match="read once, and there are to be 2 passes"):
            model.fit(topic(servers), epochs=2)
        with pytest.raises(ValueError, match="never ends"):
            model.fit(topic(servers), valid=shoal.read_libsvm(Following(tmp_path)))
        with pytest.raises(ValueError, match="never ends"):
            model.fit(topic(servers), valid=topic(servers, until=None))
        model.fit(topic(servers), valid=topic(servers), progress=False)
        assert model.history.passes[-1].valid.examples == PARTITIONS * EACH


# ---- workers that die, and others ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted(servers: str) -> np.ndarray[Any, Any]:
    """Every message has one key of its own: its row shows how often it was learned from."""
    for partition in range(PARTITIONS):
        keys = range(partition * 90, partition * 90 + 90)
        produce(servers, "counted", [b"%d %d:1" % (key % 2, key) for key in keys], partition)
    return np.arange(PARTITIONS * 90, dtype=np.uint64)


@pytest.mark.slow
@pytest.mark.parametrize(("span", "dying"), long_after(2, [(3, 2), ((2, 3), 1), (3, 1)]))
def test_the_parts_of_workers_that_die_are_read_by_the_others(
    servers: str, counted: np.ndarray[Any, Any], span: Span, dying: int
) -> None:
    def program(store: shoal.Store, sizes: list[int]) -> list[float]:
        reader = shoal.read_kafka(servers, "counted", until="end", batch_size=4)
        with CountedRegression(shoal.SGD(lr=1.0), store=store, bias=False, warm_up=False) as model:
            model.fit(reader.split(store.rank, store.num_workers), progress=False)
            store.barrier()
            assert model.examples == len(counted)
            return model.table.pull(counted).reshape(-1).tolist()

    draw = random.Random(dying)
    whole = changing(3, {}, program, shoal.BSP(), span)
    assert all(found == [1.0] * len(counted) for found, _ in whole)
    for _ in range(3):
        deaths = {rank: draw.randrange(1, min(calls for _, calls in whole)) for rank in draw.sample(range(3), dying)}
        found = [one for one, _ in changing(3, deaths, program, shoal.BSP(), span) if one is not None]
        assert len(found) >= 3 - dying, deaths
        assert all(one == [1.0] * len(counted) for one in found), deaths


SHOAL = [sys.executable, "-m", "shoal"]
LAUNCH = [*SHOAL, "launch", "--servers", "3", "--replicas", "1", "--worker-restarts", "3"]


@contextmanager
def launched(
    workers: int, data: list[str], out: Path, *more: str, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    command = [*LAUNCH, *options, "--workers", f"{workers}", *SHOAL, "train", "lr", "--cluster", "--data", *data]
    command += ["--format", "libsvm", "--output", str(out), "--quiet", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


EVERY = ["--checkpoint-every", "50"]


def wait_for_checkpoint(out: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the fit is under way."""
    last = time.monotonic() + TIMEOUT
    while not (out / "model.json").exists() and process.poll() is None:
        assert time.monotonic() < last
        time.sleep(0.05)


def wait_for_examples(address: str, examples: int | None, process: subprocess.Popen[str]) -> None:
    """Wait until all workers are there and have learned from so many examples; None: from any number."""
    last = time.monotonic() + 2 * TIMEOUT
    while process.poll() is None:
        with SchedulerClient(address, "observer") as client:  # which the scheduler that was killed may have forgotten
            status = client.call(GetStatus(), StatusReply, TIMEOUT)
        has_all = status.job is not None and not status.job.awaited
        if has_all and status.fits:
            found = status.fits[0].known + status.fits[0].models[0].examples
            if found == examples or examples is None:
                return
        assert time.monotonic() < last, status
        time.sleep(0.1)


def kill(launcher: int, role: str, draw: random.Random) -> None:
    """Kill a process that a launcher has started: a worker, a server, or the scheduler."""
    children = psutil.Process(launcher).children(recursive=True)
    word = "train" if role == "worker" else role
    found = [one for one in children if word in one.cmdline() and not any("guard" in it for it in one.cmdline())]
    if found:
        draw.choice(found).kill()


@pytest.mark.long
@pytest.mark.slow
def test_killed_processes_change_no_bit(servers: str, tmp_path: Path) -> None:
    """SIGKILL of workers and of a server: the model is that of the same lines in files."""
    each = 1200
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print("seed", seed)
    texts = [[b"%d %d:1" % (draw.randrange(2), draw.randrange(100)) for _ in range(each)] for _ in range(2)]
    for partition, text in enumerate(texts):
        produce(servers, f"bits{seed}", text, partition)
        (tmp_path / f"{partition}").write_bytes(b"\n".join(text) + b"\n")
    found = []
    for data in [f"{tmp_path}/0", f"{tmp_path}/1"], [f"kafka://{servers}/bits{seed}?until=end"]:
        out = tmp_path / f"model{len(found)}"
        with (
            fork_server.true_starts() if found else nullcontext(),
            launched(2, data, out, "--batch-size", "2", "--max-delay", "1000", "--resume", *EVERY) as process,
        ):
            for role in ("worker", "server", "worker") if found else ():
                wait_for_checkpoint(out, process)
                time.sleep(draw.uniform(0.0, 1.0))
                if process.poll() is None:
                    kill(process.pid, role, draw)
            output, _ = process.communicate(timeout=4 * TIMEOUT)
            assert process.returncode == 0, output
        with shoal.models.load(out) as model:
            found.append((model.table.digest(), model.examples))
    assert found[0] == found[1]
    assert found[0][1] == 2 * each


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
def test_an_endless_fit_counts_each_message_once_over_kills_a_stop_and_a_resume(servers: str, tmp_path: Path) -> None:
    """SIGKILL of workers, a server and the scheduler while messages arrive; then SIGTERM, and other workers."""
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print("seed", seed)
    out, sent, topic_url = tmp_path / "model", 0, f"kafka://{servers}/endless{seed}"
    for workers, roles in ((2, ("worker", "server", "scheduler")), (3, ())):
        more = ["--batch-size", "16", "--max-delay", "0.1", "--resume", *EVERY]
        with HeldPort() as held, ExitStack() as stack:
            options = ["--scheduler", held.address, "--storage-roots", str(tmp_path)]
            process = stack.enter_context(launched(workers, [topic_url], out, *more, options=options))
            for role in ("", *roles):
                for partition in range(PARTITIONS):
                    count = draw.randrange(60)
                    produce(servers, f"endless{seed}", lines_of(partition)[:count], partition)
                    sent += count
                if role:
                    wait_for_examples(held.address, None, process)
                    time.sleep(draw.uniform(0.5, 2.0))
                    assert process.poll() is None, process.communicate()
                    kill(process.pid, role, draw)
            wait_for_examples(held.address, sent, process)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=4 * TIMEOUT)
            assert process.returncode == 143, output
        with shoal.models.load(out) as model:
            assert model.examples == sent, output


@pytest.mark.slow
@pytest.mark.usefixtures("true_starts")
@pytest.mark.parametrize("is_endless", long_after(1, [True, False]))
def test_a_stop_right_after_a_death_waits_for_the_replacement_to_save(
    servers: str, files: list[Path], tmp_path: Path, is_endless: bool
) -> None:
    """The others wait for the clock of the worker that was killed, which the replacement ends with them."""
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print("seed", seed)
    topic = f"stopped{seed}"
    for partition in range(PARTITIONS):
        produce(servers, topic, lines_of(partition), partition)
    data = [f"kafka://{servers}/{topic}"] if is_endless else [str(file) for file in files]
    more = ["--batch-size", "2", "--resume", *EVERY, *([] if is_endless else ["--epochs", "100000"])]
    with HeldPort() as held:
        options = ["--scheduler", held.address, "--storage-roots", str(tmp_path)]
        with launched(2, data, tmp_path / "model", *more, options=options) as process:
            wait_for_examples(held.address, PARTITIONS * EACH if is_endless else None, process)
            kill(process.pid, "worker", draw)
            time.sleep(draw.choice([0.0, draw.uniform(0.0, 3.0)]))
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143, output
    assert "had not ended" not in output
    with shoal.models.load(tmp_path / "model") as model:
        assert model.examples == PARTITIONS * EACH if is_endless else model.examples > 0, output


# ---- event time, and freshness ---------------------------------------------------------------------------------------

EVENTS = ["1,a,1000", "0,b,1100", "1,a,1039", "0,b,1040", "1,a,2026-11-29T12:00:00+00:00", "0,b,"]
SCHEMA = {"label": "click", "categorical": ["ad"]}


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.parametrize("batch_size", [1, 8192])
def test_late_events_are_learned_from_and_counted(servers: str, tmp_path: Path, form: str, batch_size: int) -> None:
    texts, schema = EVENTS, SCHEMA | {"columns": ["click", "ad", "at"]}
    if form == "json":
        pytest.importorskip("pyarrow")
        rows = [text.split(",") for text in EVENTS]
        texts, schema = [f'{{"click": {click}, "ad": "{ad}", "at": "{at}"}}' for click, ad, at in rows], SCHEMA
    produce(servers, name := f"events {form} {batch_size}", [text.encode() for text in texts])
    how = {"until": "end", "batch_size": batch_size, "event_time": "at", "format": form, "schema": schema}
    with shoal.LogisticRegression(warm_up=False) as model:
        model.fit(shoal.read_kafka(servers, name, **how), callbacks=PublishDelta(tmp_path / "served"), progress=False)
        assert model.examples == len(EVENTS)
        assert model.history.passes[-1].late == 1
        assert model.store.activity.values()["late_examples"] == 1
    with ServedVersions(tmp_path / "served") as served:
        description = served.now.exported.model
        assert description["event_time"] == 1795953600_000
        age = Handler({"model": served}, limits=Limits()).registry.get_sample_value("shoal_freshness_seconds")
        assert age == pytest.approx(time.time() - 1795953600, abs=60)


def age_of(reader: shoal.data.Reader, folder: Path) -> float | None:
    with shoal.LogisticRegression() as model:
        model.fit(reader, callbacks=PublishDelta(folder), progress=False)
    with ServedVersions(folder) as served:
        return Handler({"model": served}, limits=Limits()).registry.get_sample_value("shoal_freshness_seconds")


def test_the_time_of_an_event_is_that_of_its_message_or_unknown(
    servers: str, files: list[Path], tmp_path: Path
) -> None:
    age = age_of(topic(servers), tmp_path / "topic")
    assert age is not None
    assert 0 <= age < 600
    age = age_of(shoal.read_libsvm(files), tmp_path / "files")
    assert age is not None
    assert math.isnan(age)


def test_what_has_no_event_time_is_refused(servers: str) -> None:
    with pytest.raises(ValueError, match="have no columns"):
        shoal.read_kafka(servers, "clicks", event_time="at")
    with pytest.raises(ValueError, match="name the categorical columns"):
        shoal.read_kafka(servers, "clicks", format="json", schema={"label": "click"}, event_time="at")
    with pytest.raises(ValueError, match="which is none of the columns"):
        shoal.read_kafka(servers, "x", format="csv", schema=SCHEMA | {"columns": ["click", "ad"]}, event_time="at")
    with pytest.raises(ValueError, match="lateness is -1"):
        shoal.read_kafka(servers, "clicks", lateness=-1)
