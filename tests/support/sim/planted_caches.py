"""Planted bugs in a worker's cache, behind switches of csrc: each must be found by the checkers that it names."""

from dataclasses import replace

from shoal._core import CachedRowsDefect, RowCacheDefect
from sim.cached import CachePlan
from sim.network import ROUGH_IN_ORDER
from sim.schedules import Plan

SSP = Plan(mode="ssp", staleness=2, clocks=8, weather=ROUGH_IN_ORDER, cache=CachePlan())
SSP_LONG = replace(SSP, staleness=6, clocks=12, cache=CachePlan(rows=64))
SSP_ROOMY = replace(SSP, cache=CachePlan(rows=64))
ASP = Plan(mode="asp", clocks=8, weather=ROUGH_IN_ORDER, cache=CachePlan(staleness=2, rows=64))

STEPS = replace(SSP_ROOMY, cache=replace(SSP_ROOMY.cache, local_steps=True))
STEPS_LONG = replace(SSP_LONG, cache=replace(SSP_LONG.cache, local_steps=True))
STEPS_SOON = replace(SSP_LONG, cache=replace(SSP_LONG.cache, local_steps=True, staleness=0))

Rows, Sends = RowCacheDefect, CachedRowsDefect

# name -> (what is wrong: the rows, or what is sent and when; plan; checkers of which one must find it)
PLANTED = {
    # Copies are used that are a clock too old.
    "copies are kept for too long": (Rows.KEEPS_ROWS_FOR_A_LONG_TIME, SSP_ROOMY, {"bounds"}),
    # A sum stays after it was sent, and is sent again.
    "gradients are sent twice": (Rows.ADDS_TO_WHAT_IT_HAS_SENT, SSP_ROOMY, {"exactly once"}),
    # Own pushes are missing in a copy that is read after they were acknowledged.
    "copies outlive own pushes": (Rows.KEEPS_COPIES_OF_WHAT_IT_SENDS, SSP_LONG, {"read my writes"}),
    # Of two pulls of a row, the one that is answered last has the copy, whichever saw more.
    "the last answer wins": (Rows.TAKES_THE_LAST_ANSWER, ASP, {"versions"}),
    "pushes are held for another clock": (Sends.HOLDS_FOR_ANOTHER_CLOCK, SSP_ROOMY, {"bounds"}),
    # Waits for the servers, and keeps rows, as if pushes left in their own clock.
    "pulls do not allow for held pushes": (Sends.FORGETS_THAT_PUSHES_ARE_HELD, SSP_ROOMY, {"bounds"}),
    # An answer is taken for one that includes all pushes before it, though one of them was lost and sent again.
    "answers are trusted to be in order": (Sends.TRUSTS_THE_ORDER, ASP, {"read my writes"}),
    # What is fetched is dated by the worker's clock instead of the slowest one's.
    "rows are dated by the worker's clock": (Sends.TAKES_ITS_OWN_CLOCK, SSP_ROOMY, {"bounds"}),
    # The sums of what is fetched are sent after the pull, or never.
    "what is fetched is not sent before": (Sends.PULLS_BEFORE_IT_PUSHES, SSP_ROOMY, {"exactly once"}),
    # What has been sent stays in the difference from the base.
    "changes are sent again": (Rows.SENDS_CHANGES_AGAIN, STEPS, {"exactly once"}),
    # An answer replaces a row with what has changed in it since the pull began.
    "changes during a pull are lost": (Rows.FORGETS_WHAT_CHANGED_MEANWHILE, STEPS_LONG, {"exactly once"}),
    # An answer becomes the copy, although a change has left since the pull began.
    "answers that lack a change are kept": (Rows.KEEPS_ANSWERS_THAT_LACK_PUSHES, STEPS_SOON, {"read my writes"}),
    # A gradient that was sent at once is missing in the answer that is on its way.
    "answers that lack a gradient are kept": (Rows.READS_PASSED_GRADIENTS_LATER, STEPS_LONG, {"read my writes"}),
    "a change that was seen may be missing": (Sends.TRUSTS_THE_ORDER, STEPS, {"versions"}),
}
