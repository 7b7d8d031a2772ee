"""What it costs to keep the checkpoints of a fit, and to make parts of it again: explain, bisect, forget.

    python bench/bench_lineage.py                          1,000,000 examples of Criteo's format in ten files
    python bench/bench_lineage.py --examples 100000

The files are drawn from a planted model. The fits with and without kept checkpoints are made in turns, and their rows
compared by digest; so are those of the model that has forgotten and of one that is trained without these examples.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shoal
from shoal.data import key_of_name
from shoal.lineage import bisect, explain, forget
from shoal.models import Checkpointing
from shoal.tools.planted import PlantedModel, write_log

FILES = 10


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock time and the CPU time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=12, help="batches between two checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, planted = Path(name), PlantedModel(seed=1)
        paths = [folder / f"day_{day}.tsv" for day in range(FILES)]
        for day, path in enumerate(paths):
            write_log(path, planted, options.examples // FILES, day << 40)

        def fit(checkpoint: Checkpointing | None = None, without: tuple[int, ...] = ()) -> str:
            with shoal.LogisticRegression() as model:
                data = shoal.read_criteo([str(path) for path in paths]).without(without)
                model.fit(data, progress=False, checkpoint=checkpoint)
                return model.table.digest()

        plain, keeping, digests = [], [], set()
        for round_ in range(options.rounds):
            where = folder / f"model-{round_}"
            plain.append(seconds(lambda: digests.add(fit())))
            kept = Checkpointing(where, every=options.every, keep=True)
            keeping.append(seconds(lambda kept=kept: digests.add(fit(kept))))
        assert len(digests) == 1, "the fits differ"
        model = folder / "model-0"
        checkpoints = sorted(model.glob("kept-*"))
        size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file()) / 2**20
        print(f"{options.examples:,} examples, {len(checkpoints)} kept checkpoints, {size:,.0f} MiB\n")
        print("| | wall, s | CPU, s |\n|---|---|---|")
        for what, times in (("fit", plain), ("fit that keeps its checkpoints", keeping)):
            walls, cpus = zip(*times, strict=True)
            print(f"| {what} | {statistics.median(walls):.2f} ({min(walls):.2f}-{max(walls):.2f}) | {min(cpus):.2f} |")
        batches = list(shoal.read_criteo(str(paths[-1])))
        keys, counts = np.unique(np.concatenate([batch.keys for batch in batches]), return_counts=True)
        often, rare = (int(keys[np.argmax(counts)]), int(keys[np.argmin(counts)]))
        for what, key in (("a feature of most batches", often), ("a rare feature", rare)):
            wall, cpu = seconds(lambda key=key: explain(model, [str(key)]))
            print(f"| explain {what} | {wall:.2f} | {cpu:.2f} |")
        made = []
        wall, cpu = seconds(lambda: made.append(forget(model, [str(rare)], folder / "other")))
        share = f"{100 * (1 - made[0].made_again_from / made[0].examples_before):.1f} % made again"
        print(f"| forget a rare feature, {share} | {wall:.2f} | {cpu:.2f} |")
        assert made[0].rows_after == {"lr": fit(without=(rare,))}, "the model that has forgotten differs"

        def is_good(place: str) -> bool:
            with shoal.load(place) as tested:
                return not tested.table.contains(np.array([rare], np.uint64))[0]

        found = []
        wall, cpu = seconds(lambda: found.append(bisect(checkpoints[0], model, is_good)))
        print(f"| bisect, {found[0].probes} models tested | {wall:.2f} | {cpu:.2f} |")
        assert key_of_name("criteo", str(rare)) == rare


if __name__ == "__main__":
    main()
