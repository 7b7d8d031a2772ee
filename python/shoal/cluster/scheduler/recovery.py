"""The membership that a journal holds, or a new one.

Threads: one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.cluster.scheduler.inputs import Settings
from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.membership import Membership

_log = logging.getLogger("shoal.scheduler")


def recover(journal: Journal, new: Membership, *, counts: Callable[[], dict[str, int]] = dict) -> Membership:
    """Replay a journal; its membership appends its inputs to it."""
    found = journal.load()
    if found is not None:
        state, entries = found
        membership = Membership.restore(state, counts=counts, record=journal.append)
        failed = 0
        for entry in entries:
            try:
                membership.replay(entry)
            except Exception:  # as it did when it came: the scheduler reported it and went on
                failed += 1
        if failed:
            _log.error("%d inputs of the journal %s caused internal errors again", failed, journal.directory)
        if not membership.ended:
            _check(journal, membership.settings, new.settings)
            _log.info(
                "the journal %s gives the cluster %s again: %d inputs since its snapshot",
                journal.directory,
                membership.cluster,
                len(entries),
            )
            return membership
        _log.info("the cluster of the journal %s was ended: a new one begins", journal.directory)
    journal.begin(new.save())
    return new


def _check(journal: Journal, kept: Settings, given: Settings) -> None:
    for name in kept.__struct_fields__:
        if getattr(kept, name) != getattr(given, name):
            raise ValueError(
                f"the cluster of the journal {journal.directory} has {name}={getattr(kept, name)}, and this scheduler "
                f"is started with {name}={getattr(given, name)}: pass the same, or another directory for a new cluster"
            )
