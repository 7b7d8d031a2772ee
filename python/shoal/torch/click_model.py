"""ClickModel: a torch module over tables of a store, as the learner of the training loop.

    batch --> Inputs --> module: sparse rows, dense tower --> logits --> mean loss
                           |  backward pushes rows' gradients, the optimizer steps the tower  |

A directory holds a model, and while it is trained its checkpoint: tables, dense parameters, their optimizer, and the
rows of the fit (shoal/models/progress.py). It is replaced atomically (shoal/models/files.py), so a process may be
killed at any moment and the fit resumed, with bit-identical results. Random numbers, such as those of a dropout, are a
function of the seed, the pass and the batch's place in it.

The loss is the mean over a batch's examples of weight times log-loss (losses.py: or another one), as in torch, and so
are the gradients of tables. With ``precision="bfloat16"`` matrix products of a step are computed in bfloat16, by
torch's autocast; rows, dense parameters, optimizers, losses and predictions stay in float32.

Invariants
    I1  Every example is predicted before it is learned from, so the losses of a first pass are progressive.
    I2  Predicting pushes nothing and creates no rows.

Threads: one thread trains. Another one prepares batches ahead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import nn

from shoal.base.scalars import whole
from shoal.data import Batch, Reader
from shoal.metrics import StreamMetrics
from shoal.metrics.exact import ratio
from shoal.models import fitting, preprocessing
from shoal.models.features import Features
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.fitting import OfCallbacks
from shoal.models.plan import EarlyStopping, FitInput, Learning, Plan, Plateau
from shoal.models.team import Team, Tolerance
from shoal.optim import Optimizer
from shoal.store.base import Store
from shoal.table.table import Table
from shoal.torch.dense_part import AllReduced, DenseSharing, MakeOptimizer, dense_part
from shoal.torch.finite import GRADIENT_LIMIT, are_finite, overflow
from shoal.torch.inputs import Inputs
from shoal.torch.losses import Loss
from shoal.torch.model import Model, by_task, check_losses, loss_of_tasks, losses_of
from shoal.torch.models.layers import Lookup, keys_for
from shoal.torch.pipeline import Pipeline
from shoal.torch.recipe import Recipe, loss_function, scale_rates
from shoal.torch.saved_click_model import SavedClickModel
from shoal.torch.shared_rows import SharedRows
from shoal.torch.sparse import SparseModule
from shoal.torch.tower import read_tower

Precision = Literal["float32", "bfloat16"]


_PLAIN = Recipe()


class ClickModel(SavedClickModel):
    """A click model: a torch module over tables of a store, with methods to train, predict, evaluate, save and load.

    Parameters
    ----------
    module : nn.Module
        Computes logits float32[n] from `Inputs`, of several tasks a dict of them; best a `shoal.torch.Model`. Its
        sparse parts are modules of `shoal.torch`.
    store : Store
        Of its tables.
    features : Features or int, optional
        What the module reads of a batch; see `inputs`. Default: those of a `shoal.torch.Model`, which has its own.
    optimizer : torch.optim.Optimizer, callable or shoal.optim.Optimizer, optional
        Optimizer of the dense parameters, or a function that makes it from a list of them; default: Adam with a
        learning rate of 0.001. The function is called when the model first learns or is saved. With ``dense="servers"``
        an optimizer of `shoal.optim`, which the servers apply; default: `shoal.Adam`.
    dense : {"allreduce", "servers"}
        How the workers of the store share its dense parameters: "allreduce": each worker has a copy, and gradients are
        summed over the workers; "servers": the servers hold them, in a table "dense".
    staleness : int
        Number of batches whose pushes the rows of a batch may miss, since they are pulled ahead (`Pipeline`).
    precision : {"float32", "bfloat16"}
        Of the matrix products in training. "bfloat16" (torch's autocast) is worth it on processors with instructions
        for it (``avx512_bf16`` or ``amx_bf16`` in /proc/cpuinfo), and slower on others. Predictions are computed in
        float32.
    negative_rate : float
        As for `shoal.LogisticRegression`.
    seed : int
        Seed of the shuffle and of the sampling of negatives: initial values are drawn when the module is made.
    recipe : Recipe
        The loss; clipping, schedule and plateau of the learning rates.

    Attributes
    ----------
    made_by : dict
        The settings that made the module, as JSON, if a configuration did: saved with the model.

    Raises
    ------
    ValueError
        A sparse part's table belongs to another store, ``optimizer`` does not fit ``dense``, ``precision`` is another
        one, or ``staleness`` is above 0 and the module's lookups are not known before it is called: it has no
        `shoal.torch.models.Lookup`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        store: Store,
        features: Features | int | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | Optimizer | None = None,
        dense: DenseSharing = "allreduce",
        staleness: int = 0,
        precision: Precision = "float32",
        negative_rate: float = 1.0,
        seed: int = 0,
        recipe: Recipe = _PLAIN,
    ) -> None:
        learning = Learning(negative_rate=negative_rate, warm_up=False, seed=seed, plateau=recipe.plateau)
        super().__init__(module, features, store, learning)
        if precision not in get_args(Precision):
            raise ValueError(f"precision is {precision!r}: pass one of {', '.join(get_args(Precision))}")
        found = {one.table.name: one.table for one in module.modules() if isinstance(one, SparseModule)}
        for name, table in found.items():
            if store.tables.get(name) is not table:
                raise ValueError(f"table {name!r} is not of this store: pass the store that the module was made with")
        check_losses(self._described)
        self._tables = tuple(found.values())
        self._dense = dense_part(module, store, optimizer, dense, recipe)
        self._sharing = dense
        self._recipe = recipe
        self._losses: dict[str, Loss] = {}  # those of the tasks, once they are needed
        self._has_scaled_rates = False
        self.made_by: dict[str, Any] = {}
        self._staleness = whole("staleness", staleness)
        self._precision = precision
        self._pipeline: Pipeline | None = None  # that learning reads from
        self._rows_ahead: list[list[torch.Tensor]] = []  # of the fit that is resumed
        self._shared_rows: SharedRows | None = None  # while it looks at the first examples of a fit
        self._draw = 0  # seed of the random numbers of the batch that is learned from
        if self._staleness < 0:
            raise ValueError(f"staleness is {staleness}: pass the number of batches, 0 or more")
        if self._staleness and not self._ahead():
            raise ValueError(
                f"staleness is {staleness}, and the keys that {type(module).__name__} looks up are not known before "
                "it is called: leave it out"
            )

    # ---- properties --------------------------------------------------------------------------------------------------

    def own_store(self) -> None:
        """Make `close` also close the store."""
        self._owns_store = True

    def __repr__(self) -> str:
        return f"ClickModel({type(self.module).__name__}, examples={self.examples})"

    @property
    def name(self) -> str:
        """The name of the first table; "click" of a module without one."""
        return self._tables[0].name if self._tables else "click"

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of the module's sparse parts."""
        return self._tables

    @property
    def has_order(self) -> bool:
        """Whether all steps of the dense part are in the order of pulls and pushes: not those of an all-reduce."""
        return not isinstance(self._dense, AllReduced)

    def refresh(self) -> None:
        """Make the module's dense parameters the newest ones."""
        self._dense.refresh()

    @property
    def staleness(self) -> int:
        """Number of batches by which rows are pulled ahead."""
        return self._staleness

    @property
    def precision(self) -> Precision:
        """Of the matrix products in training."""
        return self._precision

    @property
    def dense_parameters(self) -> int:
        """Number of values of the module's dense parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    # ---- learning and predicting -------------------------------------------------------------------------------------

    def prepared(self, batches: Iterable[Batch]) -> Generator[tuple[Batch, Inputs]]:
        """Arrange each batch, and sort the keys of the models' lookups, in the background."""
        examples = preprocessing.examples_of(batches)
        given, self._rows_ahead = self._rows_ahead, []
        self._pipeline = pipeline = Pipeline(
            examples,
            self._ahead(),
            prepare=self._prepare_ahead,
            staleness=self._staleness,
            rows_ahead=given,
        )
        with contextlib.closing(cast("Generator[tuple[Batch, Inputs]]", iter(pipeline))) as ready:
            yield from ready
        self._pipeline = None  # it has nothing ahead, and keeps the model
        self._shared_rows = None  # later passes have the same examples

    def _prepare_ahead(self, batch: Batch) -> tuple[Batch, Inputs]:
        prepared = self.prepare(batch)
        if self._shared_rows is not None and self._shared_rows.look(prepared):
            self._shared_rows = None
        return batch, prepared

    def _ahead(self) -> dict[nn.Module, Callable[[tuple[Batch, Inputs]], torch.Tensor]]:
        """Return the keys that the lookups of a model look up."""
        lookups = [lookup for lookup in self.module.modules() if isinstance(lookup, Lookup)]
        return {
            table: functools.partial(_keys_of, lookup, table)
            for lookup in lookups
            for table in lookup.tables
            if isinstance(table, SparseModule)
        }

    def begin_batch(self, epoch: int, place: tuple[int, int, int]) -> None:
        """Prepare to learn from the batch of this place in the pass: random numbers are a function of both."""
        numbers = struct.pack("<5Q", self._learning.seed, epoch, *place)
        self._draw = int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little")

    def learn(self, batch: Batch, prepared: Inputs, seen: StreamMetrics) -> float:
        """Predict, count into ``seen``, learn; return the sum of the losses by weight."""
        with self._store.computing(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._draw)
            return self._learn(batch, prepared, seen)

    def _learn(self, batch: Batch, prepared: Inputs, seen: StreamMetrics) -> float:
        if len(batch) == 0:
            self._dense.step_without_batch()
            return 0.0
        self.module.train()
        scale = self._dense.begin(len(batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bfloat16"):
            outputs = by_task(self.module(prepared), self._described)
        if not are_finite(outputs.values()):
            raise overflow("predictions", self.examples, prepared, self.features, self._tables)
        # An invalid label or weight raises an error here, before any change.
        logits = next(iter(outputs.values()))
        loss = seen.update(batch.labels, logits.detach().double().numpy(), batch.weights)
        self._calibration = None
        weights = None if batch.weights is None else torch.from_numpy(batch.weights)
        mean = self._loss(outputs, prepared, self._labels_of(batch, prepared), weights)
        (mean if scale == 1.0 else mean * scale).backward()  # type: ignore[no-untyped-call]
        if not are_finite((parameter.grad for parameter in self.module.parameters()), GRADIENT_LIMIT):
            raise overflow("gradients of the dense part", self.examples, prepared, self.features, self._tables)
        self._dense.step()
        self._record.examples += len(batch)
        return loss

    def _loss(
        self,
        outputs: Mapping[str, torch.Tensor],
        prepared: Inputs,
        labels: Mapping[str, torch.Tensor],
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._losses:
            self._losses = losses_of(self._described, loss_function(self._recipe))
        if isinstance(self.module, Model):
            return self.module.loss(outputs, prepared, labels, weights, self._losses)
        return loss_of_tasks(self._described, outputs, labels, weights, self._losses)

    def partial_fit(self, data: Batch) -> float:
        """Predict a batch, then learn from it, as one step. Ends a clock of the store.

        Parameters
        ----------
        data : Batch
            With fields, if the features are `Features`: from ``reader.with_fields()``.

        Returns
        -------
        float
            Mean loss of the batch before it was learned from, in nats, by weight; NaN of an empty batch.

        Raises
        ------
        ValueError
            The store has several workers, which make their steps together, in `fit`; or the batch does not fit.
        """
        if self._store.num_workers > 1:
            raise ValueError("click models of several workers step together: call fit")
        preprocessing.check_batch(data)
        prepared = self.prepare(data)
        self.begin_batch(0, (0, 0, self.examples))
        loss = self.learn(data, prepared, self.accumulator())
        self._store.tick()
        return ratio(loss, float(len(data)) if data.weights is None else float(data.weights.astype(float).sum()))

    def fit(
        self,
        data: Iterable[Batch],
        *,
        valid: Iterable[Batch] | None = None,
        epochs: int = 1,
        shuffle: bool | int = False,
        callbacks: OfCallbacks = (),
        progress: bool | float = True,
        checkpoint: Checkpointing | None = None,
        early_stopping: EarlyStopping | None = None,
    ) -> Self:
        """Learn from all examples. A fitted model continues from its weights.

        On a cluster every worker calls it with its split of the data, and returns when all have ended.

        Parameters
        ----------
        data : Reader or iterable of Batch
            Iterated once for each pass. Batch size and order of the files are the reader's.
        valid : Reader or iterable of Batch, optional
            Measured after every pass: log-loss, AUC, calibration, and GAUC if ``features`` names a group.
        epochs, shuffle, callbacks, progress, checkpoint, early_stopping
            As `shoal.LogisticRegression.fit`.

        Returns
        -------
        ClickModel
            Itself.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C or SIGTERM, at the end of the current batch; with ``checkpoint`` one was written, to be resumed.
        WorkerLostError
            Another worker has ended, and the dense part is shared by all-reduce: the message says how to go on.
        ValueError
            A setting is invalid, a line is malformed, or a batch does not fit the features.
        """
        workers = self._store.num_workers
        if workers > 1 and self._store.member.takes_splits:
            raise ValueError(
                "click models of several workers step together: pass each worker reader.split(store.rank, "
                "store.num_workers) instead of a loop over store.splits"
            )
        if self._described is not None and isinstance(data, Reader):
            self._described.check_labels(data.schema)
        if self._described is not None and self._store.rank == 0:
            self._shared_rows = SharedRows(self._described, getattr(data, "names", None))
        plan = Plan.of(self._learning, epochs, shuffle, early_stopping)
        task = FitInput(self.reading(data), self.reading(valid), plan)
        fitting.fit([self], task, progress=progress, checkpoint=checkpoint, callbacks=callbacks)
        return self

    @property
    def tolerance(self) -> Tolerance:
        """What a fit withstands, by where its dense part is."""
        if self._dense.is_on_servers:
            return Tolerance()
        return Tolerance(loss=False, replacement=False, remedy='; one with dense="servers" can')

    @property
    def _fit_settings(self) -> dict[str, Any]:
        """Return the recipe, the optimizer of the dense part and how a step is computed."""
        how = {"dense": self._sharing, "staleness": self._staleness, "precision": self._precision}
        return {**how, **self._dense.settings, **self._recipe.common}

    @property
    def common_settings(self) -> dict[str, Any]:
        """Return the recipe: tables and dense part are checked when they are made."""
        return {"recipe": self._recipe.common}

    def prepare_to_join(self, team: Team) -> bytes:
        """Return what all workers need to `join`: of the leader alone, before any of them does."""
        return self._dense.prepare_to_join(team)

    def join(self, team: Team, meeting: bytes) -> None:
        """Begin a fit, or continue one, all workers together: ``meeting`` is from `prepare_to_join`."""
        self._dense.join(team, meeting)

    def come_late(self) -> None:
        """Take the dense part of a fit that is over, if the servers have it."""
        self._dense.come_late()

    def leave(self) -> None:
        """Close the connections that `join` made."""
        self._pipeline = None
        self._dense.close()

    def step_without_batch(self) -> bool:
        """Take part in a step of the other workers' dense parts; False if they need none, or all have ended."""
        return self._dense.step_without_batch()

    def agree_on_move(self, wants: bool) -> bool:
        """Return whether all workers hand over their states after this step; ``wants``: this one is to do so."""
        return self._dense.agree_on_move(wants)

    def local_state(self) -> bytes:
        """Return the module's buffers."""
        buffers = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in self.module.buffers()]
        return b"".join(buffer.numpy().tobytes() for buffer in buffers)

    def set_local_state(self, state: bytes) -> None:
        """Restore `local_state`."""
        buffers = list(self.module.buffers())
        its = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        for buffer, one in zip(buffers, torch.split(its, sizes), strict=True):
            buffer.copy_(one.clone().view(buffer.dtype).view_as(buffer))

    def common_state(self) -> bytes:
        """Return the dense part and its optimizer's state, if the servers do not have them."""
        return b"" if self._dense.is_on_servers else self._tower()

    def set_common_state(self, state: bytes) -> None:
        """Restore `common_state`."""
        self._take_tower(read_tower(state, "the dense part of worker 0"), whole=True)

    def scale_rates(self, scale: float, plateau: Plateau | None) -> None:
        """Make the rates of dense part and tables those of the settings times ``scale``, by the rule of a plan."""
        if plateau is None and not self._has_scaled_rates:
            return
        rule = plateau or Plateau()
        self._dense.steps.scale_rate(scale, rule)
        scale_rates(self.pushed_tables, scale, rule)
        self._has_scaled_rates = scale != 1.0

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Give the module the averages of its parameters, if the recipe has any, within the block."""
        return self._dense.steps.averaged()


def _keys_of(lookup: Lookup, table: nn.Module, prepared: tuple[Batch, Inputs]) -> torch.Tensor:
    return keys_for(prepared[1], lookup, table)
