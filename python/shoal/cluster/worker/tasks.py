"""The worker's side of a save or load by the servers: one task, executed by all endpoints at once.

The exchange is described in protocol/tasks.py.

Threads: a :class:`TaskCoordinator` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Self

import msgspec
import numpy as np

from shoal import _core
from shoal.base.decoders import msgpack_decoder
from shoal.cluster.protocol.slot_map import ClusterMap, Endpoint
from shoal.cluster.protocol.tasks import (
    ERROR_TYPES,
    MAX_POLL_SECONDS,
    MIN_PATIENCE_SECONDS,
    STALL_SECONDS,
    Report,
    Task,
    digest_words,
    encode,
)
from shoal.cluster.worker.channel import Channel
from shoal.errors import ClusterChangedError, DeadlineExceededError, ProtocolError, ShoalError

Op = _core.Op

_MIN_POLL_SECONDS = 0.001
_RELEASE_SECONDS = 2.0  # for a server to receive that the task is cancelled

_report = msgpack_decoder(Report)


class TaskCoordinator:
    """A task that all endpoints execute. A context manager that cancels an unfinished task."""

    def __init__(self, channel: Channel, what: str) -> None:
        self._channel = channel
        self._what = what
        self._set_map(channel.map)
        self._open = False
        self._number = 0
        self._sent_at = 0.0  # when the endpoints last heard of this worker
        self.clock = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_map(self, map: ClusterMap) -> None:
        self._map = map
        self._endpoints = map.owners
        self._slots = [map.run_ranges(endpoint.id)[0][0] for endpoint in map.owners]  # one of each endpoint

    def _begin(self, numbers: list[int]) -> list[list[int]]:
        """Begin with the named tables; return the answer of each endpoint."""
        self._set_map(self._channel.map)
        future = self._channel.begin(Op.SAVE_BEGIN, 0, payload=[np.array(numbers, np.uint64)], count=len(numbers))
        self._open = True
        self._number = future.sequence
        self.clock = future.clock
        answers = [figures.tolist() for figures in future.result()]
        self._sent_at = time.monotonic()
        self._check_map()
        return answers

    def _check_map(self) -> None:
        """Check that the endpoints still have the slots that they had at the beginning."""
        map = self._channel.map
        if map.runs != self._map.runs:
            raise ClusterChangedError(
                f"slots have moved to other endpoints during the {self._what} (the map had epoch {self._map.epoch} and "
                f"has epoch {map.epoch}): the former data is kept, {self._what} again"
            )

    def _abandoned(self, endpoint: Endpoint) -> ShoalError:
        return ShoalError(f"{endpoint.label} has cancelled the {self._what} before it began")

    def _patience(self) -> float:
        return max(self._channel.client.timeout, MIN_PATIENCE_SECONDS)

    def _run_until(
        self, state: str, task: Task, on_progress: Callable[[int], None] = lambda rows: None
    ) -> list[Report]:
        """Send a task until all endpoints report a state."""
        words = encode(task)
        reports: dict[int, Report] = {}
        moved = dict.fromkeys(range(len(self._endpoints)), time.monotonic())
        rows, pause = 0, _MIN_POLL_SECONDS
        while True:
            for k, report in enumerate(self._poll(words)):
                if report is not None and report != reports.get(k):
                    reports[k] = report
                    moved[k] = time.monotonic()
            if len(reports) == len(self._endpoints) and all(report.state == state for report in reports.values()):
                on_progress(sum(report.rows for report in reports.values()) - rows)
                return [reports[k] for k in range(len(self._endpoints))]
            now = sum(report.rows for report in reports.values())
            on_progress(now - rows)
            rows = now
            for k, at in moved.items():
                idle = time.monotonic() - at
                if (k not in reports or reports[k].state != state) and idle > max(
                    STALL_SECONDS, self._channel.client.timeout
                ):
                    raise DeadlineExceededError(
                        f"{self._endpoints[k].label} has made no progress with the {self._what} for {idle:.0f} s: "
                        f"does its disk, or {task.directory}, still answer?"
                    )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _poll(self, words: bytes) -> list[Report | None]:
        numbers = np.array([self._number], np.uint64)
        silent = time.monotonic() - self._sent_at
        self._sent_at += silent
        calls = [
            self._channel.begin(Op.SAVE_POLL, 0, slot=slot, payload=[numbers, words], count=1) for slot in self._slots
        ]
        answers = [call.result() for call in calls]
        self._check_map()
        return [
            self._read(endpoint, silent, *answer) for endpoint, answer in zip(self._endpoints, answers, strict=True)
        ]

    def _read(self, endpoint: Endpoint, silent: float, known: bool, words: bytes) -> Report | None:
        if not known and silent > MIN_PATIENCE_SECONDS:
            raise ShoalError(
                f"{endpoint.label} has cancelled the {self._what}: this worker has sent nothing for {silent:.0f} s; "
                "the former data is kept"
            )
        if not known:  # that this worker was declared dead is the answer to every call
            raise ClusterChangedError(
                f"{endpoint.label} has cancelled the {self._what}, because slots have moved, or it has taken those of "
                f"a server that has ended: the former data is kept, {self._what} again"
            )
        if not words:
            return None
        try:
            report = _report.decode(words)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"{endpoint.label} sent a report of the {self._what} that cannot be read ({error})"
            ) from None
        if report.state == "failed":
            raise ERROR_TYPES.get(report.kind, ShoalError)(f"{endpoint.label}: {report.text}")
        return report

    def close(self) -> None:
        """Cancel the task if it is unfinished."""
        with contextlib.suppress(ShoalError):
            self._end("", _RELEASE_SECONDS)

    def _end(self, digest: str, timeout: float | None = None) -> None:
        """End the task on all endpoints: done, for the checkpoint of this digest; cancelled, if there is none.

        If an endpoint does not accept that it is done, it is cancelled where it is still under way.
        """
        if not self._open:
            return
        self._open = False
        if not digest:
            self._cancel(timeout)
            return
        words = np.array([self._number, *digest_words(digest)], np.uint64)
        calls = [
            self._channel.begin(Op.SAVE_END, 0, slot=slot, payload=[words], count=len(words)) for slot in self._slots
        ]
        errors = []
        for call in calls:
            try:
                call.result(timeout)
            except ShoalError as error:
                errors.append(error)
        if errors:
            with contextlib.suppress(ShoalError):
                self._cancel(_RELEASE_SECONDS)
            raise errors[0]

    def _cancel(self, timeout: float | None) -> None:
        """Cancel the task on all endpoints of the newest map: it may have begun there, if slots moved meanwhile.

        Those that have no slots any more have cancelled it.
        """
        number = np.array([self._number], np.uint64)
        self._channel.begin(Op.SAVE_END, 0, payload=[number], count=1).result(timeout)
