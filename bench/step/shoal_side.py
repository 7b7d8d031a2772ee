"""A model of shoal over shoal's tables, or over torch.nn.Embedding: python -m step.shoal_side SIDE MODEL THREADS.

shoal     tables of a local store, shoal.Adam
sparse    nn.Embedding(sparse=True), torch.optim.SparseAdam: the same rule, on the rows of a batch
dense     nn.Embedding, torch.optim.Adam (fused): all rows move in each step
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

import shoal
from ctr.draw import first, pieces
from shoal.models.features import Features
from shoal.torch.inputs import Inputs, Items
from shoal.torch.models import DCNV2, DIN, DeepFM, Maker
from step.data import ATTENTION, DIM, FIELDS, HIDDEN, LISTS, ROWS, SEQUENCES, Example
from step.serve import begin, serve

RATE = 0.001


def module_of(model: str, make: Maker) -> nn.Module:
    """Build the model, with the same dense weights on every side."""
    fields = [f"f{j}" for j in range(FIELDS[model])]
    if model == "deepfm":
        made: nn.Module = DeepFM(make, Features(fields), dim=DIM, hidden=HIDDEN)
    elif model == "dcnv2":
        made = DCNV2(make, Features(fields), dim=DIM, hidden=HIDDEN, structure="parallel")
    else:
        sequences = [{"name": name, "type": "sequence", "share": "f0"} for name in SEQUENCES]
        lists = [{"name": name, "type": "list", "pooling": "mean"} for name in LISTS]
        made = DIN(make, Features([*fields, *lists, *sequences]), dim=DIM, hidden=HIDDEN, attention=ATTENTION)
    torch.manual_seed(7)
    for layer in made.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return made


def rows_of(dim: int) -> np.ndarray:
    """Return the initial rows of all ids; those of dim 1 are 0."""
    if dim == 1:
        return np.zeros((ROWS, 1), np.float32)
    return np.concatenate([first(b, e, dim) for b, e in pieces(ROWS)])


def prepare(one: Example) -> tuple[Inputs, torch.Tensor]:
    """Make the tensors of a batch."""
    items = {
        name: Items(torch.from_numpy(keys), torch.from_numpy(offsets)) for name, (keys, offsets) in one.items.items()
    }
    lists = {name: items[name] for name in LISTS if name in items}
    sequences = {name: items[name] for name in SEQUENCES if name in items}
    return Inputs(torch.from_numpy(one.ids), lists=lists, sequences=sequences), torch.from_numpy(one.labels)


def main() -> None:
    """Run a side."""
    side, model = begin()
    store = shoal.local(threads=int(sys.argv[3])) if side == "shoal" else None
    if store is not None:
        make = shoal.torch.tables(store, shoal.Adam(lr=RATE))
    else:
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns

        def make(name: str, dim: int) -> nn.Module:
            return nn.Embedding(ROWS, dim, sparse=side == "sparse", _weight=torch.from_numpy(rows_of(dim)))

    module = module_of(model, make)
    if store is not None:
        for table in store.tables.values():
            for b, e in pieces(ROWS):
                table.assign(np.arange(b, e), rows_of(table.dim)[b:e])
    tables = [one for one in module.modules() if isinstance(one, nn.Embedding)]
    of_rows = {id(one.weight) for one in tables}
    dense = [one for one in module.parameters() if id(one) not in of_rows]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=RATE, fused=True)]
    if side == "sparse":
        optimizers.append(torch.optim.SparseAdam([one.weight for one in tables], lr=RATE))
    elif side == "dense":
        optimizers.append(torch.optim.Adam([one.weight for one in tables], lr=RATE, fused=True))
    loss_of = nn.BCEWithLogitsLoss()

    def step(given: tuple[Inputs, torch.Tensor]) -> float:
        loss = loss_of(module(given[0]), given[1])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    module.train()
    serve(model, prepare, step, (lambda: None) if store is None else store.flush)
    if store is not None:
        store.close()


if __name__ == "__main__":
    main()
