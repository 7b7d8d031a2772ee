"""A save or a load whose slots move: it fails as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shoal
from maps import map_of
from shoal import _core
from shoal.cluster.protocol.tasks import ReadTask
from shoal.cluster.worker.save import ServerSnapshotSet
from shoal.cluster.worker.tasks import TaskCoordinator
from table_specs import table_spec

SPEC = table_spec()
A, B = "tcp://a:1", "tcp://b:1"
BEFORE = map_of(1, (0, 8, A, 0), (8, 16, B, 1))
MOVED = map_of(2, (0, 4, A, 0), (4, 16, B, 1))
COPIED = map_of(2, (0, 8, A, 0), (8, 16, B, 1), backups=[(A, B)])  # the same slots, and a copy of some


class Channel:
    """Answers every request at once; the map changes with a request of some kind."""

    client = SimpleNamespace(timeout=60.0)
    numbers = 1  # in the answer to SAVE_BEGIN

    def __init__(self, op: int, map: Any) -> None:
        self.map, self._op, self._next = BEFORE, op, map
        self.ended: list[int | str] = []  # slots, one of each endpoint, or "all"
        self.lost = False  # the task, at the servers
        self.begun = 0

    def begin(self, op: int, table: int, **what: Any) -> Any:
        if op == self._op:
            self.map = self._next
        self.begun += op == _core.Op.SAVE_BEGIN
        if op == _core.Op.SAVE_END:
            self.ended.append(what.get("slot", "all"))
        owners = len(self.map.owners)
        answer = [np.zeros(self.numbers, np.uint64)] * owners if op == _core.Op.SAVE_BEGIN else (True, b"")

        def result(timeout: float | None = None) -> Any:
            if self.lost and op == _core.Op.SAVE_END:
                raise shoal.ShoalError("there is no such save")
            return answer

        return SimpleNamespace(sequence=1, clock=0, result=result)


@pytest.mark.parametrize("op", [_core.Op.SAVE_BEGIN, _core.Op.SAVE_POLL])
def test_a_task_fails_when_slots_move_and_is_cancelled_on_every_endpoint(op):
    channel: Any = Channel(op, MOVED)
    task = ReadTask(directory="/d", options={}, patience=60.0, digest="ab" * 32, slots=16)

    def run():
        with TaskCoordinator(channel, "load") as coordinator:
            coordinator._begin([1])
            coordinator._run_until("done", task)

    with pytest.raises(shoal.errors.ClusterChangedError, match=r"epoch 1 and has epoch 2.*kept, load again"):
        run()
    assert channel.ended == ["all"]  # one call, which follows the map


def test_a_save_begins_again_when_slots_move_before_it_has_begun_everywhere():
    channel: Any = Channel(_core.Op.SAVE_BEGIN, MOVED)
    channel.numbers = 4
    with ServerSnapshotSet(channel, [(0, SPEC, "plain")]) as snapshots:
        assert (channel.begun, channel.ended) == (2, ["all"])
        assert snapshots._poll(b"") == [None, None]
    assert channel.ended == ["all", "all"]


def test_a_save_that_a_server_does_not_end_is_cancelled_on_every_endpoint(caplog):
    """The message may have followed its slot to an endpoint that does not know the save."""
    channel: Any = Channel(-1, BEFORE)
    channel.numbers = 4
    with ServerSnapshotSet(channel, [(0, SPEC, "base")]) as snapshots:
        channel.lost = True
        snapshots.done("ab" * 32)
    assert channel.ended == [0, 8, "all"]
    assert "there is no such save" in caplog.text


def test_a_task_goes_on_when_only_copies_change():
    channel: Any = Channel(_core.Op.SAVE_POLL, COPIED)
    with TaskCoordinator(channel, "save") as coordinator:
        assert coordinator._begin([1]) == [[0], [0]]
        assert coordinator._poll(b"") == [None, None]
    assert channel.map is COPIED


class Forgetful(Channel):
    """Answers that it does not know a task, or the changes of table 0."""

    def begin(self, op: int, table: int, **what: Any) -> Any:
        call = super().begin(op, table, **what)
        if op == _core.Op.SAVE_POLL:
            call.result = lambda: (False, b"")
        elif op == _core.Op.SAVE_BEGIN:
            call.result = lambda: [np.array([2, 0], np.uint64)] * len(self.map.owners)
        return call


@pytest.mark.parametrize("silent", [0.0, 3600.0])
def test_a_server_that_does_not_know_a_save_has_cancelled_it_for_silence_only_if_there_was_one(silent, monkeypatch):
    channel: Any = Forgetful(_core.Op.SAVE_END, MOVED)
    task = ReadTask(directory="/d", options={}, patience=60.0, digest="ab" * 32, slots=16)
    with TaskCoordinator(channel, "save") as coordinator:
        coordinator._begin([1])
        coordinator._sent_at -= silent
        if silent:
            with pytest.raises(shoal.ShoalError, match="this worker has sent nothing for 3600 s"):
                coordinator._run_until("done", task)
        else:  # which repeats the save
            with pytest.raises(
                shoal.errors.ClusterChangedError, match=r"because slots have moved, or .* kept, save again"
            ):
                coordinator._run_until("done", task)


@pytest.mark.parametrize("last", ["ab" * 32, "cd" * 32], ids=["tracked", "another base"])
def test_changes_that_a_server_has_lost_are_no_mistake_of_the_caller(last):
    channel: Any = Forgetful(_core.Op.SAVE_END, MOVED)
    base: Any = SimpleNamespace(digest="ab" * 32, storage_dir="/saves/1")
    error = shoal.errors.SnapshotLostError if last == base.digest else ValueError
    with pytest.raises(error, match="the changes of table 't' since the save in /saves/1"):
        ServerSnapshotSet(channel, [(0, SPEC, "delta")], base, last=last)
