"""Resume: a saved position continues with the very next example, whatever the files, splits, threads and faults."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import bits, rows_of_batch
from shoal.data import read_libsvm, read_vw
from tiers import long_but

PACKERS = {"plain": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
LINES = st.lists(st.sampled_from([b"1 3:1 4:2\n", b"0\n", b"\n", b"# c\n", b"-1 5:0.5\n", b"bad\n"]), max_size=20)
TEXTS = st.lists(LINES.map(b"".join), min_size=1, max_size=4)


def rows(batches):
    return bits([row for batch in batches for row in rows_of_batch(batch)])


def keys(batches):
    return np.concatenate([np.zeros(0, np.uint64), *(batch.keys for batch in batches)]).tolist()


def through_json(position):
    return json.loads(json.dumps(position))


def write(folder, texts, packer="plain"):
    """Files of some texts."""
    paths = []
    for i, text in enumerate(texts):
        paths.append(folder / f"{i}.txt")
        paths[-1].write_bytes(PACKERS[packer](text))
    return paths


def check_every_position(make, content=rows):
    """Resume behind each batch, and at the beginning, and compare with what the pass gave from there on."""
    reader = make()
    batches = list(reader)
    skipped = reader.skipped
    reader = make()
    positions = [through_json(reader.position()), *(through_json(reader.position()) for _ in reader)]
    for i, position in enumerate(positions):
        resumed = make().resume(position)
        assert content(resumed) == content(batches[i:])
        assert resumed.skipped == skipped
        assert content(resumed) == content(batches[i:])  # again


@pytest.mark.slow
@pytest.mark.parametrize("packer", long_but(["gzip"], PACKERS.keys()))
@given(texts=TEXTS, size=st.integers(1, 5), threads=st.sampled_from([1, 2]))
def test_every_position_of_every_list_of_files(tmp_path_factory, packer, texts, size, threads):
    paths = write(tmp_path_factory.mktemp("resume"), texts, packer)
    check_every_position(lambda: read_libsvm(paths, batch_size=size, on_error="skip", reader_threads=threads))


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("packer", ["plain", "gzip"])
def test_positions_in_splits_of_files_of_many_blocks(tmp_path, packer, threads):
    lines = [b"%d %d:1\n" % (i % 2, i) for i in range(100_000)]
    paths = write(tmp_path, [b"".join(lines), b"".join(lines[:40_000])], packer)
    for given_paths, n in ((paths[:1], 3), (paths, 2), (paths, 3)):
        for rank in range(n):
            check_every_position(
                lambda p=given_paths, r=rank, n=n: read_libsvm(p, batch_size=17_000, reader_threads=threads).split(
                    r, n
                ),
                keys,
            )


@pytest.mark.parametrize("made", [1, 3])
@pytest.mark.parametrize("resumed", [1, 2])
def test_a_position_means_the_same_for_other_threads_and_another_batch_size(tmp_path, made, resumed):
    text = b"".join(b"%d |n %d\n" % (i % 2, i) for i in range(60_000))
    reader = read_vw(write(tmp_path, [text, text]), batch_size=30_011, reader_threads=made)
    whole = keys(reader)
    done = 0
    for batch in reader:
        done += len(batch)
        other = read_vw(reader.paths, batch_size=999, reader_threads=resumed).resume(reader.position())
        assert keys(other) == whole[done:]
    assert done == len(whole)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_stream_goes_on_where_the_position_was(pack):
    data = pack(b"".join(b"1 %d:1\n" % i for i in range(1000)))
    reader = read_libsvm(io.BytesIO(data), batch_size=300)
    batches = iter(reader)
    first = next(batches)
    rest = rows(batches)
    reader = read_libsvm(io.BytesIO(data), batch_size=300)
    next(iter(reader))
    assert rows(read_libsvm(io.BytesIO(data)).resume(reader.position())) == rest
    assert len(first) == 300


def test_an_error_behind_a_position_names_the_line_of_the_file(tmp_path):
    lines = [b"1 %d:1\n" % i for i in range(1000)]
    lines[777] = b"1 bad\n"
    for packer in PACKERS:
        (path,) = write(tmp_path, [b"".join(lines)], packer)
        for threads in (1, 2):
            reader = read_libsvm(path, batch_size=100, reader_threads=threads)
            batches = iter(reader)
            for _ in range(3):
                next(batches)
            with pytest.raises(
                ValueError, match=f"line 778, column 3 .the line begins at byte {len(b''.join(lines[:777]))}"
            ):
                list(read_libsvm(path, reader_threads=threads).resume(reader.position()))


def test_a_file_that_has_changed_is_an_error_that_names_it(tmp_path):
    first, second = write(tmp_path, [b"1 1:1\n" * 10, b"1 2:1\n"])
    reader = read_libsvm([first, second], batch_size=3)
    next(iter(reader))
    second.write_bytes(b"1 2:1\n1 3:1\n")
    with pytest.raises(ValueError, match=r"1\.txt has 12 bytes, and had 6 when the position was taken: begin"):
        list(reader.resume(reader.position() | {"files": [[str(first), 60], [str(second), 6]]}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "vw"}, "belongs to vw data of .*x, and this reader reads libsvm data"),
        ({"files": [["other", 3]]}, "belongs to libsvm data of other, and"),
        ({"files": None}, "is not a position: pass what position"),
        ({"place": [0, 0]}, "is not a position"),
        ({"place": [0, -1, 0, 0]}, "is not in 1 files"),
        ({"place": [1, 0, 0, 0]}, "is not in 1 files"),
        ({"place": [0.5, 0, 0, 0]}, "is not a position"),
        ({"shard": [2, 2]}, "split 2 of 2"),
    ],
)
def test_what_is_no_position_is_refused(tmp_path, change, complaint):
    (tmp_path / "x").write_bytes(b"1 1:1\n")
    reader = read_libsvm(tmp_path / "x")
    with pytest.raises(ValueError, match=complaint):
        reader.resume(reader.position() | change)
    with pytest.raises(ValueError, match="is not a position"):
        reader.resume({})


# ---- files in another order ------------------------------------------------------------------------------------------


@pytest.mark.long
@given(
    texts=TEXTS, size=st.integers(1, 5), threads=st.sampled_from([1, 2]), num_splits=st.integers(1, 3), data=st.data()
)
def test_files_in_another_order_are_the_list_in_that_order(tmp_path_factory, texts, size, threads, num_splits, data):
    paths = write(tmp_path_factory.mktemp("order"), texts)
    order = data.draw(st.permutations(range(len(paths))))
    how = {"batch_size": size, "reader_threads": threads, "on_error": "skip"}
    ordered = read_libsvm(paths, **how).in_order(order)
    assert rows(ordered) == rows(read_libsvm([paths[i] for i in order], **how))
    assert rows(ordered) == rows(ordered)
    assert ordered.paths == tuple(map(str, paths))
    check_every_position(lambda: read_libsvm(paths, **how).in_order(order))
    # A position brings the order along, and a shard has the files that it would have had.
    batches = list(ordered)
    position = through_json(ordered.position())
    assert rows(read_libsvm(paths, **how).resume(position)) == []
    parts = [rows(read_libsvm(paths, **how).in_order(order).split(rank, num_splits)) for rank in range(num_splits)]
    plain = [rows(read_libsvm(paths, **how).split(rank, num_splits)) for rank in range(num_splits)]
    assert [sorted(map(repr, part)) for part in parts] == [sorted(map(repr, part)) for part in plain]
    assert sum(map(len, parts)) == sum(map(len, batches))


def test_an_order_that_is_none_is_refused(tmp_path):
    paths = write(tmp_path, [b"1 3:1\n", b"0 4:1\n"])
    reader = read_libsvm(paths, batch_size=1)
    for order in ([0], [0, 0], [1, 2], [0, 1, 1], []):
        with pytest.raises(ValueError, match="is not a permutation of 2 files"):
            reader.in_order(order)
    next(iter(reader))
    position = reader.position()
    assert "order" not in position
    with pytest.raises(ValueError, match="starts from a position"):
        reader.resume(position).in_order([1, 0])
    with pytest.raises(ValueError, match=r"\[0, 0\] is not a permutation of 2 files"):
        reader.resume({**position, "order": [0, 0]})
    with pytest.raises(ValueError, match="is not a position"):
        reader.resume({**position, "order": 7})
