"""Errors that control messages describe, and copies of errors that are raised in several threads."""

from __future__ import annotations

from shoal.cluster.protocol.messages import ErrorReply
from shoal.errors import (
    FencedError,
    MemoryBudgetExceededError,
    NotConnectedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
)

# By the kind of an `ErrorReply`: after one of these every further request fails with the same error.
FATAL_ERRORS: dict[str, type[ShoalError]] = {"server-lost": ServerLostError, "fenced": FencedError}


def error_of(reply: ErrorReply) -> ValueError | ShoalError:
    """Return the exception that an error reply stands for."""
    if reply.kind == "input":
        return ValueError(reply.text)
    if reply.kind == "memory":
        return MemoryBudgetExceededError(reply.text)
    if reply.kind == "not-connected":
        return NotConnectedError(reply.text)
    return FATAL_ERRORS.get(reply.kind, ProtocolError)(reply.text)


def copy_error(error: ShoalError) -> ShoalError:
    """Return a new error like this one: an exception that is raised twice collects both tracebacks."""
    return type(error)(*error.args)
