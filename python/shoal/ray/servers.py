"""A cluster on Ray: its scheduler and servers as actors, supervised by the process that has started them.

    start        places the actors and waits until all have joined
    RayCluster   a context manager: the actors end with it, and with the process that has started them

The servers are placed in a placement group; ranks go round the nodes. Servers report Ray's name of their node to the
scheduler, which places copies on other nodes where there are any. The scheduler runs on the node of the process that
starts the cluster, where its journal is: if it dies, another one continues from the journal at the same address. If a
server dies and there are copies of its slots, another one is started in its bundle, which Ray moves if the node has
died. Both happen at most `_MAX_RESTARTS` times in `_RESTART_SECONDS`. Spare servers are outside of the group: an actor
that has no place is a demand that Ray's autoscaler sees.

Detection and promotion are shoal's: no worker waits for what this module does.

Threads: a :class:`RayCluster` is used by one; a thread of its own supervises the actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.base.logs import find_log_format
from shoal.base.plural import counted
from shoal.cluster.launch.local_cluster import slot_memory
from shoal.cluster.protocol.address import is_loopback
from shoal.cluster.protocol.curve import Keys, make_keys
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import as_dict
from shoal.cluster.scheduler.journal import Journal
from shoal.errors import DeadlineExceededError, NotConnectedError, ServerLostError, ShoalError
from shoal.ray.actors import (
    METHODS,
    JoinedRole,
    SchedulerActor,
    SchedulerSettings,
    ServerActor,
    ServerSettings,
)
from shoal.ray.config import ShoalConfig
from shoal.ray.connection import Connection, key_directory, read_keys
from shoal.ray.errors import find_cause, unwrap

_log = logging.getLogger("shoal.ray")

_MAX_RESTARTS = 5  # of the scheduler, and of servers, within
_RESTART_SECONDS = 60.0
_POLL_SECONDS = 0.2  # between two checks of the actors
_STOP_SECONDS = 5.0  # for the roles to end before their actors are killed


@dataclass(slots=True, eq=False)
class Role:
    """An actor of the cluster."""

    # `"scheduler"` or `"server 2"`; the actor's name in Ray is that of the cluster and this one.
    name: str
    actor: Any
    ended: Any  # the reference to the result of `run`
    bundle: int  # of the placement group; -1 for the scheduler, and for spare servers
    joining: Any = None  # the reference to the result of `joined`, until it is known
    # Where it runs; None until it has joined.
    place: JoinedRole | None = None


class RayCluster:
    """The actors of a cluster. Made by :func:`start`; a context manager that ends them.

    Attributes
    ----------
    name : str
        Prefix of the names of its actors.
    connection : Connection
        What tasks and actors need in order to join it.
    """

    def __init__(self, config: ShoalConfig) -> None:
        self.config = config
        self.name = f"shoal-{secrets.token_hex(4)}"
        self.connection: Connection
        self._closing = contextlib.ExitStack()
        self._lock = threading.Lock()  # guards the roles and the fault
        self._scheduler: Role | None = None
        self._servers: list[Role] = []
        self._started = 0  # servers so far
        self._fault: ShoalError | None = None
        self._stopped = threading.Event()
        self._restarts: dict[bool, deque[float]] = {
            is_server: deque(maxlen=_MAX_RESTARTS) for is_server in (False, True)
        }
        self._keys: str | None = None  # directory of the keys of all roles
        self._group: PlacementGroup
        self._scheduler_settings: SchedulerSettings
        self._server_settings: ServerSettings
        self._supervisor: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The address of the scheduler."""
        return self.connection.address

    @property
    def servers(self) -> list[Role]:
        """The servers that have been started and have not ended; spare ones wait for a place if they have none."""
        with self._lock:
            return list(self._servers)

    @property
    def scheduler(self) -> Role:
        """The scheduler."""
        with self._lock:
            assert self._scheduler is not None
            return self._scheduler

    @property
    def fault(self) -> ShoalError | None:
        """Why the cluster cannot continue; None as long as it can."""
        with self._lock:
            return self._fault

    def status(self) -> dict[str, Any]:
        """Return the status of the cluster, as ``store.cluster()`` of a connected worker does."""
        with self._client() as client:
            return as_dict(client.status(timeout=self.config.timeout))

    def drain(self, server: int) -> str:
        """Request that the slots of a server move to the others, and that it then ends.

        Parameters
        ----------
        server : int
            Its rank.
        """
        with self._client() as client:
            return client.drain(server, timeout=self.config.timeout)

    @contextlib.contextmanager
    def _client(self) -> Any:
        with key_directory(self.connection.keys) as directory:
            keys = None if directory is None else Keys.load(directory, "worker")
            with SchedulerClient(self.address, "observer", keys=keys) as client:
                yield client

    # ---- starting ----------------------------------------------------------------------------------------------------

    def start(self, workers: int) -> None:
        """Start the actors, and wait until all have joined: see :func:`start`."""
        config = self.config
        deadline = time.monotonic() + config.timeout
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._keys = self._make_keys(nodes)
        here = ray.get_runtime_context().get_node_id()
        self._scheduler_settings = SchedulerSettings(
            servers=config.servers,
            workers=workers,
            slots=config.slots,
            heartbeat=config.heartbeat,
            replicas=config.replicas,
            copy_rate=config.copy_rate,
            journal=self._make_journal(),
            keys=None if self._keys is None else read_keys(self._keys, "scheduler"),
        )
        self._node = here
        bundles = self._place(nodes, deadline)
        self._scheduler = self._start_scheduler()
        joined = self._wait_for(self._scheduler, deadline)
        roots = config.storage_roots
        self._server_settings = ServerSettings(
            scheduler=joined.address,
            threads=config.threads,
            slot_memory=slot_memory(config.memory, config.slots),
            timeout=config.timeout,
            storage_roots=None if roots is None else [os.fspath(root) for root in roots],
            storage_options=None if config.storage_options is None else dict(config.storage_options),
            keys=None if self._keys is None else read_keys(self._keys, "server"),
        )
        self.connection = Connection(
            joined.address,
            None if self._keys is None else read_keys(self._keys, "worker"),
            config.consistency,
            config.timeout,
            config.shared_storage,
        )
        self._servers = [self._start_server(bundle, rank) for rank, bundle in enumerate(bundles)]
        for server in self._servers:
            self._wait_for(server, deadline)
        self._servers += [self._start_server(-1, None) for _ in range(config.spares)]
        supervisor = threading.Thread(target=self._supervise, name="shoal-actors", daemon=True)
        supervisor.start()
        self._supervisor = supervisor

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

    def _make_journal(self) -> str:
        journal = self.config.journal
        if journal is None:
            journal = tempfile.mkdtemp(prefix="shoal-journal-")
            self._closing.callback(shutil.rmtree, journal, ignore_errors=True)
        with Journal(journal) as former:
            former.clear()  # the processes of its cluster are not these
        return os.path.abspath(journal)

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

    def _start_scheduler(self) -> Role:
        again = len(self._restarts[False])  # the name of one that has ended may be taken for a while
        options = {
            "name": f"{self.name}-scheduler" + (f"-{secrets.token_hex(4)}" if again else ""),
            "num_cpus": 0,
            "max_concurrency": METHODS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
        }
        actor = ray.remote(SchedulerActor).options(**options).remote("scheduler", find_log_format(os.environ))
        ended = actor.run.remote(self._scheduler_settings)
        return Role("scheduler", actor, ended, -1, actor.joined.remote(self.config.timeout))

    def _start_server(self, bundle: int, rank: int | None) -> Role:
        number, self._started = self._started, self._started + 1
        spare = bundle < 0
        options = {
            "name": f"{self.name}-server-{number}",
            **_requests(self.config.resources_per_server),
            "max_concurrency": METHODS,
            "scheduling_strategy": "SPREAD"
            if spare
            else PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        }
        actor = ray.remote(ServerActor).options(**options).remote(f"server {number}", find_log_format(os.environ))
        ended = actor.run.remote(self._server_settings, rank, spare)
        return Role(f"server {number}", actor, ended, bundle, actor.joined.remote(self.config.timeout))

    def _wait_for(self, role: Role, deadline: float) -> JoinedRole:
        try:
            role.place = ray.get(role.joining, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise DeadlineExceededError(
                f"{role.name} was not ready after {self.config.timeout:g} s: see its log in Ray's dashboard"
            ) from None
        except RayActorError as error:
            raise NotConnectedError(f"{role.name} has died before it was ready: {error}") from error
        except RayError as error:
            cause = unwrap(error)
            raise cause from (None if cause is error else error)
        role.joining = None
        assert role.place is not None
        return role.place

    # ---- supervising -------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Start actors again that end, until the cluster is stopped or cannot continue."""
        while not self._stopped.is_set():
            roles = [self.scheduler, *self.servers]
            by_reference = {role.ended: role for role in roles} | {
                role.joining: role for role in roles if role.joining is not None
            }
            role = None
            try:
                done, _ = ray.wait(list(by_reference), num_returns=1, timeout=_POLL_SECONDS)
                for reference in done:
                    role = by_reference[reference]
                    if self._stopped.is_set():
                        return
                    if reference == role.ended:
                        self._replace(role)
                    else:
                        self._note_joined(role)
            except Exception as error:  # of any kind: nobody else would notice that actors are supervised no more
                if not self._stopped.is_set():
                    what = "Ray cannot be reached" if role is None else f"{role.name} has ended and cannot be replaced"
                    self._fail(NotConnectedError(f"{what}: {error}"))
                return
            if self.fault is not None:
                return

    def _note_joined(self, role: Role) -> None:
        with contextlib.suppress(RayError):  # `run` has the same error
            role.place = ray.get(role.joining)
            _log.info("%s runs on node %s, process %d", role.name, role.place.node, role.place.pid)
        role.joining = None

    def _replace(self, role: Role) -> None:
        """Start another actor for one that has ended, or keep the reason why there is none."""
        is_server = role is not self._scheduler
        try:
            how = str(ray.get(role.ended))
        except RayError as death:
            found = find_cause(death)
            how = f"it has died: {found or _first_line(unwrap(death))}"
        else:
            if is_server:  # it was asked to end
                with self._lock:
                    self._servers.remove(role)
                _log.info("%s has ended: %s", role.name, how)
                return
        with contextlib.suppress(Exception):
            ray.kill(role.actor)
        if is_server and not self.config.replicas:
            lost = ServerLostError(f"{role.name} has ended, {how}; its rows are lost: the cluster has no replicas")
            self._fail(lost)
            return
        recent = self._restarts[is_server]
        if len(recent) == _MAX_RESTARTS and time.monotonic() - recent[0] < _RESTART_SECONDS:
            self._fail(
                NotConnectedError(
                    f"{role.name} has ended, {how}; it is not started again, since {_MAX_RESTARTS} others were in "
                    f"{_RESTART_SECONDS:g} s"
                )
            )
            return
        recent.append(time.monotonic())
        _log.warning("%s has ended, %s; another one is started", role.name, how)
        with self._lock:
            if is_server:
                self._servers[self._servers.index(role)] = self._start_server(role.bundle, None)
            else:
                self._scheduler = self._start_scheduler()

    def _fail(self, error: ShoalError) -> None:
        _log.error("%s", error)
        with self._lock:
            self._fault = error

    # ---- ending ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all actors; returns when they have ended."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        try:
            if self._supervisor is not None:
                self._supervisor.join()
            with self._lock:
                roles = [*([self._scheduler] if self._scheduler else []), *self._servers]
            if ray.is_initialized() and roles:
                with contextlib.suppress(Exception):  # Ray ends all the same
                    roles[0].actor.stop.remote()
                    ends = [role.ended for role in roles if role.place is not None]
                    ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS)
                for role in roles:
                    with contextlib.suppress(Exception):
                        ray.kill(role.actor)
        finally:
            self._closing.close()


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
    if not ray.is_initialized():
        ray.init()
    cluster = RayCluster(ShoalConfig() if config is None else config)
    try:
        cluster.start(workers)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _requests(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that requests resources."""
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    options["resources"] = {name: n for name, n in resources.items() if name not in ("CPU", "GPU", "memory")}
    return options


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
