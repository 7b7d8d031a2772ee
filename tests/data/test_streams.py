"""Batches of streams: of a pipe, of files as they appear, of the partitions of a topic."""

from __future__ import annotations

import gzip
import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

import shoal
from mock_kafka import PARTITIONS, brokers, produce
from oracle.text import rows_of_batch
from shoal.data import Batch, Following, Reader
from shoal.data.live import Arrived, Part
from shoal.data.rebatch import Cursor
from shoal.data.stream import parts_of, side_by_side
from shoal.errors import CorruptionError, ShoalError

SECONDS = 30.0  # for anything to arrive


def lines(first: int, last: int) -> list[bytes]:
    return [b"%d %d:1" % (number % 2, number) for number in range(first, last)]


def keys(batch: Batch) -> list[int]:
    return batch.keys.tolist()


def take(arrivals: Generator[Arrived | None], examples: int) -> list[Arrived]:
    """Return what arrives until there are so many examples."""
    found: list[Arrived] = []
    last = time.monotonic() + SECONDS
    while sum(len(one.batch) for one in found) < examples:
        assert time.monotonic() < last, found
        if (got := next(arrivals)) is not None:
            found.append(got)
    return found


def is_quiet(arrivals: Generator[Arrived | None], seconds: float = 0.4) -> bool:
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        if next(arrivals) is not None:
            return False
    return True


# ---- pipes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[Any, Any]]:
    out, into = os.pipe()
    with open(out, "rb") as reader, open(into, "wb", buffering=0) as writer:
        yield reader, writer


@pytest.mark.parametrize("threads", [1, 3])
def test_an_incomplete_batch_of_a_pipe_leaves_after_the_delay(pipe: tuple[Any, Any], threads: int) -> None:
    out, into = pipe
    reader = shoal.read_libsvm(out, batch_size=4, reader_threads=threads).with_max_delay(0.1)
    with closing(cast("Generator[Batch]", iter(reader))) as batches:
        into.write(b"1 3:1\n0 4:1\n1 5")
        assert keys(next(batches)) == [3, 4]
        into.write(b":1\n" + b"0 6:1\n" * 4)
        assert keys(next(batches)) == [5, 6, 6, 6]
        assert keys(next(batches)) == [6]
        into.close()
        assert list(batches) == []


@pytest.mark.slow
def test_a_pipe_without_a_delay_has_batches_of_one_size(pipe: tuple[Any, Any]) -> None:
    out, into = pipe
    with closing(side_by_side(shoal.read_libsvm(out, batch_size=4), [Part()])) as arrivals:
        into.write(b"1 3:1\n0 4:1\n")
        assert is_quiet(arrivals)
        into.write(b"1 5:1\n0 6:1\n1 7:1\n")
        (got,) = take(arrivals, 4)
        assert keys(got.batch) == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_compressed_pipe_keeps_what_was_unpacked_while_it_is_idle(pipe: tuple[Any, Any]) -> None:
    out, into = pipe
    packed = gzip.compress(b"1 3:1\n0 4:1\n1 5:1\n")
    with closing(side_by_side(shoal.read_libsvm(out, batch_size=4).with_max_delay(0.1), [Part()])) as arrivals:
        for at in range(len(packed)):
            into.write(packed[at : at + 1])
            assert at not in (0, 5, 15) or is_quiet(arrivals, 0.1)
        into.close()
        assert [key for got in arrivals if got is not None for key in keys(got.batch)] == [3, 4, 5]


def test_a_pipe_whose_reader_has_left_ends_its_thread(pipe: tuple[Any, Any]) -> None:
    out, into = pipe
    into.write(b"1 3:1\n")
    before = threading.active_count()
    with closing(side_by_side(shoal.read_libsvm(out).with_max_delay(0.1), [Part()])) as arrivals:
        take(arrivals, 1)
    assert threading.active_count() == before


# ---- folders ---------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, first: int, last: int) -> None:
    """Write a file under a hidden name, and rename it into place."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.tmp")
    hidden.write_bytes(b"".join(line + b"\n" for line in lines(first, last)))
    hidden.rename(path)


def follow(folder: Path, **how: Any) -> Reader:
    return shoal.read_libsvm(Following(folder), batch_size=4, **how).with_max_delay(0.1)


@pytest.mark.slow
def test_files_are_read_as_they_appear_in_order_and_once(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-29T13/b", 20, 25)
    put(tmp_path, "2026-11-29T13/a", 10, 15)
    put(tmp_path, "2026-11-29T12/c", 0, 5)
    with closing(side_by_side(follow(tmp_path), [Part()])) as arrivals:
        assert [key for got in take(arrivals, 15) for key in keys(got.batch)] == [
            *range(5),
            *range(10, 15),
            *range(20, 25),
        ]
        assert is_quiet(arrivals)
        put(tmp_path, "2026-11-29T11/late", 30, 33)  # its name comes before all others
        assert [key for got in take(arrivals, 3) for key in keys(got.batch)] == [30, 31, 32]
        assert is_quiet(arrivals, 1.5)


@pytest.mark.slow
def test_files_that_are_being_written_are_not_read(tmp_path: Path) -> None:
    names = [".a", "_SUCCESS", "a.tmp", "a.inprogress", "_temporary/a", ".staging/x/a", "a._COPYING_"]
    for number, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1 %d:1\n" % number)
    with closing(side_by_side(follow(tmp_path), [Part()])) as arrivals:
        assert is_quiet(arrivals)
        for number, name in enumerate(names):
            (tmp_path / name).rename(tmp_path / f"{number}")
        found = [key for got in take(arrivals, len(names)) for key in keys(got.batch)]
        assert sorted(found) == [*range(len(names))]


@pytest.mark.slow
def test_the_position_of_a_folder_continues_behind_every_batch(tmp_path: Path) -> None:
    put(tmp_path, "a", 0, 9)
    put(tmp_path, "d/b", 10, 13)
    reader = follow(tmp_path)
    with closing(side_by_side(reader, [Part()])) as arrivals:
        found = take(arrivals, 12)
    whole = [key for got in found for key in keys(got.batch)]
    assert whole == [*range(9), *range(10, 13)]
    read, files = 0, ()
    for got in found:
        read, files = read + len(got.batch), (*files, *got.files)
        with closing(side_by_side(reader, [Part(begin=got.cursor, files=files)])) as arrivals:
            assert [key for one in take(arrivals, 12 - read) for key in keys(one.batch)] == whole[read:]
            assert is_quiet(arrivals, 0.2)


def test_a_file_that_was_read_may_be_deleted(tmp_path: Path) -> None:
    put(tmp_path, "a", 0, 4)
    reader = follow(tmp_path)
    with closing(side_by_side(reader, [Part()])) as arrivals:
        (got,) = take(arrivals, 4)
    (tmp_path / "a").unlink()
    put(tmp_path, "b", 10, 12)
    with closing(side_by_side(reader, [Part(begin=got.cursor, files=got.files)])) as arrivals:
        assert keys(take(arrivals, 2)[0].batch) == [10, 11]


@pytest.mark.slow
def test_splits_of_a_folder_have_each_line_once(tmp_path: Path) -> None:
    put(tmp_path, "a", 0, 50)
    put(tmp_path, "b", 50, 61)
    reader = follow(tmp_path)
    parts = parts_of(reader, 3)
    with closing(side_by_side(reader, parts)) as arrivals:
        found = take(arrivals, 61)
        assert is_quiet(arrivals)
    assert sorted(key for got in found for key in keys(got.batch)) == list(range(61))
    assert {got.part for got in found} == {0, 1, 2}


def test_a_file_that_grows_after_it_was_read_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "a", 0, 2)
    with closing(side_by_side(follow(tmp_path), [Part()])) as arrivals:
        take(arrivals, 2)
    opened = follow(tmp_path)
    with closing(side_by_side(opened, [Part()])) as arrivals:
        with open(tmp_path / "a", "ab") as file:
            splits = Following(tmp_path).splits(opened._settings, [])
            next(splits)
            file.write(b"1 9:1\n")
        with pytest.raises(CorruptionError, match="write a file under a hidden name"):
            next(splits)


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass at least one"):
        Following()
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        Following(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        Following(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be read as one"):
        shoal.read_libsvm([Following(tmp_path), tmp_path / "file"])
    with pytest.raises(ValueError, match="max_delay is 0"):
        follow(tmp_path).with_max_delay(0)


# ---- topics ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    pytest.importorskip("confluent_kafka")
    with brokers() as addresses:
        yield addresses


@pytest.mark.slow
def test_a_topic_is_read_to_its_end(servers: str) -> None:
    for partition in range(PARTITIONS):
        produce(servers, "end", lines(100 * partition, 100 * partition + 10), partition)
    reader = shoal.read_kafka(servers, "end", until="end", batch_size=4, max_delay=None)
    batches = [keys(batch) for batch in reader]
    assert [len(batch) for batch in batches] == [4] * 8 + [2] * 4
    for partition in range(PARTITIONS):  # in turns, whatever arrives first
        mine = [key for batch in batches[partition::PARTITIONS] for key in batch]
        assert mine == list(range(100 * partition, 100 * partition + 10))
    assert [len(list(reader.split(rank, 3))) for rank in range(3)] == [6, 3, 3]


@pytest.mark.slow
def test_an_incomplete_batch_of_a_partition_leaves_after_the_delay(servers: str) -> None:
    produce(servers, "delay", lines(0, 6))
    reader = shoal.read_kafka(servers, "delay", batch_size=4, max_delay=0.2)
    with closing(side_by_side(reader, parts_of(reader, 1))) as arrivals:
        found = take(arrivals, 6)
        assert [keys(got.batch) for got in found] == [[0, 1, 2, 3], [4, 5]]
        assert [got.cursor.offset for got in found] == [4, 6]
        produce(servers, "delay", lines(6, 7), 2)
        (got,) = take(arrivals, 1)
        assert (got.part, got.cursor.offset, keys(got.batch)) == (2, 1, [6])


def test_the_latest_start_reads_what_comes_later(servers: str) -> None:
    produce(servers, "latest", lines(0, 6))
    reader = shoal.read_kafka(servers, "latest", start="latest", max_delay=0.1)
    parts = parts_of(reader, 1)
    produce(servers, "latest", lines(6, 8))  # before anybody reads, and behind the start
    with closing(side_by_side(reader, parts)) as arrivals:
        assert [key for got in take(arrivals, 2) for key in keys(got.batch)] == [6, 7]


def test_a_partition_continues_behind_every_batch(servers: str) -> None:
    produce(servers, "positions", lines(0, 11))
    reader = shoal.read_kafka(servers, "positions", until="end", batch_size=4)
    (part, *_) = parts_of(reader, 1)
    found = [got for got in side_by_side(reader, [part]) if got is not None]
    for index, got in enumerate(found):
        again = Part(rank=0, num_splits=PARTITIONS, begin=got.cursor, end=part.end)
        rest = [keys(one.batch) for one in side_by_side(reader, [again]) if one is not None]
        assert rest == [keys(one.batch) for one in found[index + 1 :]]


def test_values_are_lines_or_objects(servers: str) -> None:
    produce(servers, "csv", [b"1,a.com,0.5", b'0,"b, c",', None, b"0,a.com,2\n1,d,1"])
    schema = {"label": "click", "numeric": ["price"]}
    columns = {"columns": ["click", "site", "price"]}
    (csv,) = shoal.read_kafka(servers, "csv", format="csv", schema=schema | columns, until="end")
    objects = [b'{"click": 1, "site": "a.com", "price": 0.5}', b'{"site": "b, c", "click": 0, "price": null}']
    produce(
        servers,
        "json",
        [*objects, b'{"click": 0, "site": "a.com", "price": 2}', b'{"click": 1, "site": "d", "price": 1}'],
    )
    pytest.importorskip("pyarrow")
    (json,) = shoal.read_kafka(servers, "json", format="json", schema=schema, until="end")
    assert list(rows_of_batch(csv)) == list(rows_of_batch(json))
    assert len(csv) == 4


def test_malformed_values_are_an_error_or_left_out(servers: str) -> None:
    produce(servers, "bad", [*lines(0, 3), b"1 x:y", *lines(3, 6)])
    with pytest.raises(ValueError, match=r"topic bad, partition 0, offset 0 or later: line 4 of a batch.*1 x:y"):
        list(shoal.read_kafka(servers, "bad", until="end"))
    reader = shoal.read_kafka(servers, "bad", until="end", on_error="skip", batch_size=3)
    assert [key for batch in reader for key in keys(batch)] == list(range(6))
    assert reader.skipped == 1
    produce(servers, "bad json", [b'{"click": 1}', b"{"])
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="a value is no JSON object"):
        list(shoal.read_kafka(servers, "bad json", format="json", schema={"label": "click"}, until="end"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"servers": ""}, "pass 'host:9092' and a name"),
        ({"start": "now"}, "pass 'earliest' or 'latest'"),
        ({"until": "now"}, "pass 'end'"),
        ({"format": "parquet"}, "pass one of libsvm"),
        ({"format": "csv", "schema": {"label": "a"}}, "messages have no header"),
        ({"format": "json", "schema": {"sep": ";"}}, "sep does not apply to json"),
        ({"format": "json", "on_error": "skip"}, "for lines of text"),
        ({"max_delay": -1.0}, "max_delay is -1"),
    ],
)
def test_what_is_no_topic_is_refused(how: dict[str, Any], message: str) -> None:
    pytest.importorskip("confluent_kafka")
    with pytest.raises(ValueError, match=message):
        shoal.read_kafka(**{"servers": "localhost:1", "topic": "t"} | how)


@pytest.mark.slow
def test_brokers_that_do_not_answer_are_an_error_with_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("confluent_kafka")
    from shoal.data.kafka import Topic

    topic = Topic("127.0.0.1:1", "t", timeout=2.0)
    with pytest.raises(ShoalError, match="do not answer"):
        topic.parts(1)
    assert [text.count("Connection refused") for text in caplog.messages] == [1]  # not at each attempt


def test_a_line_of_the_client_is_logged_once_a_minute_however_it_counts_its_repetitions() -> None:
    pytest.importorskip("confluent_kafka")
    from shoal.data.kafka import _Repeats

    kept = _Repeats()
    lines = ["refused (after 0ms)", "refused (after 3ms)", "refused (after 0ms, 1 identical error(s) suppressed)"]
    records = [logging.LogRecord("client", logging.ERROR, "", 0, line, (), None) for line in [*lines, "reset"]]
    for second, record in enumerate(records):
        record.created = second
    assert [kept.filter(record) for record in records] == [True, False, False, True]


def test_messages_that_kafka_has_deleted_are_an_error(servers: str) -> None:
    produce(servers, "gone", lines(0, 3))
    reader = shoal.read_kafka(servers, "gone")
    with (
        closing(side_by_side(reader, [Part(begin=Cursor(offset=1000), num_splits=PARTITIONS)])) as arrivals,
        pytest.raises(CorruptionError, match="are gone"),
    ):
        take(arrivals, 1)
