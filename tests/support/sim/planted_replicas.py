"""Planted bugs in clusters with replicas: `BUGS` names the invariant that each violates, and what must find it.

They are likely mistakes; some were made. Each is a cluster in which one step is left out or done too early.
"""

import types
from dataclasses import replace
from typing import NamedTuple

from msgspec import Raw, msgpack, structs

from shoal import _core
from shoal._core import ClientDefect
from shoal.checkpoint.format import SavedTable
from shoal.cluster.protocol import messages as m
from shoal.cluster.scheduler.inputs import EventsSeen
from sim.network import Weather
from sim.replicated import Replicated, ReplicatedServer
from sim.saves import ServerTask, Session, Snapshots
from sim.scenarios import Scenario


class RepliesBeforeCommit(Replicated):
    """What was only sent to a backup counts as acknowledged."""

    def arrive(self, address, peer, frames):
        super().arrive(address, peer, frames)
        if b"~" in bytes(peer) or address not in self.services:
            return
        service = self.services[address]
        for stream in service.replication()["streams"]:
            if stream["sent"] > stream["acknowledged"]:
                low, high = stream["stream"] & 0xFFFFFFFF, stream["stream"] >> 32
                reply = _core.encode_header(
                    op=_core.Op.REPLICATE, reply=True, sequence=stream["sent"], table=low, job=high
                )
                self.reply(address, service.handle_backup(stream["stream"], [reply]))


class RenumbersPushes(Replicated):
    """A worker sends pushes that are not acknowledged under new numbers when the map changes."""

    defect = ClientDefect.RENUMBERS_PUSHES


class RenumbersFunctions(Replicated):
    """As `RenumbersPushes`, with functions, sweeps, and erases."""

    defect = ClientDefect.RENUMBERS_OTHER_WRITES


class LosesCounts(Replicated):
    """A worker that cuts a push again forgets how often its keys occurred."""

    defect = ClientDefect.LOSES_COUNTS


class _WithScheduler(Replicated):
    """Changes each membership of the scheduler, also those that are restored."""

    @property
    def membership(self):
        return self._membership

    @membership.setter
    def membership(self, membership):
        self._membership = membership
        self.change(membership)

    def change(self, membership):
        raise NotImplementedError  # each bug has its own


class AssignsAllAtOnce(_WithScheduler):
    """An arc is given to its new primary before the former one has confirmed that it does not serve it."""

    def change(self, membership):
        def carry_out(self):
            state = self._state
            for server in list(self._late()):
                if server.offered_epoch < state.newest.epoch:
                    server.offered_epoch = state.newest.epoch
                    self.send(server)
            if state.published is not state.newest:
                was_published, state.published = state.published is not None, state.newest
                if was_published:
                    self._peers.publish(m.MapChanged(state.newest))

        assignments = membership._assignments
        assignments.carry_out = types.MethodType(carry_out, assignments)


class BackupDrifts(Replicated):
    """A backup executes an order that its primary has not executed."""

    def arrive(self, address, peer, frames):
        super().arrive(address, peer, frames)
        if b"~" in bytes(peer) and self.random.random() < 0.02:
            for replica in self.services[address].replication()["replicas"]:
                self.services[address].replica(replica["stream"]).hold()


class CopyMissesRecords(Replicated):
    """A backup does not execute the requests that arrive during a copy: a table that it has is added instead."""

    order = (b"", b"")  # the longest one

    def arrive(self, address, peer, frames):
        if b"~" in bytes(peer) and address in self.services:
            kind = int.from_bytes(frames[0][44:48], "little")
            if kind == _ORDER:
                self.order = max(self.order, frames, key=lambda one: len(one[1]))
            elif kind == _REQUEST and self.random.random() < 0.5 and self._is_copying(address):
                frames = [self._renumbered(frames[0]), *self.order[1:]]
        super().arrive(address, peer, frames)

    def _is_copying(self, address):
        return any(replica["arriving"] for replica in self.services[address].replication()["replicas"])

    def _renumbered(self, header):
        """Return the header of the order with the position and the stream of another record."""
        sequence, table, job = (
            int.from_bytes(header[begin:end], "little") for begin, end in ((24, 32), (12, 16), (48, 52))
        )
        return _core.encode_header(
            op=_core.Op.REPLICATE, payload=self.order[1:], sequence=sequence, table=table, job=job, aux=_ORDER,
            dtype=_core.WireDtype.UINT8,
        )  # fmt: skip


class SendsNothingMissing(CopyMissesRecords):
    """A new primary does not send the other copies what they lack: a table that they have is added instead."""

    def arrive(self, address, peer, frames):
        is_order = b"~" in bytes(peer) and int.from_bytes(frames[0][44:48], "little") == _ORDER
        if is_order and address in self.services and frames[1][0] == _CATCH_UP:
            frames = [self._renumbered(frames[0]), *self.order[1:]]
        super().arrive(address, peer, frames)

    def _is_copying(self, address):
        return False


class LeastStampServes(_WithScheduler):
    """The copy that has least of the records of a dead primary serves next."""

    def change(self, membership):
        stamps = membership._replicas.stamps
        report = stamps.report

        def inverted(closed):
            turned = [structs.replace(one, stamp=(1 << 62) - 1 - one.stamp) for one in closed.stamps]
            report(structs.replace(closed, stamps=tuple(turned)))

        stamps.report = inverted


class ForgetsInputs(Replicated):
    """The journal lacks which events all peers have seen."""

    def record(self, entry):
        if not isinstance(entry.body, EventsSeen):
            super().record(entry)


class SendsBeforeStoring(Replicated):
    """The scheduler sends what depends on inputs that are not stored yet."""

    def route(self, outgoing):
        self.send_down([(to, message) for to, message in outgoing if to in self.processes])
        super().route([])


class _ObeysOldSchedulers(ReplicatedServer):
    def is_outdated(self, message):
        return False


class ObeysOldSchedulers(Replicated):
    """A server does not compare generations."""

    server_kind = _ObeysOldSchedulers


class _SkipsAdmissions(ReplicatedServer):
    def hear(self, message):
        if isinstance(message, m.Order) and isinstance(message.body, m.Admit) and self.rank == 1:
            message = structs.replace(message, body=m.DropTable(1 << 20))  # there is none
        super().hear(message)


class SkipsAdmissions(Replicated):
    """One server reports an admission as done that it has not executed."""

    server_kind = _SkipsAdmissions


class _KeepsConfirmations(ReplicatedServer):
    def send(self, message):
        if not (isinstance(message, m.Assigned) and message.epoch > 2 and self.rank == 1):
            super().send(message)


class KeepsConfirmations(Replicated):
    """One server does not confirm later maps."""

    server_kind = _KeepsConfirmations


class _KeepsSnapshots(Snapshots):
    def _end(self, digest, timeout=None):
        if digest:
            super()._end(digest, timeout)


class KeepsSnapshots(Replicated):
    """A worker whose save has failed does not tell the servers."""

    snapshot_kind = _KeepsSnapshots


class _PublishesEarly(Snapshots):
    def _poll(self, words):
        reports = super()._poll(words)
        done = next((report for report in reports if report is not None and report.state == "done"), None)
        if done is None:
            return reports
        nothing = {"rows": 0, "files": [], "sections": [], "filters": (), "ranges": (), "total": 0}
        saved = [structs.replace(table, **nothing) for table in msgpack.decode(done.saved, type=list[SavedTable])]
        empty = structs.replace(done, rows=0, saved=Raw(msgpack.encode(saved)))
        return [report if report is not None and report.state == "done" else empty for report in reports]


class PublishesEarly(Replicated):
    """A worker publishes a checkpoint as soon as some of the servers have written their slots."""

    snapshot_kind = _PublishesEarly


class _PresentRows(Session):
    def section(self, table, slot):
        super().__getattr__("section")(table, slot)
        task = self._task
        id = int(task.mailbox.task.tables[table].name[1:])
        return task.server.world.services[task.address].shard(id).section(slot)


class _WritesPresentRows(ServerTask):
    def make_session(self):
        return _PresentRows(self)


class WritesPresentRows(Replicated):
    """Servers write what their tables have when they write it, not what they had when the save began."""

    task_kind = _WritesPresentRows


class Bug(NamedTuple):
    invariant: int
    kind: type[Replicated]
    scenario: Scenario
    found_by: str  # part of the violation
    first: int = 0  # seed; not far before one that finds it


_REQUEST, _ORDER = 1, 2  # records of a stream
_CATCH_UP = 12  # number of an order
SLOW = Weather(jitter=0.02)
KILL = Scenario(mode="asp", faults=("kill",), weather=SLOW)
TABLES = Scenario(
    mode="bsp", faults=("kill", "join", "kill"), weather=SLOW, tables="mixed", slot_bytes=1 << 16, copy_rate=100_000
)
MOVES = Scenario(mode="asp", faults=("join", "drain", "join"), replicas=0, tables="mixed")
TWO = Scenario(mode="asp", faults=("kill-two", "join", "kill-two"), servers=5, replicas=2, weather=SLOW)
SAVES = Scenario(mode="asp", faults=("kill", "join"), saves=True, clocks=30)
DISK = Scenario(mode="asp", faults=("scheduler", "join", "scheduler", "kill", "scheduler"), disk=0.2)
BUGS = [
    Bug(1, RepliesBeforeCommit, KILL, "exactly once", 2),
    Bug(1, RenumbersPushes, KILL, "exactly once", 6),
    Bug(2, RepliesBeforeCommit, KILL, "as acknowledged"),
    Bug(2, AssignsAllAtOnce, MOVES, "both serve"),
    Bug(3, BackupDrifts, KILL, "differ from their copy"),
    Bug(3, SendsNothingMissing, TWO, "differ from their copy", 8),
    Bug(3, LeastStampServes, TWO, "have records that the new primary lacks"),
    Bug(4, LosesCounts, TABLES, "differ from an undisturbed run"),
    Bug(5, RepliesBeforeCommit, KILL, "versions", 8),
    Bug(6, RenumbersFunctions, TABLES, "UnexpectedRowsError"),
    Bug(7, CopyMissesRecords, replace(TABLES, mode="asp"), "differ from their copy", 15),
    Bug(8, ForgetsInputs, DISK, "another state"),
    Bug(8, SendsBeforeStoring, DISK, "two maps of epoch"),
    Bug(
        8,
        ObeysOldSchedulers,
        Scenario(faults=("scheduler", "join") * 3, weather=Weather(ghosts=0.5, ghost_delay=0.5)),
        "has replaced",
    ),
    Bug(9, SkipsAdmissions, Scenario(faults=("worker",)), "progress"),
    Bug(9, KeepsConfirmations, Scenario(faults=("kill", "join")), "does not come to rest"),
    Bug(10, WritesPresentRows, SAVES, "bounds"),
    Bug(10, WritesPresentRows, replace(SAVES, mode="bsp"), "atomic clocks"),
    Bug(10, PublishesEarly, SAVES, "bounds"),
    Bug(10, KeepsSnapshots, SAVES, "keeps its snapshot"),
]
