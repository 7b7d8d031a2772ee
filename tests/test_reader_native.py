"""The native parsers by themselves: arrays that do not fit are refused, nothing is written out of bounds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import bits, criteo_row, csv_row, libffm_row, libsvm_row, rows_of, rows_of_batch, vw_row
from shoal import _reader
from shoal.data import Batch
from shoal.data.criteo import buckets

CANARY = 0x5EED5EED5EED5EED
TABLE = buckets()


class Arrays:
    """Outputs cut out of larger arrays, so that a write outside of them shows."""

    def __init__(self, rows: int, nnz: int) -> None:
        self._labels = np.full(rows + 2, -7, np.float32)
        self._weights = np.full(rows + 2, -7, np.float32)
        self._indptr = np.full(rows + 3, -7, np.int64)
        self._keys = np.full(nnz + 2, CANARY, np.uint64)
        self._values = np.full(nnz + 2, -7, np.float32)
        self._fields = np.full(nnz + 2, CANARY, np.uint64)
        self._spans = np.full((nnz + 2, 2), -7, np.int64)
        self.labels, self.weights, self.indptr = self._labels[1:-1], self._weights[1:-1], self._indptr[1:-1]
        self.keys, self.values, self.fields = self._keys[1:-1], self._values[1:-1], self._fields[1:-1]
        self.spans = self._spans[1:-1]
        self.indptr[0] = 0
        self.row = 0

    def libsvm(self, block, start=0, *, skip=False):
        return self._note(_reader.parse_libsvm(block, start, self, skip))

    def libffm(self, block, start=0, *, skip=False):
        return self._note(_reader.parse_libffm(block, start, self, skip))

    def vw(self, block, start=0, *, skip=False):
        return self._note(_reader.parse_vw(block, start, self, skip))

    def criteo(self, block, start=0, *, skip=False):
        tables = TABLE.floors, TABLE.cells, TABLE.numbers
        return self._note(_reader.parse_criteo(block, start, self, *tables, skip))

    def csv(self, columns, block, start=0, *, skip=False):
        return self._note(_reader.parse_csv(block, start, self, columns, skip))

    def _note(self, got):
        self.row = got[2]
        for array, canary in (
            (self._labels, -7),
            (self._weights, -7),
            (self._indptr, -7),
            (self._keys, CANARY),
            (self._values, -7),
            (self._fields, CANARY),
        ):
            assert array[0] == canary
            assert array[-1] == canary
        assert self._spans[[0, -1]].tolist() == [[-7, -7]] * 2
        return got

    def batch(self, *, valued=True):
        nnz = self.indptr[self.row]
        return Batch(
            self.labels[: self.row], self.indptr[: self.row + 1], self.keys[:nnz], self.values[:nnz] if valued else None
        )

    def rows(self, *, weighted):
        """What the slow parsers make of libffm and of Vowpal Wabbit's text."""
        labels = self.labels[: self.row].tolist()
        heads = zip(labels, self.weights[: self.row].tolist(), strict=True) if weighted else labels
        ends = zip(self.indptr[: self.row], self.indptr[1 : self.row + 1], strict=True)
        return [
            (head, list(zip(self.keys[a:b].tolist(), self.values[a:b], self.fields[a:b].tolist(), strict=True)))
            for head, (a, b) in zip(heads, ends, strict=True)
        ]


def test_a_parse_tells_where_it_stopped_and_what_it_did():
    arrays = Arrays(9, 9)
    assert arrays.libsvm(b"1 3:4\n\n# c\n0\n") == (13, 4, 2, 0, 0, 0)


def test_full_labels_stop_the_parse_at_the_beginning_of_a_line_and_it_goes_on_from_there():
    block = b"1 3:4\n0 5:6\n1 7:8\n"
    arrays = Arrays(2, 9)
    assert arrays.libsvm(block) == (12, 2, 2, 0, 0, 0)
    assert arrays.batch().keys.tolist() == [3, 5]
    arrays.row = 0
    assert arrays.libsvm(block, 12) == (18, 1, 1, 0, 0, 0)
    assert arrays.batch().keys.tolist() == [7]


@pytest.mark.parametrize("room", range(7))
def test_full_keys_stop_the_parse_with_nothing_left_of_the_line_that_did_not_fit(room):
    lines = [b"1 1:1 2:1\n", b"0\n", b"1 3:1 4:1 5:1\n", b"0 6:1\n"]
    arrays = Arrays(9, room)
    end, count, row, _, fault, _ = arrays.libsvm(b"".join(lines))
    whole = next(n for n in range(4, -1, -1) if [0, 2, 2, 5, 6][n] <= room)
    assert (end, count, row, fault) == (len(b"".join(lines[:whole])), whole, whole, 0)
    assert arrays.indptr[row] == [0, 2, 2, 5, 6][whole]


def test_criteo_asks_for_room_for_a_whole_line():
    line = b"1" + b"\t5" * 39 + b"\n"
    assert Arrays(9, 38).criteo(line)[:3] == (0, 0, 0)
    assert Arrays(9, 39).criteo(line)[:3] == (len(line), 1, 1)
    assert Arrays(9, 77).criteo(line * 2)[:3] == (len(line), 1, 1)
    assert Arrays(9, 78).criteo(line * 2)[:3] == (2 * len(line), 2, 2)


def test_nothing_is_parsed_of_an_empty_block_and_behind_the_end():
    for block, start in ((b"", 0), (b"1 2:3\n", 6)):
        assert Arrays(1, 1).libsvm(block, start) == (start, 0, 0, 0, 0, 0)
        assert Arrays(1, 1).criteo(block, start) == (start, 0, 0, 0, 0, 0)


def test_blocks_may_be_bytes_bytearrays_and_read_only_or_writable_views():
    for block in (b"1 2:3\n", bytearray(b"1 2:3\n"), memoryview(b"1 2:3\n"), memoryview(bytearray(b"1 2:3\n"))):
        assert Arrays(1, 1).libsvm(block)[:3] == (6, 1, 1)


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
        "row": 0,
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
        arrays.libsvm(b"1 2:3\n")
    with pytest.raises(ValueError, match="read-only"):
        arrays.criteo(b"")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cells": TABLE.cells[:-1].copy()}, "cells must cover 63 bits, 960 entries, got 959"),
        ({"cells": np.full(960, len(TABLE.floors) - 1, np.uint16)}, "cells must name buckets below"),
        ({"numbers": TABLE.numbers[:12].copy()}, "numbers must be 13 x"),
        ({"numbers": TABLE.numbers[:, :-1].copy()}, "numbers must be 13 x"),
        ({"floors": TABLE.floors[:-1].copy(), "numbers": TABLE.numbers[:, :-1].copy()}, "floors must end with"),
        ({"floors": np.empty(0, np.uint64), "numbers": np.empty((13, 0), np.uint64)}, "numbers must be|floors must"),
    ],
)
def test_bucket_tables_that_do_not_fit_are_refused(change, complaint):
    arrays = Arrays(2, 40)
    tables = {"floors": TABLE.floors, "cells": TABLE.cells, "numbers": TABLE.numbers} | change
    with pytest.raises(ValueError, match=complaint):
        _reader.parse_criteo(b"\n", 0, arrays, *tables.values(), False)


def parse_all(parse, arrays, data):
    """Parse a block to its end, making room by nothing but enough of it at the beginning."""
    end, lines, row, skipped, fault, _ = parse(data, skip=True)
    assert (end, fault) == (len(data), 0)
    assert lines == data.count(b"\n")
    assert row == arrays.row
    return skipped


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
    data += b"\n"
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.libsvm, arrays, data)
    rows, malformed = rows_of(data, libsvm_row)
    assert bits(rows_of_batch(arrays.batch())) == bits(rows)
    assert skipped == malformed


LIBSVM_TOKENS = st.sampled_from([b"3:1", b"4:-0.5", b"qid:7", b"18446744073709551615:1e-3", b"9:0"])
LIBSVM_FAULTS = st.sampled_from([b"", b"", b"", b" 3", b" 3:", b" 3:x", b" qid:x", b" 3:1e39", b" :1", b" 1 # c"])


@given(st.lists(st.tuples(st.sampled_from([b"1", b"-1", b"2"]), st.lists(LIBSVM_TOKENS, max_size=5), LIBSVM_FAULTS)))
def test_good_and_malformed_libsvm_lines_come_to_what_the_slow_parser_says(lines):
    data = b"".join(b" ".join([label, *tokens]) + fault + b"\n" for label, tokens, fault in lines) or b"\n"
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.libsvm, arrays, data)
    rows, malformed = rows_of(data, libsvm_row)
    assert bits(rows_of_batch(arrays.batch())) == bits(rows)
    assert skipped == malformed


@given(st.binary(max_size=300))
def test_random_bytes_come_to_what_the_slow_parsers_say(data):
    data += b"\n"
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.libsvm, arrays, data)
    assert (bits(rows_of_batch(arrays.batch())), skipped) == (lambda r, m: (bits(r), m))(*rows_of(data, libsvm_row))
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.libffm, arrays, data)
    assert (bits(arrays.rows(weighted=False)), skipped) == (lambda r, m: (bits(r), m))(*rows_of(data, libffm_row))
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.vw, arrays, data)
    assert (bits(arrays.rows(weighted=True)), skipped) == (lambda r, m: (bits(r), m))(*rows_of(data, vw_row))
    arrays = Arrays(len(data), 39 * len(data))
    skipped = parse_all(arrays.criteo, arrays, data)
    rows, malformed = rows_of(data, criteo_row)
    assert bits(rows_of_batch(arrays.batch(valued=False))) == bits(rows)
    assert skipped == malformed


LIBFFM_PIECES = [*LIBSVM_PIECES, b"0:1:1", b" 2:3:4", b"1:2:", b"18446744073709551616:1:1"]


@given(st.lists(st.sampled_from(LIBFFM_PIECES), max_size=60).map(b"".join))
def test_pieces_of_libffm_in_any_order_come_to_what_the_slow_parser_says(data):
    data += b"\n"
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.libffm, arrays, data)
    rows, malformed = rows_of(data, libffm_row)
    assert bits(arrays.rows(weighted=False)) == bits(rows)
    assert skipped == malformed


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
    data += b"\n"
    arrays = Arrays(len(data), len(data))
    skipped = parse_all(arrays.vw, arrays, data)
    rows, malformed = rows_of(data, vw_row)
    assert bits(arrays.rows(weighted=True)) == bits(rows)
    assert skipped == malformed


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


@given(st.lists(criteo_lines(), max_size=4).map(b"".join))
def test_criteo_lines_of_any_columns_come_to_what_the_slow_parser_says(data):
    data = data or b"\n"
    arrays = Arrays(8, 400)
    skipped = parse_all(arrays.criteo, arrays, data)
    rows, malformed = rows_of(data, criteo_row)
    assert bits(rows_of_batch(arrays.batch(valued=False))) == bits(rows)
    assert skipped == malformed


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
KINDS = {"-": 0, "l": 1, "w": 2, "n": 3, "c": 4}


def csv_columns(kinds, fields, separator=b",", missing=(b"", b"NA"), positive=None):
    kinds = np.array([KINDS[kind] for kind in kinds], np.uint8)
    fields = np.array(fields, np.uint64)
    return SimpleNamespace(
        kinds=kinds, fields=fields, separator=separator[0], missing=tuple(missing), positive=positive
    )


@given(
    data=st.lists(st.sampled_from(CSV_PIECES), max_size=60).map(b"".join),
    kinds=st.lists(st.sampled_from("-nnccc"), max_size=4).flatmap(lambda others: st.permutations(["l", "w", *others])),
    separator=st.sampled_from([b",", b",", b";", b"\t"]),
    missing=st.sampled_from([(b"", b"NA"), (), (b"a", b"longer_than_eight", b'x"y')]),
    positive=st.sampled_from([None, b"a", b"1"]),
)
def test_pieces_of_csv_in_any_order_come_to_what_the_slow_parser_says(data, kinds, separator, missing, positive):
    data += b"\n"
    fields = [7 * i for i in range(len(kinds))]
    columns = csv_columns(kinds, fields, separator, missing, positive)
    arrays = Arrays(len(data), len(data) * len(kinds))
    skipped = parse_all(lambda *a, **k: arrays.csv(columns, *a, **k), arrays, data)
    rows, malformed = rows_of(data, lambda line: csv_row(line, kinds, fields, separator, missing, positive))
    assert bits(arrays.rows(weighted=True)) == bits(rows)
    assert skipped == malformed


CELLS = st.one_of(
    st.sampled_from([b"1", b"0", b"", b"NA", b'"1"', b'"a"', b"x", b" 2 ", b'""']), st.binary(max_size=12)
)


@given(lines=st.lists(st.lists(CELLS, min_size=4, max_size=4), max_size=12), kinds=st.permutations("lwnc"))
def test_rows_of_csv_cells_come_to_what_the_slow_parser_says(lines, kinds):
    cells = [[cell.replace(b"\n", b"").replace(b",", b"") for cell in line] for line in lines]
    data = b"".join(b",".join(line) + b"\n" for line in cells) or b"\n"
    columns = csv_columns(kinds, [1, 2, 3, 4])
    arrays = Arrays(len(data), len(data) * 4)
    skipped = parse_all(lambda *a, **k: arrays.csv(columns, *a, **k), arrays, data)
    rows, malformed = rows_of(data, lambda line: csv_row(line, list(kinds), [1, 2, 3, 4]))
    assert bits(arrays.rows(weighted=True)) == bits(rows)
    assert skipped == malformed


def test_csv_asks_for_room_for_a_whole_line():
    columns = csv_columns("lcc", [0, 1, 2])
    assert Arrays(9, 2).csv(columns, b"1,a,b\n")[:3] == (0, 0, 0)
    assert Arrays(9, 3).csv(columns, b"1,a,b\n")[:3] == (6, 1, 1)


def test_csv_with_columns_that_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="kinds and fields must be as long, and not empty, got 2 and 1"):
        Arrays(1, 9).csv(csv_columns("lc", [1]), b"1,a\n")
    with pytest.raises(ValueError, match="and not empty"):
        Arrays(1, 9).csv(csv_columns("", []), b"1,a\n")
    for name, kind in (("weights", "w"), ("values", "n")):
        arrays = Arrays(1, 9)
        setattr(arrays, name, None)
        with pytest.raises(ValueError, match=f"{name} is None, and a column is"):
            _reader.parse_csv(b"1,1\n", 0, arrays, csv_columns(["l", kind], [0, 1]), False)
