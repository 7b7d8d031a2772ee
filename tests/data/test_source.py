"""Blocks of whole lines: any block size, any shard, any compression; bounded, and plain about damage."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import sys
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.files import LocalFile
from shoal.data.source import BLOCK_BYTES, Lines, LineTooLongError
from shoal.errors import CorruptionError

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def zstd_with_checksum(data: bytes) -> bytes:
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


PACKERS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd_with_checksum,
}
TEXTS = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r", b"0123456789"]), max_size=40).map(b"".join)


def lines_of(path, rank=0, num_splits=1, **options):
    """The lines with the offset of each, as the blocks give them."""
    found = []
    for text, offset, _, _ in Lines(LocalFile(str(path)), rank, num_splits, **options):
        for line in bytes(text).splitlines(keepends=True) if b"\r" not in bytes(text) else split(bytes(text)):
            found.append((offset, line))
            offset += len(line)
    return found


def split(data: bytes):
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def all_lines(data: bytes):
    """Every line of a text with its offset; the last one gets the newline that it lacks."""
    found, offset = [], 0
    for line in split(data if data.endswith(b"\n") or not data else data + b"\n"):
        found.append((offset, line))
        offset += len(line)
    return found


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function from bytes to a path."""
    folder = tmp_path_factory.mktemp("source")

    def write_bytes(data: bytes):
        path = folder / "file"
        path.write_bytes(data)
        return path

    return write_bytes


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKERS)
@given(data=TEXTS, block=st.integers(1, 70))
def test_blocks_of_any_size_hold_every_line_once_and_in_order(write, packer, data, block):
    path = write(PACKERS[packer](data))
    assert lines_of(path, block_bytes=block, line_limit_bytes=10**6) == all_lines(data)


@pytest.mark.slow
@given(data=TEXTS, block=st.integers(1, 70))
def test_a_split_of_a_plain_file_holds_the_lines_whose_first_byte_is_in_its_range(write, data, block):
    path = write(data)
    for n in {*range(1, 9), len(data), len(data) + 1, 3 * len(data) + 1}:
        if n > 0:
            for rank in range(n):
                begin, end = len(data) * rank // n, len(data) * (rank + 1) // n
                want = [(at, line) for at, line in all_lines(data) if begin <= at < end]
                assert lines_of(path, rank, n, block_bytes=block, line_limit_bytes=10**6) == want


@pytest.mark.slow
@pytest.mark.parametrize("packer", ["gzip", "xz"])
@given(data=TEXTS, block=st.integers(1, 40))
def test_a_split_of_a_compressed_file_holds_the_lines_that_end_in_its_blocks(write, packer, data, block):
    path = write(PACKERS[packer](data))
    for n in (1, 2, 3, 7):
        for rank in range(n):
            want = [(at, line) for at, line in all_lines(data) if (at + len(line) - 1) // block % n == rank]
            assert lines_of(path, rank, n, block_bytes=block, line_limit_bytes=10**6) == want


@given(data=TEXTS, block=st.integers(1, 40), n=st.integers(1, 4))
def test_lines_passed_over_are_counted_in_front_of_those_that_follow(write, data, block, n):
    path = write(gzip.compress(data))
    numbers = {at: number for number, (at, _) in enumerate(all_lines(data))}
    for rank in range(n):
        number = 0
        for text, offset, passed, _ in Lines(LocalFile(str(path)), rank, n, block_bytes=block, line_limit_bytes=10**6):
            number += passed
            if text:
                assert number == numbers[offset]
            number += bytes(text).count(b"\n")


@given(data=TEXTS, block=st.integers(1, 40), n=st.integers(1, 9))
def test_the_lines_before_a_split_of_a_plain_file_can_be_counted(write, data, block, n):
    path = write(data)
    for rank in range(n):
        lines = Lines(LocalFile(str(path)), rank, n, block_bytes=block, line_limit_bytes=10**6)
        offsets = [offset for text, offset, _, _ in lines if text]
        if offsets:
            assert sum(lines.newlines_before()) == data[: offsets[0]].count(b"\n")


@pytest.mark.parametrize("packer", PACKERS)
def test_the_consumed_fraction_never_falls_and_ends_at_one(write, packer):
    path = write(PACKERS[packer](b"0123456789\n" * 5000))
    fractions = [block.fraction for block in Lines(LocalFile(str(path)), 0, 1, block_bytes=1000)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert packer != "plain" or len(set(fractions)) > 50


@pytest.mark.combined(2)
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("behind", [b"", b"\n", b"\na\n"])
@pytest.mark.parametrize("front", [b"", b"a\n", b"a\n" * 30])
@pytest.mark.parametrize("block", [1, 7, 19, 20])
def test_the_line_limit_is_exact_whatever_the_blocks(write, packer, behind, front, block):
    limits = {"block_bytes": block, "line_limit_bytes": 20}
    good, bad = front + b"x" * 20 + behind, front + b"x" * 21 + behind
    assert lines_of(write(PACKERS[packer](good)), **limits) == all_lines(good)
    with pytest.raises(LineTooLongError, match="longer than 20 bytes") as caught:
        lines_of(write(PACKERS[packer](bad)), **limits)
    assert caught.value.offset == len(front)


def test_a_line_that_begins_in_a_split_is_held_to_the_limit_where_it_goes_on_behind_it(write):
    path = write(b"a\n" * 10 + b"x" * 100 + b"\n")
    assert lines_of(path, 2, 3, block_bytes=8, line_limit_bytes=20) == []
    with pytest.raises(LineTooLongError):
        lines_of(path, 0, 3, block_bytes=8, line_limit_bytes=20)


@pytest.mark.parametrize("packer", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("padding", [b"", b"\0" * 8])
def test_several_compressed_streams_are_read_as_one_text(write, packer, padding):
    pack = PACKERS[packer]
    path = write(pack(b"a\nb") + padding + pack(b"") + pack(b"c\nd\n") + padding)
    assert lines_of(path) == all_lines(b"a\nbc\nd\n")


@pytest.mark.slow
@pytest.mark.parametrize("packer", ["gzip", "bzip2", "xz", "zstd"])
def test_a_compressed_file_that_is_cut_off_is_an_error_wherever_the_cut(write, packer):
    whole = PACKERS[packer](b"".join(b"%d\n" % i for i in range(300)))
    for size in range(6, len(whole)):
        with pytest.raises(CorruptionError, match=f"the {packer} data is truncated after {size} bytes"):
            lines_of(write(whole[:size]))


@pytest.mark.parametrize("packer", ["gzip", "bzip2", "xz", "zstd"])
def test_a_compressed_file_with_a_wrong_byte_or_a_strange_end_is_damaged(write, packer):
    text = b"".join(b"%d\n" % i for i in range(300))
    whole = PACKERS[packer](text)
    middle = len(whole) // 2
    for bad in (whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :], whole + b"this is no stream"):
        with pytest.raises(CorruptionError, match=f"damaged {packer} data before byte {len(bad)}"):
            lines_of(write(bad))


def test_compression_is_told_by_the_first_bytes_not_by_the_name(tmp_path):
    for name, data in (("a.txt", gzip.compress(b"1\n")), ("b.gz", b"1\n"), ("c.xz", bz2.compress(b"1\n"))):
        (tmp_path / name).write_bytes(data)
        assert lines_of(tmp_path / name) == [(0, b"1\n")]


@pytest.mark.parametrize("text", [b"BZh", b"BZhang,click\n", b"BZh9,click\n", b"BZh91AY\n"])
def test_a_text_is_not_taken_for_bzip2(write, text):
    assert lines_of(write(text)) == [(0, text.rstrip() + b"\n")]
    assert lines_of(write(bz2.compress(text))) == [(0, text.rstrip() + b"\n")]


def test_an_archive_that_is_not_read_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("a", "1 1:1\n")
    (tmp_path / "l").write_bytes(b"\x04\x22\x4d\x18" + bytes(20))
    for name, kind in (("z", "zip"), ("l", "LZ4")):
        with pytest.raises(
            ValueError, match=f"/{name} is a {kind} file, which is not read: unpack it, or pack it with"
        ):
            lines_of(tmp_path / name)


def test_a_text_that_expands_a_thousandfold_is_read_block_by_block(write):
    path = write(gzip.compress(b"0\n" * (8 << 20)))
    sizes = [len(block.text) for block in Lines(LocalFile(str(path)), 0, 1)]
    assert sum(sizes) == 16 << 20
    assert max(sizes) <= BLOCK_BYTES + 1
