"""The tables: created on all servers or on none.

Invariant: I6 of membership.py. Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.cluster.protocol.messages import (
    AddTable,
    CreateTable,
    DropTable,
    ErrorReply,
    ReplyBody,
    TableReply,
    form_bytes,
)
from shoal.cluster.scheduler.members import Peer, WorkerPeer
from shoal.cluster.scheduler.orders import Operation, Orders
from shoal.cluster.scheduler.peers import Peers
from shoal.table.spec import TableRecord, check_table_count

_MAX_TABLES_BYTES = 1 << 23  # of the descriptions of all tables, which are sent in one message


class Tables:
    """The tables of the cluster, by name."""

    def __init__(self, peers: Peers, orders: Orders) -> None:
        self._peers = peers
        self._orders = orders
        self._tables: dict[str, TableReply] = {}
        self._tables_bytes = 0
        self._wanted: dict[str, list[tuple[Peer, int]]] = {}

    @property
    def all(self) -> tuple[TableReply, ...]:
        """The tables, in the order of their creation."""
        return tuple(self._tables.values())

    def restore(self, tables: Iterable[TableReply]) -> None:
        """Take the tables of a saved state."""
        self._tables = {table.form.name: table for table in tables}
        self._tables_bytes = sum(form_bytes(table.form) for table in tables)

    def create(self, worker: WorkerPeer, number: int, ask: CreateTable) -> None:
        """Process a request for a table."""
        name = ask.form.name
        if name in self._tables:
            self._peers.reply(worker, number, self._tables[name])
            return
        fault = self._error(ask.form)
        if fault:
            self._peers.reply(worker, number, ErrorReply("input", fault))
            return
        worker.waiting[number] = f"the servers to create table {name!r}"
        waiting = self._wanted.setdefault(name, [])
        waiting.append((worker, number))
        if len(waiting) == 1:
            self._orders.begin(self._make(ask))

    def _error(self, form: TableRecord) -> str:
        try:
            check_table_count(len(self._tables.keys() | self._wanted.keys() | {form.name}))
            again = TableRecord.of(form.spec())
        except (ValueError, TypeError, OverflowError) as error:
            return str(error)
        # Servers do not check fields that have no effect on their table.
        for name in form.differing(again):
            wrong, right = getattr(form, name), getattr(again, name)
            return f"table {form.name[:80]!r} is described with {name} = {wrong!r:.80} instead of {right!r:.80}"
        if self._tables_bytes + form_bytes(form) > _MAX_TABLES_BYTES:
            return f"the descriptions of {len(self._tables)} tables take {self._tables_bytes} bytes, the maximum"
        return ""

    def _make(self, ask: CreateTable) -> Operation:
        table = TableReply(len(self._tables), ask.form)
        results = yield AddTable(table.id, table.form)
        refused = self._orders.refusal(results, f"cannot create table {ask.form.name!r}")
        answer: ReplyBody = table if refused is None else refused
        if refused is not None:
            yield DropTable(table.id)
        else:
            self._tables[ask.form.name] = table
            self._tables_bytes += form_bytes(ask.form)
        for worker, number in self._wanted.pop(ask.form.name):
            if worker.sender in self._peers.known:
                self._peers.reply(worker, number, answer)
