"""DDP for the dense part beside tables on servers: two workers learn what one process does; torchrun starts them."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

import shoal
from paths import ROOT, SUPPORT
from shoal.cluster.launch import local_cluster

torch = pytest.importorskip("torch", reason="torch is an extra")

import torch_halves  # noqa: E402

LONG = 120.0  # seconds for what takes some on a quiet machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux does"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch was built without gloo"),
]


def run(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_workers_at_half_batches_learn_what_one_process_does_at_whole_ones(tmp_path):
    """Rows and tower, to float tolerance: a mean of two halves is summed in another order than the whole."""
    job = SUPPORT / "torch_halves.py"
    run("-m", "shoal", "launch", "--servers", 2, "--workers", 2, job, tmp_path / "two.npz")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with shoal.local() as store:
            whole = [array for staleness in torch_halves.STALENESSES for array in torch_halves.learn(store, staleness)]
    finally:
        torch.distributed.destroy_process_group()
    with np.load(tmp_path / "two.npz") as two:
        assert len(two.files) == len(whole) == 10
        for name, expected in zip(two.files, whole, strict=True):
            np.testing.assert_allclose(two[name], expected, rtol=2e-5, atol=2e-6)


def test_the_example_runs_under_torchrun(tmp_path):
    example = ROOT / "examples" / "torch_ddp.py"
    with local_cluster.running(1, timeout=LONG) as cluster:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        out = run(*launcher, example, "--cluster", cluster.address)
    found = re.findall(r"worker (\d) of 2: .*AUC ([\d.]+) .*\(([\d,]+) examples", out)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"]
    assert sum(int(examples.replace(",", "")) for _, _, examples in found) >= 20_000 - 128
    assert min(float(auc) for _, auc, _ in found) > 0.6
