"""The same click model twice: with tables of shoal, and with torch's nn.Embedding and torch's optimizer.

    keys of all examples --sorted, numbered--> nn.Embedding(sparse=True), row i for the i-th key
    shoal's tables, unknown keys --pull--> its initial rows: every key for which shoal would make a row has one

Both are made with the same seed of torch, so the dense parts start equal too; both use the same batches in the same
order. Rows are stepped by shoal's optimizer or by the corresponding one of torch (RULES), dense parts by torch's Adam.

The two differ in the summation of the gradients of one key (shoal: in float64, rounded once; torch: in float32), and in
the rounding of Adagrad's state: by parts in 10^8. Training may amplify this: with too large a learning rate any two
runs diverge. Two more runs therefore measure how far torch differs from itself when the examples of each batch come in
another order, and the search looks for settings with which torch reproduces its losses (`steady`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import shoal
import shoal.torch
from quality.sets import Split
from shoal import Batch
from shoal.metrics import auc
from shoal.models.features import Features
from shoal.models.preprocessing import take
from shoal.torch import models
from shoal.torch.inputs import Inputs, Items
from shoal.torch.models import Maker

ENOUGH = 100_000  # training examples in a search, and a quarter of them for validation
MANY = 200_000  # examples, from which on batches have 1024 examples, otherwise 512
DIM = 16
MOST = 10  # latest entries of a history
DENSE_LR = 1e-3
# Of Adagrad: the square of 0.001, the size of a typical gradient. From 0 the first step is lr * sgn(g), even if g is
# only a rounding error, and any two runs diverge soon.
N0 = 1e-6
STEPS = 200  # whose losses are compared
STEADY = 1e-5  # of a loss
TURNS = ("backwards", "from the middle")  # other orders of a batch
MIXED = tuple(f"mixed {number}" for number in range(1, 31))  # more of them, if two are not enough
INIT = shoal.Normal(0.01, seed=3)

SHAPES: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"dim": DIM},
    "wide_deep": {"dim": DIM, "hidden": (64, 32)},
    "deepfm": {"dim": DIM, "hidden": (64, 32)},
    "dcnv2": {"dim": DIM, "hidden": (64, 32), "cross": 2},
    "dlrm": {"dim": DIM, "hidden": (64, 32)},
    "autoint": {"dim": DIM, "hidden": (64, 32), "layers": 2, "width": 16},
    "din": {"dim": DIM, "hidden": (64, 32), "attention": (32, 16)},
}
MODELS = {name: models.MODELS[name] for name in SHAPES}  # that were searched for: twins.json


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer of shoal, the corresponding one of torch, and the learning rates of the search."""

    ours: Callable[[float], shoal.Optimizer]
    theirs: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    start: float


RULES: dict[str, Rule] = {
    "SGD": Rule(
        lambda lr: shoal.SGD(lr=lr),
        lambda rows, lr: torch.optim.SGD(rows, lr=lr),
        (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        3.0,
    ),
    "Adagrad": Rule(
        lambda lr: shoal.Adagrad(lr=lr, eps=1e-10, n0=N0),
        lambda rows, lr: torch.optim.Adagrad(rows, lr=lr, eps=1e-10, initial_accumulator_value=N0),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        0.1,
    ),
    "Adam": Rule(
        lambda lr: shoal.Adam(lr=lr, b1=0.9, b2=0.999, eps=1e-8),
        lambda rows, lr: torch.optim.SparseAdam(rows, lr=lr, betas=(0.9, 0.999), eps=1e-8),
        (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
        0.001,
    ),
}


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of fixed fields: keys int64[n, fields], labels float32[n], and a history (keys, offsets) or none."""

    keys: Tensor
    labels: Tensor
    history: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.labels)

    def rows(self, chosen: Tensor) -> tuple[Inputs, Tensor]:
        """Return some of the examples, as models take them, and their labels."""
        if self.history is None:
            return Inputs(self.keys[chosen]), self.labels[chosen]
        keys, offsets = self.history
        begins, lengths = offsets[chosen], offsets[chosen + 1] - offsets[chosen]
        ends = lengths.cumsum(0)
        at = torch.arange(int(ends[-1])) + (begins - ends + lengths).repeat_interleave(lengths)
        seen = Items(keys[at], torch.cat([torch.zeros(1, dtype=torch.int64), ends]))
        return Inputs(self.keys[chosen], sequences={"seen": seen}), self.labels[chosen]


@dataclass(frozen=True, slots=True)
class Data:
    """Training and test examples; ``item`` is the field of which the history is."""

    learn: Examples
    seen: Examples
    item: int | None = None
    in_time: bool = False

    @property
    def fields(self) -> int:
        """The number of fields."""
        return self.learn.keys.shape[1]

    def all_keys(self) -> Tensor:
        """Return every key once, ascending."""
        parts = [part for one in (self.learn, self.seen) for part in (one.keys, *(one.history or ())[:1])]
        return torch.unique(torch.cat([part.reshape(-1) for part in parts]))


@dataclass(frozen=True, slots=True)
class History:
    """The columns whose history is taken, and of what; and whether only examples with label 1 are part of it."""

    whose: int
    item: int
    clicked: bool


# In both sets of flights: where the same aircraft flew before. MovieLens: what the same user tagged before. The
# attribution sample identifies no user.
HISTORIES = {
    "movielens_tags": History(whose=0, item=1, clicked=True),
    "flights_nyc2017": History(whose=6, item=8, clicked=False),
    "flights_nyc2017_in_time": History(whose=6, item=8, clicked=False),
}


def arrange(learn: Batch, seen: Batch, history: History | None, *, in_time: bool) -> Data:
    """Arrange batches, all of whose examples have the same number of features, as fields and histories.

    A history looks back over the examples to learn from, in the order in which they stand: at the latest ten before
    this one; for an example to measure on, at the latest ten of all, unless labels have no part in it, where those to
    measure on that stand before it count as well.
    """
    parts = []
    before: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MOST))
    for part in (learn, seen):
        keys = part.keys.view(np.int64).reshape(len(part), -1)
        found = None
        if history is not None:
            grows = not history.clicked or part is learn
            found = _histories(keys, part.labels, history, before, grows=grows)
        parts.append(Examples(torch.from_numpy(keys), torch.from_numpy(part.labels), found))
    return Data(*parts, item=None if history is None else history.item, in_time=in_time)


def _histories(
    keys: npt.NDArray[np.int64],
    labels: npt.NDArray[np.float32],
    history: History,
    before: dict[int, deque[int]],
    *,
    grows: bool,
) -> tuple[Tensor, Tensor]:
    offsets, flat = [0], []
    triples = zip(keys[:, history.whose].tolist(), keys[:, history.item].tolist(), labels.tolist(), strict=True)
    for whose, item, label in triples:
        flat += before[whose]
        offsets.append(len(flat))
        if grows and (label == 1 or not history.clicked):
            before[whose].append(item)
    return torch.tensor(flat, dtype=torch.int64), torch.tensor(offsets)


def data_of(name: str, split: Split, *, choose: bool) -> Data:
    """Arrange a set: all of it, or training and validation examples that are both of the training part."""
    learn, seen = split.parts()[0] if choose else (split.train, split.test)
    if choose:
        learn = take(learn, np.arange(max(0, len(learn) - ENOUGH), len(learn)))
        seen = take(seen, np.arange(min(len(seen), ENOUGH // 4)))
    return arrange(learn, seen, HISTORIES.get(name), in_time=split.in_time)


class Numbered(nn.Module):
    """torch's rows: an nn.Embedding of all keys, indexed by their rank among all keys."""

    def __init__(self, keys: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.rows = nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)

    def forward(self, keys: Tensor) -> Tensor:
        """Look up rows."""
        rows: Tensor = self.rows(torch.searchsorted(self.keys, keys.contiguous()))
        return rows


class Side:
    """A model, and how it learns from a batch."""

    def __init__(self, model: str, data: Data, make: Maker) -> None:
        torch.manual_seed(11)
        seen = [{"name": "seen", "type": "sequence", "share": str(data.item)}] if model == "din" else []
        features = Features([*map(str, range(data.fields)), *seen])
        self.model: nn.Module = MODELS[model](make, features, **SHAPES[model])
        self._loss = nn.BCEWithLogitsLoss()

    precision: AbstractContextManager[Any] = nullcontext()  # of a step's matrix products

    def learn(self, x: Inputs, labels: Tensor) -> float:
        """Take a step; returns the loss before it."""
        with self.precision:
            logits = self.model(x)
        loss: Tensor = self._loss(logits.float(), labels)
        with self.together():
            loss.backward()
        self.step()
        return float(loss.detach())

    def together(self) -> AbstractContextManager[None]:
        """Defer steps until the whole gradient is known."""
        return nullcontext()

    def step(self) -> None:
        """Step the parameters that ``backward`` has not stepped."""

    def logits(self, examples: Examples) -> npt.NDArray[np.float64]:
        """Predict."""
        self.model.eval()
        with torch.no_grad():
            found = [self.model(examples.rows(rows)[0]) for rows in torch.arange(len(examples)).split(8192)]
        self.model.train()
        return torch.cat(found).double().numpy()


class Ours(Side):
    """With tables of a local store."""

    def __init__(self, model: str, data: Data, rule: Rule, lr: float, store: shoal.Store) -> None:
        super().__init__(
            model,
            data,
            lambda name, dim: shoal.torch.Embedding(
                store.table(name, dim=dim, optimizer=rule.ours(lr), init=shoal.Zeros() if dim == 1 else INIT)
            ),
        )
        self._dense = torch.optim.Adam(self.model.parameters(), lr=DENSE_LR)

    def together(self) -> AbstractContextManager[None]:
        """Two lookups of one table are one step of it, as in torch."""
        return shoal.torch.accumulate(self.model)

    def step(self) -> None:
        """See `Side`."""
        self._dense.step()
        self._dense.zero_grad()


class Rough(Ours):
    """As `Ours`, in bfloat16."""

    precision = torch.autocast("cpu", torch.bfloat16)


class Theirs(Side):
    """With torch's own rows."""

    def __init__(self, model: str, data: Data, rule: Rule, lr: float, store: shoal.Store) -> None:
        keys = data.all_keys()

        def make(name: str, dim: int) -> nn.Module:
            table = store.table(name, dim=dim, optimizer=rule.ours(lr), init=shoal.Zeros() if dim == 1 else INIT)
            return Numbered(keys, torch.from_numpy(table.pull(keys.numpy())))

        super().__init__(model, data, make)
        tables = [module.rows.weight for module in self.model.modules() if isinstance(module, Numbered)]
        rows = {id(weight) for weight in tables}
        self._rows = rule.theirs(tables, lr)
        self._dense = torch.optim.Adam([p for p in self.model.parameters() if id(p) not in rows], lr=DENSE_LR)

    def step(self) -> None:
        """See `Side`."""
        for optimizer in (self._rows, self._dense):
            optimizer.step()
            optimizer.zero_grad()


SIDES = {"shoal": Ours, "torch": Theirs, "bfloat16": Rough}


@dataclass(frozen=True, slots=True)
class Learned:
    """The results of a run: the loss of each step, and the AUC after each pass, 0 if it is not finite."""

    losses: list[float]
    aucs: list[float]


def apart(some: Learned, others: Learned) -> float:
    """Return the largest difference between the losses of two runs, over the steps that both made."""
    n = min(len(some.losses), len(others.losses))
    return float(np.max(np.abs(np.array(some.losses[:n]) - np.array(others.losses[:n])), initial=0.0))


def steady(model: str, data: Data, rule: str, lr: float) -> bool:
    """Return whether torch reproduces the losses of the first STEPS to STEADY when the order within batches changes."""
    runs = [train("torch", model, data, rule, lr, STEPS, steps=STEPS, turned=turned) for turned in ("", *TURNS)]
    finite = bool(np.all(np.isfinite(runs[0].losses)))
    return finite and max(apart(runs[0], other) for other in runs[1:]) <= STEADY


def batches(data: Data, number: int, turned: str = "") -> Iterator[tuple[Inputs, Tensor]]:
    """Cut the training examples into the batches of a pass: shuffled, or in the order of time."""
    n = len(data.learn)
    order = torch.arange(n) if data.in_time else torch.from_numpy(np.random.default_rng([4, number]).permutation(n))
    mixing = np.random.default_rng([5, MIXED.index(turned)]) if turned in MIXED else None
    for rows in order.split(1024 if n >= MANY else 512):
        if mixing is not None:
            yield data.learn.rows(rows[torch.from_numpy(mixing.permutation(len(rows)))])
        else:
            yield data.learn.rows({"": rows, TURNS[0]: rows.flip(0), TURNS[1]: rows.roll(len(rows) // 2)}[turned])


def train(
    side: str,
    model: str,
    data: Data,
    rule: str,
    lr: float,
    passes: int,
    *,
    patient: bool = False,
    turned: str = "",
    steps: int | None = None,
) -> Learned:
    """Train a model on one side.

    Parameters
    ----------
    side : {"shoal", "torch", "bfloat16"}
    model : str
        Of MODELS.
    data : Data
    rule : str
        Of RULES.
    lr : float
    passes : int
    patient : bool
        Whether to stop after the first pass that was no better than the one before it.
    turned : str
        In which of TURNS or MIXED the examples of each batch are given; empty: as they come.
    steps : int, optional
        Stop after so many, and measure nothing.
    """
    losses: list[float] = []
    aucs: list[float] = []
    with shoal.local(slots=64, threads=1) as store:
        one = SIDES[side](model, data, RULES[rule], lr, store)
        for number in range(passes):
            for x, labels in batches(data, number, turned=turned):
                losses.append(one.learn(x, labels))
                if len(losses) == steps:
                    return Learned(losses, aucs)
            logits = one.logits(data.seen)
            aucs.append(auc(data.seen.labels.numpy(), logits) if np.all(np.isfinite(logits)) else 0.0)
            if patient and len(aucs) > 1 and aucs[-1] <= aucs[-2]:
                break
    return Learned(losses, aucs)
