# The engine. Private: use the functions and classes of shoal, which check their arguments.

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, overload

import numpy as np
import numpy.typing as npt

class ShoalError(Exception): ...
class WrongProcessError(ShoalError): ...
class TransportError(ShoalError): ...
class MemoryBudgetExceededError(ShoalError): ...
class SnapshotLostError(ShoalError): ...

_Sums: TypeAlias = tuple[
    npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.float32], npt.NDArray[np.uint32] | None
]

# Of a struct: names, whether servers report them, and what they mean.
STATISTICS: dict[str, tuple[tuple[str, Literal["counter", "gauge", ""], str], ...]]

class Budget:
    def __init__(self, slots: int, bytes: int) -> None: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def borrow(team: int, threads: int) -> None: ...

class KeyBatch:
    def __init__(self, keys: npt.NDArray[np.uint64], slots: int, pool: ThreadPool, last: int | None = None) -> None: ...
    def __len__(self) -> int: ...
    @property
    def input_size(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def inverse(self) -> npt.NDArray[np.uint32]: ...
    @property
    def offsets(self) -> npt.NDArray[np.uint64]: ...
    def counts(self) -> npt.NDArray[np.uint32]: ...
    def sum(
        self,
        grads: npt.NDArray[np.float32],
        dim: int,
        out: npt.NDArray[np.float32],
        pool: ThreadPool,
        integers: bool = False,
    ) -> None: ...
    def expand(
        self, rows: npt.NDArray[np.float32], dim: int, out: npt.NDArray[np.float32], pool: ThreadPool
    ) -> None: ...
    def is_of(self, keys: npt.NDArray[np.uint64], pool: ThreadPool) -> bool: ...
    def verify(self) -> bool: ...

class UniqueKeys:
    def __init__(self, keys: npt.NDArray[np.uint64], slots: int, pool: ThreadPool, last: int | None = None) -> None: ...
    def __len__(self) -> int: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def inverse(self) -> npt.NDArray[np.uint32]: ...
    @property
    def offsets(self) -> npt.NDArray[np.uint64]: ...

class SummedBatch:
    def __init__(
        self,
        keys: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.float32],
        dim: int,
        slots: int,
        pool: ThreadPool,
        counting: bool = False,
        integers: bool = False,
    ) -> None: ...
    def __len__(self) -> int: ...
    def counts(self) -> npt.NDArray[np.uint32]: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def offsets(self) -> npt.NDArray[np.uint64]: ...
    @property
    def sums(self) -> npt.NDArray[np.float32]: ...

class TextMap:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    def missing(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]: ...
    def add(
        self,
        keys: npt.NDArray[np.uint64],
        text: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.uint64],
        most: int,
    ) -> None: ...
    def get(self, key: int) -> bytes | None: ...
    def keys(self) -> npt.NDArray[np.uint64]: ...
    def texts_of(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]: ...
    def differing(
        self, keys: npt.NDArray[np.uint64], text: npt.NDArray[np.uint8], ends: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint32]: ...
    def sorted(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8], npt.NDArray[np.uint64]]: ...

class RowLocations:
    def __init__(self, batch: KeyBatch) -> None: ...

class Shard:
    step: int
    def __init__(
        self,
        dim: int,
        dtype: str,
        optimizer: str,
        params: dict[str, float],
        init: str,
        init_parameter: float,
        init_seed: int,
        seed: int,
        slots: int,
        pool: ThreadPool,
        admit: tuple[str, dict[str, float]] | None = None,
        expire: Sequence[tuple[str, dict[str, float]]] = ...,
        budget: Budget | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def pull(self, batch: KeyBatch, rows: npt.NDArray[np.float32], locations: RowLocations | None = None) -> None: ...
    def pull_per_key(
        self, batch: KeyBatch, rows: npt.NDArray[np.float32], locations: RowLocations | None = None
    ) -> None: ...
    def locate(self, batch: KeyBatch, locations: RowLocations) -> None: ...
    def push_per_key(
        self,
        batch: KeyBatch,
        grads: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint32] | None = None,
        clock: int = 0,
        locations: RowLocations | None = None,
    ) -> int: ...
    def push(
        self,
        batch: KeyBatch | SummedBatch,
        grads: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint32] | None = None,
        clock: int = 0,
        locations: RowLocations | None = None,
    ) -> int: ...
    def assign(self, batch: KeyBatch, rows: npt.NDArray[np.float32], clock: int = 0) -> None: ...
    def sweep(self, rules: npt.NDArray[np.float64], clock: int = 0, *, dry_run: bool) -> npt.NDArray[np.uint64]: ...
    def filter(self, slot: int) -> npt.NDArray[np.uint8]: ...
    def restore_filter(self, cut: int, slot: int, filter: npt.NDArray[np.uint8]) -> None: ...
    def table_clock(self, store_clock: int) -> int: ...
    def set_clock(self, table_clock: int, store_clock: int) -> None: ...
    def erase(self, batch: KeyBatch) -> int: ...
    def contains(self, batch: KeyBatch) -> npt.NDArray[np.uint8]: ...
    def columns(self) -> list[str]: ...
    def state(self, batch: KeyBatch, column: int) -> npt.NDArray[np.float32]: ...
    def metadata_names(self) -> list[str]: ...
    def metadata(self, batch: KeyBatch, k: int) -> npt.NDArray[np.uint32]: ...
    def section(self, slot: int) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
    def restore(self, rows: int, section: npt.NDArray[np.uint8]) -> int: ...
    def reserve(self, rows: Sequence[int]) -> None: ...
    def reduce(self, function: int, parameters: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]: ...
    def read_slot(self, slot: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def snapshot(self, clock: int = 0, kind: str = "plain", most: int = 0, purpose: str = "save") -> Snapshot: ...
    def base(self, purpose: str = "save") -> str: ...
    def track(self, base: str) -> None: ...
    def merge(
        self,
        cut: int,
        base_rows: int,
        base: npt.NDArray[np.uint8],
        delta_rows: int,
        delta: npt.NDArray[np.uint8],
        bits: int,
        count: int,
        ranges: npt.NDArray[np.uint8],
    ) -> tuple[int, npt.NDArray[np.uint8]]: ...
    def pause_writers(self) -> None: ...
    def resume_writers(self) -> None: ...
    @property
    def row_bytes(self) -> int: ...
    def bytes_at(self, rows: int) -> int: ...
    def saved_bytes_at(self, rows: int) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def verify(self) -> str: ...

class ExportReader:
    def __init__(self, dtype: str, dim: int, init: str, init_parameter: float, init_seed: int, slots: int) -> None: ...
    def add_layer(self) -> None: ...
    def add(self, file: npt.NDArray[np.uint8], sections: npt.NDArray[np.uint64]) -> None: ...
    def pull(
        self, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32], pool: ThreadPool, hashed: bool = False
    ) -> None: ...
    def contains(self, keys: npt.NDArray[np.uint64], pool: ThreadPool) -> npt.NDArray[np.uint8]: ...
    def read_slot(self, slot: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def difference(
        self, slot: int, hashes: npt.NDArray[np.uint64], weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def difference_in(
        self,
        slot: int,
        hashes: npt.NDArray[np.uint64],
        weights: npt.NDArray[np.float32],
        bits: int,
        count: int,
        ranges: npt.NDArray[np.uint8],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def pack(
        self, slot: int, hashes: npt.NDArray[np.uint64], weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int, int, int], int, tuple[float, float, float]]: ...

class Snapshot:
    @property
    def step(self) -> int: ...
    @property
    def table_clock(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def section(self, slot: int) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
    def changes(
        self, slot: int
    ) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None, int, int, npt.NDArray[np.uint8]]: ...
    def read_slot(self, slot: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def read_changes(
        self, slot: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32], int, int, npt.NDArray[np.uint8]]: ...
    def done(self, name: str) -> None: ...
    def close(self) -> None: ...

class TierSpace:
    def __init__(self, memory: int) -> None: ...
    def open(self, directory: str) -> None: ...

class TieredShard(Shard):
    def __init__(
        self,
        dim: int,
        dtype: str,
        optimizer: str,
        params: dict[str, float],
        init: str,
        init_parameter: float,
        init_seed: int,
        seed: int,
        slots: int,
        pool: ThreadPool,
        directory: str,
        memory: int,
        admit: tuple[str, dict[str, float]] | None = None,
        expire: Sequence[tuple[str, dict[str, float]]] = ...,
        use_async: bool = True,
    ) -> None: ...
    def prefetch(self, batch: KeyBatch, locations: RowLocations | None = None) -> None: ...
    def tier_stats(self) -> dict[str, int]: ...

class RowCache:
    def __init__(
        self,
        rows: int,
        dim: int,
        counted: bool = False,
        optimizer: str | None = None,
        params: dict[str, float] = {},
    ) -> None: ...
    @property
    def width(self) -> int: ...
    @property
    def sums(self) -> int: ...
    def copy_weights_of(
        self, whole: npt.NDArray[np.float32], positions: npt.NDArray[np.uint32], rows: npt.NDArray[np.float32]
    ) -> None: ...
    def read(
        self,
        hashes: npt.NDArray[np.uint64],
        clocks: int,
        reader: int,
        may_join: bool,
        rows: npt.NDArray[np.float32],
        slots: int,
    ) -> tuple[
        npt.NDArray[np.uint32],
        npt.NDArray[np.uint64],
        npt.NDArray[np.uint64],
        npt.NDArray[np.uint32],
        list[int],
        _Sums | None,
    ]: ...
    def fill(
        self,
        hashes: npt.NDArray[np.uint64],
        reader: int,
        clocks: int,
        is_kept: bool,
        rows: npt.NDArray[np.float32],
    ) -> None: ...
    def add(
        self,
        hashes: npt.NDArray[np.uint64],
        grads: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint32] | None,
        clock: int,
        slots: int,
    ) -> _Sums | None: ...
    def send_older(self, clock: int, slots: int) -> _Sums | None: ...
    def send_rows(self, hashes: npt.NDArray[np.uint64], slots: int) -> _Sums | None: ...
    def forget(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def verify(self) -> bool: ...

class Service:
    def __init__(
        self,
        slots: int,
        arcs: Sequence[tuple[int, int]] = ...,
        *,
        deferred_reads: int = ...,
        deferred_bytes: int = ...,
        pending_bytes: int = ...,
        reply_bytes: int = ...,
        key_list_bytes: int = ...,
        tier: TierSpace | None = None,
    ) -> None: ...
    def set_map(self, epoch: int, arcs: Sequence[tuple[int, int]]) -> None: ...
    def start_job(
        self,
        job: int,
        mode: str,
        staleness: int = 0,
        mean: bool = False,
        before: int = 0,
        is_named: bool = False,
    ) -> None: ...
    def end_job(self, job: int) -> None: ...
    def admit(self, rank: int, incarnation: int, clock: int, job: int = 0) -> None: ...
    def fence(self, rank: int, incarnation: int, job: int = 0) -> tuple[int, list[int]]: ...
    def dismiss(
        self, rank: int, incarnation: int, clock: int = 0, tables: Sequence[int] = ..., job: int = 0
    ) -> int: ...
    def hold(self, job: int = 0) -> int: ...
    def resume(self, job: int = 0) -> None: ...
    def add_table(
        self,
        id: int,
        dim: int,
        dtype: str,
        optimizer: str,
        params: dict[str, float],
        init: str,
        init_parameter: float,
        init_seed: int,
        seed: int,
        admit: tuple[str, dict[str, float]] | None = None,
        expire: Sequence[tuple[str, dict[str, float]]] = ...,
    ) -> None: ...
    def set_memory(self, slot_bytes: int) -> None: ...
    def drop_table(self, id: int) -> None: ...
    def tables(self) -> list[int]: ...
    def save_arc(self, first: int, end: int) -> list[bytes]: ...
    def shard(self, id: int) -> Shard: ...
    def next_session(self, seconds: float | None = None) -> CheckpointSession | None: ...
    def close_sessions(self) -> None: ...
    def assign(
        self,
        epoch: int,
        primary: Sequence[tuple[int, int]],
        outgoing: Sequence[tuple[int, str, str, Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = ...,
        incoming: Sequence[tuple[int, Sequence[tuple[int, int]]]] = ...,
        copy_rate: int = 0,
    ) -> None: ...
    def position(self) -> int: ...
    def committed(self, position: int) -> bool: ...
    def retired(self) -> bool: ...
    @overload
    def replication(self) -> dict[str, Any]: ...
    @overload
    def replication(self, patience: float) -> dict[str, Any] | None: ...
    def replica(self, stream: int, arcs: Sequence[tuple[int, int]] = ...) -> Replica: ...
    def close_incoming(self, streams: Sequence[int]) -> None: ...
    def stamps(self) -> dict[int, int]: ...
    def handle(self, peer: bytes, frames: Sequence[Any]) -> list[tuple[bytes, list[bytes]]]: ...
    def released(self) -> list[tuple[bytes, list[bytes]]]: ...
    def acknowledge(self) -> list[tuple[bytes, list[bytes]]]: ...
    def targets(self) -> list[tuple[int, str, str]]: ...
    def next_message(self, stream: int) -> list[bytes] | None: ...
    def handle_backup(self, stream: int, frames: Sequence[Any]) -> list[tuple[bytes, list[bytes]]]: ...
    def reconnected(self, stream: int) -> None: ...
    def on_time(self, now_ms: int) -> list[tuple[bytes, list[bytes]]]: ...
    def next_time(self) -> int: ...
    def use_idle_time(self) -> bool: ...
    @overload
    def metrics(self, patience: None = None) -> dict[str, Any]: ...
    @overload
    def metrics(self, patience: float) -> dict[str, Any] | None: ...
    def arc_loads(self, patience: float) -> list[tuple[int, int, int, int, int]] | None: ...
    def table_loads(self, patience: float) -> list[tuple[int, int, dict[str, int]]] | None: ...
    def hot_keys(self, most: int, patience: float) -> tuple[list[tuple[int, int, int]], int] | None: ...
    def peek(self, table: int, keys: npt.NDArray[np.uint64], patience: float) -> npt.NDArray[np.int64] | None: ...

class Replica:
    def start_job(
        self,
        job: int,
        mode: str,
        staleness: int = 0,
        mean: bool = False,
        before: int = 0,
        is_named: bool = False,
    ) -> None: ...
    def end_job(self, job: int) -> None: ...
    def admit(self, rank: int, incarnation: int, clock: int, job: int = 0) -> None: ...
    def fence(self, rank: int, incarnation: int, job: int = 0) -> tuple[int, list[int]]: ...
    def dismiss(
        self, rank: int, incarnation: int, clock: int = 0, tables: Sequence[int] = ..., job: int = 0
    ) -> int: ...
    def hold(self, job: int = 0) -> int: ...
    def resume(self, job: int = 0) -> None: ...
    def add_table(
        self,
        id: int,
        dim: int,
        dtype: str,
        optimizer: str,
        params: dict[str, float],
        init: str,
        init_parameter: float,
        init_seed: int,
        seed: int,
        admit: tuple[str, dict[str, float]] | None = None,
        expire: Sequence[tuple[str, dict[str, float]]] = ...,
    ) -> None: ...
    def set_memory(self, slot_bytes: int) -> None: ...
    def drop_table(self, id: int) -> None: ...
    def tables(self) -> list[int]: ...
    def save_arc(self, first: int, end: int) -> list[bytes]: ...
    def shard(self, id: int) -> Shard: ...

class CheckpointSession:
    @property
    def call(self) -> tuple[int, int, int]: ...
    @property
    def slots(self) -> list[int]: ...
    @property
    def summaries(self) -> list[tuple[int, int, int, int]]: ...
    @property
    def ended(self) -> bool: ...
    def wait_request(self, times: int = 0, seconds: float = 0.0) -> tuple[int, bytes]: ...
    def set_status(self, text: bytes) -> None: ...
    def section(self, table: int, slot: int) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
    def changes(
        self, table: int, slot: int
    ) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None, int, int, npt.NDArray[np.uint8]]: ...
    def restore(self, table: int, rows: int, section: npt.NDArray[np.uint8]) -> int: ...
    def restore_filter(self, table: int, cut: int, slot: int, filter: npt.NDArray[np.uint8]) -> None: ...
    def cancel(self) -> None: ...

class DataLoop:
    def __init__(
        self,
        service: Service,
        context: int,
        module: str,
        address: str,
        *,
        max_message: int = ...,
        unsent_bytes: int = ...,
        replies_per_peer: int = ...,
        heartbeat_ms: int = ...,
        dead_after_ms: int = ...,
        linger_ms: int = ...,
        curve_secret: str = "",
        curve_public: str = "",
        zap_domain: str = "",
    ) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def running(self) -> bool: ...
    def stop(self) -> None: ...
    def metrics(self) -> dict[str, int]: ...
    def durations(self) -> dict[str, tuple[float, dict[int, int]]]: ...

def zmq_constants() -> dict[str, int]: ...
def mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...
def unmix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...
def keep_freed_memory() -> None: ...

class _BuildInfo(TypedDict):
    compiler: str
    build_type: str
    checked: bool
    cpu_features: list[str]

def build_info() -> _BuildInfo: ...
def crc32c(buffer: Any, before: int = 0) -> int: ...
def check_optimizer(name: str, params: dict[str, float]) -> None: ...
def set_user_function(steps: Callable[..., None]) -> None: ...
def set_rows_function(call: Callable[..., tuple[bool, npt.NDArray[np.float64]]]) -> None: ...
def schedule_at(params: dict[str, float], clock: int) -> float: ...
def check_init(name: str, parameter: float) -> None: ...
def check_admission(name: str, params: dict[str, float]) -> None: ...
def check_expiry(name: str, params: dict[str, float]) -> None: ...
def merge(
    lists: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]], dim: int, pool: ThreadPool
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
def logistic_margins(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    weights: npt.NDArray[np.float32],
    pool: ThreadPool,
) -> npt.NDArray[np.float64]: ...
def logistic_losses(
    margins: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32] | None,
    pool: ThreadPool,
) -> tuple[float, npt.NDArray[np.float64]]: ...
def count_margins(
    margins: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32] | None,
    limit: float,
    counts: npt.NDArray[np.int64] | npt.NDArray[np.float64],
    pool: ThreadPool,
) -> tuple[float, float, float, float, int, int] | None: ...
def count_bins(
    margins: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None,
    limit: float,
    counts: npt.NDArray[np.int64] | npt.NDArray[np.float64],
) -> tuple[int, int]: ...
def logistic_gradient(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    slopes: npt.NDArray[np.float64],
    pool: ThreadPool,
) -> npt.NDArray[np.float32]: ...
def logistic_probabilities(margins: npt.NDArray[np.float64], pool: ThreadPool) -> npt.NDArray[np.float64]: ...
def fm_margins(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    weights: npt.NDArray[np.float32],
    factors: npt.NDArray[np.float32],
    pool: ThreadPool,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]: ...
def interact(
    indptr: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    values: npt.NDArray[np.float32] | None,
    fields: npt.NDArray[np.uint64],
    pairs: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.float32] | None]: ...
def count_labelled(
    margins: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float32],
    limit: float,
    counts: npt.NDArray[np.int64],
    pool: ThreadPool,
) -> tuple[int, int, int] | None: ...
def ordered_pairs(positive: npt.NDArray[np.int64], negative: npt.NDArray[np.int64]) -> tuple[int, int, int]: ...
def gather_rows(
    indptr: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    values: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
def interaction_parents(
    indptr: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    fields: npt.NDArray[np.uint64],
    pairs: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]: ...
def fm_gradient(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    factors: npt.NDArray[np.float32],
    sums: npt.NDArray[np.float64],
    slopes: npt.NDArray[np.float64],
    pool: ThreadPool,
) -> npt.NDArray[np.float32]: ...
def pool_rows(
    pooling: str,
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    rows: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    pool: ThreadPool,
) -> npt.NDArray[np.uint32] | None: ...
def pool_gradient(
    pooling: str,
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    grads: npt.NDArray[np.float32],
    winners: npt.NDArray[np.uint32] | None,
    out: npt.NDArray[np.float32],
    pool: ThreadPool,
) -> None: ...
def pool_values_gradient(
    pooling: str,
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    rows: npt.NDArray[np.float32],
    grads: npt.NDArray[np.float32],
    winners: npt.NDArray[np.uint32] | None,
    pool: ThreadPool,
) -> npt.NDArray[np.float32]: ...

class ExamplesByFeature:
    def __init__(
        self,
        indptr: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32] | None,
        keys: UniqueKeys,
        bias: bool,
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        pool: ThreadPool,
    ) -> None: ...
    def margins(self, pool: ThreadPool) -> npt.NDArray[np.float64]: ...
    def add(self, keys: npt.NDArray[np.uint32], deltas: npt.NDArray[np.float64], pool: ThreadPool) -> None: ...
    def gradient(self, keys: npt.NDArray[np.uint32], pool: ThreadPool) -> npt.NDArray[np.float32]: ...
    def bounds(
        self, own: tuple[int, int], near: Sequence[tuple[int, int]], pool: ThreadPool
    ) -> npt.NDArray[np.float32]: ...

def count_min_add(
    keys: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.int64] | None,
    seed: int,
    depth: int,
    width: int,
    counters: npt.NDArray[np.int64],
    pool: ThreadPool,
) -> None: ...
def count_min_positions(
    keys: npt.NDArray[np.uint64],
    seed: int,
    depth: int,
    width: int,
    pool: ThreadPool,
) -> npt.NDArray[np.int64]: ...

class Op(enum.IntEnum):
    PULL = 1
    PUSH = 2
    TICK = 3
    ASSIGN = 4
    ERASE = 5
    CONTAINS = 6
    STATE = 7
    SLOT = 8
    SECTION = 9
    LOAD_BEGIN = 10
    LOAD_ROWS = 11
    LOAD_END = 12
    STATS = 13
    REDUCE = 14
    LOAD_FILTER = 15
    SWEEP = 16
    SAVE_BEGIN = 17
    SAVE_POLL = 18
    SAVE_END = 19
    REPLICATE = 20
    PING = 21
    PREFETCH = 22

class Status(enum.IntEnum):
    OK = 0
    DEFERRED = 1
    BAD_REQUEST = 16
    WRONG_EPOCH = 17
    FENCED = 18
    NOT_ADMITTED = 19
    NO_TABLE = 20
    RETRY = 21
    OVERLOADED = 22
    INTERNAL = 23
    VERSION = 24
    WRONG_JOB = 25
    UNKNOWN_KEY_LIST = 26
    RESOURCE_EXHAUSTED = 27

class WireDtype(enum.IntEnum):
    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    UINT8 = 4
    UINT64 = 5
    FLOAT64 = 6

class Message:
    @property
    def op(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def reply(self) -> bool: ...
    @property
    def packed(self) -> bool: ...
    @property
    def keep(self) -> bool: ...
    @property
    def timed(self) -> bool: ...
    @property
    def times(self) -> tuple[int, int] | None: ...
    @property
    def dated(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def part(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def table(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def clock(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def aux(self) -> int: ...
    @property
    def job(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def values(self) -> npt.NDArray[Any]: ...
    @property
    def counts(self) -> npt.NDArray[np.uint32]: ...
    @property
    def numbers(self) -> npt.NDArray[np.uint64]: ...
    @property
    def tables(self) -> npt.NDArray[np.uint32]: ...
    @property
    def slots(self) -> npt.NDArray[np.uint16]: ...
    @property
    def nested(self) -> list[bytes]: ...
    @property
    def text(self) -> str: ...

def encode_header(
    *,
    op: int,
    payload: Iterable[Any] = (),
    status: int = 0,
    reply: bool = False,
    dtype: int = 0,
    dim: int = 0,
    table: int = 0,
    worker: int = 4294967295,
    incarnation: int = 0,
    sequence: int = 0,
    epoch: int = 0,
    clock: int = 0,
    count: int = 0,
    aux: int = 0,
    job: int = 0,
    part: int = 0,
    packed: bool = False,
    keep: bool = False,
    digest: bool = False,
    counted: bool = False,
    timed: bool = False,
    dated: bool = False,
    whole: bool = False,
) -> bytes: ...
def local_step_floats(optimizer: str, params: dict[str, float], dim: int) -> int: ...
def digest(hashes: npt.NDArray[np.uint64], seed: int) -> bytes: ...
def narrow(
    rows: npt.NDArray[np.float32], hashes: npt.NDArray[np.uint64], dtype: int, seed: int, message: int
) -> tuple[npt.NDArray[np.uint16], float, float]: ...
def pack(
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]] | None: ...
def pack_counts(counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8] | None: ...
def filter_significant(
    rows: npt.NDArray[np.float32], hashes: npt.NDArray[np.uint64], threshold: float, seed: int, call: int
) -> tuple[npt.NDArray[np.float32], int, int, float]: ...
def decode(
    frames: Iterable[Any],
    *,
    replies: bool = True,
    payload_bytes: int = 1073741824,
    into: Any | None = None,
) -> Message: ...
def peek(frames: Iterable[Any]) -> tuple[int, int] | None: ...

class ClientDefect(enum.IntEnum):
    NONE = 0
    FORGETS_REFUSED_SLOTS = 1
    RESENDS_WITH_A_NEW_SEQUENCE = 2
    TAKES_EARLY_FOR_DONE = 3
    TICKS_BEFORE_ITS_READS = 4
    TICKS_BEFORE_ITS_PUSHES_ARE_EVERYWHERE = 5
    SENDS_ONCE = 6
    DONE_BY_THE_FIRST_PART = 7
    TAKES_ANY_ANSWER = 8
    KEEPS_ITS_OLD_MAP = 9
    RENUMBERS_PUSHES = 10
    RENUMBERS_OTHER_WRITES = 11
    LOSES_COUNTS = 12
    TAKES_ROWS_BEHIND_A_REPEATED_PUSH = 13
    LEAVES_BEFORE_A_FILTERED_PUSH = 14

class RowCacheDefect(enum.IntEnum):
    NONE = 0
    KEEPS_ROWS_FOR_A_LONG_TIME = 1
    ADDS_TO_WHAT_IT_HAS_SENT = 2
    KEEPS_COPIES_OF_WHAT_IT_SENDS = 3
    TAKES_THE_LAST_ANSWER = 4
    SENDS_CHANGES_AGAIN = 5
    FORGETS_WHAT_CHANGED_MEANWHILE = 6
    KEEPS_ANSWERS_THAT_LACK_PUSHES = 7
    READS_PASSED_GRADIENTS_LATER = 8

class CachedRowsDefect(enum.IntEnum):
    NONE = 0
    HOLDS_FOR_ANOTHER_CLOCK = 1
    FORGETS_THAT_PUSHES_ARE_HELD = 2
    TRUSTS_THE_ORDER = 3
    TAKES_ITS_OWN_CLOCK = 4
    PULLS_BEFORE_IT_PUSHES = 5

class Policy:
    def __init__(
        self,
        *,
        resend_after: float = 1.0,
        backoff: float = 2.0,
        longest: float = 30.0,
        bytes_per_second: float = 10000000.0,
        deferred_after: float = 5.0,
        pause: float = 0.02,
        longest_pause: float = 1.0,
        credit: int = 67108864,
        message_bytes: int = 1048576,
        largest_message: int = 67108864,
    ) -> None: ...

class Filter:
    def __init__(
        self,
        *,
        key_caching: bool,
        zeros: bool,
        gradients: int,
        weights: int,
        threshold: float,
        seed: int,
        job: int,
    ) -> None: ...
    def metrics(self) -> dict[str, float]: ...

# A shoal.cluster.protocol.slot_map.ClusterMap.
class _Map(Protocol):
    @property
    def epoch(self) -> int: ...
    @property
    def endpoints(self) -> Iterable[Any]: ...
    @property
    def arcs(self) -> Iterable[Any]: ...
    @property
    def streams(self) -> Iterable[Any]: ...

class SubmittedCall:
    @property
    def op(self) -> int: ...
    @property
    def table(self) -> int: ...
    @property
    def clock(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def included(self) -> int | None: ...
    @property
    def error(self) -> ShoalError | None: ...
    def done(self) -> bool: ...
    def get(self) -> Any: ...

class Requests:
    def __init__(
        self,
        worker: tuple[int, int, int],
        map: _Map,
        policy: Policy = ...,
        *,
        atomic_clocks: bool = True,
        defect: ClientDefect = ...,
    ) -> None: ...
    @property
    def wants_map(self) -> bool: ...
    @property
    def repetitions(self) -> int: ...
    @property
    def timers(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def counts(self) -> dict[str, int]: ...
    def submit(
        self,
        op: int,
        table: int,
        clock: int,
        now: float,
        deadline: float,
        *,
        after: Iterable[SubmittedCall] = (),
        follows: SubmittedCall | None = None,
        on_done: Callable[[SubmittedCall], object] | None = None,
        traced: bool = False,
        **what: Any,
    ) -> SubmittedCall: ...
    def tick(
        self,
        clock: int,
        tables: Sequence[int],
        now: float,
        deadline: float,
        *,
        on_done: Callable[[SubmittedCall], object] | None = None,
        traced: bool = False,
    ) -> SubmittedCall: ...
    def receive(self, address: str, frames: Iterable[Any], now: float) -> bool: ...
    def on_time(self, now: float) -> None: ...
    def next_time(self) -> float | None: ...
    def reconnected(self, address: str, reason: str, now: float) -> None: ...
    def set_map(self, map: _Map, now: float) -> None: ...
    def lose(self, server: int, reason: str, now: float) -> None: ...
    def close(self, error: Exception, now: float) -> None: ...
    def take_outgoing(self) -> list[tuple[str, list[bytes]]]: ...
    def verify(self) -> str: ...

class SimulatedRows:
    def __init__(
        self,
        requests: Requests,
        table: int,
        *,
        rows: int,
        dim: int,
        slots: int,
        staleness: int,
        waits: int | None = None,
        optimizer: str | None = None,
        params: dict[str, float] = {},
        filter: Filter | None = None,
        clock: int = 0,
        patience: float = 60.0,
        row_defect: RowCacheDefect = ...,
        defect: CachedRowsDefect = ...,
    ) -> None: ...
    @property
    def unacknowledged(self) -> list[SubmittedCall]: ...
    def pull(self, hashes: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32], now: float) -> SubmittedCall: ...
    def push(self, hashes: npt.NDArray[np.uint64], grads: npt.NDArray[np.float32], now: float) -> SubmittedCall: ...
    def end_clock(self, now: float) -> None: ...
    def flush(self, now: float) -> None: ...
    def metrics(self) -> dict[str, int]: ...

class Call:
    @property
    def clock(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def included(self) -> int | None: ...
    @property
    def error(self) -> ShoalError | None: ...
    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> Any: ...
    def add_done_callback(self, function: Callable[[Call], object]) -> None: ...
    def is_of(self, client: Client) -> bool: ...

# Of a message: address, server, keys, first and last time that it was sent, end, bytes sent and received, whether it
# was answered, nanoseconds in the server and in its shard, events.
_PartTrace: TypeAlias = tuple[
    str, int, int, float, float, float, int, int, bool, tuple[int, int] | None, list[tuple[str, float]]
]
# Of a call: serial, end, error, messages.
_CallTrace: TypeAlias = tuple[int, float, ShoalError | None, list[_PartTrace]]

class Client:
    def __init__(
        self,
        module: str,
        context: int,
        worker: tuple[int, int, int],
        map: _Map,
        *,
        policy: Policy = ...,
        atomic_clocks: bool = True,
        clock: int = 0,
        timeout: float = 60.0,
        report: Callable[[], None] | None = None,
        curve_server: str = "",
        curve_public: str = "",
        curve_secret: str = "",
        heartbeat_ms: int = 2000,
        silent_ms: int = 10000,
        handshake_ms: int = 5000,
    ) -> None: ...
    @property
    def clock(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def has_pending(self) -> bool: ...
    @property
    def has_pushed(self) -> bool: ...
    @property
    def has_unobserved(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def here(self) -> bool: ...
    @property
    def connections(self) -> list[str]: ...
    def begin(self, op: int, table: int, *, after: Iterable[Call] = (), traced: bool = False, **what: Any) -> Call: ...
    def pull(
        self,
        table: int,
        batch: KeyBatch,
        rows: npt.NDArray[np.float32],
        dim: int,
        filter: Filter | None = None,
        after: Iterable[Call] = (),
        ahead: int = 0,
        traced: bool = False,
    ) -> Call: ...
    def pull_per_key(
        self,
        table: int,
        batch: KeyBatch,
        rows: npt.NDArray[np.float32],
        dim: int,
        pool: ThreadPool,
        filter: Filter | None = None,
        after: Iterable[Call] = (),
        follows: Call | None = None,
        traced: bool = False,
    ) -> Call: ...
    def push(
        self,
        table: int,
        batch: KeyBatch | SummedBatch,
        grads: npt.NDArray[np.float32],
        dim: int,
        counts: npt.NDArray[np.uint32] | None = None,
        filter: Filter | None = None,
        after: Iterable[Call] = (),
        traced: bool = False,
    ) -> Call: ...
    def push_per_key(
        self,
        table: int,
        batch: KeyBatch,
        grads: npt.NDArray[np.float32],
        dim: int,
        pool: ThreadPool,
        integers: bool = False,
        counts: npt.NDArray[np.uint32] | None = None,
        filter: Filter | None = None,
        after: Iterable[Call] = (),
        traced: bool = False,
    ) -> Call: ...
    def tick(self, traced: bool = False) -> Call: ...
    def flush_caches(self) -> None: ...
    def forget_rows(self) -> None: ...
    def drain(self, timeout: float | None = None) -> None: ...
    def check(self) -> None: ...
    def wait_for_work(self) -> bool: ...
    def run_noticed(self) -> None: ...
    def take_traced(self) -> list[_CallTrace]: ...
    def take_failed(self) -> list[tuple[ShoalError, dict[str, Any]]]: ...
    def take_unobserved(self) -> list[ShoalError]: ...
    def takes_map_request(self) -> bool: ...
    def set_map(self, map: _Map) -> None: ...
    def lose(self, server: int, reason: str) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...
    def metrics(self) -> dict[str, int]: ...
    def durations(self) -> dict[str, tuple[float, dict[int, int]]]: ...

class CachedRows:
    def __init__(
        self,
        client: Client,
        table: int,
        *,
        rows: int,
        dim: int,
        slots: int,
        staleness: int,
        waits: int | None = None,
        counted: bool = False,
        optimizer: str | None = None,
        params: dict[str, float] = {},
        filter: Filter | None = None,
    ) -> None: ...
    def pull(
        self,
        batch: KeyBatch,
        rows: npt.NDArray[np.float32],
        after: Iterable[Call] = (),
        fresh: bool = False,
        traced: bool = False,
    ) -> Call: ...
    def pull_per_key(
        self,
        batch: KeyBatch,
        rows: npt.NDArray[np.float32],
        pool: ThreadPool,
        after: Iterable[Call] = (),
        fresh: bool = False,
        traced: bool = False,
    ) -> Call: ...
    def push(
        self,
        batch: KeyBatch | SummedBatch,
        grads: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint32] | None = None,
        after: Iterable[Call] = (),
        traced: bool = False,
    ) -> Call: ...
    def push_per_key(
        self,
        batch: KeyBatch,
        grads: npt.NDArray[np.float32],
        pool: ThreadPool,
        counts: npt.NDArray[np.uint32] | None = None,
        after: Iterable[Call] = (),
        traced: bool = False,
    ) -> Call: ...
    def flush(self) -> list[Call]: ...
    def forget(self) -> None: ...
    def forget_after(self, call: Call) -> None: ...
    def metrics(self) -> dict[str, int]: ...
