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
from shoal.table.spec import TableSpec

A, B = "tcp://a:1", "tcp://b:1"
BEFORE = map_of(1, (0, 8, A, 0), (8, 16, B, 1))
MOVED = map_of(2, (0, 4, A, 0), (4, 16, B, 1))
COPIED = map_of(2, (0, 8, A, 0), (8, 16, B, 1), backups=[(A, B)])  # the same slots, and a copy of some


class Channel:
    """Answers every request at once; the map changes with a request of some kind."""

    timeout = 60.0
    numbers = 1  # in the answer to SAVE_BEGIN

    def __init__(self, op: int, map: Any) -> None:
        self.map, self._op, self._next = BEFORE, op, map
        self.ended: list[int] = []
        self.begun = 0

    def begin(self, op: int, table: int, **what: Any) -> Any:
        if op == self._op:
            self.map = self._next
        self.begun += op == _core.Op.SAVE_BEGIN
        if op == _core.Op.SAVE_END:
            self.ended.append(what["slot"])
        owners = len(self.map.owners)
        answer = [np.zeros(self.numbers, np.uint64)] * owners if op == _core.Op.SAVE_BEGIN else (True, b"")
        return SimpleNamespace(
            call=SimpleNamespace(sequence=1, clock=0), result=lambda: answer, wait=lambda timeout=None: None
        )


@pytest.mark.parametrize("op", [_core.Op.SAVE_BEGIN, _core.Op.SAVE_POLL])
def test_a_task_fails_when_slots_move_and_is_cancelled_on_every_endpoint(op):
    channel: Any = Channel(op, MOVED)
    task = ReadTask(directory="/d", options={}, patience=60.0, digest="ab" * 32, slots=16)

    def run():
        with TaskCoordinator(channel, "load") as coordinator:
            coordinator._begin([1])
            coordinator._run_until("done", task)

    with pytest.raises(shoal.ClusterChangedError, match=r"epoch 1 and has epoch 2.*kept, load again"):
        run()
    assert channel.ended == [0, 4]  # where it may have begun: an endpoint without slots has cancelled it


def test_a_save_begins_again_when_slots_move_before_it_has_begun_everywhere():
    channel: Any = Channel(_core.Op.SAVE_BEGIN, MOVED)
    channel.numbers = 4
    spec = TableSpec(name="t", dim=1, optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros(), dtype="float32", seed=0)
    with ServerSnapshotSet(channel, [(0, spec, "plain")]) as snapshots:
        assert (channel.begun, channel.ended) == (2, [0, 4])
        assert snapshots._poll(b"") == [None, None]
    assert channel.ended == [0, 4, 0, 4]


def test_a_task_goes_on_when_only_copies_change():
    channel: Any = Channel(_core.Op.SAVE_POLL, COPIED)
    with TaskCoordinator(channel, "save") as coordinator:
        assert coordinator._begin([1]) == [[0], [0]]
        assert coordinator._poll(b"") == [None, None]
    assert channel.map is COPIED
