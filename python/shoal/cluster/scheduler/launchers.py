"""The launchers: processes that start workers' programs. Threads: one."""

from __future__ import annotations

from typing import Any

from shoal.cluster.scheduler.inputs import MembershipState


class Launchers:
    """The launchers, and how their programs have ended."""

    def __init__(self) -> None:
        # Number of launchers whose program ended with status 0.
        self.done = 0
        # Description of the launcher whose program failed first, or that was lost; empty while there is none.
        self.failed = ""
        # Exit status of that program; 1 for one that was lost.
        self.status = 0

    def save(self) -> dict[str, Any]:
        """Return the fields of :class:`.MembershipState` that are kept here."""
        return {"launchers_done": self.done, "failed": self.failed, "status": self.status}

    def restore(self, state: MembershipState) -> None:
        """Take a saved state."""
        self.done, self.failed, self.status = state.launchers_done, state.failed, state.status

    def leave(self, about: str, status: int) -> None:
        """Process the end of a program."""
        self.done += status == 0
        if status:
            self.fail(f"{about} ended with status {status}", status)

    def fail(self, text: str, status: int) -> None:
        """Keep the first failure."""
        if not self.failed:
            self.failed, self.status = text, status
