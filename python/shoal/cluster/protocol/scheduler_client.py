"""The connection of a process to the scheduler.

One thread owns the socket. It sends heartbeats, sends unanswered requests again, and receives events; requests come
from any thread, which waits for the reply.

    hello     checks versions, returns the settings of the cluster
    join      makes this process a member; returns its rank and the map
    call      sends a request and returns its reply; `ask`, `answer` and `forget` are its parts

Invariants
  L1  A call ends with its reply, with an error, or at its deadline.
  L2  After the first fatal error (fenced, a server lost, a scheduler that is gone) every call raises it.
  L3  Events are delivered in order, each once.
  L4  A restarted scheduler, which does not know this process, does not stop it: calls raise NotConnectedError, and
      what needs no scheduler continues.
  L5  What a scheduler sends that another one has replaced has no effect: generations do not decrease.

Threads: every method may be called from any thread; `on_event` and `on_fault` run in the connection's own thread, or in
that of `fail`, and must not call it. Fork: a child's copy raises WrongProcessError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import zmq

from shoal.base.timed_queue import TimedQueue
from shoal.cluster.protocol.address import check, is_local, try_all, unknown_host
from shoal.cluster.protocol.connection import Connection, Socket
from shoal.cluster.protocol.curve import Keys
from shoal.cluster.protocol.errors import FATAL_ERRORS, copy_error, error_of
from shoal.cluster.protocol.messages import (
    GRACE_SECONDS,
    MAX_OPEN_REQUESTS,
    Assign,
    Assigned,
    CloseStreams,
    ErrorReply,
    Events,
    Figures,
    GetMap,
    GetMapReply,
    Heartbeat,
    Hello,
    HelloReply,
    Join,
    JoinReply,
    Leave,
    LeaveReply,
    MalformedMessageError,
    Message,
    Order,
    OrderReply,
    PeerRefusedError,
    PendingReply,
    Reply,
    Request,
    SchedulerStopped,
    ServerGone,
    StreamsClosed,
    checked,
    checked_figures,
    decode,
    encode,
)
from shoal.cluster.protocol.records import Event, ReplyBody, RequestBody
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.protocol.reports import process_name
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.errors import (
    ClosedError,
    DeadlineExceededError,
    NotConnectedError,
    ProtocolError,
    ServerLostError,
    ShoalError,
    WrongProcessError,
)

_log = logging.getLogger("shoal.scheduler_client")

_LEAVE_SECONDS = 2.0  # for an abandoned connection to leave
_RESEND_SECONDS = 1.0  # until a request is sent again
_MAX_UNSENT = 64  # messages that wait for a connection
_SILENCE_MS = 3000
_PROBE_SECONDS = 5.0  # for an endpoint to answer a connection
_PROBE_AGAIN_SECONDS = 0.1

Body = TypeVar("Body", bound=ReplyBody)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request and its reply, once it has arrived."""

    body: RequestBody
    number: int = 0
    resend_at: float = 0.0
    waits_for: str = ""
    reply: ReplyBody | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    @property
    def doing(self) -> str:
        """Describe it to users."""
        return self.body.doing.format(self.body)


class SchedulerClient:
    """A connection to the scheduler. A context manager that closes itself, without leaving.

    ``beat`` returns further fields of heartbeats; an error of ``figures``, which they report for displays, is logged.
    """

    def __init__(
        self,
        address: str,
        role: str,
        *,
        about: str | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_fault: Callable[[ShoalError], None] | None = None,
        grace: float | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keys: Keys | None = None,
        beat: Callable[[], dict[str, Any]] = dict,
        figures: Callable[[], Figures | None] = lambda: None,
    ) -> None:
        check(address)
        self.address = address
        self.sender = secrets.token_bytes(16)  # the name of this process in its messages
        self.fault: ShoalError | None = None  # the first fatal error
        self.stopped = False  # whether the scheduler was stopped, which ends the cluster
        self._secure = None if keys is None else keys.client_of("scheduler")
        self._role = role
        self._about = about or process_name()
        self._on_event = on_event
        self._on_fault = on_fault
        self._beat = beat
        self._figures = figures
        self._grace = grace
        self._pid = os.getpid()
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._lock = threading.Lock()  # guards _calls, _number, _outgoing, fault, _open
        self._calls: dict[int, PendingRequest] = {}
        self._number = 0
        self._outgoing: deque[Message] = deque()
        self._open = True
        self._leaves = False
        self._orders: TimedQueue[Order | Assign | CloseStreams | None] = TimedQueue()  # None: see `rouse`
        # The thread's own.
        self._welcome: HelloReply | None = None
        self._last_message = 0.0  # time of the last message; 0: none
        self._checked_at = time.monotonic()
        self._heartbeat_at = 0.0
        self._interval = 1.0  # seconds between heartbeats
        self._seen = 0
        self._generation = 0  # of the scheduler: the greatest that was received
        self._refusals = Refusals(_log)
        self._refusal = ""  # text of the last refusal by a scheduler of another version
        self._is_known = True  # to the scheduler
        self._taken = 0  # number of the last order that was delivered
        self._done: OrderReply | None = None
        self._at_end: Callable[[], None] | None = None  # of an abandoned connection
        self._leaving: PendingRequest | None = None
        self._leave_by = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="shoal-scheduler-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for any thread ---------------------------------------------------------------------------------------

    @property
    def silent(self) -> float:
        """Seconds since the last message of the scheduler."""
        return time.monotonic() - self._last_message if self._last_message else float("inf")

    def check(self) -> None:
        """Raise the fatal error if there is one."""
        if os.getpid() != self._pid:
            raise WrongProcessError(
                "this connection was made before a fork and belongs to the parent process: connect in the child, or "
                "start children with the 'spawn' method"
            )
        if self.fault is not None:
            raise copy_error(self.fault)  # with its own traceback: the original would keep every caller's frames alive
        if not self._open:
            raise _closed()

    def hello(self, timeout: float) -> HelloReply:
        """Make this process known; returns the settings of the cluster."""
        return self.call(Hello(self._role, self._about), HelloReply, timeout)

    def join(self, join: Join, timeout: float) -> JoinReply:
        """Become part of the cluster; returns when all servers, and for a worker all workers, are there."""
        deadline = time.monotonic() + timeout
        if self._welcome is None:
            self.hello(timeout)
        try:
            joined = self.call(join, JoinReply, deadline - time.monotonic())
        except DeadlineExceededError:
            self._try_to_leave()
            raise
        if self._role == "worker":
            self.try_servers(joined.map, deadline - time.monotonic())
        return joined

    def try_servers(self, map: ClusterMap, timeout: float) -> None:
        """Leave and raise NotConnectedError if an endpoint of a map does not answer a connection.

        A server that has just died is in a map until the others have taken its slots: the newest map counts.
        """
        seconds = min(_PROBE_SECONDS, max(1.0, timeout))
        until = time.monotonic() + seconds
        while (found := try_all([endpoint.address for endpoint in map.endpoints], seconds)) is not None:
            address, what = found
            server = next(endpoint.server for endpoint in map.endpoints if endpoint.address == address)
            if (left := until - time.monotonic()) <= 0:
                self._try_to_leave()
                why = ", which only its own machine reaches" if is_local(address) else ""
                raise NotConnectedError(
                    f"server {server} cannot be reached from here at {address} ({what}){why}: if it is running, start "
                    "it with --advertise HOST, the name or address of its machine that the scheduler and all workers "
                    "reach"
                )
            time.sleep(min(left, _PROBE_AGAIN_SECONDS))
            map = self.call(GetMap(), GetMapReply, seconds).map

    def _try_to_leave(self) -> None:
        with contextlib.suppress(ShoalError):
            self.call(Leave(), LeaveReply, _RESEND_SECONDS)

    def call(self, body: RequestBody, kind: type[Body], timeout: float) -> Body:
        """Send a request to the scheduler and wait for the reply, which is of this kind."""
        asked = self.ask(body)
        try:
            return self.answer(asked, kind, timeout)
        finally:
            self.forget(asked)

    def ask(self, body: RequestBody) -> PendingRequest:
        """Send a request without waiting for its reply: `answer` waits, and may be repeated until `forget`."""
        self.check()
        asked = PendingRequest(checked(body))
        with self._lock:
            if self.fault is not None:
                raise copy_error(self.fault)
            if len(self._calls) >= MAX_OPEN_REQUESTS:
                raise ShoalError(f"{MAX_OPEN_REQUESTS} requests to the scheduler are pending: wait for some first")
            self._leaves = self._leaves or isinstance(body, Leave)
            self._number += 1
            asked.number = self._number
            self._calls[asked.number] = asked
        self._wake()
        return asked

    def forget(self, asked: PendingRequest) -> None:
        """Stop waiting for a reply."""
        with self._lock:
            self._calls.pop(asked.number, None)

    def answer(self, asked: PendingRequest, kind: type[Body], timeout: float, *, begun: float | None = None) -> Body:
        """Wait for the reply to a request.

        The timeout counts from ``begun`` on, by ``time.monotonic()``; default: from now on.
        """
        left = timeout if begun is None else begun + timeout - time.monotonic()
        if not asked.answered.wait(min(max(0.0, left), threading.TIMEOUT_MAX)):
            raise self._too_late(asked, timeout)
        reply = asked.reply
        if self._leaves and not isinstance(reply, kind):  # refused, since this process is no member any more
            raise _closed()
        if reply is None:
            self.check()
            raise NotConnectedError(f"{asked.doing}: the connection to the scheduler at {self.address} was closed")
        if isinstance(reply, ErrorReply):
            raise error_of(reply)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{asked.doing}: the scheduler at {self.address} answers with {type(reply).__name__}")
        return reply

    def _too_late(self, asked: PendingRequest, timeout: float) -> ShoalError:
        scheduler = f"{asked.doing}: the scheduler at {self.address}"
        if not self._last_message:
            nobody = f"{asked.doing}: no scheduler answers at {self.address} in {timeout:g} s"
            if (unknown := unknown_host(self.address)) is not None:
                return NotConnectedError(f"{nobody}: {unknown}; check the address")
            keys = "does it require keys (curve=)?" if self._secure is None else "does it have the same keys?"
            return NotConnectedError(
                f"{nobody}: is it running with --bind on this address, does a firewall block this machine, and {keys}"
            )
        if self._welcome is not None and self.silent > self._welcome.dead_after:
            return NotConnectedError(f"{scheduler} has been silent for {self.silent:.1f} s")
        return DeadlineExceededError(
            f"{asked.doing} was not done in {timeout:g} s: "
            f"{asked.waits_for or self._refusal or 'the scheduler has not answered'} "
            f"(scheduler {self.address}, last message {self.silent:.1f} s ago)"
        )

    def fail(self, error: ShoalError) -> None:
        """Have every call raise an error from now on; without effect after another fatal error."""
        with self._lock:
            if self.fault is not None or not self._open:
                return
            self.fault = error = _closed() if self._leaves else error
            calls = list(self._calls.values())
        if self._on_fault is not None:
            self._on_fault(error)
        for call in calls:
            call.answered.set()
        self.rouse()

    def rouse(self) -> None:
        """Have `next_order` return at once, as after a fatal error; also from a signal handler."""
        self._orders.put(None)

    def next_order(self, timeout: float) -> Order | Assign | CloseStreams | None:
        """Return the next order for a server, or an assignment or streams to close: these may arrive repeatedly."""
        with contextlib.suppress(queue.Empty):
            return self._orders.get(timeout=timeout)
        return None

    def report(self, done: OrderReply | Assigned | StreamsClosed) -> None:
        """Send the result of an order, the confirmation of an assignment, or the stamps of closed streams."""
        if isinstance(done, OrderReply):
            try:
                encode(done)
            except (OverflowError, TypeError, UnicodeEncodeError) as error:
                done = OrderReply(self.sender, done.number, fault=f"the result cannot be sent: {error!a}")
        with self._lock:
            if isinstance(done, OrderReply):
                self._done = done
            self._outgoing.append(done)
        self._wake()

    def close(self) -> None:
        """Close the connection. Pending calls fail."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._wake_read.close()
            self._wake_write.close()
            if self._own_context:
                self._context.term()

    def abandon(self, at_end: Callable[[], None]) -> None:
        """Leave without waiting: for finalizers, which may run anywhere and must not lock."""
        if os.getpid() == self._pid:
            self._at_end = at_end
            self._wake()

    def wait_for_end(self, timeout: float) -> None:
        """Wait until the connection's thread has ended, at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake_write.send(b"\0")

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            poller = zmq.Poller()
            poller.register(self._wake_read, zmq.POLLIN)
            connection = Connection(self._context, poller, self.address, self._prepare, time.monotonic())
            while self._open and not self._has_left():
                now = time.monotonic()
                due = min(self._next_time(now), connection.open_at)
                ready = dict(poller.poll(max(0, int(1000 * (due - now)) + 1)))
                if self._wake_read.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                has_ended = connection.has_ended  # read first: messages from before the end are still received
                self._receive_all(connection)
                if has_ended:
                    connection.drop("", time.monotonic())
                self._on_time(connection, time.monotonic())
        except zmq.ContextTerminated:
            self.fail(NotConnectedError("the context of this connection was terminated"))
        except BaseException as error:  # a defect: fail the calls, since this thread ends
            self.fail(NotConnectedError(f"the connection to the scheduler at {self.address} failed: {error!r}"))
            raise
        finally:
            if connection is not None:
                connection.close()
            with self._lock:
                calls = list(self._calls.values())
            for call in calls:
                call.answered.set()
            if self._at_end is not None and self._open:
                self._at_end()

    def _has_left(self) -> bool:
        """Whether an abandoned connection has left, or its time for that is over."""
        if self._at_end is None:
            return False
        if self._leaving is None:
            self._leave_by = time.monotonic() + _LEAVE_SECONDS
            try:
                self._leaving = self.ask(Leave())
            except ShoalError:  # the connection has failed
                return True
        return self._leaving.answered.is_set() or time.monotonic() > self._leave_by

    def _prepare(self, opened: Socket) -> None:
        # Few messages wait for a connection, since all are sent again. With ZMQ_IMMEDIATE none would, but messages that
        # arrive just before a connection ends, such as SchedulerStopped, would be lost.
        opened.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        # A connection with damaged framing is silent for this time; it is then replaced, before this process counts as
        # dead.
        opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        if self._secure is not None:
            self._secure(opened)

    def _receive_all(self, connection: Connection) -> None:
        while connection.socket is not None:
            try:
                frames = connection.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            connection.received()
            self._receive(frames)

    def _reopen(self, connection: Connection, now: float) -> None:
        """Connect again, and send all unanswered requests at once."""
        try:
            connection.open(now)
        except zmq.ZMQError as error:
            if error.errno == zmq.ETERM:
                raise
            return  # no socket is available now: try again later
        self._heartbeat_at = now
        with self._lock:
            for call in self._calls.values():
                call.resend_at = now
            if self._done is not None:
                self._outgoing.append(self._done)

    def _next_time(self, now: float) -> float:
        with self._lock:
            times = [call.resend_at for call in self._calls.values() if not call.answered.is_set()]
            if self._outgoing:
                times.append(now)
        return min([now + self._interval, self._heartbeat_at or now + self._interval, *times])

    def _on_time(self, connection: Connection, now: float) -> None:
        if connection.open_at <= now:
            self._reopen(connection, now)
        missed = now - self._checked_at - self._interval
        if missed > 0 and self._last_message:  # this process was stopped: that time is not silence of the scheduler
            self._last_message += missed
        self._checked_at = now
        with self._lock:
            outgoing = list(self._outgoing)
            self._outgoing.clear()
            open = tuple(number for number, call in self._calls.items() if not call.answered.is_set())
            for number, call in self._calls.items():
                if call.resend_at <= now and not call.answered.is_set():
                    call.resend_at = now + _RESEND_SECONDS
                    outgoing.append(Request(self.sender, number, call.body, self._number, open))
        if self._welcome is not None and self._heartbeat_at <= now:
            self._heartbeat_at = now + self._interval
            figures = self._figures_to_show()
            outgoing.append(Heartbeat(self.sender, self._seen, **self._beat(), figures=figures))
        for message in outgoing:
            if connection.socket is not None:
                try:
                    connection.socket.send_multipart(encode(message), zmq.DONTWAIT)
                except zmq.Again:  # full, or libzmq has ended the session
                    connection.drop("no message could be sent", now)
        silent = now - self._last_message
        if self._last_message and silent > (self._grace or GRACE_SECONDS):
            text = f"the scheduler at {self.address} has been silent for {silent:.1f} s: its process, its machine or"
            self.fail(NotConnectedError(f"{text} the network has failed. Start the cluster again"))

    def _figures_to_show(self) -> Figures | None:
        """Return the figures for displays; None if there is an error in them: nothing else depends on them."""
        try:
            return checked_figures(self._figures())
        except Exception as error:
            self._refusals.add("figures", f"this {self._role} reports no figures for displays: {error!r}")
            return None

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames)
        except MalformedMessageError as fault:
            if self._welcome is None:
                self.fail(ProtocolError(f"the scheduler at {self.address}: {fault}"))
                return
            # The scheduler spoke this version before: a message was damaged, or another scheduler has replaced it.
            self._refusals.add("unread", f"the scheduler at {self.address}: {fault}")
            if isinstance(fault, PeerRefusedError):
                self._last_message = time.monotonic()
                self._refusal = str(fault)
            return
        if isinstance(message, Reply | Events | Order | Assign | CloseStreams) and self._is_outdated(message):
            return
        self._last_message = time.monotonic()
        if isinstance(message, Reply):
            self._replied(message)
        elif isinstance(message, Events):
            for event in message.events[self._seen - message.first :] if message.first <= self._seen else ():
                self._seen += 1
                self._deliver(event)
        elif isinstance(message, Order):
            if message.number == self._taken + 1:
                self._taken = message.number
                self._orders.put(message)
            elif self._done is not None and message.number == self._done.number:
                with self._lock:
                    self._outgoing.append(self._done)
        elif isinstance(message, Assign | CloseStreams):
            self._orders.put(message)

    def _is_outdated(self, message: Reply | Events | Order | Assign | CloseStreams) -> bool:
        """Whether a message comes from a scheduler that another one has replaced."""
        # A scheduler that does not know this process, or cannot read its request, states no generation; nor does one
        # that checks a connection.
        is_error = isinstance(message, Reply) and isinstance(message.body, ErrorReply)
        if message.generation == 0 and (is_error or (isinstance(message, Events) and not message.events)):
            return False
        if message.generation < self._generation:
            kind, number = type(message).__name__, message.generation
            text = f"the scheduler at {self.address} sent {kind} of generation {number}, but generation "
            self._refusals.add("outdated", f"{text}{self._generation} has replaced it: end the older one")
            return True
        if message.generation > self._generation > 0:
            text = "the scheduler at %s was started again from its journal (generation %d)"
            _log.info(text, self.address, message.generation)
        self._generation = message.generation
        return False

    def _replied(self, reply: Reply) -> None:
        body = reply.body
        if isinstance(body, ErrorReply) and body.kind in FATAL_ERRORS:
            self.fail(FATAL_ERRORS[body.kind](body.text))
        elif isinstance(body, ErrorReply) and body.kind == "not-connected" and self._is_known:
            self._is_known = False
            _log.warning(
                "the scheduler at %s was restarted and does not know this %s any more. Servers still serve, and "
                "workers pull, push and save, but no worker, table or barrier can be added: save a checkpoint, then "
                "start the whole cluster again",
                self.address,
                self._role,
            )
        with self._lock:
            call = self._calls.get(reply.number)
        if call is None:
            return
        if isinstance(body, PendingReply):
            call.waits_for = body.text
            return
        if isinstance(body, HelloReply) and self._welcome is None:
            self._welcome, self._seen, self._interval = body, body.seen, body.heartbeat
            if self._grace is None:
                self._grace = body.grace
        call.reply = body
        call.answered.set()

    def _deliver(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
        if isinstance(event, ServerGone):
            self.fail(ServerLostError(event.text))
        elif isinstance(event, SchedulerStopped):
            self.stopped = True
            self.fail(NotConnectedError(f"the scheduler at {self.address} was stopped, and the cluster with it"))


def _closed() -> ClosedError:
    return ClosedError("this connection to the cluster was closed: connect again")
