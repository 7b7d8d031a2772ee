"""What can go wrong in the world, as opposed to in a call.

Bad input is a :class:`ValueError` or :class:`TypeError` that names the thing, the number and the remedy. Everything
else that shoal raises on purpose is a :class:`ShoalError`.
"""

from shoal._core import ShoalError, WrongProcess

__all__ = ["ClosedError", "CorruptionError", "ShoalError", "WrongProcess"]


class CorruptionError(ShoalError):
    """A file is missing, cut short or changed: the message names it. Nothing of it was loaded."""


class ClosedError(ShoalError):
    """The store was closed: make a new one."""
