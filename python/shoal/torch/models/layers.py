"""The building blocks of models: looked-up rows, towers, first-order terms, interactions of second order.

A *maker* creates, for a name and a dim, a module that maps keys int64[...] to rows float32[..., dim]. Models use their
sparse parts only by this interface, so the same model runs on a store's tables (`shoal.torch.tables`) and on
``torch.nn.Embedding``.

    shared       one table NAME for all fields: keys carry their field already, as readers hash (field, token)
    per field    a table NAME-0, NAME-1, ... for each field

Threads: as torch's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.torch.fields import Inputs
from shoal.torch.sparse import SparseModule, pull_together

Maker = Callable[[str, int], nn.Module]


class Lookup(nn.Module):
    """Rows of fixed fields, from one table or from one for each field."""

    def __init__(self, make: Maker, name: str, fields: int, dim: int, *, per_field: bool) -> None:
        super().__init__()
        names = [f"{name}-{i}" for i in range(fields)] if per_field else [name]
        self.tables = nn.ModuleList([make(one, dim) for one in names])

    def asked(self, keys: Tensor) -> list[tuple[nn.Module, Tensor]]:
        """Return the tables and their keys for the rows of ``keys`` int64[n, fields]."""
        if len(self.tables) == 1:
            return [(self.tables[0], keys)]
        return [(table, keys[:, i]) for i, table in enumerate(self.tables)]

    def answered(self, rows: Sequence[Tensor]) -> Tensor:
        """Combine the rows of the requests: float32[n, fields, dim]."""
        return rows[0] if len(self.tables) == 1 else torch.stack(list(rows), dim=1)

    def table_of(self, field: int) -> nn.Module:
        """Return the table that holds the rows of a field."""
        return self.tables[0 if len(self.tables) == 1 else field]


def pull(asked: Sequence[tuple[nn.Module, Tensor]]) -> list[Tensor]:
    """Look up keys of several tables: float32[..., dim] of each request's keys int64[...].

    A table with several requests is called once, so that backward sums all its gradients into one step. All pulls from
    a store's tables are begun before one is waited for.
    """
    of: dict[nn.Module, list[int]] = {}
    for number, (table, _) in enumerate(asked):
        of.setdefault(table, []).append(number)
    keys = [
        asked[some[0]][1] if len(some) == 1 else torch.cat([asked[number][1].flatten() for number in some])
        for some in of.values()
    ]
    together = all(isinstance(table, SparseModule) for table in of)
    calls = list(zip(of, keys, strict=True))
    found = pull_together(calls) if together else [table(some_keys) for table, some_keys in calls]
    out: list[Tensor] = [torch.empty(0)] * len(asked)
    for some, rows in zip(of.values(), found, strict=True):
        if len(some) == 1:
            out[some[0]] = rows
            continue
        shapes = [asked[number][1].shape for number in some]
        parts = rows.split([shape.numel() for shape in shapes])
        for number, shape, part in zip(some, shapes, parts, strict=True):
            out[number] = part.unflatten(0, shape)
    return out


def look_up(x: Inputs, *lookups: Lookup) -> list[Tensor]:
    """Look the keys up in several lookups at once: float32[n, fields, dim] each, times the values if there are any."""
    asked = [lookup.asked(x.keys) for lookup in lookups]
    rows = iter(pull([one for some in asked for one in some]))
    found = [lookup.answered([next(rows) for _ in some]) for lookup, some in zip(lookups, asked, strict=True)]
    return found if x.values is None else [rows * x.values.unsqueeze(-1) for rows in found]


class Linear(nn.Module):
    """First order: a bias plus the sum of each example's weights, float32[n] of float32[n, fields, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, weights: Tensor) -> Tensor:
        """Sum the weights and add the bias."""
        return self.bias + weights.sum(dim=(1, 2))


def pairs(rows: Tensor) -> Tensor:
    """Sum the products of all pairs of fields, float32[n] of float32[n, fields, dim].

    sum over i < j of <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2 (Rendle, Factorization Machines, ICDM 2010, lemma 3.1).
    """
    return 0.5 * (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1)


def tower(width: int, hidden: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Make fully connected layers, each followed by ReLU, from ``width`` numbers to ``hidden[-1]``."""
    if not hidden:
        raise ValueError("hidden is empty: pass the width of one layer or more")
    layers: list[nn.Module] = []
    for before, after in pairwise([width, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU()]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def flat(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Concatenate the rows of each example, then its dense columns: float32[n, fields * dim + d]."""
    wide = rows.flatten(start_dim=1)
    return wide if dense is None else torch.cat([wide, dense], dim=1)
