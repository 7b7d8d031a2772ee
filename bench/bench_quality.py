"""Quality on real data: shoal's logistic regression compared with scikit-learn's and Vowpal Wabbit's.

    pip install scikit-learn vowpalwabbit pyarrow     (if a peer is missing, a message says that it is left out)
    export SHOAL_DATA=/path/to/the/data               (so is a missing set; README.md has the file names)
    python bench/bench_quality.py                     all sets: some minutes, one core
    python bench/bench_quality.py --only a9a,ijcnn1 --metric auc --json quality.json

Each program finds its settings on a fifth of the training examples, by the same search (quality/search.py), and then
learns from all training examples with them. The test part is used once, at the end. The figures are AUC and log-loss of
the test part, and the sampling error of the AUC (Hanley and McNeil, Radiology 143, 1982): its standard deviation over
other test parts of that size. Differences between programs on the same part vary by less.

The figures are computed by `shoal.metrics`; if scikit-learn is installed, it must find the same AUC.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from quality.programs import PEERS, Program, Shoal
from quality.sets import SETS, Split
from shoal.metrics import auc, logloss
from shoal.models.plan import Metric

ALLOWED = 0.001  # of AUC, below the best of the others


def programs(folder: Path) -> list[Program]:
    """Return shoal and the peers that are installed."""
    found: list[Program] = [Shoal()]
    for package, peers in PEERS.items():
        try:
            __import__(package)
        except ImportError as missing:
            print(f"{package} is left out: {missing} (pip install it)", file=sys.stderr)
        else:
            found += peers(folder)
    return found


def sampling_error(area: float, positive: int, negative: int) -> float:
    """Return the standard error of an AUC by Hanley and McNeil's formula."""
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (positive - 1) * (q1 - area**2) + (negative - 1) * (q2 - area**2)
    return math.sqrt(spread / (positive * negative))


def check(labels: np.ndarray, margins: np.ndarray, area: float, where: str) -> None:
    """Stop if a figure cannot be right."""
    if len(margins) != len(labels) or not np.all(np.isfinite(margins)) or not area > 0.5:
        raise SystemExit(f"the benchmark's own check failed: {where} has an AUC of {area} from {len(margins)} margins")
    try:
        from sklearn.metrics import roc_auc_score
    except ImportError:
        return
    if abs(float(roc_auc_score(labels, margins)) - area) > 1e-9:
        raise SystemExit(f"the benchmark's own check failed: scikit-learn finds another AUC than {area} for {where}")


def measure(name: str, split: Split, metric: Metric) -> list[dict[str, Any]]:
    """Have every program search, learn and predict."""
    labels = split.test.labels
    lines = []
    with tempfile.TemporaryDirectory(prefix="shoal-quality-") as folder:
        for program in programs(Path(folder)):
            start = time.process_time()
            found = program.search(split, metric)
            between = time.process_time()
            margins = program.margins(split.train, split.test, found.settings)
            area = auc(labels, margins)
            check(labels, margins, area, f"{program.name} on {name}")
            lines.append(
                {
                    "set": name,
                    "program": program.name,
                    "auc": area,
                    "logloss": logloss(labels, margins),
                    "settings": found.settings,
                    "chosen_by": found.gain,
                    "tried": found.tried,
                    "search_cpu_seconds": between - start,
                    "fit_cpu_seconds": time.process_time() - between,
                }
            )
            settings = ", ".join(f"{key} {value}" for key, value in found.settings.items())
            print(
                f"{name:24} {program.name:22} {area:.4f} {lines[-1]['logloss']:.4f}  {settings}; "
                f"{found.tried} tried in {between - start:.0f} s of CPU",
                file=sys.stderr,
            )
    return lines


def main() -> None:
    """Measure, print a Markdown table, write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETS), metavar="SET,...", help="of: " + ", ".join(SETS))
    parser.add_argument(
        "--metric", choices=["auc", "logloss"], default="logloss", help="metric by which settings are chosen"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and settings")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(SETS):
        parser.error(f"there is no set {', '.join(sorted(unknown))}: choose from {', '.join(SETS)}")
    if not (folder := os.environ.get("SHOAL_DATA")):
        print("SHOAL_DATA, the directory of the data sets, is not set: nothing is measured")
        return
    everything = []
    rows = []
    for name in names:
        try:
            split = SETS[name](Path(folder))
        except (FileNotFoundError, ImportError) as missing:
            print(f"{name} is left out: {missing}", file=sys.stderr)
            continue
        lines = measure(name, split, options.metric)
        everything += lines
        positive = int(split.test.labels.sum())
        error = sampling_error(lines[0]["auc"], positive, len(split.test) - positive)
        cells = {line["program"]: f"{line['auc']:.4f}, {line['logloss']:.4f}" for line in lines}
        behind = max([line["auc"] for line in lines[1:]], default=math.nan) - lines[0]["auc"]
        rows.append((f"{name} | {len(split.train):,} + {len(split.test):,}", cells, behind, error))
    if not rows:
        return
    titles = list(rows[0][1])
    print("| set | examples | " + " | ".join(titles) + " | shoal minus the best other | sampling error |")
    print("|---" * (len(titles) + 4) + "|")
    for title, cells, behind, error in rows:
        flag = "" if not behind > ALLOWED else " (!)"
        print(f"| {title} | " + " | ".join(cells.values()) + f" | {-behind:+.4f}{flag} | {error:.4f} |")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
