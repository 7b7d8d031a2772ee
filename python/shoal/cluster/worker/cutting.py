"""Cutting a call into parts: along the map's runs of slots, and where a message would be too large.

A keyed call needs a message for each run of slots in which it has keys: adjacent arcs of an endpoint share one. A call
of one slot goes to the endpoint of that slot, any other call once to each endpoint that serves slots.

Threads: functions of their arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from shoal import _core
from shoal.cluster.protocol.slot_map import ClusterMap
from shoal.cluster.worker.calls import Call, Policy, RequestPart

Op = _core.Op

_MAX_PARTS = 128  # of a call at one endpoint: a part's number is a byte, and a newer map may need some more


def cut(call: Call, map: ClusterMap, policy: Policy, first: int, end: int) -> Iterator[RequestPart]:
    """Yield a part for each message that slots [first, end) of a call need under this map."""
    begins = call.begins
    if call.slot is not None:
        endpoint = map.of_slot(call.slot)
        yield RequestPart(call, endpoint.address, endpoint.server, call.slot, call.slot + 1, 0, 0)
        return
    if begins is None:
        for endpoint in map.owners:
            yield RequestPart(call, endpoint.address, endpoint.server, 0, map.slots, 0, 0)
        return
    runs = map.runs
    for k in range(0 if first == 0 else bisect_right(runs, first, key=lambda run: run.end_slot), len(runs)):
        low, high, endpoint, siblings = runs[k]
        if low >= end:
            return
        low, high = max(first, low), min(end, high)
        fewest = -(-int(begins[high] - begins[low]) // max(_MAX_PARTS // siblings, 1))
        rows = max(fewest, policy.message_bytes // row_bytes(call), 1)
        # Cuts are between slots: a slot accepts a sequence once.
        while low < high and begins[low] < begins[high]:
            cut = high
            if begins[high] - begins[low] > rows:
                cut = max(int(np.searchsorted(begins, begins[low] + np.uint64(rows), "right")) - 1, low + 1)
            begin, stop = int(begins[low]), int(begins[cut])
            if stop > begin:
                _check_fits(call, policy, low, cut, stop - begin)
                yield RequestPart(call, endpoint.address, endpoint.server, low, cut, begin, stop)
            low = cut


def _check_fits(call: Call, policy: Policy, first: int, end: int, rows: int) -> None:
    size = rows * (8 + (0 if call.values is None else call.values.itemsize * call.dim))
    size += 0 if call.counts is None else -(-rows // 8) + 5 * rows
    if size > policy.largest_message:
        raise ValueError(
            f"{rows} rows of slots {first} to {end} are {size} bytes of a {Op(call.op).name.lower()}, and a server "
            f"takes at most {policy.largest_message} in a message: pass fewer keys at a time"
        )


def row_bytes(call: Call) -> int:
    """Return the bytes of a row in the larger of request and answer."""
    return 8 + (4 * call.dim if call.op in (Op.PULL, Op.PUSH, Op.ASSIGN, Op.STATE) else 0)
