"""Runs many schedules of clusters with replicas, in several processes: ``make sim SEEDS=100``.

make sim SEEDS=100                                  all scenarios, seeds 0 to 99
make sim SEEDS=100 FIRST=5000 SCENARIO=everything   those whose name contains it, other seeds
make sim SEEDS=1 FIRST=5017 SCENARIO=tables/bsp/calm    one run again
"""

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections import Counter

from sim.scenarios import SCENARIOS, find_violations, prepare

CHUNK = 5  # runs of one task
PROGRESS_SECONDS = 10


def run_some(task):
    """Run some seeds of a scenario; returns (number of runs, faults, failures)."""
    name, seeds = task
    scenario = SCENARIOS[name]
    faults, failures = Counter(), []
    gc.disable()
    gc.freeze()  # what the runs share is not searched after each of them
    for seed in seeds:
        happened = []
        try:
            cluster = prepare(seed, scenario)
            happened = cluster.happened
            cluster.run()
            found = find_violations(cluster)
        except Exception as error:  # any error of the code under test is a failure
            at = traceback.extract_tb(error.__traceback__)[-1]
            found = [f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"]
        faults.update(happened)
        if found:
            failures.append((name, seed, tuple(happened), found))
        del cluster
        gc.collect()
    return len(seeds), faults, failures


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of each scenario (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--scenario", default="", help="the scenario of this name, or those that contain it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    given = parser.parse_args(arguments)
    names = [name for name in SCENARIOS if given.scenario in name]
    if given.scenario in names:
        names = [given.scenario]
    if not names or given.seeds < 1:
        parser.error(f"no scenario's name contains {given.scenario!r}: there are {', '.join(SCENARIOS)}")
    end = given.first + given.seeds
    # Scenario after scenario for a few seeds, then for the next ones: a run that is cut short has seen all of them.
    tasks = [
        (name, range(first, min(first + CHUNK, end))) for first in range(given.first, end, CHUNK) for name in names
    ]
    began = reported = time.monotonic()
    runs, faults, failed = 0, Counter(), 0
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for count, happened, failures in pool.imap_unordered(run_some, tasks):
            runs += count
            faults.update(happened)
            failed += len(failures)
            for name, seed, about, found in failures:
                print(f"FAILED {name}, seed {seed}, after {', '.join(about) or 'no fault'}:")
                for text in found[:5]:
                    print(f"    {text}")
                print(f"    again: make sim SCENARIO={name} FIRST={seed} SEEDS=1", flush=True)
            now = time.monotonic()
            if now - reported > PROGRESS_SECONDS:
                reported = now
                print(f"{runs} of {len(names) * given.seeds} runs, {failed} failed, {now - began:.0f} s", flush=True)
            if now - began > given.seconds:
                pool.terminate()
                break
    print(f"{runs} runs, {faults.total()} faults, {failed} failures, {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
