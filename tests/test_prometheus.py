"""deploy/prometheus: the rules use metrics that exist, and a Prometheus that scrapes a cluster evaluates them."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml

import shoal
from shoal.cluster.protocol import metrics

FOLDER = Path(__file__).parents[1] / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "shoal.rules.yml").read_text())["groups"][0]["rules"]
ROLES = {"scheduler": metrics.SCHEDULER, "server": metrics.SERVER, "worker": metrics.WORKER}
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt install prometheus)"
)


def exported():
    """Return the names of all metrics of all roles."""
    names = {"up", "shoal_build_info"}
    for role, all_of in ROLES.items():
        names.add(f"shoal_{role}_ready")
        names |= {f"shoal_{role}_{name}{'_total' * (one.kind == 'counter')}" for name, one in all_of.items()}
    return names


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_uses_metrics_that_exist_and_names_a_remedy(rule):
    used = set(re.findall(r"\b(?:shoal_\w+|up)\b", rule["expr"]))
    assert used
    assert used <= exported()
    assert set(rule["annotations"]) == {"summary", "remedy"}
    assert rule["labels"]["severity"] in ("warning", "critical")


@needs_prometheus
def test_promtool_accepts_the_files():
    for what in (["rules", "shoal.rules.yml"], ["config", "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *what], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def asked(port, expression):
    """Return the result of an expression; None while Prometheus does not answer."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as reply:
            return json.load(reply)["data"]["result"]
    except OSError:
        return None


def selectors(expression):
    """Return the parts of an expression without comparisons: each has to have a value."""
    return re.findall(r"\w+\(shoal_\w+\[\w+\]\)|shoal_\w+|up\{[^}]*\}", expression)


@needs_prometheus
@pytest.mark.slow
def test_no_expression_is_empty_for_a_cluster_that_trains(tmp_path):
    ports = [free_port() for _ in range(5)]
    address = f"tcp://127.0.0.1:{ports[0]}"
    targets = [f"127.0.0.1:{port}" for port in ports[1:]]
    scrapes = [{"job_name": "shoal", "static_configs": [{"targets": targets}]}]
    config = {"global": {"scrape_interval": "200ms"}, "scrape_configs": scrapes}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    roles = [
        ["scheduler", "--bind", address, "--servers", "2", "--replicas", "1", "--metrics-port", str(ports[1])],
        *(["server", "--connect", address, "--metrics-port", str(port)] for port in ports[2:4]),
    ]
    query_port = free_port()
    with ExitStack() as processes:

        def start(*command):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            processes.callback(process.wait, 30)
            processes.callback(process.kill)

        for role in roles:
            start(sys.executable, "-m", "shoal", *role)
        start(
            "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{query_port}",
        )  # fmt: skip
        missing = {part for rule in RULES for part in selectors(rule["expr"])}
        missing.add("histogram_quantile(0.9, sum by (le) (shoal_server_push_staleness_bucket))")
        with shoal.connect(address, consistency=shoal.ASP(), metrics_port=ports[4]) as store:
            table = store.table("w", dim=2, optimizer=shoal.SGD(lr=1.0))
            end = time.monotonic() + 60
            while missing and time.monotonic() < end:
                table.push(np.arange(10, dtype=np.uint64), np.ones((10, 2), np.float32))
                store.tick()
                table.pull(np.arange(10, dtype=np.uint64))
                missing = {part for part in missing if not asked(query_port, part)}
            assert not missing
            assert float(asked(query_port, "sum(shoal_server_rows)")[0]["value"][1]) == 10
            assert float(asked(query_port, "shoal_scheduler_servers")[0]["value"][1]) == 2
            ops = {one["metric"]["op"] for one in asked(query_port, "shoal_server_requests_total")}
            assert {"push", "pull", "tick"} <= ops
