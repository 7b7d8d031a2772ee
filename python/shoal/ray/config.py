"""ShoalConfig: the servers of a cluster on Ray. A frozen description.

Threads: immutable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.base.scalars import check_slots, make_plain
from shoal.consistency import BSP, Consistency, as_consistency
from shoal.storage.roots import StorageRoots

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShoalConfig:
    """The servers of a cluster on Ray.

    Parameters
    ----------
    servers : int
    replicas : int
        Copies of each slot on other servers, fewer than ``servers``. With them training continues when a server dies,
        and another one is started; without, the loss of a server ends the job.
    spares : int
        Additional servers that serve no slots: when another server dies, the missing copies are made on a spare at
        once. A cluster starts without waiting for spares; Ray's autoscaler adds nodes for those that cannot be placed.
        Requires ``replicas``.
    threads : int
        Threads of each server, with a port each.
    resources_per_server : mapping
        Resources that Ray reserves for each server, such as ``{"CPU": 2, "memory": 8e9}``. Ray places servers by them
        but does not enforce them.
    memory : int or str, optional
        Limit for the rows of all servers together, in bytes.
    slots : int
        Slots of the hash space.
    consistency : Consistency or str
        The default of :func:`shoal.ray.store`.
    placement : str, optional
        Ray's placement strategy of the servers. Default: ``"STRICT_SPREAD"`` if there is a node for each server (with
        replicas, also for one more), else ``"SPREAD"``.
    copy_rate : int, optional
        Bytes per second that each thread of a server sends at most to make a new copy.
    heartbeat : float
        Seconds between two heartbeats.
    timeout : float
        Seconds until Ray must have the nodes and the servers must have been placed and have joined; also the deadline
        of the workers' calls.
    storage_roots, storage_options
        Where the servers may read and write files: as in :func:`shoal.launch`.
    shared_storage : bool
        Whether all nodes see the storage path of a run, by the same name: the servers then write their rows there
        themselves. False: a snapshot is written by worker 0, and Ray uploads it.
    curve : path, optional
        Directory of the cluster's keys on this machine, which are sent to the actors. Default: keys are made for the
        cluster, unless all nodes have loopback addresses, which other machines cannot reach.
    insecure : bool
        Use no keys, in a network that you trust: messages are neither encrypted nor authenticated, which is faster.
    journal : path, optional
        Directory of the scheduler's journal, on the node of the process that starts the cluster; its former content is
        removed. Default: a temporary one.

    Examples
    --------
    >>> ShoalConfig(servers=4, replicas=1, resources_per_server={"CPU": 2}).servers
    4
    """

    servers: int = 1
    replicas: int = 0
    spares: int = 0
    threads: int = 1
    resources_per_server: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    memory: int | str | None = None
    slots: int = 1024
    consistency: Consistency | str = field(default_factory=BSP)
    placement: str | None = None
    copy_rate: int | None = None
    heartbeat: float = 2.0
    timeout: float = 60.0
    storage_roots: Sequence[str | os.PathLike[str]] | None = None
    storage_options: Mapping[str, Any] | None = None
    shared_storage: bool = False
    curve: str | os.PathLike[str] | None = None
    insecure: bool = False
    journal: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("servers", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.replicas < self.servers:
            raise ValueError(
                f"replicas={self.replicas} and servers={self.servers}: copies are on other servers, so there must be "
                "more servers than replicas"
            )
        if self.spares < 0 or (self.spares and not self.replicas):
            raise ValueError(
                f"spares={self.spares} and replicas={self.replicas}: spare servers get the copies of a server that has "
                "died; pass spares=0 or replicas=1"
            )
        if self.placement is not None and self.placement not in PLACEMENTS:
            raise ValueError(f"placement is one of {', '.join(PLACEMENTS)} or None, got {self.placement!r}")
        object.__setattr__(self, "consistency", as_consistency(self.consistency))
        for name in ("heartbeat", "timeout"):
            if not 0 < getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}")
        check_slots(self.slots)
        if not isinstance(self.resources_per_server, Mapping):
            raise TypeError(f'resources_per_server is {self.resources_per_server!r:.80}: pass a mapping, {{"CPU": 1}}')
        wrong = {name: amount for name, amount in self.resources_per_server.items() if not amount >= 0}
        if wrong or not sum(self.resources_per_server.values()):
            raise ValueError(
                f"resources_per_server has no amounts above 0: {dict(self.resources_per_server)}; Ray places servers "
                'by them: pass {"CPU": 1} or more'
            )
        if self.curve is not None and self.insecure:
            raise ValueError(f"curve={os.fspath(self.curve)!r} and insecure=True contradict each other: pass one")
        StorageRoots(self.storage_roots, self.storage_options)  # raises if they are invalid
