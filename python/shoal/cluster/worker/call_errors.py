"""The errors of calls that fail, with the endpoint and the remedy.

Threads: functions of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal import _core
from shoal.cluster.worker.calls import Call, EndpointState, RequestPart
from shoal.errors import (
    DeadlineExceededError,
    DependencyError,
    MemoryBudgetExceededError,
    NotConnectedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
)

Status = _core.Status


def refusal_error(part: RequestPart, reply: Any) -> ShoalError:
    """Return the error for a refusal that no repetition can change."""
    text = f"{part.label} refused the {part.call.name}: "
    if part.last == Status.WRONG_JOB:
        return NotConnectedError(text + "it serves another job; connect again")
    if part.last == Status.NO_TABLE:
        return ProtocolError(text + "it has no such table; create the table first")
    if part.last == Status.VERSION:
        return ProtocolError(text + "it has another protocol version; install one version of shoal on all machines")
    if part.last == Status.BAD_REQUEST:
        return ProtocolError(text + reply.text)
    if part.last == Status.RESOURCE_EXHAUSTED:
        return MemoryBudgetExceededError(text + reply.text)
    return ShoalError(text + reply.text)


def server_lost_error(part: RequestPart, peer: EndpointState, reason: str, now: float) -> ServerLostError:
    """Return the error of a call that needs a lost server."""
    return ServerLostError(
        f"{part.label} is lost ({reason}; {peer.silence(now)}), and its rows with it: "
        f"the {part.call.name} is impossible; start the cluster again and load the last checkpoint"
    )


def deadline_error(call: Call, endpoints: Mapping[str, EndpointState], epoch: int, now: float) -> DeadlineExceededError:
    """Return the error of a call that has passed its deadline: what its slowest part waits for."""
    seconds = f"{call.deadline - call.started:.1f} s"
    if not call.parts:
        return DeadlineExceededError(
            f"the {call.name} was not done within {seconds}: its slots were refused, and no map newer than epoch "
            f"{epoch} arrived; is the scheduler running?"
        )
    part = max(call.parts, key=lambda part: now - _last_reply(endpoints, part))
    peer = endpoints.get(part.address) or EndpointState(part.address, part.server)
    why, remedy = {
        Status.OK: ("did not answer", "is it running and reachable? If it is only slow, raise timeout"),
        Status.DEFERRED: (
            "waits for a slower worker",
            "check whether one is stuck or does not tick, or raise timeout",
        ),
        Status.OVERLOADED: ("has no room for it", "raise the server's limits, or timeout"),
        Status.NOT_ADMITTED: ("does not know this worker yet", "is the scheduler running, and connected to it?"),
        Status.RETRY: ("misses pushes of this clock", "see the errors of these pushes"),
        Status.BAD_REQUEST: ("refused it as damaged", "something between here and there changes bytes"),
    }[part.last]
    if part.last == Status.OVERLOADED and call.op == _core.Op.SAVE_BEGIN:
        why, remedy = "copies slots to another server, or ends another save, first", "raise timeout"
    if part.message is None:
        why, remedy = f"has {peer.bytes} earlier bytes to receive", "raise timeout, or push less at once"
    return DeadlineExceededError(
        f"the {call.name} was not done within {seconds}: {part.label} {why} ({peer.silence(now)}); {remedy}"
    )


def dependency_error(call: Call, failed: Call) -> DependencyError:
    """Return the error of a call that was to come after one that failed."""
    return DependencyError(
        f"the {call.name} was not executed: the {failed.name}, which it comes after, failed: {failed.error}"
    )


def held_error(call: Call, blocker: Call | None) -> DeadlineExceededError:
    """Return the error of a call that has passed its deadline before it could begin."""
    other = "calls" if blocker is None else f"the {blocker.name}"
    return DeadlineExceededError(
        f"the {call.name} was not executed: {other}, which it comes after, took {call.deadline - call.started:.1f} s; "
        "raise timeout"
    )


def _last_reply(endpoints: Mapping[str, EndpointState], part: RequestPart) -> float:
    peer = endpoints.get(part.address)
    return -math.inf if peer is None or math.isnan(peer.last_reply) else peer.last_reply
