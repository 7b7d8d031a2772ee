"""Examples that are left out by their places: each line's feature is its number, so a batch says which lines it has."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.data import Following, Reader
from shoal.data.places import places_of, read_places, spans_of

LINES = 60_000  # several blocks of text
BATCH = 700


def libsvm(path: Path, first: int, lines: int) -> Path:
    """Write a file whose line N has the feature ``first`` + N; each 11th is empty."""
    text = "".join("\n" if n % 11 == 0 else f"{n % 2} {first + n}:1\n" for n in range(1, lines + 1))
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.write(text)
    return path


def numbers(batches: Iterable[shoal.data.Batch]) -> list[list[int]]:
    return [batch.keys.tolist() for batch in batches]


def expected(data: Reader, without: set[int]) -> list[list[int]]:
    return [[key for key in batch if key not in without] for batch in numbers(data)]


@pytest.fixture(params=["txt", "txt.gz"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return [
        str(libsvm(tmp_path / f"{number}.{request.param}", number * 10**6, LINES if number == 1 else 900))
        for number in range(3)
    ]


@pytest.fixture
def reader(files: list[str]) -> Reader:
    return shoal.read_libsvm(files, batch_size=BATCH, reader_threads=3)


def left_out(files: list[str]) -> tuple[list[str], set[int]]:
    places = [f"{files[0]}:1", f"{files[1]}:11", f"{files[1]}:699-1500", f"{files[1]}:{LINES}", f"{files[2]}:500-"]
    lines = {1, 1_000_000 + LINES, *range(1_000_699, 1_001_501), *range(2_000_500, 2_000_901)}
    return places, lines


@pytest.mark.slow
def test_batches_lack_what_was_named_and_keep_their_ends(reader: Reader, files: list[str]) -> None:
    places, lines = left_out(files)
    some = reader.without(examples=places)
    assert numbers(some) == expected(reader, lines)
    assert numbers(some.in_order([2, 0, 1])) == expected(reader.in_order([2, 0, 1]), lines)
    key = 1_003_000
    assert numbers(some.without([key])) == expected(reader, {*lines, key})
    assert numbers(some.without(examples=["0.txt*"])) == expected(reader, {*lines, *range(1000)})


@pytest.mark.combined
@pytest.mark.parametrize("n", [2, 5])
def test_splits_leave_out_the_same_lines(reader: Reader, files: list[str], n: int) -> None:
    places, lines = left_out(files)
    for rank in range(n):
        assert numbers(reader.without(examples=places).split(rank, n)) == expected(reader.split(rank, n), lines)
    for one in reader.splits(1 << 16):
        name = one.path
        found = [place for place in places if place.startswith(f"{name}:")]
        assert numbers(one.without(examples=found)) == expected(one, lines)


@pytest.mark.combined
@pytest.mark.parametrize("batches", [1, 3, 60])
def test_a_pass_that_resumes_leaves_out_the_same_lines(reader: Reader, files: list[str], batches: int) -> None:
    places, lines = left_out(files)
    some = reader.without(examples=places)
    whole = iter(some)
    for _ in range(batches):
        next(whole)
    rest = some.resume(some.position())
    assert numbers(rest) == numbers(whole)
    assert numbers(rest) == expected(reader, lines)[batches:]


def test_malformed_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("1 1:1\nrubbish\n0 3:1\n1 4:1\n-inf 5:1\n0 6:1\n")
    data = shoal.read_libsvm(path, on_error="skip", batch_size=2)
    assert numbers(data) == [[1, 3], [4, 6]]
    assert numbers(data.without(examples=[f"{path}:3-4"])) == [[1], [6]]
    with pytest.raises(ValueError, match="line 2"):
        list(shoal.read_libsvm(path).without(examples=[f"{path}:1"]))


def test_a_header_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("click,n\n1,2\n0,3\n1,4\n")
    data = shoal.read_csv(path, label="click", numeric=["n"])
    (batch,) = data.without(examples=[f"{path}:1", f"{path}:3"])
    assert batch.values is not None
    assert batch.values.tolist() == [2, 4]
    assert np.isnan(next(iter(data.unlabelled().without(examples=[f"{path}:3"]))).labels).tolist() == [True, True]


def test_rows_of_tables_are_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = 40_000  # several row groups, and record batches
    table = arrow.table({"click": [n % 2 for n in range(rows)], "n": np.arange(1, rows + 1, dtype=np.float32)})
    path = tmp_path / "x.parquet"
    parquet.write_table(table, path, row_group_size=15_000)
    data = shoal.read_parquet(path, label="click", numeric=["n"], batch_size=999)
    some = data.without(examples=[f"{path}:2", f"{path}:17000-33000"])
    wanted = {2, *range(17000, 33001)}
    for one, other in zip(data, some, strict=True):
        assert one.values is not None
        assert other.values is not None
        assert [n for n in one.values if n not in wanted] == other.values.tolist()
    rest = some.resume({**some.position(), "place": [0, 20_000, 0, 0]})
    assert [len(batch) for batch in rest][:3] == [0, 0, 0]
    assert sum(map(len, rest)) == rows - 33_000


def test_places_and_spans_are_the_same() -> None:
    files = ["a:7", "a", "b/c.csv", "s3://b/2026-11-29T12/part-0.csv"]
    spans = spans_of(["a:7", "a:3", "a:4-6", "a:5-5", "b/c.csv:9-", "2026-11-29T12/*"], files)
    assert spans == {
        "a": [[3, 3], [4, 6], [7, 7]],
        "b/c.csv": [[9, 2**63 - 1]],
        "s3://b/2026-11-29T12/part-0.csv": [[1, 2**63 - 1]],
    }
    assert spans_of(places_of(spans), files) == spans
    assert spans_of(["a:1-", "a:5"], files) == {"a": [[1, 2**63 - 1]]}
    assert spans_of([], files, spans) == spans
    with pytest.raises(TypeError, match="pass a list of places"):
        spans_of("a:7", files)


def test_a_file_of_places_has_one_on_each_line(tmp_path: Path) -> None:
    (tmp_path / "places").write_bytes(b"a:7\r\n\nb c.csv:1-2\n\xff.csv:3")
    assert read_places(tmp_path / "places") == ["a:7", "b c.csv:1-2", "\udcff.csv:3"]
    (tmp_path / "none").write_bytes(b"")
    assert read_places(tmp_path / "none") == []
    with pytest.raises(FileNotFoundError):
        read_places(tmp_path / "absent")


def test_other_places_are_other_data(reader: Reader, files: list[str]) -> None:
    some = reader.without(examples=[f"{files[0]}:1"])
    assert some.changes(reader.fingerprint()) == "the examples that are left out (without) were others"
    assert some.changes(reader.without(examples=[f"{files[0]}:1-1"]).fingerprint()) is None


def test_a_stream_has_no_lines_to_name(tmp_path: Path) -> None:
    data = shoal.read_libsvm(Following(tmp_path))
    with pytest.raises(ValueError, match="is a stream, whose examples have no lines"):
        data.without(examples=[str(tmp_path)])
