"""A job of DDP workers with tables on servers, each with its share of every batch; run by `test_torch_ddp.py`.

python torch_halves.py FILE        as worker of `shoal launch`; worker 0 writes what was learned
"""

from __future__ import annotations

import runpy
import sys

import numpy as np
import torch
import torch.distributed as dist

import shoal
from paths import ROOT

BATCH, STEPS = 32, 10
STALENESSES = (0, 2)
EXAMPLE = ROOT / "examples" / "torch_ddp.py"


def batches(rank: int, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a worker's share of every batch: keys int64[n, 3], some in common, and labels."""
    random = np.random.default_rng(8)
    keys = random.integers(-30, 30, size=(STEPS, BATCH, 3))
    labels = random.random((STEPS, BATCH)) < 0.4
    return [
        (torch.from_numpy(k[rank::workers].copy()), torch.from_numpy(y[rank::workers].astype(np.float32)))
        for k, y in zip(keys, labels, strict=True)
    ]


def learn(store: shoal.Store, staleness: int) -> list[np.ndarray]:
    """Train with SGD everywhere; return the rows and the tower."""
    clock = store.clock
    table = store.table(f"deep-{staleness}", dim=4, optimizer=shoal.SGD(lr=0.5), init=shoal.Uniform(0.5, seed=3))
    deep = shoal.torch.Embedding(table)
    torch.manual_seed(store.rank)  # DDP broadcasts the values of worker 0
    tower = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(deep, tower))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mine = batches(store.rank, store.num_workers)
    # The second worker has one batch more, which must not be used.
    mine += mine[:1] * store.rank
    steps = 0
    for keys, labels in shoal.torch.Pipeline(
        mine, {deep: lambda batch: batch[0]}, staleness=staleness, store=store, group=dist.group.WORLD
    ):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(keys).squeeze(1), labels).backward()
        optimizer.step()
        steps += 1
    assert (steps, store.clock - clock) == (STEPS, STEPS)
    return [table.pull(np.arange(-30, 30)), *(p.detach().numpy() for p in tower.parameters())]


def main() -> None:
    """Run as a worker."""
    with shoal.connect(consistency=shoal.BSP(reduce="mean")) as store:
        runpy.run_path(str(EXAMPLE))["join"](store)
        learned = [array for staleness in STALENESSES for array in learn(store, staleness)]
        if store.rank == 0:
            np.savez(sys.argv[1], *learned)
        store.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
