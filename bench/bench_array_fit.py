"""A fit from a matrix in small batches, as scikit-learn's users run it: microseconds a batch.

    python bench/bench_array_fit.py                          100,000 rows of 30 entries, batches of 32: a minute
    python bench/bench_array_fit.py --peer /path/to/other/.venv/bin/python      another installation takes turns

`FTRLClassifier(epochs=2)` with its defaults, each run in a process of its own. With scikit-learn installed, its
`SGDClassifier(loss="log_loss")` makes as many passes for comparison: a step for each example, in C, on a dense vector.

Checked: the coefficients of all runs of this build and of the peer have the same bits.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
from scipy import sparse

from figures import check, conditions, spread

ROWS, COLUMNS, ENTRIES, BATCH, EPOCHS = 100_000, 100_000, 30, 32, 2


def once(kind: str) -> dict[str, Any]:
    """Fit once; return the CPU seconds and a digest of the coefficients."""
    random = np.random.default_rng(0)
    columns = np.sort(random.integers(0, COLUMNS, (ROWS, ENTRIES)), axis=1).ravel()
    indptr = np.arange(0, ROWS * ENTRIES + 1, ENTRIES)
    X = sparse.csr_matrix((random.random(ROWS * ENTRIES, np.float32), columns, indptr), (ROWS, COLUMNS))
    y = random.random(ROWS) < 0.3
    if kind == "sgd":
        from sklearn.linear_model import SGDClassifier

        model: Any = SGDClassifier(loss="log_loss", max_iter=EPOCHS, tol=None, random_state=1)
    else:
        from shoal.sklearn import FTRLClassifier

        FTRLClassifier(epochs=1).fit(X[:1000], y[:1000])  # imports
        model = FTRLClassifier(epochs=EPOCHS, batch_size=BATCH, random_state=1)
    begun = time.process_time()
    model.fit(X, y)
    seconds = time.process_time() - begun
    return {"seconds": seconds, "digest": hashlib.sha256(np.ascontiguousarray(model.coef_).tobytes()).hexdigest()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", metavar="PYTHON", help="the Python of another installation")
    parser.add_argument("--once", choices=("shoal", "sgd"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once is not None:
        print(json.dumps(once(given.once)))
        return
    commands = {"shoal": [sys.executable, "shoal"], "scikit-learn": [sys.executable, "sgd"]}
    if given.peer is not None:
        commands["peer"] = [given.peer, "shoal"]
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in commands}
    for _ in range(given.rounds):
        for title, (python, kind) in commands.items():
            done = subprocess.run([python, __file__, "--once", kind], check=True, capture_output=True, text=True)
            found[title].append(json.loads(done.stdout))
    digests = {run["digest"] for title, runs in found.items() if title != "scikit-learn" for run in runs}
    check(len(digests) == 1, "coefficients differ")
    print("| | CPU s | us a batch of 32 |\n|---|---|---|")
    for title, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        batches = EPOCHS * ROWS / BATCH
        print(f"| {title} | {spread(seconds, 2)} | {spread([one / batches * 1e6 for one in seconds], 1)} |")
    print(conditions())


if __name__ == "__main__":
    main()
