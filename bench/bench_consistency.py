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
from shoal.cluster.worker.calls import Policy
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
        patient = Policy(resend_after=1e3, deferred_after=1e3, longest=1e3)
        weather = Weather(base=100e-6, jitter=20e-6, ordered=True)
        super().__init__(
            seed, _core.Service, mode=mode, staleness=staleness, workers=workers, endpoints=1, weather=weather,
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

COLOURS = {"BSP": "b", "SSP(2)": "d", "SSP(8)": "a", "ASP": "c"}
STYLE = """
    .card { fill: #fcfdfe; stroke: #d0d7de; }
    .text { fill: #1f2328; } .soft { fill: #59636e; } .grid { stroke: #e4e8ec; } .axis { stroke: #59636e; }
    .head { font-weight: 600; font-size: 14px; } .small { font-size: 12px; }
    .a, .b, .c, .d { fill: none; stroke-width: 2.2; }
    .a { stroke: #2f6fb2; } .b { stroke: #c2611a; } .c { stroke: #8b949e; } .d { stroke: #37864a; }
    .at { fill: #2f6fb2; } .bt { fill: #b3550f; } .ct { fill: #59636e; } .dt { fill: #2c7440; }
    .name { font-weight: 600; font-size: 12px; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d; }
      .text { fill: #e6edf3; } .soft { fill: #a3adb8; } .grid { stroke: #262c34; } .axis { stroke: #a3adb8; }
      .a { stroke: #5b9bdf; } .b { stroke: #dd8440; } .c { stroke: #8b949e; } .d { stroke: #57a96b; }
      .at { fill: #5b9bdf; } .bt { fill: #dd8440; } .ct { fill: #a3adb8; } .dt { fill: #57a96b; }
    }"""


def panel(
    left: float, title: str, note: str, figures: dict[str, list[tuple[int, float]]], top: float, step: float, unit: str
) -> list[str]:
    """One diagram: a line for each mode, labelled at its end; overlapping labels are moved apart."""
    x0, x1, y0, y1 = left + 44, left + 226, 300.0, 84.0
    sizes = sorted({workers for line in figures.values() for workers, _ in line})
    most, least = np.log(sizes[-1]), np.log(sizes[0])

    def x(workers: int) -> float:
        return float(x0 + (np.log(workers) - least) / (most - least) * (x1 - x0))

    def y(value: float) -> float:
        return float(y0 - value / top * (y0 - y1))

    out = [
        f'<text class="text head" x="{left + 8}" y="36">{title}</text>',
        f'<text class="soft small" x="{left + 8}" y="55">{note}</text>',
    ]
    for k in range(round(top / step) + 1):
        out.append(f'<path class="grid" d="M{x0} {y(k * step):.1f} H{x1}"/>')
        label = f"{k * step:.0%}" if unit == "%" else f"{k * step:g}"
        out.append(f'<text class="soft small" x="{x0 - 8}" y="{y(k * step) + 4:.1f}" text-anchor="end">{label}</text>')
    out.append(f'<path class="axis" d="M{x0} {y0} H{x1}"/>')
    for i, workers in enumerate(sizes):
        out.append(f'<path class="axis" d="M{x(workers):.1f} {y0} v4"/>')
        if i + 1 < len(sizes) and x(sizes[i + 1]) - x(workers) < 30:
            continue  # there is no room for its number
        out.append(f'<text class="soft small" x="{x(workers):.1f}" y="{y0 + 18}" text-anchor="middle">{workers}</text>')
    out.append(f'<text class="soft small" x="{(x0 + x1) / 2}" y="{y0 + 38}" text-anchor="middle">workers</text>')
    ends = sorted((y(line[-1][1]), mode) for mode, line in figures.items())
    last = 0.0
    for end, mode in ends:
        line = figures[mode]
        points = " ".join(f"{'M' if i == 0 else 'L'}{x(w):.1f} {y(v):.1f}" for i, (w, v) in enumerate(line))
        out.append(f'<path class="{COLOURS[mode]}" d="{points}"/>')
        last = max(end + 4, last + 15)
        out.append(f'<text class="{COLOURS[mode]}t name" x="{x1 + 8}" y="{last:.1f}">{mode}</text>')
    return out


def picture(results: dict[tuple[str, str, int], dict[str, float]]) -> str:
    """Draw throughput in both scenarios, and staleness in the first."""

    def lines(scenario: str, what: str) -> dict[str, list[tuple[int, float]]]:
        return {
            mode: [(w, figures[what]) for (s, m, w), figures in sorted(results.items()) if (s, m) == (scenario, mode)]
            for mode in MODES
        }

    first, second = SCENARIOS
    body = [
        *panel(14, "throughput, hiccups", SCENARIOS[first], lines(first, "throughput"), 1.0, 0.25, "%"),
        *panel(328, "throughput, slow workers", SCENARIOS[second], lines(second, "throughput"), 1.0, 0.25, "%"),
    ]
    lags = lines(first, "lag")
    top = max(value for line in lags.values() for _, value in line)
    step = next(s for s in (1, 2, 5, 10, 20, 50) if top / s <= 6)
    body += panel(
        642, "staleness, hiccups", "clocks of a pull ahead of the slowest", lags, step * -(-top // step), step, ""
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 352" role="img"',
            '     font-family="-apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13">',
            "  <title>Throughput and staleness of BSP, SSP and ASP from 2 to 1000 workers</title>",
            f"  <style>{STYLE}\n  </style>",
            '  <rect class="card" x="0.5" y="0.5" width="959" height="351" rx="10"/>',
            *("  " + line for line in body),
            "</svg>\n",
        ]
    )


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
        options.picture.write_text(picture(results))


if __name__ == "__main__":
    main()
