"""The files of examples/bars reach published results: bench/bench_public_tables.py does this for all of them."""

import json
import shutil
import subprocess
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch", reason="click models are torch modules")

from shoal.torch.config import read

CONFIGS = sorted((ROOT / "examples" / "bars").glob("*/*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_file_is_a_configuration(path):
    assert read(path).train.batch_size == 4096


@pytest.mark.long
def test_logistic_regression_reaches_the_published_auc_on_frappe(shoal_data, tmp_path):
    data = shoal_data / "frappe"
    if not data.is_dir():
        pytest.skip("SHOAL_DATA has no folder frappe")
    for part in ("train", "valid", "test"):
        shutil.copy(data / f"{part}.csv.xz", tmp_path)
    shoal = [sys.executable, "-m", "shoal"]
    config = ROOT / "examples" / "bars" / "frappe" / "lr.toml"
    train = [*shoal, "train", "ctr", "--config", config, "--output", "lr", "--threads", "1", "--quiet"]
    subprocess.run(train, cwd=tmp_path, check=True, timeout=240)
    evaluate = [*shoal, "evaluate", "lr", "--data", "test.csv.xz", "--json"]
    found = json.loads(subprocess.run(evaluate, cwd=tmp_path, check=True, capture_output=True, timeout=60).stdout)
    assert found["auc"] > 0.9356 - 0.001
    assert found["logloss"] < 0.3076 + 0.001
