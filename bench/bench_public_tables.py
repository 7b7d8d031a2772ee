"""Tables that others published, reproduced: BARS' results of click models on Frappe, by the files of examples/bars.

    export SHOAL_DATA=/path/to/the/data               examples/bars/README.md says where to get frappe/*.csv.xz
    python bench/bench_public_tables.py               all models: an hour of one core
    python bench/bench_public_tables.py --models lr fm            a minute
    python bench/bench_public_tables.py --bfloat16                half of it, on CPUs that have it
    python bench/bench_public_tables.py --fuxictr PYTHON          FuxiCTR as well, with BARS' settings, in turns
    python bench/bench_public_tables.py --into docs/ctr-quality.md --json FILE

A model is trained by `shoal train ctr --config examples/bars/frappe/MODEL.toml` with one thread, and evaluated on the
test part. PYTHON is a Python that has FuxiCTR (pip install fuxictr); public/fuxictr_side.py is what it runs.

The aim is an AUC at most 0.001 below the published one, and a log-loss at most 0.001 above the published one, or above
that of FuxiCTR on the same data if that is larger: a training part whose negatives were drawn again leads to a larger
one. What misses it is named. One run is not that certain: five published runs of Wide & Deep have standard deviations
of 0.0008 and 0.0032. If a model misses the aim by more than two of these as well, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "examples" / "bars"
SIDE = ROOT / "bench" / "public" / "fuxictr_side.py"
WITHIN = 0.001  # of both, the aim
SPREAD = (0.0016, 0.0064)  # two standard deviations of AUC and log-loss over seeds
MARKS = ("<!-- the table of bench_public_tables.py -->", "<!-- its end -->")
SET = "frappe"

# AUC and log-loss of the test part: as published by BARS, and of FuxiCTR 2.3.10 on the data of SHOAL_DATA, as run by
# --fuxictr (docs/ctr-quality.md has the date and the machine).
PUBLISHED: dict[str, tuple[float, float]] = {
    "lr": (0.9356, 0.3076),
    "fm": (0.9671, 0.2065),
    "wide_deep": (0.9841, 0.1490),
    "deepfm": (0.9842, 0.1482),
    "dcnv2": (0.9845, 0.1491),
}
FUXICTR: dict[str, tuple[float, float]] = {
    "lr": (0.9358, 0.3073),
    "fm": (0.9697, 0.1982),
    "wide_deep": (0.9826, 0.1576),
    "deepfm": (0.9841, 0.1499),
    "dcnv2": (0.9844, 0.1558),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model, trained by one program."""

    model: str
    auc: float
    logloss: float
    passes: int
    seconds: float
    cpu: float


def child_cpu() -> float:
    """Return the CPU time of ended children."""
    times = os.times()
    return times.children_user + times.children_system


def alone(command: list[str], folder: Path) -> str:
    """Run a command in a folder, with one thread."""
    # The package of this checkout also runs in the folder of the data.
    path = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


def train(model: str, data: Path, settings: list[str]) -> Result:
    """Train a model and evaluate it."""
    shoal = [sys.executable, "-m", "shoal"]
    config = str(CONFIGS / SET / f"{model}.toml")
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "model"))
        wall, cpu = time.perf_counter(), child_cpu()
        alone(
            [*shoal, "train", "ctr", "--config", config, "--output", output, "--threads", "1", "--quiet", *settings],
            data,
        )
        spent = {"seconds": time.perf_counter() - wall, "cpu": child_cpu() - cpu}
        found = json.loads(alone([*shoal, "evaluate", output, "--data", "test.csv.xz", "--json"], data))
        history = json.loads(Path(output, "model.json").read_text())["body"]["history"]
    return Result(model=model, auc=found["auc"], logloss=found["logloss"], passes=len(history["passes"]), **spent)


def train_fuxictr(python: str, model: str, data: Path) -> Result:
    """Train a model of FuxiCTR."""
    lines = alone([python, str(SIDE), SET, model], data).splitlines()
    return Result(**json.loads(lines[-1]))


def missed(found: Result, theirs: tuple[float, float] | None, spread: tuple[float, float] = (0.0, 0.0)) -> list[str]:
    """List what misses the aim by more than a spread."""
    if found.model not in PUBLISHED and theirs is None:
        return []
    auc, logloss = PUBLISHED.get(found.model) or theirs or (0.0, 1.0)
    logloss = max(logloss, theirs[1] if theirs else 0.0)
    lines = []
    if found.auc < auc - WITHIN - spread[0]:
        lines.append(f"{found.model}: AUC {found.auc:.4f}, published {auc:.4f}")
    if found.logloss > logloss + WITHIN + spread[1]:
        lines.append(f"{found.model}: log-loss {found.logloss:.4f}, of others {logloss:.4f}")
    return lines


def cells(pair: tuple[float, float] | None) -> str:
    """Format AUC and log-loss."""
    return "" if pair is None else f"{pair[0]:.4f} / {pair[1]:.4f}"


def table(found: list[Result], theirs: dict[str, tuple[float, float]]) -> str:
    """Write the table in Markdown."""
    lines = [
        "| model | published by BARS | FuxiCTR on the same data | shoal | passes | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        pairs = (PUBLISHED.get(one.model), theirs.get(one.model), (one.auc, one.logloss))
        lines.append(f"| {one.model} | {' | '.join(map(cells, pairs))} | {one.passes} | {one.cpu:.0f} |")
    return "\n".join(lines) + "\n"


def put(text: str, page: Path) -> None:
    """Write the table into a page, between its two marks."""
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, behind = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{behind}")


def main() -> None:
    """Run from the command line."""
    models = [path.stem for path in sorted((CONFIGS / SET).glob("*.toml"))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--fuxictr", metavar="PYTHON", help="also train FuxiCTR's models, by this Python")
    parser.add_argument("--bfloat16", action="store_true", help="train shoal's networks in bfloat16")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table into docs/ctr-quality.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    data = Path(os.environ.get("SHOAL_DATA", ""), SET)
    if not (data / "train.csv.xz").is_file():
        print(f"SHOAL_DATA has no {SET}/train.csv.xz: nothing is measured")
        return
    settings = ["--set", "train.precision=bfloat16"] if options.bfloat16 else []
    found: list[Result] = []
    theirs = dict(FUXICTR)
    all_figures: list[dict[str, Any]] = []
    for model in options.models:
        if options.fuxictr:
            other = train_fuxictr(options.fuxictr, model, data)
            theirs[model] = (other.auc, other.logloss)
            all_figures.append({"by": "fuxictr", **asdict(other)})
        found.append(train(model, data, settings))
        all_figures.append({"by": "shoal", **asdict(found[-1])})
        print(all_figures[-1], file=sys.stderr, flush=True)
    print(text := table(found, theirs), end="", flush=True)
    if options.into:
        put(text, options.into)
    if options.json:
        options.json.write_text(json.dumps(all_figures, indent=1) + "\n")
    for line in [line for one in found for line in missed(one, theirs.get(one.model))]:
        print(f"misses the aim: {line}")
    if misses := [line for one in found for line in missed(one, theirs.get(one.model), SPREAD)]:
        raise SystemExit("missed: " + "; ".join(misses))


if __name__ == "__main__":
    main()
