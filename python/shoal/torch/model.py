"""Model: the base of click models, those of `shoal.torch.models` and a user's own.

    batch --inputs--> Inputs --forward--> logits, or logits by task --loss--> the number whose gradient is learned from

A subclass overrides what it does in another way. `shoal.torch.ClickModel` trains it, saves it, evaluates and exports
it; ``name = "package.module:Class"`` in a configuration makes it (config.py).

Threads: `inputs` is called in a thread that reads ahead, the others in the one that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data import Batch
from shoal.models.features import Features
from shoal.torch.inputs import Inputs, inputs
from shoal.torch.losses import OF_NUMBERS, Loss, bce, loss_of, name_of

LABEL = "label"  # the name of the only task of a model without named ones


def check_losses(features: Features | None) -> None:
    """Raise ValueError if there is no such loss, or the first label, which a fit's metrics are of, is no 0 or 1."""
    for number, (name, task) in enumerate({} if features is None else features.labels.items()):
        if name_of(task.loss) in OF_NUMBERS and number == 0:
            raise ValueError(
                f"the first label, {name!r}, is a number, and a fit's metrics are of labels 0 and 1: name one of these "
                "first"
            )


def losses_of(features: Features | None, first: Loss = bce) -> dict[str, Loss]:
    """Return the loss of each task; that of the first one is ``first``, unless the task has its own."""
    tasks = {} if features is None else features.labels
    found = {name: loss_of(task.loss) for name, task in tasks.items()}
    own = next(iter(tasks.values())).loss if tasks else "bce"
    return {**found, next(iter(tasks), LABEL): loss_of(own) if own != "bce" else first}


class Model(nn.Module):
    """The base of click models.

    Parameters
    ----------
    features : Features or int
        What it reads of an example; a number: that many categories, which come in this order.

    Attributes
    ----------
    features : Features
    is_numbered : bool
        Whether ``features`` was a number.

    Notes
    -----
    A subclass takes ``make`` and ``features``, and settings of its own by their names, which a configuration has in its
    section ``[model]``. It makes its tables by ``make(name, dim)``, or has them made by `shoal.torch.models.Lookup`.

    Examples
    --------
    >>> import shoal, torch
    >>> from shoal.torch.models import Lookup, look_up
    >>> class Mean(Model):
    ...     def __init__(self, make, features, *, dim: int = 8):
    ...         super().__init__(features)
    ...         self.embedding = Lookup(make, "embedding", self.features, dim)
    ...         self.last = torch.nn.Linear(dim, 1)
    ...
    ...     def forward(self, x):
    ...         (rows,) = look_up(x, self.embedding)
    ...         return self.last(rows.fields.mean(dim=1)).squeeze(1)
    >>> store = shoal.local()
    >>> model = Mean(shoal.torch.tables(store), Features(["user", "ad"]))
    """

    def __init__(self, features: Features | int) -> None:
        super().__init__()
        self.is_numbered = not isinstance(features, Features)
        self.features = features if isinstance(features, Features) else Features.numbered(features)

    def refuse_dense(self) -> None:
        """Raise ValueError if there are numbers: for models that have no dense part."""
        if self.features.dense:
            names = ", ".join(repr(one.name) for one in self.features.dense)
            raise ValueError(
                f"{type(self).__name__} has no dense part, which {names} is an input of: embed it (embed = true), or "
                "take another model"
            )

    def inputs(self, batch: Batch) -> Inputs:
        """Arrange a batch as the argument of `forward`: in a thread that reads ahead, without the rows."""
        return inputs(batch, len(self.features) if self.is_numbered else self.features)

    def forward(self, x: Inputs) -> Tensor | dict[str, Tensor]:
        """Compute the logits float32[n]; of several tasks a dict of them, the first being that of the batch's label."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def loss(
        self,
        outputs: Mapping[str, Tensor],
        x: Inputs,
        labels: Mapping[str, Tensor],
        weights: Tensor | None,
        losses: Mapping[str, Loss],
    ) -> Tensor:
        """Compute what is learned from: by default the sum of the tasks' losses, each times its weight.

        Parameters
        ----------
        outputs : mapping of str to float32[n]
            What `forward` returned, by task.
        x : Inputs
        labels : mapping of str to float32[n]
            By task, NaN where an example has none.
        weights : float32[n] or None
            Of the examples; None: 1.
        losses : mapping of str to callable
            The loss of each task, a function of outputs, labels and weights.

        Returns
        -------
        float32 tensor, a number
            A mean over all examples of the batch: those that a task does not count add 0.
        """
        return loss_of_tasks(self.features, outputs, labels, weights, losses)

    def metrics(self, outputs: Mapping[str, Any], labels: Mapping[str, Any], weights: Any) -> dict[str, float]:
        """Compute metrics of one's own, which `ClickModel.evaluate_tasks` returns and ``shoal evaluate`` prints.

        Parameters
        ----------
        outputs : mapping of str to float64[n]
            Of all measured examples, by task: what `forward` returned.
        labels : mapping of str to float32[n]
            By task, NaN where an example has none.
        weights : float32[n] or None

        Returns
        -------
        dict of str to float
            By name; none by default.
        """
        return {}


def loss_of_tasks(
    features: Features | None,
    outputs: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    weights: Tensor | None,
    losses: Mapping[str, Loss],
) -> Tensor:
    """Compute the sum of the losses of the tasks that have an output, each times its weight."""
    total: Tensor | None = None
    for name, label in labels.items():
        if name not in outputs:
            continue
        counted, known = counted_in(features, name, labels), None
        if counted is not None:
            known = counted.float() if weights is None else weights * counted
            label = torch.where(counted, label, 0.0)
        loss = losses[name](outputs[name], label, weights if known is None else known)
        task = None if features is None else features.labels.get(name)
        loss = loss if task is None or task.weight == 1 else loss * task.weight
        total = loss if total is None else total + loss
    if total is None:
        raise ValueError(f"the model has outputs for {list(outputs)}, and labels for {list(labels)}: none has both")
    return total


def counted_in(features: Features | None, name: str, labels: Mapping[str, Tensor]) -> Tensor | None:
    """Return which examples count for a task, bool[n]: they have its label, and label 1 of its mask; None: all."""
    task = None if features is None else features.labels.get(name)
    mask = None if task is None else task.mask
    missing = torch.isnan(labels[name])
    if mask is None:
        return ~missing if bool(missing.any()) else None
    return ~missing & (labels[mask] == 1)


def by_task(outputs: Tensor | Mapping[str, Tensor], features: Features | None) -> dict[str, Tensor]:
    """Return what a model's `forward` returned as float32 by task, the first one first."""
    tasks = () if features is None else features.tasks
    first = tasks[0] if tasks else LABEL
    if isinstance(outputs, Tensor):
        return {first: outputs.float()}
    named = {name: one.float() for name, one in outputs.items()}
    if not tasks:
        return {LABEL if number == 0 else name: one for number, (name, one) in enumerate(named.items())}
    if first not in named:
        raise ValueError(f"the model returns {', '.join(named)}, and none is the first label, {first!r}")
    return {first: named.pop(first), **named}
