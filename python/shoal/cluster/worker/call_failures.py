"""The calls of a channel that failed: their log, and the errors that no thread waits for.

Threads: called under the lock of the channel, but for what says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal import _core
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.worker.calls import Call
from shoal.errors import ShoalError
from shoal.table.reductions import Function


def _may_be_dropped(call: Call) -> bool:
    """Whether the caller need not wait: of pushes, ticks, and functions of a user that change rows."""
    return call.op in (_core.Op.PUSH, _core.Op.TICK) or (call.op == _core.Op.REDUCE and call.aux == Function.APPLY)


class CallFailures:
    """Failed calls, logged and, where no thread may wait for them, kept until their errors are raised."""

    def __init__(self, log: logging.Logger) -> None:
        self._log: Refusals | None = Refusals(log)
        self._unobserved: dict[Call, ShoalError] = {}

    def add(self, call: Call, error: ShoalError, ids: Mapping[str, object]) -> None:
        """Log a failure with the names that find it in other logs, and keep its error if no thread may wait for it."""
        if _may_be_dropped(call):
            self._unobserved[call] = error
        log = self._log
        if log is not None:
            log.add(type(error).__name__, str(error), ids=ids)

    def end_log(self) -> None:
        """Log no further failures: the process leaves, so what is pending is refused or given up. Any thread."""
        self._log = None

    def observed(self, call: Call) -> None:
        """Forget the error of a call whose thread waited for it. Any thread."""
        self._unobserved.pop(call, None)

    @property
    def has_unobserved(self) -> bool:
        """Whether an error waits to be raised. Any thread."""
        return bool(self._unobserved)

    def raise_unobserved(self) -> None:
        """Raise, once, the first error that no thread waited for, and the number of the others."""
        errors = list(self._unobserved.values())
        self._unobserved.clear()
        if errors:
            more = f" (and {len(errors) - 1} calls more)" if len(errors) > 1 else ""
            raise type(errors[0])(f"{errors[0]}{more}") from errors[0]
