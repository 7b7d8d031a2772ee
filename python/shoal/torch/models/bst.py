"""BST: a transformer over a user's sequences, each with the candidate item at its end.

Q. Chen et al., Behavior Sequence Transformer for E-commerce Recommendation in Alibaba, DLP-KDD 2019.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.model import Model
from shoal.torch.models.layers import Deep, ItemRows, Lookup, Maker, compared, count_of, flat, look_up, share_of, tower


class Block(nn.Module):
    """Attention of all places to all, then the same two layers at each place; each with a residual and a layer norm.

    s = norm(x + attention(x)), out = norm(s + W_2 leaky_relu(W_1 s)) (equations 2 to 6). A head has width / heads
    numbers, rounded up.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        inner = -(-width // heads) * heads
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, width, bias=False)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute float32[n, places, width]; places outside of the mask bool[n, places] are not attended to."""
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        seen = self.out(seen.transpose(1, 2).flatten(start_dim=2))
        x = self.norms[0](x + self.dropout(seen))
        after = self.second(nn.functional.leaky_relu(self.first(x)))
        return self.norms[1](x + self.dropout(after))


class Transformer(nn.Module):
    """Blocks over a sequence: float32[n, (max_len + 1) * width], 0 where an example has no item.

    Place 0 is the candidate item, place 1 the last item of the sequence, place 2 the one before it. A vector for each
    place is added to its row. Of the candidate, the parts that have no field are 0; an item's row is multiplied by its
    weight.
    """

    def __init__(
        self, dim: int, width: int, max_len: int, target: tuple[int, ...], layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.dim, self.max_len, self.target = dim, max_len, target
        self.places = nn.Parameter(torch.randn(max_len + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))

    def forward(self, fields: Tensor, history: ItemRows) -> Tensor:
        """Encode a sequence, with the candidate among the rows of the fixed fields, float32[n, fields, dim]."""
        n, items, rows = fields.shape[0], history.items, history.rows
        if items.weights is not None:
            rows = rows * items.weights.unsqueeze(1)
        example = items.example
        place = items.offsets[1:][example] - torch.arange(example.shape[0])
        kept = place <= self.max_len
        slots = (example * (self.max_len + 1) + place)[kept]
        # Each slot has one item, so its gradient is a copy: no sum whose order could vary.
        x = rows.new_zeros(n * (self.max_len + 1), rows.shape[1]).index_copy(0, slots, rows[kept])
        x = x.reshape(n, self.max_len + 1, rows.shape[1])
        x = torch.cat([self._candidate(fields, rows.shape[1]).unsqueeze(1), x[:, 1:]], dim=1) + self.places
        mask = torch.arange(self.max_len + 1) <= items.lengths.unsqueeze(1)
        for block in self.blocks:
            x = block(x, mask)
        return x.masked_fill(~mask.unsqueeze(2), 0.0).flatten(start_dim=1)

    def _candidate(self, fields: Tensor, width: int) -> Tensor:
        none = fields.new_zeros(fields.shape[0], self.dim)
        parts = [fields[:, field] if field >= 0 else none for field in self.target]
        numbers = fields.new_zeros(fields.shape[0], width - self.dim * len(parts))
        return torch.cat([*parts, numbers], dim=1)


class BST(Model):
    """A tower over the fields' vectors and transformed sequences.

    A sequence's items have their rows in the candidate's table: ``share`` names its field, and that of a side column
    its own (`shoal.torch.Features`). Rows of an item, its side columns and their numbers are concatenated. Places are
    counted from the candidate, as the paper's positions in time, and their vectors added instead of concatenated.

    Parameters
    ----------
    make : Maker
        Makes the table ``embedding`` of dim ``dim``.
    features : Features
        What it reads, with one sequence or more, each with a ``max_len``.
    dim : int
    layers, heads : int
        Blocks of each transformer, and heads of their attention.
    per_field : bool
        Whether each field has a table of its own.
    embedding_dropout : float
        Of the numbers of rows.
    **deep
        Settings of the tower: see `Deep`. ``dropout`` is also that of the blocks.
    """

    def __init__(
        self,
        make: Maker,
        features: Features | int,
        *,
        dim: int = 16,
        layers: int = 1,
        heads: int = 4,
        per_field: bool = False,
        embedding_dropout: float = 0.0,
        **deep: Unpack[Deep],
    ) -> None:
        super().__init__(features)
        layers, heads = count_of("layers", layers), count_of("heads", heads)
        self.embedding = Lookup(
            make,
            "embedding",
            self.features,
            dim,
            per_field=per_field,
            pools_sequences=False,
            dropout=embedding_dropout,
        )
        made: list[nn.Module] = []
        width = self.embedding.count * dim + self.features.dense_width
        for one in compared(self.embedding, "BST"):
            if one.max_len is None:
                raise ValueError(
                    f"sequence {one.name!r} has no max_len, and BST learns a vector for each place of it: say how many "
                    "items it has at most"
                )
            its, target = self.embedding.width(one.name), self.embedding.target(one.name)
            made.append(
                Transformer(dim, its, one.max_len, target, layers, heads, share_of("dropout", deep.get("dropout", 0.0)))
            )
            width += (one.max_len + 1) * its
        self.transformers = nn.ModuleList(made)
        self.tower = tower(width, **deep)
        self.last = nn.Linear(self.tower.width, 1)

    def forward(self, x: Inputs) -> Tensor:
        """Compute the logits float32[n]."""
        (rows,) = look_up(x, self.embedding)
        histories = rows.sequences.values()
        seen = [its(rows.fields, history) for its, history in zip(self.transformers, histories, strict=True)]
        return self.last(self.tower(torch.cat([*seen, flat(rows.fields, x.dense)], dim=1))).squeeze(1)
