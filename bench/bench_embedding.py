"""Embeddings: a table compared with torch.nn.EmbeddingBag(sparse=True) and torch.optim.Adagrad, and with plain NumPy.

    pip install torch                                (if it is missing, a message says that it is left out)
    python bench/bench_embedding.py                  a million rows of dim 16 and 64: a minute, 3 GB of memory
    python bench/bench_embedding.py --dim 16 --bag 26 --threads 2 --rounds 3

An example is a bag of ids (one, or 26). A step looks up the bags of a batch, sums the rows of each, and applies the
gradient of every sum to its rows: gradients of duplicate ids are added, then each row makes one step of Adagrad. The
gradients of the sums are given, so only the embedding is measured. All three use the same ids, int64 below the number
of rows, drawn uniformly or log-uniformly (the frequency of an id falls as 1/rank), begin with the same rows, and take
turns. The ids of shoal are keys, which may be any 64-bit numbers; torch and NumPy index arrays of fixed size.

Checks: the sums of the first batch, and the final rows of all three, agree within float32's rounding.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import shoal
from figures import check, spread

try:
    import torch
except ImportError:
    torch = None

LR = 0.05
EPS = 1e-10
IDS = 400_000  # in a turn: several batches
BATCH = 8192  # examples

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]


class Contender(Protocol):
    """Rows of an embedding, and how they are read and updated."""

    name: str

    def step(self, ids: Ids, slopes: Rows) -> Rows:
        """Look up the bags ids[n, bag] and apply the gradients slopes[n, dim]; returns the sums [n, dim]."""
        ...

    def rows(self, ids: Ids) -> Rows:
        """Return rows."""
        ...


class Shoal:
    """A table in a store of this process."""

    name = "shoal"

    def __init__(self, start: Rows, threads: int) -> None:
        self._store = shoal.local(threads=threads)
        self._table = self._store.table("bag", dim=start.shape[1], optimizer=shoal.Adagrad(lr=LR, eps=EPS))
        for begin in range(0, len(start), 1 << 16):
            part = start[begin : begin + (1 << 16)]
            self._table.assign(np.arange(begin, begin + len(part)), part)

    def step(self, ids: Ids, slopes: Rows) -> Rows:
        """See `Contender`."""
        n, bag = ids.shape
        keys = self._store.key_batch(ids.reshape(-1))
        rows = keys.expand(self._table.pull_unique(keys))
        sums = rows if bag == 1 else rows.reshape(n, bag, -1).sum(axis=1)
        grads = slopes if bag == 1 else np.repeat(slopes, bag, axis=0)
        self._table.push_unique(keys, keys.sum(grads)).result()
        return sums

    def rows(self, ids: Ids) -> Rows:
        """See `Contender`."""
        return self._table.pull(ids)


class Torch:
    """EmbeddingBag with sparse gradients."""

    name = "torch"

    def __init__(self, start: Rows, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; without this call torch warns
        self._bag = torch.nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(start.copy()), freeze=False, mode="sum", sparse=True
        )
        self._optimizer = torch.optim.Adagrad(self._bag.parameters(), lr=LR, eps=EPS)

    def step(self, ids: Ids, slopes: Rows) -> Rows:
        """See `Contender`."""
        self._optimizer.zero_grad()
        sums = self._bag(torch.from_numpy(ids))
        sums.backward(torch.from_numpy(slopes))
        self._optimizer.step()
        return sums.detach().numpy()

    def rows(self, ids: Ids) -> Rows:
        """See `Contender`."""
        return self._bag.weight.detach().numpy()[ids]


class NumPy:
    """Two arrays; duplicates are found by sorting. Always one thread."""

    name = "NumPy"

    def __init__(self, start: Rows, threads: int) -> None:
        self._weights = start.copy()
        self._squares = np.zeros_like(start)

    def step(self, ids: Ids, slopes: Rows) -> Rows:
        """See `Contender`."""
        n, bag = ids.shape
        given = ids.reshape(-1)
        rows = self._weights[given]
        sums = rows if bag == 1 else rows.reshape(n, bag, -1).sum(axis=1)
        order = np.argsort(given, kind="stable")
        ordered = given[order]
        firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        unique = ordered[firsts]
        # With unique and add.at this took 1.4 to 5 times as long.
        grads = np.add.reduceat(slopes[order // bag], firsts, axis=0)
        squares = self._squares[unique] + grads * grads
        self._squares[unique] = squares
        self._weights[unique] -= np.float32(LR) * grads / (np.sqrt(squares) + np.float32(EPS))
        return sums

    def rows(self, ids: Ids) -> Rows:
        """See `Contender`."""
        return self._weights[ids]


def draw(random: np.random.Generator, rows: int, skewed: bool, bag: int, dim: int) -> list[tuple[Ids, Rows]]:
    """Draw the batches of a turn: ids [n, bag], slopes [n, dim]."""
    batches = []
    for _ in range(max(1, IDS // (BATCH * bag))):
        u = random.random((BATCH, bag))
        ids = (np.exp(u * np.log(rows)) - 1 if skewed else u * rows).astype(np.int64)
        # Frequent ids are not neighbours in memory.
        ids = ids * 7_368_787 % rows
        batches.append((ids, random.standard_normal((BATCH, dim)).astype(np.float32)))
    return batches


def measure(
    random: np.random.Generator, contenders: list[Contender], rows: int, skewed: bool, bag: int, dim: int, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Measure in turns; returns thousands of examples a second of each, and the share of distinct ids in a batch."""
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    distinct = 1.0
    for turn in range(rounds + 1):
        batches = draw(random, rows, skewed, bag, dim)
        ids = batches[0][0]
        distinct = len(np.unique(ids)) / ids.size
        firsts = []
        for k in range(len(contenders)):
            contender = contenders[(k + turn) % len(contenders)]
            spent = 0.0
            for i, (ids, slopes) in enumerate(batches):
                start = time.perf_counter()
                sums = contender.step(ids, slopes)
                spent += time.perf_counter() - start
                if i == 0:
                    firsts.append(sums)
            if turn:  # the first turn is a warm-up
                rates[contender.name].append(len(batches) * BATCH / spent / 1e3)
        for sums in firsts[1:]:
            check(np.allclose(sums, firsts[0], rtol=1e-3, atol=1e-4 * bag), "the sums of the bags differ")
    return rates, distinct


def agree(random: np.random.Generator, contenders: list[Contender], start: Rows) -> None:
    """Compare the rows of all contenders; they must have moved."""
    ids = random.integers(0, len(start), 100_000)
    rows = [contender.rows(ids) for contender in contenders]
    check(float(np.mean(rows[0] != start[ids])) > 0.5, "the rows have not moved")
    for other in rows[1:]:
        check(np.allclose(other, rows[0], rtol=1e-3, atol=1e-4), "the rows differ")


def lines(rows: int, dim: int, bags: list[int], threads: int, rounds: int) -> Iterator[str]:
    """Measure one dim with some numbers of threads."""
    random = np.random.default_rng([11, dim, threads])
    start = random.uniform(-0.01, 0.01, (rows, dim)).astype(np.float32)
    kinds: list[Any] = [Shoal, NumPy] if torch is None else [Shoal, Torch, NumPy]
    contenders = [kind(start, threads) for kind in kinds]
    for bag in bags:
        for skewed in (False, True):
            rates, distinct = measure(random, contenders, rows, skewed, bag, dim, rounds)
            ours = rates["shoal"]
            line = f"| {dim} | {bag} | {'1/rank' if skewed else 'uniform'}, {distinct:.2f} | {threads} "
            for name in ("shoal", "torch", "NumPy"):
                line += f"| {spread(rates[name])} " if name in rates else "| "
            for name in ("torch", "NumPy"):
                ratio = [a / b for a, b in zip(ours, rates[name], strict=True)] if name in rates else None
                line += f"| {spread(ratio, 1)} " if ratio else "| "
            yield line + "|"
    agree(random, contenders, start)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--bag", nargs="+", type=int, default=[1, 26])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if torch is None:
        print("torch is not installed and is left out (pip install torch)")
    print(
        "| dim | ids an example | drawn, distinct | threads | shoal | torch | NumPy | shoal / torch | shoal / NumPy |"
    )
    print("|" + "---|" * 9)
    for dim in options.dim:
        for threads in options.threads:
            for line in lines(options.rows, dim, options.bag, threads, options.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
