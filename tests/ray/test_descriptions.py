"""shoal.ray without a cluster: descriptions, errors, and what is said where Ray is missing."""

import os
import pickle
import subprocess
import sys

import pytest

import shoal

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'shoal[ray]'")

from shoal.ray.connection import key_directory, read_keys  # noqa: E402
from shoal.ray.errors import find_cause, unwrap  # noqa: E402


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_without_ray_the_error_names_the_extra():
    done = run("import sys; sys.modules['ray'] = None\nimport shoal\nshoal.ray")
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: shoal.ray needs Ray 2.58 or later: pip install 'shoal[ray]'\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"config": {"servers": 2}}, "config is a dict: pass a ShoalConfig"),
        ({"workers": "2"}, "workers is '2': pass a whole number"),
    ],
)
def test_wrong_arguments_of_a_cluster_do_not_start_ray(arguments, says):
    with pytest.raises(TypeError, match=says):
        shoal.ray.start(**arguments)
    assert not ray.is_initialized()
    with pytest.raises(TypeError, match="resources_per_server is 2: pass a mapping"):
        shoal.ray.ShoalConfig(resources_per_server=2)


@pytest.mark.slow
def test_without_ray_the_command_line_names_the_extra():
    code = "import sys; sys.modules['ray'] = None\nimport shoal.cli\n"
    done = run(code + "sys.exit(shoal.cli.main(['launch', '--engine', 'ray', 'train.py']))")
    assert done.returncode != 0
    assert "pip install 'shoal[ray]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_server_needs_neither_ray_train_nor_ray_data():
    done = run("import sys, shoal.ray.actors; print({'ray.train', 'ray.data', 'pandas', 'pyarrow'} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"servers": 0}, "servers must be 1 or more, got 0"),
        ({"threads": 0}, "threads must be 1 or more, got 0"),
        ({"servers": 2, "replicas": 2}, "replicas=2 and servers=2"),
        ({"spares": 1}, "spares=1 and replicas=0"),
        ({"servers": 2, "replicas": 1, "spares": -1}, "spares=-1 and replicas=1"),
        ({"placement": "ROUND"}, "placement is one of PACK, SPREAD"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
        ({"heartbeat": float("nan")}, "heartbeat must be a number of seconds above 0, got nan"),
        ({"slots": -1}, "slots must be a power of two from 2 to 16384, got -1"),
        ({"resources_per_server": {}}, "resources_per_server has no amounts above 0"),
        ({"resources_per_server": {"CPU": -1}}, "resources_per_server has no amounts above 0"),
        ({"curve": "keys", "insecure": True}, "contradict each other"),
        ({"storage_roots": [""]}, "a storage root is empty"),
    ],
)
def test_a_wrong_description_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        shoal.ray.ShoalConfig(**wrong)


def test_a_consistency_is_one_of_the_three():
    with pytest.raises(TypeError, match="consistency is one of"):
        shoal.ray.ShoalConfig(consistency=1)


def test_the_keys_of_a_role_are_sent_without_those_of_others(tmp_path):
    from shoal.cluster.protocol.curve import Keys, make_keys

    make_keys(tmp_path / "keys")
    sent = read_keys(tmp_path / "keys", "worker")
    assert set(sent) == {"scheduler.key", "server.key", "worker.key", "worker.key_secret"}
    with key_directory(sent) as directory:
        assert Keys.load(directory, "worker").public_of("server") == Keys.load(tmp_path / "keys", "server").public
    connection = shoal.ray.Connection("tcp://10.0.0.1:1", sent, shoal.BSP(), 1.0, False)
    assert sent["worker.key_secret"] not in repr(connection)
    assert pickle.loads(pickle.dumps(connection)) == connection


def test_the_variables_of_a_worker_are_those_of_shoal_launch_and_are_restored(monkeypatch):
    monkeypatch.setenv("SHOAL_RANK", "7")
    monkeypatch.delenv("SHOAL_SCHEDULER", raising=False)
    connection = shoal.ray.Connection("tcp://127.0.0.1:1", None, shoal.BSP(), 1.0, False)
    with connection.environment(1, 2) as values:
        assert values == {"SHOAL_SCHEDULER": "tcp://127.0.0.1:1", "SHOAL_RANK": "1", "SHOAL_WORKERS": "2"}
        assert os.environ["SHOAL_RANK"] == "1"
    assert os.environ["SHOAL_RANK"] == "7"
    assert "SHOAL_SCHEDULER" not in os.environ


def test_an_error_of_shoal_is_found_in_those_of_ray():
    from ray.exceptions import RayTaskError

    lost = shoal.ServerLostError("server 0")
    wrapped = RayTaskError("run", "a traceback", lost)
    assert unwrap(wrapped) is lost
    assert unwrap(wrapped.as_instanceof_cause()) is lost
    outer = RuntimeError("the workers have failed")
    outer.worker_failures = {0: ValueError("another"), 1: wrapped}
    assert find_cause(outer) is lost
    assert find_cause(ValueError("another")) is None


def test_a_demand_names_the_resource_that_all_nodes_lack():
    from shoal.ray.demand import Demand

    each = [("servers", 2, {"CPU": 1.0, "rows": 1}), ("workers", 1, {"CPU": 1.5, "GPU": 0})]
    assert Demand(each).missing({"CPU": 3.5, "rows": 2}) == ""
    assert Demand(each).missing({"CPU": 3.4, "rows": 2}) == (
        "the nodes of Ray have 3.4 CPU in all, and 2 x 1 for servers and 1 x 1.5 for workers are needed"
    )
    assert "have 0 rows in all, and 2 x 1 for servers are needed" in Demand(each).missing({"CPU": 9})
    assert Demand(each, reads=True).missing({"CPU": 4, "rows": 2}) == ""
    assert "and some for the tasks that read the datasets" in Demand(each, reads=True).missing({"CPU": 3.5, "rows": 2})


def test_a_version_of_ray_without_the_coordinator_reserves_nothing(monkeypatch, caplog):
    from shoal.ray.demand import reserved

    name = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
    monkeypatch.setitem(sys.modules, name, None)
    with reserved("servers", [{"CPU": 1}]):
        assert f"Ray {ray.__version__} cannot reserve the resources of the servers" in caplog.text


def test_the_functions_of_a_loop_are_refused_outside_of_one():
    for function in (shoal.ray.store, shoal.ray.snapshot, shoal.ray.restore):
        with pytest.raises(RuntimeError, match="no training loop runs here"):
            function()


def test_the_counters_of_a_server_are_reported_every_five_seconds(monkeypatch):
    from shoal.ray import gauges

    class Gauge:
        def __init__(self, name, description, tags):
            assert tags == ("server",)
            self.name = name

        def set(self, value, tags):
            shown.append((self.name, value, tags["server"]))

    monkeypatch.setattr(gauges, "Gauge", Gauge)
    shown, now = [], [100.0]
    made = gauges.ServerGauges("server-0", clock=lambda: now[0])
    for count, seconds in ((7, 0.0), (8, 4.9), (9, 5.0)):
        now[0] = 100.0 + seconds
        made.report(lambda count=count: dict.fromkeys(gauges.SERVER, count))
    assert [(value, server) for name, value, server in shown if name == "shoal_server_messages"] == [
        (7, "server-0"),
        (9, "server-0"),
    ]


def test_the_counters_of_a_server_are_those_of_its_endpoints_together():
    from shoal import _core
    from shoal.cluster.server.assignment import ServerControl
    from shoal.ray import gauges

    services = {address: _core.Endpoint(8) for address in ("one", "two")}
    for service in services.values():
        service.handle(b"nobody", [b"no request"])
    counters = ServerControl(services, b"server").counters()
    # Of an endpoint without arcs there are no rows to count yet.
    assert set(gauges.SERVER) <= set(counters)
    assert counters["messages"] == 2
