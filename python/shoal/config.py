"""Every setting of shoal, written once: its name, type, default, bounds and one sentence.

    shared         the aliases at the top: settings that several configurations have, with one meaning
    of processes   ClusterConfig, SchedulerConfig, ServerConfig, ConnectConfig
    of a run       TrainConfig: the sections of a file that shoal train reads

A name is the same in Python, in a TOML file, and, with dashes, as an option of the command line. Sizes, rules and
addresses are text here; whoever uses them reads them. A launcher passes a configuration to a child as one JSON object.
``docs/settings.md`` is made from this file.

Over 600 lines: a newcomer looks for a setting in one place.

Threads: configurations are immutable.
"""

from typing import Annotated, Any, Literal

from shoal.base.defaults import BATCH_SIZE, CLICK_BATCH_SIZE, MAX_WORKERS
from shoal.base.scalars import check_slots
from shoal.base.settings import Config, Setting

# ---- shared settings -------------------------------------------------------------------------------------------------

Count = Annotated[int, Setting(ge=1, metavar="N")]
Number = Annotated[int, Setting(ge=0, metavar="N")]
Seconds = Annotated[float, Setting(gt=0, metavar="S")]
Size = Annotated[int | str, Setting(metavar="SIZE", check="shoal.base.sizes:check_size")]  # bytes, or 8GiB
Dir = Annotated[str, Setting(metavar="DIR")]
File = Annotated[str, Setting(metavar="FILE")]
Address = Annotated[str, Setting(metavar="ADDRESS")]
Name = Annotated[str, Setting(metavar="NAME")]
Words = Annotated[tuple[str, ...], Setting(metavar="A,B,...")]

CTR = Setting(models=("ctr",), is_option=False)  # of click models alone, in files
LINEAR = Setting(models=("lr", "fm"))

Threads = Annotated[Count | None, "threads that compute (default: all cores)"]
Slots = Annotated[int, "slots of the hash space: a power of two from 2 to 16384", Setting(ge=2, le=16384, metavar="N")]
Curve = Annotated[
    Dir | None,
    "directory of the cluster's keys: accept and connect only to processes with one of them",
    Setting(variable="SHOAL_CURVE"),
]
Insecure = Annotated[bool, "accept connections from other machines without keys"]
Heartbeat = Annotated[Seconds, "seconds between heartbeats; a process is dead after five without one"]
Replicas = Annotated[
    Number,
    "copies of each slot on other servers, fewer than the servers: this many servers may die at the same time without "
    "the loss of a push; with 0 the loss of a server ends the job",
]
CopyRate = Annotated[
    Size | None,
    "bytes per second that each thread of a server sends at most to make a new copy of slots, such as 50MiB (default: "
    "32MiB)",
]
ServerThreads = Annotated[Count, "threads of a server, with one port each"]
Tier = Annotated[
    str | None,
    "keep rows that do not fit in SIZE bytes of memory of each server, such as 8GiB, in a directory of its own below "
    "DIR, on a local SSD (default: all rows are in memory)",
    Setting(metavar="DIR:SIZE", check="shoal.table.tiered:parse_tier"),
]
StorageRoots = Annotated[
    tuple[str, ...] | None,
    "directory, or URL such as s3://bucket/folder, in which workers may make the servers read and write files; "
    "repeatable (default: any if peers need keys or are of the same user, otherwise the current directory)",
    Setting(metavar="DIR"),
]
StorageOptions = Annotated[
    dict[str, Any] | None,
    "option of the file system of a URL, such as endpoint_url=http://minio:9000; repeatable",
    Setting(metavar="NAME=VALUE"),
]
AllowCode = Annotated[
    tuple[str, ...],
    "directory, or name of a module, from which the servers may import optimizers and functions of users, or the word "
    "source for functions that are sent as their source: code that they run with all their rights; repeatable "
    "(default: none)",
    Setting(metavar="DIR|MODULE|source"),
]
MetricsPort = Annotated[
    int | str | None,
    "answer requests for http://HOST:PORT/healthz, /readyz and /metrics; HOST is 127.0.0.1 unless named (default: "
    "none)",
    Setting(metavar="[HOST:]PORT", check="shoal.cluster.protocol.health:parse_listen"),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    "format of log events on standard error, one a line; with json all messages are events (default: text)",
    Setting(variable="SHOAL_LOG_FORMAT"),
]

COLUMN_FORMATS = ("csv", "tsv", "parquet", "json")

Format = Annotated[
    Literal["libsvm", "libffm", "vw", "criteo", "csv", "tsv", "parquet", "json"] | None,
    "format of the files, json of the messages of a topic (default: detected from the first line and the name)",
]
BatchSize = Annotated[Count, "examples per batch"]
OnError = Annotated[Literal["raise", "skip"], "fail on a malformed line, or skip it"]
ReaderThreads = Annotated[
    Count | None, "threads that parse the files (default: one for every four cores, at most eight)"
]

Servers = Annotated[Count, "number of servers", Setting(variable="VC_SERVER_NUM")]
Workers = Annotated[Count, "number of workers of a job, unless the job states it", Setting(variable="VC_WORKER_NUM")]
Bind = Annotated[
    Address, "tcp://HOST:PORT to listen on; port *: any free port; or ipc:///PATH, a socket of this machine"
]
SchedulerAddress = Annotated[
    Address, "tcp://HOST:PORT or ipc:///PATH of the scheduler", Setting(variable="SHOAL_SCHEDULER")
]

# ---- processes -------------------------------------------------------------------------------------------------------


class ClusterConfig(Config, frozen=True, kw_only=True):
    """What the scheduler of a cluster decides for all."""

    servers: Servers = 1
    workers: Workers = 1
    slots: Slots = 1024
    heartbeat: Heartbeat = 2.0
    replicas: Replicas = 0
    copy_rate: CopyRate = None
    replacement_seconds: Annotated[
        float,
        "seconds that the workers of a job wait for the replacement of a worker that died; with 0 they continue "
        "without it",
        Setting(ge=0, metavar="S"),
    ] = 0.0
    grace: Annotated[
        Seconds | None,
        "seconds that servers and workers continue while the scheduler does not answer (default: 600 with a journal, "
        "else 60)",
    ] = None
    journal: Annotated[
        Dir | None,
        "directory in which the scheduler stores its state; if it is started again with the same settings, it "
        "continues from there (default: none)",
    ] = None


class SchedulerConfig(ClusterConfig, frozen=True, kw_only=True):
    """The process of a scheduler."""

    bind: Bind
    curve: Curve = None
    insecure: Insecure = False
    metrics_port: MetricsPort = None


def check_cluster(config: ClusterConfig) -> None:
    """Raise a ValueError for settings that do not go together, or that no cluster can have."""
    if config.workers > MAX_WORKERS:
        raise ValueError(f"a job has {MAX_WORKERS} workers at most, got {config.workers}")
    check_slots(config.slots)
    if not config.replicas < config.servers:
        raise ValueError(
            f"replicas must be a number from 0 to {config.servers - 1}, since each copy is on another of the "
            f"{config.servers} servers, got {config.replicas}: start more servers, or keep fewer copies"
        )
    if not config.replacement_seconds < 1e9:
        raise ValueError(
            f"replacement_seconds must be a number of seconds, 0 or more, got {config.replacement_seconds}"
        )


class ServerSettings(Config, frozen=True, kw_only=True):
    """What a server decides for itself."""

    bind: Annotated[
        Address | None,
        "tcp://HOST:PORT to listen on, or ipc:///PATH (default: any free port, or a socket beside the scheduler's)",
    ] = None
    advertise: Annotated[
        str | None, "name of this machine for the scheduler and the workers", Setting(metavar="HOST")
    ] = None
    threads: ServerThreads = 1
    memory: Annotated[
        Size | None,
        "memory budget of the rows, such as 8GiB, an equal share for each slot that is served (default: unlimited)",
    ] = None
    slot_memory: Annotated[
        Size | None,
        "memory budget of each slot, in place of memory: the rows that are kept then do not depend on the number of "
        "servers",
    ] = None
    tier: Tier = None
    rank: Annotated[
        Number | None, "rank among the servers (default: any free rank)", Setting(variable="VC_TASK_INDEX")
    ] = None
    node: Annotated[
        Name | None,
        "name of the machine: copies of a slot are on servers of different nodes where possible (default: the host "
        "name)",
        Setting(variable="SHOAL_NODE"),
    ] = None
    spare: Annotated[
        bool,
        "join a running cluster without serving slots: when another server dies, missing copies are made on this one; "
        "the next rebalance moves slots to it",
    ] = False
    timeout: Annotated[Seconds, "seconds to wait for the other processes"] = 300.0
    grace: Annotated[
        Seconds | None, "seconds to wait for a scheduler that does not answer (default: the grace of the scheduler)"
    ] = None
    drain_on_sigterm: Annotated[
        Seconds | None,
        "after SIGTERM move all slots to other servers first, for S seconds at most (default: end at once)",
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


class ServerConfig(ServerSettings, frozen=True, kw_only=True):
    """The process of a server."""

    scheduler: SchedulerAddress


class ConnectConfig(Config, frozen=True, kw_only=True):
    """The connection of a worker to a cluster. Each worker runs this command and trains on its split of the files."""

    cluster: Annotated[
        Address | None,
        "address of the scheduler, tcp://HOST:PORT or ipc:///PATH; its servers hold the tables (without ADDRESS: from "
        "the environment)",
        Setting(const=""),
    ] = None
    consistency: Annotated[
        str,
        "bsp: synchronous steps, bsp:mean: with the mean of the workers' gradients; ssp:N: workers at most N batches "
        "apart; asp: asynchronous",
        Setting(metavar="RULE", check="shoal.consistency:parse_consistency"),
    ] = "bsp"
    workers: Annotated[
        int | str | None,
        "number of workers, or the least and the greatest one (default: from the environment)",
        Setting(ge=1, metavar="N[:M]", check="shoal.cluster.protocol.environment:parse_workers"),
    ] = None
    job: Annotated[
        Name | None,
        "join the job of this name, which runs on the cluster at the same time as others; jobs whose tables have one "
        "name share their weights",
    ] = None
    curve: Curve = None
    tracing: Annotated[
        bool,
        "trace calls with OpenTelemetry, exported as its environment variables say",
        Setting(variable="SHOAL_TRACING"),
    ] = False
    shared_storage: Annotated[
        bool,
        "the servers reach the files of this machine, by the same paths; otherwise the worker reads and writes all "
        "rows itself",
        Setting(
            negated="the servers do not reach the files of this machine by the same paths: the worker reads and writes "
            "all rows itself"
        ),
    ] = True
    cache: Annotated[
        str | None,
        "keep up to ROWS rows of each table at the worker, make the optimizer's steps in them, and hold back what "
        "changes for up to STALENESS clocks; with consistency ssp:N or asp. :sums sends sums of gradients instead: "
        "fewer bytes, but a model learns less",
        Setting(metavar="ROWS:STALENESS[:sums]", check="shoal.cluster.worker.cache:parse_cache"),
    ] = None
    filters: Annotated[
        str | None,
        "compress messages; exact: key_caching, zeros; unbiased: gradients=bfloat16 or float16, weights=bfloat16 or "
        "float16, threshold=T",
        Setting(metavar="NAME[=VALUE],...", check="shoal.cluster.worker.filters:parse_filters"),
    ] = None


# ---- a run of shoal train --------------------------------------------------------------------------------------------


class ReaderConfig(Config, frozen=True, kw_only=True):
    """Examples: files, columns, and how they are read."""

    data: Annotated[
        tuple[str, ...],
        "examples: files, patterns, URLs, or -; to train also kafka://HOST:PORT/TOPIC, or directories with --follow",
        Setting(metavar="FILE", several=True),
    ] = ()
    format: Format = None
    label: Annotated[Name | None, "column of the labels"] = None
    categorical: Annotated[Words, "columns of text (default: all other columns)"] = ()
    numeric: Annotated[Words, "columns of numbers (default: none)"] = ()
    ignore: Annotated[Words, "columns that are not features (default: none)"] = ()
    weight: Annotated[Name | None, "column of the example weights"] = None
    positive: Annotated[
        str | None, "text of the positive label (default: labels are numbers)", Setting(metavar="TEXT")
    ] = None
    sep: Annotated[
        str | None, "separator of csv: ';', tab (default: ,)", Setting(metavar="C", check="shoal.config:separator")
    ] = None
    columns: Annotated[Words, "names of the columns of files without a header"] = ()
    na_values: Annotated[Words, "additional texts that mark a missing value"] = ()
    interactions: Annotated[
        tuple[str, ...],
        "add the pairs of these fields as features: columns, namespaces of vw, numbers of libffm, I1 to C26 of "
        "criteo; repeatable",
        Setting(metavar="A,B"),
    ] = ()
    on_error: OnError = "raise"
    reader_threads: ReaderThreads = None


class DataConfig(ReaderConfig, frozen=True, kw_only=True):
    """The data of a run: files, columns, and how they are read."""

    follow: Annotated[bool, "read the files of the directories of --data as they appear, and do not end"] = False
    max_delay: Annotated[
        Seconds | None,
        "seconds after which an incomplete batch of a stream is learned from (default: 0.5 of topics and directories, "
        "else never)",
    ] = None
    valid: Annotated[
        tuple[str, ...], "validation examples, evaluated after every pass", Setting(metavar="FILE", several=True)
    ] = ()
    without: Annotated[
        tuple[str, ...],
        "leave out the examples that have this feature, such as user=u17; repeatable",
        Setting(metavar="FEATURE"),
    ] = ()
    without_examples: Annotated[
        File | None,
        "leave out the examples of the lines and files that this file names, one on each line: FILE:LINE, "
        "FILE:FIRST-LAST, or a name or pattern of files",
    ] = None
    fields: Annotated[
        tuple[str, ...],
        "fields of the model, in order (default: all categorical and numeric columns that are not dense, or the 39 "
        "columns of criteo)",
        CTR,
    ] = ()
    dense: Annotated[tuple[str, ...], "numeric columns that are inputs of the dense part", CTR] = ()
    log: Annotated[bool, "transform dense columns to sign(x) ln(1 + |x|)", CTR] = False
    history: Annotated[str | None, "column of lists of items, for din", CTR] = None
    item: Annotated[str | None, "field whose rows the items of the history share", CTR] = None
    list_separator: Annotated[str, "separator of the items of a history in csv and tsv", CTR] = "|"
    group: Annotated[str | None, "field that groups examples for GAUC, such as the user", CTR] = None
    labels: Annotated[
        dict[str, Any] | None,
        "labels of several tasks by name: a column, or its column, loss, weight and mask; the first is that of the "
        "metrics of a fit",
        CTR,
    ] = None


class Feature(Config, frozen=True, kw_only=True):
    """One feature of a click model."""

    name: Annotated[Name, "name of the feature"]
    type: Annotated[
        Literal["category", "list", "sequence", "number", "bucket", "cross", "vector"],
        "category: one text; list: texts without an order, pooled; sequence: texts in order, with side columns; "
        "number; bucket: the interval of a number; cross: a combination of others; vector: numbers of fixed size",
    ] = "category"
    column: Annotated[Name | None, "column of the data (default: that of the feature's name)"] = None
    share: Annotated[Name | None, "feature whose rows it has: the same text is the same row"] = None
    dim: Annotated[Count | None, "numbers of a row, if not those of the model"] = None
    pooling: Annotated[
        Literal["sum", "mean", "max", "sqrtn", "attention"] | None,
        "how the rows of a list become one, and those of a sequence in models that do not read it in order (default: "
        "mean)",
    ] = None
    weights: Annotated[
        Name | None,
        "column of numbers, one for each item: factors of its rows (default: the values of the items, which are 1 but "
        "in vw and libffm)",
    ] = None
    side: Annotated[
        tuple[str, ...] | dict[str, Any],
        "columns of texts beside a sequence, one for each item; as a table with the features whose rows they share",
    ] = ()
    side_numeric: Annotated[tuple[str, ...], "columns of numbers beside a sequence, one for each item"] = ()
    max_len: Annotated[Count | None, "items of a list or sequence that are kept (default: all)"] = None
    keep: Annotated[Literal["last", "first"], "which items max_len keeps"] = "last"
    log: Annotated[bool, "transform numbers to sign(x) ln(1 + |x|)"] = False
    embed: Annotated[bool, "a number: a row that is multiplied by it, in place of an input of the dense part"] = False
    edges: Annotated[tuple[float, ...], "bucket: where each interval but the first begins, ascending"] = ()
    quantiles: Annotated[
        Count | None, "bucket: number of intervals of about as many examples, found in the first of the data"
    ] = None
    of: Annotated[tuple[str, ...], "cross: the features that are combined"] = ()
    size: Annotated[Count | None, "vector: its numbers"] = None


class Task(Config, frozen=True, kw_only=True):
    """One of several labels of a click model."""

    column: Annotated[Name, "column of the label; where it is missing the example does not count for the task"]
    loss: Annotated[str | dict[str, Any], "bce (a label of 0 or 1), mse or poisson (a number)"] = "bce"
    weight: Annotated[float, "factor of its loss", Setting(ge=0)] = 1.0
    mask: Annotated[Name | None, "task with labels of 0 and 1: only examples with its label 1 count"] = None


class FitConfig(Config, frozen=True, kw_only=True):
    """The training: passes, order of the examples, early stopping."""

    epochs: Annotated[Count, "maximum number of passes"] = 1
    batch_size: Annotated[
        Count | None, f"examples per batch (default: {BATCH_SIZE}, of click models {CLICK_BATCH_SIZE})"
    ] = None
    shuffle: Annotated[
        bool | int,
        "shuffle within a buffer of K batches in memory, 16 if it is true",
        Setting(ge=0, metavar="K", const=True),
    ] = False
    negative_rate: Annotated[
        float, "share of the negative examples to train on, with the inverse weight", Setting(metavar="R")
    ] = 1.0
    warm_up: Annotated[
        bool,
        "whether the first batches are split, which suits an untrained model",
        LINEAR,
        Setting(negated="use batches as read; by default the first ones are split, which suits an untrained model"),
    ] = True
    patience: Annotated[
        Count | None,
        "stop after N passes in a row without an improvement on the validation examples, and keep the best",
    ] = None
    min_delta: Annotated[float, "smallest change that counts as an improvement", Setting(ge=0, metavar="D")] = 0.0
    metric: Annotated[
        Literal["logloss", "auc", "gauc", "accuracy"],
        "metric that patience and plateau compare; gauc is of click models with a group, accuracy of several classes",
    ] = "logloss"
    calibrate: Annotated[
        Literal["isotonic", "platt"] | None,
        "calibrate the probabilities on the validation examples after training, and save the calibration with the "
        "model",
        LINEAR,
    ] = None
    seed: Annotated[
        int,
        "seed of initial values, shuffling, sampling and stochastic rounding",
        Setting(ge=0, le=(1 << 63) - 1, metavar="N"),
    ] = 0
    optimizer: Annotated[
        dict[str, Any] | None,
        "optimizer of the dense part and its settings: a class of torch.optim, or of shoal where dense is servers "
        '(default: { name = "Adam", lr = 0.001 })',
        CTR,
    ] = None
    dense: Annotated[
        Literal["allreduce", "servers"],
        "how several workers share the dense part: allreduce (each worker has a copy, gradients are summed) or "
        "servers (the servers hold it)",
        CTR,
    ] = "allreduce"
    clip_norm: Annotated[
        float | None,
        "bound of the norm of the gradients of all dense parameters together (default: none)",
        CTR,
        Setting(gt=0),
    ] = None
    schedule: Annotated[
        dict[str, Any] | None,
        "schedule of the learning rate of the dense part, counted in its steps, such as "
        '{ name = "Warmup", warmup = 1000 } (default: none)',
        CTR,
    ] = None
    plateau: Annotated[
        dict[str, Any] | None,
        "multiply the learning rates of the dense part and of the tables by factor after more than patience passes "
        "in a row without an improvement of metric on the validation examples, down to min_rate; { } is "
        "{ factor = 0.1, patience = 0, min_rate = 1e-6 } (default: none)",
        CTR,
    ] = None
    ema: Annotated[
        float | None,
        "decay of an exponential moving average of the dense parameters, which predicts and is saved, such as 0.999 "
        "(default: none)",
        CTR,
        Setting(gt=0, lt=1),
    ] = None
    loss: Annotated[
        str | dict[str, Any] | None,
        'what is minimized: bce, { name = "bce", pos_weight = 3 }, { name = "focal", gamma = 2, alpha = 0.25 }, or a '
        "function MODULE:FUNCTION (default: bce)",
        CTR,
    ] = None
    staleness: Annotated[int, "number of batches by which rows are pulled ahead", CTR, Setting(ge=0)] = 0
    precision: Annotated[
        Literal["float32", "bfloat16"],
        "precision of matrix products in training; rows, dense parameters and predictions stay in float32",
        CTR,
    ] = "float32"


class TableSettings(Config, frozen=True, kw_only=True):
    """The settings of one table of a click model; default: those of all tables."""

    optimizer: Annotated[
        dict[str, Any] | None, "update rule: its name and settings (default: Adagrad(lr=0.02))", CTR
    ] = None
    init: Annotated[
        dict[str, Any] | None, "initial rows: Zeros, Constant, Uniform or Normal (default: Normal(0.01))", CTR
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, "storage type of rows (default: float32)", CTR
    ] = None
    frozen: Annotated[bool, "keep the rows as they are, while the rest of the model learns", CTR] = False
    admit: Annotated[
        str | None,
        "admission: create the row of a key after N occurrences (count:N, bloom:N:CAPACITY), or at each with "
        "probability P (probability:P)",
        Setting(metavar="RULE", check="shoal.lifecycle:parse_admission"),
    ] = None
    expire: Annotated[
        tuple[str, ...] | None,
        "expiry: after each pass (of a stream without an end, before each checkpoint) remove the rows not used for C "
        "batches (ttl:C), beyond the N best (rows:N), with a norm below F (norm:F), or with a decayed count below F "
        "(score:DECAY:F); repeatable",
        Setting(metavar="RULE", check="shoal.lifecycle:parse_expiry"),
    ] = None


class TableConfig(TableSettings, frozen=True, kw_only=True):
    """The tables of the model."""

    rules: Annotated[
        dict[str, Any] | None,
        "settings of one table by its name: linear, embedding or, with per_field, embedding-3",
        CTR,
    ] = None

    linear_optimizer: Annotated[dict[str, Any] | None, "update rule of the linear weights, if different", CTR] = None
    table: Annotated[
        Name | None, "name of the table, by which a cluster's readers find it (default: lr, fm, or multiclass)", LINEAR
    ] = None
    slots: Slots = 1024
    expected_keys: Annotated[
        int | None,
        "make room for the rows of N different features at the beginning, such as 5e6: new rows take half of the time",
        LINEAR,
        Setting(ge=0, le=10**15, metavar="N"),
    ] = None


class OutputConfig(Config, frozen=True, kw_only=True):
    """The output: the directory of the model and its checkpoints."""

    output: Annotated[Dir | None, "directory of the model, a path or s3://...; created if it does not exist"] = None
    checkpoint_every: Annotated[Count | None, "write a checkpoint after every N batches and after every pass"] = None
    keep_checkpoints: Annotated[
        bool, "keep the checkpoints of the fit, so that explain, bisect and forget can make parts of it again"
    ] = False
    record: Annotated[
        Dir | None,
        "under SSP and ASP: write the order of all pulls and pushes, from which replay makes the same bits again",
    ] = None
    names: Annotated[bool, "save the text of each feature with the model; report and inspect show it"] = False


class LoggingConfig(Config, frozen=True, kw_only=True):
    """Experiment tracking."""

    tensorboard: Annotated[Dir | None, "write TensorBoard event files into DIR/OUTPUT-1, ..."] = None
    mlflow: Annotated[
        str | None, "write an MLflow run: tracking URI, or a folder for a database", Setting(metavar="URI")
    ] = None
    experiment: Annotated[Name, "MLflow experiment"] = "shoal"
    register: Annotated[Name | None, "make the model the next version of this registered model of MLflow"] = None
    log_model: Annotated[
        bool,
        "whether the model and its report are stored as artifacts of the MLflow run",
        Setting(negated="do not store the model and its report as artifacts of the MLflow run"),
    ] = True
    log_every: Annotated[Count, "batches between two log entries"] = 100


class FTRLConfig(Config, frozen=True, kw_only=True):
    """FTRL-Proximal of linear weights."""

    alpha: Annotated[float, "learning rate"] = 0.1
    beta: Annotated[float, "smoothing of the learning rate: larger means smaller first steps"] = 1.0
    l1: Annotated[float, "L1 penalty"] = 0.0
    l2: Annotated[float, "L2 penalty"] = 0.0
    normalized: Annotated[
        bool | None,
        "divide each value by the root mean square of its feature, which is learned and saved with the model "
        "(default: if there are numeric columns and no filters; never of dbpg)",
    ] = None


class RegressionConfig(FTRLConfig, frozen=True, kw_only=True):
    """A logistic regression, of two classes or several.

    dbpg holds the examples in memory and minimizes the sum of their losses plus l1 times the sum of the absolute
    weights; alpha, beta, l2, epochs, shuffle and patience do not apply to it.
    """

    l1: Annotated[float | None, "L1 penalty (default: 0, of dbpg 1)"] = None  # type: ignore[assignment]
    classes: Annotated[
        int, "number of classes, whose numbers 0 to K - 1 are the labels", Setting(ge=2, metavar="K")
    ] = 2
    multi_class: Annotated[
        Literal["multinomial", "ovr"] | None,
        "loss of several classes: cross-entropy of softmax (multinomial), or a binary regression for each class "
        "against the others (ovr) (default: multinomial)",
    ] = None
    solver: Annotated[Literal["online", "dbpg"], "online (FTRL) or batch (dbpg) training"] = "online"
    blocks: Annotated[Count | None, "dbpg: number of feature blocks (default: 128)"] = None
    delay: Annotated[Number | None, "dbpg: number of blocks by which a gradient may lag (default: 0)"] = None
    slack: Annotated[
        float | None, "dbpg: slack of the KKT filter, 0 to 1; negative: no filter (default: 0.1)", Setting(metavar="S")
    ] = None
    tolerance: Annotated[
        float | None,
        "dbpg: stop when the KKT violation has fallen to this share of the first (default: 0.001)",
        Setting(metavar="T"),
    ] = None
    passes: Annotated[Count | None, "dbpg: maximum number of passes over all blocks (default: 100)"] = None


class FactorizationConfig(FTRLConfig, frozen=True, kw_only=True):
    """A factorization machine, whose factors are trained by Adagrad."""

    dim: Annotated[int, "factors per key", Setting(ge=1, metavar="D")] = 8
    factors_lr: Annotated[float, "learning rate of the factors", Setting(metavar="LR")] = 0.02
    factors_n0: Annotated[float, "initial sum of squares: larger means smaller first steps", Setting(metavar="N0")] = (
        1.0
    )
    factors_l2: Annotated[float, "L2 penalty of the factors", Setting(metavar="L2")] = 0.0
    init_std: Annotated[float, "standard deviation of the initial factors", Setting(metavar="S")] = 0.01


class TrainConfig(Config, frozen=True, kw_only=True):
    """A run of shoal train: what --config reads, --print-config prints and the directory of a model keeps.

    One file may describe all kinds of models: each reads its own section, ``[lr]``, ``[fm]`` or ``[model]``, and the
    shared ones.
    """

    threads: Threads = None
    data: DataConfig = DataConfig()
    lr: Annotated[RegressionConfig, "a logistic regression", Setting(models=("lr",))] = RegressionConfig()
    fm: Annotated[FactorizationConfig, "a factorization machine", Setting(models=("fm",))] = FactorizationConfig()
    features: Annotated[
        tuple[dict[str, Any], ...], "the features of a click model: a section [[features]] for each", CTR
    ] = ()
    model: Annotated[dict[str, Any] | None, "the architecture of a click model: its name and sizes", CTR] = None
    train: FitConfig = FitConfig()
    tables: TableConfig = TableConfig()
    output: OutputConfig = OutputConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ConnectConfig = ConnectConfig()


def separator(text: str) -> str:
    """Read one character; a tab also by its name or escape."""
    character = {"tab": "\t", r"\t": "\t"}.get(text, text)
    if len(character) != 1:
        raise ValueError(f"{text!r} is not a separator: pass one character, or tab")
    return character
