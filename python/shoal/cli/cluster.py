"""``shoal scheduler``, ``shoal server``, ``shoal launch``: the processes of a cluster, one by one or all together.

Scheduler and server run until SIGTERM, Ctrl-C or the end of the cluster, and then exit with status 0. Ctrl-C ends a
scheduler together with its cluster, and a server at once. SIGTERM, which service managers send before they start a
process again elsewhere, ends a scheduler with a journal alone, and a server with ``--drain-on-sigterm`` after its slots
have moved away.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from shoal.base.logs import LOG_FORMAT
from shoal.base.settings import Config, Setting, from_environment
from shoal.base.sizes import memory_bytes
from shoal.cli.answers import DONE, FAILED, WRONG_INPUT, Answer, WorkerOutput, log_line, warn
from shoal.cli.options import Command
from shoal.config import (
    Address,
    AllowCode,
    Bind,
    ClusterConfig,
    CopyRate,
    Count,
    Curve,
    Dir,
    Heartbeat,
    Insecure,
    LogFormat,
    MetricsPort,
    Number,
    Replicas,
    SchedulerAddress,
    SchedulerConfig,
    Seconds,
    ServerConfig,
    Servers,
    ServerSettings,
    Size,
    StorageOptions,
    StorageRoots,
    Tier,
    Workers,
)

C = TypeVar("C", bound=Config)
Quiet = Annotated[bool, "do not log events"]

_REPLACEMENT_SECONDS = 60.0  # for a worker that starts again to join

SCHEDULER_EXAMPLES = """\
examples:
  $ shoal scheduler --bind tcp://10.0.0.1:5570 --servers 4 --workers 16 --curve keys
  $ shoal scheduler --bind tcp://127.0.0.1:* --servers 1        # any free port, which is printed
  $ shoal scheduler --bind tcp://10.0.0.1:5570 --servers 4 --journal /var/lib/shoal/ctr    # may be killed and restarted
  $ shoal scheduler --bind tcp://10.0.0.1:5570 --servers 4 --replicas 1 --journal ctr      # and so may any server

The scheduler prints its address and then the events of the cluster. Ctrl-C, and `shoal cluster ADDRESS stop`, end the
cluster: the servers end too. SIGTERM does the same without --journal; with it, SIGTERM ends this process alone, and the
cluster continues with the next scheduler that is started with the journal.
"""

SERVER_EXAMPLES = """\
examples:
  $ shoal server --scheduler tcp://10.0.0.1:5570 --threads 8 --curve keys
  $ shoal server --scheduler tcp://10.0.0.1:5570 --bind tcp://0.0.0.0:5580 --advertise node7.example --curve keys

A server listens on one port per thread. The scheduler connects to each port before it accepts the server. Ctrl-C and
SIGTERM end it; with --drain-on-sigterm its slots move to the other servers first.
"""

LAUNCH_EXAMPLES = """\
examples:
  $ shoal launch --servers 2 --workers 4 train.py --epochs 3    # all on this machine
  $ shoal launch --servers 3 --replicas 1 train.py              # a server that dies is replaced
  $ shoal launch --workers 4 --restarts 3 shoal train lr --cluster --checkpoint-every 1000 --resume ...
  $ shoal launch --workers 4 --worker-restarts 3 shoal train lr --cluster --resume ...    # a killed worker is replaced
  $ mpirun -np 7 shoal launch --servers 2 train.py              # scheduler, 2 servers, 4 workers
  $ srun -n 7 shoal launch --servers 2 train.py
  $ shoal launch --engine ray --servers 4 --replicas 1 --workers 8 train.py    # on the nodes of a cluster of Ray

The program calls shoal.connect(), which reads its rank and the scheduler's address from the environment. The exit
status is 0 if all workers succeed, otherwise that of the first process that fails. Ctrl-C and SIGTERM are forwarded to
the workers, which can save their model while the servers keep running (--grace); the exit status is then 130 or 143.
"""


class SchedulerOptions(ClusterConfig, frozen=True, kw_only=True):
    """The options of ``shoal scheduler``: those of a `SchedulerConfig`, some of which Volcano may give."""

    bind: Bind | None = None
    servers: Servers = 0  # as Volcano says
    workers: Workers = 0
    curve: Curve = None
    insecure: Insecure = False
    metrics_port: MetricsPort = None
    log_format: LogFormat = None
    quiet: Quiet = False


class ServerOptions(ServerSettings, frozen=True, kw_only=True):
    """The options of ``shoal server``: those of a `ServerConfig`, some of which the environment may give."""

    scheduler: SchedulerAddress | None = None
    log_format: LogFormat = None
    quiet: Quiet = False


class LaunchOptions(Config, frozen=True, kw_only=True):
    """The options of ``shoal launch``."""

    program: Annotated[str, "Python file or executable", Setting(metavar="PROGRAM", positional=True)]
    arguments: Annotated[tuple[str, ...], "arguments of the program", Setting(metavar="...", positional=True)] = ()
    engine: Annotated[
        Literal["local", "ray"],
        "what starts the processes: this command, on this machine; or Ray, on the Ray cluster that RAY_ADDRESS names "
        "or that runs here, otherwise on this machine",
    ] = "local"
    servers: Servers = 1
    workers: Annotated[
        int | str,
        "number of workers, each of which runs the program; N:M starts N, and up to M may take part (default: 1)",
        Setting(ge=1, metavar="N[:M]", check="shoal.cluster.protocol.environment:parse_workers"),
    ] = 0
    threads: Annotated[
        Count | None,
        "threads of a server, with one port each (default: the cores of this machine divided by the servers, at most "
        "8; with Ray 1)",
    ] = None
    memory: Annotated[
        Size | None, "memory budget of the rows of all servers together, such as 8GiB (default: unlimited)"
    ] = None
    tier: Tier = None
    heartbeat: Heartbeat = 2.0
    scheduler: Annotated[
        Address | None,
        "address of the scheduler, at which other workers join (default: a socket that only this user reaches; with "
        "keys any port of this machine; under mpirun and srun SHOAL_SCHEDULER, or port 5570 of the machine of process "
        "0)",
    ] = None
    timeout: Annotated[Seconds, "seconds to wait for all processes"] = 60.0
    grace: Annotated[float, "seconds for the workers to save after Ctrl-C or SIGTERM", Setting(ge=0, metavar="S")] = (
        60.0
    )
    restarts: Annotated[
        Number,
        "how often all processes are started again, with empty servers, after one has failed: the program must resume "
        "from a checkpoint",
    ] = 0
    worker_restarts: Annotated[
        Number,
        "how often a worker that was killed by a signal is started again, in all: a fit continues at its last counted "
        "batch. The others wait for it, or with --workers MIN:MAX divide its work",
    ] = 0
    journal: Annotated[
        Dir | None,
        "directory of the journal from which a scheduler that dies continues; an earlier journal there is removed at "
        "the start (default: a temporary one)",
    ] = None
    replicas: Replicas = 0
    copy_rate: CopyRate = None
    storage_roots: StorageRoots = None
    storage_options: StorageOptions = None
    allow_code: AllowCode = ()
    curve: Curve = None
    insecure: Insecure = False
    tracing: Annotated[
        bool,
        "have the workers trace their calls with OpenTelemetry, exported as its environment variables say (default: "
        "SHOAL_TRACING)",
    ] = False
    log_format: LogFormat = None


def run_scheduler(options: SchedulerOptions) -> Answer:
    """Run the scheduler."""
    from shoal.cluster.launch import roles
    from shoal.cluster.protocol.environment import PORT, volcano

    options, job = from_environment(options, os.environ), volcano(os.environ)
    servers = options.servers or job.servers
    if servers is None:
        raise ValueError("the scheduler requires the number of servers: pass --servers N")
    bind = options.bind or (f"tcp://*:{PORT}" if job.scheduler else None)
    if bind is None:
        raise ValueError(f"the scheduler requires an address: pass --bind tcp://HOST:{PORT}")
    members = {"servers": servers, "workers": options.workers or job.workers or 1}
    config = _config_of(SchedulerConfig, options, bind=bind, **members)
    roles.run(config, roles.ended_by_signals, say=log_line)
    return Answer("", {})


def run_server(options: ServerOptions) -> Answer:
    """Run a server."""
    from shoal.cluster.launch import roles
    from shoal.cluster.protocol.environment import find_scheduler

    options = from_environment(options, os.environ)
    address = options.scheduler or find_scheduler(os.environ)
    if address is None:
        raise ValueError("a server requires the address of the scheduler: pass --scheduler tcp://HOST:PORT")
    roles.run(_config_of(ServerConfig, options, scheduler=address), roles.ended_by_signals, say=log_line)
    return Answer("", {})


def _config_of(kind: type[C], options: Config, **more: Any) -> C:
    """Make the configuration of a process of the options that it has."""
    given = {name: getattr(options, name, None) for name in kind.__struct_fields__}
    return kind(**{name: value for name, value in given.items() if value is not None} | more)


def run_launch(options: LaunchOptions) -> Answer:
    """Run a program on a new cluster."""
    from shoal.cluster.protocol.environment import TRACING

    with _environment_of_children({LOG_FORMAT: options.log_format, TRACING: "1" if options.tracing else None}):
        return _launch(options)


@contextlib.contextmanager
def _environment_of_children(variables: Mapping[str, str | None]) -> Iterator[None]:
    """For the length of a ``with`` block, have processes that are started get these variables; None: as it is."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _launch(options: LaunchOptions) -> Answer:
    from shoal.cluster.launch.local_cluster import configurations, threads_of_each
    from shoal.cluster.launch.workers import run_member
    from shoal.cluster.protocol.environment import find_group, parse_workers

    options = from_environment(options, os.environ)
    program = [options.program, *options.arguments]
    if options.engine == "ray" and options.tracing:
        raise ValueError(
            "--tracing: workers on Ray have the environment of Ray's processes. Leave it out, and set SHOAL_TRACING=1 "
            "there"
        )
    if options.engine == "ray":
        return _launch_on_ray(options, program)
    workers = parse_workers(options.workers or 1)
    # If the number of workers may change, the others continue what a dead worker has left of the pass.
    is_replaced = bool(options.worker_restarts) and not isinstance(workers, tuple)
    scheduler, server = configurations(
        options.servers,
        workers=workers[0] if isinstance(workers, tuple) else workers,
        threads=options.threads or threads_of_each(options.servers),
        memory=options.memory,
        tier=options.tier,
        heartbeat=options.heartbeat,
        replicas=options.replicas,
        copy_rate=options.copy_rate,
        replacement_seconds=_REPLACEMENT_SECONDS if is_replaced else 0.0,
        curve=options.curve,
        insecure=options.insecure,
        timeout=options.timeout,
        storage_roots=options.storage_roots,
        storage_options=options.storage_options,
        allow_code=options.allow_code,
        journal=options.journal,
        address=options.scheduler,
    )
    output = WorkerOutput()
    group = find_group(os.environ)
    if group is not None and group.size > 1 and group.launcher in ("mpirun", "srun"):
        if isinstance(workers, tuple):
            raise ValueError(f"{group.launcher} starts a fixed number of workers: leave --workers out")
        if options.workers and workers != group.size - options.servers - 1:
            raise ValueError(
                f"{group.launcher} has started {group.size} processes, which leaves "
                f"{group.size - options.servers - 1} for workers: leave --workers out"
            )
        if options.journal is not None:
            raise ValueError(
                f"--journal {options.journal}: {group.launcher} starts no process again. Leave it out, or start the "
                "processes one by one"
            )
        for option, restarts in (("restarts", options.restarts), ("worker-restarts", options.worker_restarts)):
            if restarts:
                raise ValueError(f"--{option} {restarts}: {group.launcher} starts no process again. Leave it out")
        if options.replicas:
            raise ValueError(
                f"--replicas {options.replicas}: {group.launcher} ends all processes when one of them dies. Leave it "
                "out, or start the processes one by one"
            )
        status, failed = run_member(
            group,
            scheduler,
            server,
            program,
            output.print_output,
            output.print_error_output,
            address=options.scheduler or os.environ.get("SHOAL_SCHEDULER"),
            grace=options.grace,
            warn=warn,
        )
        if failed:
            warn(failed)
        return Answer("", {}, output.status(status))
    for restart in range(options.restarts + 1):
        status, failed = _launch_once(options, scheduler, server, program, workers, output)
        if not failed:
            break
        warn(failed)
        if status == WRONG_INPUT or restart == options.restarts:
            break
        warn(f"all processes start again, restart {restart + 1} of {options.restarts} (--restarts)")
    return Answer("", {}, output.status(status))


def _launch_once(
    options: LaunchOptions,
    scheduler: SchedulerConfig,
    server: ServerConfig,
    program: list[str],
    workers: int | tuple[int, int],
    output: WorkerOutput,
) -> tuple[int, str]:
    """Run a program on a cluster on this machine; return its exit status, and the failure of the first process."""
    from shoal.cluster.launch.child import ProcessFailedError
    from shoal.cluster.launch.local_cluster import LocalCluster
    from shoal.cluster.launch.workers import run_workers

    try:
        with LocalCluster() as cluster:
            cluster.begin(scheduler, server, timeout=options.timeout)
            first = run_workers(
                cluster,
                program,
                workers,
                output.print_output,
                output.print_error_output,
                restarts=options.worker_restarts,
                grace=options.grace,
                warn=warn,
            )
    except ProcessFailedError as failed_role:
        return failed_role.status or FAILED, str(failed_role)
    if first is None:
        return DONE, ""
    return first.status or FAILED, f"{first.name} {first.describe_end()}"


def _launch_on_ray(options: LaunchOptions, program: list[str]) -> Answer:
    """Run a program on a new cluster, whose processes are actors of Ray."""
    from shoal.cluster.launch.workers import run_workers
    from shoal.cluster.protocol.environment import parse_workers
    from shoal.ray import ShoalConfig, start
    from shoal.ray.launch import connected

    workers = parse_workers(options.workers or 1)
    if isinstance(workers, tuple):
        raise ValueError(f"--workers {workers[0]}:{workers[1]}: Ray starts a fixed number of workers. Pass one number")
    for option, restarts in (("restarts", options.restarts), ("worker-restarts", options.worker_restarts)):
        if restarts:
            raise ValueError(f"--{option} {restarts}: Ray starts no worker again. Leave it out")
    if options.scheduler is not None:
        raise ValueError(f"--scheduler {options.scheduler}: Ray places the scheduler. Leave it out")
    if options.allow_code:
        raise ValueError(f"--allow-code {options.allow_code[0]}: servers on Ray import no code of users. Leave it out")
    if options.tier is not None:
        raise ValueError("--tier: servers on Ray keep their rows in memory. Leave it out")
    output = WorkerOutput()
    config = ShoalConfig(
        servers=options.servers,
        replicas=options.replicas,
        threads=options.threads or 1,
        resources_per_server={"CPU": options.threads or 1},
        memory=options.memory,
        copy_rate=None if options.copy_rate is None else memory_bytes(options.copy_rate),
        heartbeat=options.heartbeat,
        timeout=options.timeout,
        storage_roots=options.storage_roots,
        storage_options=options.storage_options,
        curve=None if options.insecure else options.curve,
        insecure=options.insecure,
        journal=options.journal,
    )
    with connected(config, workers), start(config, workers=workers) as cluster:
        failed = run_workers(
            cluster,
            program,
            workers,
            output.print_output,
            output.print_error_output,
            grace=options.grace,
            warn=warn,
        )
        if failed is None:
            return Answer("", {}, output.status(DONE))
        warn(f"{failed.name} {failed.describe_end()}")
        return Answer("", {}, failed.status or FAILED)


COMMANDS = (
    Command(
        "scheduler",
        "Run the scheduler of a cluster.",
        SCHEDULER_EXAMPLES,
        SchedulerOptions,
        run_scheduler,
        role="scheduler",
    ),
    Command("server", "Run a server of a cluster.", SERVER_EXAMPLES, ServerOptions, run_server, role="server"),
    Command("launch", "Run a program on a new cluster.", LAUNCH_EXAMPLES, LaunchOptions, run_launch, role="launch"),
)
