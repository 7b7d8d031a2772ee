"""MaskNet: blocks in which a mask, computed from the whole example, multiplies the numbers of its features.

Z. Wang et al., MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask, DLP-KDD
2021.
"""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, Lookup, Maker, count_of, flat, has_tower, look_up, positive, tower, width_of


class FieldNorm(nn.Module):
    """The layer norm of each field's vector alone, float32[n, count, dim], with a gain and a bias of its own."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, dim))
        self.bias = nn.Parameter(torch.zeros(count, dim))

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize the vectors."""
        return nn.functional.layer_norm(rows, rows.shape[2:]) * self.gain + self.bias


class MaskBlock(nn.Module):
    """ReLU(norm(W (mask * h))), where mask = W_2 ReLU(W_1 v + b_1) + b_2 of the example's numbers v (section 3.3).

    W_1 is ``reduction`` times as wide as the mask.
    """

    def __init__(self, whole: int, width: int, out: int, reduction: float) -> None:
        super().__init__()
        inner = max(1, round(width * reduction))
        self.mask = nn.Sequential(nn.Linear(whole, inner), nn.ReLU(), nn.Linear(inner, width))
        self.out = nn.Linear(width, out, bias=False)
        self.norm = nn.LayerNorm(out)

    def forward(self, whole: Tensor, h: Tensor) -> Tensor:
        """Compute float32[n, out] from the example's numbers and those that are masked, float32[n, width]."""
        return torch.relu(self.norm(self.out(self.mask(whole) * h)))


class MaskNet(Model):
    """Blocks with masks, each after the other or side by side over the keys' vectors, and a tower.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features or int
        What it reads; a number: that many categories.
    dim : int
    per_field : bool
        Whether each field has a table of its own.
    structure : {"parallel", "serial"}
        Whether the input of all blocks is the vectors, or that of a later block the output of the one before.
    blocks, width : int
        Blocks, and numbers of output of each.
    reduction : float
        How many times as wide as a mask the layer before it is.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the tower over the outputs of all parallel blocks, or of the last serial one: see `Deep`. An empty
        ``hidden``: no tower, as in the paper's serial model.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        per_field: bool = False,
        structure: Literal["parallel", "serial"] = "parallel",
        blocks: int = 3,
        width: int = 64,
        reduction: float = 1.0,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        if structure not in ("parallel", "serial"):
            raise ValueError(f"structure is {structure!r}: pass 'parallel' or 'serial'")
        blocks, width = count_of("blocks", blocks), width_of("width", width)
        reduction = positive("reduction", reduction)
        self.serial = structure == "serial"
        self.embedding = Lookup(make, "embedding", self.features, dim, per_field=per_field, dropout=embedding_dropout)
        numbers = self.embedding.count * dim + self.features.dense_width
        self.norm = FieldNorm(self.embedding.count, dim)
        widths = [width if self.serial and number else numbers for number in range(blocks)]
        self.blocks = nn.ModuleList(MaskBlock(numbers, its, width, reduction) for its in widths)
        out = width if self.serial else width * blocks
        self.tower = tower(out, **deep) if has_tower(deep) else None
        self.last = nn.Linear(out if self.tower is None else self.tower.width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        whole, first = flat(rows.fields, x.dense), flat(self.norm(rows.fields), x.dense)
        if self.serial:
            out = first
            for block in self.blocks:
                out = block(whole, out)
        else:
            out = torch.cat([block(whole, first) for block in self.blocks], dim=1)
        return self.last(out if self.tower is None else self.tower(out)).squeeze(1)
