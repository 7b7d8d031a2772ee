"""Rows in other programs' files."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

import shoal
from shoal import cli, models
from shoal.tools import convert

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

KEYS = np.array([0, 7, 2**63, 2**64 - 1, 99], np.uint64)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("optimizer", [shoal.FTRL(l1=0.1), shoal.RowWiseAdagrad(), shoal.SGD()])
def test_parquet_has_keys_weights_and_state_and_comes_back(tmp_path, dim, optimizer):
    path = tmp_path / "t.parquet"
    with shoal.local(slots=8) as store:
        table = store.table("t", dim=dim, optimizer=optimizer)
        table.push(KEYS, np.random.default_rng(1).standard_normal((5, dim)).astype(np.float32)).result()
        assert convert.write_parquet(table, path) == 5
        reported = pa.parquet.read_table(path)
        keys = reported["key"].to_numpy()
        assert sorted(keys.tolist()) == sorted(KEYS.tolist())
        state = {name: rows for name, rows in table.state(keys).items() if name != "w"}
        assert reported.column_names == ["key", "weights", *state]
        for name, rows in {"weights": table.pull(keys), **state}.items():
            assert np.array(reported[name].to_pylist(), np.float32).reshape(rows.shape).tolist() == rows.tolist()
        again, weights = convert.read_parquet_rows(path)
        other = store.table("other", dim=dim, optimizer=shoal.SGD())
        other.assign(again, weights)
        np.testing.assert_array_equal(other.pull(KEYS), table.pull(KEYS))
        assert convert.write_parquet(store.table("empty", dim=dim), path, overwrite=True) == 0
        assert convert.read_parquet_rows(path)[1].size == 0
        assert convert.write_parquet(table, path, state=False, overwrite=True) == 5
        assert pa.parquet.read_table(path).column_names == ["key", "weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


OPTIMIZERS = [
    shoal.FTRL(l1=0.1),
    shoal.SGD(),
    shoal.Momentum(),
    shoal.RowWiseAdagrad(),
    shoal.AdamW(per_row_step=True),
    shoal.GroupFTRL(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize(("dim", "dtype"), [(1, "float32"), (3, "float32"), (3, "float16"), (3, "bfloat16")])
def test_rows_with_state_come_back_to_the_bit_and_train_on(tmp_path, monkeypatch, optimizer, dim, dtype):
    if dtype != "float32" and "FTRL" in type(optimizer).__name__:
        pytest.skip("stores no weights")
    monkeypatch.setattr(convert, "_ROW_GROUP", 100)
    rng = np.random.default_rng(2)
    keys = np.concatenate([KEYS, rng.integers(0, 2**64, 300, np.uint64)])
    grads = [rng.standard_normal((len(keys), dim)).astype(np.float32) for _ in range(3)]
    how = {"dim": dim, "optimizer": optimizer, "dtype": dtype, "seed": 5, "init": shoal.Uniform(0.1, seed=2)}
    with shoal.local(slots=8, threads=1) as store, shoal.local(slots=64, threads=1) as other:
        table = store.table("t", **how)
        for some in grads[:2]:
            table.push(keys, some).result()
        convert.write_parquet(table, tmp_path / "t.parquet")
        turned = pa.parquet.read_table(tmp_path / "t.parquet")  # by another program, in another order
        pa.parquet.write_table(
            turned.take(rng.permutation(len(turned))), tmp_path / "turned.parquet", row_group_size=70
        )
        for file in ("t", "turned"):
            again = convert.load_parquet(other, tmp_path / f"{file}.parquet")
            assert (again.spec, again.digest()) == (table.spec, table.digest())
        assert other.table("t", **how) is again
        for one in (table, again):
            one.push(keys, grads[2]).result()
        assert again.digest() == table.digest()  # the number of pushes, by which is rounded, came along
        convert.write_parquet(store.table("empty", **how), tmp_path / "empty.parquet")
        assert len(convert.load_parquet(other, tmp_path / "empty.parquet")) == 0


def test_rows_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    path, changed = tmp_path / "t.parquet", tmp_path / "changed.parquet"
    with shoal.local(slots=8) as store:
        table = store.table("t", dim=2, optimizer=shoal.Adagrad(), dtype="float16")
        table.push(KEYS, np.ones((5, 2), np.float32)).result()
        convert.write_parquet(table, path)
        before = table.digest()
        good = pa.parquet.read_table(path)
        thirds = pa.array([[1 / 3, 0.0]] * 5, pa.list_(pa.float32(), 2))
        infinite = pa.array([[np.inf, 0.0]] * 5, pa.list_(pa.float32(), 2))
        reported = {key: value for key, value in good.schema.metadata.items() if key != b"shoal"}
        for other, message in [
            (good.drop_columns("n"), "no column 'n', which table 't' has by Adagrad"),
            (
                good.set_column(1, "weights", pa.array([1.0] * 5, pa.float32())),
                "'weights' is float instead of fixed_size",
            ),
            (good.set_column(2, "n", pa.array([[1.0]] * 5, pa.list_(pa.float32(), 1))), "'n' is fixed_size_list"),
            (good.set_column(2, "n", pa.array([None] * 5, pa.list_(pa.float32(), 2))), "'n' holds nulls"),
            (good.set_column(0, "key", pa.array([1, 2, 3, 4, 5], pa.int64())), "'key' is int64 instead of uint64"),
            (good.set_column(0, "key", pa.array([1, 2, 3, 1, 5], pa.uint64())), "'t' occurs twice"),
            (good.set_column(1, "weights", thirds), "not a float16 number"),
            (good.set_column(1, "weights", infinite), "not finite"),
            (good.replace_schema_metadata(reported), "does not describe a table"),
            (good.replace_schema_metadata({b"shoal": b"{}"}), "cannot be read"),
            (
                good.replace_schema_metadata(
                    {b"shoal": good.schema.metadata[b"shoal"].replace(b"Adagrad", b"Adamant")}
                ),
                "Adamant",
            ),
            (
                good.replace_schema_metadata({b"shoal": good.schema.metadata[b"shoal"].replace(b'lr":', b'lr":1')}),
                "has optimizer",
            ),
            (
                good.replace_schema_metadata(
                    {b"shoal": good.schema.metadata[b"shoal"].replace(b'version":1', b'version":2')}
                ),
                "newer shoal",
            ),
        ]:
            pa.parquet.write_table(other, changed)
            with pytest.raises(ValueError, match=message):
                convert.load_parquet(store, changed)
        halves = [good, good.slice(0, 1)]
        pa.parquet.write_table(pa.concat_tables(halves), changed, row_group_size=5)
        with pytest.raises(ValueError, match="'t' occurs twice"):
            convert.load_parquet(store, changed)
        assert table.digest() == before
        bfloat = store.table("b", dim=2, dtype="bfloat16", optimizer=shoal.SGD())
        convert.write_parquet(bfloat, path, overwrite=True)
        metadata = pa.parquet.read_table(path).schema.metadata
        pa.parquet.write_table(
            pa.table({"key": good["key"], "weights": thirds}).replace_schema_metadata(metadata), changed
        )
        with pytest.raises(ValueError, match="not a bfloat16 number"):
            convert.load_parquet(store, changed)


SIGHTED = {
    "count": {"expire": (shoal.MaxRows(1000, keep="frequent"),), "admit": shoal.AfterCount(2)},
    "clock": {"expire": (shoal.TimeToLive(3),), "admit": shoal.AfterBloom(2, capacity=1000)},
    "score": {"expire": (shoal.DecayedScore(0.5, floor=0.2),)},
    "all": {"expire": (shoal.DecayedScore(0.5, floor=0.2), shoal.MaxRows(1000, keep="frequent"))},
    "none": {"admit": shoal.WithProbability(0.5)},
}
COLUMNS = {"count": ["count"], "clock": ["clock"], "score": ["clock", "score"], "none": []}


@pytest.mark.parametrize("rules", SIGHTED)
@pytest.mark.parametrize(("dim", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_rows_of_tables_with_rules_come_back_with_their_occurrences(tmp_path, monkeypatch, rules, dim, dtype):
    monkeypatch.setattr(convert, "_ROW_GROUP", 50)
    rng = np.random.default_rng(2)
    how = {"dim": dim, "optimizer": shoal.RowWiseAdagrad(), "dtype": dtype, **SIGHTED[rules]}
    with shoal.local(slots=8, threads=1) as store, shoal.local(slots=64, threads=1) as other:
        table = store.table("t", **how)

        def push(one, drawn):
            keys = drawn.integers(0, 300, 400, np.uint64)
            one.push(keys, drawn.standard_normal((400, dim)).astype(np.float32)).result()

        for _ in range(5):
            push(table, rng)
            store.tick()
        assert 100 < len(table) < 300 or rules in {"score", "all"}
        assert convert.write_parquet(table, tmp_path / "t.parquet") == len(table)
        reported = pa.parquet.read_table(tmp_path / "t.parquet")
        assert reported.column_names == ["key", "weights", "m", *COLUMNS.get(rules, ["count", "clock", "score"])]
        if "clock" in reported.column_names:
            assert set(reported["clock"].to_pylist()) <= {0, 1, 2, 3, 4}
        if "count" in reported.column_names:
            assert sum(reported["count"].to_pylist()) > 2 * len(table)
        pa.parquet.write_table(
            reported.take(rng.permutation(len(reported))), tmp_path / "turned.parquet", row_group_size=70
        )
        other.tick()
        for file in ("t", "turned"):
            again = convert.load_parquet(other, tmp_path / f"{file}.parquet")
            assert (again.spec, again.digest()) == (table.spec, table.digest())
        # And they go on alike: clocks are the table's, whatever the store's is. Rows alone: no keys wait any more.
        there = reported["key"].to_numpy()
        for one, of in ((table, store), (again, other)):
            one.push(there[:50], np.ones((50, dim), np.float32)).result()
            of.tick()
            of.tick()
            of.sweep()
        assert again.digest() == table.digest()


def test_rows_without_occurrences_count_as_seen_now(tmp_path):
    path = tmp_path / "t.parquet"
    rules = {"admit": shoal.AfterCount(9), "expire": SIGHTED["all"]["expire"]}
    with shoal.local(slots=8) as store, shoal.local(slots=8) as other:
        table = store.table("t", optimizer=shoal.SGD(), **rules)
        table.assign(KEYS, np.ones(5, np.float32))
        for _ in range(9):
            store.tick()
        convert.write_parquet(table, path)
        good = pa.parquet.read_table(path)
        pa.parquet.write_table(good.drop_columns(["count", "clock", "score"]), path)
        again = convert.load_parquet(other, path)
        assert again.contains(KEYS).all()  # though none was sighted nine times
        convert.write_parquet(again, path, overwrite=True)
        reported = pa.parquet.read_table(path)
        assert [set(reported[name].to_pylist()) for name in ("count", "clock", "score")] == [{1}, {9}, {1.0}]
        other.sweep()
        assert len(again) == 5
        store.sweep()
        assert len(table) == 0
        for column, values, message in [
            ("score", pa.array([1.0, np.nan, 1, 1, 1], pa.float32()), "a score is not a finite number"),
            ("score", pa.array([1.0, -1, 1, 1, 1], pa.float32()), "a score is not a finite number"),
            ("count", pa.array([1, 1, 1, 1, 1], pa.int64()), "'count' is int64 instead of uint32"),
            ("clock", pa.array([1, None, 1, 1, 1], pa.uint32()), "'clock' holds nulls"),
        ]:
            pa.parquet.write_table(good.set_column(good.column_names.index(column), column, values), path)
            with pytest.raises(ValueError, match=message):
                convert.load_parquet(other, path)
        metadata = {b"shoal": good.schema.metadata[b"shoal"].replace(b'"clock":9', b'"clock":-9')}
        pa.parquet.write_table(good.replace_schema_metadata(metadata), path)
        with pytest.raises(ValueError, match="a clock of -9"):
            convert.load_parquet(other, path)


def test_the_command_makes_the_checkpoint_again(tmp_path, capsys):
    with shoal.local() as store:
        for name, dim in (("a", 1), ("b", 2)):
            table = store.table(name, dim=dim, optimizer=shoal.Adagrad())
            table.push(KEYS, np.ones((5, dim), np.float32)).result()
        store.save(tmp_path / "c")
        digests = {name: table.digest() for name, table in store.tables.items()}
    rows = str(tmp_path / "rows")
    assert cli.main(["convert", str(tmp_path / "c"), "--output", rows]) == 0
    assert cli.main(["convert", rows, "--output", str(tmp_path / "again"), "--from", "rows"]) == 0
    assert "table 'b', 5 rows" in capsys.readouterr().out
    with shoal.local(slots=4) as store:
        store.load(tmp_path / "again")
        assert {name: table.digest() for name, table in store.tables.items()} == digests
    files = [sorted(path.read_bytes() for path in (tmp_path / name).glob("*.slots")) for name in ("c", "again")]
    assert files[0] == files[1]
    for wrong in (tmp_path / "nowhere", tmp_path / "again"):
        assert cli.main(["convert", str(wrong), "--output", str(tmp_path / "x"), "--from", "rows"]) == 2
    assert not (tmp_path / "x").exists()


def test_parquet_of_others_is_checked(tmp_path):
    path = tmp_path / "x.parquet"
    for columns, message in [
        ({"id": [1], "weights": [1.0]}, "no column 'key'"),
        ({"key": [1, None], "weights": [1.0, 2.0]}, "nulls"),
        ({"key": ["a"], "weights": [1.0]}, "keys are integers"),
        ({"key": [1, 2], "weights": [[1.0], [1.0, 2.0]]}, "not one dim"),
        ({"key": [1], "weights": [float("inf")]}, "not finite"),
    ]:
        pa.parquet.write_table(pa.table(columns), path)
        with pytest.raises(ValueError, match=message):
            convert.read_parquet_rows(path)
    pa.parquet.write_table(pa.table({"id": [-1, 5], "w": [[1.0, 2.0], [3.0, 4.0]]}), path)
    keys, rows = convert.read_parquet_rows(path, key="id", weights="w")
    assert (keys.tolist(), rows.tolist()) == ([2**64 - 1, 5], [[1, 2], [3, 4]])


def test_npz_is_read_and_checked(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, keys=np.array([-1, 3]), weights=np.array([0.5, 2]))
    keys, rows = convert.read_npz_rows(path)
    assert (keys.tolist(), rows.tolist()) == ([2**64 - 1, 3], [[0.5], [2]])
    for arrays, message in [
        ({"weights": np.ones(2)}, "no array 'keys'"),
        ({"keys": np.ones(2), "weights": np.ones(2)}, "must be integers"),
        ({"keys": np.arange(3), "weights": np.ones(2)}, "3 keys and 2 rows"),
        ({"keys": np.arange(1), "weights": np.array([1e300])}, "not finite"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            convert.read_npz_rows(path)
    path.write_bytes(b"PK\x03\x04 no")
    with pytest.raises(ValueError, match="not an npz file"):
        convert.read_npz_rows(path)


HEAD = "Version 9.11.1\nId \nMin label:0\nMax label:1\nbits:18\nlda:0\n0 ngram:\n0 skip:\noptions:\nChecksum: 1\n:0\n"


def test_a_vw_model_with_names_predicts_from_the_same_files(tmp_path):
    (tmp_path / "m.txt").write_text(HEAD + "Constant:116060:0.25\nuser^u1:5:1.5\nuser^n:2:f:9:-2\nplain:7:0.5\n")
    (tmp_path / "d.vw").write_text("1 |user u1 n:2 | plain\n-1 |user u2\n")
    assert (
        cli.main(["convert", str(tmp_path / "m.txt"), "--output", str(tmp_path / "m"), "--from", "vw", "--quiet"]) == 0
    )
    with models.load(tmp_path / "m") as model:
        margins = model.decision_function(shoal.read_vw(tmp_path / "d.vw"))
    assert margins == pytest.approx([0.25 + 1.5 + 0.5, 0.25], abs=1e-6)


def test_a_vw_model_without_names_has_indices_for_keys(tmp_path):
    (tmp_path / "m.txt").write_text(HEAD + f"17:0.5\n{convert.VW_CONSTANT % 2**18}:0.25\n99:-1\n")
    keys, rows = convert.read_vw_model(tmp_path / "m.txt", bias_key=5)
    assert dict(zip(keys.tolist(), rows.ravel().tolist(), strict=True)) == {17: 0.5, 99: -1.0, 5: 0.25}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "line 1: a readable model"),
        (HEAD[:-3], "no line ':0'"),
        (HEAD + "1:0.5\na^b:2:0.5\n", "line 13: unlike the lines before"),
        (HEAD + "1:0.5 0.1 0.2\n", "save_resume"),
        (HEAD, "no weights after the line ':0'"),
        (
            HEAD.replace("options:", "options: --hash_seed 0 --quadratic ab") + "1:0.5\n",
            r"line 9: .*\(--quadratic ab\)",
        ),
        (HEAD.replace("options:", "options: -q ::") + "1:0.5\n", "combined features .* as interactions"),
        (HEAD.replace("0 ngram", "2 pairs: ab ac \n0 ngram") + "1:0.5\n", r"line 7: .*\(2 pairs: ab ac\)"),
        (HEAD + "a^x:2:0.5\na^x*b^y:2:0.5\n", r"line 13: .*\(a\^x\*b\^y\)"),
    ],
)
def test_other_texts_are_no_vw_models(tmp_path, text, message):
    (tmp_path / "m.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        convert.read_vw_model(tmp_path / "m.txt", bias_key=5)


def test_a_product_in_a_name_of_one_feature_is_no_combination(tmp_path):
    (tmp_path / "m.txt").write_text(HEAD + "size^5*7:2:0.5\nx*y:3:1\n")
    assert len(convert.read_vw_model(tmp_path / "m.txt", bias_key=5)[0]) == 2


def test_files_without_weights_make_no_model(tmp_path, capsys):
    np.savez(tmp_path / "empty.npz", keys=np.zeros(0, np.uint64), weights=np.zeros((0, 3), np.float32))
    assert convert.read_npz_rows(tmp_path / "empty.npz")[1].shape == (0, 3)
    (tmp_path / "empty.txt").write_text(HEAD)
    for name, kind in (("empty.npz", "npz"), ("empty.txt", "vw")):
        assert cli.main(["convert", str(tmp_path / name), "--output", str(tmp_path / "m"), "--from", kind]) == 2
        assert "no weights" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_the_command_writes_every_table_of_a_checkpoint(tmp_path, capsys):
    with shoal.local(slots=4) as store:
        store.table("a").assign(KEYS, np.ones(5, np.float32))
        store.table("b", dim=2).assign(KEYS[:2], np.ones((2, 2), np.float32))
        store.save(tmp_path / "c")
    assert cli.main(["convert", str(tmp_path / "c"), "--output", str(tmp_path / "rows")]) == 0
    assert "a.parquet: 5 rows" in capsys.readouterr().out
    assert len(pa.parquet.read_table(tmp_path / "rows" / "b.parquet")) == 2
    assert cli.main(["convert", str(tmp_path / "x"), "--output", str(tmp_path / "rows")]) == 2
    np.savez(tmp_path / "w.npz", keys=KEYS, weights=np.ones((5, 2)))
    assert cli.main(["convert", str(tmp_path / "w.npz"), "--output", str(tmp_path / "m"), "--from", "npz"]) == 2
    assert "one per key" in capsys.readouterr().err


def test_the_command_omits_tables_of_integers_and_says_so(tmp_path, capsys):
    with shoal.local(slots=4) as store:
        store.table("lr").assign(KEYS, np.ones(5, np.float32))
        for name in ("lr-progress", "clicks"):  # rows of a cluster's fit, and counters
            store.table(name, dim=2, dtype="int64").push(KEYS, np.ones((5, 2), np.int64)).result()
        store.save(tmp_path / "c")
    rows = tmp_path / "rows"
    words = ["convert", str(tmp_path / "c"), "--output", str(rows)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "lr.parquet: 5 rows" in out
    assert "table 'lr-progress' is omitted: it has int64" in out
    assert [path.name for path in rows.iterdir()] == ["lr.parquet"]
    assert cli.main([*words, "--overwrite", "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["omitted"]) == ["clicks", "lr-progress"]


def test_the_command_refuses_a_checkpoint_of_integers_only(tmp_path, capsys):
    with shoal.local(slots=4) as store:
        store.table("clicks", dtype="int64")
        store.save(tmp_path / "c")
    assert cli.main(["convert", str(tmp_path / "c"), "--output", str(tmp_path / "rows")]) == 2
    assert "has only tables of int64" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_the_command_writes_all_tables_or_none(tmp_path, capsys, monkeypatch):
    with shoal.local(slots=4) as store:
        for name in ("a", "b"):
            store.table(name).assign(KEYS, np.ones(5, np.float32))
        store.save(tmp_path / "c")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.parquet").write_text("precious")
    write = convert.write_parquet

    def fail(table, path, **more):
        if table.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(table, path, **more)

    monkeypatch.setattr(convert, "write_parquet", fail)
    assert cli.main(["convert", str(tmp_path / "c"), "--output", str(tmp_path / "rows"), "--overwrite"]) == 1
    assert "b.parquet: No space left" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "rows").iterdir()] == ["precious"]
