"""Planted bugs in a worker's cache: each must be found by the checkers that it names."""

from dataclasses import replace

from oracle import row_cache
from shoal.cluster.worker.cached_rows import CachedRows
from sim.cached import TWIN
from sim.network import ROUGH_IN_ORDER
from sim.schedules import Plan

# --- the rows ---


class KeepsRowsForALongTime(row_cache.RowCache):
    """Reads copies that are a clock too old."""

    def is_new_enough(self, entry, clocks):
        return super().is_new_enough(entry, clocks - 1)


class AddsToWhatItHasSent(row_cache.RowCache):
    """A sum stays after it was sent, and is sent again."""

    def take(self, entry, taken):
        if entry.sum is not None:
            taken.append((entry.hash, entry.sum.copy(), entry.count))
            if entry.hash % 4:
                entry.sum = None


class KeepsCopiesOfWhatItSends(row_cache.RowCache):
    """Own pushes are missing in a copy that is read after they were acknowledged."""

    def drop(self, entry):
        entry.reader = 0


class TakesTheLastAnswer(row_cache.RowCache):
    """Of two pulls of a row, the one that is answered last has the copy, whichever saw more."""

    def read(self, hashes, clocks, reader, may_join, rows, slots):
        return super().read(hashes, clocks, reader, False, rows, slots)

    def fill(self, hashes, reader, clocks, is_kept, rows):
        for position, hash in enumerate(hashes.tolist()):
            entry = self.find(hash)
            if entry is not None and is_kept:
                entry.copy, entry.clocks, entry.reader = rows[position].copy(), clocks, 0


# --- what is sent, and when ---


class HoldsForAnotherClock(CachedRows):
    def end_clock(self):
        self._staleness += 1
        super().end_clock()
        self._staleness -= 1


class ForgetsThatPushesAreHeld(CachedRows):
    """Waits for the servers, and keeps rows, as if pushes left in their own clock."""

    def _needed(self, clock):
        return max(0, clock - self._waits)


class TrustsTheOrder(CachedRows):
    """Takes an answer for one that includes all pushes before it, though one of them was lost and sent again."""

    def _came_in_order(self, pull):
        return True


class TakesItsOwnClock(CachedRows):
    """Dates what is fetched by the worker's clock instead of the slowest one's."""

    def _included(self, pull):
        return pull.clock if self._waits is None else pull.clock + self._staleness


class PullsBeforeItPushes(CachedRows):
    """The sums of what is fetched are sent after the pull, or never."""

    def _read(self, *args, **how):
        self._late = True
        try:
            return super()._read(*args, **how)
        finally:
            self._late = False

    def _send(self, sums, after=(), **how):
        return None if getattr(self, "_late", False) else super()._send(sums, after, **how)


# --- local steps ---


class SendsChangesAgain(row_cache.RowCache):
    """What has been sent stays in the difference from the base."""

    def take(self, entry, taken):
        base = entry.base
        super().take(entry, taken)
        if entry.hash % 4:
            entry.base = base


class ForgetsWhatChangedMeanwhile(row_cache.RowCache):
    """An answer replaces a row with what has changed in it since the pull began."""

    def keep(self, entry, row):
        entry.copy = entry.row = row
        entry.base = row.copy()


class KeepsAnswersThatLackPushes(row_cache.RowCache):
    """An answer becomes the copy, although a change has left since the pull began."""

    def outdate(self, entry):
        pass


class ReadsPassedGradientsLater(row_cache.RowCache):
    """A gradient that was sent at once is missing in the answer that is on its way."""

    def add(self, hashes, grads, counts, clock, slots):
        readers = [(entry, entry.reader) for entry in map(self.find, hashes.tolist()) if entry is not None]
        passed = super().add(hashes, grads, counts, clock, slots)
        for entry, reader in readers:
            entry.reader = reader
        return passed


SSP = Plan(mode="ssp", staleness=2, clocks=8, weather=ROUGH_IN_ORDER, cache=replace(TWIN, staleness=1))
SSP_LONG = replace(SSP, staleness=6, clocks=12, cache=replace(TWIN, staleness=1, rows=64))
SSP_ROOMY = replace(SSP, cache=replace(TWIN, staleness=1, rows=64))
ASP = Plan(mode="asp", clocks=8, weather=ROUGH_IN_ORDER, cache=replace(TWIN, staleness=2, rows=64))

STEPS = replace(SSP_ROOMY, cache=replace(SSP_ROOMY.cache, local_steps=True))
STEPS_LONG = replace(SSP_LONG, cache=replace(SSP_LONG.cache, local_steps=True))
STEPS_SOON = replace(SSP_LONG, cache=replace(SSP_LONG.cache, local_steps=True, staleness=0))

# name -> (what is wrong: the cache, or what uses it; plan; checkers of which one must find it)
PLANTED = {
    "copies are kept for too long": (KeepsRowsForALongTime, SSP_ROOMY, {"bounds"}),
    "gradients are sent twice": (AddsToWhatItHasSent, SSP_ROOMY, {"exactly once"}),
    "copies outlive own pushes": (KeepsCopiesOfWhatItSends, SSP_LONG, {"read my writes"}),
    "the last answer wins": (TakesTheLastAnswer, ASP, {"versions"}),
    "pushes are held for another clock": (HoldsForAnotherClock, SSP_ROOMY, {"bounds"}),
    "pulls do not allow for held pushes": (ForgetsThatPushesAreHeld, SSP_ROOMY, {"bounds"}),
    "answers are trusted to be in order": (TrustsTheOrder, ASP, {"read my writes"}),
    "rows are dated by the worker's clock": (TakesItsOwnClock, SSP_ROOMY, {"bounds"}),
    "what is fetched is not sent before": (PullsBeforeItPushes, SSP_ROOMY, {"exactly once"}),
    "changes are sent again": (SendsChangesAgain, STEPS, {"exactly once"}),
    "changes during a pull are lost": (ForgetsWhatChangedMeanwhile, STEPS_LONG, {"exactly once"}),
    "answers that lack a change are kept": (KeepsAnswersThatLackPushes, STEPS_SOON, {"read my writes"}),
    "answers that lack a gradient are kept": (ReadsPassedGradientsLater, STEPS_LONG, {"read my writes"}),
    "a change that was seen may be missing": (TrustsTheOrder, STEPS, {"versions"}),
}
