"""The data connections of a worker, and the threads that use them.

Over 600 lines: the threads of all calls and the background share the state of one channel, under one lock.

:mod:`shoal.cluster.worker.requests` decides what is sent, sent again, answered or given up, and does no I/O; this
module does the I/O. There is one DEALER socket for each endpoint (:mod:`shoal.cluster.protocol.connection`).

Threads follow the leader/followers pattern (Schmidt et al., 2000). A thread that waits for an answer becomes the *I/O
leader*: it sends what is due, polls until a message comes, passes it to the requests, and stops when its own call is
settled. So a single thread needs no second one. Meanwhile other threads submit their calls and wake the leader, which
sends them; when the leader has its answer, one of the waiting threads becomes the leader.

A background thread does the same every `_POLL_SECONDS` if calls are pending and there is no leader. So pushes that no
thread waits for are sent and acknowledged, and lost messages are sent again, also while all threads compute.

    begin --lock----> requests.submit --outgoing--> socket             the calling thread, or the leader
    wait  --leader--> poll, receive, on_time, send .. until settled

Invariants
    C1  Sockets, requests and clock are used under the lock; sockets by the leader, or while there is none.
    C2  A call is settled by its deadline if a thread waits for it or the background thread lives: every sleep ends at
        `next_time`.
    C3  The error of a call that no thread waited for is raised once, by :meth:`Channel.raise_unobserved`.
    C4  A connection that ends, or brings a damaged message, is replaced, and what its endpoint has not answered is sent
        again over the new one.
    C5  A push has the clock that the tick after it sends to the servers: both are read under the lock.

Threads: any number. Fork: a child's copy raises WrongProcessError before it uses the lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import zmq

from shoal import _core
from shoal.base.scalars import plain
from shoal.cluster.protocol.connection import Connection, Context, Socket
from shoal.cluster.protocol.errors import copy_error
from shoal.cluster.protocol.libzmq import backend
from shoal.cluster.protocol.metrics import Durations
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.call_failures import CallFailures
from shoal.cluster.worker.call_metrics import CallMetrics
from shoal.cluster.worker.calls import Call
from shoal.cluster.worker.requests import Requests
from shoal.errors import ClosedError, DeadlineExceededError, ShoalError, TransportError, WrongProcessError

if TYPE_CHECKING:
    from shoal.cluster.worker.tracing import CallTracer

_log = logging.getLogger("shoal.worker")

Op = _core.Op

_POLL_SECONDS = 0.02
_TICK_SECONDS = 0.001  # that a tick may take for the round trip of the pushes before it
_MAX_PENDING_BYTES = 256 << 20  # of pending requests; a thread that submits more waits
_MAX_PENDING_CALLS = 1024
_MAX_SLEEP_SECONDS = 1e6
_MAX_REPLY_BYTES = 1 << 30


class PendingCalls(ABC):
    """Calls that are waited for one after another: :class:`shoal.table.future.Waitable`."""

    __slots__ = ("channel",)

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    @abstractmethod
    def calls(self) -> list[Call]:
        """The calls that a later one comes after."""

    @abstractmethod
    def next_call(self) -> Call | None:
        """Return the call that is to be waited for; None: all are settled. Submits what has become due. Any thread."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait until all are settled; raise the error of one that failed."""

    def done(self) -> bool:
        """Whether all are settled."""
        return self.next_call() is None

    def add_done_callback(self, fn: Callable[[Self], object], /) -> None:
        """Call a function when all are settled, without the lock of the channel."""
        call = self.next_call()
        if call is None:
            fn(self)
        else:
            self.channel.when_settled(call, lambda: self.add_done_callback(fn))

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (call := self.next_call()) is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.channel.wait_until_settled(call, left)


class CallFuture(PendingCalls):
    """A submitted call."""

    __slots__ = ("call",)

    def __init__(self, channel: Channel, call: Call) -> None:
        self.channel = channel  # not by the base class: there is one of these for each call
        self.call = call

    @property
    def calls(self) -> list[Call]:
        """The call."""
        return [self.call]

    def next_call(self) -> Call | None:
        """Return the call, unless it is settled."""
        return None if self.call.done else self.call

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the call is settled; return its result, or raise its error."""
        self.channel.wait(self.call, timeout)
        return self.call.result


class Channel:
    """The data plane of one worker. A context manager that closes itself."""

    def __init__(
        self,
        requests: Requests,
        *,
        clock: int = 0,
        timeout: float = 60.0,
        refresh: Callable[[], ClusterMap] | None = None,
        secure: Callable[[Socket], None] | None = None,
        context: Context | None = None,
        tracer: CallTracer | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._requests = requests
        self._clock = clock
        self._timeout = timeout
        self._refresh = refresh
        self._secure = secure
        self._tracer = tracer
        self._own_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a call was settled, or the leader has stopped
        self._has_io_leader = False
        self._waiting = 0  # threads that wait to become the leader
        self.call_metrics = CallMetrics()
        self._pending: dict[Call, tuple[int, float]] = {}  # the bytes of their arrays, and when they were begun
        self._pending_bytes = 0
        self._pushed: set[int] = set()  # tables pushed to in this clock
        self._failures = CallFailures(_log)
        self._callbacks: deque[Callable[[], object]] = deque()  # of settled calls; they may take any lock
        self._is_open = True
        self._has_left = False
        self._sender = _core.ZeroCopySender(backend())
        self._connections: dict[str, Connection] = {}  # by address
        self._by_socket: dict[Any, Connection] = {}  # by socket and by monitor
        self._connected_epoch = 0  # of the map that the connections follow
        self._poller = zmq.Poller()
        self._bytes_sent = 0
        self._bytes_received = 0
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._poll_now = threading.Event()
        self._background = threading.Thread(
            target=_run_background, args=(weakref.ref(self), self._poll_now), name="shoal-channel", daemon=True
        )
        self._background.start()

    # ---- calls -------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """Number of ticks so far."""
        return self._clock

    @property
    def has_pushed(self) -> bool:
        """Whether there were pushes in this clock."""
        return bool(self._pushed)

    @property
    def has_pending(self) -> bool:
        """Whether calls are not settled."""
        return bool(self._pending)

    @property
    def timeout(self) -> float:
        """Seconds in which every call is settled."""
        return self._timeout

    def check(self) -> None:
        """Check that the channel can be used."""
        if os.getpid() != self._pid:
            raise WrongProcessError(
                "this store was connected before a fork and belongs to the parent process: connect in the child, or "
                "start children with the 'spawn' method"
            )
        if not self._is_open:
            raise _closed()

    def begin(self, op: int, table: int, **what: Any) -> CallFuture:
        """Start a call at the present clock and return.

        Returns at once, unless the pending calls are at their limit.
        """
        self.check()
        hashes, values = what.get("hashes"), what.get("values")
        size = 0 if hashes is None else hashes.nbytes
        size += 0 if values is None else values.nbytes
        for part in what.get("payload", ()):
            size += memoryview(part).nbytes
        trace = None
        if self._tracer is not None:
            keys = None if hashes is None else len(hashes)
            trace = what["trace"] = self._tracer.begin(op, table, self._clock, keys, self._requests.worker)
        try:
            with self._lock:
                return CallFuture(self, self._submit(op, table, size, what))
        except BaseException as error:
            if trace is not None:
                trace.end(error, time.monotonic())
                self._make_spans()
            raise

    def tick(self) -> CallFuture:
        """End the clock. Returns after a millisecond at the latest."""
        tick = self.begin(Op.TICK, 0)
        with self._lock:  # other workers wait for this tick: send it now, not at the next poll
            self._run_io_until(
                lambda: self._has_io_leader or not self._requests.waits_for_pushes(tick.call),
                time.monotonic() + _TICK_SECONDS,
            )
        return tick

    def _submit(self, op: int, table: int, size: int, what: dict[str, Any]) -> Call:
        if not self._has_room():
            self._run_io_until(self._has_room, None)
        if not self._is_open:
            raise _closed()
        now = time.monotonic()
        until = now + self._timeout
        if op == Op.TICK:
            call = self._requests.tick(self._clock, [*self._pushed], now, until, on_done=self._settled, **what)
            self._clock += 1
            self._pushed.clear()
        else:
            if op == Op.PUSH:
                self._pushed.add(table)
            call = self._requests.submit(op, table, self._clock, now, until, on_done=self._settled, **what)
        if not call.done:
            self._pending[call] = (size, now)
            self._pending_bytes += size
        self._hurry()
        return call

    def _has_room(self) -> bool:
        return self._pending_bytes <= _MAX_PENDING_BYTES and len(self._pending) <= _MAX_PENDING_CALLS

    def _settled(self, call: Call) -> None:
        """Account for a call that is settled now. Called by the requests, with the lock."""
        now = time.monotonic()
        size, begun_at = self._pending.pop(call, (0, now))  # it is not pending if it was settled at once
        self._pending_bytes -= size
        self.call_metrics.settled(call.op, now - begun_at)
        if call.error is not None and self._has_left:  # refused, since this process is no member any more
            call.error = _closed()
        if call.error is not None:
            self._failures.add(call, call.error, self._requests.ids_of(call))
        if call.callbacks:
            self._callbacks += call.callbacks
            self._poll_now.set()
        if self._waiting:
            self._changed.notify_all()

    def _hurry(self) -> None:
        """Send what is due: through the leader if there is one, else in this thread."""
        if self._has_io_leader:
            self._wake()
        else:
            self._send()

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Wait until a call is settled; raise its error, or DeadlineExceededError after ``timeout`` seconds."""
        self.wait_until_settled(call, timeout)
        if call.error is not None:
            self._failures.observed(call)
            raise copy_error(call.error)

    def wait_until_settled(self, call: Call, timeout: float | None = None) -> None:
        """Wait until a call is settled, successfully or not; raise DeadlineExceededError after ``timeout`` seconds."""
        if not call.done:
            self.check()
            deadline = None if timeout is None else _deadline(timeout)
            with self._lock:
                if not self._run_io_until(lambda: call.done, deadline):
                    raise DeadlineExceededError(
                        f"the {call.name} is not done after {timeout:g} s; it continues: wait again, or longer"
                    )
        if self._tracer is not None:
            self._make_spans()

    def when_settled(self, call: Call, fn: Callable[[], object]) -> None:
        """Call a function in the background thread when a call is settled, or here and now if it is already."""
        self.check()
        with self._lock:
            if not call.done:
                call.callbacks = (*call.callbacks, fn)
                return
        fn()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            self._callbacks.popleft()()

    def _make_spans(self, *, wait: bool = True) -> None:
        if self._tracer is not None and os.getpid() == self._pid:  # a fork may have copied a lock that was held
            self._tracer.make_spans(wait=wait)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all calls made so far are settled, successfully or not."""
        self.check()
        deadline = _deadline(timeout)
        with self._lock:
            last = next((call.serial for call in reversed(self._pending)), 0)
            if not self._run_io_until(lambda: next((call.serial for call in self._pending), last + 1) > last, deadline):
                count = sum(call.serial <= last for call in self._pending)
                raise DeadlineExceededError(f"{count} calls are not done after {timeout:g} s; they continue")
        self._make_spans()

    def raise_unobserved(self) -> None:
        """Raise, once, the errors of pushes and ticks that failed and that no thread waited for."""
        if self._failures.has_unobserved:
            with self._lock:
                self._failures.raise_unobserved()

    @property
    def repetitions(self) -> int:
        """Number of messages that were sent again, or to another endpoint."""
        counts = self._requests.counts
        return counts.get("resent", 0) + counts.get("refused", 0) + counts.get("moved", 0)

    def durations(self) -> dict[str, Durations]:
        """Return how long calls took until they were settled, by the name of their operation."""
        with self._lock:
            return self.call_metrics.durations()

    def metrics(self) -> dict[str, int]:
        """Return counts of messages and bytes since the channel was opened."""
        self.check()
        with self._lock:
            return {
                **self._requests.counts,
                "bytes_sent": self._bytes_sent,
                "bytes_received": self._bytes_received,
                "under_way": len(self._pending),
                "bytes_held": self._pending_bytes,
                "keys": self.call_metrics.keys,
                "unique_keys": self.call_metrics.unique_keys,
            }

    # ---- events from the scheduler -----------------------------------------------------------------------------------

    def lose(self, server: int, reason: str) -> None:
        """Treat a server as lost: calls that wait for it fail."""
        self._update(lambda requests, now: requests.lose(server, reason, now))

    def fail(self, error: ShoalError) -> None:
        """Fail all calls, pending and later ones, with this error."""
        self._update(lambda requests, now: requests.close(error, now))

    @property
    def map(self) -> ClusterMap:
        """The newest map."""
        return self._requests.map

    def set_map(self, map: ClusterMap) -> None:
        """Use another map, if it is newer: what is under way at endpoints that have gone is sent elsewhere at once."""
        self._update(lambda requests, now: requests.set_map(map, now))

    def _update(self, change: Callable[[Requests, float], None]) -> None:
        with self._lock:
            if self._is_open:
                change(self._requests, time.monotonic())
                self._hurry()
                self._changed.notify_all()

    def leave(self) -> None:
        """Log no further failures: this process leaves the cluster, whose servers then refuse what is still pending."""
        with self._lock:
            self._has_left = True
        self._failures.end_log()

    def close(self) -> None:
        """Close the sockets. Pending calls fail."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._failures.end_log()
            self._requests.close(_closed(), time.monotonic())
            while self._has_io_leader:
                self._wake()
                self._waiting += 1
                self._changed.wait(0.1)
                self._waiting -= 1
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            self._wake_read.close()
            self._wake_write.close()
        self._poll_now.set()
        if threading.current_thread() is not self._background and self._background.is_alive():
            self._background.join()
        if self._own_context:
            self._context.term()
        self._run_callbacks()
        self._make_spans()

    def __del__(self) -> None:
        if hasattr(self, "_background") and not sys.is_finalizing():
            self.close()

    # ---- the I/O leader; the lock is held ----------------------------------------------------------------------------

    def _run_io_until(self, until: Callable[[], bool], deadline: float | None) -> bool:
        """Be the I/O leader, or wait for it, until ``until()`` is true; False: the deadline came first."""
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._has_io_leader:
                self._waiting += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
                continue
            if not self._is_open:
                raise _closed()
            self._has_io_leader = True
            try:
                self._do_io(left)
            finally:
                self._has_io_leader = False
                if self._waiting:
                    self._changed.notify_all()
        return True

    def _do_io(self, seconds: float | None) -> None:
        """Send what is due, sleep at most ``seconds`` until messages arrive, and process them."""
        self._send()
        at = min((connection.open_at for connection in self._connections.values()), default=math.inf)
        due = self._requests.next_time()
        at = at if due is None else min(at, due)
        if at < math.inf:
            left = max(0.0, at - time.monotonic())
            seconds = left if seconds is None else min(seconds, left)
        self._lock.release()
        try:
            # Rounded up: a sleep that ends before its time would be followed by one of no length.
            ready = self._poller.poll(None if seconds is None else int(seconds * 1000) + 1)
        finally:
            _acquire(self._lock)
        if self._is_open:
            self._process(ready)

    def _process(self, ready: list[tuple[Any, int]]) -> None:
        for what, _ in ready:
            connection = self._by_socket.get(what)
            if connection is not None:
                self._receive(connection)
                if what is connection.monitor and connection.has_ended:
                    self._receive(connection)  # messages from before the end
                    self._drop(connection, "")
            else:
                with contextlib.suppress(BlockingIOError):
                    while self._wake_read.recv(4096):
                        pass
        self._requests.on_time(time.monotonic())
        self._send()
        if self._requests.wants_map:
            self._poll_now.set()

    def _receive(self, source: Connection) -> None:
        while source.socket is not None:
            try:
                arrived = self._sender.receive(source.socket.underlying)
            except TransportError as error:
                self._drop(source, str(error))
                return
            if arrived is None:
                return
            self._bytes_received += arrived.nbytes
            if not self._requests.receive(source.address, arrived, time.monotonic()):
                self._drop(source, "the received data was damaged")
                return
            source.received()

    def _send(self) -> None:
        if self._connected_epoch != self._requests.map.epoch:
            self._follow_map()
        self._reopen()
        outgoing = self._requests.outgoing
        while outgoing:
            address, frames = outgoing.popleft()
            target = self._connections.get(address) or self._connect(address)
            if target.socket is None:
                continue  # sent again when the socket is open
            try:
                # The socket has no message limit: the credit of the requests bounds what is pending.
                self._bytes_sent += self._sender.send(target.socket.underlying, frames)
            except TransportError as error:
                self._drop(target, str(error))

    def _follow_map(self) -> None:
        """Close connections to endpoints that have gone, and open those to backups, which a failover needs."""
        map = self._requests.map
        self._connected_epoch = map.epoch
        for gone in self._connections.keys() - {endpoint.address for endpoint in map.endpoints}:
            self._drop(self._connections[gone], "")
            del self._connections[gone]
        for stream in map.streams:
            address = map.endpoint(stream.backup).address
            if address not in self._connections:
                self._connect(address)

    def _connect(self, address: str) -> Connection:
        made = Connection(self._context, self._poller, address, self._prepare, time.monotonic())
        self._connections[address] = made
        self._by_socket |= {made.socket: made, made.monitor: made}
        return made

    def _prepare(self, opened: Socket) -> None:
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
        if self._secure is not None:
            self._secure(opened)

    def _drop(self, connection: Connection, reason: str) -> None:
        for what in (connection.socket, connection.monitor):
            self._by_socket.pop(what, None)
        connection.drop(reason, time.monotonic())

    def _reopen(self) -> None:
        """Reopen dropped connections that are due."""
        for connection in self._connections.values():
            now = time.monotonic()
            if connection.open_at <= now:
                try:
                    connection.open(now)
                except zmq.ZMQError as error:
                    if error.errno == zmq.ETERM:
                        raise
                    continue  # no socket is available now: try again later
                self._by_socket |= {connection.socket: connection, connection.monitor: connection}
                self._requests.reconnected(connection.address, connection.reason, now)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the leader is awake already
            self._wake_write.send(b"\0")

    # ---- the background thread ---------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Do the I/O of calls that no thread waits for, and fetch a map if needed; False: the channel is closed."""
        with self._lock:
            if not self._is_open:
                return False
            if self._pending and not self._has_io_leader:
                self._process(self._poller.poll(0))
            wants_map = self._requests.wants_map
        self._run_callbacks()
        self._make_spans(wait=False)  # `close` waits for this thread
        if wants_map and self._refresh is not None:
            with contextlib.suppress(ShoalError):  # still wanted: fetched again at the next poll
                self.set_map(self._refresh())
        return True


def _run_background(ref: weakref.ref[Channel], wakeup: threading.Event) -> None:
    while True:
        wakeup.wait(_POLL_SECONDS)
        wakeup.clear()
        channel = ref()
        if channel is None:
            return
        try:
            if not channel.poll():
                return
        except zmq.ContextTerminated:  # the process ends
            channel.fail(_closed())
            return
        except BaseException as error:  # a defect: fail the calls, since this thread ends
            channel.fail(TransportError(f"the connections to the servers failed: {error!r}"))
            raise
        del channel


def _closed() -> ClosedError:
    return ClosedError("this store was closed: connect again")


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    timeout = plain(timeout)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout:
        raise ValueError(f"timeout must be a number of seconds, got {timeout!r}")
    return time.monotonic() + min(timeout, _MAX_SLEEP_SECONDS)


def _acquire(lock: threading.Lock) -> None:
    """Acquire a lock despite interrupts, then raise the last interrupt."""
    interrupted: BaseException | None = None
    while True:
        try:
            lock.acquire()
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
