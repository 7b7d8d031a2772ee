# The engine. Private: use the functions and classes of shoal, which check and explain what they take.

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class ShoalError(Exception): ...
class WrongProcess(ShoalError): ...
class TransportError(ShoalError): ...

class Workers:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class KeyBatch:
    def __init__(self, keys: npt.NDArray[np.uint64], slots: int, workers: Workers, last: int | None = None) -> None: ...
    def __len__(self) -> int: ...
    @property
    def given(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def inverse(self) -> npt.NDArray[np.uint32]: ...
    @property
    def begins(self) -> npt.NDArray[np.uint64]: ...
    def counts(self) -> npt.NDArray[np.uint32]: ...
    def sum(self, grads: npt.NDArray[np.float32], dim: int, workers: Workers) -> npt.NDArray[np.float32]: ...
    def expand(
        self, rows: npt.NDArray[np.float32], dim: int, out: npt.NDArray[np.float32], workers: Workers
    ) -> None: ...
    def is_of(self, keys: npt.NDArray[np.uint64], workers: Workers) -> bool: ...
    def verify(self) -> bool: ...

class SummedBatch:
    def __init__(
        self,
        keys: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.float32],
        dim: int,
        slots: int,
        workers: Workers,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def hashes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def begins(self) -> npt.NDArray[np.uint64]: ...
    @property
    def sums(self) -> npt.NDArray[np.float32]: ...

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
        workers: Workers,
    ) -> None: ...
    def __len__(self) -> int: ...
    def pull(self, batch: KeyBatch, rows: npt.NDArray[np.float32]) -> None: ...
    def push(self, batch: KeyBatch | SummedBatch, grads: npt.NDArray[np.float32]) -> int: ...
    def assign(self, batch: KeyBatch, rows: npt.NDArray[np.float32]) -> None: ...
    def erase(self, batch: KeyBatch) -> int: ...
    def contains(self, batch: KeyBatch) -> npt.NDArray[np.uint8]: ...
    def columns(self) -> list[str]: ...
    def state(self, batch: KeyBatch, column: int) -> npt.NDArray[np.float32]: ...
    def section(self, slot: int) -> tuple[int, npt.NDArray[np.uint8]]: ...
    def restore(self, rows: int, section: npt.NDArray[np.uint8]) -> None: ...
    def reserve(self, rows: Sequence[int]) -> None: ...
    def reduce(self, function: int, parameters: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]: ...
    def read_slot(self, slot: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def verify(self) -> str: ...

class Service:
    def __init__(
        self,
        slots: int,
        first: int,
        end: int,
        *,
        parked_limit: int = ...,
        parked_bytes: int = ...,
        pending_bytes: int = ...,
        reply_bytes: int = ...,
        list_bytes: int = ...,
    ) -> None: ...
    def set_map(self, epoch: int, first: int, end: int) -> None: ...
    def start_job(self, job: int, mode: str, staleness: int = 0, mean: bool = False) -> None: ...
    def admit(self, rank: int, incarnation: int, clock: int) -> None: ...
    def dismiss(self, rank: int, incarnation: int) -> None: ...
    def hold(self) -> int: ...
    def resume(self) -> None: ...
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
    ) -> None: ...
    def drop_table(self, id: int) -> None: ...
    def tables(self) -> list[int]: ...
    def shard(self, id: int) -> Shard: ...
    def handle(self, peer: bytes, frames: Sequence[Any]) -> list[tuple[bytes, list[bytes]]]: ...
    def released(self) -> list[tuple[bytes, list[bytes]]]: ...
    def metrics(self) -> dict[str, Any]: ...

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
        requests_per_peer: int = ...,
        replies_per_peer: int = ...,
        heartbeat_ms: int = ...,
        dead_after_ms: int = ...,
        linger_ms: int = ...,
        curve_secret: str = "",
        zap_domain: str = "",
    ) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def running(self) -> bool: ...
    def stop(self) -> None: ...
    def metrics(self) -> dict[str, int]: ...

def zmq_constants() -> dict[str, int]: ...
def mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...
def unmix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]: ...
def crc32c(buffer: Any, before: int = 0) -> int: ...
def check_optimizer(name: str, params: dict[str, float]) -> None: ...
def check_init(name: str, parameter: float) -> None: ...
def merge(
    lists: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]], dim: int, workers: Workers
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...
def logistic_margins(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    weights: npt.NDArray[np.float32],
    workers: Workers,
) -> npt.NDArray[np.float64]: ...
def logistic_losses(
    margins: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32] | None,
    workers: Workers,
) -> tuple[float, npt.NDArray[np.float64]]: ...
def logistic_gradient(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    slopes: npt.NDArray[np.float64],
    workers: Workers,
) -> npt.NDArray[np.float32]: ...
def logistic_probabilities(margins: npt.NDArray[np.float64], workers: Workers) -> npt.NDArray[np.float64]: ...
def fm_margins(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    weights: npt.NDArray[np.float32],
    factors: npt.NDArray[np.float32],
    workers: Workers,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]: ...
def interact(
    indptr: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    values: npt.NDArray[np.float32] | None,
    fields: npt.NDArray[np.uint64],
    pairs: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.float32] | None]: ...
def fm_gradient(
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    bias: bool,
    factors: npt.NDArray[np.float32],
    sums: npt.NDArray[np.float64],
    slopes: npt.NDArray[np.float64],
    workers: Workers,
) -> npt.NDArray[np.float32]: ...
def pool_rows(
    pooling: str,
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    rows: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    workers: Workers,
) -> npt.NDArray[np.uint32] | None: ...
def pool_gradient(
    pooling: str,
    indptr: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32] | None,
    batch: KeyBatch,
    grads: npt.NDArray[np.float32],
    winners: npt.NDArray[np.uint32] | None,
    workers: Workers,
) -> npt.NDArray[np.float32]: ...
def pool_values_gradient(
    indptr: npt.NDArray[np.int64],
    batch: KeyBatch,
    rows: npt.NDArray[np.float32],
    grads: npt.NDArray[np.float32],
    workers: Workers,
) -> npt.NDArray[np.float32]: ...

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

class Status(enum.IntEnum):
    OK = 0
    PARKED = 1
    BAD_REQUEST = 16
    WRONG_EPOCH = 17
    STALE = 18
    NOT_ADMITTED = 19
    NO_TABLE = 20
    EARLY = 21
    OVERLOADED = 22
    INTERNAL = 23
    VERSION = 24
    WRONG_JOB = 25
    NO_LIST = 26

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
    def digest(self) -> bytes: ...
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
) -> bytes: ...
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
def decode(frames: Sequence[Any], *, replies: bool = True, payload_bytes: int = 1073741824) -> Message: ...
