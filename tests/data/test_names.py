"""Names of features: every key under what stood in the text, once, whatever the batches, threads and tables."""

from __future__ import annotations

import functools
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from oracle.text import Malformed, criteo_row, integer_token, libffm_row, libsvm_row, lines_of, token_key, vw_row
from shoal import CorruptionError, _core, _reader
from shoal.data import FeatureNames
from shoal.data.readers import READERS
from shoal.data.spelling import encoded, joined, of_column, text_at
from shoal.storage.checksummed_json import encode_checksummed
from tiers import long_but


def decoded(text):
    return text.decode("utf-8", "backslashreplace")


def range_of(v):
    """All whole numbers of v's bucket, by the customary rule and a walk."""
    if v <= 2:
        return str(v)
    low = high = v
    while low > 3 and integer_token(low - 1) == integer_token(v):
        low -= 1
    while integer_token(high + 1) == integer_token(v):
        high += 1
    return str(v) if low == high else f"{low}..{high}"


def libsvm_names(line):
    tokens = re.findall(rb"[^ \t\r]+", line.split(b"#")[0])
    keys = [int(t.split(b":")[0]) for t in tokens[1:] if not t.startswith(b"qid")]
    return [(key, str(key)) for key in keys]


def libffm_names(line):
    tokens = re.findall(rb"[^ \t\r]+", line.split(b"#")[0])
    pairs = [(int(t.split(b":")[0]), int(t.split(b":")[1])) for t in tokens[1:]]
    return [(key, f"{field}:{key}") for field, key in pairs]


def vw_names(line):
    named = []
    for space in line.split(b"|")[1:]:
        words = re.findall(rb"[^ \t\r]+", space)
        namespace = b"" if space[:1] in (b" ", b"\t", b"\r", b"") else words.pop(0).split(b":")[0]
        field = token_key(0, namespace)
        for word in words:
            name = word.split(b":")[0]
            named.append((token_key(field, name), decoded(namespace + b"^" + name if namespace else name)))
    return named


def criteo_names(line):
    columns = line.removesuffix(b"\r").split(b"\t")
    integers = [(i, int(v)) for i, v in enumerate(columns[1:14], 1) if v]
    return [
        *((token_key(i, integer_token(v)), f"I{i}={range_of(v)}") for i, v in integers),
        *((token_key(i, v), f"C{i - 13}={decoded(v)}") for i, v in enumerate(columns[14:], 14) if v),
    ]


ORACLES = {
    "libsvm": (libsvm_row, libsvm_names),
    "libffm": (libffm_row, libffm_names),
    "vw": (vw_row, vw_names),
    "criteo": (criteo_row, criteo_names),
}


def oracle(form, data):
    """What a dictionary says, with each line read slowly: malformed ones have no names."""
    row, names = ORACLES[form]
    found = {}
    for line in lines_of(data):
        try:
            if row(line) is not None:
                for key, name in names(line):
                    found.setdefault(key, name)
        except Malformed:
            pass
    return found


# ---- of files --------------------------------------------------------------------------------------------------------

small = st.integers(0, 30)
token = st.sampled_from([b"a", b"ann", b"\xff\xfe", "é".encode(), b"x" * 70, b"7", b"a^b"])
value = st.sampled_from([b":1", b":0.5", b":1e3"])
LINES = {
    "libsvm": st.tuples(st.lists(st.tuples(small, value)), st.sampled_from([b"", b" qid:7", b" # 9:9", b" bad"])).map(
        lambda t: b"1" + b"".join(b" %02d%s" % f for f in t[0]) + t[1]
    ),
    "libffm": st.lists(st.tuples(small, small, value)).map(lambda fs: b"0" + b"".join(b" %03d:%02d%s" % f for f in fs)),
    "vw": st.lists(
        st.tuples(
            st.sampled_from([b"", b"user", b"user:2", b"\xff", b"n" * 200]),
            st.lists(st.tuples(token, st.sampled_from([b"", b":1", b":0.25", b":x"]))),
        ),
        min_size=1,
    ).map(lambda ns: b"1 tag" + b"".join(b"|" + n + b"".join(b" " + t + v for t, v in fs) + b"\t" for n, fs in ns)),
    "criteo": st.tuples(
        st.lists(st.sampled_from([b"", b"-3", b"0", b"+2", b"007", b"19", b"1000", b"x"]), min_size=13, max_size=13),
        st.lists(st.one_of(st.just(b""), token), min_size=26, max_size=26),
    ).map(lambda t: b"\t".join([b"0", *t[0], *t[1]])),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", long_but(["criteo", "vw"], ORACLES.keys()))
@given(st.data())
def test_every_feature_of_a_file_has_the_name_that_a_slow_reader_gives_it(tmp_path_factory, form, data):
    text = b"\n".join(data.draw(st.lists(LINES[form], max_size=12)))
    path = tmp_path_factory.mktemp("names") / "data"
    path.write_bytes(text)
    size, threads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    names = FeatureNames()
    plain = READERS[form](path, batch_size=size, on_error="skip")
    for got, expected in zip(
        READERS[form](path, batch_size=size, on_error="skip", reader_threads=threads, names=names), plain, strict=True
    ):
        assert got.keys.tolist() == expected.keys.tolist()
    expected = oracle(form, text)
    assert dict(names) == expected


@pytest.mark.long
def test_names_are_kept_over_batches_growth_of_rows_blocks_files_and_passes(rng, tmp_path):
    paths = []
    for file in range(2):
        paths.append(tmp_path / f"{file}.vw")
        lines = [
            b"1 |u " + b" ".join(b"w%d" % w for w in rng.integers(0, 20_000, rng.integers(0, 40))) for _ in range(4000)
        ]
        paths[-1].write_bytes(b"\n".join(lines) + b"\n")
    expected = oracle("vw", b"".join(path.read_bytes() for path in paths))
    for threads in (1, 2):
        names = FeatureNames()
        reader = shoal.read_vw(paths, batch_size=700, reader_threads=threads, names=names)
        for _ in range(2):
            for _ in reader:
                pass
            assert dict(names) == expected
    shards = FeatureNames()
    whole = shoal.read_vw(paths[0], names=shards)
    for rank in range(3):
        for _ in whole.split(rank, 3):
            pass
    assert dict(shards) == oracle("vw", paths[0].read_bytes())


def test_a_feature_of_a_table_is_named_by_its_column_and_cell(tmp_path):
    paths = [tmp_path / "0.csv", tmp_path / "1.csv"]
    paths[0].write_bytes(b'site,click,price,"a ""b"""\na.com,1,0.5,x\n"b,""c""",0,NA,""\n"d",1,2,"""q"""\r\n')
    paths[1].write_bytes(b'click,"a ""b""",price,site\n1,y,"7",a.com\n')
    expected = {("site", "a.com"), ("site", 'b,"c"'), ("site", "d"), ('a "b"', "x"), ('a "b"', '"q"'), ('a "b"', "y")}

    def key(column, cell):
        return token_key(token_key(0, column.encode()), cell.encode())

    for threads in (1, 2):
        names = FeatureNames()
        for _ in shoal.read_csv(paths, label="click", numeric=["price"], reader_threads=threads, names=names):
            pass
        named = {key(c, v): f"{c}={v}" for c, v in expected} | {key("price", ""): "price"}
        assert dict(names) == named


@pytest.mark.parametrize("kind", ["plain", "dictionary", "parquet"])
def test_a_table_of_arrow_names_what_its_csv_names(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.csv").write_text("click,site,price,n\n1,,0.5,7\n0,b.com,NA,-8\n1,é.com,2,7\n0,é.com,3,NA\n")
    table = arrow.table(
        {
            "click": [True, False, True, False],
            "site": arrow.array([None, "b.com", "é.com", "é.com"]),
            "price": [0.5, None, 2.0, 3.0],
            "n": arrow.array([7, -8, 7, None], arrow.int32()),
        }
    )
    if kind == "dictionary":
        table = table.set_column(1, "site", table["site"].dictionary_encode())
    expected, names = FeatureNames(), FeatureNames()
    how = {"label": "click", "numeric": ["price"], "interactions": [("price", "site")]}
    for _ in shoal.read_csv(tmp_path / "t.csv", **how, names=expected):
        pass
    made = ["price * site=é.com"]
    assert sorted(expected.values()) == ["n=-8", "n=7", "price", *made, "site=b.com", "site=é.com"]
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
        reader = shoal.read_parquet(tmp_path / "t.parquet", **how, names=names)
    else:
        reader = shoal.read_arrow(table, **how, names=names)
    for _ in reader:
        pass
    assert names == expected
    assert reader.names is names


@pytest.mark.slow
@given(
    rows=st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=7), min_size=1, max_size=9),
    pairs=st.lists(
        st.sampled_from([("a", "b"), ("c", "a"), ("b", "b"), ("c", "c"), ("b", "z")]), unique=True, min_size=1
    ),
    size=st.integers(1, 4),
    threads=st.integers(1, 2),
)
def test_features_made_of_two_are_named_by_both(tmp_path_factory, rows, pairs, size, threads):
    path = tmp_path_factory.mktemp("names") / "x.vw"
    path.write_text("".join("1 " + "".join(f"|{f} {n} " for f, n in row) + "| x\n" for row in rows))
    names = FeatureNames()
    made = shoal.read_vw(path, batch_size=size, reader_threads=threads, interactions=pairs, names=names)
    got = [key for batch in made for key in batch.keys.tolist()]
    expected = {token_key(token_key(0, b""), b"x"): "x"}
    for row in rows:
        keys = [(f, token_key(token_key(0, f.encode()), b"%d" % n), f"{f}^{n}") for f, n in row]
        expected |= {key: name for _, key, name in keys}
        for first, second in pairs:
            for i, (f, one, named) in enumerate(keys):
                for j, (g, other, also) in enumerate(keys):
                    if (f, g) == (first, second) and (first != second or i < j):
                        (one_, named_), (other_, also_) = (one, named), (other, also)
                        if first == second and one > other:
                            (one_, named_), (other_, also_) = (other, also), (one, named)
                        expected[token_key(one_, other_.to_bytes(8, "little"))] = f"{named_} * {also_}"
    assert set(got) == set(expected)
    assert dict(names) == expected


def test_the_bucket_of_an_integer_is_told_as_its_integers(tmp_path):
    path = tmp_path / "c.tsv"
    numbers = [-(2**62), -1, 0, 2, 3, 5, 20, 2**63 - 1, b"-0", b"0" * 5000 + b"20"]
    path.write_bytes(b"".join(b"1\t%s%s\n" % (n if isinstance(n, bytes) else b"%d" % n, b"\t" * 38) for n in numbers))
    names = FeatureNames()
    (batch,) = shoal.read_criteo(path, names=names)
    reported = [names[key] for key in batch.keys.tolist()]
    assert reported[:7] == ["I1=-4611686018427387904", "I1=-1", "I1=0", "I1=2", "I1=3..4", "I1=5", "I1=17..20"]
    low, high = reported[7].removeprefix("I1=").split("..")
    assert int(low) < 2**63 - 1 == int(high)
    assert reported[8:] == ["I1=0", "I1=17..20"]


# ---- which are new ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1)), max_size=60), max_size=8),
    st.integers(0, 40),
)
def test_each_key_gets_its_first_name_until_the_limit(blocks, limit):
    names = FeatureNames(limit)
    expected = {}
    for block in blocks:
        text = b"".join(b"%d " % i for i in range(len(block)))
        ends = np.array([m.end() for m in re.finditer(rb"\d+", text)], np.int64)
        begins = np.array([m.start() for m in re.finditer(rb"\d+", text)], np.int64)
        keys = np.array(block, np.uint64)
        names.note(text, keys, keys, np.column_stack([begins, ends]), functools.partial(of_column, "i"))
        for i, key in enumerate(block):
            if len(expected) < limit:
                expected.setdefault(key, f"i={i}")
    assert dict(names) == expected
    assert list(names) == list(expected)
    assert names.full == (len(expected) >= limit)


def test_threads_name_each_key_once():
    names = FeatureNames()
    keys = np.arange(40_000, dtype=np.uint64)
    spans = np.zeros((len(keys), 2), np.int64)

    def spell(text, some, fields):
        return encoded([str(field) for field in fields])

    def work(seed):
        for part in np.array_split(np.random.default_rng(seed).permutation(keys), 40):
            names.note(b"", part, part, spans[: len(part)], spell)
            assert all(names[key] == str(key) for key in part[:9].tolist())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(names) == len(keys)
    assert dict(names) == {key: str(key) for key in keys.tolist()}


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2)), max_size=9),
    st.lists(st.sampled_from(["", "a=", "é^", "0"]), min_size=3, max_size=3),
    st.booleans(),
)
def test_names_are_heads_and_texts(pieces, heads, numbers):
    text = b"00:7:0:10:x0"
    spans = np.array([sorted(piece[:2]) for piece in pieces], np.int64).reshape(-1, 2)
    head_of = np.array([piece[2] for piece in pieces], np.int64)
    texts = joined(text, spans, heads, head_of, numbers=numbers)
    for i, (begin, end) in enumerate(spans.tolist()):
        part = text[begin:end].decode()
        if numbers:
            part = ":".join(re.sub(r"^0+(?=.)", "", number) for number in part.split(":"))
        assert text_at(texts, i) == heads[head_of[i]] + part
    assert len(texts[0]) == (texts[1][-1] if pieces else 0)


def test_names_outside_of_their_block_are_refused():
    good = {
        "text": np.zeros(4, np.uint8),
        "spans": np.array([[1, 3]]),
        "heads": np.zeros(2, np.uint8),
        "head_ends": np.array([2], np.uint64),
        "head_of": np.array([0]),
        "numbers": False,
        "cells": False,
        "joined": np.zeros(4, np.uint8),
        "ends": np.zeros(1, np.uint64),
    }
    assert _reader.join_names(**good) == 4
    for change, message in (
        ({"spans": np.array([[3, 1]])}, "from 3 to 1, of 4 bytes"),
        ({"spans": np.array([[-1, 1]])}, "from -1 to 1"),
        ({"spans": np.array([[1, 5]])}, "from 1 to 5, of 4 bytes"),
        ({"spans": np.zeros((2, 2), np.int64)}, "got 2 and 1"),
        ({"head_ends": np.array([3], np.uint64)}, "exceed 2 bytes, at 0"),
        ({"head_ends": np.array([2, 1], np.uint64)}, "exceed 2 bytes, at 1"),
        ({"head_of": np.array([1])}, "head 1, of 1"),
        ({"head_of": np.array([-1])}, "head -1, of 1"),
        ({"joined": np.zeros(3, np.uint8)}, "take 4 bytes, got room for 3"),
        ({"cells": True}, "take 132 bytes, got room for 4"),
    ):
        with pytest.raises(ValueError, match=message):
            _reader.join_names(**{**good, **change})


# ---- a dictionary ----------------------------------------------------------------------------------------------------


def test_names_may_be_added_and_asked_for():
    names = FeatureNames(limit=3)
    names.add(np.array([7, 2**64 - 1, 7], np.uint64), ["a", b"b\xff", "again"])
    assert dict(names.items()) == {7: "a", 2**64 - 1: "b\\xff"}
    assert (names.get(7), names.get(8), names.get(8, "none"), len(names)) == ("a", None, "none", 2)
    assert np.uint64(7) in names
    assert names[np.uint64(7)] == "a"
    assert 8 not in names
    assert not names.full
    names.add([8, 9], ["c", "d"])
    assert names.full
    assert 9 not in names
    assert repr(names) == "<FeatureNames of 3 features, at most 3>"
    with pytest.raises(ValueError, match="2 keys need as many texts, got 1"):
        names.add(np.array([1, 2], np.uint64), ["a"])
    with pytest.raises(TypeError, match="text 1 is a int: pass str or bytes"):
        names.add(np.array([1, 2], np.uint64), ["a", 5])
    many = FeatureNames(2**70)
    many.add([3, 1], ["lone \ud800", ""])
    assert dict(pickle.loads(pickle.dumps(many))) == {3: "lone \\ud800", 1: ""}
    assert dict(FeatureNames.from_bytes(b"".join(many.to_parts()), "many")) == dict(many)
    assert not any(key in many for key in ("3", -1, 2**64, None))
    with pytest.raises(KeyError):
        many[2]
    with pytest.raises(ValueError, match="limit is -1"):
        FeatureNames(-1)
    with pytest.raises(TypeError, match=r"names is a dict: pass shoal\.data\.FeatureNames\(\)"):
        shoal.read_libsvm(__file__, names={})


@pytest.mark.slow
@given(st.dictionaries(st.integers(0, 2**64 - 1), st.text(st.characters(codec="utf-8"))), st.integers(0, 5))
def test_names_are_saved_and_pickled_as_they_are(tmp_path_factory, named, spare):
    names = FeatureNames(len(named) + spare)
    names.add(np.array(list(named), np.uint64), list(named.values()))
    path = tmp_path_factory.mktemp("names") / "names.json"
    assert names.save(path) == path
    for again in (FeatureNames.load(path), pickle.loads(pickle.dumps(names))):
        assert dict(again) == named
        assert again.limit == names.limit
    assert list(FeatureNames.load(path)) == sorted(named)


def test_damaged_names_are_named(tmp_path):
    path = tmp_path / "names.json"
    with pytest.raises(CorruptionError, match=r"names\.json is missing"):
        FeatureNames.load(path)
    names = FeatureNames()
    names.add([7], ["carrier=AA"])
    whole = names.save(path).read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        with pytest.raises(CorruptionError, match=r"names\.json"):
            FeatureNames.load(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptionError, match=r"names\.json"):
            FeatureNames.load(path)
    for body in (
        b"7",
        b'{"limit":3,"names":{"x":"y"}}',
        b'{"format":"shoal feature names","version":2,"limit":1,"names":{}}',
    ):
        path.write_bytes(encode_checksummed(body))
        with pytest.raises(CorruptionError, match=r"names\.json"):
            FeatureNames.load(path)


def test_names_of_version_1_are_read(tmp_path):
    path = tmp_path / "names.json"
    body = '{"format":"shoal feature names","version":1,"limit":5,"names":{"18446744073709551615":"é=1","0":"site=a"}}'
    path.write_bytes(encode_checksummed(body.encode()))
    names = FeatureNames.load(path)
    assert (dict(names), names.limit) == ({2**64 - 1: "é=1", 0: "site=a"}, 5)
    path.write_bytes(encode_checksummed(body.replace("18446744073709551615", "18446744073709551616").encode()))
    with pytest.raises(CorruptionError, match=r"names\.json cannot be read"):
        FeatureNames.load(path)


@given(st.binary(max_size=40), st.integers(0, 3), st.integers(0, 40))
def test_arrays_that_are_no_names_are_refused(arrays, count, size):
    body = b'{"format":"shoal feature names","version":2,"limit":9,"names":%d,"bytes":%d,"crc32c":"%08x"}' % (
        count,
        size,
        _core.crc32c(arrays),
    )
    line = encode_checksummed(body)
    raw = line.ljust((len(line) + 8) // 8 * 8, b"\n") + arrays
    ends = np.frombuffer(arrays[8 * count : 16 * count].ljust(8 * count, b"\0"), "<u8").tolist()
    if len(arrays) == 16 * count + size and ends == sorted(ends) and all(end <= size for end in ends):
        assert len(FeatureNames.from_bytes(raw, "names")) <= count
    else:
        with pytest.raises(CorruptionError, match="names"):
            FeatureNames.from_bytes(raw, "names")
