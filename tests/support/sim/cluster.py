"""Endpoints and workers in one process, on a simulated network, under the real ``_core.Requests``.

A worker is a generator: it calls its client's methods, yields the calls that it waits for (one, or a list), or a number
of seconds to think. The scheduler is two functions here: who dies is dismissed, who returns is admitted, one endpoint
after the other, with delays.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
from msgspec import structs

import shoal
from maps import map_of
from requests_by_hand import make_filter
from shoal import _core
from shoal._core import ClientDefect
from shoal.cluster.protocol.slot_map import cut_evenly
from shoal.cluster.worker.filters import Filters
from shoal.table.reductions import OF_ANY_LENGTH
from sim.cached import CachedTable
from sim.history import RATE, History
from sim.network import CALM, Network, Weather
from table_specs import native, table_spec

Op = _core.Op
THREAD = _core.ThreadPool(1)
PATIENCE = 20.0  # seconds of simulated time; only a defect takes as long
POLICY = _core.Policy(resend_after=0.03, deferred_after=0.1, longest=0.5, pause=0.005, longest_pause=0.05)
VERIFY_EVERY = 16  # steps of a worker

SUM = table_spec(1, shoal.SGD(lr=RATE))


class Client:
    """One incarnation of a worker."""

    patience = PATIENCE

    def __init__(self, cluster, rank, incarnation, clock, program):
        self.cluster = cluster
        self.rank, self.incarnation, self.clock = rank, incarnation, clock
        self.label = f"{cluster.first_label + rank}.{incarnation}"  # of its connections
        self.map = cluster.map  # of its requests
        self.requests = _core.Requests(
            (rank, incarnation, cluster.job), self.map, cluster.policy,
            atomic_clocks=cluster.history.mode == "bsp", defect=cluster.defect,
        )  # fmt: skip
        self.steps = 0
        self.alive = True
        self.finished = False
        self.error = None
        self.pushed = set()
        self.waiting = []
        self.program = program(self)
        self.timer = None
        self.asked_for_map = False
        self.on_end = None
        self.filter = make_filter(cluster.filters, rank, incarnation, cluster.job) if cluster.filters else None
        self.cached = None if cluster.cache is None else CachedTable(self, cluster.cache, 1)
        self.saver = cluster.make_saver(self)
        self.tasks = []  # its saves

    # --- what a program may do ---

    def _submit(self, op, table, keys, **arguments):
        batch = _core.KeyBatch(np.asarray(keys, np.uint64), self.cluster.slots, THREAD)
        arguments.setdefault("deadline", self.now + PATIENCE)
        values = arguments.pop("values", None)
        if values is not None:
            given = np.ascontiguousarray(values, np.float32)
            arguments["values"] = summed = np.empty((len(batch), arguments["dim"]), np.float32)
            batch.sum(given, arguments["dim"], summed, THREAD)
        if "counts" in arguments:
            counts = np.empty(len(batch), np.uint32)
            counts[batch.inverse] = arguments["counts"]
            arguments["counts"] = counts
        deadline = arguments.pop("deadline")
        return batch, self.requests.submit(
            op,
            table,
            self.clock,
            self.now,
            deadline,
            hashes=batch.hashes,
            begins=batch.offsets,
            filter=self.filter,
            **arguments,
        )

    @property
    def now(self):
        return self.cluster.network.now

    def pull(self, keys, table=1, ahead=0):
        """Yield it, or wait for it later; its rows are in the order of the keys, each once."""
        dim = self.cluster.dims[table]
        record = self.cluster.history.pull(self, table, keys, ahead)
        out = np.full((len(keys), dim), np.nan, np.float32)
        if self.cached is not None and table == self.cached.table:
            batch = _core.KeyBatch(np.asarray(keys, np.uint64), self.cluster.slots, THREAD)
            return self.cached.pull(batch, out, lambda: self.cluster.history.answered(record, out))

        def done(call):
            if call.error is None:
                rows = np.empty_like(out)
                batch.expand(call.get(), dim, rows, THREAD)
                self.cluster.history.answered(record, rows)

        batch, call = self._submit(Op.PULL, table, keys, out=out, dim=dim, ahead=ahead, on_done=done)
        return call

    def push(self, keys, grads, table=1, **arguments):
        record = self.cluster.history.push(self, table, keys, grads)
        if self.cached is not None and table == self.cached.table:
            batch = _core.KeyBatch(np.asarray(keys, np.uint64), self.cluster.slots, THREAD)
            summed = np.empty((len(batch), self.cluster.dims[table]), np.float32)
            batch.sum(np.ascontiguousarray(grads, np.float32), summed.shape[1], summed, THREAD)
            return self.cached.push(batch, summed, record)
        self.pushed.add(table)
        _, call = self._submit(
            Op.PUSH, table, keys, values=grads, dim=self.cluster.dims[table],
            on_done=lambda call: self.cluster.history.acknowledged(record, call.error), **arguments,
        )  # fmt: skip
        return call

    def try_push(self, keys, grads, table, **arguments):
        """Push what a server may have no memory for; nobody waits for it, and no checker judges it."""
        self.pushed.add(table)
        return self._submit(Op.PUSH, table, keys, values=grads, dim=self.cluster.dims[table], **arguments)[1]

    def assign(self, keys, rows, table=1):
        return self._submit(Op.ASSIGN, table, keys, values=rows, dim=self.cluster.dims[table])[1]

    def erase(self, keys, table=1):
        return self._submit(Op.ERASE, table, keys)[1]

    def contains(self, keys, table=1):
        return self._submit(Op.CONTAINS, table, keys, out=np.empty(len(keys), np.uint8))[1]

    def read(self, keys, table):
        """Pull rows that no checker of the history judges; returns the call, and a function that returns them."""
        dim = self.cluster.dims[table]
        out = np.full((len(keys), dim), np.nan, np.float32)
        batch, call = self._submit(Op.PULL, table, keys, out=out, dim=dim)

        def rows():
            found = np.empty_like(out)
            batch.expand(call.get(), dim, found, THREAD)
            return found

        return call, rows

    def reduce(self, function, parameters, table, *, write):
        return self.requests.submit(
            Op.REDUCE, table, self.clock, self.now, self.now + PATIENCE, aux=function,
            payload=[np.asarray(parameters, np.float64)], count=len(parameters), write=write,
            per_slot=function not in OF_ANY_LENGTH,
        )  # fmt: skip

    def sweep(self, rules, table):
        return self.requests.submit(
            Op.SWEEP, table, self.clock, self.now, self.now + PATIENCE,
            payload=[np.asarray(rules, np.float64)], count=len(rules), write=True,
        )  # fmt: skip

    def flush(self):
        """Send what a cache holds back; return the pushes that are not acknowledged."""
        return [] if self.cached is None else self.cached.flush()

    def tick(self):
        if self.cached is not None:
            self.cached.end_clock()
        record = self.cluster.history.tick(self)
        call = self.requests.tick(
            self.clock, sorted(self.pushed), self.now, self.now + PATIENCE,
            on_done=lambda call: self.cluster.history.acknowledged(record, call.error),
        )  # fmt: skip
        self.clock += 1
        self.pushed = set()
        return call

    # --- what the cluster does with it ---

    def resume(self):
        """Run the program until it waits again."""
        while self.alive and not self.finished and all(call.done() for call in self.waiting):
            for call in self.waiting:
                if call.error is not None:
                    self.error = call.error
                    self.finished = True
                    return
            try:
                step = next(self.program)
            except StopIteration:
                self.finished = True
                return
            if isinstance(step, float):
                self.waiting = [_Nap()]
                self.cluster.network.after(step, self._wake, self.waiting[0])
            else:
                self.waiting = list(step) if isinstance(step, list | tuple) else [step]

    def _wake(self, nap):
        nap.is_over = True
        self.go()

    def go(self):
        """Run what can run, send what is to be sent, and plan to be here when the next thing is due."""
        if not self.alive:
            return
        if self.cached is not None:
            self.cached.go()
        self.resume()
        if self.cached is not None:
            self.cached.go()
        for task in self.tasks:
            task.go()
        if self.tasks:
            self.resume()
        if self.finished and self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()
        cluster, requests = self.cluster, self.requests
        self.steps += 1
        if self.steps % VERIFY_EVERY == 0 and cluster.defect == ClientDefect.NONE:
            assert requests.verify() == ""
        for address, frames in requests.take_outgoing():
            cluster.send(self, address, frames)
        if requests.wants_map and not self.asked_for_map:
            self.asked_for_map = True
            cluster.network.after(cluster.network.delay(), self._take_map)
        time = requests.next_time()
        if time is not None and (self.timer is None or time < self.timer):
            self.timer = time
            cluster.network.at(time, self._on_time, time)

    def _on_time(self, time):
        if self.timer == time:
            self.timer = None
        if self.alive:
            self.requests.on_time(self.now)
            self.go()

    def _take_map(self):
        self.asked_for_map = False
        if self.alive:
            self.set_map(self.cluster.map)
            self.go()

    def set_map(self, map):
        self.requests.set_map(map, self.now)
        if map.epoch == self.requests.epoch:
            self.map = map

    def hear(self, address, frames):
        if self.alive:
            self.requests.receive(address, frames, self.now)
            self.go()


class _Nap:
    is_over = False
    error = None

    def done(self):
        return self.is_over


class Cluster:
    limit = PATIENCE  # of a run
    first_label = 0  # of the connections of its workers
    defect = ClientDefect.NONE  # of its workers

    def __init__(
        self,
        seed: int,
        service: Callable,
        *,
        mode: str = "bsp",
        staleness: int = 0,
        mean: bool = False,
        workers: int = 2,
        endpoints: int = 2,
        slots: int = 16,
        weather: Weather = CALM,
        policy: _core.Policy = POLICY,
        defect: ClientDefect | None = None,
        tables: dict[int, dict] | None = None,
        filters: Filters | None = None,
        cache=None,
    ):
        self.network = Network(seed, weather)
        self.random = self.network.random
        self.slots, self.workers, self.mode, self.staleness = slots, workers, mode, staleness
        self.policy = policy
        if defect is not None:
            self.defect = defect
        self.job = 77
        self.filters = filters
        self.cache = cache
        caching = {} if cache is None else {"held": cache.staleness, "local_steps": cache.local_steps}
        self.history = History(mode, staleness, workers, mean, **caching)
        self.tables = tables or {1: structs.replace(SUM, dim=2 * workers)}
        self.dims = {table: spec.dim for table, spec in self.tables.items()}
        self.services = {}
        self.clients = []
        self.zombies = []
        self.links = {}
        self.incarnations = [0] * workers
        self.busy_until = Counter()  # control calls reach an endpoint in order
        self.changing = 0
        self.form(service, endpoints, mean)

    def make_saver(self, client):
        """Return what decides when a worker saves; None: it saves nothing."""

    def form(self, service, endpoints, mean):
        """Make the endpoints."""
        self.map = cut_evenly(1, self.slots, [(f"tcp://{i}", i) for i in range(endpoints)])
        for endpoint in self.map.endpoints:
            arcs = self.map.arc_ranges(endpoint.id)
            one = self.serve(service, endpoint.address, arcs)
            one.set_map(1, arcs)
            one.start_job(self.job, self.mode, self.staleness, mean)

    def serve(self, service, address, arcs):
        """Make one endpoint, with all tables."""
        one = self.services[address] = service(self.slots, arcs)
        for table, spec in self.tables.items():
            one.add_table(table, native(spec))
        return one

    # --- messages ---

    def send(self, client, address, frames):
        link = f"{client.label}>{address}"
        self.links[link] = client
        self.network.send(link, frames, lambda peer, frames: self.arrive(address, peer, frames), back=False)

    def arrive(self, address, peer, frames):
        if address in self.services:
            self.reply(address, self.services[address].handle(peer, frames))

    def reply(self, address, replies):
        for peer, frames in replies:
            link = bytes(peer).decode().rsplit("/", 1)[0]
            client = self.links[link]
            # A ROUTER cannot reach a connection that is gone.
            if bytes(peer) == self.network.peer(link):
                self.network.send(
                    link, frames, lambda _, frames, client=client: client.hear(address, frames), back=True
                )

    # --- control ---

    def tell(self, address, what, *arguments):
        """Call a control function of one endpoint some time later; those of one endpoint keep their order."""
        time = self.busy_until[address] = max(self.busy_until[address], self.network.now + self.network.delay())
        self.changing += 1
        self.network.at(time, self._told, address, what, arguments)

    def _told(self, address, what, arguments):
        self.changing -= 1
        service = self.services[address]
        what(service, *arguments)
        self.reply(address, service.released())

    def start(self, programs):
        """Admit all workers at clock 0, and run them."""
        for address in self.services:
            self.tell(address, lambda service: [service.admit(rank, 1, 0) for rank in range(self.workers)])
        for rank, program in enumerate(programs):
            self.incarnations[rank] = 1
            client = Client(self, rank, 1, 0, program)
            self.clients.append(client)
            self.history.joined(rank, 1, 0)
            self.network.after(self.network.delay() * 2, client.go)

    def replace(self, rank, program, delay, zombie):
        """Dismiss a worker at this moment; let its rank join again some time after. A zombie runs on unnoticed."""
        old = self.clients[rank]
        if old.finished or not old.alive:
            return
        old.alive = zombie
        if zombie:
            self.zombies.append(old)
        self.history.died(old)
        self.changing += 1
        self.dismiss(rank, old.incarnation, lambda: self.network.after(delay, self.readmit, rank, program))

    def dismiss(self, rank, incarnation, then):
        """Fence a worker off everywhere; then end its clocks up to the greatest that it has ended anywhere."""
        reported = []

        def fence(service):
            reported.append(service.fence(rank, incarnation))
            if len(reported) == len(self.services):
                clock, tables = max(reported, key=lambda last: last[0])
                for address in self.services:
                    self.tell(address, dismiss, clock, tables)

        def dismiss(service, clock, tables):
            service.dismiss(rank, incarnation, clock, tables)
            reported.pop()
            if not reported:
                then()

        for address in self.services:
            self.tell(address, fence)

    def readmit(self, rank, program):
        """Let a rank join again: hold everybody, ask how far they are, admit it there."""
        held = []

        def hold(service):
            held.append(service.hold())
            if len(held) == len(self.services):
                self.network.after(self.random.uniform(0.0, 0.03), admit, max(held))

        def admit(clock):
            self.incarnations[rank] += 1
            incarnation = self.incarnations[rank]
            for address in self.services:
                self.tell(address, lambda service: service.admit(rank, incarnation, clock))
            client = self.clients[rank] = Client(self, rank, incarnation, clock, program)
            self.history.joined(rank, incarnation, clock)
            self.network.after(self.network.delay(), client.go)
            self.changing -= 1

        for address in self.services:
            self.tell(address, hold)

    def move(self, giver, count, up):
        """Give slots at an edge of one endpoint's range to its neighbour, at a moment when both are equally far."""
        endpoints = list(self.map.endpoints)
        other = giver + 1 if up else giver - 1
        a, b = (self.services[endpoints[i].address] for i in (giver, other))
        if a.end - a.first <= count:
            return

        def state(service):
            return service.applied, service.cap, {rank: (m.incarnation, m.clock) for rank, m in service.members.items()}

        if state(a) != state(b):
            if self.network.now < PATIENCE:
                self.network.after(0.001, self.move, giver, count, up)
            return
        first, end = (a.end - count, a.end) if up else (a.first, a.first + count)
        epoch = self.map.epoch + 1
        a.give(b, first, end, epoch)
        for i, service in ((giver, a), (other, b)):
            self.reply(endpoints[i].address, service.released())
        ranges = [(service.first, service.end) for service in (self.services[one.address] for one in endpoints)]
        self.map = map_of(
            epoch, *((*slots, one.address, one.server) for slots, one in zip(ranges, endpoints, strict=True))
        )
        for service in self.services.values():
            service.set_map(epoch, [(service.first, service.end)])

    # --- running ---

    def run(self, until=None):
        """Run until all programs have ended; then let what is still on its way arrive. Returns the history."""

        def done():
            return all(client.finished for client in self.clients) and not self.changing

        self.network.run(until or done, self.limit)
        self.note_end(self.history, self.clients, self.tables)
        for client in self.clients + self.zombies:
            client.alive = False
        self.network.run(lambda: False, self.network.now + PATIENCE)  # ghosts, too
        return self.history

    def note_end(self, history, clients, tables):
        """Record which of these workers have not finished, and the steps of these tables."""
        history.stuck = [f"worker {c.rank} at clock {c.clock}" for c in clients if c.alive and not c.finished]
        history.steps = {table: self.steps(table) for table in tables}
        history.errors = [client.error for client in clients if client.alive and client.error is not None]

    def steps(self, table):
        """Return the steps that each endpoint has taken with a table."""
        return [service.shard(table).step for service in self.services.values()]

    def rows(self, keys, table=1):
        """Rows as they stand, straight out of the endpoints that own them."""
        batch = _core.KeyBatch(np.asarray(keys, np.uint64), self.slots, THREAD)
        rows = np.empty((len(batch), self.dims[table]), np.float32)
        for first_slot, end_slot, endpoint, _ in self.map.runs:
            begin, end = (int(batch.offsets[slot]) for slot in (first_slot, end_slot))
            if begin < end:
                part = _core.KeyBatch(_core.unmix(batch.hashes[begin:end]), self.slots, THREAD)
                values = np.empty((end - begin, self.dims[table]), np.float32)
                self.services[endpoint.address].shard(table).pull(part, values)
                rows[begin:end] = values
        out = np.empty((len(keys), self.dims[table]), np.float32)
        batch.expand(rows, self.dims[table], out, THREAD)
        return out
