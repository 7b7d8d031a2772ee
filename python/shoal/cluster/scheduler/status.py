"""The status of the cluster, made from what :class:`.Membership` keeps. Threads: a function of its arguments."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import (
    EndpointStatus,
    JobStatus,
    LauncherStatus,
    ServerStatus,
    StatusReply,
    WorkerStatus,
)
from shoal.cluster.scheduler.inputs import Settings
from shoal.cluster.scheduler.members import Job, LauncherPeer, Peer, ServerPeer, WorkerPeer

__all__ = ["status_of"]


def status_of(
    peers: Iterable[Peer],
    job: Job | None,
    map: ClusterMap | None,
    *,
    now: float,
    cluster: str,
    generation: int,
    uptime: float,
    settings: Settings,
    dead_after: float,
    lost: str,
    tables: Iterable[str],
) -> StatusReply:
    """Return the status; servers and workers in the order of their ranks, workers without a place last."""
    servers, workers, launchers = [], [], []
    members = {} if job is None else job.members
    for peer in peers:
        is_connected, heard = (
            bool(peer.route) and peer.disconnected_at is None,
            round(max(0.0, now - peer.last_heard), 3),
        )
        if isinstance(peer, ServerPeer) and peer.rank >= 0:
            endpoints = () if map is None else map.of_server(peer.rank)
            serves = tuple(
                EndpointStatus(one.address, tuple(map.run_ranges(one.id))) for one in endpoints if map is not None
            )
            servers.append(ServerStatus(peer.rank, peer.about, peer.host, serves, is_connected, heard))
        elif isinstance(peer, WorkerPeer):
            rank = peer.rank if members.get(peer.rank) is peer else None
            workers.append(WorkerStatus(rank, peer.about, peer.host, peer.incarnation, peer.clock, is_connected, heard))
        elif isinstance(peer, LauncherPeer):
            launchers.append(LauncherStatus(peer.about, peer.host, is_connected, heard))
    return StatusReply(
        cluster,
        generation,
        round(uptime, 3),
        settings.heartbeat,
        dead_after,
        0 if map is None else map.epoch,
        settings.slots,
        settings.servers,
        lost,
        tuple(tables),
        None if job is None else JobStatus(job.number, str(job.consistency), job.size, tuple(sorted(job.dead))),
        tuple(sorted(servers, key=lambda server: server.rank)),
        tuple(sorted(workers, key=lambda worker: (worker.rank is None, worker.rank or 0))),
        tuple(launchers),
    )
