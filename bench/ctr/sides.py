"""The sides that take turns, one process each: the same network with the same ids, with different embeddings.

    dense        no embeddings: the network's input is a copy of a fixed tensor that requires a gradient; a lower bound
    torch        nn.EmbeddingBag(sparse=True), one of all rows, a bag for every id; torch's Adagrad or SGD
    shoal        shoal.torch.Embedding with a table of a local store that holds all rows
    1 server, .. shoal.torch.Embedding with a table of a launched cluster, with server processes

A side waits on its pipe for its turn. It then draws the batches of the turn, takes one unmeasured step, and times the
others. A step is divided into laps: `look up` (ids to the network's input), `dense forward`, `dense backward` (to the
gradient of that input, which a hook of autograd reports), `give back` (the rest of autograd: the push of shoal, the
sparse gradient of torch), `dense step`, `sparse step` (torch's optimizer).
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import nn

import shoal
from ctr.draw import BATCH, FIELDS, Draw, Ids, Rows, first, pieces
from shoal.torch import borrowed_pool

LR = {"Adagrad": 0.05, "SGD": 20.0}  # the gradient is that of a mean over 4096 examples
EPS = 1e-10


@dataclass(frozen=True, slots=True)
class Plan:
    """Common to all sides."""

    rows: int
    ids: str
    dim: int
    optimizer: str
    hidden: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A side's report on its turn: seconds of the measured steps, in total and by lap; the loss of every step."""

    seconds: float
    laps: dict[str, float]
    losses: list[float]


@dataclass(slots=True)
class Laps:
    """A clock with laps."""

    spent: Counter[str] = field(default_factory=Counter)
    last: float = 0.0

    def start(self) -> None:
        """Begin a lap."""
        self.last = time.perf_counter()

    def end(self, name: str) -> None:
        """End a lap, and begin the next."""
        now = time.perf_counter()
        self.spent[name] += now - self.last
        self.last = now


class Embeddings(Protocol):
    """Rows by id, and how they are read and updated."""

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids[n, fields], concatenated: float32[n, fields * dim], part of autograd's graph."""

    def step(self, laps: Laps) -> None:
        """Do the remaining work after ``backward``."""

    def finish(self) -> None:
        """Wait for what is under way."""

    def rows(self, ids: Ids) -> Rows:
        """Return rows."""

    def parts(self, ids: Ids) -> dict[str, float]:
        """Return seconds of each part of the work on rows, which destroys them; empty if they cannot be measured."""

    def others(self) -> list[int]:
        """Return the other processes that hold rows."""


class Nothing:
    """No embeddings."""

    def __init__(self, plan: Plan) -> None:
        self._width = FIELDS * plan.dim
        self._input = torch.randn(BATCH, self._width) / 100

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Embeddings`."""
        return self._input.clone().requires_grad_()

    def step(self, laps: Laps) -> None:
        """See `Embeddings`."""

    def finish(self) -> None:
        """See `Embeddings`."""

    def rows(self, ids: Ids) -> Rows:
        """See `Embeddings`."""
        return np.zeros((0, 0), np.float32)

    def parts(self, ids: Ids) -> dict[str, float]:
        """See `Embeddings`."""
        return {}

    def others(self) -> list[int]:
        """See `Embeddings`."""
        return []


class Torch(Nothing):
    """One EmbeddingBag of all rows; each id is its own bag, so the rows are concatenated."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns
        weight = torch.empty(plan.rows, plan.dim)
        for begin, end in pieces(plan.rows):
            weight[begin:end] = torch.from_numpy(first(begin, end, plan.dim))
        self._bag = nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)
        self._adagrad = plan.optimizer == "Adagrad"
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.Adagrad(self._bag.parameters(), lr=LR["Adagrad"], eps=EPS)
            if self._adagrad
            else torch.optim.SGD(self._bag.parameters(), lr=LR["SGD"])
        )

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Embeddings`."""
        return self._bag(ids.view(-1, 1)).view(len(ids), self._width)

    def step(self, laps: Laps) -> None:
        """See `Embeddings`. Coalesces the gradient, which Adagrad would otherwise do itself."""
        if self._adagrad:
            self._bag.weight.grad = self._bag.weight.grad.coalesce()
            laps.end("coalesce")
        self._optimizer.step()
        self._optimizer.zero_grad()
        laps.end("sparse step")

    def rows(self, ids: Ids) -> Rows:
        """See `Embeddings`."""
        return self._bag.weight.detach()[torch.from_numpy(ids)].numpy()


class Shoal(Nothing):
    """An Embedding with a table that holds all rows."""

    def __init__(self, plan: Plan, store: shoal.Store) -> None:
        super().__init__(plan)
        rule = shoal.Adagrad(lr=LR["Adagrad"], eps=EPS) if plan.optimizer == "Adagrad" else shoal.SGD(lr=LR["SGD"])
        self._store = store
        self._table = store.table("rows", dim=plan.dim, optimizer=rule)
        for begin, end in pieces(plan.rows):
            self._table.assign(np.arange(begin, end), first(begin, end, plan.dim))
        self._embedding = shoal.torch.Embedding(self._table)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Embeddings`."""
        return self._embedding(ids).view(len(ids), self._width)

    def finish(self) -> None:
        """See `Embeddings`."""
        self._store.flush()

    def rows(self, ids: Ids) -> Rows:
        """See `Embeddings`."""
        return self._table.pull(ids)

    def parts(self, ids: Ids) -> dict[str, float]:
        """See `Embeddings`. With arbitrary gradients: nothing is compared afterwards."""
        grads = np.full((ids.size, self._table.dim), 1e-3, np.float32)
        laps = Laps()
        laps.start()
        keys = self._store.key_batch(ids.reshape(-1))
        laps.end("dedupe")
        rows = self._table.pull_unique(keys)
        laps.end("look up")
        keys.expand(rows)
        laps.end("expand")
        sums = keys.sum(grads)
        laps.end("sum")
        self._table.push_unique(keys, sums).result()
        laps.end("update")
        return dict(laps.spent)

    def others(self) -> list[int]:
        """See `Embeddings`."""
        return [child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]


def embeddings(kind: str, plan: Plan, stack: ExitStack) -> Embeddings:
    """Make the embeddings of a side; resources are registered with the stack."""
    if kind == "dense":
        return Nothing(plan)
    if kind == "torch":
        return Torch(plan)
    if servers := re.match(r"\d+", kind):
        store = shoal.launch(int(servers[0]), threads=plan.threads, consistency=shoal.ASP(), timeout=300)
        return Shoal(plan, stack.enter_context(store))
    return Shoal(plan, stack.enter_context(shoal.local(threads=plan.threads)))


class Side:
    """A network with embeddings, and its training."""

    def __init__(self, kind: str, plan: Plan, stack: ExitStack, *, in_bfloat16: bool) -> None:
        self._plan = plan
        self._precision = torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16)
        self._embeddings = embeddings(kind, plan, stack)
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        width = FIELDS * plan.dim
        for size in plan.hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self._network = nn.Sequential(*layers, nn.Linear(width, 1))
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3, fused=True)
        self._loss = nn.BCEWithLogitsLoss()
        self._draw = Draw(plan.rows, plan.ids)
        self._laps = Laps()

    def _step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        laps = self._laps
        laps.start()
        x = self._embeddings.look_up(ids)
        laps.end("look up")
        x.register_hook(lambda _: laps.end("dense backward"))
        with self._precision:
            logits = self._network(x).squeeze(1)
        loss = self._loss(logits.float(), labels)
        laps.end("dense forward")
        loss.backward()
        laps.end("give back")
        self._optimizer.step()
        self._optimizer.zero_grad()
        laps.end("dense step")
        self._embeddings.step(laps)
        return float(loss.detach())

    def turn(self, begin: int, warm: int, steps: int) -> Turn:
        """Take steps on the batches begin, begin + 1, ...: some unmeasured, then the measured ones."""
        examples = [self._draw.batch(number) for number in range(begin, begin + warm + steps)]
        given = [(torch.from_numpy(one.ids), torch.from_numpy(one.labels)) for one in examples]
        losses = [self._step(*one) for one in given[:warm]]
        self._embeddings.finish()
        self._laps.spent.clear()
        start = time.perf_counter()
        losses += [self._step(*one) for one in given[warm:]]
        self._embeddings.finish()
        return Turn(time.perf_counter() - start, dict(self._laps.spent), losses)

    def rows(self, ids: Ids) -> Rows:
        """Return rows."""
        return self._embeddings.rows(ids)

    def first_rows(self, ids: Ids) -> Rows:
        """Make the initial rows of these ids, which ascend."""
        cuts = pieces(self._plan.rows)
        found = [first(b, e, self._plan.dim)[ids[(ids >= b) & (ids < e)] - b] for b, e in cuts]
        return np.concatenate(found)

    def parts(self, begin: int, steps: int) -> dict[str, float]:
        """Return seconds a step of the parts, measured separately."""
        total: Counter[str] = Counter()
        for number in range(begin, begin + steps):
            total.update(self._embeddings.parts(self._draw.batch(number).ids))
        return {name: seconds / steps for name, seconds in total.items()}

    def peaks(self) -> list[int]:
        """Return the peak of resident memory, in bytes: of this process, and of each other that holds rows."""
        return [peak(pid) for pid in [os.getpid(), *self._embeddings.others()]]


def peak(pid: int) -> int:
    """Return the peak resident memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def serve(pipe: Connection, kind: str, plan: Plan, borrows: bool, in_bfloat16: bool) -> None:
    """Run a side: answer (method, arguments) until None is received.

    Without ``borrows`` shoal uses threads of its own. ``in_bfloat16`` is torch's autocast of the network.
    """
    torch.set_num_threads(plan.threads)
    if not borrows:
        borrowed_pool.borrow = lambda: None
    empty = peak(os.getpid())
    with ExitStack() as stack:
        side = Side(kind, plan, stack, in_bfloat16=in_bfloat16)
        pipe.send(empty)
        while (asked := pipe.recv()) is not None:
            method: Callable[..., object] = getattr(side, asked[0])
            pipe.send(method(*asked[1:]))
    pipe.send("closed")
