"""Workers and jobs of one name: places, incarnations, barriers; passes over the data: passes.py.

    job        W workers have joined; those that asked for no rank get the remaining ones. All servers start the job,
               then all workers receive JoinReply; it ends when the last worker has left or died, and the next join
               begins another
    queue      workers that wait for the end of the job, or for a rank
    change     workers of a job of 2 to 8, say, wait in the queue, or one wants to leave, or has died: its members hand
               over their states and leave, and the next job, of all that stay and come, continues it (continuation.py)
    vacancy    the place of a worker that died, for as long as the others wait for its replacement: it is fenced, and no
               clock ends without it. A replacement begins at its last counted clock; without one it is dismissed

Invariants: I1, I2 and I5 of membership.py. Threads: one.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from shoal.base.plural import counted
from shoal.cluster.protocol.messages import (
    MAX_WORKERS,
    AcceptedReply,
    Admit,
    BarrierReply,
    Dismiss,
    EndJob,
    ErrorReply,
    Fence,
    Hold,
    Join,
    JoinReply,
    LeaveReply,
    ReplyBody,
    StartJob,
    TakeSplit,
    WorkerGone,
    WorkersChange,
)
from shoal.cluster.protocol.reports import WorkerDied
from shoal.cluster.protocol.status import Outcome
from shoal.cluster.scheduler.continuation import continuation_of, least_clock, lost_ranks, lost_worker, why_over
from shoal.cluster.scheduler.inputs import JobLineState, Settings
from shoal.cluster.scheduler.members import (
    Continuation,
    FormingJob,
    Job,
    Vacancy,
    WorkerPeer,
    disagreement,
    restore_job,
    why_refused,
)
from shoal.cluster.scheduler.numbers import NumberSource
from shoal.cluster.scheduler.orders import Operation, Orders
from shoal.cluster.scheduler.passes import take_split
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.servers import Servers
from shoal.cluster.scheduler.tables import Tables

_MAY_BE_DEAD_AFTER = 2  # heartbeats missed
_RETURN_SECONDS = 20.0  # for the workers of a job to join the one that continues it


class Jobs:
    """The job of a name, the one that forms, and the workers that wait."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        peers: Peers,
        orders: Orders,
        servers: Servers,
        tables: Tables,
        numbers: NumberSource,
    ) -> None:
        # Empty for the default job.
        self.name = name
        self._settings = settings
        self._peers = peers
        self._orders = orders
        self._servers = servers
        self._tables = tables
        self._numbers = numbers
        self.job: Job | None = None
        # Whether a member of the job may be dead.
        self.members_silent = False
        self._outcome: Outcome = ""
        self._incarnations: dict[int, int] = {}
        self._clocks_before = 0  # of the last job
        self._forming = FormingJob()
        self._continuation: Continuation | None = None  # until the next job begins
        self._admitting: WorkerPeer | None = None
        self._queue: dict[bytes, WorkerPeer] = {}  # workers, by sender, that wait for the end of the job or for a rank
        self._vacant = False  # whether one of them may get a place

    # --- the state as a record --------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Return the fields of :class:`.JobLineState`."""
        return {
            "incarnations": dict(self._incarnations),
            "clocks_before": self._clocks_before,
            "job": None if self.job is None else self.job.save(),
            "continuation": None if self._continuation is None else self._continuation.save(),
            "forming": list(self._forming.workers),
            "queue": list(self._queue),
            "silent": self.members_silent,
            "outcome": self._outcome,
        }

    def restore(self, state: JobLineState) -> None:
        """Take a saved state."""
        self._incarnations, self._clocks_before = dict(state.incarnations), state.clocks_before
        self.members_silent, self._outcome = state.silent, state.outcome
        workers = {sender: peer for sender, peer in self._peers.known.items() if isinstance(peer, WorkerPeer)}
        self.job = None if state.job is None else restore_job(state.job, workers)
        if state.continuation is not None:
            self._continuation = Continuation(**structs.asdict(state.continuation))
        for sender in state.forming:
            self._forming.add(workers[sender])
        self._queue = {sender: workers[sender] for sender in state.queue}

    # --- the name ---------------------------------------------------------------------------------------------

    @property
    def _about(self) -> str:
        return f"job {self.name!r}" if self.name else "the job"

    @property
    def is_unused(self) -> bool:
        """Whether there is no job, and no worker waits for one."""
        return self.job is None and self._admitting is None and not len(self._forming) and not self._queue

    @property
    def outcome(self) -> Outcome:
        """Of the last job whose number of workers may change; see `.StatusReply`."""
        return "moving" if self._continuation is not None and self._continuation.expected else self._outcome

    def _number(self, job: Job) -> int:
        """Return what identifies a job in orders: the default job is meant by 0."""
        return job.number if self.name else 0

    # --- joining ----------------------------------------------------------------------------------------------

    def members_may_be_dead(self) -> bool:
        """Whether a member of the job has missed heartbeats, or is disconnected."""
        return self.job is not None and any(
            member.disconnected_at is not None
            or self._peers.now - member.last_heard > _MAY_BE_DEAD_AFTER * self._settings.heartbeat
            for member in self.job.members.values()
        )

    def set_members_silent(self, silent: bool) -> None:
        """Keep whether a member of the job may be dead."""
        self.members_silent = silent
        self._vacant = not silent

    def fill_vacancies(self) -> None:
        """Assign places that may have become free."""
        if self._vacant:
            self._vacant = False
            self._seat()

    def join(self, worker: WorkerPeer, number: int, join: Join) -> None:
        """Process the request of a worker to join."""
        size = join.workers if join.workers is not None else self._settings.workers
        fault = why_refused(worker, join, size, is_over=self._outcome == "finished" and self.job is None)
        if fault:
            self._peers.reply(worker, number, ErrorReply("input", fault))
            return
        worker.join = number
        worker.wants = Join(join.rank, (), size, join.rules, most=join.most, job=self.name)
        worker.waiting[number] = "the other workers"
        self._queue[worker.sender] = worker
        self._seat()

    def _seat(self) -> None:
        """Assign places to waiting workers, in the order of their arrival."""
        line, self._queue = self._queue, {}
        for worker in line.values():
            fault = self._place_in_job(worker) if self.job is not None else self._place_in_forming(worker)
            if fault:
                self._peers.reply(worker, worker.join, ErrorReply("input", fault))
                worker.join = 0
            elif fault is None:
                self._queue[worker.sender] = worker
        self.start_if_complete()

    def _place_in_job(self, worker: WorkerPeer) -> str | None:
        """Admit a worker: returns an empty string, the reason for a refusal, or None if it has to wait."""
        job = self.job
        assert job is not None
        if job.most:
            fault = disagreement(self._about, worker, (job.least, job.most), job.consistency)
            if not fault and job.size < job.most:
                self._change(job, f"{worker.about} waits to join")
            return fault or None
        if self._admitting is None and (found := self._vacancy_for(worker)) is not None:
            fault = disagreement(self._about, worker, (job.size, 0), job.consistency)
            if not fault:
                self._admitting = worker
                self._orders.begin(self._take_over(job, found, worker))
            return fault
        # If members are silent, perhaps all have died, and the waiting workers begin a new job.
        if self._admitting is not None or not job.dead or not job.members or self.members_silent:
            return None
        rank = min(job.dead) if worker.wants.rank is None else worker.wants.rank
        if rank not in job.dead:
            return None
        fault = disagreement(self._about, worker, (job.size, 0), job.consistency)
        if not fault:
            self._admitting = worker
            job.dead.discard(rank)
            self._orders.begin(self._admit(job, rank, worker))
        return fault

    def _vacancy_for(self, worker: WorkerPeer) -> int | None:
        """Return the rank of a place that a worker may take now."""
        assert self.job is not None
        free = [rank for rank, one in self.job.vacant.items() if one.clock >= 0 and worker.wants.rank in (None, rank)]
        return min(free, default=None)

    def _place_in_forming(self, worker: WorkerPeer) -> str | None:
        """As `_place_in_job`."""
        first = self._forming.first
        if first is not None:
            assert first.wants.workers is not None
            assert first.wants.rules is not None
            fault = disagreement(self._about, worker, (first.wants.workers, first.wants.most), first.wants.rules)
            if fault:
                return fault
        if not self._forming.takes(worker):
            return None
        self._forming.add(worker)
        return ""

    def missing(self, worker: WorkerPeer) -> str:
        """Return what a worker waits for that has not joined yet."""
        if worker.sender in self._queue:
            return self._why_queued(worker)
        return f"{len(self._forming)} of {worker.wants.workers} workers have joined"

    def _why_queued(self, worker: WorkerPeer) -> str:
        rank = worker.wants.rank
        holders = self.job.members if self.job is not None else self._forming.ranked
        if rank is not None and rank in holders:
            holder = holders[rank]
            return (
                f"rank {rank} belongs to {holder.about}, last heartbeat {self._peers.now - holder.last_heard:.1f} s ago"
            )
        if self.job is not None and self.job.most:
            if self.job.size < self.job.most:
                return f"the {counted(self.job.size, 'worker')} of the job have not handed over their states yet"
            return f"the job has {self.job.most} workers, as many as it may have"
        if self.job is not None:
            size, left = counted(self.job.size, "worker"), len(self.job.members)
            return f"the job of {size} continues with {left}; the next one begins after it"
        return f"the next job has all of its {counted(len(self._forming), 'worker')}"

    def start_if_complete(self) -> None:
        """Begin the job that forms, if all of its workers and all servers have joined."""
        first = self._forming.first
        if self._servers.map is None or self.job is not None or self._servers.broken or first is None:
            return
        assert first.wants.rules is not None
        if not first.wants.most:
            self._continuation = None
        after = self._continuation
        if len(self._forming) < max(self._forming.size, after.expected if after is not None else 0):
            return
        members = self._forming.assign_ranks()
        self._forming.clear()
        for rank, worker in members.items():
            worker.rank = rank
            worker.incarnation = self._raise_incarnation(rank)
            worker.waiting[worker.join] = "the servers to start the job"
        number = self._numbers.draw(32) or 1
        self.job = Job(number, first.wants.rules, len(members), members, name=self.name)
        if first.wants.most:
            self.job.least, self.job.most = first.wants.workers or 0, first.wants.most
            self._outcome = "unfinished"
        if after is not None:
            self.job.continues, self.job.continued, self.job.continued_lost = after.job, after.size, after.lost
            self._continuation = None
        what = f"job {self.name!r}" if self.name else "a job"
        self._peers.notes.append(f"{what} of {counted(len(members), 'worker')} begins, under {first.wants.rules}")
        self._orders.begin(self._start(self.job, list(members.values())))

    def _raise_incarnation(self, rank: int) -> int:
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        return self._incarnations[rank]

    def _start(self, job: Job, workers: list[WorkerPeer]) -> Operation:
        incarnations = tuple(worker.incarnation for worker in workers)
        is_named = bool(self.name)
        results = yield StartJob(job.number, job.consistency, incarnations, self._clocks_before, is_named)
        refused = self._orders.refusal(results, f"cannot begin a job of {counted(job.size, 'worker')}")
        if refused is not None:
            if is_named:  # some servers may have begun it
                yield EndJob(job.number)
            self.job = None
            for worker in workers:
                if worker.sender in self._peers.known and worker.join in worker.waiting:
                    self._peers.reply(worker, worker.join, refused)
                    worker.join, worker.rank = 0, -1
            self._seat()
            return
        for worker in workers:
            self._reply_joined(job, worker, 0)

    def _admit(self, job: Job, rank: int, worker: WorkerPeer) -> Operation:
        clock = max(done.result for done in (yield Hold(self._number(job))))
        worker.incarnation = self._raise_incarnation(rank)
        yield Admit(rank, worker.incarnation, clock, self._number(job))
        self._admitting = None
        if worker.sender in self._peers.known:
            worker.rank = rank
            job.members[rank] = worker
            self._peers.notes.append(f"{worker} replaces a dead worker, at clock {clock}")
            self._reply_joined(job, worker, clock)
        else:  # it has died meanwhile
            job.dead.add(rank)
            yield from self._dismiss(job, rank, worker.incarnation)
        self._seat()

    def _take_over(self, job: Job, rank: int, worker: WorkerPeer) -> Operation:
        """Put a worker in the place of a dead one, at the clock from which on nothing of the dead one counts.

        No clock ends meanwhile: a rank that no worker has stands at it.
        """
        gone = job.vacant[rank]  # until it is taken: no barrier is passed without its rank
        clock = gone.clock if job.consistency.mode == "bsp" else gone.least
        aside = job.size
        its_incarnation = self._raise_incarnation(aside)
        yield Admit(aside, its_incarnation, clock, self._number(job))
        yield Dismiss(rank, gone.incarnation, clock, gone.tables, self._number(job))
        worker.incarnation = self._raise_incarnation(rank)
        yield Admit(rank, worker.incarnation, clock, self._number(job))
        yield Dismiss(aside, its_incarnation, clock, (), self._number(job))
        self._admitting = None
        if worker.sender in self._peers.known:
            worker.rank = rank
            del job.vacant[rank]
            job.members[rank] = worker
            self._peers.notes.append(f"{worker} replaces {gone.about}, from clock {clock} on")
            repeats = 0 if job.consistency.mode == "bsp" else gone.clock - clock + 1
            self._reply_joined(job, worker, clock, replaces=True, repeats=repeats)
        else:  # it has died meanwhile
            gone.incarnation, gone.clock = worker.incarnation, -1
            yield from self._vacate(job, rank, gone)
        self._seat()

    def _vacate(self, job: Job, rank: int, gone: Vacancy) -> Operation:
        """Fence a dead worker, for which the others wait."""
        results = yield Fence(rank, gone.incarnation, self._number(job))
        last = max(results, key=lambda done: done.result)
        gone.clock, gone.tables = last.result, last.tables
        gone.least = least_clock(results)
        self._seat()

    def replacement_overdue(self) -> int | None:
        """Return the rank of a dead worker whose replacement has not come in time."""
        vacant = self.job.vacant if self.job is not None and self._admitting is None else {}
        late = [rank for rank, one in vacant.items() if one.clock >= 0 and one.until <= self._peers.now]
        return min(late, default=None)

    def give_up(self, rank: int) -> None:
        """Wait no longer for the replacement of a dead worker."""
        assert self.job is not None
        gone = self.job.vacant.pop(rank)
        text = f"{gone.about}, and was not replaced in {self._settings.replacement_seconds:g} s"
        self._peers.notes.append(text)
        self._peers.publish(WorkerGone(rank, gone.incarnation, text, self.job.number))
        self.job.dead.add(rank)
        self._check_barriers()
        if not self._servers.broken:
            self._orders.begin(self._dismiss(self.job, rank, gone.incarnation))
        self._vacant = True

    def restarted(self) -> None:
        """Give replacements their whole time: the scheduler was not there."""
        for one in self.job.vacant.values() if self.job is not None else ():
            one.until = self._peers.now + self._settings.replacement_seconds
        if self._continuation is not None:
            self._continuation.until = self._peers.now + _RETURN_SECONDS

    def _reply_joined(
        self, job: Job, worker: WorkerPeer, clock: int, *, replaces: bool = False, repeats: int = 0
    ) -> None:
        if worker.sender not in self._peers.known or worker.join not in worker.waiting:
            return
        assert self._servers.map is not None
        worker.inside = True
        tables = self._tables.all
        joined = JoinReply(
            worker.rank,
            self._servers.map,
            tables,
            worker.incarnation,
            job.number,
            clock,
            job.size,
            self._settings.replacement_seconds if not job.most else 0.0,
            replaces,
            repeats,
            dict(job.passed) if replaces else {},
            job.continues,
            job.continued,
            job.continued_lost,
        )
        self._peers.reply(worker, worker.join, joined)

    @property
    def _is_over(self) -> bool:
        job = self.job
        if job is None or job.members or job.vacant or self._admitting is not None:
            return False
        return not job.most or len(job.lost) == len(job.dead | job.early)  # what the last ones had ticked is known

    def _end(self) -> None:
        assert self.job is not None
        self._peers.notes.append(f"{self._about} has ended")
        self._clocks_before = self.job.clock
        job, self.job = self.job, None
        if job.most:
            self._continue(job)
        self._seat()

    # --- another number of workers ----------------------------------------------------------------------------

    def _change(self, job: Job, why: str) -> None:
        """Have the members of a job hand over their states and leave it."""
        if not job.changes:
            job.changes = True
            self._peers.notes.append(f"the number of workers changes: {why}")
            self._peers.publish(WorkersChange(job.number))

    def hand_over(self, worker: WorkerPeer, number: int, *, returns: bool, begun: bool) -> None:
        """Process that a member has handed over its state."""
        if self.job is None or not self.is_member(worker) or not self.job.most:
            self._peers.reply(worker, number, ErrorReply("protocol", f"{worker} has a job of fixed workers"))
            return
        if not self.job.handed_over:
            self.job.coming = len(self._joining())
        self.job.handed_over[worker.rank] = returns
        self.job.begun = self.job.begun or begun
        self._change(self.job, f"{worker} leaves")
        self._peers.reply(worker, number, AcceptedReply())

    def _joining(self) -> list[WorkerPeer]:
        """Return the workers that wait to take part in a job whose number of workers may change."""
        return [worker for worker in self._queue.values() if worker.wants.most]

    def _continue(self, job: Job) -> None:
        """Have the next job continue one whose workers have handed over their states; without those it is over."""
        if job.handed_over:
            self._continuation = continuation_of(job, until=self._peers.now + _RETURN_SECONDS)
            return
        for worker in self._joining():
            del self._queue[worker.sender]
            self._peers.reply(worker, worker.join, ErrorReply("input", why_over(job)))
            worker.join = 0

    def forming_overdue(self) -> bool:
        """Whether workers that have left a job have not joined the one that continues it in time."""
        after = self._continuation
        return after is not None and after.expected > 0 and after.until <= self._peers.now

    def expect_no_more(self) -> None:
        """Begin the next job with the workers that have come, if they are enough."""
        assert self._continuation is not None
        self._continuation.expected = 0

    # --- leaving and dying ------------------------------------------------------------------------------------

    def is_member(self, worker: WorkerPeer) -> bool:
        """Whether a worker is part of the job."""
        return self.job is not None and self.job.members.get(worker.rank) is worker

    def _take_out(self, worker: WorkerPeer) -> None:
        assert self.job is not None
        del self.job.members[worker.rank]
        for came in self.job.barriers.values():
            came.pop(worker.rank, None)
        for one in self.job.passes.values():
            one.splits.release(worker.sender)
            one.clocks.pop(worker.rank, None)
        self.job.reached.pop(worker.rank, None)
        self._check_barriers()

    def leave(self, worker: WorkerPeer, number: int, status: int) -> None:
        """Process the request of a member to leave, with the status 0 unless it has ended its work early."""
        assert self.job is not None
        worker.waiting = {number: "the servers to dismiss it"}
        if self.job.most and worker.rank not in self.job.handed_over:
            if status:
                self.job.early.add(worker.rank)
            else:
                self._outcome = "finished"
        self._take_out(worker)
        self._orders.begin(self._dismiss_leaving(self.job, worker, number))

    def lose(self, worker: WorkerPeer, why: str) -> None:
        """Process the end of a worker that did not leave the job."""
        self._queue.pop(worker.sender, None)
        if self._forming.remove(worker):
            self._vacant = True
        elif self.is_member(worker):
            assert self.job is not None
            text = f"{worker} is dead, {why}"
            seconds = self._settings.replacement_seconds
            if seconds and not self.job.most and not self._servers.broken and self.job.size < MAX_WORKERS:
                self._peers.notes.append(f"{text}: the job waits {seconds:g} s for its replacement")
                self._peers.deaths.append(WorkerDied(worker.rank, worker.about))
                gone = Vacancy(worker.incarnation, text, self._peers.now + seconds)
                self.job.vacant[worker.rank] = gone
                self._take_out(worker)
                self._orders.begin(self._vacate(self.job, worker.rank, gone))
                return
            self._peers.notes.append(text)
            self._peers.publish(WorkerGone(worker.rank, worker.incarnation, text, self.job.number))
            self.job.dead.add(worker.rank)
            if worker.rank in self.job.handed_over:
                self.job.handed_over[worker.rank] = False
            elif self.job.most:
                self._change(self.job, text)
            self._take_out(worker)
            if not self._servers.broken:
                self._orders.begin(self._dismiss(self.job, worker.rank, worker.incarnation))
            self._vacant = True

    def cancel(self) -> None:
        """Forget the workers that wait: the cluster is broken."""
        self._forming.clear()
        self._queue.clear()
        self._admitting = None

    def _dismiss_leaving(self, job: Job, worker: WorkerPeer, number: int) -> Operation:
        yield from self._dismiss(job, worker.rank, worker.incarnation)
        if worker.sender in self._peers.known:
            self._peers.reply(worker, number, LeaveReply())
            self._peers.forget(worker, LeaveReply())

    def _dismiss(self, job: Job, rank: int, incarnation: int) -> Operation:
        # Its last tick may have reached some endpoints and not others: all end its clocks up to the greatest.
        results = yield Fence(rank, incarnation, self._number(job))
        last = max(results, key=lambda done: done.result)
        if rank in job.early or (job.most and rank in job.dead):
            job.lost += (lost_worker(job, rank, results),)
        order = Dismiss(rank, incarnation, last.result, last.tables, self._number(job))
        job.clock = max(job.clock, *(done.result for done in (yield order)))
        if self.job is job and self._is_over:
            if self.name:
                yield EndJob(job.number)
            self._end()

    # --- barriers and passes ----------------------------------------------------------------------------------

    def barrier(self, worker: WorkerPeer, number: int, name: str) -> None:
        """Process that a worker has reached a barrier."""
        if self.job is None or not self.is_member(worker):
            self._peers.reply(worker, number, ErrorReply("protocol", f"{worker} has left the job and sent a barrier"))
            return
        worker.waiting[number] = f"the others at barrier {name!r}"
        came = self.job.barriers.setdefault(name, {})
        before = came.get(worker.rank)
        if before is not None:
            worker.waiting.pop(before, None)  # its wait timed out, and it came again
        came[worker.rank] = number
        self._check_barriers()

    def _check_barriers(self) -> None:
        assert self.job is not None
        for name, came in list(self.job.barriers.items()):
            if self.job.members.keys() | self.job.vacant.keys() <= came.keys():
                del self.job.barriers[name]
                self.job.passed[name] = self.job.passed.get(name, 0) + 1
                for rank, number in came.items():
                    worker = self.job.members.get(rank)
                    if worker is not None and number in worker.waiting:
                        self._peers.reply(worker, number, BarrierReply(lost_ranks(self.job)))

    def take_split(self, worker: WorkerPeer, take: TakeSplit) -> ReplyBody:
        """Return the reply to a request for a split of the data."""
        if self.job is None or not self.is_member(worker):
            return ErrorReply("protocol", f"{worker} has left the job and requested data")
        return take_split(self.job, worker, take, self._peers.now)
