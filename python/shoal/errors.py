"""What can go wrong in the world, as opposed to in a call.

Bad input is a :class:`ValueError` or :class:`TypeError` that names the thing, the number and the remedy. Everything
else that shoal raises on purpose is a :class:`ShoalError`. Those of a cluster name the peer's address, the operation,
and for how many seconds the peer has been silent.
"""

from shoal._core import MemoryBudgetExceededError, ShoalError, SnapshotLostError, TransportError, WrongProcessError

__all__ = [
    "ClosedError",
    "CorruptionError",
    "DeadlineExceededError",
    "FencedError",
    "MemoryBudgetExceededError",
    "NotConnectedError",
    "ProtocolError",
    "SaveConflictError",
    "ServerLostError",
    "ShoalError",
    "SnapshotLostError",
    "StorageError",
    "TransportError",
    "WrongProcessError",
]


class CorruptionError(ShoalError):
    """A file is missing, cut short or changed: the message names it. Nothing of it was loaded."""


class StorageError(ShoalError, OSError):
    """A disk or an object store refuses: it is full, forbidden, or not reached. The message names the file."""


class SaveConflictError(StorageError):
    """Another process has written the same checkpoint meanwhile: what it wrote stays, nothing of this one's does."""


class ClosedError(ShoalError):
    """The store was closed: make a new one."""


class DeadlineExceededError(ShoalError):
    """What was asked for did not happen in the time that the caller gave it."""


class ProtocolError(ShoalError):
    """A peer sent, or refused, what this version does not understand: another version, another job, or a defect."""


class NotConnectedError(ShoalError):
    """The cluster cannot be reached, or this process is no longer part of it."""


class ServerLostError(NotConnectedError):
    """A server that holds rows of the store is gone, and its rows with it."""


class FencedError(ShoalError):
    """The worker was taken for dead and another has its place: it may change nothing any more."""
