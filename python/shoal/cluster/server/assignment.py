"""Execution of the scheduler's orders, and of its assignments of arcs and streams, on a server's endpoints.

An order is executed once on all endpoints. Its result is reported when every stream has acknowledged the records of it:
what the scheduler knows to be done survives the death of this server. An assignment is a map that the endpoints make
true (csrc/endpoint/endpoint.h); it is confirmed when all that was accepted for slots that have left is
acknowledged. Nothing waits here: what is under way is looked at by :meth:`ServerControl.poll`.

    order(..)   --> executed, at positions of the logs --> poll: committed --> OrderReply
    assign(..)  --> pending order on adopted copies --> Endpoint.assign --> poll: retired --> Assigned
                                                  streams' states --> poll --> ReportStream

Invariants
    S1  An order of a number is executed once; its result is reported when its records are committed.
    S2  A map that is older than the present one changes nothing. A map is confirmed as often as it arrives.
    S3  A pending order of a number is executed at most once on each copy, before its slots are served from there.
    S4  No copy is lost by an order or an assignment that fails: an order's error is its answer, and an assignment for
        which there was no memory is carried out when the scheduler sends it again.

Threads: one at a time, except for `unready` and `counters`. No socket; the time is an argument.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shoal import _core
from shoal.cluster.protocol.messages import (
    AddTable,
    Admit,
    ArcLoad,
    ArcStamp,
    Assign,
    Assigned,
    CloseStreams,
    Dismiss,
    DropTable,
    EndJob,
    ErrorReply,
    Fence,
    Figures,
    Hold,
    Order,
    OrderReply,
    ReportMetrics,
    ReportStream,
    StartJob,
    StreamProgress,
    StreamsClosed,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.records import OrderBody
from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint, Stream
from shoal.cluster.server.code import AllowedCode
from shoal.cluster.server.counters import ServerCounters
from shoal.errors import MemoryBudgetExceededError

_log = logging.getLogger("shoal.server")

_WRONG = (ValueError, TypeError, OverflowError)  # what the engine raises for invalid input of an order
_STALL_SECONDS = 1.0  # of silence of a backup
_STALL_CHECK_SECONDS = 0.3  # that the silence has to last while this process runs: it may have been stopped itself
# A backup executes what its primary has executed, and perhaps the same for slots of its own before.
_STALL_PATIENCE = 3.0  # times as long as this server was busy, or stopped,
_MAX_PATIENCE_SECONDS = 10.0
_BUSY_SECONDS = 0.01  # that a heartbeat waits for an endpoint that is executing a request
_REMEMBERED = 0.95  # of the load, from one heartbeat to the next
_LOAD = "a load"  # the fault of a stream whose endpoint loads rows

_NO_CODE = AllowedCode()

Controlled: TypeAlias = _core.Endpoint | _core.Replica


class Outcome(NamedTuple):
    """The result of an order: the maximum over all endpoints.

    ``refused`` is the refusal, if no endpoint has changed anything; ``tables`` are those that the last tick of a fenced
    worker named, and ``least`` is the least clock that it reached at an endpoint that has arcs.
    """

    result: int = 0
    refused: ErrorReply | None = None
    tables: tuple[int, ...] = ()
    least: int | None = None


def obey(endpoints: Sequence[Controlled], order: OrderBody, code: AllowedCode = _NO_CODE) -> Outcome:
    """Execute an order on all endpoints of a server, which may run the given code of users."""
    if isinstance(order, AddTable):
        return Outcome(refused=_add_table(endpoints, order, code))
    if isinstance(order, Fence):
        fenced = [
            (endpoint.fence(order.rank, order.incarnation, order.job), _serves(endpoint, order))
            for endpoint in endpoints
        ]
        clock, tables = max(last for last, _ in fenced)
        return Outcome(
            clock, tables=tuple(tables), least=min((last[0] for last, serves in fenced if serves), default=None)
        )
    if isinstance(order, StartJob):
        try:
            return Outcome(max(_obey(endpoint, order) for endpoint in endpoints))
        except _WRONG as error:  # harmless: the next job starts from its own settings
            return Outcome(refused=ErrorReply("input", str(error)))
    return Outcome(max(_obey(endpoint, order) for endpoint in endpoints))


def _serves(endpoint: Controlled, order: Fence) -> bool:
    """Whether an endpoint has arcs, and has admitted a worker."""
    if isinstance(endpoint, _core.Replica):
        return True
    metrics = endpoint.metrics()
    job = metrics["jobs"].get(order.job) if order.job else metrics
    return job is not None and order.rank in job["clocks"]


def _obey(endpoint: Controlled, order: OrderBody) -> int:
    if isinstance(order, StartJob):
        rules = order.rules
        endpoint.start_job(order.job, rules.mode, rules.waits, rules.mean, order.before, order.named)
        for rank, incarnation in enumerate(order.incarnations):
            endpoint.admit(rank, incarnation, 0, order.job if order.named else 0)
    elif isinstance(order, EndJob):
        endpoint.end_job(order.job)
    elif isinstance(order, Hold):
        return endpoint.hold(order.job)
    elif isinstance(order, Admit):
        endpoint.admit(order.rank, order.incarnation, order.clock, order.job)
    elif isinstance(order, Dismiss):
        return endpoint.dismiss(order.rank, order.incarnation, order.clock, order.tables, order.job)
    elif isinstance(order, DropTable) and order.id in endpoint.tables():
        endpoint.drop_table(order.id)
    return 0


def _add_table(endpoints: Sequence[Controlled], order: AddTable, code: AllowedCode) -> ErrorReply | None:
    if refusal := code.refusal(order.form):
        return ErrorReply("input", refusal)
    made = []
    try:
        spec = order.form.native()
        for endpoint in endpoints:  # copies that were promoted meanwhile may have the table: the others get it
            endpoint.add_table(order.id, spec)
            made.append(endpoint)
    except (MemoryBudgetExceededError, MemoryError, *_WRONG) as error:
        for endpoint in made:
            endpoint.drop_table(order.id)
        if isinstance(error, MemoryError):
            return ErrorReply("memory", "its machine has no memory left: make the table smaller, or start more servers")
        return ErrorReply("input" if isinstance(error, _WRONG) else "memory", str(error))
    return None


class _Ordered(NamedTuple):
    """The reply to an order, and the positions up to which the logs must be committed before it is sent."""

    reply: OrderReply
    positions: tuple[tuple[_core.Endpoint, int], ...]


class ServerControl:
    """Executes the scheduler's orders and assignments."""

    def __init__(
        self,
        endpoints: Mapping[str, _core.Endpoint],
        sender: bytes,
        server_key: str = "",
        code: AllowedCode = _NO_CODE,
    ) -> None:
        self._code = code
        self._endpoints = dict(endpoints)
        self.table_names: dict[int, str] = {}  # by number
        self._counters = ServerCounters(endpoints, lambda: dict(self.table_names))
        self._sender = sender
        self._server_key = server_key
        self._map: ClusterMap | None = None
        self._ordered: _Ordered | None = None
        self._pending: dict[int, Outcome] = {}  # of the latest pending order, by its number
        self._caught_up = 0  # the epoch of the newest map whose pending order was executed
        self._unconfirmed = False  # the newest map
        self._fault = ""  # of the assignment of this epoch
        self._faulty_epoch = 0
        self._outcome: OrderReply | None = None
        self._reported: set[tuple[int, int, str]] = set()  # stream, arc and state
        self._silent_since: dict[int, float] = {}  # by stream
        self._polled: float | None = None
        self._patient_until = -math.inf  # with silent backups
        # By address, as last reported; for the loads, by first slot, rows that were touched, and the load.
        self._loads: dict[str, tuple[ArcLoad, ...]] = {}
        self._used: dict[str, dict[int, tuple[int, float]]] = {}
        self._progress: dict[str, tuple[StreamProgress, ...]] = {}

    @property
    def map(self) -> ClusterMap | None:
        """The newest map; None before the first."""
        return self._map

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of this server in the newest map."""
        if self._map is None:
            return ()
        return self._own(self._map)

    def _own(self, map: ClusterMap) -> tuple[Endpoint, ...]:
        return tuple(endpoint for endpoint in map.endpoints if endpoint.address in self._endpoints)

    @property
    def is_drained(self) -> bool:
        """Whether the newest map is without this server, and that is confirmed: the process may end."""
        return self._map is not None and not self.endpoints and not self._unconfirmed

    @property
    def has_pending(self) -> bool:
        """Whether a reply or a confirmation waits for acknowledgements: :meth:`poll` should be called soon."""
        return self._ordered is not None or self._unconfirmed

    @property
    def has_streams(self) -> bool:
        """Whether this server sends streams, whose states :meth:`poll` reports."""
        return self._map is not None and any(_outgoing(self._map, endpoint.id) for endpoint in self.endpoints)

    @property
    def is_copying(self) -> bool:
        """Whether a stream of this server copies an arc, whose arrival :meth:`poll` reports."""
        return self._map is not None and any(
            stream.arriving for endpoint in self.endpoints for stream in _outgoing(self._map, endpoint.id)
        )

    def unready(self, replicas: int) -> list[str]:
        """Return why the server is not ready: no map is carried out, its slots lack copies, or copies are arriving."""
        map = self._map
        if map is None:
            return ["it has no map"]
        endpoints = {endpoint.id for endpoint in map.endpoints if endpoint.address in self._endpoints}
        reasons = [f"the map of epoch {map.epoch} is not carried out yet"] if self._unconfirmed else []
        copies = Counter(arc for stream in map.streams for arc in stream.arcs)
        lacking = sum(
            arc.end_slot - arc.first_slot
            for number, arc in enumerate(map.arcs)
            if arc.primary in endpoints and copies[number] < replicas
        )
        if lacking:
            reasons.append(f"{lacking} slots that it serves lack copies")
        arriving = [arc for stream in map.streams if stream.backup in endpoints for arc in stream.arriving]
        if arriving:
            slots = sum(map.arcs[arc].end_slot - map.arcs[arc].first_slot for arc in arriving)
            reasons.append(f"{slots} slots are being copied to it")
        return reasons

    def counters(self, loops: Iterable[_core.DataLoop] = ()) -> Values:
        """Return the metrics of all endpoints together, by name: see :class:`.ServerCounters`. From any thread."""
        return self._counters.read(loops)

    def figures(self, loops: Iterable[_core.DataLoop]) -> Figures:
        """Return what heartbeats report of all endpoints together. From one thread."""
        return self._counters.figures(loops)

    # --- orders -------------------------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Execute an order. Its reply follows from :meth:`poll`."""
        endpoints = list(self._endpoints.values())
        figures: tuple[dict[str, Any], ...] = ()
        try:
            outcome = obey(endpoints, order.body, self._code)
            if isinstance(order.body, AddTable):
                self.table_names[order.body.id] = order.body.form.name
            elif isinstance(order.body, DropTable):
                self.table_names.pop(order.body.id, None)
            if isinstance(order.body, ReportMetrics):
                figures = tuple(endpoint.metrics() | _replication_metrics(endpoint) for endpoint in endpoints)
        except Exception as error:  # any error: the cluster cannot continue with a server that misses an order
            _log.exception("order %d failed: %s", order.number, order.body)
            reply = OrderReply(self._sender, order.number, fault=f"{type(error).__name__}: {error}")
        else:
            reply = self._reply(order, outcome, figures)
        positions = () if figures else tuple((endpoint, endpoint.position()) for endpoint in endpoints)
        self._ordered = _Ordered(reply, positions)

    def _reply(self, order: Order, outcome: Outcome, figures: tuple[dict[str, Any], ...] = ()) -> OrderReply:
        return OrderReply(
            self._sender,
            order.number,
            result=outcome.result,
            figures=figures,
            refused=outcome.refused,
            tables=outcome.tables,
            least=outcome.least,
        )

    # --- assignments --------------------------------------------------------------------------------------------

    def close_streams(self, request: CloseStreams) -> StreamsClosed:
        """Take no more records of streams whose primaries have died; return how far the copies are."""
        for endpoint in self._endpoints.values():
            endpoint.close_incoming(request.streams)
        stamps = tuple(
            ArcStamp(endpoint.id, first_slot, stamp)
            for endpoint in self.endpoints
            for first_slot, stamp in self._endpoints[endpoint.address].stamps().items()
        )
        return StreamsClosed(self._sender, request.streams, stamps)

    def assign(self, assign: Assign) -> None:
        """Make the endpoints do what a map says. Its confirmation follows from :meth:`poll`."""
        if self._map is None or assign.map.epoch >= self._map.epoch:
            try:
                self._outcome = None if assign.pending is None else self._catch_up(assign.pending, assign.map)
                self.set_map(assign.map, assign.copy_rate)
            except MemoryError:
                _log.warning("no memory for the assignment of epoch %d, until it comes again", assign.map.epoch)
                return
            except Exception as error:  # any error: the scheduler must not wait for this server
                _log.exception("the assignment of epoch %d failed", assign.map.epoch)
                self._fault, self._faulty_epoch = f"{type(error).__name__}: {error}", assign.map.epoch
        self._unconfirmed = True

    def set_map(self, map: ClusterMap, copy_rate: int = 0) -> None:
        """Make the endpoints do what a map says, unless it is older than the present one."""
        if self._map is not None and map.epoch <= self._map.epoch:
            return
        numbers = {entry.address: entry.id for entry in self._own(map)}
        for address, endpoint in self._endpoints.items():
            number = numbers.get(address)
            if number is None:
                endpoint.assign(map.epoch, [])
                continue
            endpoint.assign(
                map.epoch,
                map.arc_ranges(number),
                [
                    (
                        stream.id,
                        map.endpoint(stream.backup).address,
                        self._server_key,
                        _ranges(map, stream.arcs),
                        _ranges(map, stream.arriving),
                    )
                    for stream in _outgoing(map, number)
                ],
                [(stream.id, _ranges(map, stream.arcs)) for stream in map.streams if stream.backup == number],
                copy_rate,
            )
        self._map = map  # now that all endpoints have carried it out
        arriving = {stream.id: {-1, *stream.arriving} for stream in map.streams}
        self._reported = {report for report in self._reported if report[1] in arriving.get(report[0], ())}
        self._silent_since = {id: since for id, since in self._silent_since.items() if id in arriving}
        self._counters.keep_streams({stream.id for number in numbers.values() for stream in _outgoing(map, number)})

    def _catch_up(self, order: Order, map: ClusterMap) -> OrderReply | None:
        """Execute the pending order on the copies that become primary here; return its outcome there.

        Other copies of these arcs receive it from here.
        """
        outcomes = [self._pending[order.number]] if order.number in self._pending else []
        if self._map is not None and self._caught_up < map.epoch:
            living = {endpoint.id for endpoint in map.endpoints}
            mine = {endpoint.id: endpoint.address for endpoint in self.endpoints}
            for stream in self._map.streams:
                arcs = [arc for arc in stream.arcs if map.arcs[arc].primary == stream.backup]
                if stream.backup in mine and stream.primary not in living and arcs:
                    replica = self._endpoints[mine[stream.backup]].replica(stream.id, _ranges(map, arcs))
                    outcomes.append(_obey_again(replica, order.body, self._code))
        self._caught_up = map.epoch
        if not outcomes:
            return None
        result, tables = max((outcome.result, outcome.tables) for outcome in outcomes)
        refused = next((outcome.refused for outcome in outcomes if outcome.refused is not None), None)
        least = min((outcome.least for outcome in outcomes if outcome.least is not None), default=None)
        self._pending = {order.number: Outcome(result, refused, tables, least)}
        return self._reply(order, self._pending[order.number])

    # --- what follows -------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[OrderReply | Assigned | ReportStream]:
        """Return what is to be sent to the scheduler: replies and confirmations, and requests, each once."""
        out: list[OrderReply | Assigned | ReportStream] = []
        if self._ordered is not None and all(endpoint.committed(at) for endpoint, at in self._ordered.positions):
            out.append(self._ordered.reply)
            self._ordered = None
        if self._unconfirmed and (self._fault or all(endpoint.retired() for endpoint in self._endpoints.values())):
            assert self._map is not None or self._fault
            epoch = self._faulty_epoch if self._map is None or self._fault else self._map.epoch
            out.append(Assigned(self._sender, epoch, self._outcome, self._fault))
            self._unconfirmed = False
        gap = 0.0 if self._polled is None else now - self._polled
        if gap > _STALL_CHECK_SECONDS:  # this process did not run, or waited for an endpoint that was busy
            self._patient_until = now + min(_STALL_PATIENCE * gap, _MAX_PATIENCE_SECONDS)
            self._silent_since.clear()
        if self.has_streams:
            for report in self._reports(now):
                name = report.stream, report.arc, report.state
                if name not in self._reported:
                    self._reported.add(name)
                    out.append(report)
        self._polled = now
        return out

    def _reports(self, now: float) -> Iterable[ReportStream]:
        assert self._map is not None
        arcs = {(arc.first_slot, arc.end_slot): number for number, arc in enumerate(self._map.arcs)}
        streams = {stream.id: stream for stream in self._map.streams}
        for address, endpoint in self._endpoints.items():
            for state in endpoint.replication()["streams"]:
                id = state["stream"]
                if id not in streams:
                    continue
                self._counters.note_stream(id, now, state["sent"], state["acknowledged"])
                for arc in (arcs[range] for range in state["arrived"]):
                    if arc in streams[id].arriving:
                        yield ReportStream(id, arc, "arrived")
                if state["fault"]:
                    kind = "load" if state["fault"] == _LOAD else "diverged"
                    yield ReportStream(id, -1, kind, state["fault"])
                elif self._is_stalled(id, state, now):
                    backup = self._map.endpoint(streams[id].backup).address
                    text = f"{address} has received nothing from {backup} for {state['silent']:.1f} s"
                    yield ReportStream(id, -1, "stalled", text)

    def _is_stalled(self, stream: int, state: Mapping[str, Any], now: float) -> bool:
        if state["silent"] < _STALL_SECONDS:
            self._silent_since.pop(stream, None)
            self._reported.discard((stream, -1, "stalled"))
            return False
        lasts = now - self._silent_since.setdefault(stream, now) >= _STALL_CHECK_SECONDS
        return lasts and now >= self._patient_until

    def loads(self) -> tuple[ArcLoad, ...]:
        """Return what the arcs that this server serves have of rows, and how much they are used. Once per heartbeat.

        Of an endpoint that is executing a request, such as a function of all rows, it returns what it did before:
        a server that is busy is not dead.
        """
        for address, endpoint in self._endpoints.items():
            loads = endpoint.arc_loads(_BUSY_SECONDS)
            if loads is None:
                continue
            former = self._used.get(address, {})
            used = self._used[address] = {}
            found = []
            for first, _, rows, bytes_, touched in loads:
                before, load = former.get(first, (touched, 0.0))
                load = _REMEMBERED * load + max(0, touched - before)
                used[first] = touched, load
                found.append(ArcLoad(first, rows, bytes_, int(load)))
            self._loads[address] = tuple(found)
        return tuple(itertools.chain.from_iterable(self._loads.values()))

    def progress(self) -> tuple[StreamProgress, ...]:
        """Return how far the backups of this server's streams are behind. As :meth:`loads`."""
        if not self.has_streams:
            return ()
        for address, endpoint in self._endpoints.items():
            replication = endpoint.replication(_BUSY_SECONDS)
            if replication is None:
                continue
            found = []
            for state in replication["streams"]:
                copy = state["arriving"]
                found.append(
                    StreamProgress(
                        state["stream"],
                        state["sent"] - state["acknowledged"],
                        state["bytes"],
                        copy["bytes"] if copy else 0,
                        copy["total"] if copy else 0,
                    )
                )
            self._progress[address] = tuple(found)
        return tuple(itertools.chain.from_iterable(self._progress.values()))


def _obey_again(replica: _core.Replica, order: OrderBody, code: AllowedCode) -> Outcome:
    """Execute an order that the primary may have passed on before it died."""
    if isinstance(order, AddTable) and order.id in replica.tables():
        return Outcome()
    if isinstance(order, ReportMetrics):
        return Outcome()
    return obey([replica], order, code)


def _replication_metrics(endpoint: _core.Endpoint) -> dict[str, int]:
    """Return the counters of the streams of an endpoint."""
    now = endpoint.replication()
    return {
        "records": now["position"],
        "held_replies": now["held"],
        "unacknowledged_bytes": sum(stream["bytes"] for stream in now["streams"]),
        "streams": len(now["streams"]),
        "replicas": len(now["replicas"]),
    }


def _outgoing(map: ClusterMap, endpoint: int) -> list[Stream]:
    return [stream for stream in map.streams if stream.primary == endpoint]


def _ranges(map: ClusterMap, arcs: Iterable[int]) -> list[tuple[int, int]]:
    return [(map.arcs[arc].first_slot, map.arcs[arc].end_slot) for arc in arcs]
