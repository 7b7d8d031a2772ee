"""Readers in the workers of torch's DataLoader: batches of files, parsed and made into tensors by other processes.

    reader --shard--> worker 0 of 2: batch, prepare(batch)   --> DataLoader --> batches in turn, one of each worker
           --shard--> worker 1 of 2: batch, prepare(batch)   -->

A shoal reader parses in a thread of its own and needs no processes to keep up with one trainer; processes are useful if
``prepare`` is slow Python code. With the same number of workers, batches have the same order in every run: one of each
worker in turn, without the workers whose split has ended.

Invariants
    L1  The splits of all workers of all jobs' ranks hold each example once.
    L2  A state has, for each worker, the cursor after its last batch that the consumer has received, without those that
        wait; and the next split. A loader that resumes from it returns the batches that would have followed, in order.

Threads: a pass belongs to one thread at a time. Processes: workers that were forked have copies of the parent's stores,
which they must not use (`shoal.errors.WrongProcessError`) and do not disturb.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from shoal.data import Batch, Reader
from shoal.data.rebatch import Cursor

StartMethod = Literal["fork", "spawn", "forkserver"]


class BatchDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a reader as a dataset: each worker of a ``DataLoader`` reads a split of its own.

    Parameters
    ----------
    reader : Reader
        The whole data, not a split of it.
    prepare : callable, optional
        Makes an item of a `shoal.Batch`, in the worker process; tensors are returned through shared memory, arrays
        through a pipe. With the start methods "spawn" and "forkserver" it must be picklable: a function of a module.
    rank, workers : int
        Rank of this process among the job's workers, and their number: each reads its own split of the data.

    Notes
    -----
    Items are whole batches: pass ``batch_size=None`` to the DataLoader. The reader determines their size.
    A pass begins at the first batch; to resume within one use `BatchLoader`.

    Examples
    --------
    >>> loader = torch.utils.data.DataLoader(BatchDataset(reader), batch_size=None, num_workers=2)  # doctest: +SKIP
    """

    def __init__(
        self, reader: Reader, prepare: Callable[[Batch], Any] | None = None, *, rank: int = 0, workers: int = 1
    ) -> None:
        if not isinstance(reader, Reader):
            raise TypeError(f"the data is a {type(reader).__name__}: pass a reader such as shoal.read_libsvm(path)")
        if not 0 <= rank < workers:
            raise ValueError(f"worker {rank} of {workers}: pass a rank from 0 to the number of workers - 1")
        self._reader = reader
        self._prepare = prepare
        self._rank = rank
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the split of this process."""
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for value, _ in self.pass_over(self.split(number, count)):
            yield value

    def split(self, number: int, count: int) -> Reader:
        """Return the reader of one of the ``count`` processes of this worker of the job."""
        splits = self._workers * count
        if splits > 1 and self._reader.resumed:
            raise ValueError(f"{self._reader!r} starts from a position: {splits} reading processes need the whole data")
        return self._reader if splits == 1 else self._reader.split(self._rank * count + number, splits)

    def pass_over(self, reader: Reader) -> Iterator[tuple[Any, Cursor]]:
        """Yield the item of each batch, and the cursor after it."""
        for batch in reader:
            yield (batch if self._prepare is None else self._prepare(batch)), reader.cursor


class _SplitDataset(torch.utils.data.IterableDataset[Any]):
    """The dataset of the workers of a `BatchLoader`: splits, from their last positions."""

    def __init__(self, dataset: BatchDataset, positions: list[dict[str, Any]], first: int) -> None:
        self._dataset = dataset
        self._positions = positions
        self._first = first

    def __iter__(self) -> Iterator[tuple[Any, int, Cursor | None]]:
        info = torch.utils.data.get_worker_info()
        count = len(self._positions)
        # A DataLoader begins with its worker 0, which therefore has the next split.
        number = (self._first + (0 if info is None else info.id)) % count
        split = self._dataset.split(number, count).resume(self._positions[number])
        try:
            for value, cursor in self._dataset.pass_over(split):
                yield value, number, cursor
        except Exception as error:
            if info is None:
                raise
            yield _portable(error), number, None  # a worker that raises would need seconds to end


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, with the traceback of this process as a note."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a process that reads:\n{trace}")
    return error


class BatchLoader:
    """The batches of a reader, read and prepared by other processes; each ``for`` is a pass.

    Parameters
    ----------
    reader : Reader
        The whole data, not a split of it.
    prepare : callable, optional
        As for `BatchDataset`.
    num_workers : int
        Number of processes; 0: all work is done in this one.
    rank, workers : int
        Rank of this process among the job's workers, and their number.
    prefetch : int
        Batches that each process prepares ahead.
    start_method : {"fork", "spawn", "forkserver"}, optional
        How the processes are started; default: Python's.
    timeout : float
        Seconds to wait for a batch of a process; 0: no limit. A process that dies is detected in any case.

    Notes
    -----
    A pass that is left early, by ``break`` or an exception, cannot be continued: its processes end with its iterator.
    An exception in a process is raised in place of its batch, with the process's traceback as a note. The first pass
    after `load_state_dict` resumes at the saved state; later passes begin at the first batch.

    Examples
    --------
    ::

        loader = shoal.torch.BatchLoader(shoal.read_criteo("day_0/*.tsv"), prepare, num_workers=2)
        for keys, labels in loader:
            ...
            torch.save({"data": loader.state_dict(), ...}, "state.pt")
    """

    def __init__(
        self,
        reader: Reader,
        prepare: Callable[[Batch], Any] | None = None,
        *,
        num_workers: int = 0,
        rank: int = 0,
        workers: int = 1,
        prefetch: int = 2,
        start_method: StartMethod | None = None,
        timeout: float = 0.0,
    ) -> None:
        if num_workers < 0 or prefetch < 1:
            raise ValueError(f"{num_workers} processes, {prefetch} batches ahead: pass 0 or more, and 1 or more")
        self._dataset = BatchDataset(reader, prepare, rank=rank, workers=workers)
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._start_method = start_method
        self._timeout = timeout
        self._cursors = [self._dataset.split(number, self._num_splits).cursor for number in range(self._num_splits)]
        self._next_split = 0
        self._resumed = False

    @property
    def _num_splits(self) -> int:
        return max(1, self._num_workers)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or resume that of a loaded state."""
        if not self._resumed:
            self._cursors = [self._dataset.split(number, self._num_splits).cursor for number in range(self._num_splits)]
            self._next_split = 0
        self._resumed = False
        state = self.state_dict()
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _SplitDataset(self._dataset, state["positions"], self._next_split),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=self._prefetch if self._num_workers else None,
            multiprocessing_context=self._start_method if self._num_workers else None,
            timeout=self._timeout if self._num_workers else 0,
        )
        for value, number, cursor in loader:
            if cursor is None:
                raise value
            self._cursors[number] = cursor
            self._next_split = (number + 1) % self._num_splits
            yield value

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass that began last: after the last batch returned.

        Returns
        -------
        dict
            Plain values: ``positions``, that of each process's split as from :meth:`shoal.data.Reader.position`, and
            ``turn``, the next split.
        """
        positions = [
            self._dataset.split(number, self._num_splits).position(cursor)
            for number, cursor in enumerate(self._cursors)
        ]
        return {"positions": positions, "turn": self._next_split}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass resume at a saved state.

        Parameters
        ----------
        state : mapping
            From `state_dict` of a loader of the same files, with as many processes.

        Raises
        ------
        ValueError
            It belongs to another number of processes, or to other data. Nothing was changed.
        """
        positions, turn = list(state["positions"]), int(state["turn"])
        if len(positions) != self._num_splits or not 0 <= turn < self._num_splits:
            raise ValueError(
                f"the state is of {len(positions)} processes that read, this loader has {self._num_splits}: pass "
                f"num_workers={len(positions)}"
            )
        for number, position in enumerate(positions):
            split = self._dataset.split(number, self._num_splits)
            split.resume(position)  # raises an error for another reader's position
            if position["shard"] != split.position()["shard"]:
                raise ValueError(
                    f"the state is of split {position['shard']}, this loader reads {split.position()['shard']}: pass "
                    "the same rank and workers"
                )
        self._cursors = [Cursor(*position["place"]) for position in positions]
        self._next_split = turn
        self._resumed = True


def _as_it_is(item: Any) -> Any:
    return item
