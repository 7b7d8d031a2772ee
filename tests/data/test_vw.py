"""Vowpal Wabbit's text and libffm: what is read, what is ignored, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import hash_strings, read_libffm, read_vw


def key(namespace, name):
    return int(hash_strings([name], field=int(hash_strings([namespace])[0]))[0])


@pytest.fixture
def vw(tmp_path):
    """A function from the bytes of a file to its one batch."""

    def read(data, **options):
        path = tmp_path / "x.vw"
        path.write_bytes(data)
        (batch,) = read_vw(path, **options)
        return batch

    return read


@pytest.mark.parametrize(
    "data",
    [
        b"1 |user ann |ad 7:0.5",
        b"1 |user ann |ad 7:0.5\n",
        b"1 |user ann |ad 7:0.5 \r\n",
        b"  1.0\t|user  ann\t|ad 7:5e-1\n",
        b"\n \n1 1 |user ann|ad:0.5 7\n",
        b"1 1.0 tag|user ann |ad:0.25 7:2\n",
        b"1 'tag |user ann |ad 7:0.5\n",
        b"1 1 0 'tag|user ann |ad 7:0.5\n",
    ],
)
def test_ways_to_write_the_same_row(vw, data):
    batch = vw(data)
    assert batch.labels.tolist() == [1]
    assert batch.weights is None
    assert batch.keys.tolist() == [key("user", "ann"), key("ad", "7")]
    assert batch.values.tolist() == [1, 0.5]


def test_a_bar_before_a_blank_begins_the_namespace_without_a_name(vw):
    batch = vw(b"-1 | a b:2 |n :3\n")
    assert batch.labels.tolist() == [0]
    assert batch.keys.tolist() == [key("", "a"), key("", "b"), key("n", "")]
    assert batch.values.tolist() == [1, 2, 3]


def test_the_importance_is_the_weight(vw):
    batch = vw(b"1 0.25 |a b\n-1 |a b\n0 0 |a\n")
    assert batch.weights.dtype == np.float32
    assert batch.weights.tolist() == [0.25, 1, 0]
    assert batch.indptr.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("line", "complaint", "column"),
    [
        (b"|a b", "there is no label", 1),
        (b"tag|a b", "there is no label", 4),
        (b"1 a b", "a third number|importance", 3),
        (b"1", "there is no .*before the features", 2),
        (b"1 0.5", "there is no .*before the features", 6),
        (b"1 0.5 0\r", "there is no .*before the features", 9),
        (b"1 'tag b|a", "there is no .*before the features", 8),
        (b"2 |a b", "the label is neither", 1),
        (b"x |a b", "the label is not a number", 1),
        (b"1# |a b", "the label is not a number", 1),
        (b"1 -1 |a b", "the importance", 3),
        (b"1 nan |a b", "the importance", 3),
        (b"1 1 0.5 |a b", "an initial prediction", 5),
        (b"1 |a b:x", "a value is not a finite", 8),
        (b"1 |a b:1:2", "a value is not a finite", 9),
        (b"1 |a:x b", "a value is not a finite", 6),
        (b"1 |a:1e20 b:1e20", "too large", 11),
        (b"1 |a b :", "a value is not a finite", 9),
    ],
)
def test_what_is_malformed_is_named_with_its_place(tmp_path, line, complaint, column):
    path = tmp_path / "x.vw"
    path.write_bytes(b"1 |a b\n" + line + b"\n0 |a\n")
    with pytest.raises(ValueError, match=rf"line 2, column {column} .*({complaint})"):
        list(read_vw(path))
    reader = read_vw(path, on_error="skip")
    (batch,) = reader
    assert batch.labels.tolist() == [1, 0]
    assert reader.skipped == 1


def test_libffm_takes_keys_as_they_are(tmp_path):
    path = tmp_path / "x.ffm"
    path.write_bytes(b"1 0:3:1 7:18446744073709551615:0.5 # c\n\n-1 1:3:-2\n")
    (batch,) = read_libffm(path)
    assert batch.labels.tolist() == [1, 0]
    assert batch.indptr.tolist() == [0, 2, 3]
    assert batch.keys.tolist() == [3, 2**64 - 1, 3]
    assert batch.values.tolist() == [1, 0.5, -2]
    assert batch.weights is None


@pytest.mark.parametrize("line", [b"1 3:1", b"1 a:3:1", b"1 1:b:1", b"1 -1:2:3", b"1 1:2:3:4", b"1 1:2", b"1 1:2:x"])
def test_libffm_that_is_malformed_is_refused(tmp_path, line):
    path = tmp_path / "x.ffm"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match="line 1, column"):
        list(read_libffm(path))
