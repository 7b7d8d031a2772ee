"""A endpoint's part in a save, message by message: the moment, the words, the end. And in a load."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import shoal
from endpoint_peer import Reply, Worker, deliver, released
from shoal import _core
from shoal._core import Op, Status, WireDtype
from shoal.cluster.protocol import tasks
from shoal.cluster.protocol.tasks import WriteTask
from shoal.cluster.server import save_task
from shoal.cluster.server.tasks import TaskRunner
from shoal.errors import StorageError
from shoal.table.shard import LocalShard
from shoal.table.spec import TableRecord, TableSpec
from table_specs import native_spec

BASE = [1, 2, 3, 4]
NAME = "".join(number.to_bytes(8, "little").hex() for number in BASE)
PLAIN, BASED, DELTA = (kind << 32 for kind in range(3))
HASHES = np.array([5, 1 << 63], np.uint64)


def served(mode: str = "bsp", workers: int = 2) -> _core.Endpoint:
    endpoint = _core.Endpoint(16, [(0, 16)])
    for table in (0, 1):
        endpoint.add_table(table, native_spec())
    endpoint.start_job(1, mode, 1 if mode == "ssp" else 0)
    for rank in range(workers):
        endpoint.admit(rank, 1, 0)
    return endpoint


def begin(*tables: int, sequence: int, rank: int = 0, base: list[int] | None = None, **fields: Any) -> list[Any]:
    return Worker(rank).numbers(Op.SAVE_BEGIN, [*(base or [0] * 4), *tables], sequence=sequence, **fields)


def tell(save: int, words: bytes = b"", rank: int = 0, more: list[int] | None = None, **fields: Any) -> list[Any]:
    numbers = np.array([save, *(more or [])], np.uint64)
    how = {"dtype": WireDtype.UINT8, "count": len(numbers), "sequence": (1 << 63) + 9, **fields}
    return Worker(rank)._message(Op.SAVE_POLL, [numbers, words], **how)


def end(save: int, *digest: int, sequence: int, rank: int = 0) -> list[Any]:
    return Worker(rank).numbers(Op.SAVE_END, [save, *digest], sequence=sequence)


def one(replies: list[Reply]) -> Reply:
    (reply,) = replies
    return reply


def asked(endpoint: _core.Endpoint, message: list[Any]) -> tuple[int, list[int]]:
    """What a SAVE_BEGIN is answered."""
    ((_, frames),) = endpoint.handle(b"peer", message)
    read = _core.decode(frames)
    return read.status, read.numbers.tolist()


def reported(endpoint: _core.Endpoint, message: list[Any]) -> tuple[int, bytes]:
    ((_, frames),) = endpoint.handle(b"peer", message)
    read = _core.decode(frames)
    assert read.status == Status.OK
    return read.count, read.values.tobytes()


def pushed(endpoint: _core.Endpoint, sequence: int, clock: int = 0, rank: int = 0) -> None:
    message = Worker(rank).push(HASHES, np.ones(2), sequence=sequence, clock=clock)
    assert one(deliver(endpoint, message)).status == Status.OK


def task_of(place: str, content: bytes, **how: Any) -> WriteTask:
    plain = {"options": {}, "token": "token", "stem": "stem", "version": 1, "durable": False, "tables": [], "kinds": []}
    return WriteTask(directory=place, content=content, **(plain | how))


def rows_of(save: _core.CheckpointSession, table: int = 0) -> dict[int, float]:
    found = {}
    for slot in save.slots:
        rows, section, _ = save.section(table, slot)
        found |= dict(
            zip(
                section[: 8 * rows].view(np.uint64).tolist(), section[64:].view(np.float32)[:rows].tolist(), strict=True
            )
        )
    return found


def test_it_begins_at_its_clock_in_all_tables_and_what_comes_behind_is_not_in_it() -> None:
    endpoint = served()
    pushed(endpoint, 1)
    deliver(endpoint, Worker(0).tick(0, [1]))
    status, _ = asked(endpoint, begin(PLAIN | 0, BASED | 1, sequence=2, clock=1))
    assert status == Status.DEFERRED
    pushed(endpoint, 3, clock=1)
    ended, began = (_core.decode(frames) for _, frames in endpoint.handle(b"two", Worker(1).tick(0, [])))
    if ended.op == Op.SAVE_BEGIN:
        ended, began = began, ended
    assert (ended.op, began.op, began.status, began.sequence) == (Op.TICK, Op.SAVE_BEGIN, Status.OK, 2)
    figures = began.numbers.tolist()
    assert figures[:3] == [1, 1, 2]
    assert figures[4:7] == [0, 1, 0]
    assert asked(endpoint, begin(PLAIN | 0, BASED | 1, sequence=2, clock=1)) == (Status.OK, figures)  # asked again
    deliver(endpoint, Worker(0).tick(1, [3]))
    deliver(endpoint, Worker(1).tick(1, []))
    save = endpoint.next_session()
    assert [list(some) for some in save.summaries] == [figures[:4], figures[4:]]
    assert rows_of(save) == {5: -1.0, 1 << 63: -1.0}
    assert rows_of(save, 1) == {}
    assert one(deliver(endpoint, end(2, *BASE, sequence=4))).status == Status.OK
    assert save.ended
    late = one(deliver(endpoint, begin(PLAIN | 0, sequence=5, clock=1)))
    assert (late.status, late.text) == (Status.BAD_REQUEST, "a save of clock 1 came after its end")


def test_words_go_to_and_fro_until_the_end() -> None:
    endpoint = served("asp")
    asked(endpoint, begin(PLAIN, sequence=1))
    save = endpoint.next_session()
    assert save.wait_request() == (0, b"")
    assert reported(endpoint, tell(1, b"write")) == (1, b"")
    assert save.wait_request() == (1, b"write")
    save.set_status(b"done")
    assert reported(endpoint, tell(1, b"write")) == (1, b"done")
    assert reported(endpoint, tell(7)) == (0, b"")
    assert reported(endpoint, tell(1, rank=1)) == (0, b"")  # another worker's
    waiting = threading.Thread(target=lambda: save.wait_request(2, 50.0))
    waiting.start()
    assert one(deliver(endpoint, end(1, sequence=2))).status == Status.OK
    waiting.join(120)
    assert not waiting.is_alive()
    assert reported(endpoint, tell(1)) == (0, b"")
    assert one(deliver(endpoint, end(1, sequence=2))).status == Status.OK  # sent again
    assert one(deliver(endpoint, end(1, sequence=3))).status == Status.OK  # nothing is to be given up
    refused = one(deliver(endpoint, end(1, *BASE, sequence=4)))
    assert (refused.status, refused.text) == (
        Status.BAD_REQUEST,
        "there is no such save: it was given up before it was written",
    )
    with pytest.raises(ValueError, match="this save has ended"):
        save.section(0, 0)


def test_a_request_to_begin_that_arrives_after_the_end_of_its_save_begins_nothing() -> None:
    endpoint = served("asp")
    asked(endpoint, begin(PLAIN, sequence=1, rank=1))
    assert asked(endpoint, begin(PLAIN, sequence=2)) == (Status.OK, [1, 1])  # worker 1 saves
    assert one(deliver(endpoint, end(2, sequence=3))).status == Status.OK
    assert one(deliver(endpoint, end(1, sequence=2, rank=1))).status == Status.OK
    endpoint.next_session()
    asked(endpoint, begin(PLAIN, sequence=4))
    save = endpoint.next_session()
    assert asked(endpoint, begin(PLAIN, sequence=2)) == (Status.OK, [])  # late
    assert not save.ended
    assert one(deliver(endpoint, end(4, *BASE, sequence=5))).status == Status.OK


def test_a_deferred_request_to_begin_whose_save_has_ended_begins_nothing() -> None:
    endpoint = served()
    status, _ = asked(endpoint, begin(PLAIN, sequence=1, clock=1))
    assert status == Status.DEFERRED
    assert one(deliver(endpoint, end(1, sequence=2))).status == Status.OK
    deliver(endpoint, Worker(0).tick(0, []))
    replies = [_core.decode(frames) for _, frames in endpoint.handle(b"two", Worker(1).tick(0, []))]
    begun = next(reply for reply in replies if reply.op == Op.SAVE_BEGIN)
    assert (begun.status, begun.numbers.tolist()) == (Status.OK, [])
    assert len(asked(endpoint, begin(PLAIN, sequence=1, rank=1, clock=1))[1]) == 4  # no other save holds the table


def test_a_delta_is_of_the_save_before_and_of_no_other() -> None:
    endpoint = served("asp")
    pushed(endpoint, 1)
    assert asked(endpoint, begin(DELTA, sequence=2, base=BASE)) == (Status.OK, [2, 0])
    assert asked(endpoint, begin(BASED, DELTA | 1, sequence=2, base=BASE)) == (Status.OK, [2, 1])
    assert asked(endpoint, begin(DELTA, sequence=2)) == (Status.OK, [2, 0])
    assert asked(endpoint, begin(BASED, sequence=2))[1][2] == 2
    assert asked(endpoint, begin(PLAIN, sequence=1, rank=1)) == (Status.OK, [1, 0])  # worker 0's is under way
    deliver(endpoint, end(2, *BASE, sequence=3))
    endpoint.next_session()
    deliver(endpoint, Worker().push(HASHES[:1], np.ones(1), sequence=4))
    assert asked(endpoint, begin(DELTA, sequence=5, base=[1, 2, 3, 5])) == (Status.OK, [2, 0])
    # Given up, it changes nothing: the next one has the same in it.
    for sequence in (5, 8):
        assert len(asked(endpoint, begin(DELTA, sequence=sequence, base=BASE))[1]) == 4
        save = endpoint.next_session()
        changes = [save.changes(0, slot) for slot in range(16)]
        assert [rows for rows, *_ in changes] == [1] + [0] * 15
        deliver(endpoint, end(sequence, sequence=sequence + 1))
    assert endpoint.shard(0).base() == ""  # a copy, for checks
    assert NAME.startswith("0100000000000000")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (begin(sequence=1), "a save names at least one table"),
        (begin(4 << 32, sequence=1), "there is no kind of save 4"),
        (begin(PLAIN, PLAIN | 1, PLAIN, sequence=1), "this table is being saved already"),
        (
            Worker()._message(Op.SAVE_POLL, [np.zeros(2, np.uint64), b""], dtype=WireDtype.UINT8, count=2, sequence=1),
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
    endpoint = served("asp")
    assert asked(endpoint, begin(PLAIN, PLAIN | 7, sequence=1))[0] == Status.NO_TABLE
    assert len(asked(endpoint, begin(PLAIN, sequence=1))[1]) == 4


@pytest.mark.parametrize("how", ["dismissed", "replaced", "another job", "another save", "closed"])
def test_it_ends_with_its_worker(how: str) -> None:
    endpoint = served("asp")
    asked(endpoint, begin(BASED, sequence=1))
    save = endpoint.next_session()
    if how == "dismissed":
        endpoint.dismiss(0, 1)
    elif how == "replaced":
        endpoint.admit(0, 2, 0)
    elif how == "another job":
        endpoint.start_job(2, "asp")
    elif how == "another save":
        assert len(asked(endpoint, begin(PLAIN, sequence=2))[1]) == 4
        assert len(asked(endpoint, begin(BASED, sequence=1))[1]) == 0  # what came late begins nothing
        assert not endpoint.next_session().ended
    else:
        endpoint.close_sessions()
        assert endpoint.next_session() is None
        assert "this server writes no checkpoints" in one(deliver(endpoint, begin(PLAIN, sequence=2))).text
    assert save.ended
    if how == "dismissed":
        assert len(asked(endpoint, begin(PLAIN, sequence=1, rank=1))[1]) == 4  # the table is free


def test_a_save_that_ends_because_slots_leave_is_answered_with_the_newer_epoch() -> None:
    endpoint = _core.Endpoint(16, [(0, 8), (8, 16)])
    endpoint.add_table(0, native_spec())
    endpoint.assign(1, [(0, 8), (8, 16)])
    endpoint.start_job(1, "asp", 0)
    endpoint.admit(0, 1, 0)
    assert asked(endpoint, begin(PLAIN, sequence=1, epoch=1))[0] == Status.OK
    session = endpoint.next_session()
    assert one(deliver(endpoint, tell(1, epoch=1))).status == Status.OK
    endpoint.assign(2, [(0, 8)])
    assert session is not None
    assert session.ended
    for message in (tell(1, epoch=1), begin(PLAIN, sequence=1, epoch=1)):
        assert one(deliver(endpoint, message)).status == Status.WRONG_EPOCH
    assert reported(endpoint, tell(1, epoch=2)) == (0, b"")
    assert asked(endpoint, begin(PLAIN, sequence=1, epoch=2)) == (Status.OK, [])


def test_a_table_that_goes_is_saved_as_it_was() -> None:
    endpoint = served("asp")
    pushed(endpoint, 1)
    asked(endpoint, begin(PLAIN, sequence=2))
    save = endpoint.next_session()
    pushed(endpoint, 3)
    endpoint.drop_table(0)
    assert rows_of(save) == {5: -1.0, 1 << 63: -1.0}
    endpoint.add_table(0, native_spec())
    assert len(asked(endpoint, begin(PLAIN, sequence=4))[1]) == 4


def test_parked_it_is_not_another_tables_business() -> None:
    endpoint = served()
    deliver(endpoint, Worker(0).tick(0, []))
    assert asked(endpoint, begin(PLAIN | 1, sequence=1, clock=1))[0] == Status.DEFERRED
    endpoint.drop_table(0)
    assert released(endpoint) == []
    deliver(endpoint, Worker(1).tick(0, []))
    assert endpoint.next_session().summaries[0][0] == 0


@pytest.mark.slow
def test_an_endpoint_that_hears_nothing_of_the_worker_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "VISIBILITY_SECONDS", 0.0)
    endpoint = served("asp")
    working = TaskRunner(endpoint)
    asked(endpoint, begin(PLAIN, sequence=1))
    task = task_of("nowhere", b"", patience=0.05)
    reported(endpoint, tell(1, msgspec.msgpack.encode(task)))
    deadline = time.monotonic() + 120
    while len(asked(endpoint, begin(PLAIN, sequence=2, rank=1))[1]) != 4:  # busy, while it is waited for
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert reported(endpoint, tell(1)) == (0, b"")
    working.stop()


@pytest.mark.parametrize("words", [b"\xc1", b"\x91" * 100_000 + b"\x00", b"nan", b"endless"])
def test_an_endpoint_that_cannot_read_what_the_worker_says_lets_go(
    words: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "VISIBILITY_SECONDS", 0.0)
    if words in (b"nan", b"endless"):
        words = msgspec.msgpack.encode(task_of("nowhere", b"", patience=float("nan") if words == b"nan" else 1e300))
    for first in (None, msgspec.msgpack.encode(task_of("nowhere", b"", patience=60.0))):
        endpoint = served("asp")
        working = TaskRunner(endpoint)
        asked(endpoint, begin(PLAIN, sequence=1))
        deadline = time.monotonic() + 120
        while first is not None and b"failed" not in reported(endpoint, tell(1, first))[1]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        reported(endpoint, tell(1, words))
        while reported(endpoint, tell(1)) != (0, b""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        working.stop()
    assert "the task that its worker sent cannot be read" in caplog.text


def test_an_endpoint_that_cannot_write_says_so_and_leaves_none_of_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_slots = save_task.write_slots

    def fail(*given: Any, **how: Any) -> None:
        assert write_slots(*given, **how)[0].rows == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other-0-0-0.slots", "stem-0-0-0.slots", "token"]
        raise StorageError("the disk is full")

    monkeypatch.setattr(save_task, "write_slots", fail)
    for name in ("token", "other-0-0-0.slots"):
        (tmp_path / name).write_bytes(b"seen")
    endpoint = served("asp")
    pushed(endpoint, 1)
    working = TaskRunner(endpoint)
    asked(endpoint, begin(PLAIN, sequence=2))
    spec = TableSpec(name="t", dim=1, optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros(), dtype="float32", seed=0)
    form = TableRecord.of(spec)
    task = task_of(str(tmp_path), b"seen", tables=[form], kinds=["plain"], patience=30.0, go=True)
    deadline = time.monotonic() + 120
    while not (words := reported(endpoint, tell(2, msgspec.msgpack.encode(task)))[1]) or b"failed" not in words:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report = msgspec.msgpack.decode(words, type=tasks.Report)
    assert (report.state, report.kind, report.text) == ("failed", "storage", "the disk is full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-0-0-0.slots", "token"]
    assert one(deliver(endpoint, end(2, sequence=3))).status == Status.OK
    working.stop()


# ---- loads -----------------------------------------------------------------------------------------------------------

LOAD = 3 << 32


def loading(endpoint: _core.Endpoint, *tables: int, sequence: int = 1, rank: int = 0) -> _core.CheckpointSession:
    """Begin a load of tables, and the exchange about it: sequences count on from there."""
    for k, table in enumerate(tables):
        message = Worker(rank).numbers(Op.LOAD_BEGIN, [0] * 16, sequence=sequence + k, table=table)
        assert one(deliver(endpoint, message)).status == Status.OK
    named = begin(*(LOAD | table for table in tables), sequence=sequence + len(tables), rank=rank, base=BASE)
    assert asked(endpoint, named) == (Status.OK, [0] * 4 * len(tables))
    return endpoint.next_session()


def section_of(values: list[float]) -> np.ndarray[Any, Any]:
    section = np.zeros(128, np.uint8)
    section[:16] = HASHES.view(np.uint8)
    section[64:72] = np.array(values, np.float32).view(np.uint8)
    return section


def load_end(endpoint: _core.Endpoint, sequence: int, table: int = 0) -> Reply:
    return one(deliver(endpoint, Worker().numbers(Op.LOAD_END, [9, 0], sequence=sequence, table=table)))


def test_what_a_thread_restores_takes_the_place_of_the_rows_at_the_end_of_the_load() -> None:
    endpoint = served("asp")
    pushed(endpoint, 1)
    load = loading(endpoint, 0, 1, sequence=2)
    assert load.restore(0, 2, section_of([3.0, 4.0])) == 2
    assert load.restore(1, 2, section_of([5.0, 6.0])) == 2
    pushed(endpoint, 5)  # goes on with the rows that are there
    assert one(deliver(endpoint, end(4, *BASE, sequence=6))).status == Status.OK
    assert load.ended
    assert len(endpoint.shard(1)) == 0
    for table in (0, 1):
        assert load_end(endpoint, 7 + table, table).status == Status.OK
    asked(endpoint, begin(PLAIN, PLAIN | 1, sequence=9))
    save = endpoint.next_session()
    assert rows_of(save) == {5: 3.0, 1 << 63: 4.0}
    assert rows_of(save, 1) == {5: 5.0, 1 << 63: 6.0}
    assert [figures[0] for figures in save.summaries] == [9, 9]


def test_of_what_is_restored_an_endpoint_keeps_its_own_slots() -> None:
    endpoint = served("asp")
    endpoint.set_map(1, [(8, 16)])
    endpoint.add_table(2, native_spec(admit=shoal.AfterCount(3)))
    message = Worker(epoch=1).numbers(Op.LOAD_BEGIN, [0] * 16, sequence=1, table=2)
    assert one(deliver(endpoint, message)).status == Status.OK
    asked(endpoint, begin(LOAD | 2, sequence=2, epoch=1))
    load = endpoint.next_session()
    assert load.slots == list(range(8, 16))
    rule = {"admit": shoal.AfterCount(3), "optimizer": shoal.SGD(lr=1.0), "init": shoal.Zeros()}
    whole = LocalShard.of(TableSpec(name="t", dim=1, dtype="float32", seed=0, **rule), 2, _core.ThreadPool(1))
    whole.push(_core.KeyBatch(np.arange(500, dtype=np.uint64), 2, _core.ThreadPool(1)), np.ones((500, 1), np.float32))
    filters = [whole.section(slot)[2] for slot in range(2)]
    assert min(filter.nbytes for filter in filters) > 0
    for slot, filter in enumerate(filters):
        load.restore_filter(0, 2, slot, filter)
    end_of_it = Worker(epoch=1).numbers(Op.LOAD_END, [9, 0], sequence=3, table=2)
    assert one(deliver(endpoint, end_of_it)).status == Status.OK
    kept = [endpoint.shard(2).section(slot)[2].nbytes for slot in range(16)]
    assert kept[:8] == [0] * 8
    assert min(kept[8:]) > 0


@pytest.mark.parametrize("how", ["given up", "dismissed", "another job", "another load"])
def test_of_a_load_that_is_given_up_nothing_stays(how: str) -> None:
    endpoint = served("asp")
    load = loading(endpoint, 0)
    load.restore(0, 2, section_of([3.0, 4.0]))
    if how == "given up":
        assert one(deliver(endpoint, end(2, sequence=3))).status == Status.OK
        assert load_end(endpoint, 4).text == "no load of this worker is under way: begin one first"
    elif how == "dismissed":
        endpoint.dismiss(0, 1)
    elif how == "another job":
        endpoint.start_job(2, "asp")
    else:
        other = loading(endpoint, 0, sequence=3)
        other.restore(0, 2, section_of([5.0, 6.0]))  # which it could not into the same rows
        assert not other.ended
    assert load.ended
    with pytest.raises(ValueError, match="this load has ended"):
        load.restore(0, 2, section_of([3.0, 4.0]))
    assert len(endpoint.shard(0)) == 0


def test_a_worker_saves_and_loads_at_once() -> None:
    endpoint = served("asp")
    pushed(endpoint, 1)
    asked(endpoint, begin(PLAIN, sequence=2))
    save = endpoint.next_session()
    load = loading(endpoint, 0, sequence=3)
    asked(endpoint, begin(PLAIN | 1, sequence=5))  # its next save ends the one before, and not the load
    assert save.ended
    assert not load.ended
    assert load.restore(0, 2, section_of([3.0, 4.0])) == 2
    for what, saved in ((load, False), (endpoint.next_session(), True)):
        with pytest.raises(ValueError, match=f"this session is a {'save' if saved else 'load'}: nothing is"):
            _ = what.restore(0, 2, section_of([3.0, 4.0])) if saved else what.section(0, 0)


def test_a_load_waits_for_no_clock() -> None:
    endpoint = served("bsp")
    deliver(endpoint, Worker(0).tick(0, []))  # the other worker has not
    message = Worker().numbers(Op.LOAD_BEGIN, [0] * 16, sequence=1, clock=1)
    assert one(deliver(endpoint, message)).status == Status.OK
    assert asked(endpoint, begin(LOAD, sequence=2, clock=1)) == (Status.OK, [0] * 4)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ([LOAD | 1], "no load of this worker is under way: begin one first"),
        ([LOAD, PLAIN | 1], "a session either saves or loads: begin two sessions"),
        ([PLAIN | 1, LOAD], "a session either saves or loads: begin two sessions"),
    ],
)
def test_a_load_that_has_not_begun_is_not_read(tables: list[int], text: str) -> None:
    endpoint = served("asp")
    deliver(endpoint, Worker().numbers(Op.LOAD_BEGIN, [0] * 16, sequence=1))
    reply = one(deliver(endpoint, begin(*tables, sequence=2)))
    assert (reply.status, reply.text) == (Status.BAD_REQUEST, text)
    reply = one(deliver(endpoint, begin(LOAD, sequence=2, rank=1)))  # another worker's
    assert reply.status == Status.BAD_REQUEST


@pytest.mark.slow
def test_a_push_that_a_save_has_no_room_for_is_put_off_and_then_done_while_others_are_served() -> None:
    rows, dim = 5000, 4096  # 80 MB: more than the 64 MiB that a save keeps before changes wait
    endpoint = _core.Endpoint(16, [(0, 16)])
    endpoint.add_table(0, native_spec(dim))
    endpoint.start_job(1, "asp")
    endpoint.admit(0, 1, 0)
    hashes = np.sort(_core.mix(np.arange(rows, dtype=np.uint64)))
    worker = Worker()
    for sequence, part in enumerate(np.array_split(hashes, 10), 1):
        message = worker.assign(part, np.ones((len(part), dim)), sequence=sequence)
        assert one(deliver(endpoint, message)).status == Status.OK
    assert asked(endpoint, begin(PLAIN, sequence=20))[0] == Status.OK
    statuses: list[int] = []
    for sequence, part in enumerate(np.array_split(hashes, 10), 21):
        message = worker.push(part, np.ones((len(part), dim)), sequence=sequence)
        for _ in range(5):
            statuses.append(one(deliver(endpoint, message)).status)
            if statuses[-1] == Status.OK:
                break
            assert statuses[-1] == Status.OVERLOADED
            assert one(deliver(endpoint, worker.pull(hashes[:1]))).status == Status.OK
    assert statuses[:5] == [Status.OK] * 5
    assert statuses.count(Status.OVERLOADED) in {3, 6, 9}  # each that comes too early, a few times
    assert one(deliver(endpoint, worker.pull(hashes))).values.max() < 1
