"""A service's part in a save, message by message: the moment, the words, the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import shoal
from service_peer import SGD, Reply, Worker, deliver, released
from shoal import _core
from shoal._core import Op, Status, WireDtype
from shoal.cluster import saving
from shoal.errors import StorageError
from shoal.table import TableForm, TableSpec

BASE = [1, 2, 3, 4]
NAME = "".join(number.to_bytes(8, "little").hex() for number in BASE)
PLAIN, BASED, DELTA = (kind << 32 for kind in range(3))
HASHES = np.array([5, 1 << 63], np.uint64)

pytestmark = pytest.mark.timeout(60)


def served(mode: str = "bsp", workers: int = 2) -> _core.Service:
    service = _core.Service(16, 0, 16)
    for table in (0, 1):
        service.add_table(table, 1, **SGD)
    service.start_job(1, mode, 1 if mode == "ssp" else 0)
    for rank in range(workers):
        service.admit(rank, 1, 0)
    return service


def begin(*tables: int, sequence: int, rank: int = 0, base: list[int] | None = None, **fields: Any) -> list[Any]:
    return Worker(rank).numbers(Op.SAVE_BEGIN, [*(base or [0] * 4), *tables], sequence=sequence, **fields)


def tell(save: int, words: bytes = b"", rank: int = 0, more: list[int] | None = None) -> list[Any]:
    numbers = np.array([save, *(more or [])], np.uint64)
    how = {"dtype": WireDtype.UINT8, "count": len(numbers), "sequence": (1 << 63) + 9}
    return Worker(rank)._message(Op.SAVE_TELL, [numbers, words], **how)


def end(save: int, *digest: int, sequence: int, rank: int = 0) -> list[Any]:
    return Worker(rank).numbers(Op.SAVE_END, [save, *digest], sequence=sequence)


def one(replies: list[Reply]) -> Reply:
    (reply,) = replies
    return reply


def asked(service: _core.Service, message: list[Any]) -> tuple[int, list[int]]:
    """What a SAVE_BEGIN is answered."""
    ((_, frames),) = service.handle(b"peer", message)
    read = _core.decode(frames)
    return read.status, read.numbers.tolist()


def told(service: _core.Service, message: list[Any]) -> tuple[int, bytes]:
    ((_, frames),) = service.handle(b"peer", message)
    read = _core.decode(frames)
    assert read.status == Status.OK
    return read.count, read.values.tobytes()


def pushed(service: _core.Service, sequence: int, clock: int = 0, rank: int = 0) -> None:
    message = Worker(rank).push(HASHES, np.ones(2), sequence=sequence, clock=clock)
    assert one(deliver(service, message)).status == Status.OK


def rows_of(save: _core.Save, table: int = 0) -> dict[int, float]:
    found = {}
    for slot in range(save.first_slot, save.end_slot):
        rows, section, _ = save.section(table, slot)
        found |= dict(
            zip(
                section[: 8 * rows].view(np.uint64).tolist(), section[64:].view(np.float32)[:rows].tolist(), strict=True
            )
        )
    return found


def test_it_begins_at_its_clock_in_all_tables_and_what_comes_behind_is_not_in_it() -> None:
    service = served()
    pushed(service, 1)
    deliver(service, Worker(0).tick(0, [1]))
    status, _ = asked(service, begin(PLAIN | 0, BASED | 1, sequence=2, clock=1))
    assert status == Status.PARKED
    pushed(service, 3, clock=1)
    ended, began = (_core.decode(frames) for _, frames in service.handle(b"two", Worker(1).tick(0, [])))
    if ended.op == Op.SAVE_BEGIN:
        ended, began = began, ended
    assert (ended.op, began.op, began.status, began.sequence) == (Op.TICK, Op.SAVE_BEGIN, Status.OK, 2)
    figures = began.numbers.tolist()
    assert figures[:3] == [1, 1, 2]
    assert figures[4:7] == [0, 1, 0]
    assert asked(service, begin(PLAIN | 0, BASED | 1, sequence=2, clock=1)) == (Status.OK, figures)  # asked again
    deliver(service, Worker(0).tick(1, [3]))
    deliver(service, Worker(1).tick(1, []))
    save = service.next_save()
    assert [list(some) for some in save.figures] == [figures[:4], figures[4:]]
    assert rows_of(save) == {5: -1.0, 1 << 63: -1.0}
    assert rows_of(save, 1) == {}
    assert one(deliver(service, end(2, *BASE, sequence=4))).status == Status.OK
    assert save.ended
    late = one(deliver(service, begin(PLAIN | 0, sequence=5, clock=1)))
    assert (late.status, late.text) == (Status.BAD_REQUEST, "a save of clock 1 came after its end")


def test_words_go_to_and_fro_until_the_end() -> None:
    service = served("asp")
    asked(service, begin(PLAIN, sequence=1))
    save = service.next_save()
    assert save.heard() == (0, b"")
    assert told(service, tell(1, b"write")) == (1, b"")
    assert save.heard() == (1, b"write")
    save.say(b"done")
    assert told(service, tell(1, b"write")) == (1, b"done")
    assert told(service, tell(7)) == (0, b"")
    assert told(service, tell(1, rank=1)) == (0, b"")  # another worker's
    waiting = threading.Thread(target=lambda: save.heard(2, 50.0))
    waiting.start()
    assert one(deliver(service, end(1, sequence=2))).status == Status.OK
    waiting.join(20)
    assert not waiting.is_alive()
    assert told(service, tell(1)) == (0, b"")
    assert one(deliver(service, end(1, sequence=2))).status == Status.OK  # sent again
    assert one(deliver(service, end(1, sequence=3))).status == Status.OK  # nothing is to be given up
    refused = one(deliver(service, end(1, *BASE, sequence=4)))
    assert (refused.status, refused.text) == (
        Status.BAD_REQUEST,
        "there is no such save: it was given up before it was written",
    )
    with pytest.raises(ValueError, match="this save has ended"):
        save.section(0, 0)


def test_a_delta_is_of_the_save_before_and_of_no_other() -> None:
    service = served("asp")
    pushed(service, 1)
    assert asked(service, begin(DELTA, sequence=2, base=BASE)) == (Status.OK, [2, 0])
    assert asked(service, begin(BASED, DELTA | 1, sequence=2, base=BASE)) == (Status.OK, [2, 1])
    assert asked(service, begin(DELTA, sequence=2)) == (Status.OK, [2, 0])
    assert asked(service, begin(BASED, sequence=2))[1][2] == 2
    assert asked(service, begin(PLAIN, sequence=1, rank=1)) == (Status.OK, [1, 0])  # worker 0's is under way
    deliver(service, end(2, *BASE, sequence=3))
    service.next_save()
    deliver(service, Worker().push(HASHES[:1], np.ones(1), sequence=4))
    assert asked(service, begin(DELTA, sequence=5, base=[1, 2, 3, 5])) == (Status.OK, [2, 0])
    # Given up, it changes nothing: the next one has the same in it.
    for sequence in (5, 8):
        assert len(asked(service, begin(DELTA, sequence=sequence, base=BASE))[1]) == 4
        save = service.next_save()
        changes = [save.changes(0, slot) for slot in range(16)]
        assert [rows for rows, *_ in changes] == [1] + [0] * 15
        deliver(service, end(sequence, sequence=sequence + 1))
    assert service.shard(0).base() == ""  # a copy, for checks
    assert NAME.startswith("0100000000000000")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (begin(sequence=1), "a save is of one table at least"),
        (begin(3 << 32, sequence=1), "there is no kind of save 3"),
        (begin(PLAIN, PLAIN | 1, PLAIN, sequence=1), "this table is being saved already"),
        (
            Worker()._message(Op.SAVE_TELL, [np.zeros(2, np.uint64), b""], dtype=WireDtype.UINT8, count=2, sequence=1),
            "one",
        ),
        (end(1, 2, sequence=1), "got 2 numbers"),
        (Worker(0xFFFFFFFF).numbers(Op.SAVE_BEGIN, [0] * 5, sequence=1), "needs a worker"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(message: list[Any], text: str) -> None:
    reply = one(deliver(served("asp"), message))
    assert reply.status == Status.BAD_REQUEST
    assert text in reply.text


def test_a_save_of_no_table_that_is_there_begins_nothing() -> None:
    service = served("asp")
    assert asked(service, begin(PLAIN, PLAIN | 7, sequence=1))[0] == Status.NO_TABLE
    assert len(asked(service, begin(PLAIN, sequence=1))[1]) == 4


@pytest.mark.parametrize("how", ["dismissed", "replaced", "another job", "another save", "closed"])
def test_it_ends_with_its_worker(how: str) -> None:
    service = served("asp")
    asked(service, begin(BASED, sequence=1))
    save = service.next_save()
    if how == "dismissed":
        service.dismiss(0, 1)
    elif how == "replaced":
        service.admit(0, 2, 0)
    elif how == "another job":
        service.start_job(2, "asp")
    elif how == "another save":
        assert len(asked(service, begin(PLAIN, sequence=2))[1]) == 4
        assert len(asked(service, begin(BASED, sequence=1))[1]) == 0  # what came late begins nothing
        assert not service.next_save().ended
    else:
        service.close_saves()
        assert service.next_save() is None
        assert "nobody writes saves here" in one(deliver(service, begin(PLAIN, sequence=2))).text
    assert save.ended
    if how == "dismissed":
        assert len(asked(service, begin(PLAIN, sequence=1, rank=1))[1]) == 4  # the table is free


def test_a_table_that_goes_is_saved_as_it_was() -> None:
    service = served("asp")
    pushed(service, 1)
    asked(service, begin(PLAIN, sequence=2))
    save = service.next_save()
    pushed(service, 3)
    service.drop_table(0)
    assert rows_of(save) == {5: -1.0, 1 << 63: -1.0}
    service.add_table(0, 1, **SGD)
    assert len(asked(service, begin(PLAIN, sequence=4))[1]) == 4


def test_parked_it_is_not_another_tables_business() -> None:
    service = served()
    deliver(service, Worker(0).tick(0, []))
    assert asked(service, begin(PLAIN | 1, sequence=1, clock=1))[0] == Status.PARKED
    service.drop_table(0)
    assert released(service) == []
    deliver(service, Worker(1).tick(0, []))
    assert service.next_save().figures[0][0] == 0


def test_an_endpoint_that_hears_nothing_of_the_worker_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_SEEING", 0.0)
    service = served("asp")
    writing = saving.Writing(service)
    asked(service, begin(PLAIN, sequence=1))
    task = saving.Task("nowhere", {}, "token", b"", "stem", 1, True, [], [], patience=0.05)
    told(service, tell(1, msgspec.msgpack.encode(task)))
    deadline = time.monotonic() + 30
    while len(asked(service, begin(PLAIN, sequence=2, rank=1))[1]) != 4:  # busy, while it is waited for
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told(service, tell(1)) == (0, b"")
    writing.stop()


def test_an_endpoint_that_cannot_write_says_so_and_leaves_none_of_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_slots = saving.write_slots

    def fail(*given: Any, **how: Any) -> None:
        assert write_slots(*given, **how)[0].rows == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other-0-0-0.slots", "stem-0-0-0.slots", "token"]
        raise StorageError("the disk is full")

    monkeypatch.setattr(saving, "write_slots", fail)
    for name in ("token", "other-0-0-0.slots"):
        (tmp_path / name).write_bytes(b"seen")
    service = served("asp")
    pushed(service, 1)
    writing = saving.Writing(service)
    asked(service, begin(PLAIN, sequence=2))
    spec = TableSpec(name="t", dim=1, optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros(), dtype="float32", seed=0)
    form = TableForm.of(spec)
    task = saving.Task(str(tmp_path), {}, "token", b"seen", "stem", 1, False, [form], ["plain"], 30.0, write=True)
    deadline = time.monotonic() + 30
    while not (words := told(service, tell(2, msgspec.msgpack.encode(task)))[1]) or b"failed" not in words:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report = msgspec.msgpack.decode(words, type=saving.Report)
    assert (report.state, report.kind, report.text) == ("failed", "storage", "the disk is full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-0-0-0.slots", "token"]
    assert one(deliver(service, end(2, sequence=3))).status == Status.OK
    writing.stop()
