"""Click models on real data, each trained twice: with shoal's tables, and with torch's nn.Embedding and optimizers.

    pip install torch pyarrow
    export SHOAL_DATA=/path/to/the/data                README.md has the file names; missing sets are left out
    python bench/bench_ctr_quality.py                  everything: some ten minutes on two cores
    python bench/bench_ctr_quality.py --sets criteo_attribution --models lr deepfm --rules Adagrad --json FILE
    python bench/bench_ctr_quality.py --search         search the settings again: quality/twins.json; four minutes

quality/twins.py describes what the two have in common. Settings (the learning rate of the rows, the passes) were chosen
by AUC on a part of the training examples, for logistic regression, FM and DeepFM, whose settings the other models
share; then the rate was lowered until torch reproduced its own losses. The test part is used at the end
(docs/ctr-quality.md lists four rates that were lowered after that).

Requirements, which are checked: the losses of the first 200 steps agree to 1e-5, or to four times the difference
between runs of torch whose batches have their examples in another order (two orders; if they are not enough, up to
thirty more); the AUCs of the test part are within 0.0005; and the difference between a model and logistic regression is
the same on both sides, within twice that. If one is missed, the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quality.search import climb
from quality.sets import SETS
from quality.twins import HISTORIES, MIXED, MODELS, RULES, STEPS, TURNS, Data, Learned, apart, data_of, steady, train

NAMES = ("movielens_tags", "flights_nyc2017", "flights_nyc2017_in_time", "criteo_attribution")
SETTINGS = Path(__file__).parent / "quality" / "twins.json"
SEARCHED = ("lr", "fm", "deepfm")  # the others take DeepFM's
PASSES = 2  # at most
NEAR, TIMES = 1e-5, 4.0  # of a loss; times the difference of torch from itself
WITHIN = 0.0005  # of AUC
MARKS = ("<!-- the table of bench_ctr_quality.py -->", "<!-- its end -->")


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """The subject of one run."""

    name: str
    model: str
    rule: str


@dataclass(frozen=True, slots=True)
class Found:
    """The results: AUCs of the test part, and the largest difference between losses of the first steps."""

    task: Task
    ours: float
    theirs: float
    apart: float
    itself: float
    settings: dict[str, Any]
    seconds: float

    def missed(self) -> list[str]:
        """List the requirements that are missed."""
        where = f"{self.task.name}, {self.task.model}, {self.task.rule}"
        most = allowed(self.itself)
        return [
            *([] if self.apart <= most else [f"{where}: losses are {self.apart:.1e} apart, at most {most:.1e}"]),
            *([] if abs(self.ours - self.theirs) <= WITHIN else [f"{where}: AUCs {self.ours:.5f}, {self.theirs:.5f}"]),
        ]


def allowed(itself: float) -> float:
    """Return the allowed difference between losses, given that of torch from itself."""
    return max(NEAR, TIMES * itself)


@functools.lru_cache(maxsize=1)
def load(name: str, *, choose: bool) -> Data:
    """Read a set, once for all of its tasks."""
    return data_of(name, SETS[name](Path(os.environ["SHOAL_DATA"])), choose=choose)


def search(task: Task) -> tuple[Task, dict[str, Any]]:
    """Find the rate and the passes by AUC, with torch's rows: both sides are the same model."""
    data = load(task.name, choose=True)
    rule = RULES[task.rule]
    passes: dict[float, int] = {}

    def gain(settings: dict[str, Any]) -> float:
        lr = settings["lr"]
        aucs = train("torch", task.model, data, task.rule, lr, PASSES, patient=True).aucs
        passes[lr] = int(np.argmax(aucs)) + 1
        return max(aucs)

    best, auc, tried = climb({"lr": rule.rates}, {"lr": rule.start}, gain)
    print(f"{task}: {best}, {passes[best['lr']]} passes, {auc:.4f}, {tried} tried", file=sys.stderr, flush=True)
    return task, {"lr": best["lr"], "passes": passes[best["lr"]]}


def follow(task: Task, settings: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Return settings with the greatest steady rate that is not above the given one."""
    data = load(task.name, choose=True)
    lower = [lr for lr in RULES[task.rule].rates if lr <= settings["lr"]]
    best = next((lr for lr in reversed(lower) if steady(task.model, data, task.rule, lr)), lower[0])
    print(f"{task}: {best} of {settings['lr']}", file=sys.stderr, flush=True)
    return task, {**settings, "lr": best}


def measure(task: Task, settings: dict[str, Any]) -> Found:
    """Train the model on both sides, and a few steps of it a third time."""
    begun = time.perf_counter()
    data = load(task.name, choose=False)
    given = (task.model, data, task.rule, settings["lr"], settings["passes"])
    ours, theirs = train("shoal", *given), train("torch", *given)
    first = Learned(ours.losses[:STEPS], [])
    far, itself = apart(first, theirs), 0.0
    for number, turned in enumerate((*TURNS, *MIXED)):
        if number >= len(TURNS) and far <= allowed(itself):
            break  # losses diverge at a few steps, where rounding decides a ReLU: two orders may have missed the step
        itself = max(itself, apart(train("torch", *given, turned=turned, steps=STEPS), theirs))
    seconds = time.perf_counter() - begun
    return Found(task, ours.aucs[-1], theirs.aucs[-1], far, itself, settings, seconds)


def begin() -> None:
    """Start a process with one thread; there are two."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns


def tasks_of(names: Iterable[str], models: Iterable[str], rules: Iterable[str]) -> list[Task]:
    """List the tasks; DIN only if the set has a history."""
    return [
        Task(name, model, rule)
        for name in names
        for model in models
        for rule in rules
        if model != "din" or name in HISTORIES
    ]


def margins(found: list[Found]) -> list[str]:
    """Compare the differences between models and logistic regression on both sides."""
    at = {one.task: one for one in found}
    missed = []
    for task, one in at.items():
        base = at.get(Task(task.name, "lr", task.rule))
        if base is None:
            continue
        ours, theirs = one.ours - base.ours, one.theirs - base.theirs
        if not abs(ours - theirs) <= 2 * WITHIN:
            missed.append(f"{task}: {ours:+.4f} compared with logistic regression, with torch {theirs:+.4f}")
    return missed


def table(found: list[Found], rules: list[str]) -> str:
    """Write the table in Markdown."""
    at = {one.task: one for one in found}
    columns = [f"{rule}: AUC shoal, torch | losses apart" for rule in rules]
    lines = ["| set | model | " + " | ".join(columns) + " |", "|---" * (2 + 2 * len(rules)) + "|"]
    for name, model in dict.fromkeys((task.name, task.model) for task in at):
        cells = []
        for rule in rules:
            one = at[Task(name, model, rule)]
            cells.append(f"{one.ours:.4f}, {one.theirs:.4f} | {one.apart:.0e} ({one.itself:.0e})")
        lines.append(f"| {name} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put(text: str, page: Path) -> None:
    """Write the table into a page, between its two marks."""
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, behind = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{behind}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--search", action="store_true", help="choose settings and write them")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table into docs/ctr-quality.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if not os.environ.get("SHOAL_DATA"):
        print("SHOAL_DATA, the directory of the data sets, is not set: nothing is measured")
        return
    tasks = tasks_of(options.sets, options.models, options.rules)
    settings: dict[str, Any] = json.loads(SETTINGS.read_text()) if SETTINGS.is_file() else {}
    with multiprocessing.get_context("spawn").Pool(options.processes, begin) as pool:
        if options.search:
            found = dict(pool.imap(search, [task for task in tasks if task.model in SEARCHED]))
            given = [(task, found.get(task, found[Task(task.name, "deepfm", task.rule)])) for task in tasks]
            for task, best in pool.starmap(follow, given, chunksize=1):
                settings.setdefault(task.name, {}).setdefault(task.model, {})[task.rule] = best
            SETTINGS.write_text(json.dumps(settings, indent=1) + "\n")
            return
        given = [(task, settings[task.name][task.model][task.rule]) for task in tasks]
        found: list[Found] = pool.starmap(measure, given, chunksize=1)
    print(text := table(found, options.rules), end="", flush=True)
    if options.into:
        put(text, options.into)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if missed := [*(line for one in found for line in one.missed()), *margins(found)]:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
