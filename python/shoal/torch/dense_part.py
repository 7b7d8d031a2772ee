"""The dense part of a click model, shared by the workers of a store: all-reduce of gradients, or an array on servers.

    "allreduce"   every worker has the dense part and its optimizer; gradients are summed over the workers (gloo), and
                  every worker makes the same step: synchronous data parallelism, as DistributedDataParallel
    "servers"     the servers have it, with its optimizer's state (`DenseParameters`): pull, backward, push

    one step      begin (batch size)   forward   loss x scale   backward   step

The scale. The loss of a batch is a mean over its examples, and that of a step the mean over the examples of all
workers. Under BSP the gradients of a clock are merged into one step, so a worker scales its loss: to its share of the
examples of the clock with "allreduce", which exchanges batch sizes; to 1 / workers with "servers", which is the same
where batches have one size. Under SSP and ASP each push is a step of its own, and the scale of rows is 1.

Invariants
    D1  With "allreduce" all workers have the same dense parameters and optimizer state after every step.
    D2  A worker without a batch takes part in the steps of the others (`step_without_batch`), until all have ended the
        pass.
    D3  With "allreduce" all workers hand over their states after the same step: the exchange of batch sizes tells each
        of them whether another one has asked for it.
    D4  With "allreduce" a worker that dies ends the fit of all others, which continues from its last checkpoint.

Threads: the one that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import nn

from shoal.errors import ShoalError, WorkerLostError
from shoal.models.team import START_AGAIN, Team
from shoal.optim import Adam, Optimizer
from shoal.schedules import Schedule
from shoal.store.base import Store
from shoal.table.table import Table
from shoal.torch.dense import DenseParameters
from shoal.torch.gloo_group import GlooGroup, enter_meeting, open_meeting, wait_for_all
from shoal.torch.recipe import DenseSteps, Recipe

DenseSharing = Literal["allreduce", "servers"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
DENSE_TABLE = "dense"  # of a dense part on servers

_JOIN_SECONDS = 60.0  # for all workers to connect to each other
_STEP_SECONDS = 600.0  # for all of them to come to a step: each reads and computes a batch meanwhile


class DensePart:
    """The dense parameters of a model while it learns; by default no step needs the other workers."""

    steps: DenseSteps  # of this worker's optimizer, if it has one

    @property
    def tables(self) -> Sequence[Table]:
        """The tables that hold them."""
        return ()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this worker, if it has one."""
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The optimizer and its settings, by name, as plain values: those that it was made with."""
        return {}

    @property
    def is_on_servers(self) -> bool:
        """Whether this worker has nothing of them that the servers do not have."""
        return True

    def prepare_to_join(self, team: Team) -> bytes:
        """Return what all workers need to `join`: of the leader alone, before any of them does."""
        return b""

    def join(self, team: Team, meeting: bytes) -> None:
        """Begin a fit, or continue one, all workers together."""

    def come_late(self) -> None:
        """Take what a fit that is over has left on the servers."""

    def begin(self, examples: int) -> float:
        """Begin a step on a batch of this size: parameters are up to date; return the scale of its loss."""
        raise NotImplementedError

    def step(self) -> None:
        """End the step after backward."""
        raise NotImplementedError

    def step_without_batch(self) -> bool:
        """Take part in a step of the others without a batch; False if they need none, or all have ended."""
        return False

    def agree_on_move(self, wants: bool) -> bool:
        """Return whether all workers hand over their states after this step; ``wants``: this one is to do so."""
        return wants

    def refresh(self) -> None:
        """Make the module's parameters the newest ones, outside of a step."""

    def loaded(self) -> None:
        """Record that the module has values of a file of a finished fit."""

    def close(self) -> None:
        """Leave a fit."""


class Alone(DensePart):
    """The dense part of one process."""

    def __init__(
        self, make: Callable[[], torch.optim.Optimizer | None], has_parameters: bool, steps: DenseSteps
    ) -> None:
        self._make = make
        self._has_parameters = has_parameters
        self.steps = steps
        self._made: torch.optim.Optimizer | None = None
        self._is_made = False
        self._settings: dict[str, Any] = {}  # of the optimizer, before a schedule changes its rates

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, made when it is first needed: the first one imports torch's compiler, which takes seconds."""
        if not self._is_made:
            self._made, self._is_made = self._make(), True
            if self._made is not None:
                self._settings = _settings_of(self._made)
        return self._made

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the optimizer, which is made."""
        return {} if self.optimizer is None else self._settings

    @property
    def is_on_servers(self) -> bool:
        """Whether there are no such parameters."""
        return not self._has_parameters

    def begin(self, examples: int) -> float:
        """Clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return 1.0

    def step(self) -> None:
        """Step the optimizer."""
        if self.optimizer is not None:
            self.steps.step(self.optimizer)


class AllReduced(Alone):
    """The dense part of each of several workers, whose gradients are summed."""

    def __init__(
        self,
        make: Callable[[], torch.optim.Optimizer | None],
        store: Store,
        parameters: Sequence[nn.Parameter],
        steps: DenseSteps,
    ) -> None:
        super().__init__(make, bool(parameters), steps)
        self._store = store
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._group: GlooGroup | None = None
        self._opened: Any = None  # by the leader, for the others
        self._share = 0.0  # of this worker's batch among the examples of the step, over the scale of its loss
        self._wants_move = self._moves = False  # what this worker sends to the others, and what all have agreed on

    @property
    def is_on_servers(self) -> bool:
        """Return False: the others make no step without a worker that died."""
        return False

    def prepare_to_join(self, team: Team) -> bytes:
        """Open the place where the workers connect to each other; return its address."""
        with self._connecting():
            self._opened, place = open_meeting(self._store, _JOIN_SECONDS)
        return place.encode()

    def join(self, team: Team, meeting: bytes) -> None:
        """Connect the workers to each other, and make their parameters those of the leader."""
        opened, self._opened = self._opened, None
        with self._connecting():
            if opened is None:
                opened = enter_meeting(self._store, meeting.decode(), _JOIN_SECONDS, self._check_lost)
            wait_for_all(self._store, opened, _JOIN_SECONDS, self._check_lost)
            self._group = GlooGroup(self._store, opened, _JOIN_SECONDS, _STEP_SECONDS)
        self._broadcast()

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise ShoalError(
                f"worker {self._store.rank} cannot connect to the other workers at {self._store.host} for the dense "
                f"part: {error}: open the network between workers, set GLOO_SOCKET_IFNAME to its interface where "
                'their host names lead to another one, or pass dense="servers"'
            ) from error

    def begin(self, examples: int) -> float:
        """Exchange the sizes of the batches; return this one's share, or 1 if each push is a step of its own."""
        super().begin(examples)
        total, _ = self._sum_sizes(examples, has_batch=True)
        share = examples / total if total else 0.0
        consistency = self._store.consistency
        if not consistency.is_bulk:
            self._share = share
            return 1.0
        self._share = 1.0 / self._store.num_workers if consistency.mean else 1.0
        return share * self._store.num_workers if consistency.mean else share

    def step(self) -> None:
        """Sum the gradients of all workers, and step the optimizer."""
        self._step(self._share)

    def step_without_batch(self) -> bool:
        """Make the step of the workers that have a batch; False if none has."""
        if self._group is None or not self._sum_sizes(0, has_batch=False)[1]:
            return False
        super().begin(0)
        self._step(0.0)
        return True

    def agree_on_move(self, wants: bool) -> bool:
        """Return what all have agreed on in the last step; tell the others in the next one what this one wants."""
        self._wants_move = wants
        return self._moves

    def close(self) -> None:
        """Close the connections to the other workers."""
        self._group = None

    def _broadcast(self) -> None:
        """Make the parameters those of worker 0."""
        if not self._parameters:
            return
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        if self._store.rank:
            flat.zero_()
        self._all_reduce(flat)
        with torch.no_grad():
            for parameter, its in self._cut(flat):
                parameter.copy_(its)

    def _sum_sizes(self, examples: int, *, has_batch: bool) -> tuple[int, bool]:
        """Return the examples of the step, and whether any worker has a batch; agree on whether all move after it."""
        own = torch.tensor([examples, has_batch, self._wants_move], dtype=torch.int64)
        total, batches, wants = self._all_reduce(own).tolist()
        self._moves = bool(wants)
        return total, bool(batches)

    def _step(self, scale: float) -> None:
        """Sum the gradients over workers, of each one's own times its scale, and step the optimizer."""
        if not self._parameters:
            return
        flat = torch.cat(
            [
                torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
                for parameter in self._parameters
            ]
        )
        flat *= scale
        for parameter, its in self._cut(self._all_reduce(flat)):
            parameter.grad = its.clone()
        super().step()

    def _cut(self, flat: torch.Tensor) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, its in zip(self._parameters, torch.split(flat, sizes), strict=True):
            yield parameter, its.view_as(parameter)

    def _all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum numbers over all workers, in place, and return them."""
        if self._group is None:
            raise RuntimeError("the workers of this model are not connected: call its fit")
        try:
            self._group.all_reduce(numbers, self._check_lost)
        except RuntimeError as error:
            raise self._lost(str(error).partition("\n")[0]) from error
        return numbers

    def _check_lost(self) -> None:
        if self._store.member.lost_workers:
            raise self._lost("it was declared dead")

    def _lost(self, why: str) -> WorkerLostError:
        gone = self._store.member.gone_in_order  # the others have ended by the loss of the first
        lost = f"worker {gone[0]}" if gone else "a worker"
        return WorkerLostError(
            f"{lost} of {self._store.num_workers} has ended in a fit whose steps of the dense part all make together "
            f'({why}): {START_AGAIN}; shoal launch --restarts does so by itself, and with dense="servers" it outlives '
            "its workers"
        )


class OnServers(DensePart):
    """The dense part of any number of workers, on the servers, in a table "dense"."""

    def __init__(self, module: nn.Module, store: Store, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._module = module
        self._store = store
        self._rule = optimizer
        self._clip_norm = clip_norm
        self.steps = DenseSteps(Recipe(), [])
        self._share = 1.0  # of the loss
        self._parameters: DenseParameters | None = None
        self._is_newer = False

    @property
    def tables(self) -> Sequence[Table]:
        """The table that holds them, once the model has begun to learn."""
        return () if self._parameters is None else (self._parameters.table.table,)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the servers' optimizer."""
        rule = self._rule
        named = {f"optimizer.{one.name}": _plain(getattr(rule, one.name)) for one in fields(rule)}
        return {"optimizer": type(rule).__name__, **named}

    def prepare_to_join(self, team: Team) -> bytes:
        """Set the array to values of a file, which the servers do not have."""
        if self._is_newer:
            own = [parameter.detach().clone() for parameter in self._module.parameters()]
            parameters = self._made()
            with torch.no_grad():
                for parameter, its in zip(self._module.parameters(), own, strict=True):
                    parameter.copy_(its)
            parameters.assign()
        return b""

    def join(self, team: Team, meeting: bytes) -> None:
        """Make the array, or take what the servers have."""
        self.come_late()

    def come_late(self) -> None:
        """Take what the servers have."""
        self._made().pull()
        self._is_newer = False

    def _made(self) -> DenseParameters:
        if self._parameters is None:
            self._parameters = DenseParameters(self._store, self._module, optimizer=self._rule, name=DENSE_TABLE)
        return self._parameters

    def begin(self, examples: int) -> float:
        """Pull the parameters, and clear the gradients."""
        if self._parameters is None:
            raise RuntimeError("the dense part is not on the servers yet: call the model's fit")
        self._parameters.pull()
        self._module.zero_grad()
        consistency = self._store.consistency
        self._share = 1.0 / self._store.num_workers if consistency.is_bulk and not consistency.mean else 1.0
        return self._share

    def step(self) -> None:
        """Push the gradients; the tick raises an error."""
        if self._parameters is not None:
            if self._clip_norm is not None:  # the sum over the workers is then within the bound
                nn.utils.clip_grad_norm_(self._module.parameters(), self._clip_norm * self._share)
            self._parameters.push()

    def refresh(self) -> None:
        """Pull the parameters."""
        if self._parameters is not None and not self._is_newer:
            self._parameters.pull()

    def loaded(self) -> None:
        """Record that the module has values of a file, which the servers do not have."""
        self._is_newer = True


def dense_part(
    module: nn.Module,
    store: Store,
    optimizer: torch.optim.Optimizer | MakeOptimizer | Optimizer | None,
    dense: DenseSharing,
    recipe: Recipe,
) -> DensePart:
    """Make the dense part of a module; see `shoal.torch.ClickModel`."""
    if dense not in ("allreduce", "servers"):
        raise ValueError(f"dense is {dense!r}: pass 'allreduce' or 'servers'")
    parameters = [parameter for parameter in module.parameters() if parameter.numel()]
    if dense == "servers":
        if recipe.ema is not None:
            raise ValueError(
                f'ema is {recipe.ema}, and with dense="servers" no worker makes all steps that it would average: pass '
                'dense="allreduce", or leave it out'
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError('with dense="servers" the servers step the dense part: pass an optimizer of shoal.optim')
        if parameters:
            return OnServers(module, store, _scheduled(optimizer or Adam(), recipe.schedule), recipe.clip_norm)
    elif isinstance(optimizer, Optimizer):
        raise ValueError(
            f'the optimizer of the dense part is {optimizer}, which servers apply: pass dense="servers", or an '
            "optimizer of torch"
        )

    def make() -> torch.optim.Optimizer | None:
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        kind = torch.optim.Adam if optimizer is None or isinstance(optimizer, Optimizer) else optimizer
        return kind(parameters) if parameters else None

    steps = DenseSteps(recipe, parameters)
    if store.num_workers > 1:
        return AllReduced(make, store, parameters, steps)
    return Alone(make, bool(parameters), steps)


def _settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of all groups of parameters, with the rates that a schedule multiplies."""
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        where = "optimizer" if len(groups) == 1 else f"optimizer[{number}]"
        settings = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        settings["lr"] = group.get("initial_lr", group.get("lr"))
        found |= {f"{where}.{name}": _plain(value) for name, value in settings.items()}
    return found


def _plain(value: Any) -> Any:
    """Return a setting as a value that can be saved and compared."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value if value is None or type(value) in (bool, int, float, str) else repr(value)


def _scheduled(optimizer: Optimizer, schedule: Schedule | None) -> Optimizer:
    """Return an optimizer of servers with a schedule."""
    if schedule is None:
        return optimizer
    if optimizer.schedule not in (None, schedule):
        raise ValueError(
            f"the dense part has the schedule {schedule}, and its optimizer {optimizer.schedule}: pass one of them"
        )
    return replace(optimizer, schedule=schedule)
