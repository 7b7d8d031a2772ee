"""Exports of every released format version are read for ever."""

import json

import numpy as np
import pytest

import shoal
from oracle import export as oracle
from paths import GOLDEN, ROOT


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_export_of_version_1_reads_as_it_was_written(version):
    expected = json.loads((GOLDEN / "export-v1.json").read_text())
    keys = np.array(expected["keys"] + expected["absent"], np.uint64)
    with shoal.export.open(GOLDEN / "export-v1" / version) as export:
        assert set(export.tables) == set(expected["rows"][version])
        for name, table in export.tables.items():
            np.testing.assert_array_equal(table.pull(keys), np.array(expected["rows"][version][name], np.float32))
            there = [True] * 6 + [False] * 2
            there[1] = version == "1"
            assert table.contains(keys).tolist() == there


def test_the_worked_example_of_the_documentation_is_what_is_written(tmp_path):
    text = (ROOT / "docs" / "export-format.md").read_text()
    with shoal.local(slots=1024) as store:
        table = store.table("example", optimizer=shoal.SGD(lr=1.0))
        table.push(np.array([7], np.uint64), np.array([-0.5], np.float32)).result()
        store.export(tmp_path)
    data = next(tmp_path.glob("*.frozen")).read_bytes()
    assert len(data) == 128
    shown = [
        line.split("   ")[1] if "   " in line else line for line in text.splitlines() if line.startswith("    0000")
    ]
    for line in [line for line in text.splitlines() if line.startswith("    0000")]:
        at, rest = line.split(maxsplit=1)
        assert bytes.fromhex(rest[:48].replace("  ", " ")) == data[int(at, 16) :][:16], line
    assert len(shown) == 5
    body = oracle.body(tmp_path)
    assert str(body["tables"][0]["sections"]).replace(" ", "") in text
