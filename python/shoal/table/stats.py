"""Statistics of a table."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal import _core

# The numbers of a tier in the order in which servers send them.
TIER_NUMBERS = tuple(name for name, _, _ in _core.STATISTICS["tier"])


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """The tier of a table at one moment; counters start when the table is made or loaded.

    On a cluster numbers are sums over the servers, and counters of a server start when it has joined or been given a
    copy of rows.

    Parameters
    ----------
    rows_in_memory, rows_on_disk : int
        A row may be in both; those on disk include rows that were changed or erased since.
    memory_bytes : int
        What the limit is compared with.
    index_bytes : int
        Of these, the filters, the fences of pages and the counters of use.
    disk_bytes : int
        Size of the file.
    hits, misses, absent : int
        Unique keys of calls whose row was in memory, was read from disk, or did not exist.
    prefetched : int
        Of the misses, rows that were read before the call: see :meth:`shoal.Table.prefetch`.
    reads : int
        Pages that were read for them, ``absent_reads`` for keys that do not exist.
    absent_reads : int
    rows_changed : int
        Unique keys of calls that change rows.
    merges : int
        How often the rows of a slot were written anew.
    background_merges : int
        Of these, between calls.
    merged_bytes_read, bytes_written : int
        By merges, and by functions of all rows.
    is_direct : bool
        Whether the file system reads and writes around its cache (``O_DIRECT``); on a cluster that of every server.
    is_async : bool
        Whether pages are read by ``io_uring``, and not by threads; on a cluster by every server.
    """

    rows_in_memory: int
    rows_on_disk: int
    memory_bytes: int
    index_bytes: int
    disk_bytes: int
    hits: int
    misses: int
    prefetched: int
    absent: int
    absent_reads: int
    reads: int
    rows_changed: int
    merges: int
    background_merges: int
    merged_bytes_read: int
    bytes_written: int
    is_direct: bool
    is_async: bool


class TableStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a table at one moment; counters start when the table is made or loaded.

    Parameters
    ----------
    step : int
        Pushes since the table was made, also those before it was saved and loaded. Under SSP and ASP servers may
        differ: the highest number.
    rows : int
    bytes : int
        Memory of index and rows, in bytes.
    bytes_per_row : float
        NaN for an empty table.
    load : float
        Rows divided by the cells of the index.
    pulls, pushes : int
        Requests.
    keys_pulled, keys_pushed : int
        Unique keys in them.
    rows_created, rows_erased : int
    nonfinite_rows : int
        Rows that a push left unchanged because its gradient, or the new row, was not finite.
    refused : int
        Occurrences of keys that were not admitted.
    waiting : int
        Keys that wait for admission, if the rule counts them individually.
    expired : dict of int
        Rows dropped by each of the table's expiry rules, by class name; for `MaxRows`, pushes included.
    tier : TierStats, optional
        Of a table whose rows are on disk as well (:class:`shoal.Tiered`); ``bytes`` and ``load`` are of its memory.
    """

    step: int
    rows: int
    bytes: int
    bytes_per_row: float
    load: float
    pulls: int
    pushes: int
    keys_pulled: int
    keys_pushed: int
    rows_created: int
    rows_erased: int
    nonfinite_rows: int
    refused: int = 0
    waiting: int = 0
    expired: Mapping[str, int] = msgspec.field(default_factory=dict)
    tier: TierStats | None = None


def tier_stats(stats: Mapping[str, int]) -> TierStats | None:
    """Return the tiers' part of the statistics of a shard, or of their sums; None if there are no tiers in them."""
    tiers = stats.get("tiers", 0)
    if tiers == 0:
        return None
    values: dict[str, Any] = {name: stats[f"tier_{name}"] for name in TIER_NUMBERS}
    for flag in ("is_direct", "is_async"):
        values[flag] = values[flag] == tiers
    return TierStats(**values)
