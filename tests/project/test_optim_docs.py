"""docs/optimizers.md says what the package does: its examples run, its table of defaults is the code's."""

from __future__ import annotations

import dataclasses
import doctest

import numpy as np
import pytest

import shoal
from paths import ROOT
from shoal import optim

DOCUMENT = ROOT / "docs" / "optimizers.md"


@pytest.fixture(scope="module")
def text():
    return DOCUMENT.read_text(encoding="utf-8")


def test_the_examples_run(text):
    test = doctest.DocTestParser().get_doctest(text.replace("```", ""), {}, "optimizers.md", str(DOCUMENT), 0)
    output = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).attempted >= 3
    assert runner.failures == 0, "".join(output)


def test_the_table_of_defaults_is_the_codes(text):
    rows = [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `") and line.count("|") == 5]
    documented = {}
    for names, _, _, defaults in rows:
        for name in names.replace("`", "").split(","):
            documented[name.strip()] = defaults.split("(")[0].strip()
    kinds = {name: getattr(optim, name) for name in optim.__all__}
    rules = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert set(documented) == rules - {"Optimizer", "Add"}  # which have no parameters of their own
    documented["GroupFTRL"] = documented["FTRL"] + ", l21 0"
    for name, reported in documented.items():
        parts = [part.strip().rsplit(" ", 1) for part in reported.split(",")]
        values = {
            field: {"off": 0.0, "on": 1.0}.get(value) if value in {"off", "on"} else float(value)
            for field, value in parts
        }
        fields = {f.name: float(f.default) for f in dataclasses.fields(getattr(shoal, name)) if f.default is not None}
        assert values == fields, name


def test_every_column_it_names_is_a_column_of_the_state(text):
    for name, columns in {"Momentum": "w, v", "RowWiseAdagrad": "w, one m", "FTRL": "z, n", "Adam": "w, m, v"}.items():
        assert f"| {columns} |" in text
        with shoal.local() as store:
            state = store.table("t", optimizer=getattr(shoal, name)()).state(np.array([1], np.uint64))
        assert set(state) == {part.split()[-1] for part in columns.split(",")}
