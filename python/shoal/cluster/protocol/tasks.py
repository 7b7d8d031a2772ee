"""The messages between a worker and the endpoints during a save or a load: tasks and reports.

    worker                                       each endpoint
    SAVE_BEGIN                     ----------->  snapshots the tables; a thread waits for a task
    a task                         ----------->  checks whether it sees the directory: "ready"
    the task with `go`, once all are ready --->  executes it, and reports its progress: "done"
    SAVE_END                       ----------->  releases the tables

Between SAVE_BEGIN and SAVE_END the worker sends a `Task` in each SAVE_POLL, and the endpoint answers with a `Report`.
Each is complete in itself and sent repeatedly, so a lost or late one has no effect. worker/tasks.py and server/tasks.py
have the two sides.

Invariants
    T1  Nothing is executed before every endpoint has seen the directory.
    T2  Every wait ends: an endpoint cancels a task whose worker was dismissed or has sent nothing for `Task.patience`
        seconds; a worker gives up on an endpoint that makes no progress or whose server is lost.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from shoal import _core
from shoal.errors import CorruptionError, MemoryBudgetExceededError, StorageError
from shoal.table.spec import TableRecord

STALL_SECONDS = 300.0  # in which a disk writes a file of a GiB at 4 MB per second
VISIBILITY_SECONDS = 2.0  # until a network file system shows a file that another machine has written
MAX_POLL_SECONDS = 0.1  # between two polls, and between two reports
MIN_PATIENCE_SECONDS = 60.0  # that an endpoint waits for a worker at least: it may be publishing the manifest


class Report(msgspec.Struct, frozen=True):
    """The progress of an endpoint: "ready", "working", "done" or "failed"."""

    state: str
    rows: int = 0  # written, or read
    saved: msgspec.Raw = msgspec.Raw(b"\x90")  # list of checkpoint.SavedTable; empty by default
    loaded: list[int] = []  # rows of each table
    kind: str = ""  # of error
    text: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all kinds of tasks."""

    directory: str = msgspec.field(name="place")
    options: dict[str, Any]
    patience: Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # seconds
    go: bool = False  # False: check only


class WriteTask(Task, frozen=True, kw_only=True, tag="write"):
    """Write the slots of an endpoint into a checkpoint."""

    token: str  # the name of a file in the directory
    content: bytes  # of that file
    stem: str
    version: int
    durable: bool
    tables: list[TableRecord]
    kinds: list[str]


class ReadTask(Task, frozen=True, kw_only=True, tag="read"):
    """Read the slots of an endpoint from a checkpoint."""

    digest: str  # of the checkpoint
    slots: int  # of the store


# By the `kind` of a report that is "failed".
ERROR_TYPES: dict[str, type[Exception]] = {
    "storage": StorageError,
    "corruption": CorruptionError,
    "lost": _core.SnapshotLostError,
    "memory": MemoryBudgetExceededError,
    "import": ImportError,
    "input": ValueError,
}


def error_kind(error: Exception) -> str:
    """Return the kind under which an error is reported; an empty string for an unexpected one."""
    return next((kind for kind, of in ERROR_TYPES.items() if isinstance(error, of)), "")


def digest_words(digest: str) -> list[int]:
    """Return a digest as the 64-bit numbers of a message."""
    words: list[int] = np.frombuffer(bytes.fromhex(digest), np.uint64).tolist()
    return words


def encode(task: Task) -> bytes:
    """Encode a task."""
    try:
        return msgspec.msgpack.encode(task)
    except TypeError as error:
        raise TypeError(
            f"storage_options are sent to the servers, which open files there too: pass plain values ({error})"
        ) from None
