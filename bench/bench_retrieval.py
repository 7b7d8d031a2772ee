"""A two-tower model on real data: recall of held-out items, with and without the correction by items' frequencies.

    export SHOAL_DATA=/path/to/the/data                README.md has the file names
    python bench/bench_retrieval.py                    both sets: some twelve minutes of one core
    python bench/bench_retrieval.py --sets frappe --seeds 1

frappe: the app that is used, given the user and the context; the published split. movielens_tags: the film, given the
user and the tag; a tenth of the positive examples is held out, another tenth for validation. Only positive examples are
trained on. Candidates are all items of the set. The temperature of each side and its passes are those with the best
recall@100 on the validation part. The baseline ranks all items by their number of training examples.
"""

from __future__ import annotations

import argparse
import lzma
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import shoal
from figures import conditions, spread
from shoal.models.features import Features
from shoal.torch.models import TwoTower
from shoal.torch.retrieval import item_vectors, ndcg_at, recall_at, user_vectors

SETS = {
    "frappe": (
        ["user", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"],
        "item",
        [f"frappe/{part}.csv.xz" for part in ("train", "valid", "test")],
    ),
    "movielens_tags": (["user_id", "tag_id"], "item_id", ["movielens_tags/movielenslatest_x1_test.csv.xz"]),
}
TEMPERATURES = (0.03, 0.05, 0.1, 0.2)
PASSES = 20
BATCH = 1024


def parts_of(name: str, folder: Path) -> list[Path]:
    """Write the positive examples of the three parts."""
    _, _, files = SETS[name]
    texts = [lzma.decompress(Path(os.environ["SHOAL_DATA"], file).read_bytes()).decode().splitlines() for file in files]
    head = texts[0][0]
    positives = [[line for line in lines[1:] if line.startswith("1")] for lines in texts]
    if len(positives) == 1:
        mixed = np.random.default_rng(1).permutation(np.array(positives[0]))
        tenth = len(mixed) // 10
        positives = [list(mixed[2 * tenth :]), list(mixed[:tenth]), list(mixed[tenth : 2 * tenth])]
    paths = [folder / f"{part}.csv" for part in ("train", "valid", "test")]
    for path, lines in zip(paths, positives, strict=True):
        path.write_text("\n".join([head, *lines]) + "\n")
    return paths


def measures(users: np.ndarray, items: np.ndarray, truth: list[list[int]]) -> dict[str, float]:
    """Return all measures."""
    recalls = {f"recall@{k}": recall_at(k, users, items, truth) for k in (10, 100)}
    return {**recalls, "ndcg@10": ndcg_at(10, users, items, truth)}


class Task:
    """A set, read once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.user, self.item, _ = SETS[name]
        self.features = Features([*self.user, self.item])
        self.paths = parts_of(name, folder)
        self.items: dict[str, int] = {}
        self.truth: list[list[int]] = []
        for path in self.paths:
            head, *lines = path.read_text().splitlines()
            column = head.split(",").index(self.item)
            self.truth.append([self.items.setdefault(line.split(",")[column], len(self.items)) for line in lines])

    def reader(self, part: int | None = None) -> shoal.data.Reader:
        """Return the reader of a part, or of all."""
        paths = self.paths if part is None else [self.paths[part]]
        return shoal.read_csv(paths, label="label", batch_size=BATCH, **self.features.columns)

    def measured(self, model: shoal.torch.ClickModel, part: int) -> dict[str, float]:
        """Measure a model on a part; all measures on the last one."""
        found = item_vectors(model, self.reader())
        vectors = np.empty_like(found.vectors)
        vectors[[self.items[name] for name in found.names if name is not None]] = found.vectors
        users, truth = user_vectors(model, self.reader(part)), [[one] for one in self.truth[part]]
        return measures(users, vectors, truth) if part == 2 else {"recall@100": recall_at(100, users, vectors, truth)}

    def by_popularity(self) -> dict[str, float]:
        """Measure the ranking by the number of training examples on the test part."""
        counts = np.bincount(self.truth[0], minlength=len(self.items)).astype(np.float32)[:, None]
        users, truth = np.ones((len(self.truth[2]), 1), np.float32), [[one] for one in self.truth[2]]
        return measures(users, counts, truth)

    def train(self, *, correct: bool, temperature: float, passes: int, seed: int, part: int) -> list[dict[str, float]]:
        """Train a model; measure it on a part after every second pass, on the test part at the end."""
        torch.manual_seed(seed)
        with shoal.local(threads=1) as store:
            module = TwoTower(
                shoal.torch.tables(store, shoal.Adagrad(lr=0.05), init=shoal.Normal(0.05, seed=seed)),
                self.features,
                user=self.user,
                item=[self.item],
                hidden=(64,),
                temperature=temperature,
                correct=correct,
            )
            model = shoal.torch.ClickModel(module, store=store, seed=seed)
            found = []
            for number in range(passes // 2):
                model.fit(self.reader(0), epochs=2, shuffle=64, progress=False)
                if part != 2 or number == passes // 2 - 1:
                    found.append(self.measured(model, part))
        return found


def main() -> None:
    """Measure the sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(conditions())
    for name in options.sets:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            task = Task(name, Path(folder))
            print(f"{name}: {len(task.items):,} items, {[len(its) for its in task.truth]} positive examples")
            print("  by popularity:", {measure: round(value, 4) for measure, value in task.by_popularity().items()})
            for correct in (False, True):
                tried = {
                    (temperature, 2 * (number + 1)): its["recall@100"]
                    for temperature in TEMPERATURES
                    for number, its in enumerate(
                        task.train(correct=correct, temperature=temperature, passes=PASSES, seed=1, part=1)
                    )
                }
                temperature, passes = max(tried, key=tried.__getitem__)
                how = {"correct": correct, "temperature": temperature, "passes": passes, "part": 2}
                found = [task.train(**how, seed=10 + seed)[-1] for seed in range(options.seeds)]
                figures = {measure: spread([its[measure] for its in found], 4) for measure in found[0]}
                print(f"  correct={correct}, temperature {temperature}, {passes} passes: {figures}", flush=True)
        print(f"  {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
