"""A click model that the first version has written, which every later one reads: rows, dense part, names, settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import shoal
from paths import GOLDEN
from shoal.cli import main

MODEL = GOLDEN / "click-v1"
EXPECTED = json.loads((GOLDEN / "click-v1.json").read_text())


def test_a_click_model_of_the_first_version_is_read_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text(EXPECTED["rows"])
    predicted = tmp_path / "predicted.txt"
    assert main(["predict", str(MODEL), "--data", str(tmp_path / "rows.csv"), "--output", str(predicted)]) == 0
    np.testing.assert_allclose(np.loadtxt(predicted), EXPECTED["probabilities"], rtol=1e-5)
    with shoal.load(MODEL) as model:
        assert model.examples == EXPECTED["examples"]
        assert {table.name: table.digest() for table in model.tables} == EXPECTED["rows of tables"]
    capsys.readouterr()
    assert main(["inspect", str(MODEL), "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPECTED["names"])


@pytest.mark.slow
def test_an_export_of_its_graph_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx")
    pytest.importorskip("onnxscript", reason="the extra onnx")
    assert main(["export", str(MODEL), "--output", str(tmp_path / "export"), "--onnx", "--quiet"]) == 0
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_its_configuration_is_read_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ctr", "--config", str(MODEL / "config.toml"), "--print-config"]) == 0
    described = (MODEL / "config.toml").read_text().splitlines()[:2]  # features and model
    assert capsys.readouterr().out.splitlines()[:2] == described
