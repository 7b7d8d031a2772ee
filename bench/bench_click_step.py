"""Training steps of DeepFM, DCN-V2 and DIN: shoal compared with torch.nn.Embedding, FuxiCTR and FBGEMM.

    pip install torch
    python bench/bench_click_step.py                                    a few minutes
    python bench/bench_click_step.py --fuxictr PYTHON --threads 1       also FuxiCTR, in a Python that has it
    python bench/bench_click_step.py --fbgemm PYTHON --models rowwise sgd     rows alone; that Python has fbgemm-gpu-cpu
    python bench/bench_click_step.py --quick                            one round of a few steps, as a test
    chrt -r 20 python bench/bench_click_step.py                         where other programs compute

A million rows of dim 16, ids by Zipf's law, batches of 4096, towers of 400, 400, 400; step/data.py has the fields. The
models of shoal run over shoal's tables (`shoal`), over nn.Embedding(sparse=True) with SparseAdam (`sparse`), and over
nn.Embedding with Adam of all rows (`dense`); those of FuxiCTR are in its own training step, which has dense Adam too.
Sides are processes that take turns in rotating order. A step is everything from the ids of a batch, as tensors, to the
updated rows and weights. `rowwise` and `sgd` are rows alone, 26 lookups and their gradients: with one table (`shoal`)
or a table for each field (`26 tables`) compared with FBGEMM's kernels for CPUs (step/rows_side.py).

Checks: the first losses of the first two sides are equal within a tolerance, and the losses of all sides fall; of rows
alone all losses of all sides are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import check, conditions, spread

BENCH = Path(__file__).parent
MODELS = ("deepfm", "dcnv2", "din")
ROWS_ALONE = ("rowwise", "sgd")
NEAR = 1e-4  # relative


class Side:
    """A process that takes turns."""

    def __init__(self, name: str, model: str, threads: int, python: str) -> None:
        module = "step.rows_side" if model in ROWS_ALONE else f"step.{'fuxictr' if name == 'fuxictr' else 'shoal'}_side"
        path = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", module, name, model, str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[dict[str, Any]] = []
        check(self._answer() == "ready", f"{name} does not begin: its output is above")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def turn(self, first: int, warm: int, steps: int) -> None:
        """Take a turn."""
        assert self._process.stdin is not None
        print(json.dumps([first, warm, steps]), file=self._process.stdin, flush=True)
        self.turns.append(json.loads(self._answer()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        return [loss for turn in self.turns for loss in turn["losses"]]


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take turns with a model."""
    rounds, steps = (1, 2) if options.quick else (options.rounds, options.steps)
    names = ["shoal", "sparse", "dense", *(["fuxictr"] if options.fuxictr else [])]
    if model in ROWS_ALONE:
        names = ["shoal", "26 tables", *(["fbgemm"] if options.fbgemm else [])]
    pythons = {"fuxictr": options.fuxictr, "fbgemm": options.fbgemm}
    sides = [Side(name, model, options.threads, pythons.get(name, sys.executable)) for name in names]
    try:
        for number in range(rounds):
            for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
                side.turn(number * (steps + 1), 1, steps)
    finally:
        for side in sides:
            side.close()
    first = None if model in ROWS_ALONE else 3
    for side in sides[1:] if model in ROWS_ALONE else sides[1:2]:
        pairs = zip(sides[0].losses[:first], side.losses[:first], strict=True)
        apart = max(abs(a - b) / a for a, b in pairs)
        check(apart < NEAR, f"{model}: losses of shoal and {side.name} are {apart:.1e} apart, at most {NEAR:.0e}")
    if model in MODELS and not options.quick:
        for side in sides:
            check(side.losses[-1] < side.losses[0], f"{model}, {side.name}: the loss does not fall")
    figures = {
        side.name: {what: [turn[what] / steps for turn in side.turns] for what in ("wall", "cpu")} for side in sides
    }
    return {"model": model, "threads": options.threads, "steps": steps, "sides": figures}


def table(found: list[dict[str, Any]]) -> str:
    """Write the table in Markdown."""
    lines = [
        "| model | side | ms a step | CPU ms | thousand examples/s | time compared with shoal | CPU time compared |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        ours = one["sides"]["shoal"]
        for name, its in one["sides"].items():
            wall, cpu = its["wall"], its["cpu"]
            times = [
                spread([theirs / mine for theirs, mine in zip(its[what], ours[what], strict=True)], 2)
                for what in ("wall", "cpu")
            ]
            cells = (
                spread([x * 1e3 for x in wall], 1),
                spread([x * 1e3 for x in cpu], 1),
                spread([4.096 / x for x in wall], 1),
            )
            lines.append(f"| {one['model']} | {name} | {' | '.join(cells)} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *ROWS_ALONE], default=list(MODELS))
    parser.add_argument("--fuxictr", metavar="PYTHON", help="a Python that has FuxiCTR")
    parser.add_argument("--fbgemm", metavar="PYTHON", help="a Python that has fbgemm-gpu-cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    found = [measure(model, options) for model in options.models]
    print(conditions())
    print(table(found), end="")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
