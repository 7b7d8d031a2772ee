"""The scheduler and the servers as actors of Ray.

    run      the role, in the actor's process; returns how it has ended
    joined   waits until the role is ready; raises the error of `run` if it has failed

A role runs in its actor's process, so that Ray counts its resources and ends it with the actor, and nothing is left
when either is killed. The C++ threads of a server do not take part in Ray's calls.

Threads: methods run in threads of the actor, `run` in one for as long as the role lives.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ray

from shoal.base.logs import configure_logging, identify
from shoal.cluster.protocol.address import join_address
from shoal.errors import DeadlineExceededError
from shoal.ray.connection import key_directory

if TYPE_CHECKING:
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.scheduler.scheduler import Scheduler
    from shoal.cluster.server.server import Server

METHODS = 4  # methods that run at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Arguments of a scheduler: see :class:`shoal.cluster.scheduler.scheduler.Scheduler`."""

    servers: int
    workers: int
    slots: int
    heartbeat: float
    replicas: int
    copy_rate: int | None
    journal: str
    keys: Mapping[str, str] | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Arguments of a server: see :class:`shoal.cluster.server.server.Server`."""

    scheduler: str
    threads: int
    slot_memory: int | None
    timeout: float
    storage_roots: Sequence[str] | None
    storage_options: Mapping[str, Any] | None
    keys: Mapping[str, str] | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class JoinedRole:
    """A role that is ready: its address or rank, and where it runs."""

    address: str
    rank: int
    node: str
    pid: int


class _Role:
    """What both actors do. ``name`` is shown in the log and in Ray's dashboard."""

    def __init__(self, name: str, log_format: Literal["text", "json"] | None) -> None:
        self.name = name
        self._ready = threading.Event()
        self._stopped = threading.Event()
        self._joined: JoinedRole | None = None
        self._fault: BaseException | None = None
        configure_logging(log_format or "text")
        identify(role=name.partition(" ")[0])

    def __repr__(self) -> str:
        return f"shoal {self.name}"

    def joined(self, timeout: float) -> JoinedRole:
        """Wait until the role is ready."""
        if not self._ready.wait(timeout):
            raise DeadlineExceededError(f"{self.name} was not ready after {timeout:g} s")
        if self._fault is not None:
            raise self._fault
        assert self._joined is not None
        return self._joined

    def _set_joined(self, address: str, rank: int) -> None:
        self._joined = JoinedRole(address, rank, ray.get_runtime_context().get_node_id(), os.getpid())
        self._ready.set()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Keep an exception for those that wait in `joined`."""
        try:
            yield
        except BaseException as error:
            self._fault = error
            raise
        finally:
            self._ready.set()


class SchedulerActor(_Role):
    """The scheduler of a cluster."""

    def __init__(self, name: str, log_format: Literal["text", "json"] | None) -> None:
        super().__init__(name, log_format)
        self._scheduler: Scheduler | None = None

    def run(self, settings: SchedulerSettings) -> str:
        """Serve until `stop` is called; a scheduler with the journal of another one continues at its address."""
        from shoal.cluster.scheduler.membership import COPY_RATE
        from shoal.cluster.scheduler.scheduler import Scheduler

        with self._reported(), _keys_of(settings.keys, "scheduler") as keys:
            with Scheduler(
                join_address(ray.util.get_node_ip_address(), 0),
                servers=settings.servers,
                workers=settings.workers,
                slots=settings.slots,
                heartbeat=settings.heartbeat,
                replicas=settings.replicas,
                copy_rate=COPY_RATE if settings.copy_rate is None else settings.copy_rate,
                journal=settings.journal,
                keys=keys,
                insecure=keys is None,
            ) as scheduler:
                self._scheduler = scheduler
                self._set_joined(scheduler.address, -1)
                identify(cluster=scheduler.membership.cluster)
                scheduler.run(lambda: not self._stopped.is_set())
            return "it was stopped"

    def stop(self) -> None:
        """End the scheduler, which ends the servers."""
        self._stopped.set()
        if self._scheduler is not None:
            self._scheduler.stop()


class ServerActor(_Role):
    """A server of a cluster."""

    def __init__(self, name: str, log_format: Literal["text", "json"] | None) -> None:
        super().__init__(name, log_format)
        self._server: Server | None = None

    def run(self, settings: ServerSettings, rank: int | None, spare: bool) -> str:
        """Serve until the scheduler ends, or the server has been drained or stopped."""
        from shoal.cluster.server.server import Server
        from shoal.ray.gauges import ServerGauges

        address = ray.util.get_node_ip_address()
        with self._reported(), _keys_of(settings.keys, "server") as keys:
            with Server(
                settings.scheduler,
                bind=join_address(address, 0),
                advertise=address,
                threads=settings.threads,
                slot_memory=settings.slot_memory,
                rank=rank,
                node=ray.get_runtime_context().get_node_id(),
                spare=spare,
                timeout=settings.timeout,
                keys=keys,
                insecure=keys is None,
                storage_roots=settings.storage_roots,
                storage_options=settings.storage_options,
            ) as server:
                self._server = server
                gauges = ServerGauges(ray.get_runtime_context().get_actor_name() or self.name)

                def going() -> bool:
                    gauges.report(server.counters)
                    return not self._stopped.is_set()

                self._set_joined(settings.scheduler, server.rank)
                identify(rank=server.rank, cluster=server.cluster)
                server.run(going)
            return "it was stopped or drained"

    def stop(self) -> None:
        """End the server; the cluster continues without it if there are copies of its slots."""
        self._stopped.set()


@contextlib.contextmanager
def _keys_of(keys: Mapping[str, str] | None, role: str) -> Iterator[Keys | None]:
    from shoal.cluster.protocol.curve import Keys

    with key_directory(keys) as directory:
        yield None if directory is None else Keys.load(directory, role)
