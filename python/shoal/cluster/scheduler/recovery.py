"""The membership that a journal holds, or a new one.

Threads: one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.state import State
from shoal.config import ClusterConfig

_log = logging.getLogger("shoal.scheduler")


def recover(journal: Journal, new: State, make: Callable[[State], Membership] = Membership) -> Membership:
    """Return the membership of a journal, whose inputs are replayed; of ``new`` if there is none or it was ended."""
    found = journal.load()
    if found is not None:
        state, entries = found
        membership = make(state)
        failed = 0
        for entry in entries:
            try:
                membership.replay(entry)
            except Exception:  # as it did when it came: the scheduler reported it and went on
                failed += 1
        if failed:
            _log.error("%d inputs of the journal %s caused internal errors again", failed, journal.directory)
        if not state.ended:
            _check(journal, state.settings, new.settings)
            _log.info(
                "the journal %s gives the cluster %s again: %d inputs since its snapshot",
                journal.directory,
                state.cluster,
                len(entries),
            )
            return membership
        _log.info("the cluster of the journal %s was ended: a new one begins", journal.directory)
    journal.begin(new)
    return make(new)


def _check(journal: Journal, kept: ClusterConfig, given: ClusterConfig) -> None:
    for name in kept.__struct_fields__:
        if getattr(kept, name) != getattr(given, name):
            raise ValueError(
                f"the cluster of the journal {journal.directory} has {name}={getattr(kept, name)}, and this scheduler "
                f"is started with {name}={getattr(given, name)}: pass the same, or another directory for a new cluster"
            )
