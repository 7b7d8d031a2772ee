"""Exceptions of shoal for failures of the environment.

Bad input raises :class:`ValueError` or :class:`TypeError`, whose message names the argument, its value and the remedy.
Every other exception that shoal raises on purpose is a :class:`ShoalError`. The messages of a cluster's errors name the
peer's address, the operation, and the seconds since the peer's last message.
"""

from functools import partial
from typing import Any

from shoal._core import MemoryBudgetExceededError, ShoalError, SnapshotLostError, TransportError, WrongProcessError

__all__ = [
    "ClosedError",
    "ClusterChangedError",
    "CorruptionError",
    "DeadlineExceededError",
    "DependencyError",
    "FencedError",
    "FitFinishedError",
    "MemoryBudgetExceededError",
    "NotConnectedError",
    "ProtocolError",
    "SaveConflictError",
    "ServerLostError",
    "ShoalError",
    "SnapshotLostError",
    "StorageError",
    "TransportError",
    "UserCodeError",
    "WorkerLostError",
    "WorkersChangedError",
    "WrongProcessError",
]


class FitFinishedError(ValueError):
    """The fit to be resumed has finished, by the settings of this call; the model has its weights."""


class CorruptionError(ShoalError):
    """A file is missing, truncated or changed. The message names it; nothing was loaded."""


class StorageError(ShoalError, OSError):
    """A disk or an object store is full, denies access, or cannot be reached. The message names the file."""


class SaveConflictError(StorageError):
    """Another process has written the same checkpoint meanwhile. Its files are kept; those of this save are removed."""


class UserCodeError(ShoalError):
    """A table's optimizer is user code that this process does not have or may not run; nothing has changed.

    Also: a function of rows has failed, or a server may not run it.
    """


class ClosedError(ShoalError):
    """The store or export was closed."""


class ClusterChangedError(ShoalError):
    """Slots have moved to other endpoints during a save or a load. Nothing has changed: call it again."""


class DeadlineExceededError(ShoalError, TimeoutError):
    """An operation did not complete before its deadline."""


class DependencyError(ShoalError):
    """A call was not executed, because a call that it depends on (``after=``) has failed."""


class ProtocolError(ShoalError):
    """A peer sent an invalid message or rejected one: another version, another job, or a defect."""


class NotConnectedError(ShoalError):
    """The cluster cannot be reached, or this process is no longer part of it."""


class ServerLostError(NotConnectedError):
    """A server was lost, and with it the rows that it held."""


class WorkerLostError(ShoalError):
    """A worker that the others train with was lost, or has left."""


class WorkersChangedError(ShoalError):
    """The number of workers changes: this one has handed over what is left of its fit, and its job ends.

    Attributes
    ----------
    what : str
        What has changed.
    leaves : bool
        Whether this worker was asked to end. Otherwise it connects again and repeats the program, whose fit continues.
    """

    def __init__(self, what: str, *, leaves: bool) -> None:
        super().__init__(what if leaves else f"{what}: connect again, and repeat the program")
        self.what = what
        self.leaves = leaves

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), leaves=self.leaves), (self.what,)


class FencedError(ShoalError):
    """A worker was declared dead, or another process has taken its rank: its calls are refused."""
