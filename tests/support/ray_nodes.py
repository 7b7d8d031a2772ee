"""A cluster of Ray of several nodes, all on this machine: each is a raylet with an address of its own."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from documents import ROOT, blocks

PATIENCE = 120.0
HEAD_CPUS = 4
NODE_CPUS = 2

# Else Ray gives its workers niceness 15, with which they hardly run beside other tests, looks for `uv run` among the
# parents, reports statistics, starts 32 actors to read the footers of a Parquet file and one to watch for preemption,
# and waits a minute for nodes that have died.
VARIABLES = {
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}

# A node that is killed counts as dead after a second, by default after twenty. No process is started in advance, and
# those of tasks wait for the next test, by default one second.
SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "idle_worker_killing_time_threshold_ms": 600_000,
    "metrics_report_interval_ms": 1000,
}

# What each node does without: the dashboard, the copying of logs to the driver, and the second import of Ray for each
# process. The head has no autoscaler.
NODE = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "setup_worker_path": str(Path(__file__).with_name("ray_setup_worker.py")),
}


class RayNodes:
    """The nodes: a head with 127.0.0.2, others with the following addresses. On 127.0.0.1 they would hang.

    Tests place actors by custom resources: the head has two "seat", and all nodes have two "rows" by default.
    """

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self._last = 2
        self.nodes: list[Any] = []
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": HEAD_CPUS,
                "resources": {"seat": 2, "rows": 2},
                "node_ip_address": "127.0.0.2",
                "no_monitor": True,
                "_system_config": SYSTEM,
                **NODE,
            },
        )
        for _ in range(nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, resources: dict[str, float] | None = None) -> str:
        """Add a node; returns its id."""
        self._last += 1
        with pytest.MonkeyPatch.context() as patch:  # the head alone reports metrics, for which it has a larger process
            patch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
            node = self.cluster.add_node(
                num_cpus=NODE_CPUS,
                resources={"rows": 2} if resources is None else resources,
                node_ip_address=f"127.0.0.{self._last}",
                **NODE,
            )
        self.nodes.append(node)
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Kill a node's raylet and all its processes."""
        (node,) = [one for one in self.nodes if one.node_id == node_id]
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def ray_nodes(nodes: int = 2) -> Iterator[RayNodes]:
    """Run a cluster of Ray, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        import ray
        from ray.train.v2._internal.execution.callback import ControllerCallback
        from ray.train.v2.api import data_parallel_trainer

        # Else each fit starts an actor that frees the workers' places if the process that controls them dies.
        patch.setattr(data_parallel_trainer, "PlacementGroupCleanerCallback", ControllerCallback, raising=False)
        made = RayNodes(nodes)
        try:
            ray.init(address=made.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="WARNING")
            yield made
        finally:
            ray.shutdown()
            made.cluster.shutdown()


# A text of each Python block of docs/ray.md, by which tests name it; all of them run on a cluster.
PAGE_BLOCKS = ("trainer.fit()", "shoal.ray.start(", "prepared =", "iter_torch_batches", "serve.run(", "tune.Tuner(")


def page_blocks() -> list[str]:
    """The Python blocks of docs/ray.md."""
    return [one.text for one in blocks(ROOT / "docs" / "ray.md") if one.kind == "python"]


def page_names() -> dict[str, Any]:
    """What later blocks use of the first one. Functions of a module of this name are pickled by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(page_blocks()[0].partition("def loop")[0], names)
    return names


def run_page_block(mark: str, names: dict[str, Any], changes: dict[str, str]) -> None:
    """Run the block that has a text, with other words in places that it must have."""
    (text,) = (one for one in page_blocks() if mark in one)
    for shown, here in changes.items():
        assert shown in text, f"docs/ray.md has no {shown}"
        text = text.replace(shown, here)
    exec(compile(text, f"docs/ray.md, {mark}", "exec"), names)


def wait_until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait until a function returns something true; return it."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.05)
    return found
