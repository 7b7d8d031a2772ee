"""Compared with Vowpal Wabbit: FTRL logistic regression from text to saved model, one pass, on the same examples.

    pip install vowpalwabbit                         (if it is missing, a message says that it is left out)
    python bench/bench_vw.py                         a million examples: about two minutes, 5 GB of memory
    python bench/bench_vw.py --examples 100000 --vw="-b 24" --rounds 1

Draws a log from a planted logistic model: 39 features an example, one of each field, with frequencies that fall as
1/rank; a million examples have about five million distinct features. Each program reads the log in its own format
(libsvm and Vowpal Wabbit's), with the same alpha, beta, l1 and l2, in a separate process, in turns. Held-out log-losses
use the planted labels; the best reachable one is known. Vowpal Wabbit uses names that are numbers as they are; with
--hash all it hashes them, as it does with the text of categories, and spreads them over its whole table. Each round
checks that the saved model predicts better than the base rate, and that shoal's has a row for every feature. A second
table shows the time of each step of shoal.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from figures import spread
from shoal.metrics import logloss, probabilities

FIELDS = 39
LARGE = 24  # fields of 620,000 values; the others have 1,000
HYPER = {"alpha": 0.1, "beta": 1.0, "l1": 1.0, "l2": 1.0}
CHUNK = 1 << 16

# Children print one line of JSON. The time is from opening the reader to the end of the save. The peak is the
# kernel's VmHWM: the maximum of getrusage would begin with that of the parent.
PEAK = """
import re
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
"""
SHOAL = (
    PEAK
    + """
import json, sys, time
import numpy as np
import shoal
train, test, model_dir, batch_size, hyper = json.loads(sys.argv[1])
start = time.perf_counter()
model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=shoal.local(threads=2))
model.fit(shoal.read_libsvm(train, batch_size=batch_size), progress=False)
model.save(model_dir, overwrite=True)
seconds = time.perf_counter() - start
high = peak()
np.save(model_dir + ".npy", model.decision_function(shoal.read_libsvm(test)))
stats = model.table.stats()
print(json.dumps([seconds, high, stats.rows]))
"""
)
# The time of each step: the steps of `fit` one after the other in one thread, on batches that were read before.
SPLIT = """
import collections, json, sys, time
import numpy as np
import shoal
from shoal import _core
from shoal.metrics import Accumulator
train, model_dir, batch_size, hyper = json.loads(sys.argv[1])
spent = collections.Counter()
def clocked(step, call, *given):
    start = time.perf_counter()
    out = call(*given)
    spent[step] += time.perf_counter() - start
    return out
batches = clocked("parse", lambda: list(shoal.read_libsvm(train, batch_size=batch_size)))
store = shoal.local(threads=1)
model = shoal.LogisticRegression(shoal.FTRL(**hyper), store=store)
seen, table = Accumulator(), model.table
def losses(batch, margins):
    return _core.logistic_losses(margins, batch.labels, None, store.workers)
def measure(batch, margins, loss, slopes):
    seen.update(batch.labels, margins, sums=(loss, float(slopes.sum() + batch.labels.sum())))
for batch in batches:
    keys = clocked("sort", model.sort, batch)
    rows = clocked("table: pull", table.pull_unique, keys)
    margins, known = clocked("arithmetic", model._forward, batch, keys, [rows])
    loss, slopes = clocked("arithmetic", losses, batch, margins)
    clocked("arithmetic", measure, batch, margins, loss, slopes)
    (gradient,) = clocked("arithmetic", model._backward, batch, keys, [rows], slopes, known)
    clocked("table: push", lambda: table.push_unique(keys, gradient).result())
clocked("save", lambda: store.save(model_dir, overwrite=True))
print(json.dumps(spent))
"""
VW = (
    PEAK
    + """
import json, sys, time
import vowpalwabbit
train, test, model_file, options, hyper = json.loads(sys.argv[1])
flags = f"--ftrl_alpha {hyper['alpha']} --ftrl_beta {hyper['beta']} --l1 {hyper['l1']} --l2 {hyper['l2']}"
start = time.perf_counter()
vowpalwabbit.Workspace(
    f"--ftrl {flags} {options} --loss_function logistic --holdout_off --quiet -d {train} -f {model_file}"
).finish()
seconds = time.perf_counter() - start
high = peak()
vowpalwabbit.Workspace(f"-t -i {model_file} -d {test} -r {model_file}.raw --quiet").finish()
print(json.dumps([seconds, high]))
"""
)


def draw(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw ids int64[n, FIELDS], margins float64[n] and labels uint8[n]."""
    random = np.random.default_rng([7, seed])
    ids = np.empty((n, FIELDS), np.int64)
    margins = np.full(n, -1.6)
    begin = 10_000_000  # all ids have eight digits
    for field in range(FIELDS):
        values = 620_000 if field < LARGE else 1000
        rank = np.exp(random.random(n) * math.log(values)).astype(np.int64)
        ids[:, field] = begin + rank
        begin += values + 1
        bits = (ids[:, field].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
        margins += 0.8 * (bits.astype(np.float64) / 2**23 - 1) / np.sqrt(np.minimum(rank, 100))
    return ids, margins, (random.random(n) < probabilities(margins)).astype(np.uint8)


def write(folder: Path, name: str, seed: int, examples: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Write the log in both formats; return labels, planted margins and the number of different features."""
    labels, margins, seen = [], [], np.zeros(20_000_000, np.bool_)
    with (folder / f"{name}.libsvm").open("wb") as libsvm, (folder / f"{name}.vw").open("wb") as vw:
        for begin in range(0, examples, CHUNK):
            ids, a, y = draw(seed * 1_000_000 + begin, min(CHUNK, examples - begin))
            n = len(y)
            digits = (ids[:, :, None] // 10 ** np.arange(7, -1, -1) % 10 + ord("0")).astype(np.uint8)
            space = np.full((n, FIELDS, 1), ord(" "), np.uint8)
            one = np.broadcast_to(np.frombuffer(b":1", np.uint8), (n, FIELDS, 2))
            line = np.full((n, 1), ord("\n"), np.uint8)
            text = np.concatenate([space, digits, one], axis=2).reshape(n, -1)
            libsvm.write(np.concatenate([(y + ord("0"))[:, None], text, line], axis=1).tobytes())
            text = np.concatenate([space, digits], axis=2).reshape(n, -1)
            head = np.where(y[:, None] == 1, np.frombuffer(b" 1 |", np.uint8), np.frombuffer(b"-1 |", np.uint8))
            vw.write(np.concatenate([head, text, line], axis=1).tobytes())
            seen[ids.reshape(-1) - 10_000_000] = True
            labels.append(y)
            margins.append(a)
    return np.concatenate(labels), np.concatenate(margins), int(seen.sum())


def child(program: str, *given: Any) -> Any:
    """Run a child on two cores, and return what it printed."""
    command = [sys.executable, "-c", program, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"a child failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--held-out", type=int, default=100_000)
    parser.add_argument("--vw", nargs="+", default=["-b 24", "-b 24 --hash all", "-b 28 --hash all"], metavar="OPTIONS")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        import vowpalwabbit  # noqa: F401
    except ImportError:
        print("vowpalwabbit is not installed and is left out (pip install vowpalwabbit)")
        options.vw = []
    with tempfile.TemporaryDirectory(prefix="shoal-vw-") as name:
        folder = Path(name)
        _, _, features = write(folder, "train", 1, options.examples)
        labels, margins, _ = write(folder, "test", 2, options.held_out)
        truth = labels.astype(np.float32)
        base = float(np.mean(truth))
        entropy = -base * math.log(base) - (1 - base) * math.log(1 - base)
        print(
            f"{options.examples:,} examples x {FIELDS}, {features:,} different features; held out: "
            f"best reachable log-loss {logloss(truth, margins):.4f}, of the base rate {entropy:.4f}\n"
        )
        runs: dict[str, dict[str, list[float]]] = {}
        splits: dict[int, dict[str, list[float]]] = {size: {} for size in options.batch_size}

        def note(program: str, seconds: float, peak: float, raw: np.ndarray) -> None:
            loss = logloss(truth, raw)
            if not loss < entropy:
                raise SystemExit(f"the benchmark's own check failed: {program} has learned nothing")
            seen = runs.setdefault(program, {"rate": [], "peak": [], "loss": []})
            seen["rate"].append(options.examples / seconds / 1e3)
            seen["peak"].append(peak)
            seen["loss"].append(loss)

        for number in range(options.rounds):
            for size in options.batch_size:
                target = str(folder / f"shoal-{size}-{number}")
                texts = str(folder / "train.libsvm"), str(folder / "test.libsvm")
                seconds, peak, rows = child(SHOAL, *texts, target, size, HYPER)
                if rows != features + 1:  # and the bias
                    raise SystemExit(f"the benchmark's own check failed: {rows:.0f} rows for {features} features")
                note(f"shoal, batches of {size}", seconds, peak, np.load(target + ".npy"))
                for step, spent in child(SPLIT, texts[0], target + "-split", size, HYPER).items():
                    splits[size].setdefault(step, []).append(spent)
            for how in options.vw:
                target = str(folder / "vw")
                texts = str(folder / "train.vw"), str(folder / "test.vw")
                seconds, peak = child(VW, *texts, target, how, HYPER)
                note(f"Vowpal Wabbit {how}", seconds, peak, np.loadtxt(target + ".raw", usecols=0))
        print("| program | k examples/s | held-out log-loss | peak RSS, MB |")
        print("|---|---|---|---|")
        for program, seen in runs.items():
            print(f"| {program} | {spread(seen['rate'])} | {spread(seen['loss'], 4)} | {spread(seen['peak'])} |")
        steps = list(splits[options.batch_size[0]])
        print("\nSeconds in each step of shoal, one after the other in one thread:\n")
        print("| batches of | " + " | ".join(steps) + " | sum |")
        print("|---" * (len(steps) + 2) + "|")
        for size, spent in splits.items():
            total = sum(statistics.median(figures) for figures in spent.values())
            print(f"| {size} | " + " | ".join(spread(spent[step], 2) for step in steps) + f" | {total:.2f} |")


if __name__ == "__main__":
    main()
