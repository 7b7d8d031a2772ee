"""Checkpoints of every released format version are read for ever."""

import json

import numpy as np

import shoal
from oracle import checkpoint as document
from paths import GOLDEN, ROOT


def test_a_checkpoint_of_version_1_reads_as_it_was_written():
    expected = json.loads((GOLDEN / "checkpoint-v1.json").read_text())
    keys = np.array(expected["keys"], np.uint64)
    with shoal.local(slots=64) as store:
        store.load(GOLDEN / "checkpoint-v1")
        assert set(store.tables) == set(expected["state"])
        for name, table in store.tables.items():
            assert (len(table), table.stats().step) == (len(keys), 3)
            state = table.state(keys)
            assert set(state) == set(expected["state"][name])
            for column, values in state.items():
                np.testing.assert_array_equal(values, np.array(expected["state"][name][column], np.float32))
        assert store.tables["adam"].optimizer == shoal.Adam(per_row_step=True)
        assert store.tables["rowwise"].spec.init == shoal.Uniform(0.5, seed=1)


def test_a_checkpoint_of_version_2_reads_as_it_was_written():
    expected = json.loads((GOLDEN / "checkpoint-v2.json").read_text())
    keys = np.array(expected["keys"], np.uint64)
    filters = {}
    columns = document.read(GOLDEN / "checkpoint-v2", filters)
    assert {name: set(found) - {"hash", "w", "n"} for name, found in columns.items()} == {
        "count": {"clock"},
        "bloom": {"count", "clock", "score"},
        "plain": set(),
    }
    assert filters.keys() == {"count", "bloom"}
    with shoal.local(slots=16) as store:
        store.load(GOLDEN / "checkpoint-v2")
        count, bloom, plain = (store.tables[name] for name in ("count", "bloom", "plain"))
        assert count.spec.admit == shoal.AfterCount(3, within=9)
        assert count.spec.expire == (shoal.TimeToLive(4), shoal.MinNorm(1e-3))
        assert bloom.spec.admit == shoal.AfterBloom(2, 2000)
        assert bloom.spec.expire == (shoal.DecayedScore(0.5, 0.25), shoal.MaxRows(6400, keep="frequent"))
        assert not plain.spec.has_rules
        assert [table.shard.table_clock(0) for table in (count, bloom)] == [expected["clock"]] * 2
        for table in (count, bloom, plain):
            assert table.contains(keys).tolist() == expected[table.name]["there"]
            np.testing.assert_array_equal(table.state(keys)["w"], np.array(expected[table.name]["w"], np.float32))
        # What waits has been sighted before: a key that was there twice, or once, gets its row now.
        assert expected["count"]["there"] == [True, True, True, False, False]
        for table, rows in ((count, [True, True, True, True, False]), (bloom, [True] * 5)):
            table.push(keys[3:], np.ones((2, 2), np.float32)).result()
            assert table.contains(keys).tolist() == rows


def test_a_chain_of_version_3_reads_as_it_was_written():
    expected = json.loads((GOLDEN / "checkpoint-v3.json").read_text())
    keys = np.array(expected["keys"], np.uint64)
    assert set(document.read(GOLDEN / "checkpoint-v3" / "delta")) == {"plain", "waits"}
    with shoal.local(slots=64) as store:
        store.load(GOLDEN / "checkpoint-v3" / "delta")
        for name, table in store.tables.items():
            wanted = expected[name]
            assert (len(table), table.stats().step) == (wanted["rows"], 2)
            assert table.contains(keys).tolist() == wanted["there"]
            for column, values in table.state(keys).items():
                np.testing.assert_array_equal(values, np.array(wanted["state"][column], np.float32))
        waits = store.tables["waits"]
        assert waits.stats().waiting == expected["waiting"]


def test_the_worked_example_of_the_documentation_is_what_is_written(tmp_path):
    with shoal.local(slots=1024) as store:
        store.table("example").push(np.array([7], np.uint64), np.array([0.5], np.float32)).result()
        store.save(tmp_path)
    (file,) = tmp_path.glob("*.slots")
    (section,) = json.loads((tmp_path / "manifest.json").read_text())["body"]["tables"][0]["sections"]
    document = (ROOT / "docs" / "checkpoint-format.md").read_text()
    data = file.read_bytes()
    for at in (0x0, 0x40, 0x80, 0xC0):
        first, second = data[at : at + 8].hex(" "), data[at + 8 : at + 16].hex(" ")
        assert f"{at:08x}  {first}  {second}" in document
    assert json.dumps(section, separators=(",", ":")) in document
