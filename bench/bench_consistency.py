"""The cost of waiting: BSP, SSP and ASP from 2 to 1000 workers, some of them slow, on a simulated cluster.

    python bench/bench_consistency.py                            print the tables
    python bench/bench_consistency.py --picture docs/staleness.svg

The requests are those of the real client, and the endpoint is the one that servers run; the network, the durations and
the workers are a model (tests/support/sim). A thousand workers therefore fit into one process, and the same seed gives
the same figures on every machine.

The model. A worker pulls, computes, pushes, ticks, and begins again. Computing takes 100 ms on average (log-normal,
with a standard deviation of a fifth). A message takes 100 us plus a random delay (exponential, mean 20 us). There is a
server for every 8 workers; each batch has 20,000 distinct keys, split over all servers, and each server receives
messages from every worker: 15 us a message, 50 ns a key pulled or stepped, 5 ns a key kept for its clock. Servers are
alike, so one represents all.

    hiccups       one batch in 50, of any worker, takes five times as long
    slow workers  one worker in 50, at least one, always takes twice as long

Throughput is batches a second relative to workers without stragglers, messages or waiting. Staleness is measured when a
pull is answered: its clock minus the slowest worker's. "Missed" is the number of pushes of other workers that the
server applied between a worker's pull and its push, per other worker: 1 means one push of each. The first third of each
run is left out.
"""

import argparse
import random
import statistics
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

from figures import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import numpy as np

from shoal import _core
from shoal.tools.reports import charts
from shoal.tools.reports.charts import BLUE, GREEN, GREY, ORANGE
from sim.cluster import SUM, Client, Cluster
from sim.network import Weather

MODES = {"BSP": ("bsp", 0), "SSP(2)": ("ssp", 2), "SSP(8)": ("ssp", 8), "ASP": ("asp", 0)}
SCENARIOS = {"hiccups": "one batch in 50 takes 5 times as long", "slow workers": "one worker in 50 is half as fast"}
COMPUTE, SPREAD = 0.1, 0.2
KEYS, WORKERS_PER_SERVER = 20_000, 8
PER_MESSAGE, PER_KEY, PER_KEPT_KEY = 15e-6, 50e-9, 5e-9
PULL, PUSH, TICK = int(_core.Op.PULL), int(_core.Op.PUSH), int(_core.Op.TICK)
KEY = np.array([1], np.uint64)
GRAD = np.array([[-1.0]], np.float32)


class Measured(Cluster):
    """A cluster whose endpoint takes time for each message, one after the other; it counts its work."""

    def __init__(self, seed: int, mode: str, staleness: int, workers: int, scenario: str, seconds: float):
        patient = _core.Policy(resend_after=1e3, deferred_after=1e3, longest=1e3, pause=0.005, longest_pause=0.05)
        weather = Weather(base=100e-6, jitter=20e-6, ordered=True)
        super().__init__(
            seed, _core.Endpoint, mode=mode, staleness=staleness, workers=workers, endpoints=1, weather=weather,
            policy=patient, tables={1: SUM},
        )  # fmt: skip
        self.scenario, self.seconds = scenario, seconds
        self.keys = KEYS / max(1, workers // WORKERS_PER_SERVER)  # of a batch, on one server
        self.queue: deque[tuple[str, bytes, list[bytes]]] = deque()
        self.busy = False
        self.ticked: Counter[int] = Counter()  # clock -> workers
        self.slowest = 0
        self.pushes = 0
        self.at_pull = [0] * workers  # pushes applied when a worker's last pull was answered
        self.own = [0] * workers
        self.lags: list[int] = []
        self.missed: list[float] = []
        self.batches = 0

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.network.now > self.seconds / 3

    def arrive(self, address: str, peer: bytes, frames: list[bytes]) -> None:
        """Enter the queue."""
        self.queue.append((address, peer, frames))
        if not self.busy:
            self._begin()

    def _begin(self) -> None:
        self.busy = True
        op = self.queue[0][2][0][5]
        seconds = PER_MESSAGE
        if op != TICK:
            seconds += self.keys * (PER_KEPT_KEY if op == PUSH and self.mode == "bsp" else PER_KEY)
        self.network.after(seconds, self._handle)

    def _handle(self) -> None:
        address, peer, frames = self.queue.popleft()
        replies = self.services[address].handle(peer, frames)
        seconds = 0.0
        op, clock = frames[0][5], int.from_bytes(frames[0][36:40], "little")
        rank = int.from_bytes(frames[0][16:20], "little")
        if op == PUSH:
            if self.warm and self.workers > 1:
                self.missed.append((self.pushes - self.at_pull[rank]) / (self.workers - 1))
            if self.mode != "bsp":
                self.pushes += 1
                self.at_pull[rank] += 1
        elif op == TICK:
            self.ticked[clock] += 1
            while self.ticked[self.slowest] == self.workers:
                self.slowest += 1
                seconds += self.keys * PER_KEY * self.workers if self.mode == "bsp" else 0.0
        self.network.after(seconds, self._answer, address, replies)

    def _answer(self, address: str, replies: list[Any]) -> None:
        for peer, frames in replies:
            if frames[0][5] == PULL and frames[0][6] == 0:
                rank, clock = int(peer.split(b".")[0]), int.from_bytes(frames[0][36:40], "little")
                self.at_pull[rank] = self.pushes
                if self.warm:
                    self.lags.append(clock - self.slowest)
        self.reply(address, replies)
        self.busy = False
        if self.queue:
            self._begin()

    def work(self, client: Client) -> Any:
        """Pull, compute, push, tick."""
        rng = random.Random(f"{client.rank}")
        mu = np.log(COMPUTE) - SPREAD**2 / 2
        slow = 2.0 if self.scenario == "slow workers" and client.rank % 50 == 0 else 1.0
        while True:
            yield client.pull(KEY)
            hiccup = 5.0 if self.scenario == "hiccups" and rng.random() < 0.02 else 1.0
            yield rng.lognormvariate(mu, SPREAD) * slow * hiccup
            client.push(KEY, GRAD)
            client.tick()
            self.batches += self.warm


def measure(mode: str, workers: int, scenario: str, seconds: float) -> dict[str, float]:
    """Run one cluster and return its figures."""
    name, staleness = MODES[mode]
    cluster = Measured(1, name, staleness, workers, scenario, seconds)
    cluster.start([cluster.work] * workers)
    cluster.network.run(lambda: cluster.network.now > seconds, seconds + 1)
    check(not any(client.finished for client in cluster.clients), "a worker ended early")
    bound = {"bsp": 0, "ssp": staleness, "asp": 10**9}[name]
    check(max(cluster.lags) <= bound, f"{mode}: a pull was {max(cluster.lags)} clocks ahead")
    lags = sorted(cluster.lags)
    return {
        "throughput": cluster.batches / (seconds * 2 / 3) / (workers / COMPUTE),
        "lag": statistics.fmean(lags),
        "lag99": lags[int(len(lags) * 0.99)],
        "missed": statistics.fmean(cluster.missed),
    }


# --- the picture ---

COLOURS = {"BSP": ORANGE, "SSP(2)": GREEN, "SSP(8)": BLUE, "ASP": GREY}


def draw(path: Path, results: dict[tuple[str, str, int], dict[str, float]]) -> None:
    """Draw throughput in both scenarios, and staleness in the first."""
    first, second = SCENARIOS
    panels = [
        (f"throughput, {first}", first, "throughput"),
        (f"throughput, {second}", second, "throughput"),
        (f"clocks ahead of the slowest worker, {first}", first, "lag"),
    ]
    figure, axes = charts.figure(columns=3, width=12, height=3.6)
    for each, (title, scenario, what) in zip(axes, panels, strict=True):
        for mode in MODES:
            line = [(w, values[what]) for (s, m, w), values in sorted(results.items()) if (s, m) == (scenario, mode)]
            each.plot(*zip(*line, strict=True), color=COLOURS[mode], lw=2, marker="o", ms=3, label=mode)
        each.set(xscale="log", xlabel="workers", ylim=(0, 1 if what == "throughput" else None))
        each.set_title(title, loc="left", fontsize=10, color=GREY)
        each.set_xticks(sorted({w for _, _, w in results}))
        each.xaxis.set_major_formatter("{x:g}")
        each.minorticks_off()
        if what == "throughput":
            each.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    charts.save_svg(figure, axes, path)


def main() -> None:
    """Measure, print Markdown, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 8, 32, 128, 400, 1000])
    parser.add_argument("--seconds", type=float, default=6.0, help="simulated")
    parser.add_argument("--picture", type=Path, help="where to draw it")
    options = parser.parse_args()
    results = {}
    for scenario, what in SCENARIOS.items():
        print(f"\n{scenario}: {what}. Throughput; mean and 99th percentile of staleness, clocks; missed.\n")
        print(f"| workers | {' | '.join(MODES)} |\n|---|{'---|' * len(MODES)}")
        for workers in options.workers:
            cells = []
            for mode in MODES:
                got = results[scenario, mode, workers] = measure(mode, workers, scenario, options.seconds)
                cells.append(f"{got['throughput']:.0%}; {got['lag']:.1f}, {got['lag99']:.0f}; {got['missed']:.1f}")
            print(f"| {workers} | {' | '.join(cells)} |", flush=True)
    if options.picture:
        draw(options.picture, results)


if __name__ == "__main__":
    main()
