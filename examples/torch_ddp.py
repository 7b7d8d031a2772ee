"""Embeddings on servers, the dense part in DistributedDataParallel: PyTorch's all-reduce with shoal's tables.

    python examples/torch_ddp.py                                               # one worker, two servers that it starts
    shoal launch --servers 2 --workers 2 examples/torch_ddp.py                 # two workers; needs PyTorch
    torchrun --nproc-per-node 2 examples/torch_ddp.py --cluster tcp://scheduler:5570      # as PyTorch starts them

Rows are on the servers; every worker holds the small dense part, whose gradients DDP averages (the hybrid of Persia:
Lian et al., KDD 2022). The servers average the gradients of rows: two half batches give the step of a whole one.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.metrics import Accumulator
from shoal.tools.planted import PlantedModel, write_log


class Net(torch.nn.Module):
    """A weight for each feature, and a tower on the sum of the features' vectors."""

    def __init__(self, store: shoal.Store) -> None:
        super().__init__()
        rule, init = shoal.Adagrad(lr=0.1), shoal.Normal(0.05, seed=1)
        self.wide = shoal.torch.EmbeddingBag(store.table("wide", dim=1, optimizer=rule))
        self.deep = shoal.torch.EmbeddingBag(store.table("deep", dim=8, optimizer=rule, init=init))
        tower = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.tower = DistributedDataParallel(tower)  # it starts with the parameters of worker 0

    def forward(self, batch: shoal.Batch) -> torch.Tensor:
        """Give the log-odds of the examples."""
        return (self.tower(self.deep(batch)) + self.wide(batch)).squeeze(1)


def join(store: shoal.Store) -> None:
    """Make a torch process group of the workers, at torchrun's address, or else at one that worker 0 chooses."""
    workers, meeting = store.num_workers, None
    if "MASTER_ADDR" not in os.environ:
        board = store.dense("port", 1)
        if store.rank == 0:
            meeting = dist.TCPStore("127.0.0.1", 0, workers, is_master=True, wait_for_workers=False)
            board.assign(np.array([meeting.port], np.float32))
        store.barrier()
        meeting = meeting or dist.TCPStore("127.0.0.1", int(board.pull()[0]), workers)
    dist.init_process_group("gloo", store=meeting, rank=store.rank, world_size=workers)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("SHOAL_SCHEDULER"), help="the scheduler")
    cluster, mean = parser.parse_args().cluster, shoal.BSP(reduce="mean")
    opened = shoal.connect(cluster, consistency=mean) if cluster else shoal.launch(servers=2, consistency=mean)
    with opened as store, tempfile.TemporaryDirectory() as scratch:
        join(store)
        write_log(Path(scratch, "log.tsv"), PlantedModel(seed=1), 20_000, 0)  # the same in every worker
        mine = shoal.read_criteo(Path(scratch, "log.tsv"), batch_size=128).split(store.rank, store.num_workers)
        torch.manual_seed(0)
        model, seen = Net(store), Accumulator()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # of the tower: rows are not parameters
        asks = dict.fromkeys([model.wide, model.deep], lambda batch: torch.from_numpy(batch.keys))
        for batch in shoal.torch.Pipeline(mine, asks, staleness=1, store=store, group=dist.group.WORLD):
            logits = model(batch)
            seen.update(batch.labels, logits.detach().numpy())
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()
            optimizer.step()
        print(f"worker {store.rank} of {store.num_workers}: {seen.result()}\n", end="", flush=True)  # in one write
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
