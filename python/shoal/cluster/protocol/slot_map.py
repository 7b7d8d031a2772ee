"""The map: which endpoint owns which slots.

An endpoint is one data loop of a server: one socket, one thread, one range of slots. The map lists the endpoints of all
servers in the order of their slots, without gap or overlap; its epoch grows whenever it changes.

Threads: immutable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

__all__ = ["ClusterMap", "Endpoint", "cut_evenly"]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One data loop.

    Parameters
    ----------
    first_slot, end_slot : int
        Its slots: from the first up to, not including, the end.
    address : str
        Address at which workers reach it: ``tcp://host:port``.
    server : int
        Rank of the server that it belongs to.
    """

    first_slot: int
    end_slot: int
    address: str
    server: int

    @property
    def label(self) -> str:
        """The endpoint in messages to users."""
        return f"server {self.server} at {self.address}"


class ClusterMap(msgspec.Struct, frozen=True, array_like=True):
    """All endpoints.

    Parameters
    ----------
    epoch : int
        At least 1; grows with every change.
    endpoints : tuple of Endpoint
        In the order of their slots: the first begins at slot 0, each other one where the one before it ends.

    Raises
    ------
    ValueError
        A slot has no owner, or two.

    Examples
    --------
    >>> where = cut_evenly(1, 1024, [("tcp://10.0.0.1:5571", 0), ("tcp://10.0.0.2:5571", 1)])
    >>> where.slots, where.of_slot(511).server, where.of_slot(512).server
    (1024, 0, 1)
    """

    epoch: int
    endpoints: tuple[Endpoint, ...]

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"a map's epoch is at least 1, got {self.epoch}")
        if not self.endpoints:
            raise ValueError("a map needs at least one endpoint")
        at = 0
        for endpoint in self.endpoints:
            if endpoint.first_slot != at or endpoint.end_slot <= at:
                raise ValueError(
                    f"endpoint {endpoint.address} has slots {endpoint.first_slot} to {endpoint.end_slot}, "
                    f"and the ones before it end at {at}"
                )
            at = endpoint.end_slot

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.endpoints[-1].end_slot

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len({endpoint.server for endpoint in self.endpoints})

    def of_slot(self, slot: int) -> Endpoint:
        """Return the owner of a slot.

        Raises
        ------
        IndexError
            There is no such slot.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return self.endpoints[bisect_right(self.endpoints, slot, key=lambda endpoint: endpoint.first_slot) - 1]

    def of_server(self, server: int) -> tuple[Endpoint, ...]:
        """Return the endpoints of a server, in the order of their slots."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.server == server)


def cut_evenly(epoch: int, slots: int, loops: Sequence[tuple[str, int]]) -> ClusterMap:
    """Divide the slots evenly among endpoints, in the order of ``loops``.

    Parameters
    ----------
    epoch : int
    slots : int
        At least as many as endpoints.
    loops : sequence of (address, server)
    """
    count = len(loops)
    if count > slots:
        raise ValueError(f"{slots} slots do not reach for {count} endpoints: use fewer threads or servers")
    return ClusterMap(
        epoch,
        tuple(
            Endpoint(k * slots // count, (k + 1) * slots // count, address, server)
            for k, (address, server) in enumerate(loops)
        ),
    )
