"""Every benchmark runs, at a small size: each checks its own results, and none of its figures is looked at here."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from paths import ROOT

BENCH = ROOT / "bench"
PROGRAMS = ROOT / "build" / "release" / "bench" / "cpp"

SMALL = {
    "api": "--rows 100000 --rounds 1",
    "array_fit": "--rounds 1",
    "batch_sizes": "--rows 1e5 --sizes 64 4096 --rounds 1",
    "cache": "--rows 2000 --batches 12 --rounds 1",
    "checkpoint": "--keys 200000 --rounds 1",
    "chosen_keys": "--keys 5000 --dim 1 --rounds 1",
    "click_step": "--quick",
    "client": "lone pushes keys rates --turns 1 --seconds 0.05 --rows 200000",
    "cluster_lr": "--examples 20000 --rounds 1",
    "cluster_save": "--keys 200000 --rounds 1",
    "consistency": "--workers 2 8 --seconds 1",
    "count_min": "--rounds 1 --keys 50000",
    "ctr": "--quick",
    "ctr_grid": "--quick",
    "dbpg": "--examples 2e4 --features 5e3 --rounds 1",
    "detection": "server --kills 2",
    "embedding": "--rows 20000 --dim 16 --bag 1 --threads 1 --rounds 1",
    "export": "--keys 1e5 --dim 1 --dtype float32 --threads 1 --rounds 1",
    "failover": "killed --faults 2",
    "fork": "--keys 1e6 --rounds 1",
    "fresh": "--keys 1e5 --dim 1 --rounds 1",
    "journal": "kill --kills 1",
    "launch": "--rounds 1",
    "lifecycle": "--examples 20000",
    "lineage": "--examples 50000 --every 3 --rounds 1",
    "maps": "--keys 1e6 --threads 1 --rounds 1",
    "monitoring": "--rounds 1 --seconds 0.5 --kills 1",
    "moves": "resize --rows 100000",
    "names": "--examples 20000 --rounds 1",
    "new_keys": "--keys 1e5 --threads 1 --rounds 1",
    "predict": "--keys 1e5 --examples 100 --dtype float32",
    "progress": "--examples 50000 --rounds 1",
    "pull": "--dim 1 --repeats 1 --pairs 3",
    "readers": "--megabytes 2 --rounds 1",
    "replay": "--examples 20000 --rounds 1",
    "replica_cost": "--rounds 1 --rows 100000 --batches 2",
    "row_cache": "--rows 2000 --rounds 1",
    "scaling": "--cores 1 2 --examples 20000 --rows 100000 --rounds 1 --only text memory table",
    "serve": "--keys 20000 --examples 1 --connections 1 --seconds 1",
    "serve_versions": "--keys 20000 --examples 1 --connections 4 --swaps 2 --seconds 1",
    "sockets": "--keys 10 --turns 1",
    "streams": "--rounds 1",
    "table": "--keys 1e5 --batch 4096 --threads 1 --rounds 1",
    "text_to_model": "--examples 20000 --rounds 1",
    "tiered": "--rows 2e5 --seconds 1 --slots 64 --peer",
    "tiered_ctr": "--rows 1e5 --rounds 1 --steps 3 --warm 3",
    "tiered_large": "--rows 2e5 --memory 16MiB --seconds 1 --slots 256",
    "tracing": "--rounds 1 --calls 20",
    "user_optimizer": "--keys 1e5 --rows 4096 --dims 16 --threads 1 --rounds 1",
    "vw": '--examples 20000 --held-out 5000 --vw="-b 24" --rounds 1',
    "workers": "speed --rounds 1",
}
ELSEWHERE = {
    "billion": "test_bench_billion.py",
    "nodes": "test_bench_nodes.py: it needs namespaces of the network",
    "ray": "it starts clusters of Ray",
    "ray_data": "it starts clusters of Ray",
    "ray_nodes": "it starts clusters of Ray, each node in a namespace",
    "wheel": "it needs an environment with a wheel",
    **dict.fromkeys(
        ("quality", "ctr_quality", "ctr_bfloat16", "public_tables", "dense_adam", "retrieval"),
        "it trains on real data for minutes",
    ),
}
COMPILED = {
    "export": "lines_bench",
    "maps": "maps_bench",
    "predict": "predict_bench",
    "table": "shoal_bench",
    "tiered": "rocksdb_bench",
}
OTHERS = {"serve": "wrk", "serve_versions": "wrk"}
PACKAGES = {
    "vw": "vowpalwabbit",
    "streams": "confluent_kafka",
    **dict.fromkeys(("click_step", "ctr", "ctr_grid", "embedding", "tiered_ctr", "workers"), "torch"),
}


def test_every_benchmark_has_a_small_size_or_a_reason_for_none():
    assert sorted([*SMALL, *ELSEWHERE]) == sorted(one.stem[6:] for one in BENCH.glob("bench_*.py"))


@pytest.mark.slow
def test_models_that_are_trained_twice_have_settings(monkeypatch):
    pytest.importorskip("torch", reason="click models are torch modules")
    monkeypatch.syspath_prepend(BENCH)
    quality = importlib.import_module("bench_ctr_quality")
    settings = json.loads(quality.SETTINGS.read_text())
    for task in quality.tasks_of(quality.NAMES, quality.MODELS, quality.RULES):
        assert settings[task.name][task.model][task.rule]


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_and_finds_its_results_right(name, tmp_path):
    if name in COMPILED and not (PROGRAMS / COMPILED[name]).exists():
        pytest.skip(f"{COMPILED[name]} is not compiled: make compile-release, with the libraries of its peers")
    if name in OTHERS and not shutil.which(OTHERS[name]):
        pytest.skip(f"there is no {OTHERS[name]} here")
    if name in PACKAGES and not find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is not installed")
    done = subprocess.run(
        [sys.executable, BENCH / f"bench_{name}.py", *shlex.split(SMALL[name])],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
