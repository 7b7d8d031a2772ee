"""Pipeline: batches read, prepared, sorted and, within a staleness, pulled while the model computes.

    reading thread    read --> prepare
    sorting thread    sort the keys of each module, in a local store find their rows       `ahead` batches wait, no more
    training thread   [begin the pull of batch k + s] --> body of batch k: forward, backward, step --> [tick]

    s = 2    begin 0 1 2 | body 0 | begin 3 | body 1 | begin 4 | body 2 | begin 5 | ...
             batch 3 is pulled between the pushes of batch 0 and those of batch 1

Only the training thread reads or changes rows, in the order above, at any speed of the others: so with one worker or
under BSP runs are repeatable bit for bit.

Invariants
    P1  With staleness 0 no pull is begun here: forward pulls, as in a loop without a pipeline, and finds its keys
        sorted.
    P2  With staleness s the pull of batch i is begun after the pushes of batch i - 1 - s, and before those of batch
        i - s. In a local store it is done then; on a cluster the request is sent then, at clock i - s if each body is a
        clock.
    P3  A batch is returned before the error that followed it. The error of a pull is raised in the body that uses its
        rows, or in place of the body.
    P4  However a pass ends, its threads end with it, and no module keeps a lookup of it.

Threads: a pass belongs to the thread that iterates. Only the reading thread uses the batches' iterator and ``prepare``,
only the sorting thread the functions that return keys; without modules there is no sorting thread. It does not sort
with the store's threads, which forward needs, and has a lower priority: its result is needed one batch later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
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
from shoal.base.scalars import whole
from shoal.data import Reader
from shoal.models.team import Team, Tolerance
from shoal.store.base import Store
from shoal.torch.loader import BatchLoader
from shoal.torch.sparse import PendingLookup, SparseModule

_THREADS = "shoal pipeline"  # their name
_TOLERANCE = Tolerance(replacement=False, change=False, remedy=", which a fit of a shoal.torch.ClickModel can")
_NICE = 10  # of the thread that sorts; the others have 0

log = logging.getLogger("shoal.torch")

KeysOf: TypeAlias = Callable[[Any], Tensor | Sequence[Tensor]]
IssuedLookups: TypeAlias = dict[PendingLookup, SparseModule]


@dataclass(slots=True)
class _Item:
    """A batch in the pipeline."""

    value: Any
    place: Any
    lookups: list[tuple[SparseModule, PendingLookup]]
    error: Exception | None = None  # of the beginning of its pulls


class Pipeline:
    """Batches to loop over, prepared in the background; each ``for`` is a pass.

    Parameters
    ----------
    batches : iterable
        A `shoal.data.Reader`, a `BatchLoader`, a torch ``DataLoader``, a list, ...; iterated in the reading thread.
    modules : mapping of module to callable
        For each embedding whose pulls are to be prepared, a function that returns, for a batch (as ``prepare`` made
        it), the keys that forward will pass to the embedding: a tensor, or a list with one for each call. None: only
        read and prepare ahead.
    staleness : int
        Number of batches whose pushes a pull may miss. 0: none; results are bit-identical to those of the loop without
        a pipeline. s: batch i computes with rows that include the pushes of this worker up to batch i - 1 - s, and none
        of later batches.
    prepare : callable, optional
        Makes an item of each batch, in the reading thread, such as tensors.
    ahead : int
        Sorted batches that may wait, in addition to the ``staleness`` ones whose pulls are pending; one more waits to
        be sorted.
    store : Store, optional
        A store that is ticked after each body. Its workers begin and end each pass together, with any number of batches
        each.
    group : torch.distributed.ProcessGroup, optional
        A group whose processes make every step together, as with DDP: a pass ends for all when the first one has no
        batch left.
    name : str
        Name of a small table by which the workers of ``store`` coordinate; different for pipelines that run at the same
        time.
    rows_ahead : sequence of sequences of tensor
        `rows_ahead` of the loop that the first pass continues, after the same batch.

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
    Under ``SSP(t)`` it sees at least those up to batch i - 1 - s - t: the two add up. Under ``ASP()`` there is no bound
    for the pushes of others. A worker's own pushes are seen, as in any loop, because servers process its calls in
    order; under SSP and ASP one that had to be sent again may arrive late, which ``store.flush()`` at the end of the
    body prevents.

    **Ticks.** The tick after the last body is made when the next batch is requested. After a ``break`` out of a body
    none is made for it: call ``store.tick()`` to apply its pushes. A worker that has ended continues to tick until all
    have, unless it has a ``group``, or is in a loop over ``store.splits``. The others do not wait at the end of a pass
    for one that ends early, by ``break`` or an error, but they wait for its clock until it ticks or leaves.

    **Errors** of reading, of ``prepare`` and of the functions that return keys are raised after all earlier batches; an
    error of a pull is raised in the body that uses its rows. A pass that is left, by ``break``, an error or Ctrl-C,
    ends its threads, and waits for them for 5 seconds at most.

    A pass waits for data without a limit, for servers until the store's deadline, and for the group until the timeout
    of the group.

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
        staleness, ahead = whole("staleness", staleness), whole("ahead", ahead, 1)
        if modules is not None and not isinstance(modules, Mapping):
            raise TypeError(f"modules is a {type(modules).__name__}: pass {{embedding: function of a batch}}")
        if prepare is not None and not callable(prepare):
            raise TypeError(f"prepare is a {type(prepare).__name__}: pass a function of a batch")
        if store is not None and not isinstance(store, Store):
            raise TypeError(f"store is a {type(store).__name__}: pass that of the tables, or None")
        self._modules: dict[SparseModule, KeysOf] = {}
        for module, keys_of in (modules or {}).items():
            if not isinstance(module, SparseModule):
                raise TypeError(f"a {type(module).__name__} pulls no rows: name the shoal.torch.Embedding in it")
            if not callable(keys_of):
                raise TypeError(
                    f"modules has a {type(keys_of).__name__} for table {module.table.name!r}: pass a function that "
                    "returns the keys of a batch"
                )
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
        self._waiting: deque[_Item] = deque()  # of the current pass: batches whose pulls are begun, with a staleness

    def position(self) -> dict[str, Any] | None:
        """Return the position of the loop: after the last batch it received, without those read ahead.

        Returns
        -------
        dict or None
            :meth:`shoal.data.Reader.position`, or the state of a `BatchLoader`, at that batch; None if no batch was
            returned, or ``batches`` is neither.
        """
        if self._place is None or not isinstance(self._batches, Reader):
            place: dict[str, Any] | None = self._place
            return place
        return self._batches.position(self._place)

    def rows_ahead(self) -> list[list[Tensor]]:
        """Return the rows pulled for later batches: without them a resumed loop would pull newer ones.

        Returns
        -------
        list of list of float32 tensor
            For each batch after the last returned one whose pulls are begun (``staleness`` of them, fewer at the end),
            the rows of the unique keys of each lookup. Copies.

        Notes
        -----
        Waits for the pending pulls. For the thread that iterates.
        """
        pulled = itertools.takewhile(lambda item: item.error is None, self._waiting)
        return [[torch.from_numpy(lookup.wait().copy()) for _, lookup in item.lookups] for item in pulled]

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        issued: IssuedLookups = {}
        store = self._store
        team = None
        if store is not None and self._group is None and store.num_workers > 1 and not store.member.takes_splits:
            team = Team(store, self._name, _TOLERANCE)
        try:
            with contextlib.nullcontext() if team is None else team.passing():
                with contextlib.closing(prefetch(self._ready(issued), self._ahead, _THREADS)) as reading:
                    yield from self._bodies(reading, issued)
                if team is not None:
                    team.end_clocks(team.number)
        finally:
            for lookup, module in list(issued.items()):
                module.drop_prefetched(lookup)
            self._waiting = deque()

    def _bodies(self, reading: Iterator[_Item], issued: IssuedLookups) -> Iterator[Any]:
        """Yield each batch; the work between two bodies is done here, in the order of P2."""
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
        """Prepare batches: in a thread that sorts, after one that reads."""
        if not self._modules:
            yield from self._read()
            return
        with contextlib.closing(prefetch(self._read(), 1, _THREADS)) as reading:
            _give_way()  # after the reading thread was started, which would inherit the priority
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
        """Return the cursor or state after the batch that was read last."""
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
    if sys.platform == "linux":  # on other systems this priority is that of the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _begin_pulls(item: _Item) -> None:
    """Begin the pulls of a batch; an error waits for its body (P3)."""
    try:
        for module, lookup in item.lookups:
            lookup.begin(module.table, module.take_buffer)
    except Exception as error:
        item.error = error
