"""Activations of towers by their names, and batch normalization that bears batches of one example.

    Dice      p(s) s + (1 - p(s)) alpha s,  p = sigmoid(batch-normalized s): a PReLU whose corner follows the data
    PReLU     s if s > 0, else alpha s

alpha is learned, one for each unit. Threads: as torch's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from shoal.base.settings import check_names

Activation = Literal["relu", "prelu", "dice", "gelu", "silu", "leaky_relu", "tanh", "sigmoid", "identity"]


class BatchNorm(nn.BatchNorm1d):
    """torch's BatchNorm1d, of float32[n, width], which normalizes fewer than two examples by the running means.

    They have no variance: torch refuses one example, as the last batch of a pass may be, and none make it NaN.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each column."""
        if not self.training or len(x) > 1:
            return super().forward(x)
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class Dice(nn.Module):
    """The data adaptive activation of DIN, of float32[n, width] (G. Zhou et al., KDD 2018, section 5.3).

    In training p has the mean and the variance of the batch, afterwards running ones, as in a batch normalization
    without parameters. alpha starts at 0, where Dice is s * p(s).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width, eps=1e-8, momentum=0.01, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each number."""
        p = torch.sigmoid(self.norm(x))
        return x * (p + (1 - p) * self.alpha)


_MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "prelu": nn.PReLU,
    "dice": Dice,
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "leaky_relu": lambda _: nn.LeakyReLU(),
    "tanh": lambda _: nn.Tanh(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "identity": lambda _: nn.Identity(),
}


def activation(name: Activation, width: int) -> nn.Module:
    """Make the activation of this name for a layer of ``width`` units."""
    check_names([name], get_args(Activation), "a tower", "activation")
    return _MAKERS[name](width)
