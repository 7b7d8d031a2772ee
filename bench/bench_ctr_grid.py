"""A grid of click models in one pass, compared with as many fits of one model each.

    pip install torch psutil
    python bench/bench_ctr_grid.py                   four DeepFM models, one minute
    python bench/bench_ctr_grid.py --quick           a few batches, as a test

Both sides read the same generated TSV file of 39 columns in Criteo's format in turns, `--rounds` times, with batches of
4096 examples and one thread. A figure is the grid's share of the CPU time, and of the time, of the separate fits.

Checks: the metrics of each model of the grid equal those of its fit alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from figures import check, conditions, spread
from shoal.config import TrainConfig
from shoal.torch import ClickModelGrid
from shoal.torch.config import build, parse

GRID: dict[str, list[Any]] = {"model.dim": [8, 16], "train.optimizer.lr": [0.0005, 0.001]}


def write(path: Path, examples: int) -> None:
    """Write examples whose label depends on some of their ids."""
    random = np.random.default_rng(5)
    ids = np.floor(10 ** (random.random((examples, 26)) * 4)).astype(np.int64)
    numbers = random.integers(0, 200, (examples, 13))
    labels = random.random(examples) < 1 / (1 + np.exp(1.5 - (ids[:, 0] % 3) + (ids[:, 1] % 2)))
    with path.open("w") as file:
        for label, row, words in zip(labels.astype(int), numbers, ids, strict=True):
            file.write("\t".join([str(label), *map(str, row), *(f"{one:08x}" for one in words)]) + "\n")


def together(config: TrainConfig, path: Path) -> list[Any]:
    """Train the grid; return the metrics of its models."""
    with ClickModelGrid(config, GRID, threads=1) as grid:
        grid.fit(shoal.read_criteo(path, batch_size=4096), progress=False)
        return [model.history.passes[0].metrics for model in grid.models]


def apart(config: TrainConfig, path: Path) -> list[Any]:
    """Train each model alone; return their metrics."""
    with ClickModelGrid(config, GRID, threads=1) as grid:
        configs = grid.configs
    found = []
    for one in configs:
        with shoal.local(threads=1) as store:
            model = build(one, store)
            model.fit(shoal.read_criteo(path, batch_size=4096), epochs=one.train.epochs, progress=False)
            found.append(model.history.passes[0].metrics)
    return found


def timed(
    work: Callable[[TrainConfig, Path], list[Any]], config: TrainConfig, path: Path
) -> tuple[float, float, list[Any]]:
    """Return the CPU time, the time and the metrics of one side."""
    cpu, begin = time.process_time(), time.perf_counter()
    found = work(config, path)
    return time.process_time() - cpu, time.perf_counter() - begin, found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    examples, rounds = (5_000, 1) if arguments.quick else (arguments.examples, arguments.rounds)
    torch.set_num_threads(1)
    config = parse(
        {"data": {"data": [], "format": "criteo"}, "model": {"name": "deepfm", "dim": 8, "hidden": [64, 32]}}
    )
    shares: dict[str, list[float]] = {"CPU": [], "time": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.tsv")
        write(path, examples)
        for number in range(rounds):
            sides = [together, apart] if number % 2 else [apart, together]
            measured = {side: timed(side, config, path) for side in sides}
            check(measured[together][2] == measured[apart][2], "a model of the grid differs from its fit alone")
            shares["CPU"].append(measured[together][0] / measured[apart][0])
            shares["time"].append(measured[together][1] / measured[apart][1])
            print(f"round {number + 1}: grid {measured[together][:2]}, apart {measured[apart][:2]} CPU s, s")
    print(f"share of the CPU time {spread(shares['CPU'], 2)}, of the time {spread(shares['time'], 2)}; {conditions()}")


if __name__ == "__main__":
    main()
