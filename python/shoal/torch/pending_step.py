"""PendingStep: the gradients of several lookups, pushed as one step of each table.

    backward    gradient of lookup 1 of table a, of lookup 2 of table b, of lookup 3 of table a      kept
    its end     a: 1 and 3 summed per unique key --> push        b: 2 --> push                       a step of each

As in torch, where the gradients of all uses of a parameter are added before its optimizer makes a step: however many
modules have a table, and however often each is called. `accumulate` keeps the gradients of several backward calls in
one of these. A backward that fails pushes nothing: autograd drops its callback, which alone keeps the step alive.

Threads: one at a time; the steps of two backward calls are two.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from shoal.table.future import Future
from shoal.table.key_batch import KeyBatch
from shoal.table.table import Table


class _Lookup(Protocol):
    """A `PendingLookup`."""

    batch: KeyBatch


class _Module(Protocol):
    """A `SparseModule`."""

    @property
    def table(self) -> Table: ...

    def sum(self, lookup: Any, grads: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

    def push_now(self, lookup: Any, grads: npt.NDArray[np.float32], *, is_per_key: bool) -> None: ...

    def has_pushed(self, push: Future[None]) -> None: ...


class _Kept(NamedTuple):
    """The gradients of a lookup: of its unique keys, or of each of its keys as passed."""

    module: _Module
    lookup: _Lookup
    grads: npt.NDArray[np.float32]
    is_per_key: bool


class PendingStep:
    """Gradients by table, until they are pushed."""

    def __init__(self) -> None:
        self._kept: dict[Table, list[_Kept]] = {}

    def keep(self, module: _Module, lookup: _Lookup, grads: npt.NDArray[np.float32], *, is_per_key: bool) -> None:
        """Add the gradients of a lookup."""
        self._kept.setdefault(module.table, []).append(_Kept(module, lookup, grads, is_per_key))

    def push(self) -> None:
        """Begin a push to each table: its error is raised by the next forward of the modules."""
        kept, self._kept = self._kept, {}
        for table, of_table in kept.items():
            if len(of_table) == 1:
                one = of_table[0]
                one.module.push_now(one.lookup, one.grads, is_per_key=one.is_per_key)
            else:
                _push_together(table, of_table)


def _push_together(table: Table, kept: list[_Kept]) -> None:
    batches = [one.lookup.batch for one in kept]
    sums = [one.module.sum(one.lookup, one.grads) if one.is_per_key else one.grads for one in kept]
    keys = table.key_batch(np.concatenate([batch.keys for batch in batches]))
    counts = None
    if table.spec.needs_counts:
        seen = np.concatenate([batch.counts() for batch in batches])
        counts = np.bincount(keys.inverse, seen, len(keys)).astype(np.uint32)
    pushed = table.push_unique(keys, keys.sum(np.concatenate(sums)), counts=counts, copy=False)
    for module in dict.fromkeys(one.module for one in kept):
        module.has_pushed(pushed)


_of_backward: WeakValueDictionary[int, PendingStep] = WeakValueDictionary()  # by autograd's number of the backward


def step_of_backward() -> PendingStep:
    """Return the step that is pushed at the end of the backward that runs in this thread."""
    number = torch._C._current_graph_task_id()
    step = _of_backward.get(number)
    if step is None:
        step = _of_backward[number] = PendingStep()
        torch.autograd.Variable._execution_engine.queue_callback(step.push)
    return step
