"""libsvm text: what is read, what is ignored, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from oracle.text import rows_of_batch
from shoal.data import read_libsvm


@pytest.fixture
def rows(tmp_path):
    """A function from the bytes of a file to its rows."""

    def read(data, **options):
        path = tmp_path / "x.libsvm"
        path.write_bytes(data)
        return [row for batch in read_libsvm(path, **options) for row in rows_of_batch(batch)]

    return read


def test_a_batch_has_the_promised_arrays(tmp_path):
    path = tmp_path / "x.libsvm"
    path.write_bytes(b"+1 3:1 18446744073709551615:0.5\n-1 3:2\n")
    (batch,) = read_libsvm(path)
    for array, dtype, content in (
        (batch.labels, np.float32, [1, 0]),
        (batch.indptr, np.int64, [0, 2, 3]),
        (batch.keys, np.uint64, [3, 2**64 - 1, 3]),
        (batch.values, np.float32, [1, 0.5, 2]),
    ):
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.tolist() == content


@pytest.mark.parametrize(
    "data",
    [
        b"1 2:3",
        b"1 2:3\n",
        b"1 2:3\r\n",
        b"1 2:3 \t \r\n",
        b"  1\t2:3\n",
        b"\n\n1 2:3\n\n",
        b"1 2:3 # a comment: 4:5\n",
        b"1 2:3# a comment\n",
        b"# a comment\n1 2:3\n",
        b"\r\n \t\n1 2:3",
        b"+1 02:3.0\n",
        b"1.0 2:3e0\n",
        b"1 qid:7 2:3\n",
        b"1 2:3 qid:7#\n",
    ],
)
def test_ways_to_write_the_same_row(rows, data):
    assert rows(data) == [(1.0, [(2, 3.0)])]


@pytest.mark.parametrize("label", [b"0", b"-1", b"-1.0", b"-0", b"0.0", b"-1e0"])
def test_ways_to_write_the_label_0(rows, label):
    assert rows(label + b" 2:3\n") == [(0.0, [(2, 3.0)])]


def test_a_label_alone_is_an_example_without_features(rows):
    assert rows(b"1\n0\n1 # none\n0") == [(1.0, []), (0.0, []), (1.0, []), (0.0, [])]


def test_a_file_without_lines_has_no_batches(rows):
    for data in (b"", b"\n", b"\n\r\n#\n", b"   ", b"# only this"):
        assert rows(data) == []


def test_zeros_repeated_and_unsorted_keys_are_kept_as_they_are(rows):
    assert rows(b"1 9:0 3:1 9:2 3:-0\n") == [(1.0, [(9, 0.0), (3, 1.0), (9, 2.0), (3, 0.0)])]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"2 3:1", "neither 0/1 nor -1/\\+1: map the labels"),
        (b"0.5 3:1", "neither 0/1 nor -1/\\+1"),
        (b"1e39 3:1", "neither 0/1 nor -1/\\+1"),
        (b"x 3:1", "the label is not a number"),
        (b"nan 3:1", "the label is not a number"),
        (b"1,0 3:1", "the label is not a number"),
        (b"3:1 4:1", "the label is not a number"),
        (b"qid:3 1:1", "the label is not a number"),
        (b"1 3", 'no ":value"'),
        (b"1 3 4:1", 'no ":value"'),
        (b"1 3#:1", 'no ":value"'),
        (b"1 3 :1", 'no ":value"'),
        (b"1 a:1", 'not "key:value" with a whole number'),
        (b"1 -3:1", 'not "key:value" with a whole number'),
        (b"1 3.5:1", 'not "key:value" with a whole number'),
        (b"1 :1", 'not "key:value" with a whole number'),
        (b"1 qid:x", 'not "key:value" with a whole number'),
        (b"1 qid:1:2", 'not "key:value" with a whole number'),
        (b"1 18446744073709551616:1", "larger than 2\\^64 - 1"),
        (b"1 qid:18446744073709551616", "larger than 2\\^64 - 1"),
        (b"1 3:", "not a finite decimal number"),
        (b"1 3: 4:1", "not a finite decimal number"),
        (b"1 3:1:2", "not a finite decimal number"),
        (b"1 3:nan", "not a finite decimal number"),
        (b"1 3:-inf", "not a finite decimal number"),
        (b"1 3:1e39", "too large for float32"),
        (b"1 3:1\0", "not a finite decimal number"),
    ],
)
def test_a_malformed_line_is_an_error_or_skipped(rows, line, complaint):
    for ending in (b"", b"\n", b" \r\n0 1:1\n"):
        with pytest.raises(ValueError, match=complaint):
            rows(line + ending)
    assert rows(b"1 1:1\n" + line + b"\n0 2:2\n", on_error="skip") == [(1.0, [(1, 1.0)]), (0.0, [(2, 2.0)])]


def test_nothing_of_a_malformed_line_stays_behind(rows):
    for bad in (b"1 3:1 4:1 bad\n", b"1 3:1 qid:x\n", b"1 3:1 4:x\n", b"1 3:1 18446744073709551616:1\n"):
        assert rows(bad * 2 + b"0 5:1\n" + bad, on_error="skip") == [(0.0, [(5, 1.0)])]
