"""What a worker and a reader share: a connection to the scheduler, one to the servers, and how both end.

Threads: as for any store. Fork: a child's copy raises WrongProcessError; a child that needs the tables connects itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from shoal.base.logs import identify_store
from shoal.base.scalars import plain
from shoal.cluster.protocol.address import own_host
from shoal.cluster.protocol.errors import copy_error
from shoal.cluster.protocol.messages import (
    Figures,
    GetMap,
    GetMapReply,
    HelloReply,
    Leave,
    LeaveReply,
    MapChanged,
    ServerGone,
)
from shoal.cluster.protocol.metrics import WORKER, Values
from shoal.cluster.protocol.records import Event
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.protocol.status import GetStatus, StatusReply, as_dict
from shoal.cluster.worker.channel import Channel, CurveKeys, Role
from shoal.errors import ShoalError
from shoal.store.base import Store

if TYPE_CHECKING:
    from shoal.cluster.protocol.health import HealthServer
    from shoal.cluster.worker.tracing import CallTracer

_log = logging.getLogger("shoal.cluster")

_LEAVE_SECONDS = 2.0
_REPORTED = ("clock", "examples", "loss", "auc", "under_way", "resent")  # by heartbeats, for displays
_MAP_SECONDS = 2.0  # to wait for a map
_MAX_SOCKETS = 1 << 14  # three for each endpoint: its connection, and both ends of its monitor


class ConnectedStore(Store):
    """A store whose rows are on the servers of a cluster.

    ``role`` is that of :class:`.SchedulerClient`. ``on_close`` is called once, when the store is closed and has left,
    or when it could not be made. ``supervise`` is called with a function that has all further calls of the store raise
    the error that it is passed. ``tracing`` asks for traces of the calls (:mod:`shoal.cluster.worker.tracing`).
    """

    def __init__(
        self,
        address: str,
        role: str,
        *,
        timeout: float,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
        metrics_port: str | None = None,
        tracing: bool = False,
        on_close: Callable[[], None] | None = None,
        supervise: Callable[[Callable[[ShoalError], None]], None] = lambda fail: None,
    ) -> None:
        self._newest_map: ClusterMap | None = None  # of the last event
        self._channel: Channel | None = None
        with contextlib.ExitStack() as undo:  # run when the store is closed, last to first
            if on_close is not None:
                undo.callback(on_close)
            self._check_arguments()
            timeout = plain(timeout)
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
                raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
            self._timeout = float(timeout)
            self._tracer = _make_tracer() if tracing else None
            health = None if metrics_port is None else undo.enter_context(_answer_probes(metrics_port))
            self._connect(address, role, threads, curve, (lambda: True) if health is None else health.turn, undo)
            if health is not None:
                ref = weakref.ref(self)
                label = (
                    None
                    if role != "worker"
                    else f"{self.member.job_name}/{self.rank}"
                    if self.member.job_name
                    else self.rank
                )
                health.watch(lambda: _unready(ref()), role, WORKER, lambda: _counters(ref()), label)
            self._closing = undo.pop_all()
        # Neither the threads nor their callbacks hold the store: dropping it without closing it leaves the cluster too.
        self._finalizer = weakref.finalize(
            self,
            _abandon,
            self._scheduler,
            self.channel,
            self._closing,
            f"{type(self).__name__}({self._about})",
            os.getpid(),
        )
        self._finalizer.atexit = False  # see _leave_at_exit
        _open_stores.add(self)
        supervise(_weakly(self._scheduler.fail))

    def _name_table(self, number: int, name: str) -> None:
        if self._tracer is not None:
            self._tracer.table_names[number] = name

    # ---- implemented by each kind of store ---------------------------------------------------------------------------

    @abstractmethod
    def _check_arguments(self) -> None:
        """Raise the errors of the arguments that only this kind of store has."""

    @abstractmethod
    def _join(self) -> Role:
        """Become what the store is to be."""

    @property
    @abstractmethod
    def _about(self) -> str:
        """What it is connected to and as what, in messages."""

    # ---- connecting --------------------------------------------------------------------------------------------------

    def _connect(
        self,
        address: str,
        role: str,
        threads: int | None,
        curve: str | os.PathLike[str] | None,
        turn: Callable[[], bool],
        undo: contextlib.ExitStack,
    ) -> None:
        data_keys, secure_scheduler = _security(curve)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        undo.callback(_end_context, context, os.getpid())
        self._scheduler = undo.enter_context(
            SchedulerClient(
                address,
                role,
                on_event=_weakly(self._on_event),
                on_fault=_weakly(self._on_fault),
                beat=_clock_of(weakref.ref(self), turn),
                figures=_figures_of(weakref.ref(self)),
                context=context,
                **secure_scheduler,
            )
        )
        welcome: HelloReply = self._scheduler.hello(self._timeout)
        identify_store(role, cluster=welcome.cluster)
        super().__init__(threads=threads, slots=welcome.slots)
        scheduler = self._scheduler
        try:
            self._channel = Channel(
                self._join(),
                timeout=self._timeout,
                refresh=lambda: ask_map(scheduler, _MAP_SECONDS),
                curve=data_keys,
                context=context,
                tracer=self._tracer,
            )
            undo.callback(self._channel.close)
            self._follow_map()
            if self._scheduler.fault is not None:  # it came before there was a channel
                raise copy_error(self._scheduler.fault)
        except BaseException:  # Ctrl-C too: who goes without a word is waited for
            with contextlib.suppress(ShoalError):
                scheduler.call(Leave(1), LeaveReply, _LEAVE_SECONDS)
            raise

    # ---- properties --------------------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """Address of this machine on the network of the scheduler."""
        return own_host(self._scheduler.address)

    @property
    def timeout(self) -> float:
        """Seconds after which a call that is not done fails."""
        return self._timeout

    @property
    def channel(self) -> Channel:
        """The connections to the servers."""
        assert self._channel is not None
        return self._channel

    def metrics(self) -> dict[str, int]:
        """Return counts of messages and bytes of this process since it connected."""
        self._check_usable()
        return self.channel.metrics()

    def counters(self) -> Values:
        """Return the values of the metrics ``shoal.cluster.protocol.metrics.WORKER``."""
        return {
            "clock": self.clock,
            **self.channel.metrics(),
            "call_duration_seconds": self.channel.durations(),
            **self.activity.values(),
        }

    def cluster(self) -> dict[str, Any]:
        """Return the status of the cluster: its members, its job and the scheduler.

        Blocks for a round trip to the scheduler. Safe from any thread.
        """
        self._check_usable()
        return as_dict(self._scheduler.call(GetStatus(), StatusReply, self._timeout))

    def flush(self, timeout: float | None = None) -> None:
        """Wait for all calls of this process: see :meth:`shoal.Store.flush`."""
        self._check_usable()
        self.channel.drain(self._timeout if timeout is None else timeout)
        self.channel.raise_unobserved()

    # ---- closing, and events from the scheduler ----------------------------------------------------------------------

    def _end(self, *, failed: bool) -> None:
        self._finalizer.detach()
        _open_stores.discard(self)
        if not self._rwlock.is_ours:
            self._closing.pop_all()  # a forked child closes nothing of its parent's
            return
        with self._closing:
            try:
                if not failed:
                    self._drain()
            finally:
                self.channel.leave()
                with contextlib.suppress(ShoalError):
                    self._scheduler.call(Leave(int(failed or self.member.leaves_early)), LeaveReply, _LEAVE_SECONDS)
            if not failed:
                self._check_left()

    def _drain(self) -> None:
        """Wait for all calls, before the store is closed."""
        self.channel.drain(self._timeout)

    def _check_left(self) -> None:
        """Raise or log what was not done when the store was closed."""
        self.channel.raise_unobserved()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ServerGone) and self._channel is not None:
            self._channel.lose(event.rank, event.why)
        elif isinstance(event, MapChanged):
            self._newest_map = event.map  # it may come before there is a channel
            self._follow_map()

    def _follow_map(self) -> None:
        if self._newest_map is not None and self._channel is not None:
            self._channel.set_map(self._newest_map)

    def _on_fault(self, error: ShoalError) -> None:
        if self._channel is not None:
            self._channel.fail(error)


def bounded(name: str, given: int | None, least: int, most: int) -> int | None:
    """Return an argument that is an integer between two bounds, or None."""
    if given is None:
        return None
    number = plain(given)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {given!r}")
    return number


def ask_map(scheduler: SchedulerClient, timeout: float) -> ClusterMap:
    """Ask the scheduler for the map.

    A channel's background thread repeats it while it needs a map, and must not be blocked for long.
    """
    return scheduler.call(GetMap(), GetMapReply, timeout).map


_open_stores: weakref.WeakSet[ConnectedStore] = weakref.WeakSet()
_Argument = TypeVar("_Argument")


def _abandon(link: SchedulerClient, channel: Channel, closing: contextlib.ExitStack, what: str, process: int) -> None:
    """Leave the cluster for a store that was dropped without being closed."""
    if os.getpid() == process:
        channel.leave()
        link.abandon(closing.close)
        warnings.warn(f"unclosed {what}: use it in a with statement, or call close()", ResourceWarning, stacklevel=2)


@atexit.register
def _leave_at_exit() -> None:
    """Leave for all stores that are open when the interpreter ends, while threads still run."""
    stores = list(_open_stores)
    for store in stores:
        if store._finalizer.detach() is not None:  # otherwise the finalizer has run already
            if store.channel.client.has_pending or (store.consistency.is_bulk and store.channel.client.has_pushed):
                _log.warning(
                    "the program has ended before %s(%s) was closed, and pushes of it are lost: use the store in a "
                    "with statement, or call close()",
                    type(store).__name__,
                    store._about,
                )
            store.channel.leave()
            store._scheduler.abandon(store._closing.close)
    deadline = time.monotonic() + _LEAVE_SECONDS + 1
    for store in stores:
        store._scheduler.wait_for_end(max(0.0, deadline - time.monotonic()))


def _weakly(method: Callable[[_Argument], None]) -> Callable[[_Argument], None]:
    """Return a function that calls a method while its object exists."""
    ref = weakref.WeakMethod(method)

    def call(argument: _Argument) -> None:
        found = ref()
        if found is not None:
            found(argument)

    return call


def _clock_of(ref: weakref.ref[ConnectedStore], turn: Callable[[], bool]) -> Callable[[], dict[str, Any]]:
    def clock() -> dict[str, Any]:
        turn()  # this thread is the one whose heartbeats keep the process alive to the scheduler
        store = ref()
        return {} if store is None or store._channel is None else {"clock": store._channel.clock}

    return clock


def _figures_of(ref: weakref.ref[ConnectedStore]) -> Callable[[], Figures | None]:
    def figures() -> Figures | None:
        store = ref()
        if store is None or store._channel is None:
            return None
        found: Any = _counters(store)
        numbers = {name: float(found[name]) for name in _REPORTED if name in found}
        calls = found.get("call_duration_seconds", {})
        return Figures(numbers, {op: dict(one.counts) for op, one in calls.items() if op in ("pull", "push")})

    return figures


def _make_tracer() -> CallTracer:
    from shoal.cluster.worker.tracing import CallTracer  # opentelemetry is optional

    return CallTracer()


def _answer_probes(port: str) -> HealthServer:
    from shoal.cluster.protocol.health import HealthServer, parse_listen  # takes a tenth of a second

    health = HealthServer(parse_listen(port))
    _log.info("probes are answered at %s", health.address)
    return health


def _unready(store: ConnectedStore | None) -> list[str]:
    """Return why all calls of a store fail; empty if they do not."""
    fault = None if store is None else store._scheduler.fault
    return [] if fault is None else [str(fault)]


def _counters(store: ConnectedStore | None) -> Values:
    """Return the values of the metrics `WORKER`."""
    with contextlib.suppress(ShoalError):  # it is being closed
        if store is not None:
            return store.counters()
    return {}


def _end_context(context: zmq.Context[zmq.Socket[bytes]], process: int) -> None:
    if os.getpid() == process:
        context.term()


def _security(
    curve: str | os.PathLike[str] | None,
) -> tuple[CurveKeys | None, dict[str, Any]]:
    """Return the keys of data sockets, and the arguments that secure the scheduler's client."""
    if curve is None:
        return None, {}
    from shoal.cluster.protocol.curve import Keys

    keys = Keys.load(curve, "worker")
    data_keys = CurveKeys(*(key.decode() for key in (keys.public_of("server"), keys.public, keys.secret)))
    return data_keys, {"keys": keys}
