"""The sockets of a worker's data plane, and who drives them.

Idea. What is asked, sent again, answered or given up is decided in :mod:`shoal.cluster.worker.requests`, which does
no I/O; here is the I/O, and nothing else. There is one DEALER for each endpoint
(:mod:`shoal.cluster.protocol.connection`). Whoever waits for an answer takes the *turn*: it sends what is due, sleeps
in the poll until something comes, hands it to the requests, until its own call is done. So a thread that is alone
pays for no other thread. Others, meanwhile, hand in what they ask for and wake the one that has the turn, which sends
it for them; when it has its answer, the next one that waits takes the turn.

A keeper thread looks every `_LOOK` seconds whether something is under way that nobody waits for: pushes that nobody
waits for are sent and acknowledged, and what was lost is sent again, also while all threads compute.

    begin --lock--> requests.submit --outgoing--> socket             the caller's thread, or the one that has the turn
    wait  --turn--> poll, receive, on_time, send .. until done

Invariants
    C1  Sockets, requests and clock are touched under the lock; sockets by who has the turn, or while nobody has it.
    C2  A call is settled by its deadline if anybody waits for it or the keeper lives: every sleep ends at `next_time`.
    C3  What failed and nobody waited for is told once, by :meth:`Channel.raise_unheard`.
    C4  A connection that ends, or brings a damaged message, is replaced, and what its endpoint has not answered is sent
        again over the new one.
    C5  A push has the clock that is told to the servers by the tick behind it: both are taken under the lock.

Threads: any number. Fork: a child's copy raises WrongProcessError before it touches the lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from shoal import _core
from shoal.cluster.protocol.connection import Connection, Context, Socket
from shoal.cluster.protocol.libzmq import backend
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.requests import Call, Requests
from shoal.errors import ClosedError, DeadlineExceededError, ShoalError, TransportError, WrongProcessError

__all__ = ["Channel", "UnderWay", "anew"]

_LOOK = 0.02  # seconds
_TICK = 0.001  # seconds that a tick may take for the round trip of the pushes before it
_MOST_HELD = 256 << 20  # bytes of requests under way before whoever asks for more waits
_MOST_CALLS = 1024
_FOR_EVER = 1e6  # seconds: the longest time to sleep
_LONGEST_REPLY = 1 << 30  # bytes
_TOLD = frozenset({_core.Op.PUSH, _core.Op.TICK})  # the calls that nobody may wait for


class UnderWay:
    """A call under way: :class:`shoal.table.future.Pending`."""

    __slots__ = ("call", "channel")

    def __init__(self, channel: Channel, call: Call) -> None:
        self.channel = channel
        self.call = call

    @property
    def done(self) -> bool:
        """Whether it is settled."""
        return self.call.done

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is settled, or raise what went wrong.

        Raises
        ------
        DeadlineExceededError
            It is not settled after ``timeout`` seconds and goes on; or it was given up at its own deadline.
        """
        self.channel.wait(self.call, timeout)

    def result(self) -> Any:
        """Wait, and return what came of it."""
        self.wait()
        return self.call.result


class Channel:
    """The data plane of one worker. A context manager that closes itself.

    Parameters
    ----------
    requests : Requests
        The channel's own from now on.
    clock : int
        Where the worker begins.
    timeout : float
        Seconds in which every call is settled.
    refresh : callable, optional
        Asks the scheduler for its map. Called in the keeper's thread when a server refused slots.
    secure : callable, optional
        Told each socket before it connects: sets its keys.
    context : zmq.Context, optional
        Default: one of its own, ended by :meth:`close`.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        clock: int = 0,
        timeout: float = 60.0,
        refresh: Callable[[], ClusterMap] | None = None,
        secure: Callable[[Socket], None] | None = None,
        context: Context | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._requests = requests
        self._clock = clock
        self._timeout = timeout
        self._refresh = refresh
        self._secure = secure
        self._own_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)  # a call was settled, or the turn given back
        self._turn_taken = False
        self._waiting = 0  # threads that want the turn
        self._begun = 0  # calls
        self._under_way: dict[int, None] = {}  # the numbers of those that are not settled, ascending
        self._held = 0  # bytes that they hold
        self._pushed: set[int] = set()  # tables, in this clock
        self._unheard: dict[Call, ShoalError] = {}  # of calls that nobody waited for
        self._is_open = True
        self._courier = _core.Courier(backend())
        self._connections: dict[str, Connection] = {}  # by address
        self._by_socket: dict[Any, Connection] = {}  # by socket and by monitor
        self._poller = zmq.Poller()
        self._bytes_sent = 0
        self._bytes_received = 0
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._look = threading.Event()
        self._keeper = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._look), name="shoal-channel", daemon=True
        )
        self._keeper.start()

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """How many ticks there were."""
        return self._clock

    @property
    def has_pushed(self) -> bool:
        """Whether there were pushes in this clock."""
        return bool(self._pushed)

    @property
    def timeout(self) -> float:
        """Seconds in which every call is settled."""
        return self._timeout

    def check(self) -> None:
        """Raise if this is no channel to ask.

        Raises
        ------
        WrongProcessError
            It was made before a fork, by the parent.
        ClosedError
            It was closed.
        """
        if os.getpid() != self._pid:
            raise WrongProcessError(
                "this store was connected before a fork and belongs to the parent process: connect in the child, or "
                "start children with the 'spawn' method"
            )
        if not self._is_open:
            raise ClosedError("this store was closed: connect again")

    def begin(self, op: int, table: int, **what: Any) -> UnderWay:
        """Start a call at the present clock and return.

        Returns at once, unless so much is under way that there is no room for more.

        Parameters
        ----------
        op, table : int
        what
            As :meth:`Requests.submit` takes it. Its arrays are not changed until the call is settled.
        """
        self.check()
        size = sum(memoryview(part).nbytes for part in (what.get("hashes"), what.get("values")) if part is not None)
        size += sum(memoryview(part).nbytes for part in what.get("payload", ()))

        def submit(requests: Requests, now: float, on_done: Callable[[Call], None]) -> Call:
            if op == _core.Op.PUSH:
                self._pushed.add(table)
            return requests.submit(op, table, self._clock, now, now + self._timeout, on_done=on_done, **what)

        return self._begin(submit, size)

    def tick(self) -> UnderWay:
        """End the clock, and return, at the latest in a millisecond."""
        self.check()

        def submit(requests: Requests, now: float, on_done: Callable[[Call], None]) -> Call:
            call = requests.tick(self._clock, sorted(self._pushed), now, now + self._timeout, on_done=on_done)
            self._clock += 1
            self._pushed.clear()
            return call

        tick = self._begin(submit, 0)
        with self._lock:  # all others wait for this tick: it shall not lie here until somebody polls
            self._drive(
                lambda: self._turn_taken or not self._requests.waits_for_pushes(tick.call), time.monotonic() + _TICK
            )
        return tick

    def _begin(self, submit: Callable[[Requests, float, Callable[[Call], None]], Call], size: int) -> UnderWay:
        with self._lock:
            self.check()
            self._drive(lambda: self._held <= _MOST_HELD and len(self._under_way) <= _MOST_CALLS, None)
            self._begun += 1
            number = self._begun
            self._under_way[number] = None
            self._held += size

            def settled(call: Call) -> None:
                del self._under_way[number]
                self._held -= size
                if call.error is not None and call.op in _TOLD:
                    self._unheard[call] = call.error
                if self._waiting:
                    self._moved.notify_all()

            try:
                call = submit(self._requests, time.monotonic(), settled)
            except BaseException:
                del self._under_way[number]
                self._held -= size
                raise
            self._hurry()
        return UnderWay(self, call)

    def _hurry(self) -> None:
        """Have sent what is due: by whoever has the turn, else here."""
        if self._turn_taken:
            self._wake()
        else:
            self._send()

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Return when a call is settled, or raise its error; after ``timeout`` seconds, DeadlineExceededError."""
        if not call.done:
            self.check()
            deadline = _deadline(timeout)
            with self._lock:
                if not self._drive(lambda: call.done, deadline):
                    raise DeadlineExceededError(
                        f"the {call.name} is not done after {timeout:g} s; it goes on: wait again, or longer"
                    )
        if call.error is not None:
            self._unheard.pop(call, None)
            raise anew(call.error)

    def drain(self, timeout: float | None = None) -> None:
        """Return when all that was asked for before is settled, well or not.

        Raises
        ------
        DeadlineExceededError
            It is not after ``timeout`` seconds.
        """
        self.check()
        deadline = _deadline(timeout)
        with self._lock:
            last = self._begun
            if not self._drive(lambda: next(iter(self._under_way), last + 1) > last, deadline):
                count = sum(number <= last for number in self._under_way)
                raise DeadlineExceededError(f"{count} calls are not done after {timeout:g} s; they go on")

    def raise_unheard(self) -> None:
        """Raise the error of a push or tick that failed and that nobody waited for; once."""
        if self._unheard:
            with self._lock:
                errors = list(self._unheard.values())
                self._unheard.clear()
            if errors:
                more = f" (and {len(errors) - 1} calls more)" if len(errors) > 1 else ""
                raise type(errors[0])(f"{errors[0]}{more}") from errors[0]

    @property
    def repetitions(self) -> int:
        """How often anything was sent again, or elsewhere."""
        counts = self._requests.counts
        return counts["resent"] + counts["refused"]

    def metrics(self) -> dict[str, int]:
        """Count messages and bytes since it was opened."""
        self.check()
        with self._lock:
            return {
                **self._requests.counts,
                "bytes_sent": self._bytes_sent,
                "bytes_received": self._bytes_received,
                "under_way": len(self._under_way),
                "bytes_held": self._held,
            }

    # ---- what others tell it -----------------------------------------------------------------------------------------

    def lose(self, server: int, reason: str) -> None:
        """Take a server for lost: what waits for it fails."""
        self._told(lambda requests, now: requests.lose(server, reason, now))

    def fail(self, error: ShoalError) -> None:
        """Give up: all that is asked, now and later, fails with this error."""
        self._told(lambda requests, now: requests.close(error, now))

    def set_map(self, map: ClusterMap) -> None:
        """Go on with another map."""
        self._told(lambda requests, now: requests.set_map(map, now))

    def _told(self, what: Callable[[Requests, float], None]) -> None:
        with self._lock:
            if self._is_open:
                what(self._requests, time.monotonic())
                self._hurry()
                self._moved.notify_all()

    def close(self) -> None:
        """Close the sockets. Calls under way fail."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._requests.close(ClosedError("this store was closed: connect again"), time.monotonic())
            while self._turn_taken:
                self._wake()
                self._waiting += 1
                self._moved.wait(0.1)
                self._waiting -= 1
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            self._wake_read.close()
            self._wake_write.close()
        self._look.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()
        if self._own_context:
            self._context.term()

    def __del__(self) -> None:
        if hasattr(self, "_keeper") and not sys.is_finalizing():
            self.close()

    # ---- the turn: all with the lock held ----------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool], deadline: float | None) -> bool:
        """Take the turn, or wait for it, ``until`` is so; False: the deadline came first."""
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._turn_taken:
                self._waiting += 1
                try:
                    self._moved.wait(left)
                finally:
                    self._waiting -= 1
                continue
            if not self._is_open:
                raise ClosedError("this store was closed: connect again")
            self._turn_taken = True
            try:
                self._turn(left)
            finally:
                self._turn_taken = False
                if self._waiting:
                    self._moved.notify_all()
        return True

    def _turn(self, seconds: float | None) -> None:
        """Send what is due, and sleep until something comes, at most so long; take what came."""
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
            _take(self._lock)
        if self._is_open:
            self._take_in(ready)

    def _take_in(self, ready: list[tuple[Any, int]]) -> None:
        for what, _ in ready:
            connection = self._by_socket.get(what)
            if connection is not None:
                self._receive(connection)
                if what is connection.monitor and connection.has_ended:
                    self._receive(connection)  # what came before the end
                    self._drop(connection, "")
            else:
                with contextlib.suppress(BlockingIOError):
                    while self._wake_read.recv(4096):
                        pass
        self._requests.on_time(time.monotonic())
        self._send()
        if self._requests.wants_map:
            self._look.set()

    def _receive(self, source: Connection) -> None:
        while source.socket is not None:
            try:
                arrived = self._courier.receive(source.socket.underlying)
            except TransportError as error:
                self._drop(source, str(error))
                return
            if arrived is None:
                return
            self._bytes_received += arrived.nbytes
            if not self._requests.receive(source.address, arrived, time.monotonic()):
                self._drop(source, "what arrived was damaged")
                return
            source.received()

    def _send(self) -> None:
        self._reopen()
        outgoing = self._requests.outgoing
        while outgoing:
            address, frames = outgoing.popleft()
            target = self._connections.get(address) or self._connect(address)
            if target.socket is None:
                continue  # sent again when it is open
            try:
                # No limit of messages is set: what may be under way is bounded by the requests' credit.
                self._bytes_sent += self._courier.send(target.socket.underlying, frames)
            except TransportError as error:
                self._drop(target, str(error))

    def _connect(self, address: str) -> Connection:
        for gone in self._connections.keys() - {endpoint.address for endpoint in self._requests.map.endpoints}:
            self._drop(self._connections[gone], "")
            del self._connections[gone]
        made = Connection(self._context, self._poller, address, self._prepare, time.monotonic())
        self._connections[address] = made
        self._by_socket |= {made.socket: made, made.monitor: made}
        return made

    def _prepare(self, opened: Socket) -> None:
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REPLY)
        if self._secure is not None:
            self._secure(opened)

    def _drop(self, connection: Connection, reason: str) -> None:
        for what in (connection.socket, connection.monitor):
            self._by_socket.pop(what, None)
        connection.drop(reason, time.monotonic())

    def _reopen(self) -> None:
        """Open what was dropped, where it is time to."""
        for connection in self._connections.values():
            now = time.monotonic()
            if connection.open_at <= now:
                try:
                    connection.open(now)
                except zmq.ZMQError as error:
                    if error.errno == zmq.ETERM:
                        raise
                    continue  # no room for a socket now: another time
                self._by_socket |= {connection.socket: connection, connection.monitor: connection}
                self._requests.reconnected(connection.address, connection.reason, now)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            self._wake_write.send(b"\0")

    # ---- the keeper's ------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Move what nobody waits for, and fetch a map if one is wanted; False when the channel is closed."""
        with self._lock:
            if not self._is_open:
                return False
            if self._under_way and not self._turn_taken:
                self._take_in(self._poller.poll(0))
            wants_map = self._requests.wants_map
        if wants_map and self._refresh is not None:
            with contextlib.suppress(ShoalError):  # it is wanted still, and asked for again
                self.set_map(self._refresh())
        return True


def _keep(ref: weakref.ref[Channel], look: threading.Event) -> None:
    while True:
        look.wait(_LOOK)
        look.clear()
        channel = ref()
        if channel is None:
            return
        try:
            if not channel.look():
                return
        except BaseException as error:  # a defect: let nobody wait for a thread that is gone
            channel.fail(TransportError(f"the connections to the servers failed: {error!r}"))
            raise
        del channel


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout:
        raise ValueError(f"timeout must be a number of seconds, got {timeout!r}")
    return time.monotonic() + min(timeout, _FOR_EVER)


def _take(lock: threading.Lock) -> None:
    """Acquire a lock whatever interrupts it, and then be interrupted."""
    interrupted: BaseException | None = None
    while True:
        try:
            lock.acquire()
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def anew(error: ShoalError) -> ShoalError:
    """Make an error like this one: an exception that is raised twice would collect both tracebacks."""
    return type(error)(*error.args)
