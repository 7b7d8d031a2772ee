"""The run of bench/bench_ray_nodes.py: nodes of Ray are killed while models train, and other ones join."""

import importlib
import re

import pytest

from paths import ROOT

pytest.importorskip("ray.train", reason="ray is an extra: pip install 'shoal[ray]'")
pytest.importorskip("torch", reason="torch is an extra")
import ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(r"ignore::Warning:ray\..*"),
]


@pytest.mark.long
def test_models_have_the_bits_of_an_undisturbed_run_although_nodes_are_killed(ray_cluster, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("bench_ray_nodes")
    ray.cloudpickle.register_pickle_by_value(bench)
    while len(ray_cluster.nodes) < 2:
        ray_cluster.add()
    lines = []
    victims = [node.node_id for node in ray_cluster.nodes[:2]]
    bench.compare(ray_cluster, victims, 6, 45, undisturbed_servers=2, emit=lines.append)
    killed = [int(clock) for clock in re.findall(r": a node killed at clock (\d+); another one", "\n".join(lines))]
    assert 15 <= killed[0] <= 30
    assert 45 + 15 <= killed[1] <= 45 + 30
    assert [line.split(";")[0] for line in lines[2:]] == [
        "undisturbed: 90 clocks",
        "disturbed: 90 clocks",
        "both runs have the same bits",
    ]
