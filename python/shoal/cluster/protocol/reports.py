"""What a scheduler or a server reports to the process that started it, its supervisor: one message a line, as JSON.

    Joined        it serves
    ServerDied    of the scheduler: a server was declared dead
    WorkerDied    of the scheduler: so was a worker, for whose replacement its job waits
    NamedJobs     of the scheduler: which named jobs there are, first and after each change
    Drained       of a server: all its slots have moved to others, and it ends

Threads: immutable.
"""

from __future__ import annotations

import os
import socket
from typing import TypeAlias

import msgspec


class Joined(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """``address`` is the scheduler's, ``process`` names this process as the scheduler does, ``probes`` is a URL."""

    process: str
    pid: int
    address: str = ""
    rank: int = -1  # of a server
    node: str = ""  # where it runs
    probes: str = ""  # where it answers probes


class ServerDied(msgspec.Struct, frozen=True, tag=True):
    """``lost_slots`` are those of which it had the last copy: no other server can take its place."""

    process: str
    lost_slots: str = ""


class WorkerDied(msgspec.Struct, frozen=True, tag=True):
    """A worker died, by its rank and process."""

    rank: int
    process: str


class NamedJobs(msgspec.Struct, frozen=True, tag=True):
    """The names of the named jobs."""

    names: tuple[str, ...]


class Drained(msgspec.Struct, frozen=True, tag=True):
    """A server has been drained."""


Report: TypeAlias = Joined | ServerDied | WorkerDied | NamedJobs | Drained


def process_name() -> str:
    """Return how messages name this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def pid_of(process: str) -> int:
    """Return the number of a process from its `process_name`."""
    return int(process.split()[1])
