"""Readers: batches of the size asked for, a background thread that always ends, errors that name their place."""

from __future__ import annotations

import bz2
import functools
import gc
import gzip
import lzma
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import bits, libsvm_row, rows_of, rows_of_batch
from shoal.base.prefetch import _Channel, prefetch
from shoal.data import Batch, read_criteo, read_libsvm
from shoal.data.files import LocalFile
from shoal.data.fill import TextSource, fill
from shoal.data.rows import LIBSVM
from shoal.data.source import Lines
from shoal.errors import CorruptionError

PACKERS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": functools.partial(lzma.compress, preset=1),
}
LINES = st.lists(
    st.sampled_from([b"1 3:1 4:2\n", b"0\n", b"\n", b"# c\n", b"-1 18446744073709551615:0.5\n", b"bad\n"]), max_size=30
)


@functools.cache
def numbered(count: int) -> bytes:
    """Lines that each have their own number as their only key."""
    return b"".join(b"%d %d:1\n" % (i % 2, i) for i in range(count))


def keys_of(reader) -> list[int]:
    return [key for batch in reader for key in batch.keys.tolist()]


def reading_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("shoal reader", "shoal parser"))]


parsers = pytest.mark.parametrize("threads", [1, 3])


def running(threads: int) -> int:
    """How many threads a pass has: with one that parses, that is the one that reads ahead."""
    return 1 + (threads if threads > 1 else 0)


@pytest.fixture
def file(tmp_path):
    """A function from bytes to a path."""

    def write(data: bytes, name: str = "x.libsvm") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    if reading_threads():
        gc.collect()  # takes a second where much has been imported
    assert reading_threads() == []


# ---- batches ----


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("batch_size", [1, 2, 7, 385, 1000, 10**12])
def test_every_batch_but_the_last_has_exactly_batch_size_examples(file, packer, batch_size):
    reader = read_libsvm(file(PACKERS[packer](numbered(1000))), batch_size=batch_size)
    sizes = [len(batch) for batch in reader]
    assert sizes == [batch_size] * (1000 // batch_size) + ([1000 % batch_size] if 1000 % batch_size else [])
    assert keys_of(reader) == list(range(1000))


@pytest.mark.slow
@given(lines=LINES, block=st.integers(1, 200), batch_size=st.integers(1, 9), threads=st.sampled_from([1, 1, 2]))
def test_batches_do_not_depend_on_where_blocks_end(tmp_path_factory, lines, block, batch_size, threads):
    data = b"".join(lines)
    path = tmp_path_factory.mktemp("blocks") / "x"
    path.write_bytes(data)
    source = Lines(LocalFile(str(path)), 0, 1, block_bytes=block, line_limit_bytes=1000)
    parts = [
        part for part in fill([TextSource(0, source)], LIBSVM, batch_size, skip=True, reader_threads=threads) if part
    ]
    batches = [batch for part in parts for batch, _ in part.batches]
    rows, malformed = rows_of(data, libsvm_row)
    assert bits([row for batch in batches for row in rows_of_batch(batch)]) == bits(rows)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(len(batch) > 0 for batch in batches)
    assert parts[-1].skipped == malformed


def test_rows_and_keys_grow_to_whatever_a_batch_needs(file):
    wide = b"1 " + b" ".join(b"%d:1" % i for i in range(300_000)) + b"\n"
    (batch,) = read_libsvm(file(b"0 7:1\n" * 5000 + wide + b"0 8:1\n"), batch_size=10_000)
    assert len(batch) == 5002
    assert batch.keys.tolist() == [7] * 5000 + [*range(300_000)] + [8]
    assert batch.indptr[-3:].tolist() == [5000, 305_000, 305_001]


def test_a_batch_keeps_its_content_when_the_pass_goes_on(file):
    reader = read_libsvm(file(numbered(50_000)), batch_size=100)
    batches = list(reader)
    assert [batch.keys[0] for batch in batches] == list(range(0, 50_000, 100))
    for batch in batches:
        batch.keys[:] = 0  # writable, and nobody else's
    assert keys_of(reader) == list(range(50_000))


def test_every_for_is_a_fresh_pass_and_passes_run_side_by_side(file):
    reader = read_libsvm(file(numbered(100)), batch_size=10)
    assert keys_of(reader) == keys_of(reader) == list(range(100))
    assert [(a.keys[0], b.keys[0]) for a, b in zip(reader, reader, strict=True)] == [(i, i) for i in range(0, 100, 10)]


@pytest.mark.parametrize("read", [read_libsvm, read_criteo])
def test_an_empty_file_has_no_batches(file, read):
    reader = read(file(b""))
    assert list(reader) == []
    assert reader.progress() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS)
def test_the_splits_of_a_file_hold_each_line_once(file, packer):
    reader = read_libsvm(file(PACKERS[packer](numbered(300_000))), batch_size=5000)
    for n in (1, 2, 3):
        shards = [keys_of(reader.split(rank, n)) for rank in range(n)]
        assert sorted(key for shard in shards for key in shard) == list(range(300_000))
        assert all(shard == sorted(shard) for shard in shards)
        assert all(shards)


def test_tiny_files_have_all_their_lines_in_any_number_of_splits(file):
    for count in range(5):
        reader = read_libsvm(file(numbered(count)[:-1]))
        for n in (1, 2, 3, 4, 5, 7, 8, 16, 39):
            assert [key for rank in range(n) for key in keys_of(reader.split(rank, n))] == list(range(count))


# ---- what a reader tells ----


def test_a_reader_tells_what_it_was_made_of(file):
    path = file(b"")
    reader = read_libsvm(path, batch_size=np.int64(5))
    assert (reader.path, reader.batch_size, reader.skipped, reader.progress()) == (str(path), 5, 0, 0.0)
    assert repr(reader) == f"<Reader libsvm {str(path)!r}, batches of 5>"
    assert repr(read_criteo(path).split(1, 3)) == f"<Reader criteo {str(path)!r}, split 1 of 3, batches of 8192>"


def test_a_split_keeps_batch_size_and_on_error(file):
    shard = read_libsvm(file(b"bad\n" + numbered(10)), batch_size=3, on_error="skip").split(0, 1)
    assert [len(batch) for batch in shard] == [3, 3, 3, 1]
    assert shard.skipped == 1


def test_a_reader_can_be_pickled_also_in_the_middle_of_a_pass(file):
    reader = read_libsvm(file(numbered(100)), batch_size=10).split(1, 2)
    for _ in reader:
        assert keys_of(pickle.loads(pickle.dumps(reader))) == keys_of(reader)


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS)
def test_progress_rises_from_zero_to_one(file, packer):
    reader = read_libsvm(file(PACKERS[packer](numbered(400_000))), batch_size=1000)
    assert reader.progress() == 0.0
    seen = [reader.progress() for _ in reader]
    assert seen == sorted(seen)
    assert 0.0 < seen[0] < 1.0 or packer in ("bzip2", "xz")  # these hold it all in what is read at once
    assert reader.progress() == 1.0
    next(iter(reader))
    assert reader.progress() <= seen[0]


def test_progress_tells_of_the_pass_that_began_last(file):
    reader = read_libsvm(file(numbered(200_000)), batch_size=1000)
    first, second = iter(reader), iter(reader)
    next(first)
    next(second)
    before = reader.progress()
    assert sum(1 for _ in first) == 199
    assert reader.progress() == before < 1.0
    second.close()


# ---- errors ----


@pytest.mark.parametrize("read", [read_libsvm, read_criteo])
def test_a_missing_file_is_an_error_at_once(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="missing"):
        read(tmp_path / "missing")


def test_a_directory_and_a_pipe_are_refused_at_once(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_libsvm(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_libsvm(tmp_path / "pipe")


def test_a_file_that_went_away_is_an_error_of_the_pass(file):
    path = file(numbered(3))
    reader = read_libsvm(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(reader)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -5}, "batch_size is -5"),
        ({"on_error": "ignore"}, "on_error is 'ignore': pass 'raise' or 'skip'"),
        ({"reader_threads": 0}, "reader_threads is 0"),
    ],
)
def test_parameters_out_of_range_are_refused(file, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_libsvm(file(b""), **change)


@pytest.mark.parametrize(("rank", "n"), [(2, 2), (-1, 2), (0, 0)])
def test_a_split_out_of_range_is_refused(file, rank, n):
    with pytest.raises(ValueError, match=f"split {rank} of {n}: pass a rank from 0"):
        read_libsvm(file(b"")).split(rank, n)


def test_numbers_that_are_not_whole_are_refused(file):
    reader = read_libsvm(file(b""))
    with pytest.raises(TypeError):
        read_libsvm(reader.path, batch_size=1.5)
    with pytest.raises(TypeError):
        reader.split(0.5, 2)


def test_a_split_is_not_cut_again(file):
    with pytest.raises(ValueError, match=r"split 0 of 2, .* is a split already: take split"):
        read_libsvm(file(b"")).split(0, 2).split(0, 2)


def test_an_error_names_file_line_column_byte_and_text(file):
    path = file(b"1 3:1\n\n# c\n0 5:x 6:1\n1 1:1\n")
    with pytest.raises(ValueError, match="line 4") as caught:
        list(read_libsvm(path))
    assert str(caught.value) == (
        f"{path}, line 4, column 5 (the line begins at byte 11): a value is not a finite decimal number: '0 5:x 6:1'; "
        f"on_error='skip' leaves such lines out and counts them"
    )


def test_an_error_shows_the_part_of_a_long_line_where_it_is(file):
    for front, shown in ((1, ": '1 1:1 bad 2:1"), (200, ":1 1:1 bad 2:1 2:1"), (400, "1:1 bad'")):
        back = b" 2:1" * (400 - front)
        path = file(b"1" + b" 1:1" * front + b" bad" + back)
        with pytest.raises(ValueError, match="bad") as caught:
            list(read_libsvm(path))
        assert shown in str(caught.value)
        assert (": '..." in str(caught.value)) == (front > 1)
        assert ("...'; on_error" in str(caught.value)) == (front < 400)
        assert len(str(caught.value)) < len(str(path)) + 350


def test_an_error_shows_bytes_that_are_no_text(file):
    with pytest.raises(ValueError, match=r"line 1, column 3 .*: '1 \\\\xff\\x00ä'"):
        list(read_libsvm(file(b"1 \xff\0" + "ä".encode())))


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS)
def test_an_error_in_a_split_names_the_line_of_the_whole_file(file, packer):
    lines = numbered(300_000).splitlines(keepends=True)
    lines[270_001] = b"1 bad\n"
    reader = read_libsvm(file(PACKERS[packer](b"".join(lines))))
    messages = []
    for rank in range(3):
        try:
            list(reader.split(rank, 3))
        except ValueError as error:
            messages.append(str(error))
    (message,) = messages
    assert f"line 270002, column 3 (the line begins at byte {len(b''.join(lines[:270_001]))})" in message


def test_batches_that_were_complete_before_an_error_are_handed_out(file):
    for good in (0, 1, 9, 10, 11, 20):
        seen = []
        with pytest.raises(ValueError, match=f"line {good + 1},"):
            seen.extend(len(batch) for batch in read_libsvm(file(numbered(good) + b"bad\n"), batch_size=10))
        assert seen == [10] * (good // 10)


def test_malformed_lines_are_counted_pass_by_pass(file):
    path = file(b"bad\n1 1:1\n0 2\n\n1 2:1\nworse")
    reader = read_libsvm(path, on_error="skip", batch_size=1)
    for _ in range(2):
        assert keys_of(reader) == [1, 2]
        assert reader.skipped == 3
    assert read_libsvm(file(b"bad\n" * 100_000), on_error="skip").skipped == 0
    reader = read_libsvm(path, on_error="skip")
    assert list(reader) == []
    assert reader.skipped == 100_000


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_line_beyond_16_mib_is_an_error_that_names_it_and_memory_stays_bounded(file, on_error):
    path = file(b"1 1:1\n" * 10)
    with path.open("r+b") as stream:
        stream.truncate(200 << 20)  # zeros, which take no room on the disk
    reader = read_libsvm(path, on_error=on_error)
    with pytest.raises(ValueError, match="line 11: the line is longer than 16777216 bytes"):
        list(reader)
    assert reader.progress() < 0.1


def test_damage_is_an_error_that_names_the_file(file):
    path = file(gzip.compress(numbered(100_000))[:-100], "x.gz")
    reader = read_libsvm(path, batch_size=100)
    with pytest.raises(CorruptionError, match=r"x\.gz: the gzip data is truncated"):
        list(reader)


# ---- threads ----


@pytest.mark.slow
@parsers
def test_a_pass_has_its_threads_and_they_end_with_the_data(file, threads):
    reader = read_libsvm(file(numbered(1_000_000)), batch_size=100, reader_threads=threads)
    for i, _ in enumerate(reader):
        assert i > 0 or len(reading_threads()) == running(threads)
        assert len(reading_threads()) <= running(threads)
    assert reading_threads() == []


@parsers
def test_the_threads_end_with_a_break(file, threads):
    for _ in read_libsvm(file(numbered(200_000)), batch_size=100, reader_threads=threads):
        break
    assert reading_threads() == []


@parsers
def test_the_threads_end_with_an_exception_in_the_loop(file, threads):
    def divide_all_by_zero():
        for batch in read_libsvm(file(numbered(200_000)), batch_size=100, reader_threads=threads):
            len(batch) / 0

    with pytest.raises(ZeroDivisionError):
        divide_all_by_zero()
    assert reading_threads() == []


@parsers
def test_the_threads_end_while_an_exception_keeps_the_frames_of_the_pass(file, threads):
    batches = iter(read_libsvm(file(numbered(200_000)), batch_size=100, reader_threads=threads))
    next(batches)
    with pytest.raises(KeyError) as caught:
        batches.throw(KeyError("from the loop"))
    assert reading_threads() == []
    assert caught.value.__traceback__ is not None


@parsers
def test_the_threads_end_with_an_error_in_the_data(file, threads):
    with pytest.raises(ValueError, match="line 1,"):
        list(read_libsvm(file(b"bad\n"), reader_threads=threads))
    assert reading_threads() == []


@pytest.mark.slow
@parsers
def test_the_threads_end_when_the_iterator_is_dropped(file, threads):
    batches = iter(read_libsvm(file(numbered(1_000_000)), batch_size=100, reader_threads=threads))
    assert reading_threads() == []  # nothing runs before something is asked for
    next(batches)
    assert len(reading_threads()) == running(threads)
    del batches
    gc.collect()
    assert reading_threads() == []


@pytest.mark.slow
@parsers
def test_the_threads_end_when_the_iterator_is_garbage_in_a_cycle(file, threads):
    batches = iter(read_libsvm(file(numbered(200_000)), batch_size=100, reader_threads=threads))
    next(batches)
    cycle = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    deadline = time.monotonic() + 10  # the reading thread may have found the cycle: then nothing waits for its end
    while reading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reading_threads() == []


@parsers
def test_the_file_is_closed_with_the_pass(file, threads):
    path = file(numbered(1_000_000))
    for _ in read_libsvm(path, batch_size=100, reader_threads=threads):
        opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert str(path) in opened
        break
    assert str(path) not in [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]


def test_the_producer_is_at_most_so_many_items_ahead():
    made = []

    def count():
        for i in range(100):
            made.append(i)
            yield i

    ahead = prefetch(count(), 3, "shoal reader of a test")
    for i, item in enumerate(ahead):
        assert item == i
        assert len(made) <= i + 1 + 3 + 1
    assert len(made) == 100
    ahead.close()


def test_a_producer_without_items_can_be_ended():
    yielded = threading.Event()

    def nothing():
        while True:
            yield None
            yielded.set()

    ahead = prefetch(nothing(), 3, "shoal reader of a test")
    assert yielded.wait(120)
    ahead.close()
    assert reading_threads() == []


def test_only_items_count_as_waiting():
    third = threading.Event()

    def mostly_nothing():
        for i in range(3):
            yield from [None] * 50
            if i == 2:
                third.set()
            yield i

    ahead = prefetch(mostly_nothing(), 2, "shoal reader of a test")
    assert third.wait(120)
    assert list(ahead) == [0, 1, 2]
    ahead.close()


def test_any_exception_of_the_producer_comes_out_behind_the_items_before_it():
    class Odd(BaseException):
        pass

    def fail():
        yield 1
        raise Odd

    ahead = prefetch(fail(), 3, "shoal reader of a test")
    assert next(ahead) == 1
    with pytest.raises(Odd):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()
    ahead.close()


def test_an_iterator_that_was_closed_has_ended():
    ahead = prefetch(iter_forever(), 3, "shoal reader of a test")
    assert next(ahead) == 0
    ahead.close()
    assert reading_threads() == []
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_channel_may_be_closed_by_a_thread_that_is_inside_of_it():
    channel: _Channel[int] = _Channel(1)
    with channel._changed:  # as a garbage collection at this place may
        channel.close()
    assert not channel.put(1)


def iter_forever():
    i = 0
    while True:
        yield i
        i += 1


@parsers
def test_passes_of_many_threads_do_not_disturb_each_other(file, threads):
    reader = read_libsvm(file(numbered(20_000)), batch_size=100, reader_threads=threads)
    results = []
    consumers = [threading.Thread(target=lambda: results.append(keys_of(reader))) for _ in range(6)]
    for thread in consumers:
        thread.start()
    for thread in consumers:
        thread.join()
    assert results == [list(range(20_000))] * 6


def run(script: str, path: Path, *words: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(path), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@parsers
def test_the_interpreter_exits_in_the_middle_of_a_pass(file, threads):
    script = """
import sys, shoal.data
reader = shoal.data.read_libsvm(sys.argv[1], batch_size=10, reader_threads=int(sys.argv[2]))
batches = [iter(reader) for _ in range(3)]
for each in batches: next(each)
print("read")
sys.exit(7)
"""
    done = run(script, file(numbered(200_000)), threads)
    assert (done.returncode, done.stdout, done.stderr) == (7, "read\n", "")


@pytest.mark.slow
@parsers
def test_a_forked_child_gets_an_error_from_the_old_pass_and_may_begin_a_new_one(file, threads):
    script = """
import os, sys, shoal.data
reader = shoal.data.read_libsvm(sys.argv[1], batch_size=10, reader_threads=int(sys.argv[2]))
batches = iter(reader)
next(batches)
for _ in range(10_000): pass
pid = os.fork()
if pid == 0:
    try:
        for _ in batches: pass
    except RuntimeError as error:
        print(error, flush=True)
    del batches
    print(sum(len(batch) for batch in reader), flush=True)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print("child", status, flush=True)
print(10 + sum(len(batch) for batch in batches))
"""
    done = run(script, file(numbered(200_000)), threads)
    assert done.stderr == ""
    first, *others = done.stdout.splitlines()
    assert "begin a new pass in this one" in first
    assert others == ["200000", "child 0", "200000"]


def test_a_forked_child_can_drop_a_pass_whose_lock_was_held_at_the_fork(file):
    script = """
import os, sys, threading
from shoal.base.prefetch import prefetch
def ones():
    while True: yield 1
ahead = prefetch(ones(), 1, "ones")
held, forked = threading.Event(), threading.Event()
def hold():
    with ahead._channel._changed:
        held.set()
        forked.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = os.fork()
if pid == 0:
    del ahead
    os._exit(3)
forked.set()
holder.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run(script, file(b""))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


# ---- Batch ----


def arrays(**change):
    good = {
        "labels": np.zeros(2, np.float32),
        "indptr": np.array([0, 1, 3], np.int64),
        "keys": np.zeros(3, np.uint64),
        "values": np.zeros(3, np.float32),
    }
    return good | change


def test_a_batch_counts_its_examples_and_features():
    batch = Batch(**arrays())
    assert (len(batch), batch.nnz) == (2, 3)
    assert len(Batch(**arrays(values=None))) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": np.zeros(2)}, "labels is float64\\[2\\]: pass float32"),
        ({"labels": np.zeros((2, 1), np.float32)}, "labels is float32\\[2, 1\\]"),
        ({"indptr": np.array([0, 3], np.int64)}, "indptr is int64\\[2\\]: pass int64\\[3\\]"),
        ({"indptr": np.array([0, 1, 3], np.int32)}, "indptr is int32"),
        ({"indptr": np.array([1, 1, 3], np.int64)}, "indptr runs from 1 to 3: it must run from 0 to 3"),
        ({"indptr": np.array([0, 1, 2], np.int64)}, "indptr runs from 0 to 2"),
        ({"keys": np.zeros(3, np.int64)}, "keys is int64"),
        ({"values": np.zeros(2, np.float32)}, "values is float32\\[2\\]: pass float32\\[3\\]"),
        ({"values": np.zeros(3)}, "values is float64"),
    ],
)
def test_arrays_that_are_no_batch_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Batch(**arrays(**change))
