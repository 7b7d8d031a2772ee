"""Files that change while they are read, streams that are slow, and line ends and separators of other kinds."""

from __future__ import annotations

import gzip
import os
import threading

import numpy as np
import pytest

import shoal
from shoal.errors import CorruptionError

LINE = "%d %d:1\n"


def libsvm(path, begin, end, mode="w"):
    with path.open(mode) as file:
        file.writelines(LINE % (i % 2, 10**9 + i) for i in range(begin, end))


def keys(reader):
    return [int(key) - 10**9 for batch in reader for key in batch.keys]


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rest", [300_000, 300_005, 0])
def test_a_file_that_shrinks_during_a_pass_is_an_error(tmp_path, rest, threads):
    path = tmp_path / "x.svm"
    libsvm(path, 0, 400_000)
    size = path.stat().st_size
    batches = iter(shoal.read_libsvm(path, batch_size=1000, reader_threads=threads))
    seen = keys([next(batches)])
    os.truncate(path, rest)
    with pytest.raises(CorruptionError, match=rf"x\.svm ends after \d+ bytes, and had {size} when the pass began"):
        seen.extend(key for batch in batches for key in keys([batch]))
    assert seen == list(range(len(seen)))  # no line in part
    assert len(seen) % 1000 == 0


def test_a_split_that_begins_behind_the_end_of_a_file_that_shrank_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.svm"
    libsvm(path, 0, 1000)
    splits = [shoal.read_libsvm(path).split(rank, 2) for rank in range(2)]
    monkeypatch.setattr(type(splits[0]._files[0]), "size", lambda self: 100_000)
    for split in [*splits, shoal.read_libsvm(path)]:
        with pytest.raises(CorruptionError, match=r"x\.svm"):
            list(split)


def test_a_file_that_changes_between_the_passes_of_its_splits_is_an_error(tmp_path):
    path = tmp_path / "x.svm"
    libsvm(path, 0, 1000)
    whole = shoal.read_libsvm(path)
    first = keys(whole.split(0, 2))
    libsvm(path, 1000, 1500, "a")
    with pytest.raises(CorruptionError, match=r"x\.svm has \d+ bytes, and had \d+ when it was split: splits of a file"):
        list(whole.split(1, 2))
    fresh = shoal.read_libsvm(path)
    assert keys(fresh.split(0, 2)) + keys(fresh.split(1, 2)) == list(range(1500))
    assert len(first) == 500
    ranges = shoal.read_libsvm(path).splits(4000)
    libsvm(path, 0, 1, "a")
    with pytest.raises(CorruptionError, match="when it was split"):
        list(ranges[-1])


def test_lines_that_are_appended_during_a_pass_belong_to_the_next_one(tmp_path):
    path = tmp_path / "x.svm"
    libsvm(path, 0, 100_000)
    reader = shoal.read_libsvm(path, batch_size=100)
    batches = iter(reader)
    seen = keys([next(batches)])
    libsvm(path, 100_000, 100_010, "a")
    seen += keys(batches)
    assert seen == list(range(100_000))
    assert len(keys(reader)) == 100_010


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_stream_delivers_each_batch_when_its_lines_have_arrived(threads, packed, buffered):
    read, write = os.pipe()
    arrived = threading.Semaphore(0)
    late = []

    def produce():
        with os.fdopen(write, "wb") as pipe:
            for i in range(5):
                text = "".join(LINE % (1, 10**9 + 10 * i + j) for j in range(10)).encode()
                pipe.write(gzip.compress(text) if packed else text)
                pipe.flush()
                # The next lines come when the batch of these was delivered.
                if not arrived.acquire(timeout=60):
                    late.append(i)
                    return

    thread = threading.Thread(target=produce)
    thread.start()
    with os.fdopen(read, "rb", buffering=-1 if buffered else 0) as pipe:
        seen = []
        for batch in shoal.read_libsvm(pipe, batch_size=10, reader_threads=threads):
            seen += keys([batch])
            arrived.release()
    thread.join()
    assert late == []
    assert seen == list(range(50))


def test_a_stream_that_does_not_block_is_refused():
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.write(write, b"1 1:1\n")
    with os.fdopen(read, "rb") as pipe, pytest.raises(BlockingIOError, match="non-blocking"):
        list(shoal.read_libsvm(pipe))
    os.close(write)


# ---- line ends and separators ----------------------------------------------------------------------------------------

CR_ONLY = {
    "csv": (b"click,site\r1,a\r0,b\r", {"label": "click"}),
    "vw": (b"1 |a x\r-1 |a y\r", {}),
    "libsvm": (b"1 1:1\r0 2:1", {}),
    "libffm": (b"1 0:1:1\r0 0:2:1\r", {}),
    "criteo": (b"1" + b"\t1" * 39 + b"\r0" + b"\t1" * 39 + b"\r", {}),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", CR_ONLY)
def test_a_file_whose_lines_end_with_carriage_returns_alone_is_refused(tmp_path, form, threads):
    data, how = CR_ONLY[form]
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"x.*: a carriage return \(CR\) stands within the first line: .* write newlines"
    ):
        list(getattr(shoal, f"read_{form}")(path, **how, reader_threads=threads))
    path.write_bytes(data.replace(b"\r", b"\r\n"))
    assert sum(map(len, getattr(shoal, f"read_{form}")(path, **how))) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_header_alone_is_checked_too(tmp_path, threads):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("click,site\n1,a\n")
    bad.write_text("clicks,site\n")
    with pytest.raises(ValueError, match=r"bad\.csv, line 1: column 'click' is not there"):
        list(shoal.read_csv([good, bad], label="click", reader_threads=threads))
    bad.write_text("")
    assert sum(map(len, shoal.read_csv([good, bad], label="click", reader_threads=threads))) == 1


@pytest.mark.parametrize("other", [";", "\t", "|"])
def test_a_file_with_another_separator_names_it(tmp_path, other):
    path = tmp_path / "x.csv"
    path.write_text(f"click{other}site{other}user\n1{other}a{other}b\n")
    with pytest.raises(ValueError, match=r"line 1: the header has no ',', and 2 times .*: pass sep=.* \(--sep\)"):
        list(shoal.read_csv(path, label="click"))
    (batch,) = shoal.read_csv(path, label="click", sep=other)
    assert np.diff(batch.indptr).tolist() == [2]


def test_a_cell_with_a_line_break_names_the_remedy(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('click,site\n1,"a\nb"\n')
    with pytest.raises(
        ValueError, match=r"line 2, column 3 .*: a row is one line, so replace line breaks in its cells"
    ):
        list(shoal.read_csv(path, label="click"))
