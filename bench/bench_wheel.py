"""A wheel compared with a build from source: CPU time of the loops that select wider instructions at run time.

    python bench/bench_wheel.py PYTHON                  this Python compared with PYTHON
    python bench/bench_wheel.py PYTHON --case ftrl64    some cases only

PYTHON is the interpreter of an environment with a wheel and psutil. Each of the two runs a process that makes the same
tables of ``KEYS`` rows with one thread. The processes take turns: each pushes or pulls a batch of random keys, or
computes a checksum. A ratio is the median over pairs of turns of the CPU time with PYTHON / that with this Python, with
quartiles.

Checks: after all turns the rows of both have equal bits, and checksums are equal.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import shoal
from figures import check
from shoal import _core

KEYS = 100_000
BATCH = 16_384
CHECKSUM_BYTES = 1 << 22
OPTIMIZERS = {"ftrl": shoal.FTRL(l1=0.01), "adagrad": shoal.Adagrad(), "adam": shoal.Adam(), "sgd": shoal.SGD()}
CASES = (
    *("ftrl1", "ftrl16", "ftrl64", "adagrad1", "adagrad16", "adagrad64", "adam64", "sgd64"),
    *("pull1", "pull16", "crc32c"),
)


class Workload:
    """A table and its turns, the same in each process.

    Parameters
    ----------
    case : str
        Of CASES.
    store : Store
    """

    def __init__(self, case: str, store: shoal.Store) -> None:
        self._random = np.random.default_rng(len(case))
        name = case.rstrip("0123456789")
        self._turn: Callable[[], Any]  # returns bytes or an array
        self._content = hashlib.sha256()
        if case == "crc32c":
            self._bytes = self._random.bytes(CHECKSUM_BYTES)
            self.numbers = CHECKSUM_BYTES
            self._turn = self._checksum
            return
        dim = int(case.removeprefix(name))
        self.numbers = BATCH * dim
        self._table = store.table(case, dim=dim, optimizer=OPTIMIZERS.get(name, OPTIMIZERS["adagrad"]))
        keys = np.arange(KEYS, dtype=np.uint64)
        self._table.push(keys, self._random.random((KEYS, dim), np.float32) - np.float32(0.5))
        self._turn = self._pull if name == "pull" else self._push

    def turn(self) -> float:
        """Take a turn; return its CPU time in nanoseconds for each number of the batch."""
        self._keys = self._random.integers(0, KEYS, BATCH).astype(np.uint64)
        if self._turn == self._push:
            shape = (BATCH, self.numbers // BATCH)
            self._gradients = self._random.random(shape, np.float32) - np.float32(0.5)
        start = time.thread_time_ns()
        result = self._turn()
        spent = time.thread_time_ns() - start
        self._content.update(result)
        return spent / self.numbers

    def digest(self) -> str:
        """Digest what the turns have computed."""
        if self._turn == self._push:
            self._content.update(self._pull().tobytes())
        return self._content.hexdigest()

    def _push(self) -> bytes:
        self._table.push(self._keys, self._gradients)
        return b""

    def _pull(self) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(self._table.pull(self._keys))

    def _checksum(self) -> bytes:
        return _core.crc32c(self._bytes).to_bytes(4, "little")


def serve(cases: list[str]) -> None:
    """Take the turns that standard input names; write a line of JSON for each."""

    def answer(value: Any) -> None:
        print(json.dumps(value), flush=True)

    with shoal.local(threads=1) as store:
        workloads = {case: Workload(case, store) for case in cases}
        build = _core.build_info()
        answer(f"{build['compiler']}: {', '.join(build['cpu_features']) or 'baseline'}")
        for line in sys.stdin:
            what, case = line.split()
            answer(workloads[case].turn() if what == "turn" else workloads[case].digest())


class Process:
    """A Python that takes turns."""

    def __init__(self, python: str, cases: list[str]) -> None:
        command = [python, str(Path(__file__).resolve()), python, "--serve", "--case", *cases]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.build = self._answer()

    def ask(self, what: str, case: str) -> Any:
        """Request a turn or a digest."""
        assert self._process.stdin is not None
        print(what, case, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        check(bool(line), "a process has ended")
        return json.loads(line)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", help="an interpreter of an environment with a wheel")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.case)
        return
    source, wheel = processes = Process(sys.executable, options.case), Process(options.python, options.case)
    print(f"source: {source.build}\nwheel:  {wheel.build}\n")
    print("| case | ns for a number, source | wheel | ratio |\n|---|---|---|---|")
    for case in options.case:
        spent: dict[Process, list[float]] = {source: [], wheel: []}
        for turn in range(options.turns + 2):
            for process in processes if turn % 2 else processes[::-1]:
                nanoseconds = process.ask("turn", case)
                if turn >= 2:  # the first two are a warm-up
                    spent[process].append(nanoseconds)
        check(source.ask("digest", case) == wheel.ask("digest", case), f"{case}: the results differ")
        ratios = np.asarray(spent[wheel]) / np.asarray(spent[source])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(
            f"| {case} | {np.median(spent[source]):.2f} | {np.median(spent[wheel]):.2f} "
            f"| {middle:.2f} ({low:.2f}-{high:.2f}) |",
            flush=True,
        )
    for process in processes:
        process.end()


if __name__ == "__main__":
    main()
