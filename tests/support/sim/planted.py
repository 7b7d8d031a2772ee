"""Planted bugs, in an endpoint and in the client: each must be found by the checkers that it names.

They are likely mistakes; some were made. A checker that finds none of them is useless.
"""

import numpy as np

from shoal import _core
from shoal._core import ClientDefect
from sim import model
from sim.schedules import ROUGH, Plan

Op, Status = _core.Op, _core.Status

BSP = Plan(mode="bsp", weather=ROUGH)
SSP = Plan(mode="ssp", staleness=1, weather=ROUGH)
ASP = Plan(mode="asp", weather=ROUGH)
BSP_DEATHS = Plan(mode="bsp", weather=ROUGH, deaths=2)
BSP_ALONE = Plan(mode="bsp", weather=ROUGH, endpoints=1)  # where a tick leaves with its pushes
BSP_PAIR = Plan(mode="bsp", weather=ROUGH, deaths=3, workers=2, endpoints=4)  # in many clocks only one of them pushes
BSP_ZOMBIES = Plan(mode="bsp", weather=ROUGH, deaths=2, zombies=True)
SSP_DEATHS = Plan(mode="ssp", staleness=1, weather=ROUGH, deaths=2, zombies=True)
ASP_DEATHS = Plan(mode="asp", weather=ROUGH, deaths=2, zombies=True)
BSP_MOVES = Plan(mode="bsp", weather=ROUGH, moves=4, endpoints=3)
ASP_MOVES = Plan(mode="asp", weather=ROUGH, moves=4, endpoints=3)


# --- endpoints ---


class ForgetsSequences(model.Endpoint):
    def is_done(self, member, slot, sequence):
        return False


class RemembersMessagesNotSlots(model.Endpoint):
    """One window for the whole endpoint: the second part of a call passes for a repetition."""

    def is_done(self, member, slot, sequence):
        return any(sequence in seen for seen in member.seen.values())


class RemembersTooLittle(model.Endpoint):
    """The window is one sequence: what comes late is taken again."""

    def is_done(self, member, slot, sequence):
        seen = member.seen[slot]
        return bool(seen) and sequence == max(seen)


class AnswersAtOnce(model.Endpoint):
    def may_see(self, message):
        return True


class WaitsOneClockLess(model.Endpoint):
    def may_see(self, message):
        return message.clock - self.slowest() <= self.staleness + 1


class AppliesOnArrival(model.Endpoint):
    """Merges nothing: a pull may see pushes of its own clock."""

    def push(self, peer, message):
        self.write(
            peer,
            message,
            lambda at: self.step(
                message.table,
                message.hashes[at],
                message.values.reshape(message.count, -1)[at],
                np.ones(len(at), np.uint32),
                message.clock,
            ),
        )


class TicksWithoutAsking(model.Endpoint):
    """A clock ends whether its pushes are here or not."""

    def has_seen_mark(self, member, mark):
        return True


class TicksForOldMaps(model.Endpoint):
    """A clock ends here though a part of a push is still on its way from the endpoint that had the slots before."""

    def tick(self, peer, message):
        epoch, self.epoch = self.epoch, 0
        super().tick(peer, message)
        self.epoch = epoch


class DropsWhatItMerges(model.Endpoint):
    """Forgets the pushes of one worker when several have the same sequence."""

    def merge(self, table, pushes, workers):
        super().merge(table, list({push.sequence: push for push in pushes}.values()), workers)


class KeepsTheDeadsPushes(model.Endpoint):
    """What a dismissed worker had not ticked is merged with a later clock's."""

    def dismiss(self, *last):
        pending = list(self.pending)
        super().dismiss(*last)
        self.pending = pending

    def go_on(self):
        while self.mode == "bsp" and self.applied < self.slowest():
            for push in self.pending:
                push.clock = min(push.clock, self.applied) if push.rank not in self.members else push.clock
            if self.pending:
                self.ticked[self.applied].setdefault(-1, {1})
            before = self.applied
            cap, self.cap = self.cap, before + 1
            super().go_on()
            self.cap = cap
        super().go_on()


class AdmitsWithoutHolding(model.Endpoint):
    def hold(self):
        clock = super().hold()
        self.cap = None
        return clock


class WaitsForTheDead(model.Endpoint):
    def dismiss(self, rank, incarnation, clock, tables):
        pass


class DismissesByItsOwnClock(model.Endpoint):
    """A last tick that has not come here counts elsewhere alone."""

    def dismiss(self, rank, incarnation, clock, tables):
        super().dismiss(rank, incarnation)


class ForgetsWhatALastTickNamed(model.Endpoint):
    def fence(self, rank, incarnation):
        return super().fence(rank, incarnation)[0], ()


class TakesFromTheFenced(model.Endpoint):
    """A tick that comes after the clocks were compared counts."""

    def refusal(self, message):
        for member in self.members.values():
            member.fenced = False
        return super().refusal(message)


class ServesTheFenced(model.Endpoint):
    """Takes messages of an incarnation that was dismissed."""

    def refusal(self, message):
        status = super().refusal(message)
        return None if status == Status.FENCED and message.worker in self.members else status


class AnswersFromACopy(model.Endpoint):
    """Now and then a pull is answered from how the rows were a while ago."""

    def pull(self, peer, message):
        copies = self.__dict__.setdefault("copies", {})
        before = len(self.out)
        super().pull(peer, message)
        if len(self.out) > before and len(self.out[-1][1]) == 2 and _core.decode(self.out[-1][1]).status == Status.OK:
            rows = np.frombuffer(self.out[-1][1][1], np.float32).reshape(message.count, -1)
            old = copies.setdefault("rows", {})
            answer = np.array([old.get(key, row) for key, row in zip(message.hashes.tolist(), rows, strict=True)])
            if message.sequence % 3:
                answer = rows
            for key, row in zip(message.hashes.tolist(), rows, strict=True):
                old.setdefault(key, row)
            self.out.pop()
            self.reply(
                peer, message, payload=[answer], count=message.count, dim=message.dim, dtype=_core.WireDtype.FLOAT32
            )


class TearsRows(model.Endpoint):
    """Writes half of each row, and the other half with the next message."""

    def step(self, table, hashes, grads, *seen):
        half = grads.shape[1] // 2
        first, second = grads.copy(), grads.copy()
        first[:, half:] = 0
        second[:, :half] = 0
        rest, self.rest = getattr(self, "rest", None), (table, hashes, second, *seen)
        if rest is not None:
            super().step(*rest)
        super().step(table, hashes, first, *seen)


class AcknowledgesTooEarly(model.Endpoint):
    """Says that a push is done, and does it with the next message."""

    def step(self, table, hashes, grads, *seen):
        rest, self.rest = getattr(self, "rest", None), (table, hashes, grads, *seen)
        if rest is not None:
            super().step(*rest)


SOUND = ClientDefect.NONE

# name -> (endpoint, defect of the clients, plan, checkers of which one must find it)
PLANTED = {
    "sequences are forgotten": (ForgetsSequences, SOUND, ASP, {"exactly once"}),
    "sequences are remembered by message": (
        RemembersMessagesNotSlots,
        SOUND,
        ASP_MOVES,
        {"exactly once", "progress"},
    ),
    "only the last sequence is remembered": (RemembersTooLittle, SOUND, ASP, {"exactly once"}),
    "no pull waits under BSP": (AnswersAtOnce, SOUND, BSP, {"bounds"}),
    "no pull waits under SSP": (AnswersAtOnce, SOUND, SSP, {"bounds"}),
    "a pull waits one clock too little": (WaitsOneClockLess, SOUND, SSP, {"bounds"}),
    "BSP applies on arrival": (AppliesOnArrival, SOUND, BSP, {"bounds"}),
    "a tick does not ask for its pushes": (TicksWithoutAsking, SOUND, BSP_ALONE, {"bounds", "exactly once"}),
    "a tick of an old map counts": (TicksForOldMaps, SOUND, BSP_MOVES, {"exactly once", "bounds"}),
    "a merge mistakes workers": (DropsWhatItMerges, SOUND, BSP, {"exactly once"}),
    "pushes of the dead are merged": (KeepsTheDeadsPushes, SOUND, BSP_DEATHS, {"bounds", "exactly once"}),
    "nobody holds for who returns": (AdmitsWithoutHolding, SOUND, BSP_DEATHS, {"bounds"}),
    "the dead are waited for": (WaitsForTheDead, SOUND, BSP_DEATHS, {"exactly once"}),
    "each endpoint dismisses by its own clock": (DismissesByItsOwnClock, SOUND, BSP_DEATHS, {"atomic clocks"}),
    "a dead worker's tables are forgotten": (ForgetsWhatALastTickNamed, SOUND, BSP_PAIR, {"steps"}),
    "the fenced may tick": (TakesFromTheFenced, SOUND, BSP_ZOMBIES, {"atomic clocks"}),
    "the fenced are served": (ServesTheFenced, SOUND, ASP_DEATHS, {"exactly once"}),
    "rows come from a copy": (AnswersFromACopy, SOUND, ASP, {"versions"}),
    "rows come from a copy, own pushes too": (AnswersFromACopy, SOUND, ASP, {"read my writes"}),
    "rows are written by halves": (TearsRows, SOUND, ASP, {"torn rows"}),
    "acknowledged before it is done": (AcknowledgesTooEarly, SOUND, ASP, {"read my writes"}),
    "the client forgets refused slots": (
        model.Endpoint,
        ClientDefect.FORGETS_REFUSED_SLOTS,
        ASP_MOVES,
        {"exactly once"},
    ),
    "the client resends as if it were new": (
        model.Endpoint,
        ClientDefect.RESENDS_WITH_A_NEW_SEQUENCE,
        ASP,
        {"exactly once"},
    ),
    "the client takes early for done": (model.Endpoint, ClientDefect.TAKES_EARLY_FOR_DONE, BSP_ALONE, {"progress"}),
    "the client ticks before its reads": (model.Endpoint, ClientDefect.TICKS_BEFORE_ITS_READS, BSP, {"bounds"}),
    "the client ticks before its pushes are everywhere": (
        model.Endpoint,
        ClientDefect.TICKS_BEFORE_ITS_PUSHES_ARE_EVERYWHERE,
        BSP_DEATHS,
        {"atomic clocks"},
    ),
    "the client sends once": (model.Endpoint, ClientDefect.SENDS_ONCE, ASP, {"progress"}),
    "one answer is enough for the client": (
        model.Endpoint,
        ClientDefect.DONE_BY_THE_FIRST_PART,
        ASP,
        {"exactly once", "read my writes"},
    ),
    "the client takes any answer": (model.Endpoint, ClientDefect.TAKES_ANY_ANSWER, ASP, {"exactly once"}),
    "the client keeps its old map": (model.Endpoint, ClientDefect.KEEPS_ITS_OLD_MAP, ASP_MOVES, {"progress"}),
}
