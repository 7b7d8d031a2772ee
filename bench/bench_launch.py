"""What a cluster on one machine costs before and after its work: whole commands, wall time and CPU time.

    .venv/bin/python bench/bench_launch.py
    .venv/bin/python bench/bench_launch.py --rounds 10 --against ../other/python      # two builds in turns

Each command runs once a round, with every build in turn: `shoal launch` of a program that does nothing, of `shoal train
lr` with a hundred lines of Criteo's text, the same without a cluster, and `shoal.launch` from Python. CPU time is that
of all processes together.

Checks: each command succeeds.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shoal
from figures import check, conditions, spread

LINES = 100


def write(path: Path) -> None:
    """Write examples in Criteo's format."""
    random.seed(1)
    with path.open("w") as file:
        for _ in range(LINES):
            numbers = [str(random.randrange(50)) for _ in range(13)]
            words = [f"{random.randrange(1000):08x}" for _ in range(26)]
            file.write("\t".join([str(random.randrange(2)), *numbers, *words]) + "\n")


def commands(directory: Path) -> dict[str, list[str]]:
    """Return the commands, by what is printed."""
    log, python = directory / "log.tsv", [sys.executable]
    write(log)
    train = [*python, "-m", "shoal", "train", "lr", "--data", str(log), "--format", "criteo", "--overwrite", "--quiet"]
    train += ["--output", str(directory / "model")]
    launch = [*python, "-m", "shoal", "launch"]
    return {
        "launch -- true": [*launch, "--", "true"],
        "launch -- train lr --cluster, 1 + 1": [*launch, "--", *train, "--cluster"],
        "launch -- train lr --cluster, 2 + 2": [*launch, "--servers", "2", "--workers", "2", "--", *train, "--cluster"],
        "train lr, no cluster": train,
        "shoal.launch().close()": [*python, "-c", "import shoal; shoal.launch().close()"],
    }


def run(command: list[str], build: str) -> tuple[float, float]:
    """Run a command; return the milliseconds that it takes, and those of CPU time."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": build}, capture_output=True, check=False)
    took = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    check(done.returncode == 0, f"{command}: {done.stderr!r}")
    return 1e3 * took, 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Run all commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against", default=[], action="append", help="the directory of another build's package")
    arguments = parser.parse_args()
    builds = [str(Path(shoal.__file__).parents[1]), *arguments.against]
    with tempfile.TemporaryDirectory() as directory:
        timed = commands(Path(directory))
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(arguments.rounds + 1):
            for name, command in timed.items():
                for build in builds[:: 1 if number % 2 else -1]:
                    figures = run(command, os.path.abspath(build))
                    if number:  # the first round fills the file system's cache
                        found.setdefault((name, build), []).append(figures)
    for (name, build), rounds in found.items():
        wall, cpu = zip(*rounds, strict=True)
        print(f"{name:36} {spread(wall):>20} ms, CPU {spread(cpu):>20} ms   {build}")
    print(conditions())


if __name__ == "__main__":
    main()
