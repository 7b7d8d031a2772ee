"""Maps of slots for tests, written as ranges."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.protocol.slot_map import Arc, ClusterMap, Endpoint, Stream


def map_of(epoch: int, *ranges: tuple[int, int, str, int], backups: Sequence[tuple[str, str]] = ()) -> ClusterMap:
    """Return the map with an arc for each (first slot, end slot, address, server); an endpoint may have several.

    ``backups`` are (primary, backup) of all arcs of the primary; an address that has no arc is of server 99.
    """
    addresses = {address: server for _, _, address, server in ranges}
    addresses |= {backup: 99 for _, backup in backups if backup not in addresses}
    ids = {address: id for id, address in enumerate(addresses)}
    return ClusterMap(
        epoch,
        tuple(Endpoint(ids[address], address, server) for address, server in addresses.items()),
        tuple(Arc(first, end, ids[address], epoch) for first, end, address, _ in ranges),
        tuple(
            Stream(k + 1, ids[primary], ids[backup], tuple(n for n, one in enumerate(ranges) if one[2] == primary))
            for k, (primary, backup) in enumerate(backups)
        ),
    )
