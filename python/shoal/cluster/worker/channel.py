"""The data plane of one worker: ``_core.Client`` (csrc/client), with what only Python can do for it.

    a calling thread        the client sends its call; the thread waits without the GIL
    thread "shoal-channel"  is lent to the client, for what no thread waits for; runs callbacks, asks for maps, logs
                            failures, makes spans

Threads: any number. Fork: a child's copy raises WrongProcessError.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from shoal import _core
from shoal.cluster.protocol.libzmq import backend
from shoal.cluster.protocol.metrics import Durations
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.errors import ShoalError, TransportError

if TYPE_CHECKING:
    from shoal.cluster.protocol.connection import Context
    from shoal.cluster.worker.tracing import CallTracer, TracedCalls, TracedRows

_log = logging.getLogger("shoal.worker")


class WorkerIdentity(NamedTuple):
    """The numbers by which servers know a worker; the scheduler assigns them when the worker joins."""

    rank: int
    incarnation: int
    job: int


class Role(NamedTuple):
    """What a process is to the servers: who it is, under which map, from which clock on."""

    worker: WorkerIdentity
    map: ClusterMap
    clock: int = 0
    atomic_clocks: bool = False


class CurveKeys(NamedTuple):
    """The keys of a connection to servers, in Z85."""

    server: str
    public: str
    secret: str


class Channel:
    """The data plane of one worker. A context manager that closes itself."""

    def __init__(
        self,
        role: Role,
        *,
        timeout: float = 60.0,
        refresh: Callable[[], ClusterMap] | None = None,
        curve: CurveKeys | None = None,
        context: Context | None = None,
        tracer: CallTracer | None = None,
        policy: _core.Policy | None = None,
    ) -> None:
        self.worker = role.worker
        self._map = role.map
        self._refresh = refresh
        self._tracer = tracer
        self._failures: Refusals | None = Refusals(_log)
        self._own_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        keys = CurveKeys("", "", "") if curve is None else curve
        self.client = client = _core.Client(
            backend(),
            self._context.underlying,
            role.worker,
            role.map,
            policy=policy or _core.Policy(),
            atomic_clocks=role.atomic_clocks,
            clock=role.clock,
            timeout=timeout,
            report=_weakly(self._report),
            curve_server=keys.server,
            curve_public=keys.public,
            curve_secret=keys.secret,
        )
        # What submits calls: the client, or what traces them.
        self.calls: _core.Client | TracedCalls = client
        if tracer is not None:
            self.calls = tracer.traced(client, role.worker.rank, role.worker.job)
        self._background = threading.Thread(
            target=_run_background, args=(client, weakref.ref(self)), name="shoal-channel", daemon=True
        )
        self._background.start()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def begin(self, op: int, table: int, **what: Any) -> _core.Call:
        """Start a call at the present clock and return, unless the pending calls are at their limit."""
        return self.calls.begin(op, table, **what)

    def traced_rows(self, rows: _core.CachedRows, table: int) -> _core.CachedRows | TracedRows:
        """Return what submits the calls of a cache: it, or what traces them."""
        return rows if isinstance(self.calls, _core.Client) else self.calls.of_rows(rows, table)

    @property
    def clock(self) -> int:
        """Number of ticks so far."""
        return self.client.clock

    def tick(self) -> _core.Call:
        """End the clock. Returns after a millisecond at the latest."""
        return self.calls.tick()

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all calls made so far are settled, successfully or not."""
        self.client.drain(timeout)

    def raise_unobserved(self) -> None:
        """Raise, once, the errors of pushes and ticks that failed and that no thread waited for."""
        if self.client.has_unobserved:
            self._report()
            errors = self.client.take_unobserved()
            if errors:
                more = f" (and {len(errors) - 1} calls more)" if len(errors) > 1 else ""
                raise type(errors[0])(f"{errors[0]}{more}") from errors[0]

    def durations(self) -> dict[str, Durations]:
        """Return how long calls took until they were settled, by the name of their operation."""
        return {name: Durations(seconds, counts) for name, (seconds, counts) in self.client.durations().items()}

    def metrics(self) -> dict[str, int]:
        """Return counts of messages and bytes since the channel was opened."""
        self.client.check()
        return self.client.metrics()

    # ---- events from the scheduler -----------------------------------------------------------------------------------

    def lose(self, server: int, reason: str) -> None:
        """Treat a server as lost: calls that wait for it fail."""
        self.client.lose(server, reason)

    def fail(self, error: ShoalError) -> None:
        """Fail all calls, pending and later ones, with this error."""
        self.client.fail(error)

    @property
    def map(self) -> ClusterMap:
        """The newest map."""
        return self._map

    def set_map(self, map: ClusterMap) -> None:
        """Use another map, if it is newer: what is under way at endpoints that have gone is sent elsewhere at once."""
        if map.epoch > self._map.epoch:
            self._map = map
        self.client.set_map(map)

    def leave(self) -> None:
        """Log no further failures: this process leaves the cluster, whose servers then refuse what is still pending."""
        self._failures = None
        self.client.leave()

    def close(self) -> None:
        """Close the sockets. Pending calls fail."""
        if not self.client.is_of_this_process or not self.client.is_open:
            return
        self._failures = None
        self.client.close()
        if threading.current_thread() is not self._background and self._background.is_alive():
            self._background.join()
        if self._own_context:
            self._context.term()
        self.client.run_noticed()

    def __del__(self) -> None:
        if hasattr(self, "_background") and not sys.is_finalizing():
            self.close()

    # ---- the background thread ---------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Log failures, and make the spans of traced calls that are settled."""
        for error, ids in self.client.take_failed():
            if self._failures is not None:
                self._failures.add(type(error).__name__, str(error), ids=ids)
        if self._tracer is not None:
            self._tracer.make_spans(self.client.take_traced())

    def work(self) -> None:
        """Do what the client has returned for."""
        self.client.run_noticed()
        if self._refresh is not None and self.client.takes_map_request():
            with contextlib.suppress(ShoalError):  # still wanted: asked for again after a pause
                self.set_map(self._refresh())


def _run_background(client: _core.Client, ref: weakref.ref[Channel]) -> None:
    while client.wait_for_work():
        channel = ref()
        if channel is None:
            return
        try:
            channel.work()
        except BaseException as error:  # a defect: fail the calls, since this thread ends
            channel.fail(TransportError(f"the connections to the servers failed: {error!r}"))
            raise
        del channel


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    ref = weakref.WeakMethod(method)

    def call() -> None:
        found = ref()
        if found is not None:
            found()

    return call
