"""Shared by the benchmarks of clusters with replicas: waits until all copies exist."""

import time

from shoal.cluster.protocol.curve import Keys
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import StatusReply

__all__ = ["get_status", "wait_for_copies"]

LIMIT_SECONDS = 60.0  # for the copies to be made


def get_status(address: str, keys: Keys | None = None) -> StatusReply:
    """Return the status of the cluster whose scheduler is at an address."""
    with SchedulerClient(address, "observer", keys=keys) as client:
        return client.status(timeout=LIMIT_SECONDS)


def wait_for_copies(
    address: str, servers: int, replicas: int, keys: Keys | None = None, limit: float = LIMIT_SECONDS
) -> float:
    """Wait until so many servers are members and each arc has its copies; return the seconds."""
    start = time.monotonic()
    while True:
        status = get_status(address, keys)
        missing = [arc.first_slot for arc in status.arcs if len(arc.copies) < replicas]
        if status.arcs and not missing and len(status.servers) == servers:
            return time.monotonic() - start
        if time.monotonic() - start > limit:
            raise SystemExit(
                f"after {limit:.0f} s {len(status.servers)} of {servers} servers are members, and "
                f"{len(missing)} of {len(status.arcs)} arcs have fewer than {replicas} copies: {status}"
            )
        time.sleep(0.05)
