"""A cluster on Ray: its scheduler and servers as actors, supervised by the process that has started them.

    start        places the actors and waits until all have joined
    RayCluster   a context manager: the actors end with it, and with the process that has started them

The servers are placed in a placement group; ranks go round the nodes. Servers report Ray's name of their node to the
scheduler, which places copies on other nodes where there are any. The scheduler runs on the node of the process that
starts the cluster, where its journal is. A server that replaces another one is started in its bundle, which Ray moves
if the node has died. Spare servers are outside of the group: an actor that has no place is a demand that Ray's
autoscaler sees. What a death means is decided by `shoal.cluster.launch.supervisor`.

Threads: a :class:`RayCluster` is used by one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.base.logs import find_log_format, worker_line
from shoal.base.plural import counted
from shoal.base.scalars import whole
from shoal.cluster.launch.child import Process
from shoal.cluster.launch.supervisor import Supervisor, slot_memory
from shoal.cluster.launch.workers import Emit, Workers
from shoal.cluster.protocol.address import is_loopback, join_address
from shoal.cluster.protocol.curve import make_keys
from shoal.config import SchedulerConfig, ServerConfig
from shoal.consistency import as_consistency
from shoal.errors import DeadlineExceededError
from shoal.ray.actors import METHODS, ActorProcess, ProgramActor, RoleActor
from shoal.ray.config import ShoalConfig
from shoal.ray.connection import Connection, read_keys

WORKER = {"CPU": 1.0}  # resources of a worker


class RayCluster(Supervisor):
    """The actors of a cluster. Made by :func:`start`; a context manager that ends them.

    Attributes
    ----------
    name : str
        Prefix of the names of its actors.
    connection : Connection
        What tasks and actors need in order to join it.
    """

    def __init__(self, config: ShoalConfig, workers: int) -> None:
        super().__init__()
        self.config = config
        self.name = f"shoal-{secrets.token_hex(4)}"
        self.connection: Connection
        self._programs: list[Any] = []  # actors of workers
        self._group: PlacementGroup
        self._node = ray.get_runtime_context().get_node_id()
        deadline = time.monotonic() + config.timeout
        nodes = [node for node in ray.nodes() if node["Alive"]]
        scheduler = SchedulerConfig(
            bind=join_address(ray.util.get_node_ip_address(), 0),
            servers=config.servers,
            workers=workers,
            slots=config.slots,
            heartbeat=config.heartbeat,
            replicas=config.replicas,
            copy_rate=config.copy_rate,
            journal=None if config.journal is None else os.path.abspath(config.journal),
            curve=self._make_keys(nodes),
        )
        roots = config.storage_roots
        server = ServerConfig(
            scheduler=scheduler.bind,
            threads=config.threads,
            slot_memory=slot_memory(config.memory, config.slots),
            timeout=config.timeout,
            storage_roots=None if roots is None else tuple(os.fspath(root) for root in roots),
            storage_options=None if config.storage_options is None else dict(config.storage_options),
            curve=scheduler.curve,
        )
        try:
            self._bundles = self._place(nodes, deadline)
            self.start(scheduler, server, timeout=config.timeout, spares=config.spares)
        except BaseException:
            self.stop()
            raise
        keys = None if self.curve is None else read_keys(self.curve, "worker")
        self.connection = Connection(
            self.address, keys, as_consistency(config.consistency), config.timeout, config.shared_storage
        )

    def _make_keys(self, nodes: list[dict[str, Any]]) -> str | None:
        if self.config.insecure:
            return None
        if self.config.curve is not None:
            return os.fspath(self.config.curve)
        if all(is_loopback(node["NodeManagerAddress"]) for node in nodes):
            return None
        directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="shoal-keys-"))
        make_keys(directory)
        return directory

    def _place(self, nodes: list[dict[str, Any]], deadline: float) -> list[int]:
        """Reserve a bundle for each server; return them in the order of the ranks, which goes round the nodes."""
        config = self.config
        needed = dict(config.resources_per_server)
        fit = sum(all(node["Resources"].get(name, 0) >= needed[name] for name in needed) for node in nodes)
        spare = 1 if config.replicas else 0
        strategy = config.placement or ("STRICT_SPREAD" if fit >= config.servers + spare else "SPREAD")
        self._group = placement_group([needed] * config.servers, strategy=strategy, name=self.name)
        self._closing.callback(self._remove_group)
        try:
            ray.get(self._group.ready(), timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise DeadlineExceededError(
                f"Ray has found no place for {counted(config.servers, 'server')} with {needed} each ({strategy}) in "
                f"{config.timeout:g} s: {counted(len(nodes), 'node')} with "
                f"{[dict(node['Resources']) for node in nodes]}; free resources, or pass less with "
                "resources_per_server or servers"
            ) from None
        by_node: dict[str, deque[int]] = {}
        for bundle, node in sorted(placement_group_table(self._group)["bundles_to_node_id"].items()):
            by_node.setdefault(node, deque()).append(bundle)
        order: list[int] = []
        while by_node:
            for node in sorted(by_node, key=lambda node: -len(by_node[node])):
                order += [by_node[node].popleft()]
            by_node = {node: bundles for node, bundles in by_node.items() if bundles}
        return order

    def _remove_group(self) -> None:
        with contextlib.suppress(Exception):  # Ray has been shut down
            remove_placement_group(self._group)

    def _start_ahead(self, names: Sequence[str]) -> None:
        """Do nothing: an actor is started with its configuration."""

    def _start(self, name: str, config: SchedulerConfig | ServerConfig, former: Process | None = None) -> ActorProcess:
        # The name of an actor that has ended may be taken for a while.
        unique = "" if former is None else f"-{secrets.token_hex(4)}"
        options: dict[str, Any] = {
            "name": f"{self.name}-{name.replace(' ', '-')}{unique}",
            "max_concurrency": METHODS,
            "num_cpus": 0,
        }
        bundle = -1
        if isinstance(config, SchedulerConfig):
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        else:
            if isinstance(former, ActorProcess):
                bundle = former.bundle
            elif config.rank is not None:
                bundle = self._bundles[config.rank]
            options |= _requests(self.config.resources_per_server)
            options["scheduling_strategy"] = (
                "SPREAD"
                if bundle < 0
                else PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            )
        actor = ray.remote(RoleActor).options(**options).remote(name, find_log_format(os.environ))
        keys = None if config.curve is None else read_keys(config.curve, name.partition(" ")[0])
        items = actor.run.options(num_returns="streaming").remote(config, keys)
        made = ActorProcess(name, actor, items, self.notify)
        made.bundle = bundle
        return made

    def prepare_workers(self, count: int) -> None:
        """See `Supervisor`: start the actors of workers, and wait until all have a place."""
        options = {"num_cpus": WORKER["CPU"], "max_concurrency": METHODS, "scheduling_strategy": "SPREAD"}
        form = find_log_format(os.environ)
        self._programs = [
            ray.remote(ProgramActor).options(name=f"{self.name}-worker-{rank}", **options).remote(rank, form)
            for rank in range(count)
        ]
        ready, missing = ray.wait(
            [actor.ready.remote() for actor in self._programs], num_returns=count, timeout=self.config.timeout
        )
        if missing:
            for actor in self._programs:
                ray.kill(actor)
            raise DeadlineExceededError(
                f"Ray has found a place for {len(ready)} of {counted(count, 'worker')} with 1 CPU each in "
                f"{self.config.timeout:g} s: {ray.available_resources().get('CPU', 0):g} CPUs are free; pass less "
                "with --workers or --servers"
            )

    def start_worker(
        self, rank: int, command: Sequence[str], workers: Workers, emit: Emit, emit_error: Emit
    ) -> ActorProcess:
        """See `Supervisor`: standard error is part of the output."""
        assert isinstance(workers, int)
        actor = self._programs[rank]
        items = actor.run.options(num_returns="streaming").remote(
            list(command), self.connection, workers, str(Path.cwd())
        )
        return ActorProcess(
            f"worker {rank}",
            actor,
            items,
            lambda process, _: self.ended.put(process),
            lambda line: emit(worker_line(line, rank, workers)),
        )


def start(config: ShoalConfig | None = None, *, workers: int = 1) -> RayCluster:
    """Start a scheduler and servers as actors of Ray, and wait until all have joined.

    Ray is initialized if it is not.

    Parameters
    ----------
    config : ShoalConfig, optional
    workers : int
        Number of workers of a job, unless they pass it.

    Returns
    -------
    RayCluster
        A context manager: the actors end with it. They also end when the process that has started them ends.

    Raises
    ------
    DeadlineExceededError
        Ray could not place the servers in time, or they did not join in time.
    NotConnectedError
        An actor has died before it had joined.

    Examples
    --------
    ::

        with shoal.ray.start(shoal.ray.ShoalConfig(servers=2)) as cluster:
            with cluster.connection.connect() as store:
                ...
    """
    config, workers = ShoalConfig() if config is None else config, whole("workers", workers, 1)
    if not isinstance(config, ShoalConfig):
        raise TypeError(f"config is a {type(config).__name__}: pass a ShoalConfig")
    if not ray.is_initialized():
        ray.init()
    return RayCluster(config, workers)


def _requests(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that requests resources."""
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    options["resources"] = {name: n for name, n in resources.items() if name not in ("CPU", "GPU", "memory")}
    return options
