"""Every setting of shoal, written once: its name, type, default, bounds and one sentence.

    of processes   ClusterConfig, SchedulerConfig, ServerConfig, ConnectConfig, LaunchConfig
    shared         the aliases at the top: settings that several configurations have, with one meaning

A name is the same in Python, in a TOML file, and, with dashes, as an option of the command line. Sizes, rules and
addresses are text here; whoever uses them reads them. A launcher passes a configuration to a child as one JSON object
(`Config.to_json`, `Config.from_json`). ``docs/settings.md`` is made from this file.

Threads: configurations are immutable.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from shoal.base.settings import Config, Setting

# ---- shared settings -------------------------------------------------------------------------------------------------

Size = int | str  # bytes, as a number or as 8GiB
_SIZE = "shoal.base.sizes:memory_bytes"

Threads = Annotated[int | None, Setting("threads that compute", ge=1, metavar="N", unset="all cores")]
Slots = Annotated[int, Setting("slots of the hash space: a power of two from 2 to 16384", ge=2, le=16384, metavar="N")]
Curve = Annotated[
    str | None,
    Setting(
        "directory of the cluster's keys: accept and connect only to processes with one of them",
        metavar="DIR",
        variable="SHOAL_CURVE",
    ),
]
Insecure = Annotated[bool, Setting("accept connections from other machines without keys")]
Heartbeat = Annotated[
    float, Setting("seconds between heartbeats; a process is dead after five without one", gt=0, metavar="S")
]
Replicas = Annotated[
    int,
    Setting(
        "copies of each slot on other servers, fewer than the servers: this many servers may die at the same time "
        "without the loss of a push; with 0 the loss of a server ends the job",
        ge=0,
        metavar="N",
    ),
]
CopyRate = Annotated[
    Size | None,
    Setting(
        "bytes per second that each thread of a server sends at most to make a new copy of slots, such as 50MiB",
        metavar="SIZE",
        unset="32MiB",
        check=_SIZE,
    ),
]
ServerThreads = Annotated[int, Setting("threads of a server, with one port each", ge=1, metavar="N")]
Tier = Annotated[
    str | None,
    Setting(
        "keep rows that do not fit in SIZE bytes of memory of each server, such as 8GiB, in a directory of its own "
        "below DIR, on a local SSD",
        metavar="DIR:SIZE",
        unset="all rows are in memory",
        check="shoal.table.tiered:parse_tier",
    ),
]
StorageRoots = Annotated[
    tuple[str, ...] | None,
    Setting(
        "directory, or URL such as s3://bucket/folder, in which workers may make the servers read and write files; "
        "repeatable",
        metavar="DIR",
        unset="with keys any, without keys the current directory",
    ),
]
StorageOptions = Annotated[
    dict[str, Any] | None,
    Setting(
        "option of the file system of a URL, such as endpoint_url=http://minio:9000; repeatable", metavar="NAME=VALUE"
    ),
]
AllowCode = Annotated[
    tuple[str, ...],
    Setting(
        "directory, or name of a module, from which the servers may import optimizers and functions of users, or the "
        "word source for functions that are sent as their source: code that they run with all their rights; repeatable",
        metavar="DIR|MODULE|source",
        unset="none",
    ),
]
MetricsPort = Annotated[
    int | str | None,
    Setting(
        "answer requests for http://HOST:PORT/healthz, /readyz and /metrics; HOST is 127.0.0.1 unless named",
        metavar="[HOST:]PORT",
        unset="none",
        check="shoal.cluster.protocol.health:parse_listen",
    ),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    Setting(
        "format of log events on standard error, one a line; with json all messages are events",
        unset="text",
        variable="SHOAL_LOG_FORMAT",
    ),
]

# ---- processes -------------------------------------------------------------------------------------------------------


class ClusterConfig(Config, frozen=True, kw_only=True):
    """What the scheduler of a cluster decides for all."""

    servers: Annotated[int, Setting("number of servers", ge=1, metavar="N", variable="VC_SERVER_NUM")] = 1
    workers: Annotated[
        int,
        Setting("number of workers of a job, unless the job states it", ge=1, metavar="N", variable="VC_WORKER_NUM"),
    ] = 1
    slots: Slots = 1024
    heartbeat: Heartbeat = 2.0
    replicas: Replicas = 0
    copy_rate: CopyRate = None
    replacement_seconds: Annotated[
        float,
        Setting(
            "seconds that the workers of a job wait for the replacement of a worker that died; with 0 they continue "
            "without it",
            ge=0,
            metavar="S",
        ),
    ] = 0.0
    grace: Annotated[
        float | None,
        Setting(
            "seconds that servers and workers continue while the scheduler does not answer",
            gt=0,
            metavar="S",
            unset="600 with a journal, else 60",
        ),
    ] = None
    journal: Annotated[
        str | None,
        Setting(
            "directory in which the scheduler stores its state; if it is started again with the same settings, it "
            "continues from there",
            metavar="DIR",
            unset="none",
        ),
    ] = None


class SchedulerConfig(ClusterConfig, frozen=True, kw_only=True):
    """The process of a scheduler."""

    bind: Annotated[str, Setting("tcp://HOST:PORT to listen on; port *: any free port", metavar="ADDRESS")]
    curve: Curve = None
    insecure: Insecure = False
    metrics_port: MetricsPort = None


class ServerConfig(Config, frozen=True, kw_only=True):
    """The process of a server."""

    scheduler: Annotated[
        str, Setting("tcp://HOST:PORT of the scheduler", metavar="ADDRESS", variable="SHOAL_SCHEDULER")
    ]
    bind: Annotated[str | None, Setting("tcp://HOST:PORT to listen on", metavar="ADDRESS", unset="any free port")] = (
        None
    )
    advertise: Annotated[
        str | None, Setting("name of this machine for the scheduler and the workers", metavar="HOST")
    ] = None
    threads: ServerThreads = 1
    memory: Annotated[
        Size | None,
        Setting(
            "memory budget of the rows, such as 8GiB, an equal share for each slot that is served",
            metavar="SIZE",
            unset="unlimited",
            check=_SIZE,
        ),
    ] = None
    slot_memory: Annotated[
        Size | None,
        Setting(
            "memory budget of each slot, in place of memory: the rows that are kept then do not depend on the number "
            "of servers",
            metavar="SIZE",
            check=_SIZE,
        ),
    ] = None
    tier: Tier = None
    rank: Annotated[int | None, Setting("rank among the servers", ge=0, metavar="N", unset="any free rank")] = None
    node: Annotated[
        str | None,
        Setting(
            "name of the machine: copies of a slot are on servers of different nodes where possible",
            metavar="NAME",
            unset="the host name",
            variable="SHOAL_NODE",
        ),
    ] = None
    spare: Annotated[
        bool,
        Setting(
            "join a running cluster without serving slots: when another server dies, missing copies are made on this "
            "one; the next rebalance moves slots to it"
        ),
    ] = False
    timeout: Annotated[float, Setting("seconds to wait for the other processes", gt=0, metavar="S")] = 60.0
    grace: Annotated[
        float | None,
        Setting(
            "seconds to wait for a scheduler that does not answer",
            gt=0,
            metavar="S",
            unset="the grace of the scheduler",
        ),
    ] = None
    drain_on_sigterm: Annotated[
        float | None,
        Setting(
            "after SIGTERM move all slots to other servers first, for S seconds at most",
            gt=0,
            metavar="S",
            unset="end at once",
        ),
    ] = None
    storage_roots: StorageRoots = None
    storage_options: StorageOptions = None
    allow_code: AllowCode = ()
    curve: Curve = None
    insecure: Insecure = False
    metrics_port: MetricsPort = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tier is not None and (self.memory is not None or self.slot_memory is not None):
            raise ValueError("a server has a memory budget or a tier: leave out memory and slot_memory, or tier")
        if self.memory is not None and self.slot_memory is not None:
            raise ValueError("memory and slot_memory bound the same rows: pass one of them")


class ConnectConfig(Config, frozen=True, kw_only=True):
    """The connection of a worker to a cluster, whose servers hold the tables.

    Each worker runs the same program and trains on its split of the files.
    """

    cluster: Annotated[
        str | None,
        Setting(
            "tcp://HOST:PORT of the scheduler; its servers hold the tables (without ADDRESS: from the environment)",
            metavar="ADDRESS",
            const="",
            variable="SHOAL_SCHEDULER",
        ),
    ] = None
    consistency: Annotated[
        str,
        Setting(
            "bsp: synchronous steps; ssp:N: workers at most N batches apart; asp: asynchronous",
            metavar="RULE",
            check="shoal.consistency:parse_consistency",
        ),
    ] = "bsp"
    workers: Annotated[
        int | str | None,
        Setting(
            "number of workers, or the least and the greatest one",
            ge=1,
            metavar="N[:M]",
            unset="from the environment",
            check="shoal.cluster.protocol.environment:parse_workers",
            variable="SHOAL_WORKERS",
        ),
    ] = None
    job: Annotated[
        str | None,
        Setting(
            "join the job of this name, which runs on the cluster at the same time as others; jobs whose tables have "
            "one name share their weights",
            metavar="NAME",
        ),
    ] = None
    curve: Curve = None
    tracing: Annotated[
        bool,
        Setting("trace calls with OpenTelemetry, exported as its environment variables say", variable="SHOAL_TRACING"),
    ] = False
    shared_storage: Annotated[
        bool,
        Setting(
            "the servers reach the files of this machine, by the same paths; otherwise the worker reads and writes all "
            "rows itself"
        ),
    ] = True
    cache: Annotated[
        str | None,
        Setting(
            "keep up to ROWS rows of each table at the worker, make the optimizer's steps in them, and hold back what "
            "changes for up to STALENESS clocks; with consistency ssp:N or asp. :sums sends sums of gradients instead: "
            "fewer bytes, but a model learns less",
            metavar="ROWS:STALENESS[:sums]",
            check="shoal.cluster.worker.cache:parse_cache",
        ),
    ] = None
    filters: Annotated[
        str | None,
        Setting(
            "compress messages; exact: key_caching, zeros; unbiased: gradients=bfloat16 or float16, weights=bfloat16 "
            "or float16, threshold=T",
            metavar="NAME[=VALUE],...",
            check="shoal.cluster.worker.filters:parse_filters",
        ),
    ] = None
