"""Threads that parse: batches, positions, names, counts and errors are those of one thread, for any text."""

from __future__ import annotations

import gzip
import importlib
import io
import sys
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oracle.text import libsvm_row, rows_of
from shoal.data import FeatureNames
from shoal.data.columns import Columns
from shoal.data.csv import csv_format
from shoal.data.files import LocalFile, Stream
from shoal.data.fill import TextSource, fill
from shoal.data.rows import CRITEO, LIBSVM, VW
from shoal.data.source import Lines

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
PACKERS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd.compress}

CRITEO_LINE = b"1\t" + b"\t".join([b"3"] * 13 + [b"a0"] * 25)
LINES = {
    "libsvm": [b"1 3:1 4:2", b"0", b"-1 18446744073709551615:0.5", b"0 " + b"7:1 " * 12, b"1 bad", b"1 3:1 4:x"],
    "criteo": [CRITEO_LINE + b"\tb1", CRITEO_LINE + b"\t", CRITEO_LINE, b"\t" * 39, b"0" + b"\t" * 39],
    "vw": [b"1 |a x y:2 |b z", b"-1 2.5 |a x", b"1 1 | w", b"|a", b"bad"],
    "csv": [b"1,a,2.5", b"0,,", b'1,"a,b",7', b"x,a,1", b"0,a", b'1,"a,1', b"0," + b"c" * 40 + b",1"],
    "vectors": [b"1,0.5|2|,a", b'0,"7",b', b"1,,c", b"0," + b"1|" * 30 + b",d", b"1,3|x,e", b"1,3"],
}
FORMS = {
    "libsvm": LIBSVM,
    "criteo": CRITEO,
    "vw": VW,
    "csv": csv_format(Columns(label="y", categorical=["s"], numeric=["n"])),
    "vectors": csv_format(Columns(label="y", vectors=["v"])),
}
HEADERS = {"csv": b"y,s,n\n", "vectors": b"y,v,s\n"}
ENDS = [b"\n", b"\n", b"\r\n", b"\n\n", b"\n \r\n"]


class Case(NamedTuple):
    """Texts of files, and how they are read."""

    form: str
    texts: list[bytes]
    packer: str
    block: int
    batch_size: int
    skip: bool
    limit: int
    split: tuple[int, int]


@st.composite
def cases(draw) -> Case:
    form = draw(st.sampled_from(sorted(LINES)))
    pieces = st.tuples(st.sampled_from(LINES[form]), st.sampled_from(ENDS)).map(b"".join)
    texts = []
    for _ in range(draw(st.integers(1, 3))):
        text = HEADERS.get(form, b"") + b"".join(draw(st.lists(pieces, max_size=25)))
        text = draw(st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf"])) + text
        texts.append(text[:-1] if draw(st.booleans()) else text)
    n = draw(st.sampled_from([1, 1, 2, 3]))
    return Case(
        form,
        texts,
        draw(st.sampled_from(sorted(PACKERS))),
        draw(st.integers(1, 300)),
        draw(st.sampled_from([1, 2, 3, 7, 50])),
        draw(st.booleans()),
        draw(st.sampled_from([40, 150, 10_000])),
        (draw(st.integers(0, n - 1)), n),
    )


def content(batch) -> list:
    arrays = (batch.labels, batch.indptr, batch.keys, batch.values, batch.weights, batch.fields)
    return [None if array is None else (array.dtype.str, array.tobytes()) for array in arrays]


def groups_of(case: Case, paths, threads, begin=None, names=None):
    """What a pass yields, and the error that ends it."""
    form = FORMS[case.form]
    if names is not None:
        form = type(form)(**{field: getattr(form, field) for field in form.__struct_fields__} | {"names": names})
    sources = []
    for number, path in enumerate(paths):
        start = begin.offset if begin is not None and number == begin.file else 0
        if begin is None or number >= begin.file:
            how = {"block_bytes": case.block, "line_limit_bytes": case.limit, "headed": form.header is not None}
            lines = Lines(LocalFile(str(path)), *case.split, start=start, **how)
            sources.append(TextSource(number, lines, number / len(paths), 1 / len(paths)))
    groups, error = [], None
    try:
        for group in fill(sources, form, case.batch_size, case.skip, begin, threads):
            if group is not None:
                batches = [(content(batch), cursor) for batch, cursor in group.batches]
                groups.append((batches, group.skipped, group.fraction))
    except ValueError as raised:
        error = str(raised)
    return groups, error


def batches_of(groups) -> list:
    return [batch for batches, _, _ in groups for batch in batches]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function that writes the files of a case."""
    folder = tmp_path_factory.mktemp("threads")

    def write_files(case: Case):
        paths = [folder / str(i) for i in range(len(case.texts))]
        for path, text in zip(paths, case.texts, strict=True):
            path.write_bytes(PACKERS[case.packer](text))
        return paths

    return write_files


@pytest.mark.slow
@given(case=cases())
@example(Case("libsvm", [b"1 3:1\n1 bad\n" * 9], "plain", 6, 2, True, 100, (0, 1)))  # malformed where blocks end
@example(Case("libsvm", [b"1 3:1\n" * 9 + b"0 " + b"7:1 " * 40], "plain", 6, 2, True, 100, (0, 1)))  # too long
@example(Case("csv", [b"y,s,n\n1,a,2\n", b"y,s\n1,a\n"], "plain", 7, 2, True, 100, (0, 1)))  # the second header
def test_any_number_of_threads_yields_what_one_yields(write, case):
    paths = write(case)
    names = FeatureNames(5)
    expected = groups_of(case, paths, 1), groups_of(case, paths, 1, names=names)
    for threads in (2, 5):
        others = FeatureNames(5)
        assert groups_of(case, paths, threads) == expected[0]
        assert groups_of(case, paths, threads, names=others) == expected[1]
        assert list(others.items()) == list(names.items())  # the same ones, in the same order


@pytest.mark.slow
@given(case=cases(), threads=st.sampled_from([(1, 2), (2, 1), (2, 5), (5, 2)]))
def test_a_pass_goes_on_from_any_position_with_another_number_of_threads(write, case, threads):
    paths = write(case)
    groups, error = groups_of(case, paths, threads[0])
    batches = batches_of(groups)
    for i, (_, cursor) in enumerate(batches):
        rest, failed = groups_of(case, paths, threads[1], begin=cursor)
        assert [batch for batch, _ in batches_of(rest)] == [batch for batch, _ in batches[i + 1 :]]
        assert failed == error
        assert error is not None or rest[-1][1] == groups[-1][1]  # lines that were left out


@pytest.mark.slow
@given(case=cases().filter(lambda case: case.form == "libsvm"), threads=st.sampled_from([1, 2, 5]))
def test_a_position_is_behind_the_last_line_of_its_batch(write, case, threads):
    case = case._replace(skip=True, limit=10_000, split=(0, 1))
    groups, error = groups_of(case, write(case), threads)
    assert error is None
    read = 0
    for (labels, *_), cursor in batches_of(groups)[:-1]:
        read += len(labels[1]) // 4
        texts = [
            *case.texts[: cursor.file],
            (case.texts[cursor.file] + b"\n")[: cursor.offset],
        ]  # a last line may lack it
        found = [rows_of(text, libsvm_row) for text in texts]
        assert texts[-1].endswith(b"\n")
        assert (sum(len(rows) for rows, _ in found), sum(malformed for _, malformed in found)) == (read, cursor.skipped)
        assert cursor.rows == 0


@pytest.mark.combined
@pytest.mark.parametrize("form", sorted(LINES))
@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_files_of_many_blocks_are_read_alike(tmp_path, rng, form, packer):
    good = LINES[form][:2]
    texts = []
    for _ in range(2):
        lines = [good[i] for i in rng.integers(0, 2, 60_000)]
        for i in rng.integers(0, len(lines), 20):
            lines[i] = LINES[form][-2]
        texts.append(HEADERS.get(form, b"") + b"\n".join(lines))
    case = Case(form, texts, packer, 1 << 16, 4096, True, 1 << 20, (0, 1))
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / str(i))
        paths[-1].write_bytes(PACKERS[packer](text))
    expected = groups_of(case, paths, 1)
    assert expected[1] is None
    assert len(batches_of(expected[0])) == 30
    for threads in (2, 5):
        assert groups_of(case, paths, threads) == expected
    failing = case._replace(skip=False)
    expected = groups_of(failing, paths, 1)
    assert "line " in expected[1]
    assert groups_of(failing, paths, 5) == expected


@pytest.mark.slow
@given(pieces=st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\r", b"\n")), max_size=10))
@pytest.mark.parametrize("threads", [2, 5])
def test_a_stream_is_read_as_a_file_however_it_arrives(threads, pieces):
    class Dripping(io.RawIOBase):
        def __init__(self) -> None:
            self.left = [piece for piece in pieces if piece]

        def readable(self) -> bool:
            return True

        def readinto(self, view) -> int:
            if not self.left:
                return 0
            size = min(len(view), len(self.left[0]))
            view[:size], self.left[0] = self.left[0][:size], self.left[0][size:]
            self.left = [piece for piece in self.left if piece]
            return size

    def rows(stream) -> tuple[list, int]:
        lines = Lines(Stream(stream), line_limit_bytes=1000)
        groups = [group for group in fill([TextSource(0, lines)], LIBSVM, 3, True, None, threads) if group]
        return [content(batch) for group in groups for batch, _ in group.batches], groups[-1].skipped

    data = b"".join(pieces)
    if data[:6] and not data.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        assert rows(Dripping()) == rows(io.BytesIO(data))
