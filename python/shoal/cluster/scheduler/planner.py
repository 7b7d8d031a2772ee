"""Planning: where arcs and their copies should be, and the next map after a death, an arrived copy, a join or a drain.

Everything here is a function of its arguments. A change of the map is made on a `Layout`, its mutable form.

`plan` makes what is possible at once, and begins copies for the rest. One map moves arcs from one server to one other
and opens no other stream, which could carry nothing before all have the map:

    serve elsewhere  an arc of a draining server moves to an endpoint that has a copy of it; for a rebalance, from the
                     endpoint with the most to the one with the least: arcs, or the sum of their weights
    drop             copies beyond `replicas`: those on draining servers first, then those that share a node with
                     another copy, then those of endpoints with many copies
    copy             to the endpoint of another server that has the fewest arcs and copies, on another node if there is
                     one: one arc at a time for each primary. First what lacks a backup, or has two copies on one node
                     although another node has none; then what has to move

Threads: functions of their arguments; a layout is for one thread.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.cluster.protocol.slot_map import Arc, ClusterMap, Endpoint, Stream

_NO_STAMPS: Mapping[tuple[int, int], int] = {}


class Wishes(NamedTuple):
    """The goals of the plan."""

    # Copies of each arc in addition to the one that serves it.
    replicas: int
    # Ranks of servers that shall have none.
    draining: Collection[int] = ()
    # Whether the endpoints shall serve equal weights.
    balance: bool = False
    # Primary and backup between which no stream shall be opened at present.
    avoid: Collection[tuple[int, int]] = ()
    # Of each arc; empty: all weigh 1.
    weights: Sequence[int] = ()
    # How many copies of arcs that have to move may be begun at once.
    most_moves: int = sys.maxsize


class Layout:
    """The map in a form that can be changed."""

    def __init__(self, map: ClusterMap, draw: Callable[[], int], nodes: Mapping[int, str]) -> None:
        self._map = map
        self._draw = draw
        self._nodes = nodes
        self._streams = {(stream.primary, stream.backup): stream.id for stream in map.streams}
        # By id.
        self.endpoints: dict[int, Endpoint] = {endpoint.id: endpoint for endpoint in map.endpoints}
        # Of each arc, the endpoint that serves it.
        self.primaries = [arc.primary for arc in map.arcs]
        # Of each arc, the endpoints that have a copy in sync.
        self.copies: list[set[int]] = [set() for _ in map.arcs]
        # Of each arc, the endpoints to which it is being copied.
        self.arriving: list[set[int]] = [set() for _ in map.arcs]
        # Copies that were begun because an arc has to move.
        self.moves_begun = 0
        for stream in map.streams:
            for arc in stream.arcs:
                self.copies[arc].add(stream.backup)
            for arc in stream.arriving:
                self.arriving[arc].add(stream.backup)

    def server(self, id: int) -> int:
        """Return the rank of an endpoint's server."""
        return self.endpoints[id].server

    def node(self, id: int) -> str:
        """Return the node of an endpoint's server."""
        return self._nodes.get(self.server(id), "")

    def served(self, id: int) -> int:
        """Return how many arcs an endpoint serves."""
        return self.primaries.count(id)

    def load(self, id: int) -> int:
        """Return how many arcs and copies an endpoint has, or will have."""
        held = zip(self.copies, self.arriving, strict=True)
        return self.served(id) + sum((id in copies) + (id in arriving) for copies, arriving in held)

    def is_free(self, id: int) -> bool:
        """Whether an endpoint has no arcs, copies and streams."""
        return not self.load(id) and not any(id in pair for pair in self._streams)

    def has_stream(self, primary: int, backup: int) -> bool:
        """Whether there is a stream between two endpoints."""
        return (primary, backup) in self._streams

    def is_copying(self, primary: int) -> bool:
        """Whether an arc of an endpoint is being copied."""
        return any(self.arriving[arc] for arc, own in enumerate(self.primaries) if own == primary)

    def close(self, primary: int, backup: int) -> None:
        """Close a stream: another one between the same endpoints has another id."""
        self._streams.pop((primary, backup), None)
        for arc, own in enumerate(self.primaries):
            if own == primary:
                self.copies[arc].discard(backup)
                self.arriving[arc].discard(backup)

    def tidy(self) -> bool:
        """Close the streams that have had no arcs in the map already; returns whether there are any.

        One that loses its last arc stays in the next map: its primary has to commit what it has sent.
        """
        empty = {(one.primary, one.backup) for one in self._map.streams if not one.arcs and not one.arriving}
        pairs = zip(self.primaries, self.copies, self.arriving, strict=True)
        used = {(primary, backup) for primary, copies, arriving in pairs for backup in copies | arriving}
        spare = empty & self._streams.keys() - used
        for pair in spare:
            del self._streams[pair]
        return bool(spare)

    def arrive(self, arc: int, backup: int) -> None:
        """Count a copy as being in sync."""
        self.arriving[arc].remove(backup)
        self.copies[arc].add(backup)

    def move(self, arc: int, target: int, replicas: int) -> None:
        """Serve an arc from an endpoint that has a copy; the one that gives it keeps a copy if one would be missing."""
        giver, own = self.primaries[arc], self.server(target)
        others = {id for id in self.copies[arc] if self.server(id) != own}  # those of one server are lost together
        if len(others) < replicas and self.server(giver) != own:
            others.add(giver)
        self.primaries[arc], self.copies[arc], self.arriving[arc] = target, others, set()

    def holders(self, arc: int, gone: Collection[int]) -> set[int]:
        """Return the endpoints that have an arc or a copy of it in sync, without those that have died."""
        return {self.primaries[arc], *self.copies[arc]} - set(gone)

    def remove_endpoints(
        self, gone: Collection[int], unsure: Collection[int], stamps: Mapping[tuple[int, int], int] = _NO_STAMPS
    ) -> list[int]:
        """Remove endpoints that have died, and serve their arcs from copies."""
        lost = []
        for id in gone:
            self.endpoints.pop(id, None)
        for pair in [pair for pair in self._streams if pair[0] in gone or pair[1] in gone]:
            del self._streams[pair]
        for arc, primary in enumerate(self.primaries):
            left = self.holders(arc, gone)
            self.copies[arc] -= set(gone)
            self.arriving[arc] -= set(gone)
            if primary not in gone and arc not in unsure:
                continue
            if not left:
                lost.append(arc)
                continue
            first = self._map.arcs[arc].first_slot
            known = {id: stamps[id, first] for id in left if (id, first) in stamps}
            most = max(known.values(), default=0)
            ready = {id for id, stamp in known.items() if stamp == most} or left
            if primary not in ready:
                self.primaries[arc] = min(ready, key=lambda id: (self.served(id), id))
            # What the dead one sent last may have reached some copies and not others.
            self.copies[arc], self.arriving[arc] = self._apart(self.primaries[arc], known), set()
        return lost

    def _apart(self, primary: int, copies: Iterable[int]) -> set[int]:
        """Return one copy for each server other than the primary's: those of one server are lost together."""
        by_server = {self.server(id): id for id in sorted(copies, reverse=True)}
        by_server.pop(self.server(primary), None)
        return set(by_server.values())

    def to_map(self, epoch: int, added: Iterable[Endpoint] = ()) -> ClusterMap:
        """Return the map."""
        pairs: dict[tuple[int, int], tuple[list[int], list[int]]] = {pair: ([], []) for pair in self._streams}
        arcs = []
        for k, before in enumerate(self._map.arcs):
            for backup in sorted(self.copies[k]):
                pairs.setdefault((self.primaries[k], backup), ([], []))[0].append(k)
            for backup in sorted(self.arriving[k]):
                pairs.setdefault((self.primaries[k], backup), ([], []))[1].append(k)
            arcs.append((before, self.primaries[k]))
        held_before: list[set[int]] = [set() for _ in arcs]
        for stream in self._map.streams:
            for k in stream.arcs:
                held_before[k].add(stream.backup)
        streams = []
        for primary, backup in sorted(pairs):
            in_sync, arriving = pairs[primary, backup]
            id = self._streams.get((primary, backup)) or self._draw()
            streams.append(Stream(id, primary, backup, tuple(in_sync), tuple(arriving)))
        return ClusterMap(
            epoch,
            tuple(sorted([*self.endpoints.values(), *added], key=lambda one: one.id)),
            tuple(
                Arc(
                    arc.first_slot,
                    arc.end_slot,
                    primary,
                    arc.term if (primary, self.copies[k]) == (arc.primary, held_before[k]) else epoch,
                )
                for k, (arc, primary) in enumerate(arcs)
            ),
            tuple(streams),
        )


def plan(layout: Layout, wishes: Wishes, *, may_move: bool) -> bool:
    """Change a layout toward the goals."""
    planner = _Planner(layout, wishes)
    if may_move and planner.move():
        return True
    changed = planner.drop()
    return planner.copy() or changed


def find_uneven(layout: Layout, wishes: Wishes) -> tuple[int, int, list[int]] | None:
    """Return two endpoints between which a move would make them more even, and the arcs that it may move, best first.

    A move that makes the more loaded one of the two lighter by less than 2 % of an endpoint's mean is not worth a copy.
    """
    if not wishes.balance:
        return None
    weights = wishes.weights or [1] * len(layout.primaries)
    own: dict[int, list[int]] = {
        id: [] for id, endpoint in layout.endpoints.items() if endpoint.server not in wishes.draining
    }
    for arc, primary in enumerate(layout.primaries):
        if primary in own:
            own[primary].append(arc)
    sums = {id: sum(weights[arc] for arc in arcs) for id, arcs in own.items()}
    least = sum(weights) / len(own) / 50 if wishes.weights else 0
    pairs = [
        (sums[taker] - sums[giver], giver, taker)
        for giver in own
        for taker in own
        if sums[giver] > sums[taker] and layout.server(giver) != layout.server(taker)
    ]
    for difference, giver, taker in sorted(pairs):
        gains = {arc: min(weights[arc], -difference - weights[arc]) for arc in own[giver]}
        arcs = [arc for arc in own[giver] if gains[arc] > least]
        if arcs:
            return giver, taker, sorted(arcs, key=lambda arc: (-gains[arc], arc))
    return None


class _Planner:
    def __init__(self, layout: Layout, wishes: Wishes) -> None:
        self._layout = layout
        self._wishes = wishes
        self._staying = sorted(
            id for id, endpoint in layout.endpoints.items() if endpoint.server not in wishes.draining
        )

    def _is_draining(self, id: int) -> bool:
        return self._layout.server(id) in self._wishes.draining

    def move(self) -> bool:
        """Serve from elsewhere what has a copy there already."""
        its, wishes = self._layout, self._wishes
        ranks = None  # of the giver and the taker
        for arc, primary in enumerate(its.primaries):
            ready = [id for id in its.copies[arc] if not self._is_draining(id)]
            if self._is_draining(primary) and ready:
                target = min(ready, key=lambda id: (its.served(id), id))
                if ranks in (None, found := (its.server(primary), its.server(target))):
                    ranks = found
                    its.move(arc, target, wishes.replicas)
        while (uneven := self._uneven()) is not None and ranks in (
            None,
            found := (its.server(uneven[0]), its.server(uneven[1])),
        ):
            _, taker, arcs = uneven
            ready = [arc for arc in arcs if taker in its.copies[arc]]
            if not ready:
                break
            ranks = found
            its.move(ready[0], taker, wishes.replicas)
        return ranks is not None

    def _uneven(self) -> tuple[int, int, list[int]] | None:
        return find_uneven(self._layout, self._wishes)

    def drop(self) -> bool:
        """Drop the copies that are not needed."""
        its, replicas, changed = self._layout, self._wishes.replicas, False
        for arc, copies in enumerate(its.copies):
            staying = [id for id in copies if not self._is_draining(id)]
            spare = [id for id in copies if self._is_draining(id)] if len(staying) >= replicas else []
            for id in spare:
                copies.discard(id)
                changed = True
            if self._uneven() is not None or self._is_draining(its.primaries[arc]):
                continue
            while len(copies) > replicas:
                copies.discard(self._least_needed(arc))
                changed = True
        return changed

    def _least_needed(self, arc: int) -> int:
        """Return the copy of an arc to drop: on a draining server, or one that shares a server or a node with another.

        Among equals, that of the endpoint with most to do.
        """
        its = self._layout
        holders = [its.primaries[arc], *its.copies[arc]]
        nodes, servers = Counter(map(its.node, holders)), Counter(map(its.server, holders))

        def need(id: int) -> tuple[bool, bool, bool, int, int]:
            is_apart = servers[its.server(id)] == 1
            return not self._is_draining(id), is_apart, nodes[its.node(id)] == 1, -its.load(id), id

        return min(its.copies[arc], key=need)

    def copy(self) -> bool:
        """Begin copies: one for each primary."""
        its, changed = self._layout, False
        uneven = self._uneven()
        for primary in sorted(set(its.primaries)):
            if its.is_copying(primary):
                continue
            arcs = [arc for arc, own in enumerate(its.primaries) if own == primary]
            target = self._backup_for(arcs)
            if target is None and its.moves_begun < self._wishes.most_moves:
                target = self._elsewhere_for(primary, arcs, uneven)
                its.moves_begun += target is not None
            if target is not None:
                arc, backup = target
                its.arriving[arc].add(backup)
                changed = True
        return changed

    def _backup_for(self, arcs: Collection[int]) -> tuple[int, int] | None:
        """Return an arc that lacks a backup, or one on another node, and where to copy it."""
        return next(filter(None, map(self._missing_for, arcs)), None) or next(
            filter(None, map(self._spread_for, arcs)), None
        )

    def _missing_for(self, arc: int) -> tuple[int, int] | None:
        its = self._layout
        # On a draining server, the copy from which the arc will be served is one more.
        servers = {its.server(id) for id in its.copies[arc] if not self._is_draining(id)}
        if len(servers - {its.server(its.primaries[arc])}) >= self._wishes.replicas:
            return None
        return self._best_of(arc, self._free_for(arc))

    def _spread_for(self, arc: int) -> tuple[int, int] | None:
        nodes = self._nodes_of(arc)
        if len(nodes) > self._wishes.replicas or self._is_draining(self._layout.primaries[arc]):
            return None
        return self._best_of(arc, [id for id in self._free_for(arc) if self._layout.node(id) not in nodes])

    def _free_for(self, arc: int) -> list[int]:
        """Return the endpoints to which an arc may be copied."""
        its = self._layout
        primary = its.primaries[arc]
        taken = {its.server(id) for id in its.copies[arc] if not self._is_draining(id)} | {its.server(primary)}
        return [id for id in self._staying if its.server(id) not in taken and not self._avoids(primary, id)]

    def _best_of(self, arc: int, free: Collection[int]) -> tuple[int, int] | None:
        its = self._layout
        primary, nodes = its.primaries[arc], self._nodes_of(arc)
        ranked = ((its.node(id) in nodes, not its.has_stream(primary, id), its.load(id), id) for id in free)
        return (arc, min(ranked)[-1]) if free else None

    def _nodes_of(self, arc: int) -> set[str]:
        """Return the nodes that have an arc, apart from servers that are drained."""
        ids = [self._layout.primaries[arc], *self._layout.copies[arc]]
        return {self._layout.node(id) for id in ids if not self._is_draining(id)}

    def _elsewhere_for(
        self, primary: int, arcs: list[int], uneven: tuple[int, int, list[int]] | None
    ) -> tuple[int, int] | None:
        """Return an arc that has to move, and where to copy it first."""
        its = self._layout
        if self._is_draining(primary):
            targets = [id for id in self._staying if not self._avoids(primary, id)]
            for arc in arcs:
                if targets and not any(not self._is_draining(id) for id in its.copies[arc]):
                    return arc, min(targets, key=lambda id: (its.served(id), its.load(id), id))
        elif uneven is not None and uneven[0] == primary and not self._avoids(primary, uneven[1]):
            taker = uneven[1]
            free = [arc for arc in uneven[2] if taker not in its.copies[arc]]
            # Two copies on one server, or on one node, are lost together.
            apart = [arc for arc in free if its.server(taker) not in {its.server(id) for id in its.copies[arc]}]
            spread = [arc for arc in apart if its.node(taker) not in {its.node(id) for id in its.copies[arc]}]
            return ((spread or apart or free)[0], taker) if free else None
        return None

    def _avoids(self, primary: int, backup: int) -> bool:
        return (primary, backup) in self._wishes.avoid


def describe_slots(map: ClusterMap, arcs: Iterable[int]) -> str:
    """Return the slots of arcs for a message.

    Examples
    --------
    >>> from shoal.cluster.protocol.slot_map import cut_evenly
    >>> describe_slots(cut_evenly(1, 64, [("tcp://a:1", 0)]), [0, 1, 3])
    '0 to 15, 24 to 31'
    """
    ranges: list[list[int]] = []
    for arc in sorted(arcs):
        one = map.arcs[arc]
        if ranges and ranges[-1][1] == one.first_slot:
            ranges[-1][1] = one.end_slot
        else:
            ranges.append([one.first_slot, one.end_slot])
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges)


def ring(map: ClusterMap, replicas: int, draw: Callable[[], int], nodes: Mapping[int, str]) -> ClusterMap:
    """Return a new map whose endpoints have backups at the same place of the next servers, all in sync: all are empty.

    The order of the servers takes one of each node in turn, and those of a node that has the arc already are passed
    over if there are others.
    """
    layout = Layout(map, draw, nodes)
    servers = _alternate({endpoint.server for endpoint in map.endpoints}, nodes)
    for arc, primary in enumerate(layout.primaries):
        own = map.endpoint(primary)
        place = map.of_server(own.server).index(own)
        at = servers.index(own.server)
        rest = servers[at + 1 :] + servers[:at]
        taken = {nodes[own.server]}
        for _ in range(replicas):
            server = next((one for one in rest if nodes[one] not in taken), rest[0])
            rest.remove(server)
            taken.add(nodes[server])
            others = map.of_server(server)
            layout.copies[arc].add(others[place % len(others)].id)
    return layout.to_map(map.epoch)


def _alternate(servers: Iterable[int], nodes: Mapping[int, str]) -> list[int]:
    """Return the servers in the order of their ranks, but one of each node before the second one of any."""
    earlier: Counter[str] = Counter()
    found = []
    for server in sorted(servers):
        found.append((earlier[nodes[server]], server))
        earlier[nodes[server]] += 1
    return [server for _, server in sorted(found)]


def owned(map: ClusterMap) -> Mapping[int, set[int]]:
    """Return the arcs that each server serves, by rank."""
    found: dict[int, set[int]] = {}
    for arc, one in enumerate(map.arcs):
        found.setdefault(map.endpoint(one.primary).server, set()).add(arc)
    return found
