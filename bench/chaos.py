"""Kill and stop the processes of a cluster while workers train on it, and keep a ledger of every push.

    python bench/chaos.py --seconds 60                                  # a cluster of its own on this machine
    python bench/chaos.py --seconds 3600 --faults server,stop --seed 7 --consistency asp
    python bench/chaos.py --seconds 3600 --consistency bsp,ssp,asp --cache --tier    # three jobs, caches, rows on disk
    python bench/chaos.py --connect tcp://10.0.0.1:5570 --seconds 3600 --pause 60 --command \
        'kubectl delete pod --grace-period 0 --force shoal-server-$(shuf -i 0-2 -n 1)'    # a cluster of yours

Each worker pushes small whole numbers to its own keys (SGD of rate 1, so a row is the sum of what was pushed), ends the
clock, pulls all of its keys, and compares them with its ledger, a file that survives it. A push that was lost or
applied twice is found one step later. The rows of a worker that was killed must contain every step that it had
finished, and nothing that it had not begun. Each run makes a table of its own, which stays in a cluster of yours.

Faults, at random moments from the printed seed: ``server``, ``scheduler`` and ``worker`` kill a process with SIGKILL,
``stop`` stops a server with SIGSTOP, which the launcher kills when it has been declared dead. Another process is
started in its place. ``resize`` adds a server, and the next time has it leave. In a cluster of yours, faults are
``worker``, and ``command`` if ``--command`` names one: a command of the shell that kills, stops or cuts off a server or
the scheduler; what supervises your processes must start another one. After each fault the program waits until every
worker has made two steps, prints how long that took, and waits until there are as many servers and copies as in the
beginning. The exit status is 1 if a row is wrong, a worker or the command failed, no step was made for ``--limit``
seconds, or servers or copies are missing after so long.

Each consistency of several has a job of that name, with so many workers, on the same table. With ``--cache`` the
workers of SSP and ASP keep rows for a clock; what a worker that is killed held back may be lost with it. With
``--tier`` rows have 512 weights, and each server keeps 1 MiB of them in memory, the others on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt

import shoal
from shoal.cluster.launch import local_cluster, supervisor
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import LocalCluster
from shoal.cluster.protocol.curve import Keys
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from shoal.config import ServerConfig
from shoal.consistency import Consistency

KEYS = 512  # of a worker
FAULTS = ("server", "stop", "scheduler", "worker", "resize")
TIER_MEMORY = "1MiB"
HELD_BACK = 1  # clocks, with a cache
MODES: dict[str, Consistency] = {"bsp": shoal.BSP(), "ssp": shoal.SSP(2), "asp": shoal.ASP()}
STEPS, CLOCK, SLOWEST, WRONG, STOP = range(5)  # the numbers of a ledger; STOP: the clock at which to end, or 0
MORE_CLOCKS = 10  # from the request to end to the last clock, which is the same for all workers
COPIES_SECONDS = 60.0  # until all copies are made, by default


def get_status(address: str, keys: Keys | None = None) -> StatusReply:
    """Return the status of the cluster whose scheduler is at an address."""
    with SchedulerClient(address, "observer", keys=keys) as client:
        return client.call(GetStatus(), StatusReply, COPIES_SECONDS)


def wait_for_copies(
    address: str, servers: int, replicas: int, keys: Keys | None = None, limit: float = COPIES_SECONDS
) -> float:
    """Wait until so many servers are members and each arc has its copies; return the seconds."""
    start = time.monotonic()
    while True:
        status = get_status(address, keys)
        missing = [arc.first_slot for arc in status.arcs if len(arc.copies) < replicas]
        if status.arcs and not missing and len(status.servers) == servers:
            return time.monotonic() - start
        if time.monotonic() - start > limit:
            raise SystemExit(
                f"after {limit:.0f} s {len(status.servers)} of {servers} servers are members, and "
                f"{len(missing)} of {len(status.arcs)} arcs have fewer than {replicas} copies: {status}"
            )
        time.sleep(0.05)


class Ledger:
    """What a worker has pushed, in a file: sums that it began to push, sums that it has seen applied, and numbers."""

    def __init__(self, path: Path, rank: int, life: int) -> None:
        if not path.exists():
            np.zeros(2 * KEYS + 5).tofile(path)
        self.all: npt.NDArray[np.float64] = np.memmap(path, np.float64, "r+")
        self.begun, self.done, self.numbers = self.all[:KEYS], self.all[KEYS : 2 * KEYS], self.all[2 * KEYS :]
        self.keys = np.arange(KEYS, dtype=np.uint64) + np.uint64((rank << 40) + (life << 20))
        self.name = f"worker {rank}, life {life}"


def ledgers(directory: Path, rank: int) -> list[Ledger]:
    """Return the ledgers of a worker's lives."""
    lives = sorted(int(path.suffix[1:]) for path in directory.glob(f"{rank}.*"))
    return [Ledger(directory / f"{rank}.{life}", rank, life) for life in lives]


def sums_of(table: shoal.Table, ledger: Ledger) -> npt.NDArray[np.float64]:
    """Return what was pushed to each key; NaN where the weights of a row differ, though all have been pushed alike."""
    rows = -table.pull(ledger.keys).astype(np.float64)
    return np.where((rows == rows[:, :1]).all(1), rows[:, 0], np.nan)


def work(arguments: argparse.Namespace) -> None:
    """Push, tick, pull and compare until the ledger says stop."""
    *former, ledger = ledgers(arguments.directory, arguments.rank)
    cached = arguments.cache and arguments.consistency != "bsp"
    rng = np.random.default_rng([arguments.seed, arguments.rank, len(former)])
    with shoal.connect(
        arguments.connect,
        consistency=MODES[arguments.consistency],
        job=arguments.job,
        workers=arguments.workers,
        rank=arguments.rank % arguments.workers,
        timeout=2 * arguments.limit,
        curve=arguments.curve,
        cache=shoal.Cache(rows=10 * KEYS, staleness=HELD_BACK) if cached else None,
    ) as store:
        table = store.table(f"chaos-{arguments.directory.name}", dim=arguments.dim, optimizer=shoal.SGD(lr=1.0))
        unsent = deque([ledger.done.copy()] * (2 + HELD_BACK if cached else 0))

        def compare(lives: list[Ledger]) -> None:
            for one in lives:
                rows = sums_of(table, one)
                bad = np.flatnonzero(~((rows >= one.done) & (rows <= one.begun)))
                if len(bad):
                    at = bad[0]
                    ledger.numbers[WRONG] += len(bad)
                    limits = f"{one.done[at]:.0f} to {one.begun[at]:.0f}"
                    print(f"{one.name}: key {one.keys[at]} has {rows[at]:.0f}, not {limits}", flush=True)

        while not 0 < ledger.numbers[STOP] <= store.clock:
            start = time.monotonic()
            pushes = []
            for _ in range(rng.integers(1, 4)):
                which = rng.integers(KEYS, size=rng.integers(1, 100))
                amounts = rng.integers(1, 4, len(which)).astype(np.float32)
                np.add.at(ledger.begun, which, amounts)
                pushes.append(table.push(ledger.keys[which], np.repeat(amounts[:, None], arguments.dim, 1)))
            for push in pushes:
                push.result()
            store.tick()
            rows = sums_of(table, ledger)
            wrong = int((rows != ledger.begun).sum())
            if wrong:
                at = int(np.flatnonzero(rows != ledger.begun)[0])
                print(f"{ledger.name}: key {ledger.keys[at]} has {rows[at]:.0f} in place of {ledger.begun[at]:.0f}")
                ledger.begun[:] = rows  # so that it counts once
            unsent.append(ledger.begun.copy())
            ledger.done[:] = unsent.popleft()
            ledger.numbers[WRONG] += wrong
            ledger.numbers[SLOWEST] = max(ledger.numbers[SLOWEST], time.monotonic() - start)
            ledger.numbers[CLOCK] = store.clock
            ledger.numbers[STEPS] += 1
            time.sleep(rng.exponential(arguments.think))
        compare([*former, ledger])
        store.barrier()  # no worker leaves while another one waits for its ticks


class Workers:
    """The processes of the workers."""

    def __init__(self, address: str, arguments: argparse.Namespace, directory: Path) -> None:
        self.address, self.arguments, self.directory = address, arguments, directory
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.modes = arguments.consistency.split(",")
        for rank in range(arguments.workers * len(self.modes)):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a worker, in another life."""
        Ledger(self.directory / f"{rank}.{len(ledgers(self.directory, rank))}", rank, 0)
        its = self.arguments
        command = [sys.executable, __file__, "--work", "--connect", self.address, "--rank", str(rank)]
        mode = self.modes[rank // its.workers]
        command += ["--workers", str(its.workers), "--consistency", mode, "--seed", str(its.seed)]
        command += ["--limit", str(its.limit), "--think", str(its.think), "--dim", str(its.dim)]
        if len(self.modes) > 1:
            command += ["--job", mode]
        if its.cache:
            command += ["--cache"]
        if its.curve:
            command += ["--curve", its.curve]
        self.processes[rank] = subprocess.Popen([*command, "--directory", str(self.directory)])

    def kill(self, rank: int) -> None:
        """Kill a worker and start another one in its place."""
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.start(rank)

    def steps(self) -> list[float]:
        """Return the steps of each worker's present life."""
        return [float(ledgers(self.directory, rank)[-1].numbers[STEPS]) for rank in self.processes]

    def wait_for_steps(self, count: int = 2) -> float:
        """Wait until every worker has made so many steps more; return the seconds."""
        start, before = time.monotonic(), self.steps()
        while any(now < old + count for now, old in zip(self.steps(), before, strict=True)):
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"worker {rank} ended with status {process.returncode}")
            if time.monotonic() - start > self.arguments.limit:
                raise SystemExit(f"no step for {self.arguments.limit:.0f} s: steps {before}, now {self.steps()}")
            time.sleep(0.005)
        return time.monotonic() - start

    def finish(self) -> int:
        """Let all workers compare everything and end; return the number of wrong rows."""
        present = [ledgers(self.directory, rank)[-1] for rank in sorted(self.processes)]
        for first in range(0, len(present), self.arguments.workers):
            job = present[first : first + self.arguments.workers]
            last = max(ledger.numbers[CLOCK] for ledger in job) + MORE_CLOCKS
            for ledger in job:
                ledger.numbers[STOP] = last
        statuses = [process.wait(2 * self.arguments.limit) for process in self.processes.values()]
        lives = [life for rank in self.processes for life in ledgers(self.directory, rank)]
        wrong = int(sum(life.numbers[WRONG] for life in lives))
        steps = int(sum(life.numbers[STEPS] for life in lives))
        slowest = max(float(life.numbers[SLOWEST]) for life in lives)
        print(f"{steps} steps, the slowest {slowest * 1e3:.0f} ms; {wrong} wrong rows; exit statuses {statuses}")
        return wrong + sum(status != 0 for status in statuses)

    def end(self) -> None:
        """Kill all."""
        for process in self.processes.values():
            process.kill()
            process.wait()


class Guest:
    """The server that joins and leaves."""

    def __init__(self, cluster: LocalCluster, members: int, tier: str | None) -> None:
        self.cluster, self.tier = cluster, tier
        self.rank = members  # the first one that no other server has
        self.process: ChildProcess | None = None
        self.former: list[ChildProcess] = []

    def come_or_go(self) -> str:
        """Join, or leave; return what was done."""
        if self.process is None:
            config = ServerConfig(scheduler=self.cluster.address, tier=self.tier)
            self.process = local_cluster.start_role("server", config, lambda *_: None)
            return "a server joins"
        self.cluster.drain(self.rank)
        self.former.append(self.process)
        self.process = None
        return "a server leaves"

    def end(self) -> None:
        """End it, if it is a member; no former one has failed."""
        if self.process is not None:
            self.process.end(0.0)
        for process in self.former:
            if not process.wait(COPIES_SECONDS) or process.returncode:
                raise SystemExit(f"{process.describe()}, which was to leave, has status {process.returncode}")


def strike(fault: str, cluster: LocalCluster | None, guest: Guest | None, workers: Workers, rng: random.Random) -> str:
    """Do a fault; return what was done."""
    if fault == "resize":
        assert guest is not None
        return guest.come_or_go()
    if fault == "command":
        done = subprocess.run(workers.arguments.command, shell=True, check=False)
        if done.returncode:
            raise SystemExit(f"the command ended with status {done.returncode}: {workers.arguments.command}")
        return "command"
    if fault == "worker" or cluster is None:
        rank = rng.choice(sorted(workers.processes))
        workers.kill(rank)
        return f"worker {rank} killed"
    if fault == "scheduler":
        assert cluster.scheduler is not None
        cluster.scheduler.process.kill()
        return "scheduler killed"
    process = rng.choice([child.process for child in cluster.servers if child.process.poll() is None])
    process.send_signal(signal.SIGKILL if fault == "server" else signal.SIGSTOP)
    return f"server of process {process.pid} {'killed' if fault == 'server' else 'stopped'}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--connect", metavar="ADDRESS", help="of a scheduler; default: a cluster on this machine")
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--consistency", default="bsp", metavar="LIST", help="some of bsp,ssp,asp (%(default)s)")
    parser.add_argument("--cache", action="store_true", help="the workers keep rows, but for bsp")
    parser.add_argument("--tier", action="store_true", help="the servers keep rows on disk, in the temporary directory")
    parser.add_argument("--curve", metavar="DIR", help="directory of the keys of the cluster")
    parser.add_argument("--command", help="of the shell, which does a fault to the cluster of --connect")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="until all goes on (%(default)s)")
    parser.add_argument("--think", type=float, default=0.0, metavar="SECONDS", help="mean between steps (%(default)s)")
    several = f"some of {','.join(FAULTS)}, or an empty text; with --connect: of worker,command (default: all)"
    parser.add_argument("--faults", metavar="LIST", help=several)
    parser.add_argument("--pause", type=float, default=3.0, metavar="SECONDS", help="mean between faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments (default: a new one)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--dim", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    if not set(arguments.consistency.split(",")) <= set(MODES):
        parser.error(f"--consistency takes some of {', '.join(MODES)}, not {arguments.consistency}")
    if arguments.tier and arguments.connect:
        parser.error("--tier is for a cluster on this machine: start the servers of yours with one")
    arguments.dim = 512 if arguments.tier else 1
    faults = [fault for fault in (arguments.faults or "").split(",") if fault]
    if arguments.command and not arguments.connect:
        parser.error("--command is for a cluster of yours: pass its address with --connect")
    possible = FAULTS if arguments.connect is None else ("worker", "command") if arguments.command else ("worker",)
    if arguments.faults is None:
        faults = list(possible)
    elif not set(faults) <= set(possible):
        parser.error(f"--faults takes some of {', '.join(possible)} here, not {arguments.faults}")
    keys = Keys.load(arguments.curve, "worker") if arguments.curve else None
    print(f"seed {arguments.seed}, load {os.getloadavg()[0]:.1f}", flush=True)
    rng = random.Random(arguments.seed)
    with contextlib.ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        cluster, guest = None, None
        address = arguments.connect
        if address is None:
            supervisor._MAX_RESTARTS = 10**6  # as often as there are faults
            tier = f"{undo.enter_context(tempfile.TemporaryDirectory())}:{TIER_MEMORY}" if arguments.tier else None
            cluster = undo.enter_context(
                local_cluster.running(
                    arguments.servers, workers=arguments.workers, replicas=arguments.replicas, tier=tier
                )
            )
            address = cluster.address
            guest = Guest(cluster, arguments.servers, tier)
            undo.callback(guest.end)
        status = get_status(address, keys)
        servers, replicas = len(status.servers), status.replicas
        if "command" in faults and not replicas:
            parser.error(f"the cluster at {address} keeps no copies: start its scheduler with --replicas 1")
        workers = Workers(address, arguments, directory)
        undo.callback(workers.end)
        workers.wait_for_steps()
        end = time.monotonic() + arguments.seconds
        waits: dict[str, list[float]] = {}
        while time.monotonic() < end:
            time.sleep(min(rng.expovariate(1 / arguments.pause), max(0.0, end - time.monotonic())))
            if faults and time.monotonic() < end:
                fault = rng.choice(faults)
                what = strike(fault, cluster, guest, workers, rng)
                seconds = workers.wait_for_steps()
                waits.setdefault(fault, []).append(seconds)
                print(f"{what}: all workers went on after {seconds * 1e3:.0f} ms", flush=True)
                members = servers + bool(guest and guest.process)
                wait_for_copies(address, members, replicas, keys, arguments.limit)
            else:
                workers.wait_for_steps()
        for fault, seconds_of in sorted(waits.items()):
            middle, worst = statistics.median(seconds_of), max(seconds_of)
            print(
                f"{fault}: {len(seconds_of)} times, all went on after {middle * 1e3:.0f} ms, at most {worst * 1e3:.0f}"
            )
        sys.exit(1 if workers.finish() else 0)


if __name__ == "__main__":
    main()
