"""The run of bench/bench_nodes.py: a node is killed while a model trains, and another one joins."""

import os
import re
import subprocess
import sys

import pytest

from paths import ROOT
from tiers import long_after

SCRIPT = ROOT / "bench" / "bench_nodes.py"

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", long_after(1, ["lr", "deepfm"]))
def test_a_model_has_the_bits_of_an_undisturbed_run_although_a_node_is_killed(model):
    if model == "deepfm":
        pytest.importorskip("torch", reason="torch is an extra")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", model, "--epochs", "2", "--local", "--pause", "0.05"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "both runs have the same bits" in done.stdout
    clocks = int(re.search(r"(\d+) clocks in", done.stdout)[1])
    killed = re.search(r"clock (\d+): node-1 is killed", done.stdout)
    started = re.search(r"clock (\d+): all slots have copies again; node-4 is started", done.stdout)
    serves = re.search(r"clock (\d+): node-4 serves slots", done.stdout)
    assert 0 < int(killed[1]) <= int(started[1]) < int(serves[1]) <= clocks
