"""``shoal scheduler``, ``shoal server``, ``shoal launch``: the roles of a cluster, and all of them at once.

Roles serve until they are told to end (SIGTERM, Ctrl-C) or the cluster ends; they then end with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.answers import FAILED, Answer, complain, say
from shoal.cli.arguments import command, seconds, size

if TYPE_CHECKING:
    from shoal.cluster.protocol.curve import Keys

_PAUSE = 0.2  # seconds between two looks at the parent
_ALONE = 1.0  # seconds to leave in, once it is gone

SCHEDULER_EXAMPLES = """\
examples:
  $ shoal scheduler --bind tcp://10.0.0.1:5570 --servers 4 --workers 16 --curve keys
  $ shoal scheduler --bind tcp://127.0.0.1:* --servers 1        # any port: it says which

Says where it listens, then what happens in the cluster. The whole cluster ends with it.
"""

SERVER_EXAMPLES = """\
examples:
  $ shoal server --connect tcp://10.0.0.1:5570 --threads 8 --curve keys
  $ shoal server --connect tcp://10.0.0.1:5570 --bind tcp://0.0.0.0:5580 --advertise node7.example --curve keys

Ports: one for each thread. The scheduler connects to each before the server is in.
"""

LAUNCH_EXAMPLES = """\
examples:
  $ shoal launch --servers 2 --workers 4 train.py --epochs 3    # all on this machine
  $ mpirun -np 7 shoal launch --servers 2 train.py              # scheduler, 2 servers, 4 workers
  $ srun -n 7 shoal launch --servers 2 train.py

The program calls shoal.connect(), which finds its place in the environment. Ends with the status of the first process
that fails, after its last output; with 0 when all workers have ended well. Ctrl-C and SIGTERM are passed on to the
workers, which may save what they have learned while the servers go on (--grace); the status is then 130 or 143.
"""


def add(commands: Any) -> None:
    """Add the commands."""
    scheduler = command(commands, "scheduler", "Run the scheduler of a cluster.", SCHEDULER_EXAMPLES, run_scheduler)
    scheduler.add_argument("--bind", metavar="ADDRESS", help="tcp://HOST:PORT to listen at; port * is any")
    scheduler.add_argument("--servers", type=int, metavar="N", help="how many the cluster has")
    scheduler.add_argument("--workers", type=int, metavar="N", help="how many a job has, where they do not say (1)")
    scheduler.add_argument("--slots", type=int, default=1024, metavar="N", help="parts of the hash space (%(default)s)")
    scheduler.add_argument(
        "--heartbeat", type=seconds, default=2.0, metavar="S", help="seconds between signs of life (%(default)s)"
    )
    _common(scheduler)

    server = command(commands, "server", "Run a server of a cluster.", SERVER_EXAMPLES, run_server)
    server.add_argument("--connect", metavar="ADDRESS", help="tcp://HOST:PORT of the scheduler")
    server.add_argument("--bind", metavar="ADDRESS", help="tcp://HOST:PORT to listen at (any port)")
    server.add_argument("--advertise", metavar="HOST", help="this machine as the scheduler and the workers reach it")
    server.add_argument("--threads", type=int, default=1, metavar="N", help="that serve, a port each (%(default)s)")
    bound = server.add_mutually_exclusive_group()
    bound.add_argument("--memory", type=size, metavar="SIZE", help="that its rows may take, such as 8GiB (any)")
    bound.add_argument(
        "--slot-memory",
        type=size,
        metavar="SIZE",
        help="the same for each slot: the same rows stay however many servers share them",
    )
    server.add_argument("--rank", type=int, metavar="N", help="its place among the servers (any that is free)")
    server.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="seconds to wait for the others (%(default)s)"
    )
    server.add_argument(
        "--grace", type=seconds, default=60.0, metavar="S", help="seconds to wait for a silent scheduler (%(default)s)"
    )
    _storage_arguments(server)
    _common(server)

    launch = command(commands, "launch", "Run a program on a cluster of its own.", LAUNCH_EXAMPLES, run_launch)
    launch.add_argument("--servers", type=int, default=1, metavar="N", help="default: %(default)s")
    launch.add_argument("--workers", type=int, metavar="N", help="times that the program runs (1)")
    launch.add_argument("--threads", type=int, default=1, metavar="N", help="of each server (%(default)s)")
    launch.add_argument(
        "--memory", type=size, metavar="SIZE", help="that the rows of all servers together may take, such as 8GiB (any)"
    )
    launch.add_argument("--connect", metavar="ADDRESS", help="where the scheduler shall be, under mpirun and srun")
    launch.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="seconds for all to be there (%(default)s)"
    )
    launch.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for workers to save after Ctrl-C or SIGTERM (%(default)s)",
    )
    _storage_arguments(launch)
    _keys_arguments(launch)
    launch.add_argument("program", metavar="PROGRAM", help="a .py file, or any program")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    launch.set_defaults(json=False, quiet=False)


def _common(parser: argparse.ArgumentParser) -> None:
    _keys_arguments(parser)
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, its parent, is gone")
    parser.add_argument("--quiet", action="store_true", help="say nothing of what happens")
    parser.set_defaults(json=False)


def _storage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-root",
        action="append",
        metavar="DIR",
        help="directory, or URL such as s3://bucket/folder, below which workers may have the servers read and write "
        "(repeatable; default: with keys anywhere, without keys the current directory)",
    )
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_storage_option,
        metavar="NAME=VALUE",
        help="of the file system that a URL is opened by, such as endpoint_url=http://minio:9000 (repeatable)",
    )


def _storage_option(text: str) -> tuple[str, Any]:
    """Read endpoint_url=http://minio:9000 or client_kwargs={"region_name": "eu"}."""
    import msgspec

    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value  # most are text, which need not be written as JSON


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--curve", metavar="DIR", help="keys of the cluster: let in only who has one of them")
    parser.add_argument(
        "--insecure", action="store_true", help="without keys, let in everybody who comes from other machines"
    )


def run_scheduler(arguments: argparse.Namespace) -> Answer:
    """Be the scheduler."""
    from shoal.cluster.launch.environment import PORT, volcano
    from shoal.cluster.scheduler.scheduler import Scheduler

    job = volcano(os.environ)
    servers = arguments.servers if arguments.servers is not None else job.servers
    workers = arguments.workers if arguments.workers is not None else job.workers
    if servers is None:
        raise ValueError("a scheduler needs to know how many servers there are: pass --servers N")
    bind = arguments.bind or (f"tcp://*:{PORT}" if job.scheduler else None)
    if bind is None:
        raise ValueError(f"a scheduler needs an address: pass --bind tcp://HOST:{PORT}")
    _log_to_stderr(arguments)
    with (
        Scheduler(
            bind,
            servers=servers,
            workers=workers if workers is not None else 1,
            slots=arguments.slots,
            heartbeat=arguments.heartbeat,
            keys=_keys(arguments.curve, "scheduler"),
            insecure=arguments.insecure,
        ) as scheduler,
        _told_to_end(scheduler.stop),
        _ended_with_parent(arguments),
    ):
        say(f"scheduler at {scheduler.address}, for {servers} {'server' if servers == 1 else 'servers'}")
        scheduler.run()
    return Answer("", {})


def run_server(arguments: argparse.Namespace) -> Answer:
    """Be a server."""
    from shoal.cluster.launch.environment import find_scheduler, volcano
    from shoal.cluster.server.server import Server

    address = arguments.connect or find_scheduler(os.environ)
    if address is None:
        raise ValueError("a server needs to know where the scheduler is: pass --connect tcp://HOST:PORT")
    _log_to_stderr(arguments)
    with (
        _ended_with_parent(arguments),
        Server(
            address,
            bind=arguments.bind,
            advertise=arguments.advertise,
            threads=arguments.threads,
            memory=arguments.memory,
            slot_memory=arguments.slot_memory,
            rank=arguments.rank if arguments.rank is not None else volcano(os.environ).index,
            timeout=arguments.timeout,
            grace=arguments.grace,
            keys=_keys(arguments.curve, "server"),
            insecure=arguments.insecure,
            storage_roots=arguments.storage_root,
            storage_options=dict(arguments.storage_option),
        ) as server,
        _told_to_end(server.stop),
    ):
        for endpoint in server.endpoints:
            slots = f"{endpoint.first_slot} to {endpoint.end_slot - 1}"
            say(f"server {server.rank} has slots {slots}, at {endpoint.address}")
        server.run()
    return Answer("", {})


def run_launch(arguments: argparse.Namespace) -> Answer:
    """Run a program on a cluster of its own."""
    from shoal.cluster.launch.child import ProcessFailedError, exit_status
    from shoal.cluster.launch.environment import find_group, find_keys
    from shoal.cluster.launch.local_cluster import running
    from shoal.cluster.launch.workers import run_member, run_workers

    program = [arguments.program, *arguments.arguments]
    group = find_group(os.environ)
    if group is not None and group.size > 1 and group.launcher in ("mpirun", "srun"):
        if arguments.workers is not None and arguments.workers != group.size - arguments.servers - 1:
            raise ValueError(
                f"{group.launcher} has started {group.size} processes, which leaves "
                f"{group.size - arguments.servers - 1} for workers: leave --workers out"
            )
        status, failed = run_member(
            group,
            arguments.servers,
            program,
            say,
            address=arguments.connect or os.environ.get("SHOAL_SCHEDULER"),
            threads=arguments.threads,
            memory=arguments.memory,
            timeout=arguments.timeout,
            keys=lambda role: _keys(arguments.curve, role),
            insecure=arguments.insecure,
            storage_roots=arguments.storage_root,
            storage_options=dict(arguments.storage_option),
            grace=arguments.grace,
            warn=complain,
        )
        if failed:
            complain(failed)
        return Answer("", {}, status)
    workers = 1 if arguments.workers is None else arguments.workers
    if workers < 1 or arguments.servers < 1:
        raise ValueError(f"--servers {arguments.servers} --workers {workers}: pass 1 or more of each")
    try:
        with running(
            arguments.servers,
            workers=workers,
            threads=arguments.threads,
            memory=arguments.memory,
            timeout=arguments.timeout,
            curve=arguments.curve or find_keys(os.environ),
            storage_roots=arguments.storage_root,
            storage_options=dict(arguments.storage_option),
        ) as cluster:
            first = run_workers(cluster, program, workers, say, grace=arguments.grace, warn=complain)
    except ProcessFailedError as failed_role:
        complain(str(failed_role))
        return Answer("", {}, failed_role.status or FAILED)
    if first is None:
        return Answer("", {})
    complain(f"{first.name} {first.describe_end()}")
    return Answer("", {}, exit_status(first) or FAILED)


def _keys(directory: str | None, role: str) -> Keys | None:
    from shoal.cluster.launch.environment import find_keys
    from shoal.cluster.protocol.curve import Keys

    directory = directory or find_keys(os.environ)
    return None if directory is None else Keys.load(directory, role)


def _log_to_stderr(arguments: argparse.Namespace) -> None:
    level = logging.ERROR if arguments.quiet else logging.INFO
    logging.basicConfig(format="shoal: %(message)s", level=level)


@contextlib.contextmanager
def _ended_with_parent(arguments: argparse.Namespace) -> Iterator[None]:
    """End this process when its parent is gone, from now on: as by SIGTERM, and soon after that in any case."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PAUSE):
            if os.getppid() != arguments.parent:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                if not over.wait(_ALONE):
                    os._exit(FAILED)
                return

    if arguments.parent is not None:
        threading.Thread(target=watch, name="shoal-parent", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def _told_to_end(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and on Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
