"""Delayed block proximal gradient: logistic regression with an L1 penalty, to its optimum, over data in memory.

Minimises f(w) + l1 * sum(|w|), f the sum of the losses by weight (Li et al., "Scaling distributed machine learning with
the parameter server", OSDI 2014). Every worker holds its examples, and keeps their margins up to date:

    iteration t, block b = t mod blocks          a block is a run of slots: neighbours in hash order
        wait until the updates of the iterations up to t - delay - 1 are in the margins
        push (g_k, u_k) for each key k of the block, tick; the servers add up the workers' pairs and make one step
            v = w_k - lr g_k / u_k;   w_k = sgn(v) max(|v| - lr l1 / u_k, 0)
        request the new (w_k, g_k); they arrive while the next blocks are processed

The bound u. With c = 1/4, the greatest slope of the logistic function, and weights of examples v_i,

    u_k = sum_i c v_i |x_ik| sum_l |x_il|        l over the block, and over the blocks in flight at the same time

The Hessian's element (k, l) is at most sum_i c v_i |x_ik| |x_il| in size, so u bounds a block's curvature (a matrix is
below the diagonal of its absolute row sums), and the coupling to updates that are not seen yet: then every step with
lr <= 1 is safe, for any delay. The diagonal alone, sum_i c v_i x_ik^2, would need an lr that depends on the data.

The KKT filter. If w_k = 0 and the last gradient has |g_k| <= (1 - slack) l1, the step would leave w_k at 0 unless the
gradient changes by slack l1 or more: k is skipped, neither pushed nor pulled. All workers see the same (w_k, g_k), so
they skip the same keys. The first pass is over all keys, and so is the one that ends the fit:

    the violation of k      max(|g_k| - l1, 0) where w_k = 0, else |g_k + l1 sgn(w_k)|
    done                    their sum in a pass over all keys is at most `tolerance` of that of the first pass

Invariants
    I1  The margins are those of the weights that this worker has seen: X w, in float64, rounded at each addition.
    I2  What an iteration sees depends on t and delay alone, not on time: runs are repeatable bit for bit, and a local
        store gives the same bits as one worker on a cluster.

Threads: the caller's; the store's threads share the work of the kernels. Memory: 8 bytes for each feature of every
example in addition to the batches, and 4 more while they are sorted.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal import _core
from shoal.base.exact_sum import ExactSum
from shoal.base.fit_rows import DIM, PASSES, SUMS
from shoal.base.interrupts import at_boundaries
from shoal.base.scalars import make_plain
from shoal.consistency import BSP
from shoal.data import Batch
from shoal.data.rebatch import joined
from shoal.models.evaluation import measure
from shoal.models.linear_weights import BIAS_KEY
from shoal.models.model import Model
from shoal.models.model_trainer import ModelTrainer
from shoal.models.plan import FitInput
from shoal.models.progress import Progress
from shoal.models.progress_rows import key
from shoal.models.sources import check_iterable
from shoal.models.team import Team, Tolerance
from shoal.models.training import begin_fit
from shoal.optim import Proximal
from shoal.table.arrays import Rows
from shoal.table.future import Waitable
from shoal.table.key_batch import KeyBatch

log = logging.getLogger(__name__)

_BLOCKS = 128  # by default
_VIOLATIONS = 1  # the place of their rows, where others have the sums of a second model
_WHOLE = 5  # numbers of an exact sum
_TOLERANCE = Tolerance(loss=False, change=False)
Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Chosen = npt.NDArray[np.int64] | slice  # some keys of a block

_ALL = slice(None)


class DBPG(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the solver that minimizes the sum of the losses and ``l1 * sum(|w|)`` for `LogisticRegression`.

    Parameters
    ----------
    l1 : float
        Strength of the penalty, 0 or more; the bias is penalised like any other weight.
    lr : float
        Step length as a fraction of the safe step; above 0, at most 1.
    blocks : int, optional
        Number of blocks into which the features are cut, 1 to the store's slots. Default: 128, or the store's slots if
        these are fewer.
    delay : int
        Number of blocks by which the gradient may lag, less than ``blocks``. A greater delay overlaps more computation
        with communication, and makes steps smaller.
    slack : float or None
        Slack of the KKT filter, 0 to 1: weights of 0 whose gradient was below ``(1 - slack) * l1`` are skipped. None:
        no filter.
    tolerance : float
        Stop when the violation of the optimality conditions is this fraction of that of the first pass.
    passes : int
        Greatest number of passes over the blocks in a fit.
    """

    l1: float = 1.0
    lr: float = 1.0
    blocks: int | None = None
    delay: int = 0
    slack: float | None = 0.1
    tolerance: float = 1e-3
    passes: int = 100

    def __post_init__(self) -> None:
        make_plain(self)
        Proximal(lr=self.lr, l1=self.l1)
        if self.lr > 1:
            raise ValueError(f"lr is {self.lr}: steps are safe up to 1")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks is {self.blocks}: pass 1 or more")
        self._check_delay(_BLOCKS if self.blocks is None else self.blocks)
        if self.slack is not None and not 0 <= self.slack <= 1:
            raise ValueError(f"slack is {self.slack}: pass 0 to 1, or None for no filter")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}: pass 0 or more")
        if self.passes < 1:
            raise ValueError(f"passes is {self.passes}: pass 1 or more")

    def blocks_for(self, slots: int) -> int:
        """Return the number of blocks in a store with this number of slots.

        Raises
        ------
        ValueError
            The store has fewer slots than ``blocks``, or not more than ``delay``.
        """
        blocks = min(_BLOCKS, slots) if self.blocks is None else self.blocks
        if blocks > slots:
            raise ValueError(f"blocks is {blocks}: the store has {slots} slots, pass no more")
        self._check_delay(blocks)
        return blocks

    def _check_delay(self, blocks: int) -> None:
        if not 0 <= self.delay < blocks:
            raise ValueError(f"delay is {self.delay}: pass 0 to {blocks - 1}, less than the number of blocks")


class SolverResult(NamedTuple):
    """How the last fit of `DBPG` ended.

    Attributes
    ----------
    passes : int
        Passes over the blocks.
    converged : bool
        Whether the tolerance was reached.
    violation : float
        Of the last pass over all keys, as a fraction of that of the first pass; 0 if the first had none.
    sent, passed_over : int
        Keys that this worker pushed, and keys that the filter left out.
    """

    passes: int
    converged: bool
    violation: float
    sent: int
    passed_over: int


class _Block:
    """The keys of one block of features, and this worker's state of them."""

    def __init__(self, first: int, batch: KeyBatch, bounds: Singles) -> None:
        self.batch = batch
        self.keys = batch.keys
        self.numbers = np.arange(first, first + len(batch), dtype=np.uint32)  # of its keys among all
        self.bounds = bounds  # u
        self.weights = np.zeros(len(batch), np.float32)
        self.slopes = np.zeros(len(batch), np.float32)  # the workers' gradient of the last step


class _Examples:
    """All examples of this worker, sorted by feature, and their keys in blocks."""

    def __init__(self, model: Model, whole: Batch, solver: DBPG) -> None:
        store = model.store
        blocks = solver.blocks_for(store.slots)
        self._workers = store.workers
        unique = _core.UniqueKeys(whole.keys, store.slots, store.workers, BIAS_KEY if model.has_bias else None)
        self._by_feature = _core.ExamplesByFeature(
            whole.indptr, whole.values, unique, model.has_bias, whole.labels, whole.weights, store.workers
        )
        first_slots = -(-np.arange(blocks + 1) * store.slots // blocks)  # slot s is in block s * blocks // slots
        runs = [(int(begin), int(end)) for begin, end in pairwise(unique.offsets[first_slots])]
        keys = _core.unmix(unique.hashes)
        self.blocks = []
        for b, (begin, end) in enumerate(runs):
            near = {(b + step) % blocks for step in range(-solver.delay, solver.delay + 1)}
            bounds = self._by_feature.bounds((begin, end), [runs[other] for other in sorted(near)], self._workers)
            self.blocks.append(_Block(begin, store.key_batch(keys[begin:end]), bounds))

    def margins(self) -> Floats:
        """Return the margins of the examples."""
        return self._by_feature.margins(self._workers)

    def gradient(self, block: _Block, chosen: Chosen) -> Singles:
        """Compute this worker's part of the gradient of some keys of the block."""
        return self._by_feature.gradient(block.numbers[chosen], self._workers)

    def move(self, block: _Block, chosen: Chosen, weights: Singles) -> None:
        """Set the weights of some keys of the block, and update the margins to them."""
        deltas = weights.astype(np.float64) - block.weights[chosen]
        self._by_feature.add(block.numbers[chosen], deltas, self._workers)
        block.weights[chosen] = weights


class _Solver:
    """One fit."""

    def __init__(self, model: Model, solver: DBPG, whole: Batch, run: Progress, team: Team) -> None:
        store = model.store
        self._store, self._table, self._solver = store, model.table, solver
        self._run, self._rows = run, team.rows
        self._examples = _Examples(model, whole, solver)
        self._waiting: deque[tuple[_Block, Chosen, Rows, Waitable | None]] = deque()  # rows that are being pulled
        self._violation = ExactSum()  # of this pass, by this worker
        self._counted = np.zeros(_WHOLE, np.int64)  # of it, that others know of
        self._own: list[float] = []  # of the passes so far, where there are no others
        self.sent = 0
        self.passed_over = 0
        for block in self._examples.blocks:
            rows = self._table.pull_unique(block.batch)
            block.slopes = rows[:, 1].copy()
            self._examples.move(block, _ALL, rows[:, 0])

    def margins(self) -> Floats:
        """Return the margins of the examples."""
        return self._examples.margins()

    @property
    def clocks(self) -> int:
        """Of a pass: one for each block, and one for the rest of the violation."""
        return len(self._examples.blocks) + 1

    def begin_in_place(self) -> None:
        """Continue in the place of a worker that died: what it had not pushed of the violation of the pass is lost."""
        if self._run.work.clocks % self.clocks:
            self._violation.add(math.inf)

    def one_pass(self, number: int, *, everything: bool, check: Callable[[], None]) -> None:
        """Make an iteration for each block that this pass has left; call ``check`` after each."""
        begin = self._run.work.clocks - number * self.clocks if self._run.writes else 0
        for block in self._examples.blocks[begin:]:
            self._receive(self._solver.delay)
            self._iterate(number, block, everything=everything)
            check()
        self._receive(0)
        if self._run.writes:
            self._tick(number)
        else:
            self._own.append(float(self._violation))
        self._violation, self._counted = ExactSum(), np.zeros(_WHOLE, np.int64)

    def violations(self, passes: int) -> list[float]:
        """Return the violation of each pass so far, summed over the workers; infinite if it is not known."""
        if not self._run.writes or not passes:
            return self._own[:passes]
        rows = self._rows.pull(_violation_keys(passes))
        return [float(ExactSum.of_whole(row[:_WHOLE].tolist())) for row in rows]

    def _tick(self, number: int) -> None:
        """End a clock, with what is known of the violation of the pass."""
        if self._run.writes:
            row = np.zeros(DIM, np.int64)
            before, self._counted = self._counted, np.array(self._violation.whole(), np.int64)
            row[:_WHOLE] = self._counted - before
            self._rows.add(key(SUMS, _VIOLATIONS, number % PASSES), row)
            self._rows.push()
        self._store.tick()

    def _receive(self, left: int) -> None:
        """Receive the oldest updates, until at most `left` are in flight."""
        while len(self._waiting) > left:
            block, chosen, rows, pull = self._waiting.popleft()
            if len(rows) == 0:
                continue
            if pull is not None:
                pull.result()
            old, slopes = block.weights[chosen], rows[:, 1]
            violations = np.where(
                old == 0,
                np.maximum(np.abs(slopes, dtype=np.float64) - self._solver.l1, 0),
                np.abs(slopes + self._solver.l1 * np.sign(old, dtype=np.float64)),
            )
            self._violation.add(float(violations.sum()))
            block.slopes[chosen] = slopes
            self._examples.move(block, chosen, rows[:, 0])

    def _iterate(self, number: int, block: _Block, *, everything: bool) -> None:
        chosen: Chosen = _ALL
        batch = block.batch
        if not everything and self._solver.slack is not None:
            calm = np.abs(block.slopes) <= (1 - self._solver.slack) * self._solver.l1
            chosen = np.flatnonzero((block.weights != 0) | ~calm)
            batch = self._store.key_batch(block.keys[chosen])
        self.sent += len(batch)
        self.passed_over += len(block.keys) - len(batch)
        pairs = np.empty((len(batch), 2), np.float32)
        if len(batch):
            pairs[:, 0] = self._examples.gradient(block, chosen)
            pairs[:, 1] = block.bounds[chosen]
            pushed = self._table.push_unique(batch, pairs, copy=False)
            if not isinstance(self._store.consistency, BSP):
                pushed.result()
        self._tick(number)
        rows = np.empty((len(batch), 2), np.float32)
        pull = self._table.reader.pull(batch.native, rows) if len(batch) else None
        self._waiting.append((block, chosen, rows, pull))


def fit(model: Model, solver: DBPG, given: FitInput) -> SolverResult:
    """Fit to the optimum for all examples of the reader; see `shoal.LogisticRegression.fit`."""
    reader, valid, plan = given
    check_iterable(reader, "reader", passes=1)
    if valid is not None:
        check_iterable(valid, "valid", passes=1)
    if plan.epochs != 1 or plan.shuffle or plan.patience is not None:
        raise ValueError(
            'solver "dbpg" holds the data and stops by itself: leave epochs, shuffle and early_stopping out, and pass '
            "shoal.models.DBPG(passes=..., tolerance=...)"
        )
    store = model.store
    if store.member.takes_splits and store.num_workers > 1:
        raise ValueError('solver "dbpg" holds a worker\'s whole share: fit reader.split(store.rank, store.num_workers)')
    if store.num_workers > 1 and store.consistency != BSP():
        raise ValueError(
            f'solver "dbpg" adds up the workers\' gradients of an iteration, which {store.consistency} does not: '
            f"connect with consistency=shoal.BSP()"
        )
    batches = [batch for batch, _ in plan.batches(reader, 0, model.examples)]
    whole = batches[0] if len(batches) == 1 else joined(batches) if batches else _empty_batch()
    team = Team(store, model.table.name, _TOLERANCE)
    run = Progress([model], team, plan, None)
    with ExitStack() as stack:
        stack.enter_context(team.fitting(run.hand_over, lambda: False))
        run.find()
        if not run.is_in_place and not run.is_over:
            settings = structs.asdict(solver) | plan.common | {"bias": model.has_bias}
            run.agree(settings, given, None, has_model=False)
            begin_fit([model], given)
            if run.writes and team.leads:
                team.rows.erase(_violation_keys(solver.passes))
            run.begin(None, has_begun=False)
        work = _Solver(model, solver, whole, run, team)
        trainer = ModelTrainer(model, plan, stack)
        passes = 0
        if run.is_in_place:
            passes = run.work.clocks // work.clocks
            work.begin_in_place()
        interrupted = stack.enter_context(at_boundaries())

        def check() -> None:
            team.check_lost()
            if (interrupt := interrupted()) is not None:
                raise interrupt

        state = _state(work.violations(passes), solver)
        while passes < solver.passes and not state.converged and not run.is_over:
            trainer.begin()
            complete = False
            try:
                work.one_pass(passes, everything=state.everything, check=check)
                trainer.record_examples(whole, work.margins())
                complete = True
            finally:
                trainer.skipped = int(getattr(reader, "skipped", 0))
                trainer.end(complete=complete, reader=reader)
            passes += 1
            state = _state(work.violations(passes), solver)
            log.info("pass %d: violation %.3g of the first, logloss %.6f", passes, state.share, trainer.seen.logloss)
        if not state.converged:
            log.warning(
                "no optimum within %d passes: the violation is %.3g of the first, the tolerance %g. Allow more passes, "
                "or a larger tolerance",
                passes,
                state.share,
                solver.tolerance,
            )
        if valid is not None:
            trainer.record_validation(measure([model], valid)[0], last=True)
        if not run.is_over:
            run.end()
    return SolverResult(passes, state.converged, state.share, work.sent, work.passed_over)


class _State(NamedTuple):
    """What follows from the violations of the passes so far; ``everything``: the next pass is over all keys."""

    everything: bool = True
    converged: bool = False
    share: float = 0.0


def _state(violations: Sequence[float], solver: DBPG) -> _State:
    """Return what follows from the violations of the passes; an infinite one is not known."""
    first, state = 0.0, _State()
    for violation in violations:
        if math.isinf(violation):
            state = _State(share=1.0)
            continue
        first = first or violation
        share = violation / first if first > 0 else 0.0
        within = share <= solver.tolerance
        state = _State(within or solver.slack is None, within and state.everything, share)
    return state


def _violation_keys(passes: int) -> npt.NDArray[np.uint64]:
    """Return the keys of the rows of the passes' violations."""
    return np.array([key(SUMS, _VIOLATIONS, number % PASSES) for number in range(passes)], np.uint64)


def _empty_batch() -> Batch:
    """Make a batch of no examples, with which a worker without examples takes part."""
    return Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64), None)
