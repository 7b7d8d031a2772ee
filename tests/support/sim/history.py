"""The history of a simulated cluster, and the checkers of its consistency.

The counting workload makes rows readable. Each worker adds small whole amounts to a column of its own, and the same to
a second one; SGD with a rate of 2^-3 from zeros keeps the sums exact. So a pulled row shows how many of every worker's
pushes it has seen, and whether it was torn.

A pull *must* have seen some pushes and *may* have seen others; each checker returns the violations as sentences.
Events are numbered in the order in which they happened, across all workers: the network is one thread.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

import numpy as np

RATE = 0.125


def amounts(rank, workers, count, amount):
    """Gradients that add ``amount`` to the two columns of a worker."""
    grads = np.zeros((count, 2 * workers), np.float32)
    grads[:, [rank, workers + rank]] = -amount / RATE
    return grads


@dataclass(eq=False)
class Life:
    """One incarnation of a worker."""

    rank: int
    incarnation: int
    start: int
    joined: int
    died: int | None = None
    ticks: dict = field(default_factory=dict)  # clock -> its record


@dataclass(eq=False)
class Event:
    life: Life
    clock: int
    submitted: int
    settled: int | None = None
    error: Exception | None = None
    table: int = 0
    keys: tuple = ()
    amount: int = 0
    grads: np.ndarray | None = None
    rows: np.ndarray | None = None

    @property
    def good(self):
        return self.settled is not None and self.error is None


class History:
    def __init__(self, mode, staleness, workers, mean=False, held=None, local_steps=False):
        self.local_steps = local_steps
        self.held = held  # clocks for which caches may hold a push back; None: there are none
        self.mode, self.staleness, self.workers, self.mean = mode, staleness, workers, mean
        if mode == "ssp" and staleness == 0:
            self.mode = "bsp"
        self.events = 0
        self.lives = []
        self.by_name = {}  # (rank, incarnation) -> life
        self.pulls, self.pushes = [], []
        self.stuck, self.errors = [], []
        self.steps = {}  # table -> those of every endpoint, in the end

    # --- recording ---

    def _next(self):
        self.events += 1
        return self.events

    def life(self, client):
        return self.by_name[client.rank, client.incarnation]

    def joined(self, rank, incarnation, start):
        life = self.by_name[rank, incarnation] = Life(rank, incarnation, start, self._next())
        self.lives.append(life)

    def died(self, client):
        """A worker has died, or the scheduler has declared it dead: its pushes count once or not at all."""
        life = self.life(client)
        if life.died is None:
            life.died = self._next()

    def pull(self, client, table, keys, ahead=0):
        event = Event(self.life(client), client.clock + ahead, self._next(), table=table, keys=tuple(keys))
        self.pulls.append(event)
        return event

    def answered(self, event, rows):
        event.settled, event.rows = self._next(), rows

    def push(self, client, table, keys, grads):
        counting = len(keys) and grads.shape[1] == 2 * self.workers
        amount = round(float(-grads[0, client.rank]) * RATE) if counting else 0
        event = Event(self.life(client), client.clock, self._next(), None, None, table, tuple(keys), amount, grads)
        self.pushes.append(event)
        return event

    def tick(self, client):
        event = Event(self.life(client), client.clock, self._next())
        event.life.ticks[client.clock] = event
        return event

    def acknowledged(self, event, error):
        event.settled, event.error = self._next(), error

    # --- what may be known ---

    def by_column(self):
        """(rank, key) -> its pushes, in the order in which they were submitted."""
        table = defaultdict(list)
        for push in self.pushes:
            for key in push.keys:
                table[push.life.rank, key].append(push)
        return table

    def ended(self, push):
        """Whether the clock of a push has ended for sure, everywhere."""
        tick = push.life.ticks.get(push.clock)
        return tick is not None and (push.life.died is None or tick.good) and push.error is None

    def left(self, push):
        """Whether a push has left its worker for sure, which may have died while it was held back."""
        tick = push.life.ticks.get(push.clock + self.held)
        return push.life.died is None or (tick is not None and tick.good)

    def must_see(self, pull, push):
        if self.mode == "bsp":
            return push.clock < pull.clock and self.ended(push)
        # What others have pushed may be missing in a row that is kept, within the bound.
        if push.good and push.settled < pull.submitted and (self.held is None or push.life is pull.life):
            return True
        if self.mode != "ssp" or push.clock >= pull.clock - self.staleness:
            return False
        return self.ended(push) and (self.held is None or self.left(push))

    def may_see(self, pull, push):
        if self.mode == "bsp":
            return push.clock < pull.clock and push.clock in push.life.ticks
        return push.submitted < pull.settled

    def seen(self):
        """Yield (pull, place of a key, key, rank, amount seen) of everything that was answered."""
        for pull in self.pulls:
            if pull.rows is not None:
                values = np.nan_to_num(pull.rows.astype(np.float64), nan=-1.0)
                for place, key in enumerate(pull.keys):
                    for rank in range(self.workers):
                        yield pull, place, key, rank, values[place, rank]


def who(event):
    return f"worker {event.life.rank}.{event.life.incarnation} at clock {event.clock}"


def check_bounds(history, rows=None):
    """A pull sees what its consistency promises, nothing that it excludes, and is not answered earlier."""
    columns = history.by_column()
    for pull, _, key, rank, seen in history.seen():
        pushes = columns[rank, key]
        least = sum(push.amount for push in pushes if history.must_see(pull, push))
        most = sum(push.amount for push in pushes if history.may_see(pull, push))
        if not least <= seen <= most:
            yield f"{who(pull)} saw {seen:g} of worker {rank} in key {key}, it must see {least} to {most}"
    slack = {"bsp": 0, "ssp": history.staleness, "asp": 10**9}[history.mode]
    for pull in history.pulls:
        if pull.settled is None:
            continue
        for life in history.lives:
            if life.joined > pull.settled or (life.died is not None and life.died < pull.settled):
                continue
            clock = life.start + sum(tick.submitted < pull.settled for tick in life.ticks.values())
            if pull.clock - clock > slack:
                yield f"{who(pull)} was answered while worker {life.rank} was at clock {clock}"


def check_read_my_writes(history, rows=None):
    """A worker sees its own pushes: all that are acknowledged, or under BSP all before its last tick."""
    columns = history.by_column()
    for pull, _, key, rank, seen in history.seen():
        if rank == pull.life.rank:
            mine = [push for push in columns[rank, key] if push.life is pull.life]
            least = sum(push.amount for push in mine if history.must_see(pull, push))
            if seen < least:
                yield f"{who(pull)} saw {seen:g} of its own in key {key}, and had pushed {least}"


def check_versions(history, rows=None):
    """For one worker a row never goes back; with local steps its own column for one incarnation only.

    A worker with local steps sees what it holds back, which is lost with it.
    """
    last = {}  # (rank, table, key, column, incarnation of the own one) -> list of (settled, seen)
    for pull, _, key, rank, seen in sorted(history.seen(), key=lambda entry: entry[0].submitted):
        own = pull.life.incarnation if rank == pull.life.rank and history.local_steps else None
        before = last.setdefault((pull.life.rank, pull.table, key, rank, own), [])
        known = max((value for settled, value in before if settled < pull.submitted), default=0)
        if seen < known:
            yield f"{who(pull)} saw {seen:g} of worker {rank} in key {key}, after it had seen {known:g}"
        before.append((pull.settled, seen))


def check_torn(history, rows=None):
    """A row is never half old and half new."""
    for pull in history.pulls:
        if pull.rows is not None:
            first, second = np.split(pull.rows, 2, axis=1)
            for place in np.flatnonzero((first != second).any(1)).tolist():
                yield f"{who(pull)} saw key {pull.keys[place]} torn: {pull.rows[place].tolist()}"


def check_exactly_once(history, rows=None):
    """At the end each push was applied once; unacknowledged ones of workers that died, at most once.

    ``rows`` are key -> row, from the endpoints themselves.
    """
    columns = history.by_column()
    for push in history.pushes:
        if push.life.died is None and not push.good:
            yield f"a push of {who(push)} was never acknowledged"
    for key, row in rows.items():
        for rank in range(history.workers):
            pushes = columns[rank, key]
            if history.mode == "bsp":
                least = sum(push.amount for push in pushes if history.ended(push))
                most = sum(push.amount for push in pushes if push.clock in push.life.ticks)
            else:
                least = sum(push.amount for push in pushes if push.good)
                most = sum(push.amount for push in pushes)
            if not least <= row[rank] <= most:
                yield f"key {key} has {row[rank]:g} of worker {rank}, it must have {least} to {most}"


def ends_of(life):
    """Return the clocks at which a life may have ended: one, except for unacknowledged ticks of dead workers."""
    known = life.start
    while known in life.ticks and (life.died is None or life.ticks[known].good):
        known += 1
    return range(known, max(life.ticks, default=known - 1) + 2)


def check_atomic(history, rows):
    """Under BSP a clock of a worker counts in every row, at every time, or in none."""
    if history.mode != "bsp":
        return
    columns = history.by_column()
    entries = [(who(pull), pull.clock, key, rank, seen) for pull, _, key, rank, seen in history.seen()]
    entries += [
        ("the end", np.inf, key, rank, row[rank]) for key, row in rows.items() for rank in range(history.workers)
    ]

    def wrong(ends):
        """Return the violations, if the lives ended at these clocks."""
        ticked = defaultdict(int)
        for life, end in ends.items():
            for clock in range(life.start, end):
                ticked[clock] += 1
        for name, before, key, rank, seen in entries:
            counted = sum(
                push.amount / (ticked[push.clock] if history.mean else 1)
                for push in columns[rank, key]
                if push.clock < min(before, ends[push.life])
            )
            if seen != counted:
                where = f"worker {rank} in key {key}"
                return f"{name} saw {seen:g} of {where}, and {counted:g} if clocks ended at {[*ends.values()]}"
        return None

    found = None
    for ends in product(*map(ends_of, history.lives)):
        found = wrong(dict(zip(history.lives, ends, strict=True)))
        if found is None:
            return
    yield found


def check_steps(history, rows=None):
    """Under BSP every endpoint has taken as many steps with a table."""
    for table, steps in history.steps.items():
        if history.mode == "bsp" and len(set(steps)) > 1:
            yield f"the endpoints have taken {steps} steps with table {table}"


def check_progress(history, rows=None):
    """Every worker finishes."""
    for stuck in history.stuck:
        yield f"{stuck} did not get on"
    for error in history.errors:
        yield f"{type(error).__name__}: {error}"


CHECKERS = {
    "bounds": check_bounds,
    "read my writes": check_read_my_writes,
    "versions": check_versions,
    "torn rows": check_torn,
    "exactly once": check_exactly_once,
    "atomic clocks": check_atomic,
    "steps": check_steps,
    "progress": check_progress,
}
