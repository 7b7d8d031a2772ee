"""What a run requests of a cluster of Ray, compared with what its nodes have in all.

Ray waits without end for resources that no node has. A run that requests more than all nodes have together therefore
waits for nodes, which an autoscaler may add, for as long as its deadline allows, and fails then.

Threads: functions of this module are called by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
import ray.autoscaler.sdk

from shoal.errors import DeadlineExceededError

__all__ = ["Demand", "wait_for_nodes"]

_log = logging.getLogger("shoal.ray")

_POLL_SECONDS = 0.5  # between two looks at the nodes


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that a run requests.

    Parameters
    ----------
    bundles : sequence of (str, int, mapping)
        Of whom, how many of them, and the resources of each.
    reads : bool
        Whether tasks of Ray read datasets meanwhile, which takes CPUs that nobody has reserved.
    """

    bundles: Sequence[tuple[str, int, Mapping[str, float]]]
    reads: bool = False

    def missing(self, total: Mapping[str, float]) -> str:
        """Return what nodes with these resources lack; empty if they suffice."""
        names = {name for _, _, each in self.bundles for name, amount in each.items() if amount}
        for name in sorted(names | ({"CPU"} if self.reads else set())):
            needed = sum(count * each.get(name, 0) for _, count, each in self.bundles)
            has = total.get(name, 0)
            parts = [f"{count} x {each[name]:g} for {who}" for who, count, each in self.bundles if each.get(name)]
            if self.reads and name == "CPU":
                parts.append("some for the tasks that read the datasets")
            if needed > has or (self.reads and name == "CPU" and needed == has):
                return f"the nodes of Ray have {has:g} {name} in all, and {' and '.join(parts)} are needed"
        return ""


def wait_for_nodes(demand: Demand, timeout: float) -> None:
    """Wait until the nodes of Ray have the resources of a run in all, whether they are free or not.

    Raises
    ------
    DeadlineExceededError
        They do not, after ``timeout`` seconds.
    """
    missing = demand.missing(ray.cluster_resources())
    if not missing:
        return
    _log.warning("%s: waiting %g s for nodes", missing, timeout)
    deadline = time.monotonic() + timeout
    bundles = [dict(each) for _, count, each in demand.bundles for _ in range(count)]
    ray.autoscaler.sdk.request_resources(bundles=bundles)  # before the actors exist, an autoscaler cannot know of them
    try:
        while missing := demand.missing(ray.cluster_resources()):
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"{missing}: Ray would wait for them without end, and has got no node in {timeout:g} s. Add nodes, "
                    "or pass less with servers, resources_per_server or scaling_config"
                )
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    finally:
        ray.autoscaler.sdk.request_resources(bundles=[])
