"""What moving and copying slots costs: servers that join and leave under training, and the speed of a move.

    python bench/bench_moves.py resize [--csv FILE]    servers 1 -> 3 -> 2 under training
    python bench/bench_moves.py speed [--rows 10000000] [--dim 16]      all rows to another server, without a limit
    python bench/bench_moves.py copies [--rows 10000000]                a server dies, and its copies are made again

``resize`` and ``copies``: a worker trains under BSP, one step after the other: it pulls 20,000 keys, pushes gradients
for them and ends the clock. With ``--pause`` it sleeps after each step, as if it computed with cores of its own: four
busy processes on two cores are slower than two, whatever a move costs. Two servers join as spares, get slots by a
rebalance, then one is drained (``resize``); or one of three servers with a replica is killed and not replaced
(``copies``). Prints throughput in each phase and what the processes used, the longest step, and the worst second (of
those that begin every 100 ms) compared with the median seconds before and afterwards. Then a cluster of a fixed size
makes the same steps: the tables must have the same digest.

``speed``: FTRL of dim 1, or Adagrad of a larger one. One server has all rows; another one joins, then the first one is
drained. A row counts as its hash and its state: 16 bytes, or 136 at dim 16. The digest must be the same afterwards.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import shoal
from background import Steps
from chaos import get_status, wait_for_copies
from figures import check, conditions, cpu_seconds, spread
from shoal.cluster.launch import local_cluster
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.config import ServerConfig

BATCH = 20_000
POOL = 32  # batches, repeated
BIN_SECONDS = 0.1
QUIET_SECONDS = 4.0  # of training before and after each change
LIMIT_SECONDS = 240.0  # for a change to be complete
NO_LIMIT = 1 << 40  # bytes per second


def make_table(store: shoal.Store, dim: int) -> shoal.Table:
    """Return the table of all measurements."""
    optimizer = shoal.FTRL(alpha=0.1) if dim == 1 else shoal.Adagrad(lr=0.1)
    return store.table("moves", dim=dim, optimizer=optimizer)


def fill(store: shoal.Store, table: shoal.Table, rows: int) -> None:
    """Create rows with the keys 0, 1, 2, ..."""
    for first in range(0, rows, 1 << 17):
        keys = np.arange(first, min(rows, first + (1 << 17)), dtype=np.uint64)
        table.push(keys, np.ones((len(keys), table.dim), np.float32)).result()
        store.tick()
    check(len(table) == rows, "the rows exist")


class Trainer(Steps):
    """A thread that makes steps, and when each of them ended. It rests after each step, as if it computed elsewhere."""

    def __init__(self, store: shoal.Store, table: shoal.Table, rows: int, pause: float = 0.0) -> None:
        super().__init__()
        self._store, self._table, self._pause = store, table, pause
        rng = np.random.default_rng(5)
        self._pool = [rng.choice(rows, BATCH, replace=False).astype(np.uint64) for _ in range(POOL)]
        self._grads = [rng.normal(size=(BATCH, table.dim)).astype(np.float32) for _ in range(POOL)]
        self.ends = [time.monotonic()]  # of the steps; the first one: the beginning

    def step(self) -> None:
        """Make a step; which keys and gradients depends on its number only."""
        at = (len(self.ends) - 1) % POOL
        self._table.pull(self._pool[at])
        self._table.push(self._pool[at], self._grads[at])
        self._store.tick()
        if self._pause:
            time.sleep(self._pause)
        self.ends.append(time.monotonic())


class Timeline:
    """The steps of a training, in phases."""

    def __init__(self, ends: list[float]) -> None:
        self.ends = np.array(ends)
        self.steps = np.diff(self.ends)
        self.start = self.ends[0]

    def rates(self, begin: float, end: float) -> np.ndarray:
        """Return keys per second in each tenth of a second; a step counts evenly from its beginning to its end."""
        edges = np.arange(begin, end + 1e-9, BIN_SECONDS)
        done = np.interp(edges, self.ends, np.arange(len(self.ends)) * float(BATCH))
        return np.asarray(np.diff(done) / BIN_SECONDS)

    def seconds(self, begin: float, end: float) -> np.ndarray:
        """Return keys per second in each second that begins at a tenth."""
        return np.convolve(self.rates(begin, end), np.full(10, 0.1), "valid")

    def longest(self, begin: float, end: float) -> float:
        """Return the longest step, in seconds, of those that were under way in a period."""
        under_way = (self.ends[1:] > begin) & (self.ends[:-1] < end)
        return float(self.steps[under_way].max())


def servers_of(status: StatusReply) -> dict[int, int]:
    """Return the number of arcs that each server serves, by rank."""
    counts = {server.rank: 0 for server in status.servers}
    for arc in status.arcs:
        counts[arc.server] = counts.get(arc.server, 0) + 1
    return counts


def wait_until(address: str, what: str, condition: Callable[[StatusReply], bool], pause: float = 0.1) -> StatusReply:
    """Ask for the status, which takes 0.7 ms, until a condition holds."""
    limit = time.monotonic() + LIMIT_SECONDS
    with SchedulerClient(address, "observer") as client:
        while not condition(status := client.call(GetStatus(), StatusReply, LIMIT_SECONDS)):
            check(time.monotonic() < limit, f"{what} took more than {LIMIT_SECONDS:.0f} s: {servers_of(status)}")
            time.sleep(pause)
    return status


def is_even(status: StatusReply, servers: int) -> bool:
    """Whether so many servers serve equally many arcs, and nothing is being copied."""
    counts = servers_of(status).values()
    return len(counts) == servers and max(counts) - min(counts) <= 1 and not any(one.arriving for one in status.streams)


@contextlib.contextmanager
def joining(address: str, *, spare: bool = False) -> Iterator[ChildProcess]:
    """Start a server that joins a running cluster."""
    config = ServerConfig(scheduler=address, spare=spare, timeout=120.0)
    process = local_cluster.start_role("server", config, lambda *_: None)
    try:
        yield process
    finally:
        process.end(0.0)


class Usage:
    """The CPU seconds of processes, by name, in each phase."""

    def __init__(self, processes: dict[str, int]) -> None:
        self.processes = processes
        self._last: dict[str, float] = {}
        self.lines: list[str] = []

    def end(self, phase: str) -> None:
        """End a phase."""
        now = {name: cpu_seconds(pid) for name, pid in self.processes.items()}
        now = {
            name: seconds for name, seconds in now.items() if seconds >= self._last.get(name, 0.0)
        }  # others have ended
        used = ", ".join(f"{name} {seconds - self._last.get(name, 0.0):.2f}" for name, seconds in now.items())
        self.lines.append(f"{phase}: CPU seconds of {used}")
        self._last |= now


def rest(trainer: Trainer, seconds: float = QUIET_SECONDS) -> float:
    """Let the training go on undisturbed; return when that began."""
    begin = time.monotonic()
    time.sleep(seconds)
    check(not trainer.failure, trainer.failure)
    return begin


def digest_of_fixed(servers: int, rows: int, dim: int, steps: int) -> str:
    """Return the digest after the same steps on a cluster of a fixed size."""
    with shoal.launch(servers=servers, timeout=LIMIT_SECONDS) as store:
        table = make_table(store, dim)
        fill(store, table, rows)
        again = Trainer(store, table, rows)
        for _ in range(steps):
            again.step()
        return table.digest()


# ---- servers 1 -> 3 -> 2 ---------------------------------------------------------------------------------------------


def resize(arguments: argparse.Namespace) -> None:
    """Train while two servers join and one is drained."""
    rows, dim, pause = arguments.rows or 2_000_000, arguments.dim, arguments.pause / 1e3
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(local_cluster.running(1, copy_rate=arguments.copy_rate, timeout=120.0))
        store = stack.enter_context(shoal.connect(cluster.address, timeout=LIMIT_SECONDS))
        table = make_table(store, dim)
        fill(store, table, rows)
        usage = Usage({"worker": os.getpid(), "server 0": cluster.servers[0].process.pid})
        with Trainer(store, table, rows, pause) as trainer:
            rest(trainer, 2.0)  # warm-up
            usage.end("warm-up")
            one = rest(trainer)
            start = time.monotonic()
            usage.end("one server")
            for rank in (1, 2):
                process = stack.enter_context(joining(cluster.address, spare=True))
                usage.processes[f"server {rank}"] = process.process.pid
            wait_until(cluster.address, "the start", lambda status: len(status.servers) == 3)
            usage.end("two servers start")
            started = rest(trainer)
            usage.end("two more are idle")
            move = time.monotonic()
            store.rebalance()
            wait_until(cluster.address, "the move", lambda status: is_even(status, 3))
            usage.end("slots move to them")
            moved = rest(trainer)
            drain = time.monotonic()
            usage.end("three servers")
            cluster.drain(0)
            wait_until(cluster.address, "the drain", lambda status: is_even(status, 2) and not status.draining)
            usage.end("one is drained")
            drained = rest(trainer)
            end = time.monotonic()
            usage.end("two servers")
        check(cluster.servers == [] or cluster.servers[0].process.wait(60.0) == 0, "the drained server ends with 0")
        digest, steps = table.digest(), len(trainer.ends) - 1
    line = Timeline(trainer.ends)
    phases = [
        ("one server", one, start),
        ("two servers start", start, started),
        ("two more are idle", started, move),
        ("slots move to them", move, moved),
        ("three servers", moved, drain),
        ("one is drained", drain, drained),
        ("two servers", drained, end),
    ]
    report(line, phases)
    print("\n".join(usage.lines))
    print(f"{rows:,} rows of dim {dim}, pause of {arguments.pause:g} ms, {steps} steps, {conditions()}")
    compare("start of the servers", line, (one, start), start, started, (started, move))
    compare("move to them", line, (started, move), move, moved, (moved, drain))
    compare("both", line, (one, start), start, moved, (moved, drain))
    compare("drain", line, (moved, drain), drain, drained, (drained, end))
    if arguments.csv:
        rates = line.rates(line.start, end)
        text = "".join(f"{k * BIN_SECONDS:.1f},{rate:.0f}\n" for k, rate in enumerate(rates))
        arguments.csv.write_text(f"seconds,keys_per_second\n{text}")
    check(digest == digest_of_fixed(2, rows, dim, steps), "the digest is that of a run of fixed size")
    print("the digest is that of two servers from the beginning")


def report(line: Timeline, phases: list[tuple[str, float, float]]) -> None:
    """Print a table of phases."""
    print("| phase | seconds | thousand keys/s of a tenth of a second | longest step, ms |\n|---|---|---|---|")
    for name, begin, end in phases:
        rates = line.rates(begin, end) / 1e3 if end - begin > BIN_SECONDS else np.array([np.nan])
        print(f"| {name} | {end - begin:.2f} | {spread(list(rates))} | {line.longest(begin, end) * 1e3:.0f} |")


def compare(
    name: str, line: Timeline, before: tuple[float, float], begin: float, end: float, after: tuple[float, float]
) -> None:
    """Print the worst second of a change compared with those before and after it, and the longest step."""
    worst = min(line.seconds(begin, max(end, begin + 1.1)))
    former, later = (statistics.median(line.seconds(*period)) for period in (before, after))
    print(
        f"{name}: worst second / median second before {worst / former:.2f}, / afterwards {worst / later:.2f}; longest "
        f"step {line.longest(begin, end) * 1e3:.0f} ms (before {line.longest(*before) * 1e3:.0f})"
    )


# ---- the speed of a move ---------------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> None:
    """Move all rows to another server."""
    rows, dim = arguments.rows or 10_000_000, arguments.dim
    row_bytes = 16 if dim == 1 else 8 + 8 * dim
    rates = []
    for _ in range(arguments.rounds):
        with contextlib.ExitStack() as stack:
            copy_rate = arguments.copy_rate or NO_LIMIT
            cluster = stack.enter_context(local_cluster.running(1, copy_rate=copy_rate, timeout=120.0))
            store = stack.enter_context(shoal.connect(cluster.address, timeout=LIMIT_SECONDS))
            table = make_table(store, dim)
            fill(store, table, rows)
            digest = table.digest()
            other = stack.enter_context(joining(cluster.address))
            for what in ("join", "drain"):
                if what == "join":
                    wait_until(cluster.address, what, lambda status: len(status.servers) == 2)
                else:
                    cluster.drain(0)
                begin = time.monotonic()
                cpu = cpu_seconds(other.process.pid)
                before = servers_of(get_status(cluster.address))
                wait_until(
                    cluster.address,
                    what,
                    (lambda status: is_even(status, 2))
                    if what == "join"
                    else (lambda status: not servers_of(status).get(0, 0)),
                    0.02,
                )
                seconds = time.monotonic() - begin
                after = servers_of(get_status(cluster.address))
                moved = rows * (before.get(0, 0) - after.get(0, 0)) / sum(before.values())
                rates.append(moved * row_bytes / seconds / 1e6)
                print(
                    f"{what}: {moved:,.0f} rows in {seconds:.2f} s, {rates[-1]:.0f} MB/s; CPU of the server that takes "
                    f"them {cpu_seconds(other.process.pid) - cpu:.2f} s",
                    flush=True,
                )
            check(table.digest() == digest, "the rows are the same")
    print(f"{rows:,} rows of dim {dim}, {row_bytes} bytes each: {spread(rates)} MB/s; {conditions()}")


# ---- new copies ------------------------------------------------------------------------------------------------------


def copies(arguments: argparse.Namespace) -> None:
    """Train while a server dies and its copies are made again."""
    rows, dim, servers = arguments.rows or 10_000_000, arguments.dim, 3
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            local_cluster.running(servers, replicas=1, copy_rate=arguments.copy_rate, timeout=120.0)
        )
        store = stack.enter_context(shoal.connect(cluster.address, timeout=LIMIT_SECONDS))
        table = make_table(store, dim)
        wait_for_copies(cluster.address, servers, 1)
        fill(store, table, rows)
        with Trainer(store, table, rows, arguments.pause / 1e3) as trainer:
            rest(trainer, 2.0)
            before = rest(trainer)
            cluster._reports.put(None)  # no other server is started, whose start would take a core
            kill = time.monotonic()
            cluster.servers[1].process.kill()
            wait_until(cluster.address, "the failover", lambda status: any(one.arriving for one in status.streams))
            copy = time.monotonic()
            wait_until(
                cluster.address,
                "the copies",
                lambda status: all(arc.copies for arc in status.arcs) and bool(status.arcs),
            )
            copied = rest(trainer)
            end = time.monotonic()
        digest, steps = table.digest(), len(trainer.ends) - 1
    line = Timeline(trainer.ends)
    phases = [
        ("three servers", before, kill),
        ("one is killed", kill, copy),
        ("copies are made", copy, copied),
        ("two servers", copied, end),
    ]
    report(line, phases)
    print(f"{rows:,} rows of dim {dim}, one replica, {steps} steps, {conditions()}")
    during = np.mean(line.rates(copy, copied)) if copied - copy > BIN_SECONDS else np.nan
    for name, period in (("before", (before, kill)), ("afterwards", (copied, end))):
        less = 100 * (1 - during / np.median(line.rates(*period)))
        print(f"while copies are made: {less:.0f} % fewer keys per second than {name}")
    compare("copies", line, (before, kill), copy, copied, (copied, end))
    check(digest == digest_of_fixed(2, rows, dim, steps), "the digest is that of a run without the fault")
    print("the digest is that of two servers without a fault")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = {"resize": resize, "speed": speed, "copies": copies}
    parser.add_argument("what", nargs="?", choices=ways, default="resize")
    parser.add_argument("--rows", type=int, metavar="N", help="default: 10000000; resize: 2000000")
    parser.add_argument("--dim", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of speed (default: %(default)s)")
    parser.add_argument("--copy-rate", type=int, metavar="BYTES", help="default: the cluster's; speed: no limit")
    parser.add_argument("--pause", type=float, default=0.0, metavar="MS", help="of the worker after each step")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="resize: keys per second in each tenth of a second")
    arguments = parser.parse_args()
    ways[arguments.what](arguments)


if __name__ == "__main__":
    main()
