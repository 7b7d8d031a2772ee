"""Interactions: the rule against a slow twin, on every format with fields; what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import bits, csv_row, interacting, libffm_row, rows_of, rows_of_batch, vw_row
from shoal import _core, hash_strings, read_criteo, read_csv, read_libffm, read_vw

MOST = 2**64 - 1
FIELDS = [0, 1, 7, MOST]
FEATURES = st.tuples(
    st.integers(0, 3) | st.integers(0, MOST), st.floats(width=32, allow_nan=False, allow_infinity=False)
)
ROWS = st.lists(st.lists(st.tuples(FEATURES, st.sampled_from(FIELDS)), max_size=6), max_size=6)
PAIRS = st.lists(st.tuples(st.sampled_from([*FIELDS, 99]), st.sampled_from(FIELDS)), min_size=1, max_size=4)


def field(name):
    return int(hash_strings([name])[0])


@given(rows=ROWS, pairs=PAIRS, valued=st.booleans())
def test_the_kernel_does_what_its_slow_twin_does(rows, pairs, valued):
    rows = [[(k, np.float32(v if valued else 1), f) for (k, v), f in row] for row in rows]
    flat = [feature for row in rows for feature in row]
    indptr = np.cumsum([0, *map(len, rows)])
    keys = np.array([k for k, _, _ in flat], np.uint64)
    values = np.array([v for _, v, _ in flat], np.float32) if valued else None
    fields = np.array([f for _, _, f in flat], np.uint64)
    ends, made, products = _core.interact(indptr, keys, values, fields, np.array(pairs, np.uint64).reshape(-1))
    assert (products is None) == (not valued)
    products = np.ones(len(made), np.float32) if products is None else products
    got = [(0, list(zip(made[a:b].tolist(), products[a:b], strict=True))) for a, b in pairwise(ends)]
    assert bits(got) == bits([(0, interacting(row, pairs)) for row in rows])


def check(reader, rows, pairs):
    got = [row for batch in reader for row in rows_of_batch(batch)]
    want = [(head[0] if isinstance(head, tuple) else head, interacting(features, pairs)) for head, features in rows]
    assert bits(got) == bits(want)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_format_with_fields_has_them(tmp_path, threads):
    path = tmp_path / "x"
    data = b"1 0:3:1 1:17:0.5 1:5:2\n0 0:4:1\n1 1:1:1 0:1:3 0:9:4\n"
    path.write_bytes(data)
    reader = read_libffm(path, interactions=[(0, 1), (1, 1)], batch_size=2, reader_threads=threads)
    check(reader, rows_of(data, libffm_row)[0], [(0, 1), (1, 1)])
    data = b"1 |user ann |ad 7:0.5 8\n0 |ad 9 |user bob:2 |site x\n"
    path.write_bytes(data)
    pairs = [(field("user"), field("ad")), (field("user"), field("site")), (field("ad"), field("site"))]
    reader = read_vw(path, interactions=["user", "ad", "site"], batch_size=1, reader_threads=threads)
    check(reader, rows_of(data, vw_row)[0], pairs)
    data = b"1,a,b,3\n0,,c,4\n"
    path.write_bytes(b"y,s,t,n\n" + data)
    reader = read_csv(path, label="y", numeric=["n"], interactions=[("s", "t"), ("n", "t")], reader_threads=threads)
    fields = [field(name) for name in "ystn"]
    rows = rows_of(data, lambda line: csv_row(line, list("lccn"), fields))[0]
    check(reader, rows, [(field("s"), field("t")), (field("n"), field("t"))])
    path.write_bytes(b"1\t20" + b"\t" * 12 + b"\t68fd1e64\tx" + b"\t" * 24 + b"\n")
    (batch,) = read_criteo(path, interactions=[("I1", "C1"), (14, 15)], reader_threads=threads)
    keys = [int(k) for k in batch.keys]
    features = [(k, np.float32(1), f) for k, f in zip(keys[:3], (1, 14, 15), strict=True)]
    assert keys == [k for k, _ in interacting(features, [(1, 14), (14, 15)])]
    assert batch.values is None


def test_an_interaction_key_is_that_of_the_first_key_as_field_and_the_second_as_token(tmp_path):
    (tmp_path / "x").write_bytes(b"1 0:3:1 1:17:1\n")
    (batch,) = read_libffm(tmp_path / "x", interactions=[(0, 1)])
    assert batch.keys[2] == hash_strings([(17).to_bytes(8, "little")], field=3)[0]


@pytest.mark.parametrize(
    ("interactions", "error", "complaint"),
    [
        ("ab", TypeError, "interactions is 'ab'"),
        (["a"], ValueError, "one field makes no pair"),
        ([("a", "b"), ("b", "a")], ValueError, r"holds \('b', 'a'\) twice"),
        (["a", "b", "a"], ValueError, "twice"),
        ([("a", "b", "c")], TypeError, "is not an interaction: pass pairs"),
        ([("a", 0.5)], TypeError, "is not an interaction"),
        ([("a", "b"), "c"], TypeError, "'c' is not an interaction"),
    ],
)
def test_what_names_no_pairs_is_refused(tmp_path, interactions, error, complaint):
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(error, match=complaint):
        read_vw(tmp_path / "x", interactions=interactions)


@pytest.mark.parametrize("column", ["0", "40", 0, 40, "C0", "C27", "I14", "I0", "x", "C", "-1"])
def test_criteo_has_39_columns_of_features(tmp_path, column):
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a feature column: pass 1 to 39, or I1 to I13 and C1 to C26"):
        read_criteo(tmp_path / "x", interactions=[(column, 1)])


def test_libffm_has_fields_that_are_numbers(tmp_path):
    (tmp_path / "x").write_bytes(b"1 3:4:1 5:6:1\n")
    assert next(iter(read_libffm(tmp_path / "x", interactions=["3", 5]))).nnz == 3
    with pytest.raises(ValueError, match="'site' is not a field of libffm, whose fields are numbers"):
        read_libffm(tmp_path / "x", interactions=[("site", 5)])


def test_rows_whose_pairs_would_fill_the_memory_are_refused(tmp_path):
    line = b"1" + b"".join(b" 0:%d:1 1:%d:1" % (i, i) for i in range(70_000)) + b"\n"
    (tmp_path / "x").write_bytes(line)
    with pytest.raises(ValueError, match="row 0 make more than 4294967296 features of a batch: pass smaller"):
        list(read_libffm(tmp_path / "x", interactions=[(0, 1)]))
