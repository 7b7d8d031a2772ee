"""The audit of keys: constructed collisions are found, chance ones are counted as a slow count counts them."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from oracle.text import GOLDEN_RATIO, MASK, scramble, token_key
from shoal import cli
from shoal.data import FeatureNames, audit
from shoal.tools.planted import PlantedModel, write_log

FORBIDDEN = frozenset(b' \t\r\n,"|:')


def seed(field):
    """The state of a key before its last eight bytes, of a token of eight."""
    return (scramble((field + GOLDEN_RATIO) & MASK) + 8 * GOLDEN_RATIO) & MASK


def token_of(field, key):
    """The token of eight bytes that has a key: the last round turned back."""
    before = (int(shoal.data.unmix(np.array([key], np.uint64))[0]) + GOLDEN_RATIO) & MASK
    return (before ^ seed(field)).to_bytes(8, "little")


def collision(first, second):
    """A token in the field ``first`` and another in ``second`` with one key."""
    tokens = (b"t%07d" % i for i in itertools.count())
    pairs = ((token, token_of(second, token_key(first, token))) for token in tokens)
    token, other = next((token, other) for token, other in pairs if not FORBIDDEN & set(other))
    assert token_key(first, token) == token_key(second, other)
    return token, other


def field(name):
    return token_key(0, name)


def test_columns_whose_texts_share_a_key_are_told(tmp_path):
    token, other = collision(field(b"site"), field(b"user"))
    path = tmp_path / "t.csv"
    path.write_bytes(b"click,site,user\n1,%s,ann\n0,b.com,%s\n1,%s,ann\n" % (token, other, token))
    found = audit(shoal.read_csv(path, label="click"), bits=[])
    names = (f"site={token.decode()}", f"user={other.decode('utf-8', 'backslashreplace')}")
    assert found.shared == {token_key(field(b"site"), token): tuple(sorted(names))}
    assert (found.examples, found.features, found.texts, found.keys) == (3, 6, 4, 3)


def test_namespaces_and_criteos_columns_that_share_a_key_are_told(tmp_path):
    token, other = collision(field(b"a"), field(b""))
    (tmp_path / "x.vw").write_bytes(b"1 |a %s x\n0 | %s x\n0 | x\n" % (token, other))
    found = audit(shoal.read_vw(tmp_path / "x.vw"))
    assert [len(texts) for texts in found.shared.values()] == [2]
    assert list(found.shared) == [token_key(field(b"a"), token)]
    assert (found.texts, found.keys) == (4, 3)
    token, other = collision(14, 39)
    row = [b"0", *[b""] * 39]
    one, two = [*row], [*row]
    one[14], two[39] = token, other
    (tmp_path / "c.tsv").write_bytes(b"\t".join(one) + b"\n" + b"\t".join(two) + b"\n")
    found = audit(shoal.read_criteo(tmp_path / "c.tsv"))
    (texts,) = found.shared.values()
    assert [text.partition("=")[0] for text in texts] == ["C1", "C26"]


def test_features_made_of_two_are_audited_too(tmp_path):
    a, b = field(b"a"), field(b"b")
    made = token_key(token_key(a, b"x"), token_key(b, b"y").to_bytes(8, "little"))
    tokens = (b"x%d" % i for i in itertools.count())
    pairs = ((t, token_of(b, int.from_bytes(token_of(token_key(a, t), made), "little"))) for t in tokens)
    token, other = next((token, other) for token, other in pairs if not FORBIDDEN & set(other))
    (tmp_path / "x.vw").write_bytes(b"1 |a x |b y\n0 |a %s |b %s\n" % (token, other))
    names = ("a^x * b^y", f"a^{token.decode()} * b^{other.decode('utf-8', 'backslashreplace')}")
    found = audit(shoal.read_vw(tmp_path / "x.vw", interactions=[("a", "b")]))
    assert found.shared == {made: tuple(sorted(names))}
    assert (found.texts, found.keys) == (6, 5)


def test_ways_to_write_one_feature_are_no_collision(tmp_path):
    (tmp_path / "c.tsv").write_bytes(b"".join(b"1\t%s%s\n" % (n, b"\t" * 38) for n in (b"7", b"+7", b"007", b"8")))
    found = audit(shoal.read_criteo(tmp_path / "c.tsv"))
    assert (found.texts, found.keys, found.shared) == (2, 2, {})
    (tmp_path / "t.csv").write_text('click,"a""b"\n1,a\n0,"a"\n')
    assert audit(shoal.read_csv(tmp_path / "t.csv", label="click")).texts == 1
    (tmp_path / "a.libsvm").write_text("1 7:1 007:2\n0 8:1\n")
    assert audit(shoal.read_libsvm(tmp_path / "a.libsvm")).shared == {}
    (tmp_path / "a.ffm").write_text("1 1:7:1 2:8:1\n0 2:7:1\n")  # libffm's keys are the same in all fields
    assert audit(shoal.read_libffm(tmp_path / "a.ffm")).shared == {7: ("1:7", "2:7")}


@given(st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=12), st.integers(1, 9))
def test_rows_of_small_tables_are_shared_as_a_slow_count_has_it(tmp_path_factory, rows, bits):
    path = tmp_path_factory.mktemp("audit") / "a.libsvm"
    path.write_text("".join("1" + "".join(f" {key}:1" for key in row) + "\n" for row in rows))
    found = audit(shoal.read_libsvm(path, batch_size=5), bits=[bits])
    times = Counter(key for row in rows for key in row)
    cell = {key: int(shoal.data.mix(np.array([key], np.uint64))[0]) >> (64 - bits) for key in times}
    held = Counter(cell.values())
    sharing = [key for key in times if held[cell[key]] > 1]
    (cells,) = found.cells
    assert (found.examples, found.features, found.texts, found.keys) == (
        len(rows),
        sum(times.values()),
        *[len(times)] * 2,
    )
    assert cells.sharing == len(sharing)
    assert cells.distinct_share == pytest.approx(len(sharing) / max(1, len(times)))
    assert cells.feature_share == pytest.approx(sum(times[key] for key in sharing) / max(1, sum(times.values())))
    expected = 1 - (1 - 2**-bits) ** (len(times) - 1) if times else 0
    assert cells.expected_share == pytest.approx(expected)
    assert found.expected == len(times) * (len(times) - 1) / 2**65


def test_the_share_of_a_large_sample_is_the_expected_one(rng, tmp_path):
    path = tmp_path / "a.vw"
    path.write_text("".join(f"1 | w{a} w{b}\n" for a, b in rng.integers(0, 2**40, (10_000, 2))))
    for cells in audit(shoal.read_vw(path), bits=[14, 16, 20]).cells:
        assert cells.distinct_share == pytest.approx(cells.expected_share, abs=0.01)


def test_a_sample_is_whole_batches_and_the_readers_names_are_left_alone(tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text("".join(f"1 {i}:1\n" for i in range(1000)))
    names = FeatureNames()
    reader = shoal.read_libsvm(path, batch_size=70, names=names)
    assert audit(reader, examples=100).keys == 140
    assert audit(reader, examples=None).keys == 1000
    assert len(names) == 0
    assert reader.names is names
    token, other = collision(field(b"site"), field(b"user"))  # behind the sample, where the pass has been already
    late = tmp_path / "late.csv"
    late.write_bytes(b"click,site,user\n" + b"1,a,b\n" * 20 + b"1,%s,%s\n" % (token, other))
    found = audit(shoal.read_csv(late, label="click", batch_size=10), examples=10)
    assert (found.texts, found.shared) == (2, {})
    empty = tmp_path / "none.libsvm"
    empty.write_text("")
    found = audit(shoal.read_libsvm(empty))
    assert (found.texts, found.expected, found.cells[0].distinct_share) == (0, 0, 0)
    with pytest.raises(ValueError, match="examples is 0"):
        audit(reader, examples=0)
    with pytest.raises(ValueError, match="bits holds 64: pass 1 to 63"):
        audit(reader, bits=[18, 64])


@pytest.mark.slow
def test_the_command_tells_it(tmp_path, capsys):
    write_log(tmp_path / "day.tsv", PlantedModel(seed=1), 2000, 0)
    data = ["--data", str(tmp_path / "day.tsv"), "--format", "criteo"]
    assert cli.main(["audit", *data, "--bits", "10,30"]) == 0
    out = capsys.readouterr().out
    assert "no two features share a key" in out
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["10", "30"]
    assert cli.main(["audit", *data, "--json", "--examples", "1000"]) == 0
    reported = json.loads(capsys.readouterr().out)
    found = audit(shoal.read_criteo(tmp_path / "day.tsv"), examples=1000)
    assert (reported["texts"], reported["shared"], reported["cells"][0]["sharing"]) == (
        found.texts,
        {},
        found.cells[0].sharing,
    )
    assert cli.main(["audit", *data, "--bits", "0"]) == 2
    (tmp_path / "a.ffm").write_text("1 1:7:1 2:8:1\n0 2:7:1\n")
    assert cli.main(["audit", "--data", str(tmp_path / "a.ffm"), "--format", "libffm"]) == 0
    assert "1 key is shared" in (out := capsys.readouterr().out)
    assert "7: 1:7, 2:7" in out
