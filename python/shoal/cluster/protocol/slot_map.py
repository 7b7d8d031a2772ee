"""The map: which endpoint serves which slots, and where copies of them are.

An endpoint is one data loop of a server: one socket, one thread. An arc is a range of slots that has its clocks and
windows with it and moves as one; arcs are fixed when the cluster forms. The endpoint that serves an arc is its primary.
An endpoint that holds a copy is a backup: a stream brings it the requests that the primary has accepted. The map lists
living endpoints only; its epoch grows whenever it changes.

    arcs        0 | 1 | 2 | 3 | 4 | 5 | 6 | 7        fixed ranges, in slot order
    primary     A   A   A   B   B   A   B   B
    runs        A         | B     | A | B            adjacent arcs of one endpoint: what a request is cut by

Threads: immutable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Annotated, NamedTuple

import msgspec

_MIN_ARCS_PER_ENDPOINT = 4
_MIN_ARCS = 8

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One data loop."""

    # Never used again, also not after its server has died.
    id: _Number
    # Address at which workers reach it: `tcp://host:port`.
    address: str
    # Rank of the server that it belongs to.
    server: _Number

    @property
    def label(self) -> str:
        """The endpoint in messages to users."""
        return f"server {self.server} at {self.address}"


class Arc(msgspec.Struct, frozen=True, array_like=True):
    """A range of slots that moves as one."""

    # first_slot, end_slot: Its slots: from the first up to, not including, the end.
    first_slot: _Number
    end_slot: _Number
    # Id of the endpoint that serves it.
    primary: _Number
    # Epoch at which its primary or its backups last changed.
    term: _Number


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """What a primary sends to one of its backups."""

    # Never used again.
    id: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    # primary, backup: Ids of two endpoints.
    primary: _Number
    backup: _Number
    # Indices of the arcs of which the backup has a copy in sync, ascending.
    arcs: tuple[_Number, ...]
    # Indices of the arcs that are being copied, ascending.
    arriving: tuple[_Number, ...] = ()


class Run(NamedTuple):
    """Adjacent arcs of one endpoint, which has ``siblings`` runs in all."""

    first_slot: int
    end_slot: int
    endpoint: Endpoint
    siblings: int


class ClusterMap(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All endpoints, arcs and streams.

    Examples
    --------
    >>> map = cut_evenly(1, 1024, [("tcp://10.0.0.1:5571", 0), ("tcp://10.0.0.2:5571", 1)])
    >>> map.slots, len(map.arcs), [(run.first_slot, run.endpoint.server) for run in map.runs]
    (1024, 8, [(0, 0), (512, 1)])
    """

    # At least 1; grows with every change.
    epoch: int
    # The living ones, by id.
    endpoints: tuple[Endpoint, ...]
    # In slot order: the first begins at slot 0, each other one where the one before it ends.
    arcs: tuple[Arc, ...]
    # At most one from an endpoint to another.
    streams: tuple[Stream, ...] = ()

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"a map's epoch is at least 1, got {self.epoch}")
        ids = [endpoint.id for endpoint in self.endpoints]
        if not _ascend(ids):
            raise ValueError(f"the endpoints of a map are in the order of their ids, each once, got {ids}")
        if len({endpoint.address for endpoint in self.endpoints}) < len(ids):
            raise ValueError("two endpoints of the map have the same address")
        if not self.arcs:
            raise ValueError("a map needs at least one arc")
        at = 0
        for arc in self.arcs:
            if arc.first_slot != at or arc.end_slot <= at:
                raise ValueError(
                    f"an arc has slots {arc.first_slot} to {arc.end_slot}, and the ones before it end at {at}"
                )
            if arc.primary not in self._by_id:
                raise ValueError(f"slots {arc.first_slot} to {arc.end_slot} have no endpoint with id {arc.primary}")
            at = arc.end_slot
        self._check_streams()

    def _check_streams(self) -> None:
        for stream in self.streams:
            ends = {stream.primary, stream.backup}
            if len(ends) < 2 or not ends <= self._by_id.keys():
                raise ValueError(f"stream {stream.id} is from endpoint {stream.primary} to endpoint {stream.backup}")
            if not (_ascend(stream.arcs) and _ascend(stream.arriving)) or set(stream.arcs) & set(stream.arriving):
                raise ValueError(f"stream {stream.id} has arcs {stream.arcs}, and {stream.arriving} arriving")
            for arc in (*stream.arcs, *stream.arriving):
                if arc >= len(self.arcs) or self.arcs[arc].primary != stream.primary:
                    raise ValueError(f"stream {stream.id} has arc {arc}, which endpoint {stream.primary} does not have")
        for names in ({stream.id for stream in self.streams}, {(one.primary, one.backup) for one in self.streams}):
            if len(names) < len(self.streams):
                raise ValueError("two streams of the map have the same id, or the same endpoints")

    @cached_property
    def _by_id(self) -> dict[int, Endpoint]:
        return {endpoint.id: endpoint for endpoint in self.endpoints}

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.arcs[-1].end_slot

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len({endpoint.server for endpoint in self.endpoints})

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs of adjacent arcs with the same primary, in slot order."""
        found = []
        for id, group in groupby(self.arcs, key=lambda arc: arc.primary):
            arcs = list(group)
            found.append((arcs[0].first_slot, arcs[-1].end_slot, id))
        siblings = Counter(id for _, _, id in found)
        return tuple(Run(first, end, self._by_id[id], siblings[id]) for first, end, id in found)

    @cached_property
    def owners(self) -> tuple[Endpoint, ...]:
        """The endpoints that serve slots, in the order of the first slot of each."""
        return tuple(dict.fromkeys(run.endpoint for run in self.runs))

    def endpoint(self, id: int) -> Endpoint:
        """Return an endpoint."""
        return self._by_id[id]

    def of_server(self, server: int) -> tuple[Endpoint, ...]:
        """Return the endpoints of a server, by id."""
        return tuple(endpoint for endpoint in self.endpoints if endpoint.server == server)

    def arc_ranges(self, id: int) -> list[tuple[int, int]]:
        """Return the slots of each arc that an endpoint serves: first and end, in slot order."""
        return [(arc.first_slot, arc.end_slot) for arc in self.arcs if arc.primary == id]

    def run_ranges(self, id: int) -> list[tuple[int, int]]:
        """Return the slots that an endpoint serves: first and end of each run, in slot order."""
        return [(run.first_slot, run.end_slot) for run in self.runs if run.endpoint.id == id]


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def cut_evenly(epoch: int, slots: int, loops: Sequence[tuple[str, int]]) -> ClusterMap:
    """Divide the slots evenly among endpoints, in the order of ``loops``, which is that of their ids, from 0 up.

    Each endpoint gets one run of slots, which is cut evenly into a power of two of arcs: at least 4, and at least 8 in
    all, where there are that many slots.
    """
    count = len(loops)
    if count > slots:
        raise ValueError(f"{slots} slots do not reach for {count} endpoints: use fewer threads or servers")
    each = 1
    while (each < _MIN_ARCS_PER_ENDPOINT or each * count < _MIN_ARCS) and 2 * each * count <= slots:
        each *= 2
    edges = [k * slots // (each * count) for k in range(each * count + 1)]
    return ClusterMap(
        epoch,
        tuple(Endpoint(id, address, server) for id, (address, server) in enumerate(loops)),
        tuple(Arc(first, end, k // each, epoch) for k, (first, end) in enumerate(pairwise(edges))),
    )
