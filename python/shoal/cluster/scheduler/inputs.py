"""The inputs of the scheduler's state machine: messages as they arrive, and what is defined here.

What :class:`.Membership` decides from the time, such as that a peer is dead, is an input too. Heartbeats, routes and
the times of the last messages are no inputs: they are known again a moment after a restart.

Threads: inputs are immutable.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shoal.cluster.protocol.messages import Assigned, OrderReply, Request, StreamsClosed


class _Input(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Probed(_Input, frozen=True, tag="probed"):
    """The addresses of a server were probed, for its request of this number: the one that failed, and why."""

    sender: bytes
    number: int
    fault: tuple[str, str] | None


class Died(_Input, frozen=True, tag="died"):
    """A peer is declared dead, ``silent`` seconds after its last sign of life, as far as this is known."""

    sender: bytes
    why: str
    silent: float = 0.0


class PlanDue(_Input, frozen=True, tag="plan"):
    """It is time to plan: some arcs may lack copies or have to move."""


class MembersSilent(_Input, frozen=True, tag="silent"):
    """Whether some worker of the job of this name may be dead: it has missed heartbeats, or is disconnected."""

    silent: bool
    job: str = ""


class ReplacementOverdue(_Input, frozen=True, tag="overdue"):
    """No worker has come in time to replace the dead worker of this rank."""

    rank: int
    job: str = ""


class FormingOverdue(_Input, frozen=True, tag="forming-overdue"):
    """Not all workers that the next job waits for have come in time."""

    job: str = ""


class EventsSeen(_Input, frozen=True, tag="seen"):
    """All peers have received this many events."""

    events: int


class RefusalsCounted(_Input, frozen=True, tag="refusals"):
    """How often the scheduler has refused something, by reason: part of the metrics that a worker has requested."""

    counts: dict[str, int]


class Restarted(_Input, frozen=True, tag="restarted"):
    """The scheduler was started, and listens at this address. Each start has its own generation, which rises."""

    generation: int
    address: str


class Ended(_Input, frozen=True, tag="ended"):
    """The cluster ends."""


InputBody: TypeAlias = (
    Request
    | OrderReply
    | Assigned
    | StreamsClosed
    | Probed
    | Died
    | PlanDue
    | MembersSilent
    | ReplacementOverdue
    | FormingOverdue
    | EventsSeen
    | RefusalsCounted
    | Restarted
    | Ended
)


class Input(_Input, frozen=True):
    """An input, and the time at which it came. ``host`` is the address of the connection of a process that is new."""

    now: float
    body: InputBody
    host: str = ""
