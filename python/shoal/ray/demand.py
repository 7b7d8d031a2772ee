"""What a run requests of a cluster of Ray: compared with what its nodes have in all, and reserved.

Ray waits without end for resources that no node has. A run that requests more than all nodes have together therefore
waits for nodes, which an autoscaler may add, for as long as its deadline allows, and fails then.

Ray Train and Ray Data divide the resources of all nodes among themselves by a coordinator, an actor that does not know
of other actors. The resources of servers are reserved there, so that an elastic group of workers does not grow into
them, and Ray's autoscaler keeps nodes for them. A reservation expires unless it is renewed.

Threads: functions of this module are called by one; a thread of its own renews a reservation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
import ray.autoscaler.sdk
from ray.exceptions import RayError

from shoal.errors import DeadlineExceededError

_log = logging.getLogger("shoal.ray")

_EXPIRE_SECONDS = 120.0  # of a reservation, after which others get its resources
_RENEW_SECONDS = 30.0
_REPLY_SECONDS = 10.0  # for the coordinator to reply
_POLL_SECONDS = 0.5  # between two looks at the nodes


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that a run requests."""

    # Of whom, how many of them, and the resources of each.
    bundles: Sequence[tuple[str, int, Mapping[str, float]]]
    # Whether tasks of Ray read datasets meanwhile, which takes CPUs that are not reserved.
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
    """Wait until the nodes of Ray have the resources of a run in all, whether they are free or not."""
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


@contextlib.contextmanager
def reserved(name: str, bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Reserve resources with the coordinator of Ray Train and Ray Data, for the length of a ``with`` block."""
    try:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            ResourceRequestPriority,
            get_or_create_autoscaling_coordinator,
        )
    except ImportError as error:
        _log.warning("Ray %s cannot reserve the resources of the servers: %s", ray.__version__, error)
        yield
        return
    coordinator = get_or_create_autoscaling_coordinator()
    request = {
        "requester_id": name,
        "resources": [dict(each) for each in bundles],
        "expire_after_s": _EXPIRE_SECONDS,
        "priority": ResourceRequestPriority.HIGH,
    }
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(Exception):  # Ray is busy or shut down: it expires, or the next one is in time
                ray.get(coordinator.request_resources.remote(**request), timeout=_REPLY_SECONDS)

    try:
        ray.get(coordinator.request_resources.remote(**request), timeout=_REPLY_SECONDS)
    except RayError as error:
        _log.warning("the resources of the servers are not reserved: %s", error)
    thread = threading.Thread(target=renew, name="shoal-reservation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):
            ray.get(coordinator.cancel_request.remote(name), timeout=_REPLY_SECONDS)
