"""Pipeline: batches read, prepared, sorted and, within a staleness, pulled while the model computes.

    reading thread    read --> prepare
    sorting thread    sort the keys of each module, in a local store find their rows       `ahead` batches wait, no more
    training thread   [begin the pull of batch k + s] --> body of batch k: forward, backward, step --> [tick]

    s = 2    begin 0 1 2 | body 0 | begin 3 | body 1 | begin 4 | body 2 | begin 5 | ...
             batch 3 is pulled between the pushes of batch 0 and those of batch 1

All that reads or changes rows happens in the training thread, in the order above, for any speed of the others: so
with one worker or under BSP a run has the same bits every time.

Invariants
    P1  With staleness 0 no pull is begun here: forward pulls, as in a loop without a pipeline, and finds its keys
        sorted.
    P2  With staleness s the pull of batch i is begun behind the pushes of batch i - 1 - s, and before those of batch
        i - s. In a local store it is done then; on a cluster the servers are asked, at clock i - s if each body is a
        clock.
    P3  A batch is given before the error that came behind it. What a pull raises is raised in the body that uses it, or
        in its place.
    P4  However a pass ends, its threads end with it, and no module keeps a lookup of it.

Threads: a pass belongs to the thread that iterates. The reading thread has the batches' iterator and ``prepare`` to
itself, the sorting thread the functions that return keys; where there are no modules, there is none. It does not sort
with the store's threads, which forward would find busy, and has a lower priority: its work is needed only a batch
later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal import _core
from shoal.base.prefetch import prefetch
from shoal.data import Reader
from shoal.models.pass_coordinator import PassCoordinator
from shoal.store.base import Store
from shoal.torch.loader import BatchLoader
from shoal.torch.sparse import PendingLookup, SparseModule

__all__ = ["Pipeline"]

_THREADS = "shoal pipeline"  # their name
_NICE = 10  # of the thread that sorts; the others have 0

log = logging.getLogger("shoal.torch")

KeysOf: TypeAlias = Callable[[Any], Tensor | Sequence[Tensor]]
IssuedLookups: TypeAlias = dict[PendingLookup, SparseModule]


@dataclass(slots=True)
class _Item:
    """A batch on its way."""

    value: Any
    place: Any
    lookups: list[tuple[SparseModule, PendingLookup]]
    error: Exception | None = None  # of the beginning of its pulls


class Pipeline:
    """Batches to loop over, prepared in the background; each ``for`` is a pass.

    Parameters
    ----------
    batches : iterable
        A `shoal.Reader`, a `BatchLoader`, a torch ``DataLoader``, a list, ...; iterated in the reading thread.
    modules : mapping of module to callable
        For each embedding that is to be prepared, a function that returns the keys of a batch (as ``prepare`` made it)
        that forward will call it with: a tensor, or one for each call. None: only read and prepare ahead.
    staleness : int
        How many batches' pushes a pull may miss. 0: none, the bits are those of the loop without a pipeline. s: batch i
        computes with rows that have the pushes of this worker up to batch i - 1 - s, and none of later ones.
    prepare : callable, optional
        Makes of each batch what is given, in the reading thread: tensors, for one.
    ahead : int
        Batches that may wait sorted, besides the ``staleness`` whose rows are under way; one more waits to be sorted.
    store : Store, optional
        Ticked behind each body. Its workers begin and end each pass together, however many batches each has.
    group : torch.distributed.ProcessGroup, optional
        Whose processes make every step together, as those of DDP do: a pass ends for all with the shortest.
    name : str
        Of what the workers of ``store`` agree by, a small table; one for each pipeline that runs at a time.
    rows_ahead : sequence of sequences of tensor
        `rows_ahead` of the loop that the first pass continues, behind the same batch.

    Raises
    ------
    TypeError
        One of ``modules`` is not an embedding of shoal.
    ValueError
        A number is out of range.

    Notes
    -----
    **On a cluster** with ``store`` a body is a clock: batch i is pulled at clock i - s. Under ``BSP()`` it sees all
    pushes of all workers up to batch i - 1 - s and none of later ones, and the bits do not depend on time or servers.
    Under ``SSP(t)`` it sees at least those up to batch i - 1 - s - t: the two add up. Under ``ASP()`` others' have no
    bound. A worker's own pushes are seen, as in any loop, because servers take its calls in order; one that had to be
    sent again may come late under SSP and ASP, and ``store.flush()`` at the end of the body makes sure.

    **Ticks.** The tick behind the last body is made when the next batch is asked for. After a ``break`` out of a body
    none is made for it: call ``store.tick()`` if its pushes are to count. A worker that has ended ticks on until all
    have, unless it has a ``group``, or is in a loop over ``store.splits``; one that ends early, by ``break`` or an
    error, is not waited for in the end of a pass, but its clock is until it ticks or leaves.

    **Errors** of reading, of ``prepare`` and of telling keys come behind all batches before them; an error of a pull
    comes in the body that uses its rows. A pass that is left, by ``break``, an error or Ctrl-C, ends its threads, which
    are waited for 5 seconds at most.

    Waits for data as long as they take; for servers, no longer than the store's deadline; for the group, than its own.

    Examples
    --------
    >>> import torch
    >>> store = shoal.local()
    >>> user = shoal.torch.Embedding(store.table("user", dim=2, optimizer=shoal.SGD(lr=1.0)))
    >>> batches = [torch.tensor([7, 3]), torch.tensor([7, 9])]
    >>> for keys in Pipeline(batches, {user: lambda keys: keys}, staleness=1, store=store):
    ...     user(keys).sum().backward()
    >>> user(batches[1]).tolist(), store.clock
    ([[-2.0, -2.0], [-1.0, -1.0]], 2)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        modules: Mapping[torch.nn.Module, KeysOf] | None = None,
        *,
        staleness: int = 0,
        prepare: Callable[[Any], Any] | None = None,
        ahead: int = 2,
        store: Store | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        name: str = "pipeline",
        rows_ahead: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        if operator.index(staleness) < 0 or operator.index(ahead) < 1:
            raise ValueError(f"staleness {staleness}, ahead {ahead}: pass 0 or more, and 1 or more")
        self._modules: dict[SparseModule, KeysOf] = {}
        for module, keys_of in (modules or {}).items():
            if not isinstance(module, SparseModule):
                raise TypeError(f"a {type(module).__name__} pulls no rows: name the shoal.torch.Embedding in it")
            self._modules[module] = keys_of
        self._batches = batches
        self._staleness = staleness
        self._prepare = prepare
        self._ahead = ahead
        self._store = store
        self._group = group
        self._name = name
        self._place: Any = None
        self._warned = False
        self._rows_ahead = deque(rows_ahead)
        self._waiting: deque[_Item] = deque()  # begun, where there is a staleness; of the pass under way

    def position(self) -> dict[str, Any] | None:
        """Return the position of the loop: behind the last batch it got, however far reading is ahead of it.

        Returns
        -------
        dict or None
            What :meth:`shoal.Reader.position`, or the state of a `BatchLoader`, was at that batch; None if no batch was
            given, or ``batches`` is neither.
        """
        if self._place is None or not isinstance(self._batches, Reader):
            place: dict[str, Any] | None = self._place
            return place
        return self._batches.position(self._place)

    def rows_ahead(self) -> list[list[Tensor]]:
        """Return the rows pulled for batches to come: without them a resumed loop would pull newer ones.

        Returns
        -------
        list of list of float32 tensor
            For each batch behind the one that was given last whose pulls are begun, ``staleness`` of them or fewer at
            the end, the rows of the unique keys of each lookup. Copies.

        Notes
        -----
        Waits for the pulls that are under way. For the thread that iterates.
        """
        begun = itertools.takewhile(lambda item: item.error is None, self._waiting)
        return [[torch.from_numpy(lookup.wait().copy()) for _, lookup in item.lookups] for item in begun]

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        issued: IssuedLookups = {}
        store = self._store
        coordinator = None if store is None or self._group is not None else PassCoordinator(store, self._name)
        try:
            if coordinator is not None:
                coordinator.begin()
            with contextlib.closing(prefetch(self._ready(issued), self._ahead, _THREADS)) as reading:
                yield from self._bodies(reading, issued)
            if store is not None and coordinator is not None and not coordinator.is_alone:
                coordinator.end_pass()
                store.barrier()  # before any of them begins another pass
        except BaseException:
            if coordinator is not None:
                coordinator.abandon()
            raise
        finally:
            for lookup, module in list(issued.items()):
                module.drop_prefetched(lookup)
            self._waiting = deque()

    def _bodies(self, reading: Iterator[_Item], issued: IssuedLookups) -> Iterator[Any]:
        """Give each batch; what is done between two bodies is done here, in the order of P2."""
        waiting = self._waiting = deque()
        failed: Exception | None = None
        ended = False
        while True:
            while not ended and len(waiting) <= self._staleness:
                try:
                    item = next(reading)
                except StopIteration:
                    ended = True
                except Exception as error:
                    ended, failed = True, error
                else:
                    if self._rows_ahead:
                        _set_rows(item, self._rows_ahead.popleft())
                    elif self._staleness:
                        _begin_pulls(item)
                    waiting.append(item)
            if failed is not None and not waiting:
                raise failed
            if not self._all_have(bool(waiting)):
                return
            item = waiting.popleft()
            if item.error is not None:
                raise item.error
            self._place = item.place
            yield item.value
            self._check_used(item, issued)
            if self._store is not None:
                self._store.tick()

    def _all_have(self, one: bool) -> bool:
        """Whether this worker, and all processes of the group, have a batch."""
        if self._group is None:
            return one
        flag = torch.tensor([one], dtype=torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, self._group)
        return bool(flag.item())

    def _check_used(self, item: _Item, issued: IssuedLookups) -> None:
        """Drop lookups that a body did not use."""
        for module, lookup in item.lookups:
            del issued[lookup]
            if module.drop_prefetched(lookup) and not self._warned:
                self._warned = True
                log.warning(
                    "a batch ended without a forward of the embedding over table %r with the keys that `modules` "
                    "returns for it: the work done ahead is lost (reported once)",
                    module.table.name,
                )

    def _ready(self, issued: IssuedLookups) -> Generator[_Item, None, None]:
        """Get batches ready: in a thread that sorts, behind one that reads."""
        if not self._modules:
            yield from self._read()
            return
        with contextlib.closing(prefetch(self._read(), 1, _THREADS)) as reading:
            _give_way()  # now, for the reading thread would have it of this one
            sorter = _core.ThreadPool(1)
            for item in reading:
                for module, keys_of in self._modules.items():
                    found = keys_of(item.value)
                    for keys in (found,) if isinstance(found, Tensor) else found:
                        lookup = module.sort_ahead(keys, workers=sorter)
                        issued[lookup] = module
                        item.lookups.append((module, lookup))
                yield item

    def _read(self) -> Generator[_Item, None, None]:
        """Read and prepare."""
        iterator = iter(self._batches)
        try:
            for batch in iterator:
                place = self._cursor()
                yield _Item(batch if self._prepare is None else self._prepare(batch), place, [])
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _cursor(self) -> Any:
        """Return the cursor or state behind the batch that was read last."""
        if isinstance(self._batches, Reader):
            return self._batches.cursor
        return self._batches.state_dict() if isinstance(self._batches, BatchLoader) else None


def _set_rows(item: _Item, rows: Sequence[Tensor]) -> None:
    """Set the rows of a batch to those pulled in the loop that this one resumes."""
    try:
        for (module, lookup), its in zip(item.lookups, rows, strict=True):
            lookup.set_rows(module.table, its.numpy(), module.take_buffer)
    except Exception as error:
        item.error = error


def _give_way() -> None:
    """Lower the priority of this thread: its work is needed only for the next batch."""
    if sys.platform == "linux":  # elsewhere a number of this kind is a process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _begin_pulls(item: _Item) -> None:
    """Begin the pulls of a batch; an error waits for its body (P3)."""
    try:
        for module, lookup in item.lookups:
            lookup.begin(module.table, module.take_buffer)
    except Exception as error:
        item.error = error
