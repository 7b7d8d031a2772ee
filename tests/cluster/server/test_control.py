"""What a server does with orders and assignments: real endpoints, no sockets, no clock."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from endpoint_peer import Worker, deliver
from maps import map_of
from shoal import _core
from shoal._core import Op, Status
from shoal.cluster.protocol.messages import (
    AddTable,
    Admit,
    Assign,
    Assigned,
    Dismiss,
    DropTable,
    Fence,
    Hold,
    JobConsistency,
    Order,
    OrderReply,
    ReportMetrics,
    ReportStream,
    StartJob,
)
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.server.assignment import ServerControl
from shoal.table.spec import TableRecord
from table_specs import table_spec

SLOTS = 16
A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
SPEC = table_spec()
START = StartJob(1, JobConsistency("bsp", 0, False), (1, 1), 0)
TABLE = AddTable(0, TableRecord.of(SPEC))
HASHES = np.array([0, 2**63], np.uint64)  # of an arc of A and one of B
FIRST = map_of(1, (0, 4, A, 0), (4, 8, A, 0), (8, 12, B, 1), (12, 16, B, 1), backups=[(A, B), (B, A)])


class Busy:
    """An endpoint that has been executing a request for longer than any heartbeat waits."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.endpoint, name)

    def arc_loads(self, patience: float) -> None:
        return None

    def replication(self, patience: float | None = None) -> Any:
        return None if patience is not None else self.endpoint.replication()


class Fails:
    """An endpoint that fails to hold."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.endpoint, name)

    def hold(self, job: int = 0) -> None:
        raise RuntimeError("out of order")


class Full:
    """An endpoint that has no memory for the first call of a method."""

    def __init__(self, endpoint: Any, method: str) -> None:
        self.endpoint = endpoint
        self.method = method

    def __getattr__(self, name: str) -> Any:
        if name != self.method:
            return getattr(self.endpoint, name)
        self.method = ""
        raise MemoryError("no memory")


class Servers:
    """Servers with an endpoint each; messages between them are delivered when a test says so."""

    def __init__(self, map: ClusterMap = FIRST, shares: dict[str, int] | None = None) -> None:
        self.endpoints = {endpoint.address: _core.Endpoint(map.slots) for endpoint in map.endpoints}
        self.controls = {
            address: ServerControl({address: endpoint}, address[6].encode() * 16)
            for address, endpoint in self.endpoints.items()
        }
        self.now = 0.0
        self.number = 0
        for control in self.controls.values():
            control.set_map(map)
        for address, share in (shares or {}).items():
            self.endpoints[address].set_memory(share)
        for body in (TABLE, START):
            self.order(body)
            self.exchange()
            assert [len(self.poll(address)) for address in self.endpoints] == [1] * len(self.endpoints)

    def order(self, body: Any, *addresses: str) -> None:
        self.number += 1
        for address in addresses or self.controls:
            self.controls[address].order(Order(self.number, body))

    def exchange(self) -> None:
        """Deliver what streams carry, and the acknowledgements."""
        self.now += 0.01
        for endpoint in self.endpoints.values():
            endpoint.on_time(round(1000 * self.now))
            for stream, address, _ in endpoint.targets():
                if address not in self.endpoints:
                    continue
                while (frames := endpoint.next_message(stream)) is not None:
                    self.endpoints[address].handle(f"{stream}".encode(), frames)
                for _, reply in self.endpoints[address].acknowledge():
                    endpoint.handle_backup(stream, reply)

    def poll(self, address: str) -> list[Any]:
        return self.controls[address].poll(self.now)


def moved(map: ClusterMap, **fields: Any) -> ClusterMap:
    return msgspec.structs.replace(map, epoch=map.epoch + 1, **fields)


def promoted() -> ClusterMap:
    """Return the map after the death of A."""
    b = next(endpoint for endpoint in FIRST.endpoints if endpoint.address == B)
    arcs = tuple(msgspec.structs.replace(arc, primary=b.id, term=2) for arc in FIRST.arcs)
    return ClusterMap(2, (b,), arcs)


def test_an_order_is_reported_when_every_stream_has_acknowledged_it():
    servers = Servers()
    control = servers.controls[A]
    servers.order(Admit(1, 2, 0), A)
    assert servers.poll(A) == []
    assert control.has_pending
    servers.exchange()
    assert servers.poll(A) == [OrderReply(b"a" * 16, servers.number)]
    assert not control.has_pending
    assert servers.poll(A) == []


def test_an_order_that_is_refused_or_fails_says_so():
    servers = Servers()
    more = AddTable(1, TABLE.form)
    servers.order(more, A)
    servers.exchange()
    assert [reply.refused for reply in servers.poll(A)] == [None]
    servers.order(AddTable(1, msgspec.structs.replace(TABLE.form, dim=2)), A)
    servers.exchange()
    (reply,) = servers.poll(A)
    assert "there is a table 1 already" in reply.refused.text
    assert servers.endpoints[A].tables() == [0, 1]
    servers.controls[A]._endpoints[A] = Fails(servers.endpoints[A])
    servers.order(Hold(), A)
    assert "RuntimeError: out of order" in servers.poll(A)[0].fault


def test_figures_do_not_wait_for_backups():
    servers = Servers()
    servers.order(Hold(), A)  # not acknowledged
    servers.order(ReportMetrics(), A)
    (reply,) = servers.poll(A)
    assert len(reply.figures) == 1


def test_a_map_is_confirmed_as_often_as_it_arrives_and_an_older_one_changes_nothing():
    servers = Servers()
    control = servers.controls[A]
    newer = moved(FIRST)
    control.assign(Assign(newer, None, 0))
    assert servers.poll(A) == [Assigned(b"a" * 16, 2)]
    control.assign(Assign(newer, None, 0))
    assert servers.poll(A) == [Assigned(b"a" * 16, 2)]
    control.assign(Assign(FIRST, None, 0))
    assert control.map == newer
    assert servers.poll(A) == [Assigned(b"a" * 16, 2)]


def test_the_server_that_sends_an_arriving_arc_is_copying():
    servers = Servers()
    first, second = FIRST.streams
    newer = msgspec.structs.replace(
        FIRST, epoch=2, streams=(msgspec.structs.replace(first, arcs=(0,), arriving=(1,)), second)
    )
    assert not servers.controls[A].is_copying
    for address in (A, B):
        servers.controls[address].assign(Assign(newer, None, 0))
    assert servers.controls[A].is_copying
    assert not servers.controls[B].is_copying


def test_a_backup_serves_the_rows_of_a_dead_server_with_the_order_that_it_may_have_missed():
    servers = Servers()
    worker = Worker(epoch=1)
    batch = _core.KeyBatch(np.arange(64, dtype=np.uint64), SLOTS, _core.ThreadPool(1))
    hashes = batch.hashes
    for address, (first, end) in {A: (0, 8), B: (8, 16)}.items():
        some = hashes[int(batch.offsets[first]) : int(batch.offsets[end])]
        deliver(servers.endpoints[address], worker.push(some, [[1.0]] * len(some), sequence=1))
        deliver(servers.endpoints[address], worker.tick(0, [], tables=[0]))
    servers.exchange()
    servers.order(Fence(0, 1), B)  # A has died before the order came there
    servers.exchange()
    (fenced,) = servers.poll(B)
    assert (fenced.result, fenced.tables) == (1, (0,))
    order = Order(servers.number, Fence(0, 1))
    del servers.endpoints[A]
    for _ in range(2):  # the second one is a repetition
        servers.controls[B].assign(Assign(promoted(), order, 0))
        (confirmed,) = servers.poll(B)
        assert (confirmed.epoch, confirmed.fault) == (2, "")
        assert (confirmed.outcome.number, confirmed.outcome.result, confirmed.outcome.tables) == (order.number, 1, (0,))
    servers.controls[B].assign(Assign(FIRST, None, 0))  # late
    assert servers.poll(B) == [confirmed]
    servers.order(Dismiss(0, 1, 1, (0,)), B)
    assert len(servers.poll(B)) == 1
    servers.order(Dismiss(1, 1, 0, ()), B)
    endpoint = servers.endpoints[B]
    (reply,) = deliver(endpoint, Worker(rank=2**32 - 1, epoch=2).pull(hashes, clock=0))
    assert (reply.op, reply.status) == (Op.PULL, Status.OK)
    assert (reply.values == -1.0).all()  # the dead worker's last clock has ended everywhere


def test_a_backup_with_another_memory_budget_serves_the_slots_with_the_share_that_they_had():
    servers = Servers(shares={A: 3 << 20, B: 1 << 20})
    servers.exchange()
    del servers.endpoints[A]
    servers.controls[B].assign(Assign(promoted(), None, 0))
    assert servers.poll(B) == [Assigned(b"b" * 16, 2, None)]
    assert servers.endpoints[B].metrics()["budget_bytes"] == 8 * (3 << 20) + 8 * (1 << 20)


def test_an_order_without_copies_to_adopt_has_no_outcome():
    servers = Servers()
    servers.controls[A].assign(Assign(moved(FIRST), Order(9, Fence(0, 1)), 0))
    assert servers.poll(A) == [Assigned(b"a" * 16, 2, None)]


def test_tables_of_a_pending_order_are_made_once():
    servers = Servers()
    more = AddTable(1, TABLE.form)
    servers.order(more, A)
    servers.exchange()  # A passed it on, and died
    del servers.endpoints[A]
    servers.order(more, B)
    servers.controls[B].assign(Assign(promoted(), Order(servers.number, more), 0))
    replies = servers.poll(B)
    assert [type(reply) for reply in replies] == [OrderReply, Assigned]
    assert replies[1].fault == ""
    assert servers.endpoints[B].tables() == [0, 1]
    servers.order(DropTable(1), B)
    assert servers.endpoints[B].tables() == [0]


def test_an_order_for_a_table_that_promoted_copies_have_adds_it_to_the_other_arcs():
    servers = Servers()
    more = AddTable(1, TABLE.form)
    servers.order(more, A)
    servers.exchange()  # A passed it on, and died; B hears of its death before it hears of the order
    del servers.endpoints[A]
    servers.controls[B].assign(Assign(promoted(), Order(servers.number, more), 0))
    servers.order(more, B)
    assert [(type(reply), reply.fault) for reply in servers.poll(B)] == [(OrderReply, ""), (Assigned, "")]
    push = Worker(rank=0, epoch=2).push(HASHES, np.ones((2, 1), np.float32), table=1, sequence=1, clock=0)
    (reply,) = deliver(servers.endpoints[B], push)
    assert reply.status == Status.OK


def test_a_table_that_the_copies_of_a_dead_server_refuse_costs_no_row():
    servers = Servers()
    halves = msgspec.structs.replace(TABLE.form, dtype="float16")  # a row of 2 bytes
    del servers.endpoints[A]
    control, endpoint = servers.controls[B], servers.endpoints[B]
    control.assign(Assign(promoted(), Order(servers.number + 1, AddTable(1, halves)), 0))
    (confirmed,) = servers.poll(B)
    assert confirmed.fault == ""
    assert "16-bit weights need dim >= 2" in confirmed.outcome.refused.text
    assert endpoint.tables() == [0]
    (reply,) = deliver(endpoint, Worker(rank=0, epoch=2).push(HASHES, np.ones((2, 1), np.float32), sequence=1, clock=0))
    assert reply.status == Status.OK


@pytest.mark.parametrize("call", ["assign", "replica"])
def test_an_assignment_for_which_there_is_no_memory_is_carried_out_when_it_comes_again(call):
    servers = Servers()
    order = Order(servers.number + 1, AddTable(1, TABLE.form))
    del servers.endpoints[A]
    control, endpoint = servers.controls[B], servers.endpoints[B]
    control._endpoints[B] = Full(endpoint, call)
    assign = Assign(promoted(), order, 0)
    control.assign(assign)
    assert control.poll(0.0) == []  # nothing is confirmed
    assert control.map.epoch == 1
    control.assign(assign)
    (confirmed,) = control.poll(0.0)
    assert (confirmed.epoch, confirmed.fault, confirmed.outcome.refused) == (2, "", None)
    assert endpoint.tables() == [0, 1]
    (reply,) = deliver(endpoint, Worker(rank=0, epoch=2).pull(HASHES, clock=0))
    assert reply.status == Status.OK


def test_a_server_without_endpoints_in_the_newest_map_is_drained():
    servers = Servers(map_of(1, (0, 16, A, 0), backups=[(A, B)]))
    (a, b), (arc,) = servers.controls[A].map.endpoints, servers.controls[A].map.arcs
    final = ClusterMap(2, (b,), (msgspec.structs.replace(arc, primary=b.id, term=2),))
    control = servers.controls[A]
    assert not control.is_drained
    control.assign(Assign(final, None, 0))
    assert not control.is_drained  # not confirmed yet
    assert [type(out) for out in servers.poll(A)] == [Assigned]
    assert control.is_drained
    assert a not in final.endpoints


def test_a_backup_that_acknowledges_nothing_is_reported_once_until_it_answers():
    servers = Servers()
    endpoint, control = servers.endpoints[A], servers.controls[A]

    def run(seconds: float, answers: bool) -> list[Any]:
        out = []
        for _ in range(round(seconds / 0.05)):
            servers.now += 0.05
            endpoint.on_time(round(1000 * servers.now))
            if answers:
                servers.exchange()
            out += control.poll(servers.now)
        return out

    def check(out: list[Any]) -> None:
        (report,) = out
        assert report == ReportStream(1, -1, "stalled", report.text)
        silence = re.fullmatch(rf"{A} has received nothing from {B} for (\S+) s", report.text)
        assert silence is not None, report.text
        assert 1.2 < float(silence[1]) < 1.5  # of simulated time

    run(0.5, True)
    assert run(1.0, False) == []
    check(run(2.0, False))
    assert run(1.0, True) == []
    check(run(3.0, False))


def test_a_server_that_was_stopped_itself_reports_no_stall():
    servers = Servers()
    servers.exchange()
    for _ in range(22):  # a backup is silent for a little more than it may be
        servers.now += 0.05
        servers.endpoints[A].on_time(round(1000 * servers.now))
        assert servers.poll(A) == []
    servers.now += 60.0
    servers.endpoints[A].on_time(round(1000 * servers.now))
    assert servers.poll(A) == []
    servers.exchange()
    servers.now += 0.05
    assert servers.poll(A) == []


def test_a_backup_may_be_busy_for_longer_than_its_primary_was_with_the_same_request():
    servers = Servers()
    endpoint = servers.endpoints[A]

    def run(seconds: float) -> list[Any]:
        out = []
        for _ in range(round(seconds / 0.05)):
            servers.now += 0.05
            endpoint.on_time(round(1000 * servers.now))
            out += servers.poll(A)
        return out

    servers.exchange()
    servers.now += 2.0  # A executes a function of all rows, and B after it: for itself, and for A
    endpoint.on_time(round(1000 * servers.now))
    assert run(5.5) == []
    servers.exchange()
    assert run(1.0) == []
    (report,) = run(2.0)  # B is silent without a reason
    assert report.state == "stalled"


def test_progress_names_what_a_backup_has_not_acknowledged():
    servers = Servers()
    assert [(one.stream, one.lag_records) for one in servers.controls[A].progress()] == [(1, 0)]
    servers.order(Hold(), A)
    assert servers.endpoints[A].next_message(1) is not None  # sent, and lost
    (one,) = servers.controls[A].progress()
    assert (one.stream, one.lag_records) == (1, 1)
    assert one.lag_bytes > 0


def test_a_heartbeat_repeats_the_figures_of_an_endpoint_that_is_executing_a_long_request():
    servers = Servers()
    servers.exchange()
    control = servers.controls[A]
    loads, progress = control.loads(), control.progress()
    assert [load.first_slot for load in loads] == [0, 4]
    busy = ServerControl({A: Busy(servers.endpoints[A])}, b"s" * 16)
    busy.set_map(FIRST)
    assert busy.loads() == busy.progress() == ()  # it never had any
    control._endpoints[A] = Busy(servers.endpoints[A])
    assert control.loads() == loads
    assert control.progress() == progress


@pytest.mark.parametrize("address", [A, B])
def test_a_promotion_needs_no_pending_order(address):
    servers = Servers()
    other = {A: B, B: A}[address]
    endpoint = next(one for one in FIRST.endpoints if one.address == other)
    arcs = tuple(msgspec.structs.replace(arc, primary=endpoint.id, term=2) for arc in FIRST.arcs)
    servers.controls[other].assign(Assign(ClusterMap(2, (endpoint,), arcs), None, 0))
    assert servers.poll(other) == [Assigned(other[6].encode() * 16, 2)]
