"""The base of all modules over a table: lookups, pushes, accumulated gradients, and the state of a module.

    forward    keys --> PendingLookup: sorted once, pull begun --> rows of the unique keys --> the module's output
    backward   gradient --> summed per unique key of the same lookup --> pushed at the end of it, or of `accumulate`

A `PendingLookup` is a batch's keys in hash order and the pull of their rows. `sort_ahead` makes one, `prefetch` begins
its pull, and a forward with the same keys uses it; otherwise the forward makes its own. The keys of the last lookup of
a store are not sorted again for another module.

Threads: `sort_ahead`, `prefetch` and `drop_prefetched` may be called from any thread, forward and backward from those
in which torch runs them. Fork: a child's copy of a module raises WrongProcessError when it is used.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shoal import _core
from shoal.base.plural import counted
from shoal.errors import ShoalError
from shoal.table.future import Future, Waitable
from shoal.table.key_batch import KeyBatch
from shoal.table.shard import ShardReader
from shoal.table.table import Table
from shoal.torch import borrowed_pool, ops
from shoal.torch.pending_step import PendingStep, step_of_backward

Keys: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.float32]

log = logging.getLogger(__name__)

_VERSION = 1  # of the state in state_dict
_SEED = 0  # of digests
_FREE_ROWS = 2  # buffers that a module keeps: for the rows of a forward, and for the sums of a backward

# The batch that a store's or a pipeline's threads sorted last: the engine's object, which does not keep them alive.
_last: WeakKeyDictionary[_core.ThreadPool, _core.KeyBatch] = WeakKeyDictionary()


def keys_of(keys: Tensor | object) -> Keys:
    """View the keys of a tensor as uint64[n], in memory order; copied only if the tensor is not contiguous."""
    if not isinstance(keys, Tensor) or keys.dtype not in (torch.int64, torch.uint64):
        got, remedy = str(getattr(keys, "dtype", "")), "keys.long()"
        if not isinstance(keys, Tensor):
            got = type(keys).__name__
            remedy = "torch.from_numpy(keys)" if got == "ndarray" else "torch.tensor(keys)"
        raise TypeError(f"keys must be an int64 or uint64 tensor, got {got}: pass {remedy}")
    if keys.layout != torch.strided:
        raise ValueError(f"keys are of layout {keys.layout}: pass a dense tensor, keys.to_dense()")
    if keys.device.type != "cpu":
        raise ValueError(f"keys are on {keys.device}, rows on the CPU: pass keys.cpu()")
    flat: Keys = keys.contiguous().view(-1).numpy().view(np.uint64)
    return flat


def floats_of(tensor: Tensor) -> Rows:
    """View a tensor as contiguous float32; copied only if it is not."""
    given = tensor.detach()
    if given.dtype != torch.float32:
        given = given.float()
    array: Rows = given.contiguous().numpy()
    return array


def _sorted(table: Table, keys: Keys, workers: _core.ThreadPool | None = None) -> KeyBatch:
    workers = table.workers if workers is None else workers
    last = _last.get(workers)
    if last is not None and last.is_of(keys, workers):
        return KeyBatch.of(last, workers)
    batch = table.key_batch(keys, workers)
    _last[workers] = batch.native
    return batch


class PendingLookup:
    """The sorted keys of one forward, the pull of their rows, and, in a local store, their locations."""

    __slots__ = ("_pending", "_rows", "batch", "digest", "locations")

    def __init__(self, batch: KeyBatch, reader: ShardReader) -> None:
        self.batch = batch
        self.digest = b""  # of the keys as passed, if a forward is to find the lookup
        self.locations = reader.make_locations(batch.native)
        self._rows: Rows | None = None
        self._pending: Waitable | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the pull was begun."""
        return self._rows is not None

    def begin(self, table: Table, new_buffer: Callable[[int], Rows]) -> None:
        """Begin the pull, unless it was begun; ``new_buffer(n)`` returns a buffer of n rows."""
        if self._rows is None:
            rows = new_buffer(len(self.batch))
            self._pending = table.reader.pull(self.batch.native, rows, self.locations)
            self._rows = rows

    def set_rows(self, table: Table, rows: Rows, new_buffer: Callable[[int], Rows]) -> None:
        """Set the rows of the unique keys, instead of pulling them."""
        if rows.shape != (len(self.batch), table.dim):
            raise ValueError(
                f"rows {rows.shape} were pulled ahead from table {table.name!r} for {len(self.batch)} keys: the data "
                "are not those of the resumed fit"
            )
        self._rows = new_buffer(len(self.batch))
        self._rows[:] = rows

    def wait(self) -> Rows:
        """Wait for the rows of the unique keys, in hash order; the lookup keeps them."""
        assert self._rows is not None  # begun
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self._rows

    def rows(self) -> Rows:
        """Wait for the rows of the unique keys, in hash order. They are returned once: a lookup does not keep them."""
        rows = self.wait()
        self._rows = None
        return rows


class SparseModule(nn.Module):
    """A module whose rows are those of a table: the base of `Embedding` and `EmbeddingBag`.

    Parameters
    ----------
    table : shoal.Table
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"an embedding needs a table, made by store.table(name, dim=...), got {table!r}")
        if table.spec.is_integer:
            raise ValueError(
                f"an embedding needs weights, and table {table.name!r} has int64: make it with dtype='float32'"
            )
        self._table = table
        # There is no weight that outputs could depend on: this parameter without elements stands for the rows, so that
        # backward is called, and what freezes the parameters of a model freezes the rows.
        self.anchor = nn.Parameter(torch.zeros(0))
        self.number = ops.register(self)
        self._lock = threading.Lock()  # guards _lookups
        self._lookups: list[PendingLookup] = []
        self._pushes: deque[Future[None]] = deque()
        self._free_rows: list[Rows] = []
        self._accumulated: PendingStep | None = None  # under accumulate()

    def extra_repr(self) -> str:
        """Return the table, for ``repr``."""
        return f"{self._table.name!r}, dim={self._table.dim}, optimizer={self._table.optimizer}"

    @property
    def table(self) -> Table:
        """The table of the rows."""
        return self._table

    @property
    def dim(self) -> int:
        """Floats in a row."""
        return self._table.dim

    # ---- ahead of forward ----------------------------------------------------------------------------------------

    def sort_ahead(self, keys: Tensor, *, workers: _core.ThreadPool | None = None) -> PendingLookup:
        """Sort the keys of a later forward, and in a local store find their rows, or begin to read them from disk.

        Nothing is pulled.

        Parameters
        ----------
        keys : int64 or uint64 tensor of any shape
            The first forward with the same keys in the same order uses the result.
        workers : optional
            The threads that sort; default: the store's own.

        Returns
        -------
        PendingLookup
            For `drop_prefetched`.

        Notes
        -----
        Safe from any thread.
        """
        given = keys_of(keys)
        lookup = self._new_lookup(given, workers)
        lookup.digest = _core.digest(given, _SEED)
        if lookup.locations is not None:
            self._table.reader.prefetch(lookup.batch.native, lookup.locations)
        return self._put(lookup)

    def prefetch(self, keys: Tensor) -> PendingLookup:
        """Begin to pull the rows of a later forward.

        Parameters
        ----------
        keys : int64 or uint64 tensor of any shape
            The first forward with the same keys in the same order uses the present rows: it sees the pushes that were
            begun before this call. `sort_ahead` may have been called for these keys.

        Returns
        -------
        PendingLookup
            For `drop_prefetched`.

        Notes
        -----
        In a local store the rows have been read when this returns; on a cluster the request has been sent. An error of
        the pull is raised by the forward that uses it. Safe from any thread.
        """
        given = keys_of(keys)
        lookup = self._find(given, with_rows=False)
        lookup.digest = lookup.digest or _core.digest(given, _SEED)
        lookup.begin(self._table, self.take_buffer)
        return self._put(lookup)

    def drop_prefetched(self, *lookups: PendingLookup) -> int:
        """Drop lookups of `sort_ahead` and `prefetch` that no forward has used.

        Parameters
        ----------
        *lookups : PendingLookup
            The lookups to drop; default: all.

        Returns
        -------
        int
            Number of dropped lookups.
        """
        with self._lock:
            before = len(self._lookups)
            self._lookups = [one for one in self._lookups if lookups and one not in lookups]
            return before - len(self._lookups)

    def _find(self, keys: Keys, *, with_rows: bool = True) -> PendingLookup:
        """Take the first lookup of these keys, or make one; not ``with_rows``: one whose pull has not begun."""
        if self._lookups:
            digest = _core.digest(keys, _SEED)
            with self._lock:
                for place, lookup in enumerate(self._lookups):
                    if (with_rows or not lookup.has_begun) and lookup.digest == digest:
                        return self._lookups.pop(place)
        return self._new_lookup(keys)

    def _new_lookup(self, keys: Keys, workers: _core.ThreadPool | None = None) -> PendingLookup:
        reader = self._table.reader  # raises before any work if the store was closed
        return PendingLookup(_sorted(self._table, keys, workers), reader)

    def _put(self, lookup: PendingLookup) -> PendingLookup:
        with self._lock:
            self._lookups.append(lookup)
        return lookup

    # ---- forward and backward ------------------------------------------------------------------------------------

    @property
    def records(self) -> bool:
        """Whether a backward of what forward returns now would reach the rows: they are not frozen."""
        return self.anchor.requires_grad and torch.is_grad_enabled()

    @property
    def pushes(self) -> bool:
        """Whether it would push: in training mode. In eval mode it raises an error."""
        return self.training and self.records

    def raise_unlearned(self) -> NoReturn:
        """Raise the error of a backward that reaches rows which were read in eval mode."""
        raise RuntimeError(
            f"the rows of table {self._table.name!r} would not learn: forward was called in eval mode. Call train() "
            "before the forward of a step, or requires_grad_(False) on the embedding to freeze its rows"
        )

    def begin_lookup(self, keys: Keys) -> PendingLookup:
        """Begin a forward: raise errors of earlier pushes, and begin a pull from servers."""
        self._raise_failed()
        borrowed_pool.borrow()
        lookup = self._find(keys)
        if lookup.locations is None:
            lookup.begin(self._table, self.take_buffer)
        return lookup

    def push(self, lookup: PendingLookup, grads: Rows) -> None:
        """Keep the gradients of a batch's unique keys for the step of this backward, or that of `accumulate`."""
        (self._accumulated or step_of_backward()).keep(self, lookup, grads, is_per_key=False)

    def push_per_key(self, lookup: PendingLookup, grad: Tensor) -> None:
        """As `push`, of a gradient for each key as passed."""
        grads = floats_of(grad).reshape(-1, self.dim)
        if self._accumulated is None and lookup.locations is not None:
            step_of_backward().keep(self, lookup, grads, is_per_key=True)
        else:
            self.push(lookup, self.sum(lookup, grads))

    def sum(self, lookup: PendingLookup, grads: Rows) -> Rows:
        """Sum a gradient for each key as passed per unique key."""
        sums = self.take_buffer(len(lookup.batch))
        lookup.batch.native.sum(grads, self.dim, sums, self._table.workers)
        return sums

    def push_now(self, lookup: PendingLookup, grads: Rows, *, is_per_key: bool) -> None:
        """Push the only gradients of a step, of a batch's unique keys or of each key as passed."""
        if is_per_key:
            self.has_pushed(self._table.push_per_key(lookup.batch, grads, locations=lookup.locations))
            return
        self.has_pushed(self._table.push_unique(lookup.batch, grads, copy=False, locations=lookup.locations))
        if not self._table.shard.retains_arrays:
            self.return_buffer(grads)

    def has_pushed(self, push: Future[None]) -> None:
        """Have a later forward raise the error of a push, once it is known."""
        self._pushes.append(push)

    def take_buffer(self, rows: int) -> Rows:
        """Return a buffer of ``rows`` rows, not initialized; reuse saves page faults in every step."""
        size = rows * self.dim
        try:
            buffer = self._free_rows.pop()
        except IndexError:
            buffer = np.empty(0, np.float32)
        if buffer.size < size:
            buffer = np.empty(size + size // 4, np.float32)  # batches vary: a longer one need not allocate again
        return buffer[:size].reshape(rows, self.dim)

    def return_buffer(self, rows: Rows) -> None:
        """Return a buffer of `take_buffer` that is not in use any more."""
        if len(self._free_rows) < _FREE_ROWS and rows.base is not None:
            self._free_rows.append(rows.base)

    def _raise_failed(self) -> None:
        pushes = self._pushes
        while pushes and pushes[0].done():
            pushes.popleft().result()

    def start_accumulating(self, step: PendingStep) -> None:
        """Keep the gradients of every backward from now on for a step."""
        if self._accumulated is not None:
            raise RuntimeError(
                f"gradients of table {self._table.name!r} are accumulated already: leave that block first"
            )
        self._accumulated = step

    def stop_accumulating(self) -> None:
        """Push the gradients of every later backward at its end."""
        self._accumulated = None

    # ---- state ---------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "anchor"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state_dict, prefix + "anchor": self.anchor}, prefix, *rest)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the table and its number of rows for ``state_dict()``; ``store.save`` saves the rows themselves."""
        try:
            rows = len(self._table)
        except ShoalError:  # the store was closed, or is the parent's: its rows cannot be counted
            rows = 0
        return {"version": _VERSION, "table": self._table.name, "rows": rows}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that the state passed to ``load_state_dict`` is that of a module over a table of this name.

        Raises
        ------
        ValueError
            It belongs to another table, or to a later version.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state of an embedding has version {state.get('version')!r}, this shoal supports {_VERSION}"
            )
        if state.get("table") != self._table.name:
            raise ValueError(
                f"this state is of an embedding over table {state.get('table')!r}, the module's is "
                f"{self._table.name!r}. Rows are not part of it: store.save() and store.load() move them"
            )
        rows = state.get("rows", 0)
        if rows and len(self._table) == 0:
            log.warning(
                "table %r had %s when this state was taken, and has none now: rows are not part of a state_dict, "
                "store.save() and store.load() move them",
                self._table.name,
                counted(rows, "row"),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"an embedding over table {self._table.name!r} cannot be copied: its rows belong to the store. Make "
            f"another "
            "module over the same table, or one over another table"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"an embedding over table {self._table.name!r} cannot be pickled: its rows belong to the store. Save "
            "model.state_dict() and store.save(folder), and make the model anew over the store that loads it"
        )


@contextmanager
def accumulate(*modules: nn.Module) -> Iterator[None]:
    """Add up the gradients of several backward calls and push them as one step.

    Parameters
    ----------
    *modules : nn.Module
        Models or embeddings; of a model, all embeddings inside.

    Raises
    ------
    RuntimeError
        Gradients of one of them are accumulated already.

    Notes
    -----
    A push to each table is made at the end of the block, whichever modules have it. If the block raises, nothing is
    pushed. As in torch, gradients are added and not averaged: for a mean, divide the losses by the number of calls.

    Examples
    --------
    >>> store = shoal.local()
    >>> user = shoal.torch.Embedding(store.table("user", dim=1, optimizer=shoal.SGD(lr=1.0)))
    >>> with accumulate(user):
    ...     for keys in ([7, 3], [7]):
    ...         user(torch.tensor(keys)).sum().backward()
    >>> user.table.stats().step, user(torch.tensor([7, 3])).tolist()
    (1, [[-2.0], [-1.0]])
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"gradients of a {type(module).__name__} cannot be accumulated: pass models or embeddings")
    found = list(dict.fromkeys(m for module in modules for m in module.modules() if isinstance(m, SparseModule)))
    started: list[SparseModule] = []
    step = PendingStep()
    try:
        for module in found:
            module.start_accumulating(step)
            started.append(module)
        yield
    finally:
        for module in started:
            module.stop_accumulating()
    step.push()


def pull_together(requests: Iterable[tuple[Any, ...]]) -> list[Tensor]:
    """Call several modules in one round trip: all pulls are begun before one is waited for.

    Parameters
    ----------
    requests : iterable of tuple
        Modules and their arguments: ``(embedding, keys)``, ``(bag, keys, offsets)``, ``(bag, batch)``.

    Returns
    -------
    list of float32 tensors
        The outputs of the modules.

    Examples
    --------
    >>> store, keys = shoal.local(), torch.tensor([[7, 3], [7, 7]])
    >>> wide = shoal.torch.EmbeddingBag(store.table("wide", dim=1))
    >>> deep = shoal.torch.Embedding(store.table("deep", dim=16))
    >>> [tuple(out.shape) for out in pull_together([(wide, keys), (deep, keys)])]
    [(2, 1), (2, 2, 16)]
    """
    calls = list(requests)
    for call in calls:
        if not isinstance(call, tuple | list) or not call or not hasattr(call[0], "begin"):
            raise TypeError(
                f"a request is {call!r:.80}: pass a list of tuples, each of an embedding and its arguments, such as "
                "[(embedding, keys)]"
            )
    if torch.compiler.is_compiling():  # the compiler sees only tensors: each module makes its own request
        return [module(*given) for module, *given in calls]
    started = [module.begin(*given) for module, *given in calls]
    return [module.finish(*one) for (module, *_), one in zip(calls, started, strict=True)]
