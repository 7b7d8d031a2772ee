"""The rate of a dense Adam for tables: nn.Embedding with torch.optim.Adam of all rows compared with shoal.Adam.

    export SHOAL_DATA=/path/to/the/data            examples/bars/README.md says where to get frappe/*.csv.xz
    python bench/bench_dense_adam.py               two minutes of one core
    python bench/bench_dense_adam.py --batch 64 --rates 0.001 0.002 --models deepfm

LR, FM and DeepFM (dim 10, hidden 64, 32) learn from the training part of Frappe in four passes, without L2, and are
measured on the first 30,000 validation examples. The dense part has torch's Adam with the rate 0.001. shoal.Adam moves
a row only in steps that have its key; T is the number of rows over that of the distinct rows of a batch, how many steps
a row waits on average.
"""

from __future__ import annotations

import argparse
import lzma
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.metrics import auc, logloss
from shoal.models.features import Features
from shoal.torch.inputs import Inputs
from shoal.torch.models import FM, LR, DeepFM

MODELS = {"lr": (LR, {}), "fm": (FM, {"dim": 10}), "deepfm": (DeepFM, {"dim": 10, "hidden": (64, 32)})}
RATE = 0.001  # of the dense part


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Read ids and labels; Frappe's ids differ between columns."""
    with lzma.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    return torch.from_numpy(table[:, 1:].copy()), torch.from_numpy(table[:, 0]).float()


def learn(name: str, rate: float, batch: int, passes: int, *, dense: bool, data: list[Tensor]) -> list[str]:
    """Train a model; returns AUC and log-loss after each pass."""
    ids, labels, valid_ids, valid_labels = data
    kind, settings = MODELS[name]
    count = int(max(ids.max(), valid_ids.max())) + 1

    def embedding(_: str, dim: int) -> nn.Module:
        made = nn.Embedding(count, dim)
        nn.init.normal_(made.weight, std=0.0 if dim == 1 else 1e-4)
        return made

    found = []
    with shoal.local(threads=1) as store:
        tables = shoal.torch.tables(store, shoal.Adam(lr=rate), init=shoal.Normal(std=1e-4))
        module = kind(embedding if dense else tables, Features([f"f{j}" for j in range(ids.shape[1])]), **settings)
        torch.manual_seed(2)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        rows = [one.weight for one in module.modules() if isinstance(one, nn.Embedding)]
        others = [one for one in module.parameters() if all(one is not row for row in rows)]
        optimizers = [torch.optim.Adam(others, lr=RATE, fused=True)]
        if dense:
            optimizers.append(torch.optim.Adam(rows, lr=rate, fused=True))
        generator = torch.Generator().manual_seed(3)
        for _ in range(passes):
            module.train()
            for part in torch.randperm(len(ids), generator=generator).split(batch):
                loss = nn.functional.binary_cross_entropy_with_logits(module(Inputs(ids[part])), labels[part])
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            module.eval()
            with torch.no_grad():
                margins = torch.cat([module(Inputs(part)) for part in valid_ids.split(8192)]).double().numpy()
            found.append(f"{auc(valid_labels.numpy(), margins):.4f} / {logloss(valid_labels.numpy(), margins):.4f}")
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rates", nargs="+", type=float, default=[0.001, 0.01])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    folder = Path(os.environ.get("SHOAL_DATA", ""), "frappe")
    if not folder.is_dir():
        print("SHOAL_DATA has no folder frappe: nothing is measured")
        return
    torch.set_num_threads(1)
    (ids, labels), (valid_ids, valid_labels) = read(folder / "train.csv.xz"), read(folder / "valid.csv.xz")
    data = [ids, labels, valid_ids[:30_000], valid_labels[:30_000]]
    touched = np.mean([len(torch.unique(ids[part])) for part in torch.randperm(len(ids)).split(options.batch)[:20]])
    print(f"batches of {options.batch}: T = {len(torch.unique(ids)) / touched:.1f}\n")
    print("| model | rate | rows | " + " | ".join(f"pass {j + 1}" for j in range(options.passes)) + " |")
    print("|---" * (3 + options.passes) + "|")
    for name in options.models:
        for rate in options.rates:
            for dense in (True, False):
                found = learn(name, rate, options.batch, options.passes, dense=dense, data=data)
                print(f"| {name} | {rate} | {'all' if dense else 'touched'} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
