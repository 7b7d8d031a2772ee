"""The identity of this process from environment variables: its rank, the number of processes, the scheduler.

    SHOAL_RANK, SHOAL_WORKERS, SHOAL_SCHEDULER     set by ``shoal launch``, or by hand; they come first
    SHOAL_NODE                                     the machine that a server runs on
    SHOAL_CURVE                                    the directory of the cluster's keys, of every role
    SHOAL_METRICS_PORT                             where a worker answers probes and reports its metrics; a launcher
                                                   adds the worker's rank to the port
    SHOAL_LOG_FORMAT                               text or json: the log of every role (shoal.base.logs)
    SHOAL_TRACING                                  1: a worker's calls are traced by OpenTelemetry
    torchrun      RANK, WORLD_SIZE
    Open MPI      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
    Slurm         SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST     under srun, not in the batch script itself
    Volcano       VC_TASK_INDEX, VC_WORKER_NUM, VC_SERVER_NUM, VC_SCHEDULER_HOSTS     tasks scheduler, server, worker

If one launcher runs inside another, the inner one is used: torchrun before MPI before Slurm before Volcano.
``docs/cluster.md`` has a command for each.

Threads: functions of their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PORT = 5570
TRACING = "SHOAL_TRACING"  # the environment variable

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of a group."""

    # The program that started the group.
    launcher: str
    # rank, size: Rank of this process, and size of the group.
    rank: int
    size: int
    # The machine of the first process, if known.
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Volcano:
    """Variables of a Volcano job with tasks ``scheduler``, ``server`` and ``worker``; None if unset."""

    index: int | None
    scheduler: str | None
    servers: int | None
    workers: int | None


def find_worker(environment: Environment) -> ProcessIdentity | None:
    """Find the identity of a worker among the workers.

    Examples
    --------
    >>> find_worker({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    ProcessIdentity(launcher='torchrun', rank=1, size=4, host=None)
    """
    if find_worker_range(environment) is not None:
        return None
    process = _pair(environment, "shoal", "SHOAL_RANK", "SHOAL_WORKERS") or find_group(environment)
    if process is None:
        job = volcano(environment)
        if job.index is not None and job.workers is not None:
            process = _checked(ProcessIdentity("Volcano", job.index, job.workers), "VC_TASK_INDEX")
    return process


def find_worker_range(environment: Environment) -> tuple[int, int] | None:
    """Find the least and the greatest number of workers, if it may change: SHOAL_WORKERS, as in ``2:8``."""
    text = environment.get("SHOAL_WORKERS") or ""
    if ":" not in text:
        return None
    try:
        found = parse_workers(text)
    except ValueError as error:
        raise ValueError(f"SHOAL_WORKERS in the environment: {error}") from None
    return found if isinstance(found, tuple) else None


def parse_workers(text: int | str) -> int | tuple[int, int]:
    """Parse a number of workers, or the least and the greatest one: ``4``, ``2:8``.

    Examples
    --------
    >>> parse_workers("4"), parse_workers("2:8")
    (4, (2, 8))
    """
    words = str(text).split(":")
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(
            f"{text!r} is not a number of workers: pass one, as in 4, or the least and greatest, as in 2:8"
        )
    return numbers[0], numbers[1]


def find_group(environment: Environment) -> ProcessIdentity | None:
    """Find the identity of a process in a group that torchrun, mpirun or srun has started."""
    process = _pair(environment, "torchrun", "RANK", "WORLD_SIZE")
    if process is not None:
        return process
    process = _pair(environment, "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if process is not None:
        alone = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == process.size
        return ProcessIdentity(process.launcher, process.rank, process.size, "127.0.0.1" if alone else None)
    process = _pair(environment, "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if process is not None:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        return ProcessIdentity(process.launcher, process.rank, process.size, first_host(nodes) if nodes else None)
    return None


def find_scheduler(environment: Environment) -> str | None:
    """Find the address of the scheduler: SHOAL_SCHEDULER, or port 5570 of the host that Volcano names."""
    address = environment.get("SHOAL_SCHEDULER")
    if address:
        return address
    host = volcano(environment).scheduler
    return f"tcp://{host}:{PORT}" if host else None


def find_keys(environment: Environment) -> str | None:
    """Find the directory of the cluster's keys: SHOAL_CURVE."""
    return environment.get("SHOAL_CURVE") or None


def find_metrics_port(environment: Environment) -> str | None:
    """Find where a worker answers probes and reports its metrics, ``[HOST:]PORT``: SHOAL_METRICS_PORT."""
    return environment.get("SHOAL_METRICS_PORT") or None


def shift_metrics_port(text: str, rank: int) -> str:
    """Return where a launched worker reports its metrics: the port plus its rank, unless it is any free one.

    Examples
    --------
    >>> shift_metrics_port("0.0.0.0:9100", 2), shift_metrics_port("9100", 1), shift_metrics_port("*", 3)
    ('0.0.0.0:9102', '9101', '*')
    """
    host, separator, port = text.rpartition(":")
    if not port.isdecimal() or int(port) == 0:  # what is no port is refused by the worker
        return text
    return f"{host}{separator}{int(port) + rank}"


def find_tracing(environment: Environment) -> bool:
    """Find whether a worker's calls are traced: SHOAL_TRACING."""
    text = environment.get(TRACING) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{TRACING}={text!r} in the environment: set it to 1 to trace calls, or to 0")
    return text == "1"


def volcano(environment: Environment) -> Volcano:
    """Read the variables of Volcano's plugins ``env`` and ``svc``."""
    hosts = environment.get("VC_SCHEDULER_HOSTS", "").split(",")
    return Volcano(
        _number(environment, "VC_TASK_INDEX"),
        hosts[0].strip() or None,
        _number(environment, "VC_SERVER_NUM"),
        _number(environment, "VC_WORKER_NUM"),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list.

    Examples
    --------
    >>> first_host("gpu[03-07,11]-ib,login1"), first_host("a,b")
    ('gpu03-ib', 'a')
    """
    found = re.match(r"([^,\[\]]*)(?:\[([^\],-]+)[^\]]*\]([^,\[\]]*))?", nodes)
    host = "".join(part or "" for part in found.groups()) if found else ""
    if not host:
        raise ValueError(f"{nodes!r} is not a node list of Slurm")
    return host


def _pair(environment: Environment, launcher: str, rank: str, size: str) -> ProcessIdentity | None:
    number, of = _number(environment, rank), _number(environment, size)
    return None if number is None or of is None else _checked(ProcessIdentity(launcher, number, of), rank)


def _checked(process: ProcessIdentity, name: str) -> ProcessIdentity:
    if not 0 <= process.rank < process.size:
        raise ValueError(
            f"{name}={process.rank} in the environment is out of range: {process.size} processes have ranks from 0 to "
            f"{process.size - 1}"
        )
    return process


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not a number: unset it") from None
