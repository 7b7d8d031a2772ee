"""Maps of slots for tests, written as ranges."""

from __future__ import annotations

from shoal.cluster.protocol.slot_map import Arc, ClusterMap, Endpoint


def map_of(epoch: int, *ranges: tuple[int, int, str, int]) -> ClusterMap:
    """Return the map with an arc for each (first slot, end slot, address, server); an endpoint may have several."""
    addresses = {address: server for _, _, address, server in ranges}
    ids = {address: id for id, address in enumerate(addresses)}
    return ClusterMap(
        epoch,
        tuple(Endpoint(ids[address], address, server) for address, server in addresses.items()),
        tuple(Arc(first, end, ids[address], epoch) for first, end, address, _ in ranges),
    )
