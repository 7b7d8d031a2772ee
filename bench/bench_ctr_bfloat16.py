"""Click models on real data, trained in float32 and in bfloat16: the difference of their AUCs, and the noise of each.

    export SHOAL_DATA=/path/to/the/data                README.md has the file names; missing sets are left out
    python bench/bench_ctr_bfloat16.py                 some ten minutes on two cores
    python bench/bench_ctr_bfloat16.py --sets movielens_tags --models deepfm --json FILE

Models, settings and batches are those of bench_ctr_quality.py (quality/twins.py), with Adagrad; rows are in shoal's
tables. In bfloat16 the matrix products of a step are computed by torch's autocast, as with ``precision = "bfloat16"``;
the test part is predicted in float32. Each model is trained three times in each precision, with the examples of each
batch in another order: what float32 differs from itself is noise.

Requirement, which is checked: the mean AUC of the test part differs by at most 0.0005. If one is missed, the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_ctr_quality import NAMES, SETTINGS, Task, begin, load, tasks_of
from figures import spread
from quality.twins import MODELS, TURNS, train

RULE = "Adagrad"
WITHIN = 0.0005  # of AUC
PRECISIONS = {"float32": "shoal", "bfloat16": "bfloat16"}  # and their sides


@dataclass(frozen=True, slots=True)
class Found:
    """The AUCs of the test part, by precision, one for each order of the examples within batches."""

    task: Task
    aucs: dict[str, list[float]]

    @property
    def difference(self) -> float:
        """How much higher the mean AUC is in bfloat16."""
        return statistics.mean(self.aucs["bfloat16"]) - statistics.mean(self.aucs["float32"])


def measure(task: Task) -> Found:
    """Train a model in both precisions."""
    data = load(task.name, choose=False)
    settings = json.loads(SETTINGS.read_text())[task.name][task.model][RULE]

    def auc(side: str, turned: str) -> float:
        return train(side, task.model, data, RULE, settings["lr"], settings["passes"], turned=turned).aucs[-1]

    return Found(task, {name: [auc(side, turned) for turned in ("", *TURNS)] for name, side in PRECISIONS.items()})


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[one for one in MODELS if one != "lr"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if not os.environ.get("SHOAL_DATA"):
        print("SHOAL_DATA, the directory of the data sets, is not set: nothing is measured")
        return
    tasks = tasks_of(options.sets, options.models, [RULE])
    with multiprocessing.get_context("spawn").Pool(options.processes, begin) as pool:
        found = list(pool.imap(measure, tasks))
    print("| set | model | AUC, float32 | AUC, bfloat16 | difference of the means |\n|---|---|---|---|---|")
    for one in found:
        aucs = " | ".join(spread(one.aucs[name], 5) for name in PRECISIONS)
        print(f"| {one.task.name} | {one.task.model} | {aucs} | {one.difference:+.5f} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    missed = [one.task for one in found if abs(one.difference) > WITHIN]
    if missed:
        raise SystemExit(f"missed: the AUC differs by more than {WITHIN} for {', '.join(map(str, missed))}")


if __name__ == "__main__":
    main()
