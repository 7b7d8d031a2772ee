"""deploy/prometheus: the rules use metrics that exist, and a Prometheus that scrapes a cluster evaluates them."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest
import yaml

import shoal
from cluster_fakes import HeldPort
from fit_by_hand import sums_row, write_fit
from paths import ROOT
from shoal.base.fit_rows import Header
from shoal.cluster.protocol import metrics
from shoal.metrics import Accumulator

FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "shoal.rules.yml").read_text())["groups"][0]["rules"]
DASHBOARDS = sorted((FOLDER.parent / "grafana").glob("*.json"))
OF_SERVE = {"shoal_freshness_seconds"}  # no role of a job, and only for a model that knows the times of its events
ROLES = {"scheduler": metrics.SCHEDULER, "server": metrics.SERVER, "worker": metrics.WORKER}
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt install prometheus)"
)


def exported():
    """Return the names of all metrics of all roles."""
    names = {"up", "shoal_build_info", *OF_SERVE}
    for role, all_of in ROLES.items():
        names.add(f"shoal_{role}_ready")
        for key, one in all_of.items():
            name = one.full_name(role, key)
            if one.kind == "histogram":
                names |= {f"{name}_bucket", f"{name}_count", *([f"{name}_sum"] if one.label else [])}
            else:
                names.add(f"{name}_total" if one.kind == "counter" else name)
    return names


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_uses_metrics_that_exist_and_names_a_remedy(rule):
    used = set(re.findall(r"\b(?:shoal_\w+|up)\b", rule["expr"]))
    assert used
    assert used <= exported()
    assert set(rule["annotations"]) == {"summary", "remedy"}
    assert rule["labels"]["severity"] in ("warning", "critical")


def expressions(dashboard):
    """Return the expressions of all panels and annotations."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found + [one["expr"].replace(" > 0", "") for one in dashboard["annotations"]["list"]]


@pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
def test_a_dashboard_is_laid_out_and_uses_metrics_that_exist(path):
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"].startswith("shoal-")
    assert isinstance(dashboard["schemaVersion"], int)
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "stat", "timeseries")
        targets = panel.get("targets", [])
        assert bool(targets) == (panel["type"] != "row")
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for expression in expressions(dashboard):
        assert set(re.findall(r"\b(?:shoal_\w+|up)\b", expression)) <= exported()


def test_the_dashboards_are_provisioned():
    provisioning = FOLDER.parent / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "shoal.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert len(DASHBOARDS) == 2


@needs_prometheus
def test_promtool_accepts_the_files():
    for what in (["rules", "shoal.rules.yml"], ["config", "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *what], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


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


def test_the_parts_of_a_rule_are_all_of_its_metrics():
    for rule in RULES:
        parts = " ".join(selectors(rule["expr"]))
        assert set(re.findall(r"shoal_\w+", rule["expr"])) == set(re.findall(r"shoal_\w+", parts))


class Live:
    """A cluster that trains, and a Prometheus that scrapes its roles."""

    def __init__(self, folder, processes):
        *ports, self.port = (processes.enter_context(HeldPort()).port for _ in range(6))
        self.address = f"tcp://127.0.0.1:{ports[0]}"
        self.targets = [f"127.0.0.1:{port}" for port in ports[1:]]
        self._processes = processes
        scrapes = [{"job_name": "shoal", "static_configs": [{"targets": self.targets}]}]
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "scrape_configs": scrapes,
            "rule_files": [str(FOLDER / "shoal.rules.yml")],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        common = ["--metrics-port"]
        self.start(
            sys.executable, "-m", "shoal", "scheduler", "--bind", self.address, "--servers", "2", "--replicas", "1",
            *common, str(ports[1]),
        )  # fmt: skip
        self.servers = [
            self.start(
                sys.executable, "-m", "shoal", "server", "--scheduler", self.address, *bound,
                "--storage-roots", str(folder), *common, str(port),
            )
            for port, bound in zip(ports[2:4], (["--memory", "64MiB"], ["--tier", f"{folder}/tier:4MiB"]), strict=True)
        ]  # fmt: skip
        self.start(
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        )  # fmt: skip
        self.stopping = threading.Event()
        self.folder = folder
        self.failure = None
        self._worker = threading.Thread(target=self._train, args=(ports[4],))
        self._worker.start()

    def start(self, *command):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes.callback(process.wait, 30)
        self._processes.callback(process.kill)
        return process

    def _train(self, port):
        try:
            self._learn(port)
        except Exception as error:
            self.failure = error

    def _learn(self, port):
        rng = np.random.default_rng(0)
        filters = {"w": shoal.Filters(gradients="bfloat16", key_caching=True)}
        with shoal.connect(self.address, consistency=shoal.ASP(), metrics_port=port, filters=filters) as store:
            x = rng.normal(size=(400, 4)).astype(np.float32)
            model = shoal.LogisticRegression(store=store)
            model.fit(x, (x[:, 0] > 0).astype(np.float32), progress=False)
            store.save(self.folder / "saved")
            seen = Accumulator()
            seen.update([0, 1, 1], [0.5, 0.25, 1.0])
            write_fit(store, "m", Header(fit=1, epochs=1, models=1), sums_row(seen))
            table = store.table("w", dim=2, optimizer=shoal.SGD(lr=1e-3))
            while not self.stopping.is_set():
                keys = rng.integers(0, 1000, 200).astype(np.uint64)
                table.pull(keys)
                table.push(keys, np.ones((200, 2), np.float32))
                store.activity.learned(200, lambda: (0.5, 0.75))
                store.tick()
                time.sleep(0.02)

    def close(self):
        self.stopping.set()
        self._worker.join(60)

    def value(self, expression):
        """Return the value of an expression, once it has one."""
        end = time.monotonic() + 60
        while not (found := asked(self.port, expression)):
            assert time.monotonic() < end, expression
            assert self.failure is None, self.failure
            time.sleep(0.2)
        return float(found[0]["value"][1])


@pytest.fixture
def live(tmp_path):
    with ExitStack() as processes:
        one = Live(tmp_path, processes)
        processes.callback(one.close)
        yield one


def test_prometheus_is_here_where_no_test_may_be_skipped():
    if os.environ.get("SHOAL_ALL_EXTRAS"):
        assert shutil.which("prometheus")
        assert shutil.which("promtool")


@needs_prometheus
@pytest.mark.slow
def test_a_prometheus_that_scrapes_a_cluster_under_load_evaluates_all_expressions(live):
    missing = {part for rule in RULES for part in selectors(rule["expr"])} - OF_SERVE
    shown = [one for path in DASHBOARDS for one in expressions(json.loads(path.read_text()))]
    assert len(shown) > 50
    missing |= {one.replace("$__rate_interval", "10s") for one in shown if one not in OF_SERVE}
    end = time.monotonic() + 90
    while missing and time.monotonic() < end and live.failure is None:
        missing = {part for part in missing if not asked(live.port, part)}
        time.sleep(0.2)
    assert live.failure is None
    assert not missing
    assert live.value("sum(shoal_table_rows{table='w'}) > 900") <= 1000
    assert live.value("shoal_scheduler_servers") == 2
    ops = {one["metric"]["op"] for one in asked(live.port, "shoal_server_requests_total")}
    assert {"push", "pull", "tick"} <= ops
    assert live.value("shoal_worker_examples_total") >= 400
    assert live.value("shoal_worker_loss == 0.5")
    assert 0 < live.value("shoal_fit_loss{model='m'}") < 1
    assert live.value("shoal_fit_examples{model='m'}") == 3
    assert live.value("shoal_filter_bytes_saved_total{table='w'} > 0")
    assert live.value("shoal_checkpoint_duration_seconds") > 0
    for target in live.targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as reply:
            text = reply.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
