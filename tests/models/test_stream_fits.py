"""Fits of streams: each example once, to the bits of a fit of files, whoever dies, joins, leaves or resumes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from killed_workers import run
from mock_kafka import PARTITIONS, brokers, produce
from shoal.base.interrupts import Terminated
from shoal.data import Following
from shoal.models import Callback, Checkpointing

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


def test_a_fit_of_a_topic_has_the_bits_of_a_fit_of_batches_in_turns(servers: str, files: list[Path]) -> None:
    each = [list(shoal.read_libsvm(file, batch_size=BATCH)) for file in files]
    with shoal.local() as store:
        whole = learn(store, [batch for turn in zip(*each, strict=True) for batch in turn])
    with shoal.local() as store:
        assert learn(store, topic(servers)) == whole


@pytest.mark.parametrize("warm_up", [False, True])
def test_workers_with_a_partition_each_have_the_bits_of_a_fit_of_files(
    servers: str, files: list[Path], warm_up: bool
) -> None:
    whole = run(PARTITIONS, {}, lambda store: learn(store, shoal.read_libsvm(files, batch_size=BATCH), warm_up=warm_up))
    found = run(PARTITIONS, {}, lambda store: learn(store, topic(servers), warm_up=warm_up))
    assert [one for one, _ in found] == [one for one, _ in whole]
    assert found[0][0][1] == PARTITIONS * EACH


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


@pytest.mark.parametrize("mode", [shoal.SSP(2), shoal.ASP()])
def test_without_bsp_every_example_is_learned_from(servers: str, mode: Any) -> None:
    found = run(2, {}, lambda store: learn(store, topic(servers)), mode)
    assert {one[1] for one, _ in found} == {PARTITIONS * EACH}


def test_more_workers_than_partitions_wait_for_the_others(servers: str) -> None:
    found = run(PARTITIONS + 1, {}, lambda store: learn(store, topic(servers)))
    assert {one[1] for one, _ in found} == {PARTITIONS * EACH}


# ---- a stop and a resume ---------------------------------------------------------------------------------------------


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


def test_what_arrives_after_a_stop_is_read_by_the_fit_that_resumes(servers: str, tmp_path: Path) -> None:
    """Batches are cut by a delay: each example counts once, however they are cut when they are read again."""
    reader = shoal.read_kafka(servers, "growing", batch_size=64, max_delay=0.05)
    sent = 0
    for attempt in range(4):
        for partition in range(2):
            produce(servers, "growing", lines_of(0)[:37], partition)
        sent += 74
        with shoal.LogisticRegression(warm_up=attempt == 3) if attempt < 0 else shoal.LogisticRegression() as model:
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
