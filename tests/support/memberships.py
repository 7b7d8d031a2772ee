"""Memberships of new clusters, and of stored states."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.cluster.scheduler import state as state_module
from shoal.cluster.scheduler.inputs import Input
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.state import State
from shoal.config import ClusterConfig


def new_state(rng: random.Random, *, now: float = 0.0, **settings: Any) -> State:
    state = state_module.new_state(ClusterConfig(**settings), rng.randbytes(16))
    state.now = now
    return state


def new_membership(
    *, rng: random.Random, now: float = 0.0, record: Any = lambda _: None, **settings: Any
) -> Membership:
    return Membership(new_state(rng, now=now, **settings), record=record)


def copied_state(membership: Membership) -> State:
    """The state but for its time, which heartbeats advance, to be compared with another one."""
    state = msgspec.structs.replace(membership.state, now=0.0)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)


def restored(state: bytes, entries: Iterable[bytes], **of: Any) -> Membership:
    """The membership of a stored state and the inputs after it."""
    membership = Membership(msgspec.msgpack.decode(state, type=State), **of)
    for entry in entries:
        membership.replay(msgspec.msgpack.decode(entry, type=Input))
    return membership
