"""The scheduler and the servers, as each of their processes runs them: from settings, with reports to its supervisor.

A command runs one until a signal ends it, an actor of Ray until it is stopped, a process of mpirun or srun until the
workers have ended. ``python -m shoal role`` is what a launcher starts: it receives a `Start` from standard input, a
socket, imports what its role needs, then receives its configuration, a line of JSON too, and sends its reports there.
So a server is imported while its scheduler starts, whose address its configuration has.

Threads: functions of this module are called by one; reports are sent by the thread that runs the role.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import structs

from shoal.base.decoders import json_decoder
from shoal.base.logs import identify
from shoal.base.plural import counted
from shoal.cluster.protocol import metrics
from shoal.cluster.protocol.private import remove_private
from shoal.cluster.protocol.reports import Drained, Joined, Report, process_name
from shoal.config import SchedulerConfig, ServerConfig

if TYPE_CHECKING:
    from shoal.cluster.scheduler.scheduler import Scheduler
    from shoal.cluster.server.server import Server

_PARENT_CHECK_SECONDS = 0.2
_ORPHAN_SECONDS = 1.0  # for an orderly end after the parent has ended


Role: TypeAlias = "Scheduler | Server"
RoleConfig: TypeAlias = SchedulerConfig | ServerConfig


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher sends first to a process that it has started: what it is, and the launcher's process.

    ``directory`` is the launcher's, which is removed if the launcher has ended without doing so.
    """

    is_scheduler: bool
    parent: int
    directory: str | None = None


_START = json_decoder(Start)
_SCHEDULER = json_decoder(SchedulerConfig)
_SERVER = json_decoder(ServerConfig)


def run(
    config: RoleConfig,
    around: Callable[[Role], AbstractContextManager[None]],
    *,
    say: Callable[[str], None],
    tell: Callable[[Report], None] = lambda report: None,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Run a role until it is stopped, its cluster ends, or ``going`` returns False, in a ``with`` block of `around`.

    ``say`` takes lines for people, ``tell`` reports for the supervisor.
    """
    identify(role="scheduler" if isinstance(config, SchedulerConfig) else "server")
    with contextlib.ExitStack() as ended:
        health = None
        if config.metrics_port is not None:
            from shoal.cluster.protocol.health import HealthServer, parse_listen

            health = ended.enter_context(HealthServer(parse_listen(config.metrics_port)))
            say(f"probes are answered at {health.address}")
        joined = Joined(process=process_name(), pid=os.getpid(), probes="" if health is None else health.address)
        if isinstance(config, SchedulerConfig):
            from shoal.cluster.scheduler.scheduler import Scheduler

            scheduler = ended.enter_context(Scheduler(config))
            ended.enter_context(around(scheduler))
            scheduler.on_report = tell
            identify(cluster=scheduler.membership.state.cluster)
            say(f"scheduler at {scheduler.address}, for {counted(config.servers, 'server')}")
            joined = structs.replace(joined, address=scheduler.address)
            if health is not None:
                health.watch(scheduler.unready, "scheduler", metrics.SCHEDULER, scheduler.counters, view=scheduler.view)
            tell(joined)
            scheduler.run(going if health is None else lambda: going() and health.turn())
            return
        from shoal.cluster.server.server import Server

        server = ended.enter_context(Server(config))
        ended.enter_context(around(server))
        identify(rank=server.rank, cluster=server.cluster)
        for endpoint in server.endpoints:
            slots = ", ".join(f"slots {first} to {end - 1}" for first, end in server.slots(endpoint)) or "no slots yet"
            say(f"server {server.rank} serves {slots} at {endpoint.address}")
        joined = structs.replace(joined, address=config.scheduler, rank=server.rank, node=server.node)
        if health is not None:
            health.watch(server.unready, "server", metrics.SERVER, server.counters, server.rank)
        tell(joined)
        server.run(going if health is None else lambda: going() and health.turn())
        if server.is_drained:
            tell(Drained())


@contextlib.contextmanager
def ended_by_signals(role: Role) -> Iterator[None]:
    """Have Ctrl-C stop a role, and SIGTERM, or SIGHUP unless it is ignored, have it leave."""

    def end(number: int, frame: FrameType | None) -> None:
        (role.stop if number == signal.SIGINT else role.leave)()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_child(say: Callable[[str], None]) -> None:
    """Run the role whose settings come from standard input, and report there; it ends with its parent.

    After an orderly end it ends the process at once, and does not return: the system frees rows faster than their
    owners one by one, and nobody needs the modules to be taken apart.
    """
    kept: list[Role] = []

    @contextlib.contextmanager
    def around(role: Role) -> Iterator[None]:
        kept.append(role)
        with ended_by_signals(role):
            yield

    with socket.socket(fileno=os.dup(0)) as control, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # what the role starts does not hold the connection

        def tell(report: Report) -> None:
            with contextlib.suppress(OSError):  # the launcher has ended
                control.sendall(msgspec.json.encode(report) + b"\n")

        with control.makefile("rb") as lines:
            if not (line := lines.readline()):  # the launcher has ended
                return
            start = _START.decode(line)
            with contextlib.ExitStack() as over:
                over.enter_context(_ended_with(start.parent, start.directory))
                importlib.import_module(
                    f"shoal.cluster.{'scheduler.scheduler' if start.is_scheduler else 'server.server'}"
                )
                if line := lines.readline():
                    config = (_SCHEDULER if start.is_scheduler else _SERVER).decode(line)
                    run(config, around, say=say, tell=tell)
                    over.close()
                    os._exit(0)


@contextlib.contextmanager
def _ended_with(parent: int, directory: str | None) -> Iterator[None]:
    """From now on end this process after its parent: as by Ctrl-C, and unconditionally soon after."""

    def clean() -> None:
        if directory is not None and os.getppid() != parent:  # the parent was killed
            remove_private(directory)

    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PARENT_CHECK_SECONDS):
            if os.getppid() != parent:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if not over.wait(_ORPHAN_SECONDS):
                    clean()
                    os._exit(1)
                return

    threading.Thread(target=watch, name="shoal-parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        clean()
