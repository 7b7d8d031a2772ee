"""The recipe of a click model: its loss, and what bounds, schedules and averages the steps of its dense part.

    gradients --clip_norm--> optimizer, with the rate lr x schedule(steps) x plateau --> parameters --ema--> averages

Steps are counted from 0 by the dense part; with the averages they are in its file, so a resumed fit has the same bits.
The factor of a plateau is a function of the passes that the record of a model has.

Threads: the one that trains.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch
from torch import nn

from shoal.base.scalars import make_plain
from shoal.base.settings import check_names
from shoal.config import FitConfig
from shoal.models.plan import Plateau
from shoal.schedules import SCHEDULES, Schedule
from shoal.table.table import Table
from shoal.torch.losses import OF_NUMBERS, Loss, LossSpec, loss_of, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a click model is trained, besides its optimizers.

    Parameters
    ----------
    clip_norm : float, optional
        Bound of the norm of the gradients of all dense parameters together, as `torch.nn.utils.clip_grad_norm_`.
        Those of rows are not among them: optimizers of tables have a ``clip_norm`` of their own, for each row.
    schedule : Schedule, optional
        Rate of the dense part as a function of its steps, from `shoal.schedules`. Tables have theirs in their
        optimizers.
    plateau : Plateau, optional
        When the rates of the dense part and of the tables fall. Rules without a rate that can change (FTRL, a class of
        one's own) keep theirs.
    ema : float, optional
        Decay of an exponential moving average of the dense parameters, such as 0.999: after each step an average is
        ``ema`` times itself plus ``1 - ema`` times the parameter. The averages predict, are measured and saved. Rows
        of tables are not averaged.
    loss : str, mapping or callable
        "bce" or "focal", or its name and settings, as `shoal.torch.losses.loss_of`; or a function of (logits, labels,
        weights or None) that returns the mean loss. A function's name, "mypkg:loss", is for configurations: the
        command allows its package (``--import``), and so does ``imports`` of `shoal.torch.load`.

    Raises
    ------
    ValueError
        A number is out of range, or there is no such loss.
    TypeError
        ``schedule`` or ``plateau`` is another object.
    """

    clip_norm: float | None = None
    schedule: Schedule | None = None
    plateau: Plateau | None = None
    ema: float | None = None
    loss: LossSpec | Loss = "bce"

    def __post_init__(self) -> None:
        make_plain(self)
        if not callable(self.loss) and (name := name_of(self.loss)) in OF_NUMBERS:
            raise ValueError(f"loss is {name!r}, which is of numbers, and the labels of a click model are 0 or 1")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm is {self.clip_norm}: pass a number above 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema}: pass a number above 0 and below 1, such as 0.999")
        if not isinstance(self.schedule, Schedule | None):
            raise TypeError(f"schedule is {self.schedule!r}: pass one such as shoal.schedules.Warmup(1000)")
        if not isinstance(self.plateau, Plateau | None):
            raise TypeError(f"plateau is {self.plateau!r}: pass shoal.models.Plateau()")

    @property
    def common(self) -> dict[str, Any]:
        """What all workers of a fit, and one that resumes, have in common, by name; a plateau is in the plan."""
        loss = getattr(self.loss, "__qualname__", type(self.loss).__name__) if callable(self.loss) else repr(self.loss)
        schedule = None if self.schedule is None else repr(self.schedule)
        return {"clip_norm": self.clip_norm, "schedule": schedule, "ema": self.ema, "loss": loss}


_OF_TRAIN = ("clip_norm", "schedule", "plateau", "ema", "loss")


def described(train: FitConfig) -> dict[str, Any]:
    """Return the recipe of a configuration as JSON: the argument of `recipe_of`."""
    found = {name: value for name in _OF_TRAIN if (value := getattr(train, name)) is not None}
    if "plateau" in found:
        found["plateau"] = {**found["plateau"], "metric": train.metric, "min_delta": train.min_delta}
    return found


def recipe_of(given: Mapping[str, Any]) -> Recipe:
    """Make a recipe from settings as those of ``[train]``; their names are checked.

    Raises
    ------
    ValueError
        There is no such setting or kind, or a value is wrong.
    """
    settings = dict(given)
    if "schedule" in settings:
        settings["schedule"] = _schedule_of(settings["schedule"])
    if "plateau" in settings:
        check_names(settings["plateau"], Plateau.__struct_fields__, "[train] plateau")
        try:
            settings["plateau"] = msgspec.convert(settings["plateau"], Plateau)
        except msgspec.ValidationError as error:
            raise ValueError(f"[train] plateau: {error}") from None
    return Recipe(**settings)


def _schedule_of(given: Mapping[str, Any]) -> Schedule:
    kinds: dict[str, type[Schedule]] = {one.__name__: one for one in SCHEDULES}
    settings = dict(given)
    name = settings.pop("name", None)
    if name is None:
        raise ValueError(f"[train] schedule has no name: it is one of {', '.join(kinds)}")
    check_names([name], kinds, "[train] schedule", "kind")
    check_names(settings, [one.name for one in fields(kinds[name])], f"[train] schedule {name}")
    try:
        return kinds[name](**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[train] schedule: {error}") from None


def loss_function(recipe: Recipe) -> Loss:
    """Return the loss of a recipe; a function of another package is imported."""
    return recipe.loss if callable(recipe.loss) else loss_of(recipe.loss)


def scale_rates(tables: Iterable[Table], scale: float, plateau: Plateau) -> None:
    """Set the factor of the rates of tables, by the rule of a plateau; those that have none that can change stay."""
    for table in tables:
        optimizer: Any = table.optimizer
        if optimizer.has_rate:
            table.scale_rate(plateau.scale_of(optimizer.lr, scale))


class DenseSteps:
    """The steps of the optimizer of a dense part, made by a recipe."""

    def __init__(self, recipe: Recipe, parameters: Sequence[nn.Parameter]) -> None:
        self._recipe = recipe
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._steps = 0
        self._scale, self._plateau = 1.0, recipe.plateau
        self._averages: list[torch.Tensor] = []  # of the parameters, once there is a step

    def scale_rate(self, scale: float, plateau: Plateau) -> None:
        """Set the factor of the rate of later steps, by the rule of a plateau."""
        self._scale, self._plateau = scale, plateau

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a step with the gradients that the parameters have."""
        recipe = self._recipe
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, recipe.clip_norm)
        if recipe.schedule is not None or self._plateau is not None:
            self._set_rates(optimizer)
        optimizer.step()
        self._steps += 1
        if recipe.ema is not None:
            own = [parameter.detach() for parameter in self._parameters]
            if self._averages:
                torch._foreach_lerp_(self._averages, own, 1 - recipe.ema)
            else:
                self._averages = [one.clone() for one in own]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the parameters their averages, if there are any, within the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        if self._averages:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.data, average.data = average.data, parameter.data

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rates, each from the one of the settings, so that no rounding adds up."""
        schedule, plateau = self._recipe.schedule, self._plateau
        factor = 1.0 if schedule is None else schedule.at(self._steps)
        for group in optimizer.param_groups:
            rate = float(group.setdefault("initial_lr", group["lr"]))
            scale = 1.0 if plateau is None else plateau.scale_of(rate, self._scale)
            group["lr"] = rate * factor * scale

    def state(self) -> dict[str, Any]:
        """Return what a resumed fit needs besides the averages, for `torch.save`: tensors are not copied."""
        own = [parameter.detach() for parameter in self._parameters] if self._averages else []
        return {"steps": self._steps, "parameters": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; the parameters are the averages now."""
        self.forget_averages()
        self._steps = int(state["steps"])
        if state["parameters"]:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]
            with torch.no_grad():
                for parameter, its in zip(self._parameters, state["parameters"], strict=True):
                    parameter.copy_(its)

    def forget_averages(self) -> None:
        """Average from the next step on: the parameters are those of a model now."""
        self._averages = []
