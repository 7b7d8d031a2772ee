"""The process of a server: endpoints that serve rows, and the connection to the scheduler.

Each endpoint has a data loop of its own, in C++ threads that share nothing. This module creates them,
registers their addresses with the scheduler, and has the scheduler's orders and assignments executed on all of them
(server/assignment.py). No request passes through Python. Threads of Python write and read the files of saves and loads
(server/tasks.py).

A server ends when it is stopped, when all its slots and copies have been moved away, when the scheduler is stopped or
silent for too long, or when the process that started it has ended.

Threads: `run` in one; `unready` and `counters` from any; `stop` and `leave` from any, or from a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Self

import zmq

from shoal import _core
from shoal.base.sizes import memory_bytes
from shoal.cluster.protocol.address import bindable, check, check_bind, is_local, join_address, socket_path, split
from shoal.cluster.protocol.curve import Guard, Keys
from shoal.cluster.protocol.descriptors import SPENT, are_spent, raise_limit
from shoal.cluster.protocol.messages import (
    AcceptedReply,
    CloseStreams,
    Drain,
    ErrorReply,
    Figures,
    Join,
    Leave,
    LeaveReply,
    Order,
    ReportStream,
)
from shoal.cluster.protocol.metrics import Values
from shoal.cluster.protocol.private import is_private
from shoal.cluster.protocol.refusals import Refusals
from shoal.cluster.protocol.scheduler_client import PendingRequest, SchedulerClient
from shoal.cluster.protocol.slot_map import Endpoint
from shoal.cluster.server.assignment import ServerControl
from shoal.cluster.server.code import AllowedCode
from shoal.cluster.server.data_loop import start_loop
from shoal.cluster.server.tasks import TaskRunner
from shoal.config import ServerConfig
from shoal.errors import ShoalError
from shoal.storage.roots import StorageRoots
from shoal.store.description import make_budget
from shoal.table.tiered import open_space, parse_tier
from shoal.user_functions import set_resolver

_log = logging.getLogger("shoal.server")

_POLL_SECONDS = 0.2  # between two checks whether to continue
_STREAM_POLL_SECONDS = 0.05  # between two looks at the states of streams
_COPYING_POLL_SECONDS = 0.005  # the same while an arc is copied: the next copy begins after the report
_PENDING_POLL_SECONDS = 0.002  # while a reply waits for acknowledgements
_DESCRIPTOR_CHECK_SECONDS = 1.0  # between two checks whether it can still open files
_LEAVE_SECONDS = 2.0
_FIGURES_SECONDS = 1.0  # between two readings of the metrics for displays


class Server:
    """A server. A context manager that closes itself."""

    def __init__(self, config: ServerConfig) -> None:
        code = AllowedCode(config.allow_code)
        set_resolver(code.function)
        keys = None if config.curve is None else Keys.load(config.curve, "server")
        tier = None if config.tier is None else parse_tier(config.tier)
        memory = None if config.memory is None else memory_bytes(config.memory)
        slot_memory = None if config.slot_memory is None else memory_bytes(config.slot_memory)
        check(config.scheduler)
        bind = config.bind or _choose(config.scheduler)
        check_bind(bind, secured=keys is not None, insecure=config.insecure)
        sockets = [socket_path(address) for address in (bind, config.scheduler)]
        # Who may connect is admitted by a key, or runs as the same user as this process.
        is_trusted = keys is not None or all(path and is_private(os.path.dirname(path)) for path in sockets)
        anywhere = is_trusted and config.storage_roots is None
        if anywhere and config.storage_options:
            raise ValueError(
                "storage_options go with storage_roots: with keys or private sockets, and without roots, workers pass "
                "their own"
            )
        roots = None if anywhere else StorageRoots(config.storage_roots, config.storage_options)
        _core.keep_freed_memory()  # else each large request is received into new pages
        self._stopping = False
        self._drain_seconds = config.drain_on_sigterm
        self._drains = False
        self._drain_by = math.inf
        self._drain_request: PendingRequest | None = None
        self._control: ServerControl | None = None
        self._reports: list[PendingRequest] = []
        self.node = config.node or socket.gethostname()
        endpoints: list[_core.Endpoint] = []
        self._loops: list[_core.DataLoop] = []
        self._figures: Figures | None = None  # for heartbeats, which must not wait for an endpoint
        self._figures_at = -math.inf
        with contextlib.ExitStack() as undo:
            context: zmq.Context[Any] = zmq.Context()
            undo.callback(context.term)
            self._guard = None if keys is None else undo.enter_context(Guard(context, keys))
            self._scheduler = undo.enter_context(
                SchedulerClient(
                    config.scheduler,
                    "server",
                    grace=config.grace,
                    context=context,
                    keys=keys,
                    beat=self._beat,
                    figures=lambda: self._figures,
                )
            )
            welcome = self._scheduler.hello(config.timeout)
            self._silent_seconds = welcome.dead_after
            self._replicas = welcome.replicas
            self.cluster = welcome.cluster
            if slot_memory is not None:
                make_budget(slot_memory * welcome.slots, welcome.slots)
            elif memory is not None:
                make_budget(memory, welcome.slots)
            space = None if tier is None else _core.TierSpace(tier.memory_bytes)
            addresses = []
            for k in range(config.threads):
                endpoint = _core.Endpoint(welcome.slots, tier=space)
                loop = start_loop(endpoint, context, _numbered(bind, k), keys=keys, heartbeat=welcome.heartbeat)
                undo.callback(loop.stop)
                undo.callback(TaskRunner(endpoint, roots).stop)
                endpoints.append(endpoint)
                self._loops.append(loop)
                addresses.append(_advertised(bind, loop.address, config.advertise))
            wanted = Join(config.rank, tuple(addresses), node=self.node, spare=config.spare)
            joined = self._scheduler.join(wanted, config.timeout)
            code.check(table.form for table in joined.tables)
            self.rank = joined.rank
            if tier is not None and space is not None:
                open_space(space, tier, f"server-{joined.rank}")
            self.endpoints = joined.map.of_server(joined.rank)
            addressed = {one.address: endpoint for one, endpoint in zip(self.endpoints, endpoints, strict=True)}
            key = "" if keys is None else keys.public.decode("ascii")  # all servers have that of their role
            control = ServerControl(addressed, self._scheduler.sender, key, code)
            control.table_names.update({table.id: table.form.name for table in joined.tables})
            control.set_map(joined.map)
            own = sum(end - first for endpoint in self.endpoints for first, end in joined.map.run_ranges(endpoint.id))
            share = memory // max(own, 1) if memory is not None else slot_memory
            if share is not None and own:  # else slots will be moved here, with their shares
                for endpoint in endpoints:
                    endpoint.set_memory(share)
            self._control = control
            self._closing = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def slots(self, endpoint: Endpoint) -> list[tuple[int, int]]:
        """Return the slots that an endpoint serves: first and end of each run."""
        map = None if self._control is None else self._control.map
        return [] if map is None else map.run_ranges(endpoint.id)

    def unready(self) -> list[str]:
        """Return why this server does not do all that the cluster expects of it; empty if it does.

        It does if its map is the newest one that it can know of, is carried out, and all slots that it serves have
        their copies.
        """
        control = self._control
        if control is None:
            return ["it has not joined the cluster"]
        reasons = control.unready(self._replicas)
        if self._drains:
            reasons.append("it is drained")
        silent = self._scheduler.silent
        if silent > self._silent_seconds:
            reasons.append(f"the scheduler has been silent for {silent:.0f} s")
        return reasons

    def counters(self) -> Values:
        """Return the metrics of this server's endpoints together, ``shoal.cluster.protocol.metrics.SERVER``."""
        return {} if self._control is None else self._control.counters(self._loops)

    def stop(self) -> None:
        """Make :meth:`run` return."""
        self._stopping = True
        self._scheduler.rouse()

    def leave(self) -> None:
        """Do what SIGTERM asks for: end, first drained if there is a time for that; at once if this is called again."""
        if self._drain_seconds is None or self._drains:
            self.stop()
        else:
            self._drains = True
            self._scheduler.rouse()

    @property
    def is_drained(self) -> bool:
        """Whether all slots have moved to other servers."""
        return self._control is not None and self._control.is_drained

    def run(self, going: Callable[[], bool] = lambda: True) -> None:
        """Execute orders until :meth:`stop` is called, ``going`` returns False, or the scheduler ends."""
        raise_limit()
        control = self._control
        assert control is not None
        refusals = Refusals(_log)
        checked_at = time.monotonic()
        while not self._stopping and going():
            if time.monotonic() - checked_at > _DESCRIPTOR_CHECK_SECONDS:
                checked_at = time.monotonic()
                if are_spent():
                    refusals.add("descriptors", SPENT, level=logging.ERROR)
                if self._guard is not None:
                    self._guard.check()
            if time.monotonic() - self._figures_at > _FIGURES_SECONDS:
                self._figures_at = time.monotonic()
                try:
                    self._figures = control.figures(self._loops)
                except Exception as error:  # nothing but displays depends on them
                    self._figures = None
                    refusals.add("figures", f"this server reports no figures for displays: {error!r}")
            if not self._step(control):
                return
            if control.is_drained:
                _log.info("server %d has been drained: it ends", self.rank)
                break
            if self._drains and self._has_failed_to_drain(self._drain_seconds or 0.0):
                break
        with contextlib.suppress(ShoalError):
            self._scheduler.call(Leave(), LeaveReply, _LEAVE_SECONDS)

    def _step(self, control: ServerControl) -> bool:
        """Execute what the scheduler sends, and send what follows; return False once the scheduler was stopped."""
        if control.has_pending:
            pause = _PENDING_POLL_SECONDS
        elif control.is_copying:
            pause = _COPYING_POLL_SECONDS
        else:
            pause = _STREAM_POLL_SECONDS if control.has_streams else _POLL_SECONDS
        message = self._scheduler.next_order(pause)
        if isinstance(message, Order):
            control.order(message)
        elif isinstance(message, CloseStreams):
            self._scheduler.report(control.close_streams(message))
        elif message is not None:
            control.assign(message)
        elif self._scheduler.fault is not None:
            if self._scheduler.stopped:
                return False
            raise self._scheduler.fault
        self._forget_answered()
        for out in control.poll(time.monotonic()):
            if not isinstance(out, ReportStream):
                self._scheduler.report(out)
                continue
            with contextlib.suppress(ShoalError):  # a fault, which the next step raises
                self._reports.append(self._scheduler.ask(out))
        return True

    def _has_failed_to_drain(self, patience: float) -> bool:
        """Request to be drained, once; return whether the request was refused or its time is over."""
        now = time.monotonic()
        if self._drain_request is None:
            self._drain_by = now + patience
            _log.info("server %d asks to be drained: it ends in %g s at the latest", self.rank, patience)
            try:
                self._drain_request = self._scheduler.ask(Drain(self.rank))
            except ShoalError as error:
                _log.warning("server %d cannot ask to be drained: %s", self.rank, error)
                return True
        elif isinstance(self._drain_request.reply, ErrorReply):
            _log.warning("server %d ends without being drained: %s", self.rank, self._drain_request.reply.text)
            return True
        if now < self._drain_by:
            return False
        _log.warning("server %d ends before it has been drained, which took longer than %g s", self.rank, patience)
        return True

    def _forget_answered(self) -> None:
        for report in [report for report in self._reports if report.answered.is_set()]:
            if not isinstance(report.reply, AcceptedReply):
                _log.warning("the scheduler has not accepted %s: %s", report.body, report.reply)
            self._reports.remove(report)
            self._scheduler.forget(report)

    def _beat(self) -> dict[str, Any]:
        control = self._control
        return {} if control is None else {"streams": control.progress(), "arcs": control.loads()}

    def close(self) -> None:
        """End without leaving the cluster, which :meth:`run` does."""
        self._closing.close()


def _choose(scheduler: str) -> str:
    """Choose where to listen: where the scheduler does, in its directory or at any free port."""
    path = socket_path(scheduler)
    if path is not None:
        return f"ipc://{os.path.dirname(path)}/server-{secrets.token_hex(4)}"
    return join_address("127.0.0.1" if is_local(scheduler) else "0.0.0.0", 0)


def _numbered(bind: str, number: int) -> str:
    """Return the address at which the endpoint of this number listens."""
    if socket_path(bind) is not None:
        return f"{bind}-{number}"
    host, port = split(bind, wildcard=True)
    return join_address(bindable(host), port + number if port else 0)


def _advertised(bind: str, bound: str, advertise: str | None) -> str:
    """Return the address at which others reach an endpoint; an empty host: that of the scheduler's connection."""
    if socket_path(bound) is not None:
        return bound
    host = split(bind, wildcard=True)[0]
    return join_address(advertise or ("" if host in ("", "*") else host), split(bound, wildcard=True)[1])
