"""``shoal scheduler``, ``shoal server``, ``shoal launch``: the processes of a cluster, one by one or all together.

Scheduler and server run until SIGTERM, Ctrl-C or the end of the cluster, and then exit with status 0. Ctrl-C ends a
scheduler together with its cluster, and a server at once. SIGTERM, which service managers send before they start a
process again elsewhere, ends a scheduler with a journal alone, and a server with ``--drain-on-sigterm`` after its slots
have moved away.

Over 600 lines: the options of the three commands are one table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.base.logs import LOG_FORMAT
from shoal.cli.answers import DONE, FAILED, WRONG_INPUT, Answer, log_line, print_error_output, print_output, warn
from shoal.cli.arguments import command, log_options, seconds, size, workers_number
from shoal.config import SchedulerConfig, ServerConfig

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
  $ shoal server --connect tcp://10.0.0.1:5570 --threads 8 --curve keys
  $ shoal server --connect tcp://10.0.0.1:5570 --bind tcp://0.0.0.0:5580 --advertise node7.example --curve keys

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


def add(commands: Any) -> None:
    """Add the commands."""
    scheduler = command(commands, "scheduler", "Run the scheduler of a cluster.", SCHEDULER_EXAMPLES, run_scheduler)
    scheduler.add_argument("--bind", metavar="ADDRESS", help="tcp://HOST:PORT to listen on; port *: any free port")
    scheduler.add_argument("--servers", type=int, metavar="N", help="number of servers")
    scheduler.add_argument(
        "--workers", type=int, metavar="N", help="number of workers of a job, unless the job states it (default: 1)"
    )
    scheduler.add_argument(
        "--slots", type=int, default=1024, metavar="N", help="slots of the hash space (default: %(default)s)"
    )
    _heartbeat_argument(scheduler)
    scheduler.add_argument(
        "--journal",
        metavar="DIR",
        help="directory in which the scheduler stores its state; if it is started again with the same options, it "
        "continues from there (default: none)",
    )
    scheduler.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="seconds that servers and workers continue while the scheduler does not answer (default: 600 with "
        "--journal, else 60)",
    )
    scheduler.add_argument(
        "--replacement-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that the workers of a job wait for the replacement of a worker that died (default: 0, they "
        "continue without it)",
    )
    _replica_arguments(scheduler)
    _health_arguments(scheduler)
    _common(scheduler)
    log_options(scheduler, "scheduler")

    server = command(commands, "server", "Run a server of a cluster.", SERVER_EXAMPLES, run_server)
    server.add_argument("--connect", metavar="ADDRESS", help="tcp://HOST:PORT of the scheduler")
    server.add_argument("--bind", metavar="ADDRESS", help="tcp://HOST:PORT to listen on (default: any free port)")
    server.add_argument("--advertise", metavar="HOST", help="name of this machine for the scheduler and the workers")
    server.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads that serve, with one port each (default: %(default)s)",
    )
    bound = server.add_mutually_exclusive_group()
    bound.add_argument(
        "--memory", type=size, metavar="SIZE", help="memory budget of the rows, such as 8GiB (default: unlimited)"
    )
    bound.add_argument(
        "--slot-memory",
        type=size,
        metavar="SIZE",
        help="memory budget of each slot; the rows that are kept then do not depend on the number of servers",
    )
    _tier_argument(server)
    server.add_argument("--rank", type=int, metavar="N", help="rank among the servers (default: any free rank)")
    server.add_argument(
        "--node",
        metavar="NAME",
        help="name of the machine: with --replicas, the copies of a slot are on servers of different nodes where "
        "possible (default: SHOAL_NODE, or the host name)",
    )
    server.add_argument(
        "--spare",
        action="store_true",
        help="join a running cluster without serving slots: when another server dies, missing copies are made on "
        "this one; the next rebalance moves slots to it",
    )
    server.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds to wait for the other processes (default: %(default)s)",
    )
    server.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="seconds to wait for a scheduler that does not answer (default: the scheduler's --grace)",
    )
    server.add_argument(
        "--drain-on-sigterm",
        type=seconds,
        metavar="S",
        help="after SIGTERM move all slots to other servers first, for S seconds at most (default: end at once)",
    )
    _server_files_arguments(server)
    _health_arguments(server)
    _common(server)
    log_options(server, "server")

    launch = command(commands, "launch", "Run a program on a new cluster.", LAUNCH_EXAMPLES, run_launch)
    launch.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="what starts the processes: this command, on this machine; or Ray, on the Ray cluster that RAY_ADDRESS "
        "names or that runs here, otherwise on this machine (default: %(default)s)",
    )
    launch.add_argument("--servers", type=int, default=1, metavar="N", help="number of servers (default: %(default)s)")
    launch.add_argument(
        "--workers",
        type=workers_number,
        metavar="N[:M]",
        help="number of workers, each of which runs the program (default: 1); N:M starts N, and up to M may take part",
    )
    launch.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of each server (default: %(default)s)"
    )
    launch.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="memory budget of the rows of all servers together, such as 8GiB (default: unlimited)",
    )
    _tier_argument(launch)
    _heartbeat_argument(launch)
    launch.add_argument("--connect", metavar="ADDRESS", help="address of the scheduler under mpirun and srun")
    launch.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for all processes (default: %(default)s)",
    )
    launch.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for the workers to save after Ctrl-C or SIGTERM (default: %(default)s)",
    )
    launch.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all processes are started again, with empty servers, after one has failed: the program must "
        "resume from a checkpoint (default: %(default)s)",
    )
    launch.add_argument(
        "--worker-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often a worker that was killed by a signal is started again, in all: a fit continues at its last "
        "counted batch. The others wait for it, or with --workers MIN:MAX divide its work (default: %(default)s)",
    )
    launch.add_argument(
        "--journal",
        metavar="DIR",
        help="directory of the journal from which a scheduler that dies continues; an earlier journal there is removed "
        "at the start (default: a temporary one)",
    )
    _replica_arguments(launch)
    _server_files_arguments(launch)
    _keys_arguments(launch)
    launch.add_argument(
        "--tracing",
        action="store_true",
        help="have the workers trace their calls with OpenTelemetry, exported as its environment variables say "
        "(default: SHOAL_TRACING)",
    )
    log_options(launch, "launch")
    launch.add_argument("program", metavar="PROGRAM", help="Python file or executable")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")
    launch.set_defaults(json=False, quiet=False)


def _replica_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=int,
        default=0,
        metavar="N",
        help="copies of each slot on other servers, fewer than --servers: this many servers may die at the same time "
        "without the loss of a push (default: 0, the loss of a server ends the job)",
    )
    parser.add_argument(
        "--copy-rate",
        type=size,
        metavar="SIZE",
        help="bytes per second that each thread of a server sends at most to make a new copy of slots, such as 50MiB "
        "(default: 32MiB)",
    )


def _health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port",
        type=_listen,
        metavar="[HOST:]PORT",
        help="answer requests for http://HOST:PORT/healthz, /readyz and /metrics (default: none; HOST: 127.0.0.1)",
    )


def _listen(text: str) -> str:
    from shoal.cluster.protocol.health import parse_listen

    try:
        parse_listen(text)
        return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _common(parser: argparse.ArgumentParser) -> None:
    _keys_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="do not log events")
    parser.set_defaults(json=False)


def _heartbeat_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--heartbeat",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds between heartbeats; a process is dead after five without one (default: %(default)s)",
    )


def _tier_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tier",
        type=_tier,
        metavar="DIR:SIZE",
        help="keep rows that do not fit in SIZE bytes of memory of each server, such as 8GiB, in a directory of its "
        "own below DIR, on a local SSD (default: all rows are in memory)",
    )


def _tier(text: str) -> str:
    from shoal.table.tiered import parse_tier

    try:
        parse_tier(text)
        return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _server_files_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-root",
        action="append",
        metavar="DIR",
        help="directory, or URL such as s3://bucket/folder, in which workers may make the servers read and write "
        "files; repeatable (default: with keys any, without keys the current directory)",
    )
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_storage_option,
        metavar="NAME=VALUE",
        help="option of the file system of a URL, such as endpoint_url=http://minio:9000; repeatable",
    )
    parser.add_argument(
        "--allow-code",
        action="append",
        default=[],
        metavar="DIR|MODULE|source",
        help="directory, or name of a module, from which the servers may import optimizers and functions of users, or "
        "the word source for functions that are sent as their source: code that they run with all their rights; "
        "repeatable (default: none)",
    )


def _storage_option(text: str) -> tuple[str, Any]:
    """Parse endpoint_url=http://minio:9000 or client_kwargs={"region_name": "eu"}."""
    import msgspec

    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value  # text need not be quoted as JSON


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--curve", metavar="DIR", help="directory of the cluster's keys: accept only processes with one of them"
    )
    parser.add_argument("--insecure", action="store_true", help="accept connections from other machines without keys")


def run_scheduler(arguments: argparse.Namespace) -> Answer:
    """Run the scheduler."""
    from shoal.cluster.launch import roles
    from shoal.cluster.protocol.environment import PORT, find_keys, volcano

    job = volcano(os.environ)
    servers = arguments.servers if arguments.servers is not None else job.servers
    workers = arguments.workers if arguments.workers is not None else job.workers
    if servers is None:
        raise ValueError("the scheduler requires the number of servers: pass --servers N")
    bind = arguments.bind or (f"tcp://*:{PORT}" if job.scheduler else None)
    if bind is None:
        raise ValueError(f"the scheduler requires an address: pass --bind tcp://HOST:{PORT}")
    config = SchedulerConfig(
        bind=bind,
        servers=servers,
        workers=workers if workers is not None else 1,
        slots=arguments.slots,
        heartbeat=arguments.heartbeat,
        journal=arguments.journal,
        grace=arguments.grace,
        replicas=arguments.replicas,
        copy_rate=arguments.copy_rate,
        replacement_seconds=arguments.replacement_seconds,
        curve=arguments.curve or find_keys(os.environ),
        insecure=arguments.insecure,
        metrics_port=arguments.metrics_port,
    )
    roles.run(config, roles.ended_by_signals, say=log_line)
    return Answer("", {})


def run_server(arguments: argparse.Namespace) -> Answer:
    """Run a server."""
    from shoal.cluster.launch import roles
    from shoal.cluster.protocol.environment import find_keys, find_node, find_scheduler, volcano

    address = arguments.connect or find_scheduler(os.environ)
    if address is None:
        raise ValueError("a server requires the address of the scheduler: pass --connect tcp://HOST:PORT")
    config = ServerConfig(
        scheduler=address,
        bind=arguments.bind,
        advertise=arguments.advertise,
        threads=arguments.threads,
        memory=arguments.memory,
        tier=arguments.tier,
        slot_memory=arguments.slot_memory,
        rank=arguments.rank if arguments.rank is not None else volcano(os.environ).index,
        node=arguments.node or find_node(os.environ),
        spare=arguments.spare,
        timeout=arguments.timeout,
        grace=arguments.grace,
        drain_on_sigterm=arguments.drain_on_sigterm,
        storage_roots=arguments.storage_root and tuple(arguments.storage_root),
        storage_options=dict(arguments.storage_option),
        allow_code=tuple(arguments.allow_code),
        curve=arguments.curve or find_keys(os.environ),
        insecure=arguments.insecure,
        metrics_port=arguments.metrics_port,
    )
    roles.run(config, roles.ended_by_signals, say=log_line)
    return Answer("", {})


def run_launch(arguments: argparse.Namespace) -> Answer:
    """Run a program on a new cluster."""
    from shoal.cluster.protocol.environment import TRACING

    with _environment_of_children({LOG_FORMAT: arguments.log_format, TRACING: "1" if arguments.tracing else None}):
        return _launch(arguments)


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


def _launch(arguments: argparse.Namespace) -> Answer:
    from shoal.cluster.launch.local_cluster import configurations
    from shoal.cluster.launch.workers import run_member
    from shoal.cluster.protocol.environment import find_group, find_keys

    program = [arguments.program, *arguments.arguments]
    if arguments.restarts < 0:
        raise ValueError(f"--restarts {arguments.restarts}: pass 0 or more")
    if arguments.worker_restarts < 0:
        raise ValueError(f"--worker-restarts {arguments.worker_restarts}: pass 0 or more")
    if arguments.engine == "ray" and arguments.tracing:
        raise ValueError(
            "--tracing: workers on Ray have the environment of Ray's processes. Leave it out, and set SHOAL_TRACING=1 "
            "there"
        )
    if arguments.engine == "ray":
        return _launch_on_ray(arguments, program)
    workers = 1 if arguments.workers is None else arguments.workers
    if (workers if isinstance(workers, int) else workers[0]) < 1 or arguments.servers < 1:
        raise ValueError(f"--servers {arguments.servers} --workers {workers}: pass 1 or more of each")
    # If the number of workers may change, the others continue what a dead worker has left of the pass.
    is_replaced = bool(arguments.worker_restarts) and not isinstance(workers, tuple)
    scheduler, server = configurations(
        arguments.servers,
        workers=workers[0] if isinstance(workers, tuple) else workers,
        threads=arguments.threads,
        memory=arguments.memory,
        tier=arguments.tier,
        heartbeat=arguments.heartbeat,
        replicas=arguments.replicas,
        copy_rate=arguments.copy_rate,
        replacement_seconds=_REPLACEMENT_SECONDS if is_replaced else 0.0,
        curve=arguments.curve or find_keys(os.environ),
        insecure=arguments.insecure,
        timeout=arguments.timeout,
        storage_roots=arguments.storage_root,
        storage_options=dict(arguments.storage_option),
        allow_code=arguments.allow_code,
        journal=arguments.journal,
    )
    group = find_group(os.environ)
    if group is not None and group.size > 1 and group.launcher in ("mpirun", "srun"):
        if isinstance(arguments.workers, tuple):
            raise ValueError(f"{group.launcher} starts a fixed number of workers: leave --workers out")
        if arguments.workers is not None and arguments.workers != group.size - arguments.servers - 1:
            raise ValueError(
                f"{group.launcher} has started {group.size} processes, which leaves "
                f"{group.size - arguments.servers - 1} for workers: leave --workers out"
            )
        if arguments.journal is not None:
            raise ValueError(
                f"--journal {arguments.journal}: {group.launcher} starts no process again. Leave it out, or start the "
                "processes one by one"
            )
        for option, restarts in (("restarts", arguments.restarts), ("worker-restarts", arguments.worker_restarts)):
            if restarts:
                raise ValueError(f"--{option} {restarts}: {group.launcher} starts no process again. Leave it out")
        if arguments.replicas:
            raise ValueError(
                f"--replicas {arguments.replicas}: {group.launcher} ends all processes when one of them dies. Leave it "
                "out, or start the processes one by one"
            )
        status, failed = run_member(
            group,
            scheduler,
            server,
            program,
            print_output,
            print_error_output,
            address=arguments.connect or os.environ.get("SHOAL_SCHEDULER"),
            grace=arguments.grace,
            warn=warn,
        )
        if failed:
            warn(failed)
        return Answer("", {}, status)
    for restart in range(arguments.restarts + 1):
        status, failed = _launch_once(arguments, scheduler, server, program, workers)
        if not failed:
            break
        warn(failed)
        if status == WRONG_INPUT or restart == arguments.restarts:
            break
        warn(f"all processes start again, restart {restart + 1} of {arguments.restarts} (--restarts)")
    return Answer("", {}, status)


def _launch_once(
    arguments: argparse.Namespace,
    scheduler: SchedulerConfig,
    server: ServerConfig,
    program: list[str],
    workers: int | tuple[int, int],
) -> tuple[int, str]:
    """Run a program on a cluster on this machine; return its exit status, and the failure of the first process."""
    from shoal.cluster.launch.child import ProcessFailedError
    from shoal.cluster.launch.local_cluster import LocalCluster
    from shoal.cluster.launch.workers import run_workers

    try:
        with LocalCluster() as cluster:
            cluster.start(scheduler, server, timeout=arguments.timeout)
            if isinstance(workers, tuple):
                least, most = workers
                warn(f"more workers may join: SHOAL_SCHEDULER={cluster.address} SHOAL_WORKERS={least}:{most}")
            first = run_workers(
                cluster,
                program,
                workers,
                print_output,
                print_error_output,
                restarts=arguments.worker_restarts,
                grace=arguments.grace,
                warn=warn,
            )
    except ProcessFailedError as failed_role:
        return failed_role.status or FAILED, str(failed_role)
    if first is None:
        return DONE, ""
    return first.status or FAILED, f"{first.name} {first.describe_end()}"


def _launch_on_ray(arguments: argparse.Namespace, program: list[str]) -> Answer:
    """Run a program on a new cluster, whose processes are actors of Ray."""
    from shoal.cluster.launch.workers import run_workers
    from shoal.cluster.protocol.environment import find_keys
    from shoal.ray import ShoalConfig, start
    from shoal.ray.launch import connected

    workers = 1 if arguments.workers is None else arguments.workers
    if isinstance(workers, tuple):
        raise ValueError(f"--workers {workers[0]}:{workers[1]}: Ray starts a fixed number of workers. Pass one number")
    if workers < 1 or arguments.servers < 1:
        raise ValueError(f"--servers {arguments.servers} --workers {workers}: pass 1 or more of each")
    for option, restarts in (("restarts", arguments.restarts), ("worker-restarts", arguments.worker_restarts)):
        if restarts:
            raise ValueError(f"--{option} {restarts}: Ray starts no worker again. Leave it out")
    if arguments.connect is not None:
        raise ValueError(f"--connect {arguments.connect}: Ray places the scheduler. Leave it out")
    if arguments.allow_code:
        raise ValueError(
            f"--allow-code {arguments.allow_code[0]}: servers on Ray import no code of users. Leave it out"
        )
    if arguments.tier is not None:
        raise ValueError("--tier: servers on Ray keep their rows in memory. Leave it out")
    config = ShoalConfig(
        servers=arguments.servers,
        replicas=arguments.replicas,
        threads=arguments.threads,
        resources_per_server={"CPU": arguments.threads},
        memory=arguments.memory,
        copy_rate=arguments.copy_rate,
        heartbeat=arguments.heartbeat,
        timeout=arguments.timeout,
        storage_roots=arguments.storage_root,
        storage_options=dict(arguments.storage_option),
        curve=None if arguments.insecure else arguments.curve or find_keys(os.environ),
        insecure=arguments.insecure,
        journal=arguments.journal,
    )
    with connected(config, workers), start(config, workers=workers) as cluster:
        failed = run_workers(
            cluster, program, workers, print_output, print_error_output, grace=arguments.grace, warn=warn
        )
        if failed is None:
            return Answer("", {})
        warn(f"{failed.name} {failed.describe_end()}")
        return Answer("", {}, failed.status or FAILED)
