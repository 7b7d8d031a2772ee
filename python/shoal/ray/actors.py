"""The actors of a cluster on Ray: its scheduler and servers, and the programs of workers.

``run`` of an actor is a generator: its items, which are the reports of a role or the lines of a program, reach the
:class:`ActorProcess` of the process that started it. A role runs in its actor's process, so that Ray counts its
resources and ends it with the actor, and nothing is left when either is killed. The C++ threads of a server do not take
part in Ray's calls.

Threads: methods of an actor run in threads of Ray, ``run`` in one for as long as the actor lives. An
:class:`ActorProcess` is used by one; a thread of its own receives the items.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import ray
from msgspec import structs
from ray.exceptions import RayError

from shoal.base.logs import LOG_FORMAT, configure_logging, identify
from shoal.base.timed_queue import TimedQueue
from shoal.cluster.launch import roles
from shoal.cluster.launch.child import ChildProcess, Notify, Process
from shoal.cluster.launch.workers import Emit, guarded, no_op
from shoal.cluster.protocol.address import join_address
from shoal.cluster.protocol.reports import Joined, Report
from shoal.config import SchedulerConfig, ServerConfig
from shoal.ray.connection import Connection, key_directory
from shoal.ray.errors import unwrap
from shoal.ray.gauges import ServerGauges

METHODS = 3  # methods of an actor that run at the same time

_LINES = 1000  # of output in an item, at most
_KILL_SECONDS = 5.0  # for an actor that is killed to end

LogFormat = Literal["text", "json"] | None


class RoleActor:
    """The scheduler or a server of a cluster. ``name`` is shown in the log and in Ray's dashboard."""

    def __init__(self, name: str, log_format: LogFormat) -> None:
        self._name = name
        self._role: Any = None
        self._ends = False
        configure_logging(log_format or "text")
        identify(role=name.partition(" ")[0])

    def __repr__(self) -> str:
        return f"shoal {self._name}"

    def run(self, config: SchedulerConfig | ServerConfig, keys: Mapping[str, str] | None) -> Iterator[Report]:
        """Run the role, a server at the address of this node; yield its reports."""
        reports: TimedQueue[Report | None] = TimedQueue()
        faults: list[BaseException] = []
        threading.Thread(target=self._serve, args=(config, keys, reports, faults), daemon=True).start()
        while (report := reports.get()) is not None:
            yield report
        if faults:
            raise faults[0]

    def _serve(
        self,
        config: SchedulerConfig | ServerConfig,
        keys: Mapping[str, str] | None,
        reports: TimedQueue[Report | None],
        faults: list[BaseException],
    ) -> None:
        context = ray.get_runtime_context()
        node = context.get_node_id()
        gauges: ServerGauges | None = None

        def tell(report: Report) -> None:
            reports.put(structs.replace(report, node=node) if isinstance(report, Joined) else report)

        def going() -> bool:
            if gauges is not None:
                gauges.report(self._role.counters)
            return True

        try:
            with key_directory(keys) as directory:
                config = structs.replace(config, curve=directory, insecure=directory is None)
                if isinstance(config, ServerConfig):
                    here = ray.util.get_node_ip_address()
                    config = structs.replace(config, bind=join_address(here, 0), advertise=here, node=node)
                    gauges = ServerGauges(context.get_actor_name() or self._name)
                roles.run(config, self._kept, say=no_op, tell=tell, going=going)
        except BaseException as error:
            faults.append(error)
        finally:
            reports.put(None)

    @contextlib.contextmanager
    def _kept(self, role: roles.Role) -> Iterator[None]:
        self._role = role
        if self._ends:
            role.stop()
        yield

    def signal(self, number: int) -> None:
        """Do what the role does when its process receives a signal."""
        self._ends = True
        if self._role is not None:
            (self._role.stop if number == signal.SIGINT else self._role.leave)()


class ProgramActor:
    """Runs a program as one worker."""

    def __init__(self, rank: int, log_format: LogFormat) -> None:
        self._log_format = log_format
        self._name = f"worker {rank}"
        self._rank = rank
        self._child: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"shoal {self._name}"

    def ready(self) -> None:
        """Return as soon as the actor runs."""

    def run(
        self, command: Sequence[str], connection: Connection, workers: int, directory: str
    ) -> Iterator[list[str] | int]:
        """Run the program; yield the lines of its output, and its status last."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        lines: TimedQueue[str | None] = TimedQueue()

        def finish(child: Any, _: object) -> None:
            child.describe_end()  # reads its output to the end
            lines.put(None)

        with connection.environment(self._rank, workers) as environment:
            if self._log_format is not None:
                environment = {**environment, LOG_FORMAT: self._log_format}
            self._child = child = ChildProcess(self._name, guarded(command), environment, finish, lines.put)
            going = True
            while going:
                batch = [lines.get()]
                while len(batch) < _LINES and not lines.empty():
                    batch.append(lines.get())
                going = None not in batch
                yield [line for line in batch if line is not None]
            child.signal(signal.SIGKILL)  # and what it has started
            yield child.process.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        if self._child is not None:
            self._child.signal(signal.Signals(number))


class ActorProcess(Process):
    """An actor as its supervisor has it. ``items`` are those of its ``run``."""

    def __init__(self, name: str, actor: Any, items: Any, notify: Notify, emit: Emit | None = None) -> None:
        super().__init__(name)
        self._code: int | None = None
        self.bundle = -1  # of the placement group; -1: it is outside of it
        self._actor = actor
        self._items = items
        self._notify = notify
        self._emit = emit
        self._died = ""
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name=f"shoal-{name}", daemon=True).start()

    def _follow(self) -> None:
        code, emit = 0, self._emit or no_op
        try:
            for reference in self._items:
                item = ray.get(reference)
                if isinstance(item, int):
                    code = item
                elif isinstance(item, list):
                    self.last += item
                    for line in item:
                        emit(line)
                else:
                    self._notify(self, item)
        except RayError as error:
            code, self._died = -signal.SIGKILL, str(unwrap(error)).strip().partition("\n")[0]
        except Exception as error:
            code, self._died = -signal.SIGKILL, f"Ray cannot be reached: {error}"
        self._code = code
        self._ended.set()
        self._notify(self, None)

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self._code

    def describe(self) -> str:
        """See `Process`."""
        return self.name if self.joined is None else f"{self.name} ({self.joined.process})"

    def how_ended(self) -> str:
        """See `Process`."""
        return f"has died: {self._died}" if self._died else super().how_ended()

    def last_output(self) -> str:
        """See `Process`."""
        return "see its log in Ray's dashboard" if self._emit is None else super().last_output()

    def signal(self, number: signal.Signals) -> None:
        """See `Process`."""
        with contextlib.suppress(Exception):  # Ray has been shut down
            if number == signal.SIGKILL and self._emit is None:
                ray.kill(self._actor)
            else:
                self._actor.signal.remote(int(number))

    def wait(self, seconds: float) -> bool:
        """See `Process`."""
        return self._ended.wait(max(0.0, seconds))

    def end(self, deadline: float) -> None:
        """See `Process`. An actor that has found no place ends at once."""
        if self.joined is not None or self._emit is not None:
            self.wait(deadline - time.monotonic())
        if self._emit is not None and not self._ended.is_set():
            self.signal(signal.SIGKILL)  # the program, and what it has started
            self.wait(1.0)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        self.wait(_KILL_SECONDS)
