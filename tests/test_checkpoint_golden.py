"""Checkpoints of every released format version are read for ever."""

import json
from pathlib import Path

import numpy as np

import shoal

GOLDEN = Path(__file__).parent / "golden"


def test_a_checkpoint_of_version_1_reads_as_it_was_written():
    expected = json.loads((GOLDEN / "checkpoint-v1.json").read_text())
    keys = np.array(expected["keys"], np.uint64)
    with shoal.local(slots=64) as store:
        store.load(GOLDEN / "checkpoint-v1")
        assert set(store.tables) == set(expected["state"])
        for name, table in store.tables.items():
            assert (len(table), table.step) == (len(keys), 3)
            state = table.state(keys)
            assert set(state) == set(expected["state"][name])
            for column, values in state.items():
                np.testing.assert_array_equal(values, np.array(expected["state"][name][column], np.float32))
        assert store.tables["adam"].optimizer == shoal.Adam(per_row_step=True)
        assert store.tables["rowwise"].spec.init == shoal.Uniform(0.5, seed=1)


def test_the_worked_example_of_the_documentation_is_what_is_written(tmp_path):
    with shoal.local() as store:
        store.table("example").push(np.array([7], np.uint64), np.array([0.5], np.float32)).wait()
        store.save(tmp_path)
    (file,) = tmp_path.glob("*.slots")
    (section,) = json.loads((tmp_path / "manifest.json").read_text())["body"]["tables"][0]["sections"]
    document = (Path(__file__).parent.parent / "docs" / "checkpoint-format.md").read_text()
    data = file.read_bytes()
    for at in (0x0, 0x40, 0x80, 0xC0):
        first, second = data[at : at + 8].hex(" "), data[at + 8 : at + 16].hex(" ")
        assert f"{at:08x}  {first}  {second}" in document
    assert json.dumps(section, separators=(",", ":")) in document
