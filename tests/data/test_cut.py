"""A reader cut into parts: each example is in exactly one of them."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from tiers import rounds


def examples(reader):
    return [key for batch in reader for key in batch.keys[batch.indptr[:-1]].tolist()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    lines = [f"{k % 2} {k}:1 {10**k % 997}:0.5\n".encode() for k in range(300)]
    (folder / "a.txt").write_bytes(b"".join(lines[:170]))
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"".join(lines[170:200])))
    (folder / "c.txt").write_bytes(b"".join(lines[200:])[:-1])
    (folder / "d.txt").write_bytes(b"")
    return folder


@given(split_bytes=st.integers(1, 5000))
@settings(max_examples=rounds(25), deadline=None)
def test_the_parts_hold_each_example_once_in_order(files, split_bytes):
    reader = shoal.read_libsvm([files / name for name in ("a.txt", "b.txt.gz", "c.txt", "d.txt")], batch_size=7)
    split_bytes = max(split_bytes, 40)
    parts = reader.splits(split_bytes)
    sizes = [(files / name).stat().st_size for name in ("a.txt", "c.txt")]
    assert len(parts) == sum(-(-size // split_bytes) for size in sizes) + 2
    assert [key for part in parts for key in examples(part)] == list(range(300))


def test_parts_keep_the_order_of_the_files_and_how_they_are_read(files):
    reader = shoal.read_libsvm([files / "a.txt", files / "c.txt"], batch_size=50).in_order([1, 0])
    parts = reader.splits(1 << 20)
    assert [len(part.paths) for part in parts] == [1, 1]
    assert [batch.labels.size for batch in parts[1]] == [50, 50, 50, 20]
    assert examples(parts[0]) == list(range(200, 300))


def test_what_cannot_be_cut_is_refused(files):
    reader = shoal.read_libsvm(files / "a.txt")
    with pytest.raises(ValueError, match="split_bytes is 0"):
        reader.splits(0)
    with pytest.raises(ValueError, match="split the whole data"):
        reader.split(0, 2).splits(100)
    with (files / "a.txt").open("rb") as stream, pytest.raises(ValueError, match="is a stream"):
        shoal.read_libsvm(stream).splits(100)


def test_a_parquet_file_is_one_part(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"y": [0.0, 1.0, 1.0], "x": ["a", "b", "c"]}), tmp_path / "t.parquet")
    parts = shoal.read_parquet(tmp_path / "t.parquet", label="y").splits(1)
    assert [batch.labels.tolist() for part in parts for batch in part] == [[0.0, 1.0, 1.0]]
