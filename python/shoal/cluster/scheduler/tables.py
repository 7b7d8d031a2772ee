"""The tables: created on all servers or on none.

Invariant: I6 of membership.py. Threads: one.
"""

from __future__ import annotations

from shoal.cluster.protocol.messages import (
    AddTable,
    CreateTable,
    DropTable,
    ErrorReply,
    ListTables,
    ListTablesReply,
    TableReply,
    form_bytes,
)
from shoal.cluster.protocol.records import ReplyBody
from shoal.cluster.scheduler.handlers import handles
from shoal.cluster.scheduler.orders import Operation, Orders
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.state import Peer, State, WorkerPeer
from shoal.table.spec import TableRecord, check_table_count

_MAX_TABLES_BYTES = 1 << 23  # of the descriptions of all tables, which are sent in one message


class Tables:
    """The tables of the cluster, by name."""

    def __init__(self, state: State, peers: Peers, orders: Orders) -> None:
        self._state = state
        self._peers = peers
        self._orders = orders
        self._bytes = sum(form_bytes(table.form) for table in state.tables.values())
        self._wanted: dict[str, list[tuple[Peer, int]]] = {}

    @handles(ListTables, of_all=True)
    def list(self, peer: Peer, number: int, ask: ListTables) -> ReplyBody:
        """Return all tables, in the order of their creation."""
        return ListTablesReply(tuple(self._state.tables.values()))

    @handles(CreateTable)
    def create(self, worker: WorkerPeer, number: int, ask: CreateTable) -> ReplyBody | None:
        """Process a request for a table."""
        name = ask.form.name
        if name in self._state.tables:
            return self._state.tables[name]
        fault = self._error(ask.form)
        if fault:
            return ErrorReply("input", fault)
        worker.waiting[number] = f"the servers to create table {name!r}"
        waiting = self._wanted.setdefault(name, [])
        waiting.append((worker, number))
        if len(waiting) == 1:
            self._orders.begin(self._make(ask))
        return None

    def _error(self, form: TableRecord) -> str:
        try:
            check_table_count(len(self._state.tables.keys() | self._wanted.keys() | {form.name}))
            again = TableRecord.of(form.spec())
        except (ValueError, TypeError, OverflowError) as error:
            return str(error)
        # Servers do not check fields that have no effect on their table.
        for name in form.differing(again):
            wrong, right = getattr(form, name), getattr(again, name)
            return f"table {form.name[:80]!r} is described with {name} = {wrong!r:.80} instead of {right!r:.80}"
        if self._bytes + form_bytes(form) > _MAX_TABLES_BYTES:
            return f"the descriptions of {len(self._state.tables)} tables take {self._bytes} bytes, the maximum"
        return ""

    def _make(self, ask: CreateTable) -> Operation:
        table = TableReply(len(self._state.tables), ask.form)
        results = yield AddTable(table.id, table.form)
        refused = self._orders.refusal(results, f"cannot create table {ask.form.name!r}")
        answer: ReplyBody = table if refused is None else refused
        if refused is not None:
            yield DropTable(table.id)
        else:
            self._state.tables[ask.form.name] = table
            self._bytes += form_bytes(ask.form)
        for worker, number in self._wanted.pop(ask.form.name):
            if worker.sender in self._peers.known:
                self._peers.reply(worker, number, answer)
