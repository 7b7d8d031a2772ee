"""Criteo logs: the buckets of the integers, the keys of the categories, and lines that are wrong."""

from __future__ import annotations

import itertools
import math
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import pytest

from oracle.text import integer_token
from shoal.data import hash_strings, read_criteo
from shoal.data.criteo import buckets

BLANK = [""] * 39


def line(label="1", **columns):
    """A line of Criteo with the columns given as c1 to c39."""
    cells = list(BLANK)
    for name, text in columns.items():
        cells[int(name[1:]) - 1] = text
    return "\t".join([label, *cells]) + "\n"


@pytest.fixture
def keys_of(tmp_path):
    """A function from the text of a file to its keys, row by row."""

    def read(text, **options):
        path = tmp_path / "log.tsv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        rows = []
        for batch in read_criteo(path, **options):
            assert batch.values is None
            rows += [batch.keys[a:b].tolist() for a, b in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)]
        return rows

    return read


def key(field, token):
    return hash_strings([token], field=field)[0]


def test_the_worked_example_of_the_document(keys_of):
    text = line(c1="20", c2="-1", c3="2", c5="3", c14="68fd1e64", c39="x")
    want = [key(1, "8"), key(2, "SP-1"), key(3, "SP2"), key(5, "1"), key(14, "68fd1e64"), key(39, "x")]
    assert keys_of(text) == [want]


def test_an_empty_column_is_no_feature(keys_of):
    assert keys_of(line() + line("0", c39="a") + line(c1="1")) == [[], [key(39, "a")], [key(1, "SP1")]]


@pytest.mark.slow
def test_the_integers_up_to_two_hundred_thousand_have_the_customary_bucket(keys_of):
    numbers = [*range(-50, 200_001)]
    rows = keys_of("".join(line(c7=str(v)) for v in numbers))
    tokens = [integer_token(v) for v in numbers]
    assert [row[0] for row in rows] == hash_strings(tokens, field=7).tolist()


def test_buckets_begin_where_the_squared_logarithm_reaches_a_whole_number():
    floors = buckets().floors.tolist()
    assert floors[:8] == [0, 1, 2, 3, 5, 6, 8, 10]
    assert floors[-1] == 2**64 - 1
    assert all(a < b for a, b in itertools.pairwise(floors))
    for b, start in enumerate(floors[3:-1], 1):
        if start < 1 << 40:  # below, double precision is far from any doubt
            assert math.log(start) ** 2 >= b > math.log(start - 1) ** 2
        else:
            assert abs(start - math.exp(math.sqrt(b))) < 1 + 1e-13 * start
    assert math.log(2**63) ** 2 < len(floors) - 3


def test_bucket_bounds_do_not_depend_on_the_digits_that_they_are_computed_with():
    floors = buckets().floors.tolist()[3:-1]
    context = Context(prec=60)
    exact = [context.exp(context.sqrt(Decimal(b))) for b in range(1, len(floors) + 1)]
    assert floors == [int(v.to_integral_value(ROUND_CEILING)) for v in exact]


def test_both_sides_of_every_bucket_bound_fall_right_up_to_63_bits(keys_of):
    floors = buckets().floors.tolist()[3:-1]
    rows = keys_of("".join(line(c13=str(v)) for start in floors for v in (start - 1, start)))
    got = [row[0] for row in rows]
    names = ["SP2", *map(str, range(1, len(floors) + 1))]
    keys = hash_strings(names, field=13).tolist()
    assert got[0::2] == keys[:-1]
    assert got[1::2] == keys[1:]


def test_the_ends_of_64_bits_are_integers_and_one_more_is_not(keys_of):
    top = len(buckets().floors) - 4
    largest, smallest = 2**63 - 1, -(2**63 - 1)
    assert keys_of(line(c1=str(largest)) + line(c1=str(smallest))) == [[key(1, str(top))], [key(1, f"SP{smallest}")]]
    for v in (largest + 1, smallest - 1, 10**30):
        with pytest.raises(ValueError, match="outside of 64 bits"):
            keys_of(line(c1=str(v)))


def test_an_integer_may_be_written_in_several_ways_and_has_one_key(keys_of):
    rows = keys_of("".join(line(c1=text) for text in ("4", "+4", "004", "0", "-0", "+0", "000", "-7", "-007")))
    assert rows == [[key(1, "1")]] * 3 + [[key(1, "SP0")]] * 4 + [[key(1, "SP-7")]] * 2


def test_a_category_is_any_bytes_but_tab_and_newline(keys_of):
    tokens = [
        b"a",
        b"1234567",
        b"12345678",
        b"123456789",
        b"1" * 5000,
        b" x ",
        b"\xff\0\r#",
        b"1234567\r",
        "ä".encode(),
    ]
    text = b"".join(line(c20="?").encode().replace(b"?", token) for token in tokens)
    assert [row[0] for row in keys_of(text)] == hash_strings(tokens, field=20).tolist()


def test_carriage_returns_before_newlines_belong_to_no_column(keys_of):
    text = line(c1="5", c39="ab") + line(c1="5") + line() + "\n" + line(c38="x")
    assert keys_of(text.replace("\n", "\r\n")) == keys_of(text)


def test_the_last_line_needs_no_newline(keys_of):
    assert keys_of((line(c39="ab") * 2)[:-1]) == [[key(39, "ab")]] * 2
    assert keys_of(line()[:-1]) == [[]]


@pytest.mark.parametrize("label", ["0", "1", "-1", "+1", "1.0"])
def test_labels_may_be_written_in_either_custom(tmp_path, label):
    path = tmp_path / "log.tsv"
    path.write_text(line(label))
    (batch,) = read_criteo(path)
    assert batch.labels.tolist() == [1.0 if "1" in label and "-" not in label else 0.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1" + "\t" * 38 + "\n", "40 columns"),
        ("1" + "\t" * 40 + "\n", "40 columns"),
        ("1" + "\t5" * 12 + "\n", "40 columns"),
        ("1" + "\t5" * 13 + "\r\n", "40 columns"),
        ("1\n", "40 columns"),
        ("1 3:1 5:1\n", "40 columns"),
        (line(c1="x"), "line 1, column 3 .*integer column holds"),
        (line(c13="5.0"), "integer column holds"),
        (line(c2="1 "), "integer column holds"),
        (line(c2="-"), "integer column holds"),
        (line(c2="68fd1e64"), "integer column holds"),
        (line("2"), "neither 0/1 nor -1/\\+1"),
        (line(""), "label is not a number"),
        (line("1x"), "label is not a number"),
        (" " + line(), "label is not a number"),
    ],
)
def test_a_malformed_line_is_an_error_or_skipped(keys_of, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        keys_of(text)
    assert keys_of(line(c1="1") + text + line(c1="2"), on_error="skip") == [[key(1, "SP1")], [key(1, "SP2")]]


def test_nothing_of_a_malformed_line_stays_behind(keys_of):
    for bad in (line(c1="1", c2="2", c13="x"), line(c1="5", c39="a")[:-1] + "\tb\n", "1" + "\t5" * 30 + "\n"):
        assert keys_of(bad * 2 + line(c1="2") + bad, on_error="skip") == [[key(1, "SP2")]]


def test_tables_are_of_the_shapes_that_the_parser_is_told():
    tables = buckets()
    assert tables.cells.shape == (7296,)
    assert tables.cells.max() == len(tables.floors) - 2
    assert np.diff(tables.cells.astype(int)).max() == 1  # no cell meets more than two buckets
    assert tables.small.tolist() == (np.searchsorted(tables.floors, np.arange(10_000), side="right") - 1).tolist()
    assert tables.numbers.shape == (13, len(tables.floors) - 1)
    assert len(np.unique(tables.numbers)) == tables.numbers.size


@pytest.mark.parametrize(
    "token", [b"68fd1e64", b"68fd1e6", b"68fd1e640", b"\xc3\xa968fd1e", b"\x80\xa0\xff\xc0\x9f\x89\x8a\x8d"]
)
@pytest.mark.parametrize("last", [False, True])
def test_a_category_of_eight_bytes_has_the_key_of_its_text_wherever_it_is(keys_of, token, last):
    column = "c39" if last else "c38"
    text = line(**{column: "@"}).encode().replace(b"@", token)
    want = [key(int(column[1:]), token)]
    assert keys_of(text) == keys_of(text[:-1]) == [want]  # the last line may have no newline
    assert keys_of(text[:-1] + b"\r\n") == [want]
    assert keys_of(text + line(c1="1").encode()) == [want, [key(1, "SP1")]]


@pytest.mark.parametrize("text", ["1234567\t", "123\t4567", "\t1234567", "1234567\r", "1\r345678"])
def test_eight_bytes_with_a_separator_are_not_one_category(keys_of, text):
    cells = text.split("\t")
    given = line(**{f"c{38 + i}": cell for i, cell in enumerate(cells[:2])})
    want = [key(38 + i, cell) for i, cell in enumerate(cells[:2]) if cell]
    assert keys_of(given) == [want]
