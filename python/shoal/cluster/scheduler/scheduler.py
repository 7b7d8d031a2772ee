"""The scheduler's process: a socket around :class:`shoal.cluster.scheduler.membership.Membership`.

One thread receives messages, passes them to the membership and sends the replies. Addresses of servers are probed in
other threads, since a probe blocks. A message that cannot be sent at once is dropped: the peer repeats its request. The
membership is also informed of connections that have ended (scheduler/connections.py), and, in a cluster with replicas,
of servers that are silent (scheduler/silence.py).

With a journal, the inputs of the messages that wait are stored together, and only then the replies are sent. A
scheduler that is started again with the same journal continues where it was. If the journal cannot be written, the
process ends without another message; so it does if it is asked to leave the cluster running.

No message ends the process: one that is not a control message is counted and dropped, and so is one whose processing
raises an unexpected exception. The log has a line for the first of each kind, then at most one every ten seconds.

Threads: `run` in one; `unready`, `counters` and `view` from any; `stop` and `leave` from any, or from a signal handler.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import zmq

from shoal.cluster.protocol.address import (
    all_refuse,
    answers,
    bindable,
    check_bind,
    join_address,
    socket_path,
    split,
    try_all,
)
from shoal.cluster.protocol.curve import Guard, Keys
from shoal.cluster.protocol.descriptors import SPENT, are_spent, raise_limit
from shoal.cluster.protocol.messages import (
    ErrorReply,
    MalformedMessageError,
    Message,
    Reply,
    Request,
    decode,
    encode,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.protocol.reports import NamedJobs, Report
from shoal.cluster.scheduler.connections import ConnectionMonitor
from shoal.cluster.scheduler.inputs import Input
from shoal.cluster.scheduler.journal import Journal
from shoal.cluster.scheduler.membership import Membership
from shoal.cluster.scheduler.peers import AddressProbe, LivenessProbe, Outgoing
from shoal.cluster.scheduler.recovery import recover
from shoal.cluster.scheduler.silence import Pinger
from shoal.cluster.scheduler.state import new_state
from shoal.config import SchedulerConfig

_log = logging.getLogger("shoal.scheduler")

_PROBE_SECONDS = 5.0  # for an endpoint to answer a connection
_LIVENESS_SECONDS = 1.0  # for a server's machine to accept or refuse a connection
_MAX_BATCH = 1000  # messages between two checks of the time
_MAX_FRAME_BYTES = 1 << 24  # a peer that sends a longer frame is disconnected
_MAX_FRAMES = 4  # of a message, including the route
_DESCRIPTOR_CHECK_SECONDS = 1.0  # between two checks whether files can still be opened
_METRICS_SECONDS = 1.0  # between two computations of metrics
_HANDSHAKE_MS = 10000  # for a connection to complete its handshake
_BIND_REMEDIES = {
    errno.EADDRINUSE: "; another program listens there, choose another address",
    errno.EACCES: "; this user may not listen there, choose a port from 1024 on, or another directory",
    errno.EADDRNOTAVAIL: "; this machine does not have that address, choose one of its own, or *",
}


class Scheduler:
    """The scheduler. A context manager that closes itself.

    Examples
    --------
    >>> with Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=2)) as scheduler:
    ...     scheduler.address.startswith("tcp://127.0.0.1:")
    True
    """

    def __init__(self, config: SchedulerConfig) -> None:
        keys = None if config.curve is None else Keys.load(config.curve, "scheduler")
        check_bind(config.bind, secured=keys is not None, insecure=config.insecure)
        self._refusals = Refusals(_log)
        self._guard: Guard | None = None
        self._journal: Journal | None = None
        new = new_state(config, os.urandom(16))
        self.on_report: Callable[[Report], None] = lambda report: None  # called by the thread of `run`
        self._told_jobs: tuple[str, ...] | None = None
        self._outgoing: list[tuple[bytes, list[bytes]]] = []  # that wait for a commit
        self._stopping = False
        self._reasons: tuple[str, ...] = ("it has not begun to serve",)  # for `unready`
        self._metrics: Values = {}
        self._view: dict[str, Any] = {}
        self._measured_at = -math.inf
        self._leaving = False  # the cluster continues, with the next scheduler of the journal
        self._found: deque[Callable[[float], Outgoing]] = deque()  # results of probes, for the membership
        make = partial(Membership, counts=self.refused, record=self._record)
        with contextlib.ExitStack() as undo:  # run by `close`, last to first
            if config.journal is not None:
                self._journal = undo.enter_context(Journal(config.journal))
                self._membership = recover(self._journal, new, make)
            else:
                self._membership = make(new)
            # The time of the membership continues from its last input: it stands still while there is no scheduler.
            self._time_before = self._membership.state.now - time.monotonic()
            self._wake_read, self._wake_write = (undo.enter_context(one) for one in socket.socketpair())
            self._wake_read.setblocking(False)
            self._wake_write.setblocking(False)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.term)
            if keys is not None:
                self._guard = undo.enter_context(Guard(self._context, keys))
            self._poller = zmq.Poller()
            secure = _no_keys if keys is None else keys.client_of("server")
            self._pinger = undo.enter_context(
                contextlib.closing(Pinger(self._context, self._poller, secure)),
            )
            self._router = undo.enter_context(contextlib.closing(self._context.socket(zmq.ROUTER)))
            self._monitor = undo.enter_context(contextlib.closing(ConnectionMonitor(self._context, self._router)))
            self.address = self._bind(config, keys)
            self._is_here = socket_path(self.address) is not None
            self._probers = ThreadPoolExecutor(4, thread_name_prefix="shoal-probe")
            undo.callback(self._probers.shutdown, wait=False, cancel_futures=True)
            if self._journal is not None:
                self._send(self._membership.restarted(self.address, self._now()))
                self._flush()
            self._closing = undo.pop_all()

    def _bind(self, config: SchedulerConfig, keys: Keys | None) -> str:
        """Set the options of the socket and listen; returns the address."""
        is_path = socket_path(config.bind) is not None
        host, port = ("", 0) if is_path else split(config.bind, wildcard=True)
        if not is_path and not port and self._membership.state.address:  # any port, but the one that the peers know
            port = split(self._membership.state.address)[1]
        address = config.bind if is_path else join_address(bindable(host), port)
        router = self._router
        if keys is not None:
            keys.secure_server(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # No limit: if libzmq 4.3.5 has stopped reading from a peer that then resets its connection, the next
        # heartbeat of either side ends the process.
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        router.setsockopt(zmq.IPV6, int("[" in address))
        router.setsockopt(zmq.BACKLOG, 1024)  # a thousand workers may connect at the same time
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # A silent connection is replaced before its peer counts as dead: its framing may be damaged.
        interval_ms = int(1000 * min(max(2.0, config.heartbeat), 1e6))
        router.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, interval_ms * 3 // 2)
        try:
            if is_path and answers(address, _LIVENESS_SECONDS):  # libzmq would take its place
                raise zmq.ZMQError(errno.EADDRINUSE)
            router.bind(address)
        except zmq.ZMQError as error:
            remedy = _BIND_REMEDIES.get(error.errno or 0, "")
            raise OSError(
                error.errno, f"cannot listen at {config.bind}: {os.strerror(error.errno or 0)}{remedy}"
            ) from None
        if is_path:
            return config.bind
        bound_host, bound_port = split(router.getsockopt_string(zmq.LAST_ENDPOINT), wildcard=True)
        return join_address(host if host not in ("", "*") else bound_host, bound_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def membership(self) -> Membership:
        """The state of the cluster; only for the thread of :meth:`run`."""
        return self._membership

    def refused(self) -> dict[str, int]:
        """Return the number of refused messages and connections, by reason."""
        keys = {} if self._guard is None or not self._guard.refused else {"key": self._guard.refused}
        return {**self._refusals.counts(), **keys}

    def _now(self) -> float:
        """Return the time of the membership."""
        return self._time_before + time.monotonic()

    def _record(self, entry: Input) -> None:
        if self._journal is not None:
            self._journal.append(entry)

    def unready(self) -> tuple[str, ...]:
        """Return why the cluster cannot be used: servers are missing, or rows are lost; empty if it can."""
        return self._reasons

    def counters(self) -> Values:
        """Return the values of the metrics ``shoal.cluster.protocol.metrics.SCHEDULER``, some up to a second old."""
        map = self._membership.map
        return {
            **self._metrics,
            "epoch": 0 if map is None else map.epoch,
            "servers": 0 if map is None else len({endpoint.server for endpoint in map.endpoints}),
            "workers": self._membership.num_workers,
            "refused": sum(self.refused().values()),
        }

    def view(self) -> dict[str, Any]:
        """Return what the page of the metrics port displays; empty before :meth:`run`."""
        return self._view

    def stop(self) -> None:
        """Make :meth:`run` end the cluster and return."""
        self._stopping = True
        self._wake()

    def leave(self) -> None:
        """Make :meth:`run` return; with a journal the cluster continues, and waits for another scheduler."""
        if not self._stopping:
            self._leaving = self._journal is not None
        self.stop()

    def run(self, going: Callable[[], bool] = lambda: True) -> None:
        """Serve until the cluster ends: by :meth:`stop`, by a request, or because ``going`` returns False.

        All peers are notified then; not after :meth:`leave`.

        After an error the scheduler is closed, and no peer is notified: another scheduler may take its address and
        continue its journal.
        """
        try:
            self._run(going)
        except BaseException:
            self.close()
            raise

    def _run(self, going: Callable[[], bool]) -> None:
        raise_limit()
        checked = due = time.monotonic()
        poller = self._poller
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        while not self._stopping and not self._membership.state.ended and going():
            ready = dict(poller.poll(self._pause_ms()))
            if self._wake_read.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            while self._found:
                found = self._found.popleft()
                with self._guarded("the addresses of a server"):
                    self._send(found(self._now()))
            # Waiting messages may be heartbeats, so they are processed first; but many of them must not delay timeouts.
            is_idle = self._receive()
            for route in self._monitor.ended(time.monotonic()):  # after its last messages
                with self._guarded("the end of a connection"):
                    self._send(self._membership.disconnected(route, self._now()))
            for rank, why, seconds in self._silent_servers(time.monotonic()):
                with self._guarded("a silent server"):
                    self._send(self._membership.suspect(rank, why, seconds, self._now()))
            if is_idle or time.monotonic() - due > self._membership.settings.heartbeat:
                due = time.monotonic()
                with self._guarded("what is due"):
                    self._send(self._membership.on_time(self._now()))
            jobs = tuple(self._membership.named_jobs)
            if jobs != self._told_jobs:  # before a worker is told that its job has begun or ended
                self._told_jobs = jobs
                self.on_report(NamedJobs(jobs))
            self._flush()
            if time.monotonic() - checked > _DESCRIPTOR_CHECK_SECONDS:
                checked = time.monotonic()
                if are_spent():
                    self._refusals.add("descriptors", SPENT, level=logging.ERROR)
                if self._guard is not None:
                    self._guard.check()
            while self._membership.refused:
                self._refusals.add(*self._membership.refused.popleft())
            while self._membership.notes:
                _log.info("%s", self._membership.notes.popleft())
            while self._membership.deaths:
                self.on_report(self._membership.deaths.popleft())
            self._reasons = tuple(filter(None, (self._membership.broken, self._membership.missing_servers)))
            if time.monotonic() - self._measured_at > _METRICS_SECONDS:
                self._measured_at = time.monotonic()
                with self._guarded("metrics"):
                    self._metrics = self._membership.metrics()
                    self._view = self._membership.view()
            while self._membership.probes:
                self._probers.submit(self._probe, self._membership.probes.popleft())
        if self._leaving and not self._membership.state.ended:
            _log.info(
                "the scheduler ends, and its cluster continues: start it again with its journal within %g s",
                self._membership.settings.grace,
            )
        else:
            self._send(self._membership.stop(self._now()))
        self._flush()
        if self.refused():
            _log.info("refused in all: %s", ", ".join(f"{count} {why}" for why, count in self.refused().items()))

    def _pause_ms(self) -> int:
        pauses = [self._membership.next_time - self._now()]
        if self._monitor.next_time is not None:
            pauses.append(self._monitor.next_time - time.monotonic())
        pauses.append(self._pinger.next_time - time.monotonic())
        return max(1, math.ceil(1000 * min(pauses)))

    def _silent_servers(self, now: float) -> list[tuple[int, str, float]]:
        """Ping the servers; return the ranks of those that are silent, why, and for how many seconds."""
        map = self._membership.map
        if self._membership.settings.replicas and map is not None and not self._membership.broken:
            self._pinger.watch({endpoint.address: endpoint.server for endpoint in map.endpoints}, now)
        else:
            self._pinger.watch({}, now)
        return self._pinger.turn(now)

    def _receive(self) -> bool:
        """Process up to `_MAX_BATCH` waiting messages; return whether none is left."""
        for _ in range(_MAX_BATCH):
            try:
                frames = self._next_message()
            except zmq.Again:
                return True
            with self._guarded("a message"):
                self._take(frames)
        return False

    def _next_message(self) -> list[zmq.Frame]:
        """Receive a message; one with too many frames is shortened to the first ones and the last."""
        frames = [self._router.recv(zmq.DONTWAIT, copy=False)]
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv(zmq.DONTWAIT, copy=False)  # libzmq delivers whole messages: the frame is there
            if len(frames) > _MAX_FRAMES:
                frames.pop()
            frames.append(frame)
        return frames

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Log an unexpected exception and continue: one message must not end the cluster."""
        try:
            yield
        except Exception as error:
            text = f"{what} caused an internal error and is dropped: {type(error).__name__}: {error}"
            self._refusals.add("failed", text, level=logging.ERROR, trace=True)

    def _take(self, frames: list[zmq.Frame]) -> None:
        route, host = frames[0].bytes, _host_of(frames[-1], is_here=self._is_here)
        self._monitor.observe(route, frames[-1])
        try:
            message = _read(frames, host)
        except MalformedMessageError as fault:
            # Whether there is a reply depends on the first frame: it identifies peers that run shoal.
            self._refusals.add("invalid" if fault.reply is not None else "garbage", f"{host or 'a peer'}: {fault}")
            if fault.reply is not None:
                self._outgoing.append((route, fault.reply))
            return
        try:
            outgoing = self._membership.handle(route, host, message, self._now())
        except Exception as error:
            if isinstance(message, Request):
                what = ErrorReply("protocol", f"the request caused an internal error: {type(error).__name__}")
                self._send([(route, Reply(message.number, what, self._membership.state.generation))])
            raise
        self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        self._outgoing += [(route, encode(message)) for route, message in outgoing]

    def _flush(self) -> None:
        """Store the inputs that the waiting messages depend on, then send these."""
        if self._journal is not None:
            self._journal.commit()
        outgoing, self._outgoing = self._outgoing, []
        for route, frames in outgoing:
            self._send_frames(route, frames)
        if self._journal is not None and self._journal.has_grown and self._membership.at_rest:
            self._journal.begin(self._membership.save())

    def _send_frames(self, route: bytes, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart([route, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _probe(self, probe: AddressProbe | LivenessProbe) -> None:
        if isinstance(probe, LivenessProbe):
            refused = False
            with contextlib.suppress(Exception):  # it could not be found out
                refused = all_refuse(probe.addresses, _LIVENESS_SECONDS)
            self._found.append(lambda now: self._membership.liveness(probe, refused, now))
        else:
            try:
                fault = try_all(probe.addresses, _PROBE_SECONDS)
            except Exception as error:
                fault = (probe.addresses[0], f"{type(error).__name__}: {error}")
            self._found.append(lambda now: self._membership.probed(probe, fault, now))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def close(self) -> None:
        """Close the socket, which releases the address, and the journal."""
        self._closing.close()


def _no_keys(socket: zmq.Socket[bytes]) -> None:
    """Set no keys: the cluster has none."""


def _host_of(frame: zmq.Frame, *, is_here: bool) -> str:
    """Return the host that a message comes from; empty if its peer speaks a protocol before ZMTP 3.0."""
    try:
        return "127.0.0.1" if is_here and frame.get("Socket-Type") else str(frame.get("Peer-Address"))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


def _read(frames: list[zmq.Frame], host: str) -> Message:
    if not host:
        raise MalformedMessageError(
            "it speaks the protocol of ZeroMQ 2 or another one: is it a browser, or a scan of ports?"
        )
    if len(frames) > _MAX_FRAMES:
        raise MalformedMessageError(f"a message of {_MAX_FRAMES} frames or more is not a control message")
    return decode([frame.bytes for frame in frames[1:]])
