"""Every setting of shoal, written once: its name, type, default, bounds and one sentence.

    shared         the aliases at the top: settings that several configurations have, with one meaning
    of processes   ClusterConfig, SchedulerConfig, ServerConfig, ConnectConfig
    of a run       TrainConfig: the sections of a file that shoal train reads

A name is the same in Python, in a TOML file, and, with dashes, as an option of the command line. Sizes, rules and
addresses are text here; whoever uses them reads them. A launcher passes a configuration to a child as one JSON object
(`Config.to_json`, `Config.from_json`). ``docs/settings.md`` is made from this file.

Over 600 lines: a newcomer looks for a setting in one place.

Threads: configurations are immutable.
"""

from typing import Annotated, Any, Literal

from shoal.base.defaults import BATCH_SIZE
from shoal.base.settings import Config, Setting

# ---- shared settings -------------------------------------------------------------------------------------------------

Size = int | str  # bytes, as a number or as 8GiB
_SIZE = "shoal.base.sizes:check_size"

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

PLAIN_FORMATS = ("libsvm", "libffm", "vw", "criteo")  # formats without options for columns
COLUMN_FORMATS = ("csv", "tsv", "parquet")

Format = Annotated[
    Literal["libsvm", "libffm", "vw", "criteo", "csv", "tsv", "parquet"] | None,
    Setting("format of the files", unset="detected from the first line and the name"),
]
BatchSize = Annotated[int, Setting("examples per batch", ge=1, metavar="N")]
OnError = Annotated[Literal["raise", "skip"], Setting("fail on a malformed line, or skip it")]
ReaderThreads = Annotated[
    int,
    Setting("threads that parse the files; one is the fastest unless there are many interactions", ge=1, metavar="N"),
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


# ---- a run of shoal train --------------------------------------------------------------------------------------------

_CLICK = ("ctr",)
_LINEAR = ("lr", "fm")
_REGRESSION = ("lr",)
_FACTORS = ("fm",)


class ReaderConfig(Config, frozen=True, kw_only=True):
    """Examples: files, columns, and how they are read."""

    data: Annotated[
        tuple[str, ...], Setting("examples: files, patterns, URLs, or -", metavar="FILE", several=True)
    ] = ()
    format: Format = None
    label: Annotated[str | None, Setting("column of the labels", metavar="NAME")] = None
    categorical: Annotated[
        tuple[str, ...], Setting("columns of text", metavar="A,B,...", unset="all other columns")
    ] = ()
    numeric: Annotated[tuple[str, ...], Setting("columns of numbers", metavar="A,B,...", unset="none")] = ()
    ignore: Annotated[tuple[str, ...], Setting("columns that are not features", metavar="A,B,...", unset="none")] = ()
    weight: Annotated[str | None, Setting("column of the example weights", metavar="NAME")] = None
    positive: Annotated[
        str | None, Setting("text of the positive label", metavar="TEXT", unset="labels are numbers")
    ] = None
    sep: Annotated[
        str | None,
        Setting("separator of csv: ';', tab", metavar="C", unset=",", check="shoal.config:separator"),
    ] = None
    columns: Annotated[
        tuple[str, ...], Setting("names of the columns of files without a header", metavar="A,B,...")
    ] = ()
    na_values: Annotated[tuple[str, ...], Setting("additional texts that mark a missing value", metavar="A,B,...")] = ()
    interactions: Annotated[
        tuple[str, ...],
        Setting(
            "add the pairs of these fields as features: columns, namespaces of vw, numbers of libffm, I1 to C26 of "
            "criteo; repeatable",
            metavar="A,B",
        ),
    ] = ()
    on_error: OnError = "raise"
    reader_threads: ReaderThreads = 1


class DataConfig(ReaderConfig, frozen=True, kw_only=True):
    """The data of a run: files, columns, how they are read, and the fields of a click model."""

    valid: Annotated[
        tuple[str, ...], Setting("validation examples, evaluated after every pass", metavar="FILE", several=True)
    ] = ()
    fields: Annotated[
        tuple[str, ...],
        Setting(
            "fields of the model, in order",
            unset="all categorical and numeric columns that are not dense, or the 39 columns of criteo",
            models=_CLICK,
            is_option=False,
        ),
    ] = ()
    dense: Annotated[
        tuple[str, ...],
        Setting("numeric columns that are inputs of the dense part", models=_CLICK, is_option=False),
    ] = ()
    log: Annotated[bool, Setting("transform dense columns to sign(x) ln(1 + |x|)", models=_CLICK, is_option=False)] = (
        False
    )
    history: Annotated[str | None, Setting("column of lists of items, for din", models=_CLICK, is_option=False)] = None
    item: Annotated[
        str | None,
        Setting("field whose rows the items of the history share", models=_CLICK, is_option=False),
    ] = None
    list_separator: Annotated[
        str, Setting("separator of the items of a history in csv and tsv", models=_CLICK, is_option=False)
    ] = "|"
    group: Annotated[
        str | None,
        Setting("field that groups examples for GAUC, such as the user", models=_CLICK, is_option=False),
    ] = None


class FitConfig(Config, frozen=True, kw_only=True):
    """The training: passes, order of the examples, early stopping."""

    epochs: Annotated[int, Setting("maximum number of passes", ge=1, metavar="N")] = 1
    batch_size: Annotated[
        int | None,
        Setting("examples per batch", ge=1, metavar="N", unset=f"{BATCH_SIZE}, of click models 4096"),
    ] = None
    shuffle: Annotated[
        bool | int,
        Setting("shuffle within a buffer of K batches in memory, 16 if it is true", ge=0, metavar="K", const=True),
    ] = False
    negative_rate: Annotated[
        float, Setting("share of the negative examples to train on, with the inverse weight", metavar="R")
    ] = 1.0
    warm_up: Annotated[
        bool,
        Setting(
            "whether the first batches are split, which suits an untrained model",
            negated="use batches as read; by default the first ones are split, which suits an untrained model",
            models=_LINEAR,
        ),
    ] = True
    patience: Annotated[
        int | None,
        Setting(
            "stop after N passes in a row without an improvement on the validation examples, and keep the best",
            ge=1,
            metavar="N",
        ),
    ] = None
    min_delta: Annotated[float, Setting("smallest change that counts as an improvement", ge=0, metavar="D")] = 0.0
    metric: Annotated[
        Literal["logloss", "auc", "accuracy"],
        Setting("metric that patience compares; accuracy is of several classes"),
    ] = "logloss"
    calibrate: Annotated[
        Literal["isotonic", "platt"] | None,
        Setting(
            "calibrate the probabilities on the validation examples after training, and save the calibration with the "
            "model",
            models=_LINEAR,
        ),
    ] = None
    seed: Annotated[
        int,
        Setting(
            "seed of initial values, shuffling, sampling and stochastic rounding", ge=0, le=(1 << 63) - 1, metavar="N"
        ),
    ] = 0
    optimizer: Annotated[
        dict[str, Any] | None,
        Setting(
            "optimizer of the dense part and its settings: a class of torch.optim, or of shoal where dense is servers",
            unset='{ name = "Adam", lr = 0.001 }',
            models=_CLICK,
            is_option=False,
        ),
    ] = None
    dense: Annotated[
        Literal["allreduce", "servers"],
        Setting(
            "how several workers share the dense part: allreduce (each worker has a copy, gradients are summed) or "
            "servers (the servers hold it)",
            models=_CLICK,
            is_option=False,
        ),
    ] = "allreduce"
    staleness: Annotated[
        int,
        Setting("number of batches by which rows are pulled ahead", ge=0, models=_CLICK, is_option=False),
    ] = 0
    precision: Annotated[
        Literal["float32", "bfloat16"],
        Setting(
            "precision of matrix products in training; rows, dense parameters and predictions stay in float32",
            models=_CLICK,
            is_option=False,
        ),
    ] = "float32"


class TableSettings(Config, frozen=True, kw_only=True):
    """The settings of one table of a click model; default: those of all tables."""

    optimizer: Annotated[
        dict[str, Any] | None,
        Setting("update rule: its name and settings", unset="Adagrad(lr=0.02)", models=_CLICK, is_option=False),
    ] = None
    init: Annotated[
        dict[str, Any] | None,
        Setting(
            "initial rows: Zeros, Constant, Uniform or Normal", unset="Normal(0.01)", models=_CLICK, is_option=False
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        Setting("storage type of rows", unset="float32", models=_CLICK, is_option=False),
    ] = None
    admit: Annotated[
        str | None,
        Setting(
            "admission: create the row of a key after N occurrences (count:N, bloom:N:CAPACITY), or at each with "
            "probability P (probability:P)",
            metavar="RULE",
            check="shoal.lifecycle:parse_admission",
        ),
    ] = None
    expire: Annotated[
        tuple[str, ...] | None,
        Setting(
            "expiry: after each pass remove the rows not used for C batches (ttl:C), beyond the N best (rows:N), with "
            "a norm below F (norm:F), or with a decayed count below F (score:DECAY:F); repeatable",
            metavar="RULE",
            check="shoal.lifecycle:parse_expiry",
        ),
    ] = None


class TableConfig(TableSettings, frozen=True, kw_only=True):
    """The tables of the model. ``[tables.NAME]`` overrides the first five for one table of a click model."""

    linear_optimizer: Annotated[
        dict[str, Any] | None,
        Setting("update rule of the linear weights, if different", models=_CLICK, is_option=False),
    ] = None
    table: Annotated[
        str | None,
        Setting(
            "name of the table, by which a cluster's readers find it",
            metavar="NAME",
            unset="lr, fm, or multiclass",
            models=_LINEAR,
        ),
    ] = None
    slots: Slots = 1024
    expected_keys: Annotated[
        int | None,
        Setting(
            "make room for the rows of N different features at the beginning, such as 5e6: new rows take half of the "
            "time",
            ge=0,
            le=1e15,
            metavar="N",
            models=_LINEAR,
        ),
    ] = None


class OutputConfig(Config, frozen=True, kw_only=True):
    """The output: the directory of the model and its checkpoints."""

    output: Annotated[
        str | None,
        Setting("directory of the model, a path or s3://...; created if it does not exist", metavar="DIR"),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Setting("write a checkpoint after every N batches and after every pass", ge=1, metavar="N"),
    ] = None
    names: Annotated[
        bool,
        Setting("save the text of each feature with the model; report and inspect show it", models=_LINEAR),
    ] = False


class LoggingConfig(Config, frozen=True, kw_only=True):
    """Experiment tracking."""

    tensorboard: Annotated[
        str | None, Setting("write TensorBoard event files into DIR/OUTPUT-1, ...", metavar="DIR")
    ] = None
    mlflow: Annotated[
        str | None, Setting("write an MLflow run: tracking URI, or a folder for a database", metavar="URI")
    ] = None
    experiment: Annotated[str | None, Setting("MLflow experiment", metavar="NAME", unset="shoal")] = None
    register: Annotated[
        str | None,
        Setting("make the model the next version of this registered model of MLflow", metavar="NAME"),
    ] = None
    log_model: Annotated[
        bool,
        Setting(
            "whether the model and its report are stored as artifacts of the MLflow run",
            negated="do not store the model and its report as artifacts of the MLflow run",
        ),
    ] = True
    log_every: Annotated[int | None, Setting("batches between two log entries", ge=1, metavar="N", unset="100")] = None


class FTRLConfig(Config, frozen=True, kw_only=True):
    """FTRL-Proximal of linear weights."""

    alpha: Annotated[float, Setting("learning rate")] = 0.1
    beta: Annotated[float, Setting("smoothing of the learning rate: larger means smaller first steps")] = 1.0
    l1: Annotated[float, Setting("L1 penalty")] = 0.0
    l2: Annotated[float, Setting("L2 penalty")] = 0.0
    normalized: Annotated[
        bool | None,
        Setting(
            "divide each value by the root mean square of its feature, which is learned and saved with the model",
            unset="if there are numeric columns",
        ),
    ] = None


class RegressionConfig(FTRLConfig, frozen=True, kw_only=True):
    """A logistic regression, of two classes or several.

    dbpg holds the examples in memory and minimizes the sum of their losses plus l1 times the sum of the absolute
    weights; alpha, beta, l2, epochs, shuffle and patience do not apply to it.
    """

    classes: Annotated[
        int | None, Setting("number of classes, whose numbers 0 to K - 1 are the labels", ge=3, metavar="K", unset="2")
    ] = None
    multi_class: Annotated[
        Literal["multinomial", "ovr"] | None,
        Setting(
            "loss of several classes: cross-entropy of softmax (multinomial), or a binary regression for each class "
            "against the others (ovr)",
            unset="multinomial",
        ),
    ] = None
    solver: Annotated[Literal["online", "dbpg"], Setting("online (FTRL) or batch (dbpg) training")] = "online"
    blocks: Annotated[int | None, Setting("dbpg: number of feature blocks", ge=1, metavar="N", unset="128")] = None
    delay: Annotated[
        int | None,
        Setting("dbpg: number of blocks by which a gradient may lag", ge=0, metavar="N", unset="0"),
    ] = None
    slack: Annotated[
        float | None,
        Setting("dbpg: slack of the KKT filter, 0 to 1; negative: no filter", metavar="S", unset="0.1"),
    ] = None
    tolerance: Annotated[
        float | None,
        Setting("dbpg: stop when the KKT violation has fallen to this share of the first", metavar="T", unset="0.001"),
    ] = None
    passes: Annotated[
        int | None,
        Setting("dbpg: maximum number of passes over all blocks", ge=1, metavar="N", unset="100"),
    ] = None


class FactorizationConfig(FTRLConfig, frozen=True, kw_only=True):
    """A factorization machine, whose factors are trained by Adagrad."""

    dim: Annotated[int, Setting("factors per key", ge=1, metavar="D")] = 8
    factors_lr: Annotated[float, Setting("learning rate of the factors", metavar="LR")] = 0.02
    factors_n0: Annotated[float, Setting("initial sum of squares: larger means smaller first steps", metavar="N0")] = (
        1.0
    )
    factors_l2: Annotated[float, Setting("L2 penalty of the factors", metavar="L2")] = 0.0
    init_std: Annotated[float, Setting("standard deviation of the initial factors", metavar="S")] = 0.01


class TrainConfig(Config, frozen=True, kw_only=True):
    """A run of shoal train: what --config reads, --print-config prints and the directory of a model keeps.

    One file may describe all kinds of models: each reads its own section, ``[lr]``, ``[fm]`` or ``[model]``, and the
    shared ones.
    """

    threads: Threads = None
    data: DataConfig = DataConfig()
    lr: Annotated[RegressionConfig, Setting("a logistic regression", models=_REGRESSION)] = RegressionConfig()
    fm: Annotated[FactorizationConfig, Setting("a factorization machine", models=_FACTORS)] = FactorizationConfig()
    model: Annotated[
        dict[str, Any] | None,
        Setting("the architecture of a click model: its name and sizes", models=_CLICK, is_option=False),
    ] = None
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
