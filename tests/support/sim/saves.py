"""Saves while a cluster fails: the real code of the worker and of the servers' threads, as fibers in simulated time.

A worker that saves goes on to train while the servers write; its checkpoints are of a temporary directory. What must
hold:

- A save that is reported as done has the rows of one clock. It is loaded at once, as a whole with its bases, and its
  rows of table 1 are judged by the checkers of history.py, as those of a pull when the save began. Rows that one worker
  alone changes must be what that worker has computed. Under BSP all saves of one clock have the same bytes.
- A save that fails raises an error that is documented, for a reason that exists; the checkpoint before it is unchanged.
  That of a worker that dies meanwhile is unchanged, or complete.
- No server keeps a snapshot of a save that has ended: not in the end, and not for longer than `RELEASE_SECONDS` after
  its worker could say so.
"""

import os
import random
import shutil
import tempfile
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
from msgspec import structs

from shoal import _core
from shoal.checkpoint.format import MANIFEST
from shoal.checkpoint.read import load, read_chain
from shoal.cluster.server import save_task
from shoal.cluster.server import tasks as server_tasks
from shoal.cluster.worker import save as worker_save
from shoal.cluster.worker import tasks as worker_tasks
from shoal.cluster.worker.save import ServerSnapshotSet
from shoal.errors import ClusterChangedError, FencedError, SaveConflictError, ShoalError
from shoal.storage.open import open_dir
from shoal.store import files as store_files
from shoal.store.activity import Activity
from shoal.store.files import StoreFiles
from shoal.table.shard import LocalShard
from sim.fibers import Fiber, current, simulated_time
from sim.schedules import KEYS

Op = _core.Op
TIMEOUT = 20.0  # seconds of simulated time, of the calls of a save
DISK_SECONDS = 0.01  # mean, for the slots of a table at an endpoint
RELEASE_SECONDS = 0.5  # until all servers that can be reached have released the snapshots of a save that has ended
CHANCE = 0.2  # of a save in a clock
COUNTED = 1  # the table that the checkers of history.py judge
CLOCKED = (1, 2, 5)  # tables that change at the ends of clocks only, under BSP
THREAD = _core.ThreadPool(1)


@contextmanager
def simulated_saves():
    """Let the code of saves take simulated time. A context manager.

    A worker trains while it saves, as with saves in the background. So none is repeated: the clock of the first attempt
    has passed.
    """
    with (
        simulated_time(worker_save, worker_tasks, server_tasks, save_task),
        mock.patch.object(store_files, "_REPEAT_SECONDS", -1.0),
    ):
        yield


class Saves:
    """All saves of a run.

    Attributes
    ----------
    all : list of Save
    sections : dict
        Under BSP, what tables have in the checkpoints of a clock, by clock and table.
    """

    def __init__(self, world):
        self.world = world
        self.directory = tempfile.mkdtemp(prefix="shoal-sim-")
        self.all = []
        self.sessions = []  # ServerTask
        self.sections = {}
        self.specs = {id: structs.replace(spec, name=f"t{id}") for id, spec in world.tables.items()}

    def add(self, save):
        """Note a save that begins."""
        self.all.append(save)

    def outcomes(self):
        """Return how the saves have ended: "done", "unknown", or the name of an error, in their order."""
        return [save.outcome for save in self.all]

    def ended(self, save):
        """A save has ended: some time after, no server of the cluster keeps its snapshots."""
        self.world.network.after(RELEASE_SECONDS, self._check_released, save, RELEASE_SECONDS)

    def _check_released(self, save, waited):
        members = self.world.members()  # without those that were declared dead and have not learned of it
        kept = [task for task in self._kept_of(save) if task.server in members]
        is_stopped = any(task.server.stopped_until > self.world.network.now for task in kept)
        if kept and (is_stopped or self.world.cuts or not all(call.done() for _, call in save.ends)):
            self.world.network.after(RELEASE_SECONDS, self._check_released, save, waited + RELEASE_SECONDS)
        elif kept:
            self.world.monitor.report(
                f"saves: {save}: {kept[0].address} keeps its snapshot {waited:g} s after its end ({save.outcome})"
            )

    def _kept(self, matches):
        """Return the sessions that are open at servers that live."""
        return [
            task
            for task in self.sessions
            if task.server.alive and not task.session.ended and matches(task.session.call)
        ]

    def are_saving(self, *services):
        """Whether a save is in progress at one of these endpoints, or its copies follow one that it has cancelled."""
        return any(
            self.world.services[task.address] in services and (not task.fiber.done or self._is_followed(task))
            for task in self.sessions
            if task.server.alive
        )

    def _is_followed(self, task):
        """Whether copies have not learned that a save has ended: from its worker, or by the fence of it."""
        rank, incarnation, number = task.session.call
        save = next(
            save
            for save in self.all
            if number in save.numbers and (save.life.rank, save.life.incarnation) == (rank, incarnation)
        )
        ends = [call for of, call in save.ends if of == number]
        has_ended = bool(ends) and all(call.done() and call.error is None for call in ends)
        is_fenced = rank not in self.world.services[task.address].metrics()["clocks"]
        return not has_ended and not is_fenced

    def _kept_of(self, save):
        """Return the sessions of a save that are open at servers that live."""
        return self._kept(lambda name: name[:2] == (save.life.rank, save.life.incarnation) and name[2] in save.numbers)

    def in_progress(self):
        """Return the saves that another one may find in progress: those that servers have not released yet, too."""
        return [save for save in self.all if not save.done() or self._kept_of(save)]

    def finish(self):
        """Judge what the run has left, and end."""
        try:
            for save in self.all:
                save.judge_if_unknown()
            for task in self._kept(lambda name: True):
                self.world.monitor.report(f"saves: {task.address} keeps the snapshot of {task.session.call} in the end")
        finally:
            for owner in [*self.all, *self.sessions]:
                owner.fiber.kill()
            shutil.rmtree(self.directory, ignore_errors=True)


# --- a worker -------------------------------------------------------------------------------------------------------


class Saver(StoreFiles):
    """The store of a worker, as far as its saves need it: decides when to save what."""

    threads = 1

    def __init__(self, client):
        world = client.cluster
        self.client, self.saves = client, world.saves
        self.snapshots = world.snapshot_kind
        self.rng = random.Random(f"saves {world.seed} {client.rank} {client.incarnation}")
        self.current = None
        self.last = None  # directory of the last tracked save
        self.is_last_known = True  # to all servers
        self._slots = world.slots
        self._saving = threading.Lock()
        self._tables = {
            spec.name: SimpleNamespace(name=spec.name, spec=spec, number=id) for id, spec in self.saves.specs.items()
        }
        self.activity = Activity(lambda: client.now)

    def maybe(self, calls, own):
        """Save sometimes, once calls are done and while no other save of this worker is in progress.

        ``own`` are values that this worker alone changes, by table and key. To be run by its program.
        """
        draw, kind, names = self.rng.random(), self.rng.random(), sorted(self._tables)
        some = self.rng.sample(names, self.rng.randint(1, len(names)))
        if draw >= CHANCE or (self.current is not None and not self.current.done()):
            return
        yield list(calls)  # as a store, which waits for its pushes
        begun = len(self.saves.all)
        own = {table: dict(rows) for table, rows in own.items()}
        where = f"{self.client.rank}.{self.client.incarnation}"
        if kind < 0.5:
            save = Save(self, f"{where}-plain", some if kind < 0.3 else names, own)
        elif self.client.rank == 0:  # the changes since the last save that tracks them are of one worker
            save = Save(self, f"{where}-{begun}", names, own, since=self.last, track=True)
        else:
            save = Save(self, f"{where}-own", [names[0]], own)
        self.current = save
        self.client.tasks.append(save)
        save.go()
        yield save.begun

    # --- what StoreFiles.save needs ---

    def _check_usable(self):
        pass

    @contextmanager
    def _locked(self):
        yield

    def _load(self, chain, *, track, progress):
        raise NotImplementedError  # a simulated worker loads nothing: checkpoints are loaded by local tables

    @contextmanager
    def _snapshots(self, tables, base):
        save = self.current
        numbered = [(table.number, table.spec, kind) for table, kind in tables]
        with self.snapshots(save, numbered, base) as taken:
            save.begun.is_done = True  # its worker goes on
            yield taken


class Snapshots(ServerSnapshotSet):
    """The snapshots of a save; notes whether the servers know its digest."""

    def __init__(self, save, tables, base):
        self.save = save
        super().__init__(_Channel(save), tables, base, save.dead_workers)

    def _end(self, digest, timeout=None):
        try:
            super()._end(digest, timeout)
        except ShoalError:
            if digest:
                self.save.is_known = False
            raise


class _Channel:
    """A worker's calls: :class:`shoal.cluster.worker.channel.Channel`."""

    client = SimpleNamespace(timeout=TIMEOUT)  # of its `_core.Client`

    def __init__(self, save):
        self._save = save

    @property
    def map(self):
        return self._save.client.map

    def begin(self, op, table, **what):
        save, client = self._save, self._save.client
        current().check()
        on_done = save.asked() if op == Op.SAVE_BEGIN else None
        call = client.requests.submit(
            op, table, client.clock, client.now, client.now + TIMEOUT, on_done=on_done, **what
        )
        if op == Op.SAVE_BEGIN:
            save.numbers.append(call.sequence)
        elif op == Op.SAVE_END:
            save.ends.append((int(what["payload"][0][0]), call))
        return _Future(call)


class _Future:
    def __init__(self, call):
        self.call = call
        self.sequence, self.clock = call.sequence, call.clock

    def result(self, seconds=None):
        current().wait(self.call.done, seconds)
        return self.call.get() if self.call.done() else None


class _Begun:
    """A save has its snapshots, or has failed."""

    is_done = False
    error = None

    def done(self):
        return self.is_done


class Save:
    """One save. A worker's program may wait for it, or for its `begun`."""

    error = None  # as a call's, for the program: a save may fail

    def __init__(self, saver, name, tables, own, since=None, track=False):
        self.saver, self.client = saver, saver.client
        self.world = self.client.cluster
        self.directory = os.path.join(saver.saves.directory, name)
        self.tables, self.own, self.since, self.track = tables, own, since, track
        self.begun = _Begun()
        self.is_done = False
        self.outcome = "unknown"
        self.is_known = True  # to all servers, once it is done
        self.numbers = []  # of its SAVE_BEGINs
        # The number that each names, and the call, which is sent after the ticks before it: these may wait for others.
        self.ends = []
        self.life = self.world.history.life(self.client)
        self.event = None  # in the history
        self.clock = self.client.clock
        self.epoch = self.client.map.epoch
        self.rivals = saver.saves.in_progress()
        for save in self.rivals:
            save.rivals.append(self)
        self.before = self._manifest()
        self.fiber = Fiber(self.world.network, self._run, self._wake)
        saver.saves.add(self)

    def done(self):
        return self.is_done

    def __repr__(self):
        what = f"{'a delta' if self.since else 'all rows'} of {', '.join(self.tables)}"
        return f"worker {self.life.rank}.{self.life.incarnation} at clock {self.clock}: {what}"

    def _run(self):
        self.saver.save(
            self.directory, tables=self.tables, since=self.since, track=self.track, overwrite=True, durable=False
        )

    def _wake(self):
        self.client.go()

    def go(self):
        """Go on, if what it waits for has come."""
        if self.is_done:
            return
        self.fiber.resume()
        if self.fiber.done:
            self.is_done = self.begun.is_done = True
            self._judge(self.fiber.error)
            self.saver.saves.ended(self)

    def asked(self):
        """It begins to take snapshots, perhaps again; returns what is to be done with the call that does so."""
        history = self.world.history
        self._forget()
        if f"t{COUNTED}" in self.tables:
            self.event = event = history.pull(self.client, COUNTED, range(KEYS))
            return lambda call: history.acknowledged(event, call.error)
        return None

    def _forget(self):
        if self.event is not None:
            self.world.history.pulls.remove(self.event)
        self.event = None

    def dead_workers(self):
        """Return the workers that are known to be dead."""
        return {save.life.rank for save in self.rivals if save.life.died is not None}

    # --- judgement ---

    def _manifest(self):
        try:
            with open(os.path.join(self.directory, MANIFEST), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _report(self, text):
        self.world.monitor.report(f"saves: {self}: {text}")

    def judge_if_unknown(self):
        """Judge a save whose worker has died: nothing has changed, or it is complete."""
        if self.is_done:
            return
        if self._manifest() != self.before:
            self._judge(None)
        else:
            self._forget()

    def _judge(self, error):
        self.outcome = "done" if error is None else type(error).__name__
        if error is None:
            self._check_rows()
            if self.track:
                self.saver.last, self.saver.is_last_known = self.directory, self.is_known
            return
        self._forget()
        if self._manifest() != self.before:
            self._report(f"it has failed ({error}), and the checkpoint has changed")
        reason = self._has_reason(error)
        if not reason:
            self._report(f"{type(error).__name__}: {error}")
        if isinstance(error, ValueError):
            self.saver.last, self.saver.is_last_known = None, True

    def _has_reason(self, error):
        """Whether an error is documented, and has its reason."""
        if isinstance(error, SaveConflictError):
            return any(set(self.tables) & set(rival.tables) for rival in self.rivals)
        if isinstance(error, ClusterChangedError):
            return self.client.map.epoch > self.epoch
        if isinstance(error, FencedError):
            return self.life.died is not None
        if isinstance(error, ValueError):  # changes since the base are not known
            return self.since is not None and not self.saver.is_last_known
        return self.life.died is not None and isinstance(error, ShoalError)

    def _check_rows(self):
        """Load the checkpoint, and compare."""
        world = self.world
        try:
            chain = read_chain(self.directory, None)
            loaded = load(chain, lambda spec: LocalShard.of(spec, world.slots, THREAD), 1, clock=0, progress=False)
        except Exception as error:  # any: what is done can be loaded
            self._forget()
            return self._report(f"it is done, and cannot be loaded: {type(error).__name__}: {error}")
        found = {int(spec.name[1:]): shard for spec, shard in loaded}
        if set(found) != {int(name[1:]) for name in self.tables}:
            self._report(f"it has the tables {sorted(found)}")
        if chain[-1].manifest.clock != self.clock:
            self._report(f"it has clock {chain[-1].manifest.clock}")
        if self.event is not None:
            self.event.rows = self._rows(found, COUNTED, self.event.keys)
        for table, rows in self.own.items():
            if table in found and rows:
                seen = dict(zip(rows, self._rows(found, table, list(rows))[:, 0].tolist(), strict=True))
                if seen != rows:
                    self._report(f"its own rows of table {table} are {seen}, they must be {rows}")
        if world.history.mode == "bsp":
            for table in set(CLOCKED) & set(found):
                self._check_bytes(table, found[table])
        return None

    def _rows(self, found, table, keys):
        """Return loaded rows, in the order of the keys."""
        dim = self.world.dims[table]
        batch = _core.KeyBatch(np.asarray(keys, np.uint64), self.world.slots, THREAD)
        rows = np.empty((len(batch), dim), np.float32)
        found[table].pull(batch, rows)
        out = np.empty((len(keys), dim), np.float32)
        batch.expand(rows, dim, out, THREAD)
        return out

    def _check_bytes(self, table, shard):
        """Under BSP all saves of a clock have the same bytes."""
        sections = []
        for slot in range(self.world.slots):
            rows, section, admission = shard.section(slot)
            sections.append((rows, bytes(section), bytes(admission)))
        known = self.saver.saves.sections.setdefault((self.clock, table), sections)
        if known != sections:
            self._report(f"table {table} differs from another save of this clock")


# --- a server -------------------------------------------------------------------------------------------------------


class ServerTask:
    """The thread of a server that executes the task of a save: shoal.cluster.server.tasks."""

    def __init__(self, server, address, session):
        self.server, self.address, self.session = server, address, session
        self.mailbox = None
        self.fiber = Fiber(server.world.network, self._run, self.go)

    def _run(self):
        session = self.make_session()
        self.mailbox = server_tasks._TaskMailbox(session)
        server_tasks._work(session, self.mailbox, SimpleNamespace(open=open_dir))

    def make_session(self):
        """Return what its code uses as the session."""
        return Session(self)

    def go(self):
        """Go on, if what it waits for has come."""
        if self.server.world.runs(self.server, self.go):
            self.fiber.resume()


class Session:
    """A session whose waits are those of its fiber."""

    def __init__(self, task):
        self._task = task

    def __getattr__(self, name):
        return getattr(self._task.session, name)

    def wait_request(self, times, seconds):
        session = self._task.session
        if seconds:
            current().wait(lambda: session.ended or session.wait_request(times, 0.0)[0] > times, seconds)
        else:  # between two slots
            current().sleep(self._task.server.world.random.expovariate(1.0 / DISK_SECONDS))
        return session.wait_request(times, 0.0)
