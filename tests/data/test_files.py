"""Files: paths, patterns, lists, streams and URLs; splits and batches over several of them."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest

from shoal.data import read_criteo, read_libsvm
from shoal.errors import StorageError

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def numbered(begin: int, end: int) -> bytes:
    return b"".join(b"1 %d:1\n" % i for i in range(begin, end))


def keys_of(reader) -> list[int]:
    return [key for batch in reader for key in batch.keys.tolist()]


@pytest.fixture
def days(tmp_path):
    """Three files: keys 0 to 99, 100 to 104 in gzip, 105 to 299 in zstd."""
    (tmp_path / "day_0.txt").write_bytes(numbered(0, 100)[:-1])  # its last line lacks a newline
    (tmp_path / "day_1.txt").write_bytes(gzip.compress(numbered(100, 105)))
    (tmp_path / "day_2.txt").write_bytes(zstd.compress(numbered(105, 300)))
    return tmp_path


# ---- several files ----


@pytest.mark.parametrize("threads", [1, 3])
def test_a_list_is_read_in_its_order_and_batches_run_on(days, threads):
    paths = [days / "day_0.txt", str(days / "day_1.txt"), days / "day_2.txt"]
    reader = read_libsvm(paths, batch_size=70, reader_threads=threads)
    assert [len(batch) for batch in reader] == [70, 70, 70, 70, 20]
    assert keys_of(reader) == list(range(300))
    assert keys_of(read_libsvm(paths[::-1])) == [*range(105, 300), *range(100, 105), *range(100)]
    assert reader.paths == tuple(map(str, paths))
    assert reader.path == f"{paths[0]} and 2 more"


def test_a_pattern_is_read_in_the_order_of_names(days):
    assert keys_of(read_libsvm(days / "day_*.txt")) == list(range(300))
    assert keys_of(read_libsvm(str(days / "**" / "day_[02].txt"))) == [*range(100), *range(105, 300)]
    with pytest.raises(FileNotFoundError, match=r"no file matches .*night_\*"):
        read_libsvm(days / "night_*")


def test_a_name_with_the_signs_of_a_pattern_is_a_name_if_there_is_such_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_bytes(numbered(0, 3))
    assert keys_of(read_libsvm(tmp_path / "a[1].txt")) == [0, 1, 2]


def test_of_many_files_each_belongs_to_one_split_and_few_are_cut(days):
    reader = read_libsvm(days / "day_*.txt", batch_size=10)
    assert keys_of(reader.split(1, 3)) == list(range(100, 105))
    assert keys_of(reader.split(0, 2)) == [*range(100), *range(105, 300)]
    for n in (4, 5, 11):
        assert sorted(key for rank in range(n) for key in keys_of(reader.split(rank, n))) == list(range(300))
    assert keys_of(reader.split(1, 4)) == list(range(26, 51))  # a quarter of the bytes of the plain one


def test_an_error_names_its_file_and_the_line_in_it(days):
    (days / "day_1.txt").write_bytes(b"1 1:1\n1 bad\n")
    for threads in (1, 2):
        with pytest.raises(ValueError, match=r"day_1\.txt, line 2, column 3"):
            list(read_libsvm(days / "day_*.txt", reader_threads=threads))


def test_progress_counts_the_bytes_of_all_files(days):
    (days / "day_3.txt").write_bytes(numbered(300, 100_000))
    reader = read_libsvm(days / "day_*.txt", batch_size=50)
    seen = [reader.progress() for _ in reader]
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.5
    assert reader.progress() == 1.0


def test_no_files_and_odd_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file to read"):
        read_libsvm([])
    with pytest.raises(TypeError, match="3 is not a path: pass a str"):
        read_libsvm([3])
    with pytest.raises(TypeError, match="is not a path"):
        read_libsvm(b"bytes")
    with pytest.raises(FileNotFoundError):
        read_libsvm([tmp_path / "missing"])


# ---- streams ----


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_a_stream_has_one_pass(pack):
    reader = read_libsvm(io.BytesIO(pack(numbered(0, 100_000))), batch_size=30_000)
    seen = []
    for batch in reader:
        seen += batch.keys.tolist()
        assert reader.progress() in (0.0, 1.0)  # the pass may have ended behind the batch that is looked at
    assert seen == list(range(100_000))
    assert reader.progress() == 1.0
    with pytest.raises(ValueError, match="the stream was read already, and a stream has one pass: write"):
        list(reader)


@pytest.mark.parametrize("size", range(13))
def test_a_stream_of_few_bytes_holds_what_a_file_of_them_does(tmp_path, size):
    text = b"1 3:1\n0 4:1\n"[:size]
    (tmp_path / "x").write_bytes(text)
    assert keys_of(read_libsvm(io.BytesIO(text), on_error="skip")) == keys_of(
        read_libsvm(tmp_path / "x", on_error="skip")
    )


def test_standard_input_is_a_dash():
    script = """
import shoal
print(sum(batch.keys.sum() for batch in shoal.read_libsvm("-", batch_size=100)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input=numbered(0, 1000), capture_output=True, timeout=120, check=True
    )
    assert int(done.stdout) == 499_500


def test_a_stream_that_comes_slowly_is_read_whole():
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as pipe:
        reader = read_libsvm(pipe, batch_size=10)
        for piece in (b"1", b" 3:", b"1\n1 4:1\n", b"1 5:1"):
            os.write(write, piece)
        os.close(write)
        assert keys_of(reader) == [3, 4, 5]


def test_a_stream_is_neither_cut_nor_pickled_and_must_be_binary():
    reader = read_libsvm(io.BytesIO(b""))
    with pytest.raises(ValueError, match="is a stream, which is read once: write the data to a file to split it"):
        reader.split(0, 2)
    with pytest.raises(TypeError, match="is a stream of this process: pass a file"):
        pickle.dumps(reader)
    with pytest.raises(TypeError, match="reads text: open it with 'rb'"):
        read_libsvm(io.StringIO("1 1:1\n"))


def test_a_stream_without_blocking_is_refused_rather_than_taken_for_ended():
    read, write = os.pipe()
    os.set_blocking(read, False)
    with (
        os.fdopen(read, "rb", buffering=0) as pipe,
        contextlib.closing(os.fdopen(write, "wb", buffering=0)),
        pytest.raises(BlockingIOError, match="the stream is non-blocking"),
    ):
        list(read_libsvm(pipe))


# ---- URLs ----


@pytest.fixture
def memory():
    """A file system of fsspec, emptied afterwards."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_url_is_read_as_a_file_is(memory, threads):
    memory.pipe("/logs/day_0.txt", numbered(0, 50_000))
    memory.pipe("/logs/day_1.txt.gz", gzip.compress(numbered(50_000, 60_000)))
    reader = read_libsvm("memory://logs/day_*", batch_size=777, reader_threads=threads)
    assert keys_of(reader) == list(range(60_000))
    assert [os.path.basename(path) for path in reader.paths] == ["day_0.txt", "day_1.txt.gz"]
    one = read_libsvm("memory://logs/day_0.txt", batch_size=10_000)
    assert sorted(key for rank in range(3) for key in keys_of(one.split(rank, 3))) == list(range(50_000))
    next(iter(one))
    assert keys_of(one.resume(one.position())) == list(range(10_000, 50_000))


def test_a_url_of_nothing_is_an_error_at_once(memory):
    with pytest.raises(FileNotFoundError, match="memory://logs/missing"):
        read_criteo("memory://logs/missing")
    with pytest.raises(FileNotFoundError, match=r"no file matches 'memory://logs/\*'"):
        read_criteo("memory://logs/*")


class _Answers(http.server.BaseHTTPRequestHandler):
    """Answers with the status that a path begins with; of 200 with a length or, below /long, without one."""

    def do_GET(self):
        status = int(self.path.split("/")[1])
        text = numbered(0, 100)
        self.send_response(status)
        if "long" not in self.path:
            self.send_header("content-length", str(len(text) if status == 200 else 0))
        self.end_headers()
        if status == 200 and self.command == "GET":
            self.wfile.write(text)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def web():
    """The address of a server of HTTP."""
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_files_of_http_say_what_is_wrong_with_them(web):
    assert keys_of(read_libsvm(f"{web}/200/x.svm")) == list(range(100))
    with pytest.raises(FileNotFoundError, match=f"^there is no {web}/404/x.svm$"):
        read_libsvm(f"{web}/404/x.svm")
    for status, text in ((403, "Forbidden"), (401, "Unauthorized"), (500, "Internal Server Error")):
        with pytest.raises(StorageError, match=rf"{web}/{status}/x.svm cannot be read .HTTP {status} {text}.: check"):
            read_libsvm(f"{web}/{status}/x.svm")
    with pytest.raises(StorageError, match=rf"{web}/200/long/x.svm: the server does not say how long .*: download it"):
        read_libsvm(f"{web}/200/long/x.svm")
    with pytest.raises(StorageError, match=r"http://no-such-host.invalid/x cannot be read .*no-such-host.invalid"):
        read_libsvm("http://no-such-host.invalid/x")


@pytest.mark.slow
def test_files_of_s3(s3):
    import boto3

    client = boto3.client("s3", endpoint_url=s3)
    client.create_bucket(Bucket="ads")
    client.put_object(Bucket="ads", Key="day_0.txt", Body=numbered(0, 4000))
    client.put_object(Bucket="ads", Key="day_1.txt.gz", Body=gzip.compress(numbered(4000, 5000)))
    options = {"endpoint_url": s3, "skip_instance_cache": True}
    reader = read_libsvm("s3://ads/day_*", batch_size=900, storage_options=options)
    assert keys_of(reader) == list(range(5000))
    assert keys_of(pickle.loads(pickle.dumps(reader)).split(1, 2)) == list(range(4000, 5000))
    one = read_libsvm("s3://ads/day_0.txt", batch_size=900, storage_options=options)
    assert sorted(key for rank in range(3) for key in keys_of(one.split(rank, 3))) == list(range(4000))
    batches = iter(one)
    next(batches), next(batches)
    assert keys_of(one.resume(one.position())) == list(range(1800, 4000))
    with pytest.raises(FileNotFoundError, match="s3://ads/missing"):
        read_libsvm("s3://ads/missing", storage_options=options)
    with pytest.raises(FileNotFoundError):
        read_libsvm("s3://nobucket/missing", storage_options=options)
