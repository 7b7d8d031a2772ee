"""What a planned table will take: memory, servers, the size of its checkpoints, and time.

Memory and size are arithmetic, the engine's own: what a table of that description takes at that number of rows
(``csrc/table/slot_table.h`` has the ladder of its sizes), and what a checkpoint writes for each row. Times are rates
times rows. Rates are given, or measured here: a table of that description is filled as far as `SAMPLE_BYTES` reach,
pulled from, pushed to, saved and loaded.

Threads: no state. `measure_rates` makes a store of its own.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal import _core
from shoal.optim import FTRL, Init, Optimizer, Zeros
from shoal.store.local import LocalStore, local
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec
from shoal.table.table import Table

__all__ = ["Estimate", "Rates", "estimate", "measure_rates"]

SAMPLE_BYTES = 256 << 20  # of a table that rates are measured on: beyond what caches hold
BATCH = 65536
_LEAST_SECONDS = 0.5
_ROUNDS = 3  # of saves and loads, of which one alone is a third off now and then: they take some tenths of a second
_NAME = "estimate"

# Python, NumPy and the engine, idle; what a call on a batch works in, for each key of it and each number of its row.
_PROCESS_BYTES = 64 << 20
_BATCH_KEY_BYTES = 64
_MANIFEST_SECTION_BYTES = 45  # of text for each slot

_FTRL = FTRL()
_ZEROS = Zeros()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one server of so many threads works, for tables of one description.

    Parameters
    ----------
    inserts_per_second, pulls_per_second, pushes_per_second : float
        Unique keys, in batches of 65,536, sorting included: keys that are new, and keys that are there.
    save_bytes_per_second, load_bytes_per_second : float
        Of checkpoints.
    """

    inserts_per_second: float
    pulls_per_second: float
    pushes_per_second: float
    save_bytes_per_second: float
    load_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a table will take.

    Parameters
    ----------
    keys : int
    servers : int
        That share the slots; 1 is a store in one process.
    row_bytes : int
        Weights and the optimizer's state of a key.
    bytes_per_key : float
        Of the table, index and room to grow included.
    table_bytes : int
        Of all servers together: what ``stats().bytes`` will say once the keys are there.
    server_bytes : int
        What the process of one server will take at most while it serves: its share of the table, itself, and what it
        works in.
    checkpoint_bytes : int
        Of a full checkpoint.
    fill_seconds, pass_seconds, save_seconds, load_seconds : float or None
        To see every key once; to train on all examples; to save and to load a checkpoint. All servers work side by
        side. None where no rates are known.
    rates : Rates or None
        Of one server.
    """

    keys: int
    servers: int
    row_bytes: int
    bytes_per_key: float
    table_bytes: int
    server_bytes: int
    checkpoint_bytes: int
    fill_seconds: float | None = None
    pass_seconds: float | None = None
    save_seconds: float | None = None
    load_seconds: float | None = None
    rates: Rates | None = None


def estimate(
    keys: int,
    *,
    dim: int = 1,
    optimizer: Optimizer = _FTRL,
    init: Init = _ZEROS,
    dtype: str = "float32",
    slots: int = 1024,
    memory: int | None = None,
    servers: int | None = None,
    examples: int = 0,
    features: int = 39,
    rates: Rates | None = None,
) -> Estimate:
    """Say what a table of so many keys will take.

    Parameters
    ----------
    keys : int
        Rows that it will have.
    dim, optimizer, init, dtype
        As for :meth:`shoal.Store.table`.
    slots : int
        Of the store or cluster.
    memory : int, optional
        Bytes of one server's machine, of which a sixteenth is left to the system: how many servers that makes.
    servers : int, optional
        How many there are, instead of ``memory``. Default of both: one.
    examples : int
        In one pass of training.
    features : int
        Of an example: each is a pull and a push of a row.
    rates : Rates, optional
        What :func:`measure_rates` has found, or anybody knows. Without them there are no times.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        The description makes no table, both ``memory`` and ``servers`` are given, or no number of servers has room.

    Notes
    -----
    The table is one that grew by pushes; one that was loaded takes up to an eighth less, as it has no room to grow yet.
    Keys that wait for admission are not counted. A pass is an upper bound: features that an example batch repeats are
    pulled and pushed once. It does not count reading the data, nor what the network takes.

    Examples
    --------
    >>> import shoal
    >>> plan = shoal.estimate(1_000_000_000)
    >>> round(plan.bytes_per_key, 1), round(plan.checkpoint_bytes / 1e9, 1)
    (19.5, 16.0)
    """
    if not isinstance(keys, int) or keys < 1:
        raise ValueError(f"keys must be a whole number of at least 1, got {keys!r}")
    if memory is not None and servers is not None:
        raise ValueError("memory determines the number of servers: leave out servers, or memory")
    for name, number, least in (("servers", servers, 1), ("examples", examples, 0), ("features", features, 1)):
        if number is not None and (not isinstance(number, int) or number < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}")
    spec = TableSpec(name=_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype, seed=0)
    shard = LocalShard.of(spec, slots, _core.ThreadPool(1))
    table_bytes, saved_bytes = shard.bytes_at(keys), shard.saved_bytes_at(keys)
    count = servers or 1
    if memory is not None:
        count = _servers_for(table_bytes, slots, dim, memory)
    elif count > slots:
        raise ValueError(f"{count} servers are more than {slots} slots: make the cluster with more slots")
    times: dict[str, float] = {}
    if rates is not None:
        touched = examples * features
        times = {
            "fill_seconds": keys / rates.inserts_per_second / count,
            "pass_seconds": touched * (1 / rates.pulls_per_second + 1 / rates.pushes_per_second) / count,
            "save_seconds": saved_bytes / rates.save_bytes_per_second / count,
            "load_seconds": saved_bytes / rates.load_bytes_per_second / count,
        }
    return Estimate(
        keys=keys,
        servers=count,
        row_bytes=shard.row_bytes,
        bytes_per_key=table_bytes / keys,
        table_bytes=table_bytes,
        server_bytes=_server_bytes(table_bytes, slots, dim, count),
        checkpoint_bytes=saved_bytes + slots * _MANIFEST_SECTION_BYTES,
        rates=rates,
        **times,
    )


def _server_bytes(table_bytes: int, slots: int, dim: int, servers: int) -> int:
    """Return what the fullest of so many servers takes: whole slots, the process, batches."""
    share = table_bytes * -(-slots // servers) // slots
    return share + _PROCESS_BYTES + BATCH * (_BATCH_KEY_BYTES + 12 * dim)


def _servers_for(table_bytes: int, slots: int, dim: int, memory: int) -> int:
    usable = memory - memory // 16
    for servers in range(1, slots + 1):
        if _server_bytes(table_bytes, slots, dim, servers) <= usable:
            return servers
    raise ValueError(
        f"no number of servers of {memory:,} bytes holds a table of {table_bytes:,}: a slot of {slots} takes "
        f"{table_bytes // slots:,}; choose more slots, or larger servers"
    )


def measure_rates(
    *,
    dim: int = 1,
    optimizer: Optimizer = _FTRL,
    init: Init = _ZEROS,
    dtype: str = "float32",
    threads: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    sample_bytes: int = SAMPLE_BYTES,
) -> Rates:
    """Measure how fast this machine works with tables of a description.

    Parameters
    ----------
    dim, optimizer, init, dtype
        As for :meth:`shoal.Store.table`.
    threads : int, optional
        Of the store; default: all cores.
    directory : path, optional
        On the disk that checkpoints will go to; a file of the sample's size is made there and removed. Default: that of
        temporary files.
    sample_bytes : int
        How large the table is that it measures on.

    Returns
    -------
    Rates

    Notes
    -----
    Blocks for some seconds and takes twice ``sample_bytes`` of memory and of disk. Saves and loads are the median of
    three. Rates are of this moment: other work on
    the machine slows them. Tables that are much larger are slower by what their memory is slower at random.
    """
    with local(threads=threads) as store:
        spec = TableSpec(name=_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype, seed=0)
        table = store.table(_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype)
        rows = max(1, int(sample_bytes / (LocalShard.of(spec, 2, store.workers).bytes_at(BATCH) / BATCH)))
        inserting = _fill(table, rows)
        pulling, pushing = _touch(store, table, rows)
        saving, loading = [], []
        with tempfile.TemporaryDirectory(dir=directory) as made:
            path = Path(made) / "checkpoint"
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                store.save(path)
                saving.append(time.perf_counter() - began)
                loading.append(_load(path, store.threads))
            size = sum(file.stat().st_size for file in path.iterdir())
    return Rates(
        inserts_per_second=rows / inserting,
        pulls_per_second=pulling,
        pushes_per_second=pushing,
        save_bytes_per_second=size / statistics.median(saving),
        load_bytes_per_second=size / statistics.median(loading),
    )


# In a process of its own, as that of one that starts is: its allocator gives buffers back to the system and takes them
# anew, where that of a process which has saved a table keeps them, and so loads a tenth faster.
_LOADER = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[1])
import shoal
with shoal.local(threads=int(sys.argv[3])) as store:
    began = time.perf_counter()
    store.load(sys.argv[2])
    print(time.perf_counter() - began)
"""


def _load(path: Path, threads: int) -> float:
    """Load a checkpoint: seconds."""
    command = [sys.executable, "-c", _LOADER, json.dumps(sys.path), str(path), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _fill(table: Table, rows: int) -> float:
    """Push ``rows`` new keys: seconds."""
    grads = np.full((BATCH, table.dim), 0.5, np.float32)
    seconds = 0.0
    for begin in range(0, rows, BATCH):
        keys = np.arange(begin, min(begin + BATCH, rows), dtype=np.uint64)
        began = time.perf_counter()
        table.push(keys, grads[: len(keys)]).wait()
        seconds += time.perf_counter() - began
    return seconds


def _touch(store: LocalStore, table: Table, rows: int) -> tuple[float, float]:
    """Pull and push keys that are there: unique keys a second."""
    random = np.random.default_rng(1)
    grads = np.full((BATCH, table.dim), 2.0**-10, np.float32)
    pulling = pushing = 0.0
    keys = 0
    while min(pulling, pushing) < _LEAST_SECONDS:
        some = random.integers(0, rows, BATCH, np.uint64)
        began = time.perf_counter()
        batch = store.key_batch(some)
        table.pull_unique(batch)
        between = time.perf_counter()
        table.push(some, grads).wait()
        pushing += time.perf_counter() - between
        pulling += between - began
        keys += len(batch)
    return keys / pulling, keys / pushing
