"""Runs many schedules of clusters with replicas, in several processes: ``make sim SEEDS=100``.

make sim SEEDS=100                                  all scenarios, seeds 0 to 99
make sim SEEDS=100 FIRST=5000 SCENARIO=everything   those whose name contains it, other seeds
make sim SEEDS=1 FIRST=5017 SCENARIO=tables/bsp/calm    one run again

A trace of a run is a hash of all messages and of the arcs at its end, and another one without the records of streams:
two builds that behave alike have equal ones.
"""

import argparse
import contextlib
import gc
import hashlib
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from sim.scenarios import SCENARIOS, find_violations, prepare

CHUNK = 5  # runs of one task
TASKS = 100  # of a process: what a run's unfinished calls hold is given back with it
PROGRESS_SECONDS = 10


def run_some(task):
    """Run some seeds of a scenario; returns (traces of the runs, faults, failures)."""
    name, seeds = task
    traces = []
    scenario = SCENARIOS[name]
    faults, failures = Counter(), []
    gc.disable()
    gc.freeze()  # what the runs share is not searched after each of them
    for seed in seeds:
        happened, trace = [], "none"
        try:
            cluster = prepare(seed, scenario)
            cluster.network.trace = [hashlib.blake2b(digest_size=12) for _ in range(2)]
            happened = cluster.happened
            cluster.run()
            trace = trace_of(cluster)
            found = find_violations(cluster)
        except Exception as error:  # any error of the code under test is a failure
            at = traceback.extract_tb(error.__traceback__)[-1]
            found = [f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"]
        faults.update(happened)
        traces.append(f"{name} {seed} {trace}")
        if found:
            failures.append((name, seed, tuple(happened), found))
        del cluster
        gc.collect()
    return traces, faults, failures


def trace_of(cluster):
    """Return the trace of a run that has ended."""
    traces = cluster.network.trace
    for endpoint in () if cluster.map is None else cluster.map.endpoints:
        for first, end in cluster.map.arc_ranges(endpoint.id):
            with contextlib.suppress(ValueError):  # a table is being saved, or the arc is not there
                arc = b"".join(cluster.services[endpoint.address].save_arc(first, end))
                for trace in traces:
                    trace.update(arc)
    return " ".join(trace.hexdigest() for trace in traces)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of each scenario (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--scenario", default="", help="the scenario of this name, or those that contain it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--traces", type=Path, help="write the trace of each run into this file")
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
    faults, failed = Counter(), 0
    traces = []
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=TASKS) as pool:
        for some, happened, failures in pool.imap_unordered(run_some, tasks):
            traces += some
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
                print(
                    f"{len(traces)} of {len(names) * given.seeds} runs, {failed} failed, {now - began:.0f} s",
                    flush=True,
                )
            if now - began > given.seconds:
                pool.terminate()
                break
    if given.traces is not None:
        given.traces.write_text("\n".join([*sorted(traces), ""]))
    print(f"{len(traces)} runs, {faults.total()} faults, {failed} failures, {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
