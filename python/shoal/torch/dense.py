"""Dense parameters on the servers: all parameters of a torch module as one array of a store.

    parameters of the module, in their order --concatenated--> `shoal.table.dense.DenseTable` --blocks--> servers

    pull   array -> module        the servers' values are copied into the parameters
    push   module -> array        the gradients, zero for a missing one: one step of the table's optimizer

A worker has no state of the optimizer: it is stored with the blocks on the servers, and ``store.save`` saves it.

Invariants
    D1  An array that is new to the store starts at the module's own values, those of the first worker.
    D2  The set of parameters and their order are fixed at construction.

Threads: used by one, that of the training loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import DeadlineExceededError
from shoal.optim import SGD, Optimizer
from shoal.store.base import Store
from shoal.table.dense import BLOCK, DenseTable
from shoal.table.future import Future

_SGD = SGD()
_PAUSE = 0.02  # seconds between two checks whether the first worker has set the array


class DenseParameters:
    """The parameters of a module, stored and updated by the servers. All workers of a job must create it.

    Parameters
    ----------
    store : Store
    module : torch.nn.Module
        The module. Its parameters that currently require a gradient are used, each once; float32, any device.
    optimizer : Optimizer
        The rule that a push applies, instead of an optimizer of torch.
    name : str
        Unique among the store's tables; the same on all workers.
    block : int
        Numbers in a block, 1 to 4096: see :meth:`shoal.Store.dense`.
    timeout : float
        Seconds to wait until the first worker has set the array.

    Raises
    ------
    ValueError
        No parameter requires a gradient, one is not float32, or the store has another array of that name.
    DeadlineExceededError
        The first worker did not set the array in time.

    Notes
    -----
    A new array has the initial values of the module of the first worker; one that exists in the store, from a
    checkpoint or an earlier job, is unchanged. In both cases the module of every worker has the array's values
    afterwards, so the workers may draw different initial values.

    **Scaling.** Servers do not know how a loss was averaged. A worker whose loss is the mean over its batch pushes the
    mean gradient; under ``BSP(reduce="mean")`` the step is that of the mean over workers, which for batches of equal
    size is the mean over all examples, as in DDP; under ``BSP()`` it is that of the sum.

    A missing gradient counts as zero. A block whose gradient is all zeros keeps every bit, including its momentum; one
    whose gradient is not finite is unchanged; ``clip_norm`` acts on each block
    (:meth:`shoal.table.dense.DenseTable.push`).

    The constructor blocks for one round trip to each server, as `pull` does.

    Examples
    --------
    >>> import shoal
    >>> store, mlp = shoal.local(), torch.nn.Linear(3, 1)
    >>> dense = DenseParameters(store, mlp, optimizer=shoal.Adam(lr=0.01))
    >>> for x in torch.ones(5, 2, 3):
    ...     dense.pull()
    ...     mlp.zero_grad()
    ...     mlp(x).mean().backward()
    ...     handle = dense.push()
    ...     store.tick()
    >>> dense.size
    4
    """

    def __init__(
        self,
        store: Store,
        module: torch.nn.Module,
        *,
        optimizer: Optimizer = _SGD,
        name: str = "dense",
        block: int = BLOCK,
        timeout: float = 60.0,
    ) -> None:
        self._parameters = dict(trained(module))
        if not self._parameters:
            raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient: nothing to keep")
        size = sum(parameter.numel() for parameter in self._parameters.values())
        self._table = store.dense(name, size, optimizer=optimizer, block=block)
        self._begin(store, timeout)
        self.pull()

    def _begin(self, store: Store, timeout: float) -> None:
        """Set the array if it is new, or wait until the first worker that is not lost has."""
        table, member = self._table.table, store.member
        blocks = -(-self.size // table.dim)
        deadline = time.monotonic() + timeout
        while (there := len(table)) != blocks:
            lost = member.lost_workers
            first = min(rank for rank in range(store.num_workers) if rank == store.rank or rank not in lost)
            # A worker before this one, or its predecessor, may have died while it set the array.
            may_be_half = lost or member.is_replacement
            if there and ((first == store.rank and not may_be_half) or there > blocks):
                raise ValueError(
                    f"table {table.name!r} holds {there} blocks, and this module has {blocks}: it is another array, or "
                    "half of one, choose another name or erase it"
                )
            if first == store.rank:
                self.assign()
            elif time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"worker {first} has not set dense table {table.name!r} in {timeout:g} s: every worker makes its "
                    "DenseParameters before it trains"
                )
            else:
                time.sleep(_PAUSE)

    def __repr__(self) -> str:
        return f"DenseParameters({self._table.name!r}, {len(self._parameters)} parameters, {self.size} numbers)"

    @property
    def size(self) -> int:
        """Total number of values of all parameters."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def table(self) -> DenseTable:
        """The array on the store: float32[size], the parameters in the module's order, each in C order."""
        return self._table

    def pull(self) -> None:
        """Copy the values of the servers into the module.

        Raises
        ------
        DeadlineExceededError
            A server did not answer within the store's deadline.

        Notes
        -----
        Blocks for one round trip to each server; under BSP until all workers have ended the clock before.
        """
        array = torch.from_numpy(self._table.pull())
        with torch.no_grad():
            for _, parameter, its in self._cut(array):
                parameter.copy_(its)

    def push(self) -> Future[None]:
        """Send the gradients that the parameters have: one optimizer step.

        Returns
        -------
        Future
            ``result()`` returns once the push is applied. Waiting is optional: the store's next ``tick`` or ``flush``
            raises the error of a push.

        Raises
        ------
        ValueError
            A gradient is sparse. Nothing was sent.

        Notes
        -----
        Gradients stay as they are: clear them with ``module.zero_grad()``.
        """
        grads = np.zeros(self.size, np.float32)
        for name, parameter, its in self._cut(torch.from_numpy(grads)):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient: make its layer with sparse=False, or look its rows up "
                    "with shoal.torch.Embedding"
                )
            its.copy_(parameter.grad)
        return self._table.push(grads)

    def assign(self) -> None:
        """Set the values of the servers to those of the module; the optimizer's state is unchanged.

        For one worker, between clocks, with a barrier before and after.

        Raises
        ------
        ValueError
            A value is not finite. Nothing was set.
        """
        array: npt.NDArray[np.float32] = np.empty(self.size, np.float32)
        for _, parameter, its in self._cut(torch.from_numpy(array)):
            its.copy_(parameter.detach())
        self._table.assign(array)

    def _cut(self, array: torch.Tensor) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        return cut(self._parameters, array)


def cut(
    parameters: Mapping[str, torch.nn.Parameter], array: torch.Tensor
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter's part of the array, in its shape."""
    begin = 0
    for name, parameter in parameters.items():
        end = begin + parameter.numel()
        yield name, parameter, array[begin:end].view(parameter.shape)
        begin = end


def trained(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that are trained, with their names, in the order of the array."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or not parameter.numel():  # without elements: that of an embedding
            continue
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}: servers keep float32, train under torch.autocast instead"
            )
        yield name, parameter
