"""Losses of click models by their names: the mean over a batch of each example's weight times its loss.

    bce       binary cross-entropy of a logit; a positive example counts pos_weight times
    focal     bce x (1 - p)^gamma, p being the probability of the label (T.-Y. Lin et al., ICCV 2017), and of labels 1
              times alpha, of labels 0 times 1 - alpha, if alpha is given
    mse       the square of what is predicted minus the label, a number
    poisson   exp(s) - label x s, of counts, which are predicted as exp(s)

Others are functions of the user, MODULE:FUNCTION, of packages that are allowed. Threads: no state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from shoal.base import own_code
from shoal.base.settings import check_names

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LossSpec = str | Mapping[str, Any]

OF_NUMBERS = ("mse", "poisson")  # whose labels are not 0 or 1


def bce(logits: Tensor, labels: Tensor, weights: Tensor | None, *, pos_weight: float = 1.0) -> Tensor:
    """Return the mean binary cross-entropy."""
    factor = None if pos_weight == 1.0 else torch.tensor(pos_weight)
    return binary_cross_entropy_with_logits(logits, labels, weights, pos_weight=factor)


def focal(
    logits: Tensor, labels: Tensor, weights: Tensor | None, *, gamma: float = 2.0, alpha: float | None = None
) -> Tensor:
    """Return the mean focal loss of labels that are 0 or 1."""
    # By the logarithm: a power of 1 - p has no gradient where p is rounded to 1.
    factor = torch.exp(gamma * logsigmoid(-(2 * labels - 1) * logits))
    if alpha is not None:
        factor = factor * (alpha * labels + (1 - alpha) * (1 - labels))
    return _mean(factor * binary_cross_entropy_with_logits(logits, labels, reduction="none"), weights)


def mse(values: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean square of the differences."""
    return _mean((values - labels).square(), weights)


def poisson(logarithms: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean negative log-likelihood of counts, without what does not depend on the prediction."""
    return _mean(torch.exp(logarithms) - labels * logarithms, weights)


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses if weights is None else losses * weights).mean()


_LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "bce": (bce, ("pos_weight",)),
    "focal": (focal, ("gamma", "alpha")),
    "mse": (mse, ()),
    "poisson": (poisson, ()),
}


def name_of(spec: LossSpec) -> str:
    """Return the name of a loss, whose settings are checked.

    Raises
    ------
    ValueError
        There is no such loss or setting, or a setting is out of range.
    """
    if not isinstance(spec, str | Mapping):
        raise TypeError(f"loss is {spec!r:.80}: pass a name, such as 'bce', or a mapping of a name and settings")
    settings: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"a loss has no name: it is one of {', '.join(_LOSSES)}, or MODULE:FUNCTION")
    if ":" in name:
        return name
    check_names([name], list(_LOSSES), "a model", "loss")
    check_names(settings, _LOSSES[name][1], f"loss {name}")
    for setting, value in settings.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
        if not is_number or (setting == "alpha" and value > 1) or (setting == "pos_weight" and value == 0):
            bounds = {"alpha": "a number from 0 to 1", "pos_weight": "a number above 0"}.get(setting, "0 or more")
            raise ValueError(f"{setting} of loss {name} is {value!r}: pass {bounds}")
    return name


def loss_of(spec: LossSpec) -> Loss:
    """Return the loss of a name, such as "bce" or ``{"name": "focal", "gamma": 2.0}``.

    Parameters
    ----------
    spec : str or mapping
        Its name, or its name and settings: bce (pos_weight), focal (gamma, alpha), mse, poisson. ``"mypkg:loss"`` is
        a function of (logits, labels, weights or None) that returns the mean loss; settings are its keywords. Its
        package must be allowed: see own_code.py.

    Raises
    ------
    ValueError
        There is no such loss or setting, a setting is out of range, or a function cannot be imported, or may not.
    """
    name = name_of(spec)
    settings = {} if isinstance(spec, str) else {key: value for key, value in spec.items() if key != "name"}
    if ":" in name:
        found = own_code.named(name, "loss", instead="the function itself, or to load a model ")
        if not callable(found):
            raise ValueError(f"loss is {name!r}, {type(found).__name__} {found!r:.80}: name a function")
        return _checking(name, functools.partial(found, **settings))
    return functools.partial(_LOSSES[name][0], **settings) if settings else _LOSSES[name][0]


def _checking(name: str, function: Loss) -> Loss:
    """Return a function of a user, whose result is checked."""

    def checked(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        loss = function(logits, labels, weights)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss {name!r} returned {got}: return the mean loss, a tensor without dimensions")
        return loss

    return checked
