"""Embeddings and the dense part on servers: workers hold copies, pull them, and push gradients.

    python examples/torch_dense.py                                             # one process; needs PyTorch
    shoal launch --servers 2 --workers 2 examples/torch_dense.py               # two workers
    shoal launch --servers 2 --workers 2 examples/torch_dense.py --optimizer adam

There is no all-reduce and no process group. The dense parameters are an array on the servers, which step it with the
chosen optimizer, once per clock, with the mean of the workers' gradients. A checkpoint (store.save) contains
everything: rows, dense parameters, and the states of both optimizers. Dense parts of many megabytes should be kept in
the workers: see torch_ddp.py.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch

import shoal
from shoal.metrics import Accumulator
from shoal.tools.planted import PlantedModel, write_log

RULES = {"sgd": shoal.SGD(lr=0.2), "adagrad": shoal.Adagrad(lr=0.05), "adam": shoal.Adam(lr=0.01)}


class Net(torch.nn.Module):
    """A weight for each feature, and a tower on the sum of the features' vectors."""

    def __init__(self, store: shoal.Store) -> None:
        super().__init__()
        rule, init = shoal.Adagrad(lr=0.1), shoal.Normal(0.05, seed=1)
        self.wide = shoal.torch.EmbeddingBag(store.table("wide", dim=1, optimizer=rule))
        self.deep = shoal.torch.EmbeddingBag(store.table("deep", dim=8, optimizer=rule, init=init))
        self.tower = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, batch: shoal.Batch) -> torch.Tensor:
        """Give the log-odds of the examples."""
        return (self.tower(self.deep(batch)) + self.wide(batch)).squeeze(1)


def learn(store: shoal.Store, data: shoal.data.Reader, rule: shoal.SGD | shoal.Adagrad | shoal.Adam) -> Accumulator:
    """Learn from this worker's shard of the data; return the metrics of batches predicted before they were learned."""
    torch.manual_seed(0)
    model, seen = Net(store), Accumulator()
    dense = shoal.torch.DenseParameters(store, model.tower, optimizer=rule, name="tower")
    asks = dict.fromkeys([model.wide, model.deep], lambda batch: torch.from_numpy(batch.keys))
    for batch in shoal.torch.Pipeline(data.split(store.rank, store.num_workers), asks, staleness=1, store=store):
        dense.pull()
        model.zero_grad()
        logits = model(batch)
        seen.update(batch.labels, logits.detach().numpy())
        torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()
        dense.push()
    dense.pull()
    return seen


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("SHOAL_SCHEDULER"), help="the scheduler")
    parser.add_argument("--optimizer", choices=RULES, default="adam", help="of the tower (default: adam)")
    arguments = parser.parse_args()
    mean = shoal.BSP(reduce="mean")  # losses are means: the step uses the mean over all workers
    connected = shoal.connect(arguments.cluster, consistency=mean) if arguments.cluster else shoal.local()
    with connected as store, tempfile.TemporaryDirectory() as scratch:
        write_log(Path(scratch, "log.tsv"), PlantedModel(seed=1), 20_000, 0)  # the same in every worker
        data = shoal.read_criteo(Path(scratch, "log.tsv"), batch_size=128)
        seen = learn(store, data, RULES[arguments.optimizer])
        print(f"worker {store.rank} of {store.num_workers}: {seen.result()}", flush=True)
        store.barrier()


if __name__ == "__main__":
    main()
