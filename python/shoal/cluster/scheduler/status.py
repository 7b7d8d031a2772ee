"""The status of the cluster, made from what :class:`.Membership` keeps. Threads: a function of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from shoal.cluster.protocol.messages import ArcLoad, Heartbeat, StreamProgress
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import (
    MAX_FITS,
    ArcStatus,
    AwaitedStatus,
    EndpointStatus,
    FailoverStatus,
    FitStatus,
    JobStatus,
    LauncherStatus,
    ServerStatus,
    StatusReply,
    StreamStatus,
    WorkerStatus,
    running_first,
)
from shoal.cluster.scheduler.state import Failover, Job, LauncherPeer, ServerPeer, State, WorkerPeer


def status_of(state: State, *, uptime: float) -> StatusReply:
    """Return the status; servers and workers in the order of their ranks, workers without a place last.

    Arcs are where the published map has them, with those of their copies that the newest map has too: after a death the
    published one is of the past until the servers have carried out the newest.
    """
    map, now, settings = state.published, state.now, state.settings
    servers, workers, launchers = [], [], []
    jobs = [line.job for line in state.jobs.values()]  # the first is the default job
    members = {sender for job in jobs if job is not None for sender in job.members.values()}
    for peer in state.peers.values():
        link = peer.link
        is_connected = bool(link.route) and link.disconnected_at is None
        heard = round(max(0.0, now - link.last_heard), 3)
        if isinstance(peer, ServerPeer) and peer.rank >= 0:
            endpoints = () if map is None else map.of_server(peer.rank)
            serves = tuple(
                EndpointStatus(one.address, tuple(map.run_ranges(one.id))) for one in endpoints if map is not None
            )
            servers.append(ServerStatus(peer.rank, peer.about, peer.host, serves, is_connected, heard, peer.node))
        elif isinstance(peer, WorkerPeer):
            rank = peer.rank if peer.sender in members else None
            clock = 0 if link.heartbeat is None else link.heartbeat.clock
            seen = (peer.incarnation, clock, is_connected, heard, peer.job)
            workers.append(WorkerStatus(rank, peer.about, peer.host, *seen))
        elif isinstance(peer, LauncherPeer):
            launchers.append(LauncherStatus(peer.about, peer.host, is_connected, heard))
    beats = {
        peer.rank: peer.link.heartbeat
        for peer in state.peers.values()
        if isinstance(peer, ServerPeer) and peer.link.heartbeat is not None
    }
    return StatusReply(
        state.cluster,
        state.generation,
        round(uptime, 3),
        settings.heartbeat,
        state.dead_after,
        0 if map is None else map.epoch,
        settings.slots,
        settings.servers,
        state.broken,
        tuple(state.tables),
        None if jobs[0] is None else _job(jobs[0], now),
        tuple(sorted(servers, key=lambda server: server.rank)),
        tuple(sorted(workers, key=lambda worker: (worker.job, worker.rank is None, worker.rank or 0))),
        tuple(launchers),
        settings.replicas,
        tuple(sorted(state.draining)),
        () if map is None or state.newest is None else tuple(_arcs(map, state.newest, beats)),
        () if map is None else tuple(_streams(map, beats)),
        tuple(_failover(one, now) for one in state.failovers),
        tuple(_job(job, now) for job in jobs[1:] if job is not None),
        state.jobs[""].outcome,
        _fits(map, beats, {job.number for job in jobs if job is not None}),
    )


def label_of(worker: WorkerStatus) -> str:
    """Return the rank of a worker in its job, with the job's name in front unless it is the default job."""
    return f"{worker.job}/{worker.rank}" if worker.job else str(worker.rank)


def metrics_of_fits(fits: Iterable[FitStatus]) -> dict[str, dict[str, float]]:
    """Return the metrics of fits, by name and model."""
    found: dict[str, dict[str, float]] = {}
    for fit in fits:
        found.setdefault("fit_pass", {})[fit.name] = fit.pass_number
        found.setdefault("fit_passes", {})[fit.name] = fit.passes
        for number, model in enumerate(fit.models):
            label = f"{fit.name}/{number}" if fit.num_models > 1 else fit.name
            for name in ("examples", "loss", "auc", "accuracy"):
                value = getattr(model, name)
                if value is not None:
                    found.setdefault(f"fit_{name}", {})[label] = value
    return found


def _job(job: Job, now: float) -> JobStatus:
    awaited = tuple(
        AwaitedStatus(rank, one.about, round(max(0.0, one.until - now), 3)) for rank, one in sorted(job.vacant.items())
    )
    return JobStatus(job.number, str(job.consistency), job.size, tuple(sorted(job.dead)), awaited, job.name)


def _arcs(map: ClusterMap, newest: ClusterMap, beats: Mapping[int, Heartbeat]) -> Iterator[ArcStatus]:
    loads = {(rank, one.first_slot): one for rank, beat in beats.items() for one in beat.arcs}
    held, kept = _holders(map), _holders(newest)
    for k, arc in enumerate(map.arcs):
        where = map.endpoint(arc.primary)
        left = held[k] & kept[k]
        server = arc.primary if arc.primary in left else newest.arcs[k].primary  # one that has died serves no more
        copies = tuple(sorted(map.endpoint(id).server for id in left - {server}))
        load = loads.get((where.server, arc.first_slot)) or ArcLoad(arc.first_slot, 0, 0, 0)
        yield ArcStatus(
            arc.first_slot,
            arc.end_slot,
            where.server,
            where.address,
            arc.term,
            copies,
            load.rows,
            load.bytes,
            load.load,
        )


def _holders(map: ClusterMap) -> list[set[int]]:
    """Return the endpoints that have each arc, or a copy of it in sync."""
    found = [{arc.primary} for arc in map.arcs]
    for stream in map.streams:
        for k in stream.arcs:
            found[k].add(stream.backup)
    return found


def _fits(map: ClusterMap | None, beats: Mapping[int, Heartbeat], jobs: set[int]) -> tuple[FitStatus, ...]:
    """Return the fits: their rows are in the first slot, whose server knows best while that moves."""
    server = -1 if map is None else map.endpoint(map.arcs[0].primary).server
    found: dict[str, FitStatus] = {}
    for rank in sorted(beats, key=lambda rank: rank == server):
        figures = beats[rank].figures
        for fit in () if figures is None else figures.fits:
            has_stopped = fit.state == "running" and fit.job not in jobs
            found[fit.name] = replace(fit, state="stopped") if has_stopped else fit
    return running_first(found.values())[:MAX_FITS]


def _streams(map: ClusterMap, beats: Mapping[int, Heartbeat]) -> Iterator[StreamStatus]:
    progress = {one.stream: one for beat in beats.values() for one in beat.streams}
    for stream in map.streams:
        known = progress.get(stream.id) or StreamProgress(stream.id, 0, 0)
        arriving = tuple((map.arcs[arc].first_slot, map.arcs[arc].end_slot) for arc in stream.arriving)
        yield StreamStatus(
            map.endpoint(stream.primary).address,
            map.endpoint(stream.backup).address,
            len(stream.arcs),
            known.lag_records,
            known.lag_bytes,
            arriving,
            known.copied_bytes if arriving else 0,
            known.total_bytes if arriving else 0,
        )


def _failover(one: Failover, now: float) -> FailoverStatus:
    served, copied = (None if at is None else round(at - one.at, 3) for at in (one.served_at, one.copied_at))
    ago = round(max(0.0, now - one.at), 3)
    return FailoverStatus(one.server, one.about, one.why, one.slots, ago, served, round(one.silent, 3), copied)
