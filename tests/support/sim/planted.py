"""Planted bugs, in an endpoint and in the client: each must be found by the checkers that it names.

They are likely mistakes; some were made. A checker that finds none of them is useless.
"""

from collections import Counter

import numpy as np

from shoal import _core
from shoal.cluster.worker.requests import Requests
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


class ForgetsSequences(model.Service):
    def is_done(self, member, slot, sequence):
        return False


class RemembersMessagesNotSlots(model.Service):
    """One window for the whole endpoint: the second part of a call passes for a repetition."""

    def is_done(self, member, slot, sequence):
        return any(sequence in seen for seen in member.seen.values())


class RemembersTooLittle(model.Service):
    """The window is one sequence: what comes late is taken again."""

    def is_done(self, member, slot, sequence):
        seen = member.seen[slot]
        return bool(seen) and sequence == max(seen)


class AnswersAtOnce(model.Service):
    def may_see(self, message):
        return True


class WaitsOneClockLess(model.Service):
    def may_see(self, message):
        return message.clock - self.slowest() <= self.staleness + 1


class AppliesOnArrival(model.Service):
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


class TicksWithoutAsking(model.Service):
    """A clock ends whether its pushes are here or not."""

    def has_seen_mark(self, member, mark):
        return True


class TicksForOldMaps(model.Service):
    """A clock ends here though a part of a push is still on its way from the endpoint that had the slots before."""

    def tick(self, peer, message):
        epoch, self.epoch = self.epoch, 0
        super().tick(peer, message)
        self.epoch = epoch


class DropsWhatItMerges(model.Service):
    """Forgets the pushes of one worker when several have the same sequence."""

    def merge(self, table, pushes, workers):
        super().merge(table, list({push.sequence: push for push in pushes}.values()), workers)


class KeepsTheDeadsPushes(model.Service):
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


class AdmitsWithoutHolding(model.Service):
    def hold(self):
        clock = super().hold()
        self.cap = None
        return clock


class WaitsForTheDead(model.Service):
    def dismiss(self, rank, incarnation, clock, tables):
        pass


class DismissesByItsOwnClock(model.Service):
    """A last tick that has not come here counts elsewhere alone."""

    def dismiss(self, rank, incarnation, clock, tables):
        super().dismiss(rank, incarnation)


class ForgetsWhatALastTickNamed(model.Service):
    def fence(self, rank, incarnation):
        return super().fence(rank, incarnation)[0], ()


class TakesFromTheFenced(model.Service):
    """A tick that comes after the clocks were compared counts."""

    def refusal(self, message):
        for member in self.members.values():
            member.fenced = False
        return super().refusal(message)


class ServesTheFenced(model.Service):
    """Takes messages of an incarnation that was dismissed."""

    def refusal(self, message):
        status = super().refusal(message)
        return None if status == Status.FENCED and message.worker in self.members else status


class AnswersFromACopy(model.Service):
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


class TearsRows(model.Service):
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


class AcknowledgesTooEarly(model.Service):
    """Says that a push is done, and does it with the next message."""

    def step(self, table, hashes, grads, *seen):
        rest, self.rest = getattr(self, "rest", None), (table, hashes, grads, *seen)
        if rest is not None:
            super().step(*rest)


# --- clients ---


class ForgetsRefusedSlots(Requests):
    def _refuse(self, part, reply, now):
        self._forget(part, now)
        self._finish(part.call, now)


class ResendsWithANewSequence(Requests):
    def _send(self, part, now):
        if part.message is not None and part.call.op == Op.PUSH:
            self._parts.pop(part.key, None)
            self._write += 1
            part.message, part.sequence = None, self._write
            part.key = (part.address, part.sequence, part.number)
        super()._send(part, now)


class TakesEarlyForDone(Requests):
    def _again(self, part, due):
        if part.last == Status.RETRY:
            self._forget(part, due)
            self._finish(part.call, due)
        else:
            super()._again(part, due)


class TicksBeforeItsReads(Requests):
    """A pull that is asked again after the tick sees the clock's own pushes."""

    def _may_tick(self, tick, peer):
        return True


class TicksBeforeItsPushesAreEverywhere(Requests):
    """An endpoint may end a clock whose pushes another one never gets."""

    def _may_tick(self, tick, peer):
        kept, self._kept = self._kept, Counter()
        try:
            return super()._may_tick(tick, peer)
        finally:
            self._kept = kept


class SendsOnce(Requests):
    def on_time(self, now):
        for part in list(self._parts.values()):
            if part.due <= now and part.tries:
                part.due = float("nan")
        super().on_time(now)


class DoneByTheFirstPart(Requests):
    """A call is settled when one endpoint has answered."""

    def _finish(self, call, now):
        if not call.done:
            self._settle(call, now)


class TakesAnyAnswer(Requests):
    """Answers are matched by endpoint alone, whatever was asked."""

    def receive(self, address, frames, now):
        try:
            reply = _core.decode(frames)
        except ValueError:
            return
        waiting = [part for part in self._parts.values() if part.address == address and part.call.op == reply.op]
        if waiting and reply.status == Status.OK and reply.op != Op.PULL:
            self._forget(waiting[0], now)
            self._finish(waiting[0].call, now)
        else:
            super().receive(address, frames, now)


class KeepsItsOldMap(Requests):
    def set_map(self, map, now):
        super().set_map(self.map, now)


# name -> (endpoint, client, plan, checkers of which one must find it)
PLANTED = {
    "sequences are forgotten": (ForgetsSequences, Requests, ASP, {"exactly once"}),
    "sequences are remembered by message": (
        RemembersMessagesNotSlots,
        Requests,
        ASP_MOVES,
        {"exactly once", "progress"},
    ),
    "only the last sequence is remembered": (RemembersTooLittle, Requests, ASP, {"exactly once"}),
    "no pull waits under BSP": (AnswersAtOnce, Requests, BSP, {"bounds"}),
    "no pull waits under SSP": (AnswersAtOnce, Requests, SSP, {"bounds"}),
    "a pull waits one clock too little": (WaitsOneClockLess, Requests, SSP, {"bounds"}),
    "BSP applies on arrival": (AppliesOnArrival, Requests, BSP, {"bounds"}),
    "a tick does not ask for its pushes": (TicksWithoutAsking, Requests, BSP_ALONE, {"bounds", "exactly once"}),
    "a tick of an old map counts": (TicksForOldMaps, Requests, BSP_MOVES, {"exactly once", "bounds"}),
    "a merge mistakes workers": (DropsWhatItMerges, Requests, BSP, {"exactly once"}),
    "pushes of the dead are merged": (KeepsTheDeadsPushes, Requests, BSP_DEATHS, {"bounds", "exactly once"}),
    "nobody holds for who returns": (AdmitsWithoutHolding, Requests, BSP_DEATHS, {"bounds"}),
    "the dead are waited for": (WaitsForTheDead, Requests, BSP_DEATHS, {"exactly once"}),
    "each endpoint dismisses by its own clock": (DismissesByItsOwnClock, Requests, BSP_DEATHS, {"atomic clocks"}),
    "a dead worker's tables are forgotten": (ForgetsWhatALastTickNamed, Requests, BSP_PAIR, {"steps"}),
    "the fenced may tick": (TakesFromTheFenced, Requests, BSP_ZOMBIES, {"atomic clocks"}),
    "the fenced are served": (ServesTheFenced, Requests, ASP_DEATHS, {"exactly once"}),
    "rows come from a copy": (AnswersFromACopy, Requests, ASP, {"versions"}),
    "rows come from a copy, own pushes too": (AnswersFromACopy, Requests, ASP, {"read my writes"}),
    "rows are written by halves": (TearsRows, Requests, ASP, {"torn rows"}),
    "acknowledged before it is done": (AcknowledgesTooEarly, Requests, ASP, {"read my writes"}),
    "the client forgets refused slots": (model.Service, ForgetsRefusedSlots, ASP_MOVES, {"exactly once"}),
    "the client resends as if it were new": (model.Service, ResendsWithANewSequence, ASP, {"exactly once"}),
    "the client takes early for done": (model.Service, TakesEarlyForDone, BSP_ALONE, {"progress"}),
    "the client ticks before its reads": (model.Service, TicksBeforeItsReads, BSP, {"bounds"}),
    "the client ticks before its pushes are everywhere": (
        model.Service,
        TicksBeforeItsPushesAreEverywhere,
        BSP_DEATHS,
        {"atomic clocks"},
    ),
    "the client sends once": (model.Service, SendsOnce, ASP, {"progress"}),
    "one answer is enough for the client": (model.Service, DoneByTheFirstPart, ASP, {"exactly once", "read my writes"}),
    "the client takes any answer": (model.Service, TakesAnyAnswer, ASP, {"exactly once"}),
    "the client keeps its old map": (model.Service, KeepsItsOldMap, ASP_MOVES, {"progress"}),
}
