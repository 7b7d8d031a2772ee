"""The native parsers by themselves: arrays that do not fit are refused, nothing is written out of bounds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fuzzing.arrays import Arrays
from fuzzing.compare import TWINS, check, compare, csv_columns, csv_twin
from shoal import _reader
from shoal.data.criteo import buckets
from shoal.data.rows import CRITEO

TABLE = buckets()


def libsvm(arrays, block, start=0):
    return arrays.parse(_reader.parse_libsvm, block, start)


def criteo(arrays, block, start=0):
    return arrays.parse(CRITEO.parse, block, start)


def test_a_parse_tells_where_it_stopped_and_what_it_did():
    arrays = Arrays(9, 9)
    assert libsvm(arrays, b"1 3:4\n\n# c\n0\n") == (13, 4, 2, 0, 0, 0)


def test_full_labels_stop_the_parse_at_the_beginning_of_a_line_and_it_goes_on_from_there():
    block = b"1 3:4\n0 5:6\n1 7:8\n"
    arrays = Arrays(2, 9)
    assert libsvm(arrays, block) == (12, 2, 2, 0, 0, 0)
    assert arrays.keys[: arrays.indptr[arrays.row]].tolist() == [3, 5]
    arrays.row = 0
    assert libsvm(arrays, block, 12) == (18, 1, 1, 0, 0, 0)
    assert arrays.keys[: arrays.indptr[arrays.row]].tolist() == [7]


@pytest.mark.parametrize("room", range(7))
def test_full_keys_stop_the_parse_with_nothing_left_of_the_line_that_did_not_fit(room):
    lines = [b"1 1:1 2:1\n", b"0\n", b"1 3:1 4:1 5:1\n", b"0 6:1\n"]
    arrays = Arrays(9, room)
    end, count, row, _, fault, _ = libsvm(arrays, b"".join(lines))
    whole = next(n for n in range(4, -1, -1) if [0, 2, 2, 5, 6][n] <= room)
    assert (end, count, row, fault) == (len(b"".join(lines[:whole])), whole, whole, 0)
    assert arrays.indptr[row] == [0, 2, 2, 5, 6][whole]


def test_criteo_asks_for_room_for_a_whole_line():
    line = b"1" + b"\t5" * 39 + b"\n"
    assert criteo(Arrays(9, 38), line)[:3] == (0, 0, 0)
    assert criteo(Arrays(9, 39), line)[:3] == (len(line), 1, 1)
    assert criteo(Arrays(9, 77), line * 2)[:3] == (len(line), 1, 1)
    assert criteo(Arrays(9, 78), line * 2)[:3] == (2 * len(line), 2, 2)


def test_nothing_is_parsed_of_an_empty_block_and_behind_the_end():
    for block, start in ((b"", 0), (b"1 2:3\n", 6)):
        assert libsvm(Arrays(1, 1), block, start) == (start, 0, 0, 0, 0, 0)
        assert criteo(Arrays(1, 1), block, start) == (start, 0, 0, 0, 0, 0)


def test_blocks_may_be_bytes_bytearrays_and_read_only_or_writable_views():
    for block in (b"1 2:3\n", bytearray(b"1 2:3\n"), memoryview(b"1 2:3\n"), memoryview(bytearray(b"1 2:3\n"))):
        assert libsvm(Arrays(1, 1), block)[:3] == (6, 1, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block": b"1 2:3"}, "whole lines"),
        ({"start": 7}, "start is 7"),
        ({"labels": np.empty(3, np.float32)}, "indptr"),
        ({"values": np.empty(3, np.float32)}, "keys and values"),
        ({"weights": np.empty(3, np.float32)}, "labels and weights"),
        ({"fields": np.empty(5, np.uint64)}, "keys and fields"),
        ({"spans": np.empty((3, 2), np.int64)}, "4 keys need spans of as many pairs, got 3 x 2"),
        ({"spans": np.empty((4, 3), np.int64)}, "got 4 x 3"),
        ({"spans": np.empty((4, 2), np.int32)}, "dtype mismatch"),
        ({"row": -1}, "row is -1"),
        ({"row": 3}, "row is 3"),
        ({"indptr": np.array([5, 0, 0], np.int64)}, "indptr\\[0\\] is 5"),
        ({"indptr": np.array([-1, 0, 0], np.int64)}, "indptr\\[0\\] is -1"),
        ({"labels": np.empty(2, np.float64)}, "dtype mismatch"),
        ({"keys": np.empty(4, np.int64)}, "dtype mismatch"),
        ({"values": np.empty(8, np.float32)[::2]}, "contiguous"),
        ({"keys": np.empty((4, 1), np.uint64)}, "dimensions"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, complaint):
    arrays = {
        "labels": np.empty(2, np.float32),
        "weights": None,
        "indptr": np.zeros(3, np.int64),
        "keys": np.empty(4, np.uint64),
        "values": np.empty(4, np.float32),
        "fields": None,
        "spans": None,
        "ends": np.empty((2, 2), np.int64),
        "row": 0,
        "labelled": True,
        "classes": 0,
    }
    block, start = change.get("block", b"1 2:3\n"), change.get("start", 0)
    _reader.parse_libsvm(b"1 2:3\n", 0, SimpleNamespace(**arrays), False)
    with pytest.raises(ValueError, match=complaint):
        _reader.parse_libsvm(block, start, SimpleNamespace(**(arrays | change)), False)


def test_a_format_with_values_or_weights_needs_arrays_for_them():
    arrays = Arrays(2, 4)
    arrays.weights = None
    with pytest.raises(ValueError, match="values or weights is None"):
        _reader.parse_vw(b"1 | a\n", 0, arrays, False)
    arrays.values = None
    with pytest.raises(ValueError, match="values is None"):
        _reader.parse_libsvm(b"1 2:3\n", 0, arrays, False)
    with pytest.raises(ValueError, match="values is None"):
        _reader.parse_libffm(b"1 1:2:3\n", 0, arrays, False)


def test_read_only_outputs_are_refused():
    arrays = Arrays(2, 2)
    arrays.keys.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        libsvm(arrays, b"1 2:3\n")
    with pytest.raises(ValueError, match="read-only"):
        criteo(arrays, b"")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cells": TABLE.cells[:-1].copy()}, "cells must cover 63 bits, 7296 entries, got 7295"),
        ({"cells": np.full(7296, len(TABLE.floors) - 1, np.uint16)}, "cells must name buckets below"),
        ({"small": TABLE.small[:-1].copy()}, "small must cover 10000 integers, got 9999"),
        ({"numbers": TABLE.numbers[:12].copy()}, "numbers must be 13 x"),
        ({"numbers": TABLE.numbers[:, :-1].copy()}, "numbers must be 13 x"),
        ({"floors": TABLE.floors[:-1].copy(), "numbers": TABLE.numbers[:, :-1].copy()}, "floors must end with"),
        ({"floors": np.empty(0, np.uint64), "numbers": np.empty((13, 0), np.uint64)}, "numbers must be|small may"),
        (
            {"floors": TABLE.floors[-256:].copy(), "numbers": TABLE.numbers[:, :255].copy()},
            "small may name any of 256 buckets, got 255",
        ),
    ],
)
def test_bucket_tables_that_do_not_fit_are_refused(change, complaint):
    arrays = Arrays(2, 40)
    tables = {"floors": TABLE.floors, "cells": TABLE.cells, "small": TABLE.small, "numbers": TABLE.numbers} | change
    with pytest.raises(ValueError, match=complaint):
        _reader.parse_criteo(b"\n", 0, arrays, *tables.values(), False)


LIBSVM_PIECES = [
    b"1",
    b"0",
    b"-1",
    b"+1",
    b"1.0",
    b" ",
    b"\t",
    b"\r",
    b"\n",
    b":",
    b"3",
    b"17:0.5",
    b" 4:1 ",
    b"#",
    b"qid:",
]
LIBSVM_PIECES += [b"18446744073709551615:1", b".", b"e", b"-", b"1e-3", b"nan", b"\0", b"\xff", b"99999999999999999999"]


@given(st.lists(st.sampled_from(LIBSVM_PIECES), max_size=60).map(b"".join))
def test_pieces_of_libsvm_in_any_order_come_to_what_the_slow_parser_says(data):
    check("libsvm", data)


LIBSVM_TOKENS = st.sampled_from([b"3:1", b"4:-0.5", b"qid:7", b"18446744073709551615:1e-3", b"9:0"])
LIBSVM_FAULTS = st.sampled_from([b"", b"", b"", b" 3", b" 3:", b" 3:x", b" qid:x", b" 3:1e39", b" :1", b" 1 # c"])


@given(st.lists(st.tuples(st.sampled_from([b"1", b"-1", b"2"]), st.lists(LIBSVM_TOKENS, max_size=5), LIBSVM_FAULTS)))
def test_good_and_malformed_libsvm_lines_come_to_what_the_slow_parser_says(lines):
    check("libsvm", b"".join(b" ".join([label, *tokens]) + fault + b"\n" for label, tokens, fault in lines))


@given(st.binary(max_size=300))
def test_random_bytes_come_to_what_the_slow_parsers_say(data):
    for name in TWINS:
        check(name, data)


LIBFFM_PIECES = [*LIBSVM_PIECES, b"0:1:1", b" 2:3:4", b"1:2:", b"18446744073709551616:1:1"]


@given(st.lists(st.sampled_from(LIBFFM_PIECES), max_size=60).map(b"".join))
def test_pieces_of_libffm_in_any_order_come_to_what_the_slow_parser_says(data):
    check("libffm", data)


VW_PIECES = [
    b"1",
    b"-1",
    b"0",
    b"2.5",
    b" ",
    b"\t",
    b"\r",
    b"\n",
    b"|",
    b":",
    b"'",
    b"a",
    b"name_longer_than_eight",
    b"-3",
]
VW_PIECES += [
    b"1 |a b",
    b"\n1 0.5 'tag|",
    b" |price:2 :3",
    b" x:1e20",
    b":1e20",
    b"nan",
    b"\0",
    b"\xff",
    b"0 1 0 |",
    b"#",
]


@given(st.lists(st.sampled_from(VW_PIECES), max_size=40).map(b"".join))
def test_pieces_of_vw_in_any_order_come_to_what_the_slow_parser_says(data):
    check("vw", data)


INTEGERS = st.one_of(
    st.just(b""),
    st.integers(-5, 40).map(lambda v: b"%d" % v),
    st.integers(-(2**64), 2**64).map(lambda v: b"%d" % v),
    st.integers(0, 62).map(lambda n: b"%d" % (2**n)),
    st.sampled_from([b"007", b"+4", b"-0", b"1.5", b"x", b" 1", b"-", b"00000000000000000000000012"]),
)
TOKENS = st.one_of(st.just(b""), st.binary(max_size=20).map(lambda t: t.replace(b"\t", b"").replace(b"\n", b"")))


@st.composite
def criteo_lines(draw):
    integers = draw(st.lists(st.one_of(st.just(b"5"), INTEGERS), min_size=13, max_size=13))
    tokens = draw(st.lists(TOKENS, min_size=26, max_size=26))
    columns = [draw(st.sampled_from([b"0", b"1", b"1", b"0", b"2", b""])), *integers, *tokens]
    size = draw(st.sampled_from([40, 40, 40, 40, 40, 39, 41, 5]))
    columns = [*columns, b"x"][:size]
    return b"\t".join(columns) + draw(st.sampled_from([b"\n", b"\r\n"]))


@pytest.mark.slow
@given(st.lists(criteo_lines(), max_size=4).map(b"".join))
def test_criteo_lines_of_any_columns_come_to_what_the_slow_parser_says(data):
    check("criteo", data)


CSV_PIECES = [
    b",",
    b",",
    b";",
    b'"',
    b'""',
    b"\n",
    b"\r",
    b"\t",
    b" ",
    b"1",
    b"0",
    b"-1",
    b"2.5",
    b"a",
    b"NA",
    b"N",
    b"\0",
]
CSV_PIECES += [b'"a,b"', b'"1"', b'"x""y"', b"longer_than_eight", b"\xff", b"1e39", b"nan", b"1,a,2,", b"\n1,b,3,"]
CSV_PIECES += [b"|", b"1|2", b'"0.5||NA| 3 "', b'"1|x""y|2"']


@given(
    data=st.lists(st.sampled_from(CSV_PIECES), max_size=60).map(b"".join),
    kinds=st.lists(st.sampled_from("-nncccvv"), max_size=4).flatmap(
        lambda others: st.permutations(["l", "w", *others])
    ),
    separator=st.sampled_from([b",", b",", b";", b"\t"]),
    missing=st.sampled_from([(b"", b"NA"), (), (b"a", b"longer_than_eight", b'x"y')]),
    positive=st.sampled_from([None, b"a", b"1"]),
)
def test_pieces_of_csv_in_any_order_come_to_what_the_slow_parser_says(data, kinds, separator, missing, positive):
    compare(csv_twin("".join(kinds), separator, missing, positive), data)


CELLS = st.one_of(
    st.sampled_from([b"1", b"0", b"", b"NA", b'"1"', b'"a"', b"x", b" 2 ", b'""', b"1|2", b"|"]), st.binary(max_size=12)
)


@given(lines=st.lists(st.lists(CELLS, min_size=5, max_size=5), max_size=12), kinds=st.permutations("lwncv"))
def test_rows_of_csv_cells_come_to_what_the_slow_parser_says(lines, kinds):
    cells = [[cell.replace(b"\n", b"").replace(b",", b"") for cell in line] for line in lines]
    compare(csv_twin("".join(kinds)), b"".join(b",".join(line) + b"\n" for line in cells))


def test_csv_asks_for_room_for_a_whole_line():
    twin = csv_twin("lcc")
    for room, (end, lines, rows) in ((2, (0, 0, 0)), (3, (6, 1, 1))):
        assert Arrays(9, room).parse(twin.parse, b"1,a,b\n")[:3] == (end, lines, rows)


def test_csv_with_columns_that_do_not_fit_is_refused():
    columns = csv_columns("lc")
    for change, complaint in (
        ({"fields": columns.fields[:1]}, "kinds, fields and hashed must be as long, and not empty, got 2, 1 and 2"),
        ({"kinds": columns.kinds[:0], "fields": columns.fields[:0]}, "and not empty"),
    ):
        with pytest.raises(ValueError, match=complaint):
            _reader.parse_csv(b"1,a\n", 0, Arrays(1, 9), replace(columns, **change), False)
    for kind, has, complaint in (
        ("w", {"weighted": False}, "weights"),
        ("n", {"valued": False}, "values"),
        ("v", {"valued": False}, "values"),
    ):
        with pytest.raises(ValueError, match=f"{complaint} is None, and a column is"):
            _reader.parse_csv(b"1,1\n", 0, Arrays(1, 9, **has), csv_columns("l" + kind), False)
