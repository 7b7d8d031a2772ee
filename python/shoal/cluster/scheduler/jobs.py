"""The workers and the jobs of each name: places, incarnations, barriers; passes over the data: passes.py.

    name       the default job has an empty name; others have workers, ranks, barriers and passes of their own. A name
               is free again when the last worker of its job has left or died, and no other waits for it
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

from collections.abc import Iterator
from typing import cast

from shoal.base.defaults import MAX_WORKERS
from shoal.base.plural import counted
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    Admit,
    Barrier,
    BarrierReply,
    Dismiss,
    EndJob,
    ErrorReply,
    Fence,
    HandOver,
    Hold,
    JobConsistency,
    Join,
    JoinReply,
    LeaveReply,
    StartJob,
    TakeSplit,
    WorkerGone,
    WorkersChange,
)
from shoal.cluster.protocol.records import ReplyBody
from shoal.cluster.protocol.reports import WorkerDied
from shoal.cluster.scheduler.continuation import continuation_of, least_clock, why_over
from shoal.cluster.scheduler.handlers import handles
from shoal.cluster.scheduler.inputs import FormingOverdue, MembersSilent, ReplacementOverdue
from shoal.cluster.scheduler.orders import Operation, Orders
from shoal.cluster.scheduler.passes import take_split
from shoal.cluster.scheduler.peers import Peers
from shoal.cluster.scheduler.state import Job, JobLine, State, Vacancy, WorkerPeer

_MAY_BE_DEAD_AFTER = 2  # heartbeats missed
_RETURN_SECONDS = 20.0  # for the workers of a job to join the one that continues it
_MAX_NAMES = 64  # of jobs at the same time


class Jobs:
    """The jobs of all names."""

    def __init__(self, state: State, peers: Peers, orders: Orders) -> None:
        self._state = state
        self._peers = peers
        self._orders = orders
        self._admitting: set[str] = set()  # names whose servers admit a worker into a job that runs
        self._has_place: set[str] = set()  # names of which a worker that waits may get a place

    def of(self, worker: WorkerPeer) -> JobLine:
        """Return the jobs of the name that a worker has asked for."""
        return self._state.jobs.get(worker.job) or self._state.jobs[""]

    def _worker(self, sender: bytes) -> WorkerPeer:
        return cast(WorkerPeer, self._peers.known[sender])

    def _is_known(self, worker: WorkerPeer) -> bool:
        return worker.sender in self._peers.known

    # --- inputs from the time ---------------------------------------------------------------------------------

    def find_due(self) -> Iterator[MembersSilent | ReplacementOverdue | FormingOverdue]:
        """Yield what is due by the time alone; each is applied before the next one."""
        for line in list(self._state.jobs.values()):
            silent = self._members_may_be_dead(line)
            if silent != line.members_silent:
                yield MembersSilent(silent, line.name)
            while (rank := self._find_overdue(line)) is not None and not self._state.broken:
                yield ReplacementOverdue(rank, line.name)
            after = line.continuation
            is_overdue = after is not None and after.expected > 0 and after.until <= self._state.now
            if is_overdue and not self._state.broken:
                yield FormingOverdue(line.name)

    def _members_may_be_dead(self, line: JobLine) -> bool:
        heard_since = self._state.now - _MAY_BE_DEAD_AFTER * self._state.settings.heartbeat
        links = (self._peers.known[sender].link for sender in line.job.members.values()) if line.job else ()
        return any(link.disconnected_at is not None or link.last_heard < heard_since for link in links)

    @handles(MembersSilent)
    def set_members_silent(self, entry: MembersSilent) -> None:
        """Keep whether a member of the job may be dead."""
        self._state.jobs[entry.job].members_silent = entry.silent
        if not entry.silent:
            self._has_place.add(entry.job)

    def _find_overdue(self, line: JobLine) -> int | None:
        """Return the rank of a dead worker whose replacement has not come in time."""
        vacant = line.job.vacant if line.job is not None and line.name not in self._admitting else {}
        late = [rank for rank, one in vacant.items() if one.clock >= 0 and one.until <= self._state.now]
        return min(late, default=None)

    @handles(ReplacementOverdue)
    def give_up(self, entry: ReplacementOverdue) -> None:
        """Wait no longer for the replacement of a dead worker."""
        line = self._state.jobs[entry.job]
        assert line.job is not None
        gone = line.job.vacant.pop(entry.rank)
        text = f"{gone.about}, and was not replaced in {self._state.settings.replacement_seconds:g} s"
        line.job.dead.add(entry.rank)
        self._announce(line.job, entry.rank, gone.incarnation, text)
        self._check_barriers(line.job)
        self._begin_dismissal(line, line.job, entry.rank, gone.incarnation)

    @handles(FormingOverdue)
    def expect_no_more(self, entry: FormingOverdue) -> None:
        """Begin the next job with the workers that have come, if they are enough."""
        after = self._state.jobs[entry.job].continuation
        assert after is not None
        after.expected = 0

    def restarted(self) -> None:
        """Give replacements their whole time: the scheduler was not there."""
        for line in self._state.jobs.values():
            for one in line.job.vacant.values() if line.job is not None else ():
                one.until = self._state.now + self._state.settings.replacement_seconds
            if line.continuation is not None:
                line.continuation.until = self._state.now + _RETURN_SECONDS

    def settle(self) -> None:
        """Assign places that have become free, begin complete jobs, and free the names that no worker uses."""
        for line in list(self._state.jobs.values()):
            if line.name in self._has_place:
                self._has_place.discard(line.name)
                self._assign_places(line)
            self._start_if_complete(line)
            is_unused = not (line.job or line.forming or line.queue or line.name in self._admitting)
            if is_unused and line.name:
                del self._state.jobs[line.name]

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self, worker: WorkerPeer, number: int, join: Join) -> ReplyBody | None:
        """Process the request of a worker to join."""
        name = worker.job if worker.join else join.job
        size = join.workers if join.workers is not None else self._state.settings.workers
        line = self._state.jobs.get(name) or JobLine(name=name)
        fault = self._why_refused(worker, join, size, line)
        if fault:
            return ErrorReply("input", fault)
        self._state.jobs[name] = line
        worker.join = number
        worker.wants = Join(join.rank, (), size, join.rules, most=join.most, job=name)
        worker.waiting[number] = "the other workers"
        line.queue[worker.sender] = None
        self._assign_places(line)
        return None

    def _why_refused(self, worker: WorkerPeer, join: Join, size: int, line: JobLine) -> str:
        """Return why a worker cannot join any job as it asks to, or one that is over; empty: it can."""
        name = line.name
        if worker.join:
            return f"{worker} has joined already"
        if name and name not in self._state.jobs and len(self._state.jobs) > _MAX_NAMES:
            return f"there are {_MAX_NAMES} named jobs, the maximum: job {name!r} can begin when one has ended"
        if name and join.workers is None:
            return (
                f"job {name!r} needs its number of workers: pass workers=N (--workers N), the same for each of its "
                "workers"
            )
        if name and join.most:
            return (
                f"the number of workers of job {name!r} cannot change, got {join.workers} to {join.most}: pass one "
                "number, or join the job without a name"
            )
        if not 1 <= size <= MAX_WORKERS:
            return f"a job has from 1 to {MAX_WORKERS} workers, got workers={size}"
        if join.most and not size <= join.most <= MAX_WORKERS:
            return f"a job has {size} to {MAX_WORKERS} workers, got {join.most} as the greatest number"
        if join.most and join.rank is not None:
            return f"the number of workers may change, and ranks with it: leave out rank={join.rank}"
        if join.rank is not None and not 0 <= join.rank < size:
            return f"rank {join.rank} is out of range for {counted(size, 'worker')}: ranks start at 0"
        if join.rules is None:
            return "a worker that joins has to pass its consistency"
        if join.most and line.job is None and line.last_outcome == "finished":
            return (
                "a job whose number of workers may change has finished its fit here, and this worker would learn from "
                f"all data again: to train further, pass one number of workers ({size} instead of {size}:{join.most}), "
                "or use a new cluster"
            )
        return ""

    def _assign_places(self, line: JobLine) -> None:
        """Assign places to waiting workers, in the order of their arrival."""
        waiting, line.queue = line.queue, {}
        for worker in map(self._worker, waiting):
            fault = self._place_in_forming(line, worker) if line.job is None else self._place_in_job(line, worker)
            if fault:
                self._refuse(worker, ErrorReply("input", fault))
            elif fault is None:
                line.queue[worker.sender] = None
        self._start_if_complete(line)

    def _refuse(self, worker: WorkerPeer, reply: ReplyBody) -> None:
        self._peers.reply(worker, worker.join, reply)
        worker.join = 0

    def _place_in_job(self, line: JobLine, worker: WorkerPeer) -> str | None:
        """Admit a worker: returns an empty string, the reason for a refusal, or None if it has to wait."""
        job, rank = line.job, worker.wants.rank
        assert job is not None
        if job.most:
            fault = _disagreement(line.about, worker, (job.least, job.most), job.consistency)
            if not fault and job.size < job.most:
                self._change(job, f"{worker.about} waits to join")
            return fault or None
        if line.name in self._admitting:
            return None
        vacant = [place for place, one in job.vacant.items() if one.clock >= 0 and rank in (None, place)]
        # If members are silent, perhaps all have died, and the waiting workers begin a new job.
        dead = [place for place in job.dead if rank in (None, place)] if job.members and not line.members_silent else []
        if not vacant and not dead:
            return None
        fault = _disagreement(line.about, worker, (job.size, 0), job.consistency)
        if not fault:
            self._admitting.add(line.name)
            if vacant:
                self._orders.begin(self._take_over(line, job, min(vacant), worker))
            else:
                job.dead.discard(min(dead))
                self._orders.begin(self._admit(line, job, min(dead), worker))
        return fault

    def _place_in_forming(self, line: JobLine, worker: WorkerPeer) -> str | None:
        """As `_place_in_job`."""
        wants, rank = self._first(line), worker.wants.rank
        if wants is not None:
            assert wants.workers is not None
            assert wants.rules is not None
            fault = _disagreement(line.about, worker, (wants.workers, wants.most), wants.rules)
            if fault:
                return fault
            is_taken = rank is not None and rank in line.forming.values()
            if is_taken or len(line.forming) >= max(wants.workers, wants.most):
                return None
        line.forming[worker.sender] = rank
        return ""

    def _first(self, line: JobLine) -> Join | None:
        """Return what the first worker of the next job asks for, as the others do; None: there is none."""
        return next((self._worker(sender).wants for sender in line.forming), None)

    def missing(self, worker: WorkerPeer) -> str:
        """Return what a worker waits for that has not joined yet."""
        line = self.of(worker)
        job, rank = line.job, worker.wants.rank
        if worker.sender not in line.queue:
            return f"{len(line.forming)} of {worker.wants.workers} workers have joined"
        holders = job.members if job is not None else {wanted: sender for sender, wanted in line.forming.items()}
        if rank is not None and (holder := holders.get(rank)) is not None:
            peer = self._worker(holder)
            silent = self._state.now - peer.link.last_heard
            return f"rank {rank} belongs to {peer.about}, last heartbeat {silent:.1f} s ago"
        if job is None:
            return f"the next job has all of its {counted(len(line.forming), 'worker')}"
        if job.most > job.size:
            return f"the {counted(job.size, 'worker')} of the job have not handed over their states yet"
        if job.most:
            return f"the job has {job.most} workers, as many as it may have"
        size, left = counted(job.size, "worker"), len(job.members)
        return f"the job of {size} continues with {left}; the next one begins after it"

    def _start_if_complete(self, line: JobLine) -> None:
        """Begin the job that forms, if all of its workers and all servers have joined."""
        state, wants = self._state, self._first(line)
        if state.published is None or line.job is not None or state.broken or wants is None:
            return
        assert wants.rules is not None
        if not wants.most:
            line.continuation = None
        after = line.continuation
        if len(line.forming) < max(wants.workers or 0, after.expected if after is not None else 0):
            return
        members = line.assign_ranks()
        line.forming = {}
        workers = [self._worker(sender) for sender in members.values()]
        for rank, worker in zip(members, workers, strict=True):
            worker.rank = rank
            worker.incarnation = line.raise_incarnation(rank)
            worker.waiting[worker.join] = "the servers to start the job"
        line.job = job = Job(
            number=state.draw(32) or 1, name=line.name, consistency=wants.rules, size=len(members), members=members
        )
        if wants.most:
            job.least, job.most = wants.workers or 0, wants.most
            line.last_outcome = "unfinished"
        if after is not None:
            job.continues = after.job
            line.continuation = None
        what = line.about if line.name else "a job"
        self._peers.notes.append(f"{what} of {counted(len(members), 'worker')} begins, under {wants.rules}")
        self._orders.begin(self._start(line, job, workers))

    # --- operations -------------------------------------------------------------------------------------------

    def _start(self, line: JobLine, job: Job, workers: list[WorkerPeer]) -> Operation:
        incarnations = tuple(worker.incarnation for worker in workers)
        is_named = bool(job.name)
        results = yield StartJob(job.number, job.consistency, incarnations, line.clocks_before, is_named)
        refused = self._orders.refusal(results, f"cannot begin a job of {counted(job.size, 'worker')}")
        if refused is not None:
            if is_named:  # some servers may have begun it
                yield EndJob(job.number)
            line.job = None
            for worker in workers:
                if self._is_known(worker) and worker.join in worker.waiting:
                    self._refuse(worker, refused)
                    worker.rank = -1
            self._assign_places(line)
            return
        for worker in workers:
            self._reply_joined(job, worker, 0)

    def _admit(self, line: JobLine, job: Job, rank: int, worker: WorkerPeer) -> Operation:
        clock = max(done.result for done in (yield Hold(self._number(job))))
        worker.incarnation = line.raise_incarnation(rank)
        yield Admit(rank, worker.incarnation, clock, self._number(job))
        self._admitting.discard(line.name)
        if self._is_known(worker):
            worker.rank = rank
            job.members[rank] = worker.sender
            self._peers.notes.append(f"{worker} replaces a dead worker, at clock {clock}")
            self._reply_joined(job, worker, clock)
        else:  # it has died meanwhile
            job.dead.add(rank)
            yield from self._dismiss(line, job, rank, worker.incarnation)
        self._assign_places(line)

    def _take_over(self, line: JobLine, job: Job, rank: int, worker: WorkerPeer) -> Operation:
        """Put a worker in the place of a dead one, at the clock from which on nothing of the dead one counts.

        No clock ends meanwhile: a rank that no worker has stands at it.
        """
        gone = job.vacant[rank]  # until it is taken: no barrier is passed without its rank
        clock = gone.clock if job.consistency.mode == "bsp" else gone.least
        aside = job.size
        placeholder = line.raise_incarnation(aside)
        yield Admit(aside, placeholder, clock, self._number(job))
        yield Dismiss(rank, gone.incarnation, clock, gone.tables, self._number(job))
        worker.incarnation = line.raise_incarnation(rank)
        yield Admit(rank, worker.incarnation, clock, self._number(job))
        yield Dismiss(aside, placeholder, clock, (), self._number(job))
        self._admitting.discard(line.name)
        if self._is_known(worker):
            worker.rank = rank
            del job.vacant[rank]
            job.members[rank] = worker.sender
            self._peers.notes.append(f"{worker} goes on from clock {clock} in its place: {gone.about}")
            self._reply_joined(job, worker, clock, replaces=True)
        else:  # it has died meanwhile
            gone.incarnation, gone.clock = worker.incarnation, -1
            yield from self._vacate(line, job, rank, gone)
        self._assign_places(line)

    def _vacate(self, line: JobLine, job: Job, rank: int, gone: Vacancy) -> Operation:
        """Fence a dead worker, for which the others wait."""
        results = yield Fence(rank, gone.incarnation, self._number(job))
        last = max(results, key=lambda done: done.result)
        gone.clock, gone.tables = last.result, last.tables
        gone.least = least_clock(results)
        self._assign_places(line)

    def _dismiss(self, line: JobLine, job: Job, rank: int, incarnation: int) -> Operation:
        # Its last tick may have reached some endpoints and not others: all end its clocks up to the greatest.
        results = yield Fence(rank, incarnation, self._number(job))
        last = max(results, key=lambda done: done.result)
        order = Dismiss(rank, incarnation, last.result, last.tables, self._number(job))
        job.clock = max(job.clock, *(done.result for done in (yield order)))
        job.dismissed.add(rank)
        if line.job is job and self._is_over(job):
            if job.name:
                yield EndJob(job.number)
            self._end(line, job)

    def _dismiss_leaving(self, line: JobLine, job: Job, worker: WorkerPeer, number: int) -> Operation:
        yield from self._dismiss(line, job, worker.rank, worker.incarnation)
        if self._is_known(worker):
            self._peers.reply(worker, number, LeaveReply())
            self._peers.forget(worker, LeaveReply())

    def _number(self, job: Job) -> int:
        """Return what identifies a job in orders: the default job is meant by 0."""
        return job.number if job.name else 0

    def _reply_joined(self, job: Job, worker: WorkerPeer, clock: int, *, replaces: bool = False) -> None:
        if not self._is_known(worker) or worker.join not in worker.waiting:
            return
        assert self._state.published is not None
        worker.inside = True
        joined = JoinReply(
            worker.rank,
            self._state.published,
            tuple(self._state.tables.values()),
            worker.incarnation,
            job.number,
            clock,
            job.size,
            self._state.settings.replacement_seconds if not job.most else 0.0,
            replaces,
            dict(job.passed) if replaces else {},
            job.continues,
            tuple(job.gone),
        )
        self._peers.reply(worker, worker.join, joined)

    # --- the end of a job, and another number of workers ------------------------------------------------------

    def _is_over(self, job: Job) -> bool:
        if job.members or job.vacant or job.name in self._admitting:
            return False
        return not job.most or job.dead | job.early <= job.dismissed  # what the last ones had ticked is known

    def _end(self, line: JobLine, job: Job) -> None:
        self._peers.notes.append(f"{line.about} has ended")
        line.clocks_before = job.clock
        line.job = None
        if job.most and job.handed_over:
            line.continuation = continuation_of(job, until=self._state.now + _RETURN_SECONDS)
        elif job.most:
            for worker in self._joining(line):
                del line.queue[worker.sender]
                self._refuse(worker, ErrorReply("input", why_over(job)))
        self._assign_places(line)

    def _joining(self, line: JobLine) -> list[WorkerPeer]:
        """Return the workers that wait to take part in a job whose number of workers may change."""
        return [worker for worker in map(self._worker, line.queue) if worker.wants.most]

    def _change(self, job: Job, why: str) -> None:
        """Have the members of a job hand over their states and leave it."""
        if not job.changes:
            job.changes = True
            self._peers.notes.append(f"the number of workers changes: {why}")
            self._peers.publish(WorkersChange(job.number))

    @handles(HandOver)
    def hand_over(self, worker: WorkerPeer, number: int, ask: HandOver) -> ReplyBody:
        """Process that a member has handed over its state."""
        line = self.of(worker)
        job = line.job
        if job is None or not job.has(worker) or not job.most:
            return ErrorReply("protocol", f"{worker} has a job of fixed workers")
        if not job.handed_over:
            job.coming = len(self._joining(line))
        job.handed_over[worker.rank] = ask.returns
        job.begun = job.begun or ask.begun
        self._change(job, f"{worker} leaves")
        return AcceptedReply()

    # --- leaving and dying ------------------------------------------------------------------------------------

    def leave(self, worker: WorkerPeer, number: int, status: int) -> bool:
        """Process the request of a member to leave, with the status 0 unless it has ended its work early.

        Returns whether it is a member.
        """
        line = self.of(worker)
        job = line.job
        if job is None or not job.has(worker):
            return False
        worker.waiting = {number: "the servers to dismiss it"}
        if worker.rank not in job.handed_over:
            if status:
                job.early.add(worker.rank)  # not dead: no other worker takes its rank
                self._announce(job, worker.rank, worker.incarnation, f"{worker} has ended its fit early")
            elif job.most:
                line.last_outcome = "finished"
        self._take_out(job, worker)
        self._orders.begin(self._dismiss_leaving(line, job, worker, number))
        return True

    def lose(self, worker: WorkerPeer, why: str) -> None:
        """Process the end of a worker that did not leave the job."""
        line = self.of(worker)
        job, settings = line.job, self._state.settings
        line.queue.pop(worker.sender, None)
        if worker.sender in line.forming:
            del line.forming[worker.sender]
            self._has_place.add(line.name)
        elif job is not None and job.has(worker):
            text = f"{worker} is dead, {why}"
            seconds = settings.replacement_seconds
            if seconds and not job.most and not self._state.broken and job.size < MAX_WORKERS:
                self._peers.notes.append(f"{text}: the job waits {seconds:g} s for its replacement")
                self._peers.deaths.append(WorkerDied(worker.rank, worker.about))
                gone = Vacancy(incarnation=worker.incarnation, about=text, until=self._state.now + seconds)
                job.vacant[worker.rank] = gone
                self._take_out(job, worker)
                self._orders.begin(self._vacate(line, job, worker.rank, gone))
                return
            job.dead.add(worker.rank)
            self._announce(job, worker.rank, worker.incarnation, text)
            if worker.rank in job.handed_over:
                job.handed_over[worker.rank] = False
            elif job.most:
                self._change(job, text)
            self._take_out(job, worker)
            self._begin_dismissal(line, job, worker.rank, worker.incarnation)

    def _announce(self, job: Job, rank: int, incarnation: int, text: str) -> None:
        """Tell all that a worker was lost."""
        job.gone.append(rank)
        self._peers.notes.append(text)
        self._peers.publish(WorkerGone(rank, incarnation, text, job.number))

    def _begin_dismissal(self, line: JobLine, job: Job, rank: int, incarnation: int) -> None:
        if not self._state.broken:
            self._orders.begin(self._dismiss(line, job, rank, incarnation))
        self._has_place.add(line.name)

    def _take_out(self, job: Job, worker: WorkerPeer) -> None:
        del job.members[worker.rank]
        for came in job.barriers.values():
            came.pop(worker.rank, None)
        for one in job.passes.values():
            one.splits.release(worker.sender)
            one.clocks.pop(worker.rank, None)
        job.reached.pop(worker.rank, None)
        self._check_barriers(job)

    def cancel(self) -> None:
        """Forget the workers that wait: the cluster is broken."""
        self._admitting.clear()
        for line in self._state.jobs.values():
            line.forming.clear()
            line.queue.clear()

    # --- barriers and passes ----------------------------------------------------------------------------------

    @handles(Barrier)
    def barrier(self, worker: WorkerPeer, number: int, ask: Barrier) -> ReplyBody | None:
        """Process that a worker has reached a barrier."""
        job = self.of(worker).job
        if job is None or not job.has(worker):
            return ErrorReply("protocol", f"{worker} has left the job and sent a barrier")
        worker.waiting[number] = f"the others at barrier {ask.name!r}"
        came = job.barriers.setdefault(ask.name, {})
        before = came.get(worker.rank)
        if before is not None:
            worker.waiting.pop(before, None)  # its wait timed out, and it came again
        came[worker.rank] = number
        self._check_barriers(job)
        return None

    def _check_barriers(self, job: Job) -> None:
        for name, came in list(job.barriers.items()):
            if job.members.keys() | job.vacant.keys() <= came.keys():
                del job.barriers[name]
                job.passed[name] = job.passed.get(name, 0) + 1
                absent = tuple(rank for rank in range(job.size) if rank not in came)
                for rank, number in came.items():
                    worker = self._worker(job.members[rank]) if rank in job.members else None
                    if worker is not None and number in worker.waiting:
                        self._peers.reply(worker, number, BarrierReply(absent))

    @handles(TakeSplit)
    def take_split(self, worker: WorkerPeer, number: int, take: TakeSplit) -> ReplyBody:
        """Return the reply to a request for a split of the data."""
        job = self.of(worker).job
        if job is None or not job.has(worker):
            return ErrorReply("protocol", f"{worker} has left the job and requested data")
        return take_split(job, worker, take, self._state.now)


def _disagreement(job: str, worker: WorkerPeer, numbers: tuple[int, int], rules: JobConsistency) -> str:
    """Return why a worker cannot take part in a job of these numbers of workers and this consistency; empty: it can."""
    assert worker.wants.workers is not None
    own = (worker.wants.workers, worker.wants.most)
    if own != numbers:
        has, asks = (
            counted(least, "worker") if not most else f"{least} to {most} workers" for least, most in (numbers, own)
        )
        return f"{job} has {has}, and {worker.about} asks for {asks}: pass the same everywhere"
    if worker.wants.rules != rules:
        return f"{job} has {rules}, and {worker.about} asks for {worker.wants.rules}: pass the same everywhere"
    return ""
