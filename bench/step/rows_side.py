"""Rows alone, a lookup and its gradient: python -m step.rows_side SIDE MODEL THREADS, MODEL being rowwise or sgd.

    shoal       one table of a local store for all 26 fields
    26 tables   a table for each field
    fbgemm      SplitTableBatchedEmbeddingBagsCodegen on the CPU, a table for each field; needs fbgemm-gpu-cpu

A step looks up an id of each field for 4096 examples, and applies a gradient to the rows: that of half the sum of the
squares of all looked-up numbers, the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ctr.draw import BATCH, first, pieces
from step.data import DIM, FIELDS, ROWS, Example, each
from step.serve import begin, serve

RATE = {"rowwise": 0.01, "sgd": 1e-4}
EPS = 1e-8
COUNT = FIELDS["deepfm"]


def rows() -> np.ndarray:
    """Return the initial rows of all ids."""
    return np.concatenate([first(b, e, DIM) for b, e in pieces(ROWS)])


def of_shoal(rule: str, threads: int, *, per_field: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """Return a lookup of ids[n, fields] as float32[n, fields * dim], and what waits for its pushes."""
    import shoal
    from shoal.models.features import Features
    from shoal.torch.inputs import Inputs
    from shoal.torch.models import Lookup, look_up

    store = shoal.local(threads=threads)
    given = shoal.RowWiseAdagrad(lr=RATE[rule], eps=EPS) if rule == "rowwise" else shoal.SGD(lr=RATE[rule])
    make = shoal.torch.tables(store, given)
    lookup = Lookup(make, "rows", Features([f"f{j}" for j in range(COUNT)]), DIM, per_field=per_field)
    start, size = rows(), each("deepfm")
    for j, table in enumerate(store.tables.values()):
        b, e = (j * size, (j + 1) * size) if per_field else (0, ROWS)
        table.assign(np.arange(b, e), start[b:e])
    lookup.train()
    return lambda ids: look_up(Inputs(ids), lookup)[0].fields.flatten(start_dim=1), store.flush


def of_fbgemm(rule: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """Return the same of FBGEMM, where nothing waits; its ids begin at 0 in each table, and are ordered by table."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    size = each("deepfm")
    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD if rule == "rowwise" else EmbOptimType.EXACT_SGD
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(size, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * COUNT,
        optimizer=kind,
        learning_rate=RATE[rule],
        eps=EPS,
        stochastic_rounding=False,
    )
    start = torch.from_numpy(rows())
    for j, weights in enumerate(bags.split_embedding_weights()):
        weights.copy_(start[j * size : (j + 1) * size])
    offsets = torch.arange(BATCH * COUNT + 1)
    return lambda ids: bags(ids, offsets), lambda: None


def main() -> None:
    """Run a side."""
    side, rule = begin()
    threads = int(sys.argv[3])
    look_up, finish = of_fbgemm(rule) if side == "fbgemm" else of_shoal(rule, threads, per_field=side != "shoal")

    def prepare(one: Example) -> Tensor:
        if side != "fbgemm":
            return torch.from_numpy(one.ids)
        return torch.from_numpy((one.ids - np.arange(COUNT) * each("deepfm")).T.reshape(-1).copy())

    def step(ids: Tensor) -> float:
        found = look_up(ids)
        found.backward(found.detach())
        return float(found.detach().square().sum()) / 2

    serve("deepfm", prepare, step, finish)


if __name__ == "__main__":
    main()
