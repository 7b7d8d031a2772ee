"""Logistic regression with an L1 penalty to its optimum: DBPG beside scikit-learn's liblinear and saga.

    python bench/bench_dbpg.py                                1e6 examples, 1e5 features, about 70 of them in each
    python bench/bench_dbpg.py --examples 2e5 --rounds 3 --saga

The data are made from a seed and look like tf-idf vectors of news: features by Zipf's law, logarithms of counts times
inverse frequencies, every example of length 1, labels of a sparse model with noise. The same arrays go to all solvers,
without bias. Each is run at its tolerances, from loose to tight, until its objective is within a relative gap of 1e-4
of the least that any run reaches; the time of that run counts, from the arrays to the weights. Then all are run so in
turns. Medians and ranges of wall and CPU seconds.
"""

import argparse
import resource
import statistics
import time
import warnings

import numpy as np
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression

import shoal
from figures import check, conditions, spread

GAP = 1e-4
LOOSE_TO_TIGHT = (1e-1, 5e-2, 4e-2, 3.5e-2, 3e-2, 2.5e-2, 2e-2, 1e-2, 5e-3, 2e-3, 1e-3, 3e-4, 1e-4)


def make(examples: int, features: int, mean: float, seed: int) -> tuple[sp.csr_matrix, np.ndarray]:
    """Make the examples, float64 as scikit-learn wants them but exact in float32, and their labels."""
    random = np.random.default_rng(seed)
    share = np.arange(1, features + 1) ** -0.8
    cumulative = np.cumsum(share / share.sum())
    lengths = np.maximum(1, random.poisson(mean, examples))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    names = random.permutation(features)
    columns = names[np.searchsorted(cumulative, random.random(indptr[-1])).clip(0, features - 1)]
    x = sp.csr_matrix((np.ones(indptr[-1]), columns, indptr), shape=(examples, features))
    x.sum_duplicates()
    frequency = np.bincount(x.indices, minlength=features)
    x.data = (1 + np.log(x.data)) * np.log(examples / np.maximum(frequency, 1))[x.indices]
    norms = np.sqrt(np.add.reduceat(x.data * x.data, x.indptr[:-1]))
    x.data = (x.data / np.repeat(norms, np.diff(x.indptr))).astype(np.float32).astype(np.float64)
    true = np.where(random.random(features) < 0.05, random.normal(0, 6, features), 0.0)
    labels = (random.random(examples) < 1 / (1 + np.exp(-(x @ true)))).astype(np.float64)
    return x, labels


def objective(x: sp.csr_matrix, labels: np.ndarray, weights: np.ndarray, l1: float) -> float:
    """Return the sum of the losses and the penalty, in float64."""
    margins = x @ weights
    losses = np.maximum(margins, 0) - margins * labels + np.log1p(np.exp(-np.abs(margins)))
    return float(losses.sum() + l1 * np.abs(weights).sum())


def with_scikit_learn(solver: str, x: sp.csr_matrix, labels: np.ndarray, l1: float, tolerance: float) -> np.ndarray:
    """Return the weights."""
    model = LogisticRegression(
        l1_ratio=1, C=1 / l1, solver=solver, fit_intercept=False, tol=tolerance, max_iter=10_000, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if solver == "liblinear":  # as its versions before 1.8 call it
            model.set_params(penalty="l1")
        return model.fit(x, labels).coef_.ravel()


def with_shoal(batch: shoal.Batch, features: int, l1: float, tolerance: float) -> np.ndarray:
    """Return the weights."""
    solver = shoal.models.DBPG(l1=l1, tolerance=tolerance, passes=1000)
    with shoal.LogisticRegression(solver=solver, bias=False) as model:
        solved = model.fit([batch]).solved
        print(f"    shoal: {solved.passes} passes, {solved.sent:,} keys sent", flush=True)
        return model.table.pull(np.arange(features, dtype=np.uint64))[:, 0].astype(np.float64)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=float, default=1e6)
    parser.add_argument("--features", type=float, default=1e5)
    parser.add_argument("--mean", type=float, default=70, help="features of an example, on average")
    parser.add_argument("--l1", type=float, default=1.0, help="strength of the penalty; scikit-learn's 1 / C")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saga", action="store_true", help="saga too, which takes some minutes")
    arguments = parser.parse_args()
    features = int(arguments.features)
    x, labels = make(int(arguments.examples), features, arguments.mean, seed=1)
    batch = shoal.Batch(
        labels.astype(np.float32), x.indptr.astype(np.int64), x.indices.astype(np.uint64), x.data.astype(np.float32)
    )
    print(f"{x.shape[0]:,} examples, {features:,} features, {x.nnz:,} entries; l1 {arguments.l1:g}", flush=True)

    def run(name: str, tolerance: float) -> tuple[float, float, float, int]:
        wall, cpu = time.perf_counter(), time.process_time()
        if name == "shoal":
            weights = with_shoal(batch, features, arguments.l1, tolerance)
        else:
            weights = with_scikit_learn(name, x, labels, arguments.l1, tolerance)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        value = objective(x, labels, weights, arguments.l1)
        print(f"  {name} at tolerance {tolerance:g}: {value:.4f}, {wall:.2f} s, {cpu:.2f} s of CPU", flush=True)
        return value, wall, cpu, np.count_nonzero(weights)

    least = run("liblinear", 1e-5)[0]
    names = ["shoal", "liblinear", *(["saga"] if arguments.saga else [])]
    reached = {}
    for name in names:
        for tolerance in LOOSE_TO_TIGHT:
            value = run(name, tolerance)[0]
            least = min(least, value)
            if value <= least * (1 + GAP):
                reached[name] = tolerance
                break
        check(name in reached, f"{name} does not reach the gap at any tolerance")
    took: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            took[name].append(run(name, reached[name]))
    print("solver     tolerance  gap       non-zero  wall s                CPU s")
    for name in names:
        value, _, _, nonzero = took[name][-1]
        check(value <= least * (1 + GAP), f"{name}: a repeated run has another objective")
        wall, cpu = (spread([one[k] for one in took[name]], 2) for k in (1, 2))
        print(f"{name:9}  {reached[name]:9g}  {value / least - 1:.1e}  {nonzero:8,}  {wall:20}  {cpu}")
    median = {name: statistics.median(one[1] for one in took[name]) for name in names}
    for name in names[1:]:
        print(f"shoal is {median[name] / median['shoal']:.2f} times as fast as {name}")
    print(f"peak resident set {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB; {conditions()}")


if __name__ == "__main__":
    main()
