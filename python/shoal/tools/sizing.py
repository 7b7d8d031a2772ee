"""Sizing of a planned table: memory, servers, checkpoint size and time.

Memory and size are computed with the engine's own arithmetic: the memory of a table of that description and number of
rows (``csrc/table/slot_table.h`` documents its size classes), and the bytes of a checkpoint per row. Times are the
number of rows or bytes divided by rates. Rates are arguments, or are measured: a table of that description and at most
`SAMPLE_BYTES` is filled, pulled from, pushed to, saved and loaded.

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
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from shoal import _core
from shoal.base.dtypes import Dtype, dtype_name
from shoal.base.scalars import plain
from shoal.base.sizes import memory_bytes
from shoal.optim import FTRL, Init, Optimizer, Zeros
from shoal.store.local import LocalStore, local
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec
from shoal.table.table import Table

SAMPLE_BYTES = 256 << 20  # of the table that rates are measured on: larger than caches
BATCH = 65536
_LEAST_SECONDS = 0.5
_ROUNDS = 3  # of saves and loads: a single one varies by a third
_NAME = "estimate"

# Python, NumPy and the engine, idle; working memory of a call, for each key of its batch and each number of a row.
_PROCESS_BYTES = 64 << 20
_BATCH_KEY_BYTES = 64
_MANIFEST_SECTION_BYTES = 45  # of text for each slot

# Of tiers (csrc/tier): pages, and what each row takes.
_PAGE_BYTES = 4096
_MOST_PAGES = 32
_PAGE_HEAD_BYTES = 8
_HASH_BYTES = 8
_FILTER_BYTES = 1.25
_HEAT_BYTES = 4  # for each row that fits in memory
_SPARE_BYTES = 40  # of a row in memory: its hash, and the slack of tables that grow
_LEAST_SLOT_BYTES = 4096
_LEAST_ROW_BYTES = 32  # narrower rows save less memory than the index takes, and a miss reads a page of 100 rows

_FTRL = FTRL()
_ZEROS = Zeros()


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one server for tables of one description.

    Parameters
    ----------
    inserts_per_second, pulls_per_second, pushes_per_second : float
        Unique keys, in batches of 65,536, sorting included: new keys, and existing keys.
    save_bytes_per_second, load_bytes_per_second : float
        Bytes of checkpoints.
    """

    inserts_per_second: float
    pulls_per_second: float
    pushes_per_second: float
    save_bytes_per_second: float
    load_bytes_per_second: float

    def __post_init__(self) -> None:
        for name, value in structs.asdict(self).items():
            if not (isinstance(plain(value), int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")


class TierEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated resources of tables whose rows are on disk as well (:class:`shoal.Tiered`), of all servers together.

    Parameters
    ----------
    memory_bytes : int
        Memory of the tiers.
    disk_bytes : int
        Size of their files, of copies as well.
    index_bytes : int
        Of the memory: filters, fences and counters.
    rows_in_memory : int
        Rows, copies included, for which there is memory besides.
    share_in_memory : float
        Of all rows; the share of uniform keys that are not read from disk. Of skewed keys it is larger.
    written_per_changed : float
        Bytes written for each byte of rows changed, uniformly.
    """

    memory_bytes: int
    disk_bytes: int
    index_bytes: int
    rows_in_memory: int
    share_in_memory: float
    written_per_changed: float

    def reads_per_second(self, keys_per_second: float) -> float:
        """Return the pages that the disks read a second for so many different uniform keys."""
        return (1 - self.share_in_memory) * keys_per_second


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated resources of a table.

    Parameters
    ----------
    keys : int
    servers : int
        Number of servers that share the slots; 1 is a store in one process.
    replicas : int
        Copies of each slot on other servers.
    row_bytes : int
        Weights and the optimizer's state of a key.
    bytes_per_key : float
        Bytes of the table, including its index and unused capacity.
    table_bytes : int
        Sum over all servers, without copies: ``stats().bytes`` after all keys were pushed.
    server_bytes : int
        Maximum memory of a server process: its share of the table and of the copies, the process itself, and working
        memory.
    checkpoint_bytes : int
        Size of a full checkpoint.
    fill_seconds, pass_seconds, save_seconds, load_seconds : float or None
        To insert every key; to train on all examples; to save and to load a checkpoint. All servers work in
        parallel. None without rates.
    rates : Rates or None
        Of one server.
    tier : TierEstimate or None
        With ``tier``; then ``server_bytes`` is with its memory in place of the rows.
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
    replicas: int = 0
    tier: TierEstimate | None = None


def estimate(
    keys: int,
    *,
    dim: int = 1,
    optimizer: Optimizer = _FTRL,
    init: Init = _ZEROS,
    dtype: Dtype = "float32",
    slots: int = 1024,
    memory: int | str | None = None,
    servers: int | None = None,
    replicas: int = 0,
    examples: int = 0,
    features: int = 39,
    rates: Rates | None = None,
    tier: int | None = None,
) -> Estimate:
    """Estimate the resources of a table.

    Parameters
    ----------
    keys : int
        Number of rows.
    dim, optimizer, init, dtype
        As for :meth:`shoal.Store.table`.
    slots : int
        Number of slots of the store or cluster.
    memory : int or str, optional
        Memory of each server's machine in bytes, to compute the number of servers; 1/16 is reserved for the system.
    servers : int, optional
        Number of servers, in place of ``memory``. Default: as few as ``replicas`` permits.
    replicas : int
        Copies of each slot on other servers; less than the number of servers. Each copy is as large as the rows, and
        each push is executed once more for each copy.
    examples : int
        Number of examples in one pass of training.
    features : int
        Features per example: each is a pull and a push of a row.
    rates : Rates, optional
        Results of :func:`measure_rates`, or other known rates. Without them times are not estimated.
    tier : int, optional
        Memory of each server's tier in bytes, in place of ``memory``: rows that do not fit are on its disk. Times are
        not estimated.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        The description is invalid, both ``memory`` and ``servers`` are set, ``replicas`` is not below ``servers``, no
        number of servers has enough memory, or the index alone does not fit in ``tier``.

    Notes
    -----
    The table is assumed to have grown by pushes; a loaded table is up to an eighth smaller, without unused capacity.
    Keys that wait for admission are not counted. The time of a pass is an upper bound, since features repeated in a
    batch are pulled and pushed once. It excludes reading the data and the network.

    Examples
    --------
    >>> import shoal
    >>> plan = shoal.tools.estimate(1_000_000_000)
    >>> round(plan.bytes_per_key, 1), round(plan.checkpoint_bytes / 1e9, 1)
    (19.5, 16.0)
    """
    keys, dim, servers, replicas = map(plain, (keys, dim, servers, replicas))
    slots, examples, features = map(plain, (slots, examples, features))
    if not isinstance(keys, int) or keys < 1:
        raise ValueError(f"keys must be a whole number of at least 1, got {keys!r}")
    if memory is not None and servers is not None:
        raise ValueError("memory determines the number of servers: leave out servers, or memory")
    for name, number, least in (
        ("servers", servers, 1),
        ("replicas", replicas, 0),
        ("examples", examples, 0),
        ("features", features, 1),
    ):
        if number is not None and (not isinstance(number, int) or number < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}")
    spec = TableSpec(name=_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype_name(dtype), seed=0)
    shard = LocalShard.of(spec, slots, _core.ThreadPool(1))
    table_bytes, saved_bytes = shard.bytes_at(keys), shard.saved_bytes_at(keys)
    count = servers or replicas + 1
    if replicas >= count:
        raise ValueError(f"replicas={replicas} takes more than {replicas} servers, got servers={count}")
    if memory is not None:
        count = _servers_for(table_bytes, slots, dim, memory_bytes(memory), replicas)
    elif count > slots:
        raise ValueError(f"{count} servers are more than {slots} slots: make the cluster with more slots")
    tiers = None
    if tier is not None:
        if memory is not None:
            raise ValueError("tier is the memory of a server's rows: leave out memory, or tier")
        tier = memory_bytes(tier)
        tiers = _tier(keys * (1 + replicas), shard.row_bytes, slots, tier, count)
    times: dict[str, float] = {}
    if rates is not None and tier is None:
        touched = examples * features
        times = {
            "fill_seconds": keys * (1 + replicas) / rates.inserts_per_second / count,
            "pass_seconds": touched * (1 / rates.pulls_per_second + (1 + replicas) / rates.pushes_per_second) / count,
            "save_seconds": saved_bytes / rates.save_bytes_per_second / count,
            "load_seconds": saved_bytes / rates.load_bytes_per_second / count,
        }
    return Estimate(
        keys=keys,
        servers=count,
        row_bytes=shard.row_bytes,
        bytes_per_key=table_bytes / keys,
        table_bytes=table_bytes,
        server_bytes=_server_bytes(table_bytes, slots, dim, count, replicas)
        if tier is None
        else tier + tier // 8 + _server_bytes(0, slots, dim, count, replicas),
        checkpoint_bytes=saved_bytes + slots * _MANIFEST_SECTION_BYTES,
        rates=rates,
        replicas=replicas,
        tier=tiers,
        **times,
    )


def _tier(rows: int, row_bytes: int, slots: int, memory: int, servers: int) -> TierEstimate:
    """Estimate the tiers of all servers together, which have so many rows, copies included."""
    least = _LEAST_SLOT_BYTES * -(-slots // servers)
    if not isinstance(memory, int) or memory < least:
        raise ValueError(f"tier must be at least {least} bytes for {-(-slots // servers)} slots, got {memory!r}")
    each = _HASH_BYTES + row_bytes
    page_bytes = rows_in_page = 0
    best = 0.0
    for size in range(_PAGE_BYTES, (_MOST_PAGES + 1) * _PAGE_BYTES, _PAGE_BYTES):
        fit = (size - _PAGE_HEAD_BYTES) // each
        if fit * each / size > best:
            best, page_bytes, rows_in_page = fit * each / size, size, fit
        if best >= 7 / 8:
            break
    total = memory * servers
    pages = -(-rows // rows_in_page)
    index = int(rows * _FILTER_BYTES + pages * _HASH_BYTES + _HEAT_BYTES * min(rows, total // (row_bytes + 16)))
    if index >= total:
        raise ValueError(
            f"the index of {rows:,} rows on disk takes {index:,} bytes, and the tiers have {total:,} in all: give them "
            "more memory, or add servers"
        )
    held = min(rows, (total - index) // (row_bytes + _SPARE_BYTES))
    share = held / rows
    return TierEstimate(
        memory_bytes=total,
        disk_bytes=pages * page_bytes,
        index_bytes=index,
        rows_in_memory=held,
        share_in_memory=share,
        written_per_changed=0.0 if held == rows else max(1.0, 1 / (2 * share)),
    )


def tier_pays(plan: Estimate) -> bool:
    """Return whether rows are wide enough for a tier: it has an index, and reads a page for each miss."""
    return plan.row_bytes >= _LEAST_ROW_BYTES


def _server_bytes(table_bytes: int, slots: int, dim: int, servers: int, replicas: int) -> int:
    """Return the memory of the server with the most slots: slots, copies, process, batches."""
    share = table_bytes * -(-slots // servers) // slots * (1 + replicas)
    return share + _PROCESS_BYTES + BATCH * (_BATCH_KEY_BYTES + 12 * dim)


def _servers_for(table_bytes: int, slots: int, dim: int, memory: int, replicas: int) -> int:
    usable = memory - memory // 16
    for servers in range(1 + replicas, slots + 1):
        if _server_bytes(table_bytes, slots, dim, servers, replicas) <= usable:
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
    dtype: Dtype = "float32",
    threads: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    sample_bytes: int = SAMPLE_BYTES,
) -> Rates:
    """Measure the speed of this machine for tables of a description.

    Parameters
    ----------
    dim, optimizer, init, dtype
        As for :meth:`shoal.Store.table`.
    threads : int, optional
        Threads of the store; default: all cores.
    directory : path, optional
        On the disk of the checkpoints; a file of the sample's size is written there and removed. Default: the directory
        of temporary files.
    sample_bytes : int
        Size of the table that is measured.

    Returns
    -------
    Rates

    Notes
    -----
    Blocks for some seconds and uses twice ``sample_bytes`` of memory and of disk. Saves and loads are the median of
    three. Other work on the machine lowers the rates. Much larger tables are slower, since random accesses to
    their memory are.
    """
    with local(threads=threads) as store:
        spec = TableSpec(name=_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype_name(dtype), seed=0)
        table = store.table(_NAME, dim=dim, optimizer=optimizer, init=init, dtype=dtype)
        rows = max(1, int(sample_bytes / (LocalShard.of(spec, 2, store.workers).bytes_at(BATCH) / BATCH)))
        inserting = _fill(table, rows)
        pulling, pushing = _touch(store, table, rows)
        saving, loading = [], []
        with tempfile.TemporaryDirectory(dir=directory) as made:
            path = Path(made) / "checkpoint"
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                store.save(path, overwrite=True)
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


# In a process of its own, like a starting server: the allocator of a process that has saved a table would reuse
# buffers, and the load would be faster.
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
    """Load a checkpoint; return the seconds."""
    command = [sys.executable, "-c", _LOADER, json.dumps(sys.path), str(path), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _fill(table: Table, rows: int) -> float:
    """Push ``rows`` new keys; return the seconds."""
    grads = np.full((BATCH, table.dim), 0.5, np.float32)
    seconds = 0.0
    for begin in range(0, rows, BATCH):
        keys = np.arange(begin, min(begin + BATCH, rows), dtype=np.uint64)
        began = time.perf_counter()
        table.push(keys, grads[: len(keys)]).result()
        seconds += time.perf_counter() - began
    return seconds


def _touch(store: LocalStore, table: Table, rows: int) -> tuple[float, float]:
    """Pull and push existing keys; return unique keys per second."""
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
        table.push(some, grads).result()
        pushing += time.perf_counter() - between
        pulling += between - began
        keys += len(batch)
    return keys / pulling, keys / pushing
