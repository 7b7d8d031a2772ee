"""Clusters on Ray compared with those of `shoal launch`, on this machine.

    python bench/bench_ray.py train [--turns 60]     learning logistic regression, in turns
    python bench/bench_ray.py start [--turns 5]      the time to start
    python bench/bench_ray.py killed [--faults 20]   a server's actor is killed: how long a worker is interrupted
    python bench/bench_ray.py idle [--seconds 20]    the CPU time of processes that wait

`train`: two clusters of two servers and two workers, one launched and one on Ray, learn from the same log, a few passes
of one and then of the other, timed from barrier to barrier. While the launched one learns, Ray's own processes are
stopped (SIGSTOP), and only the idle roles of its cluster remain. CPU seconds are those of the learning cluster, for Ray
with those of all its processes and of the driver's. The order alternates from pair to pair. The models are compared:
they have the same bits. Ray's workers have niceness 0, as the launched processes do, instead of 15.

`start`: from nothing to the first barrier of the workers; for Ray also `ray.init` alone.

Messages have no keys in both cases: clusters on Ray have keys by default unless all addresses are loopback.

`idle`: no role has anything to do for some seconds. Shown are the processes of both clusters, as many empty actors, and
Ray's own processes.

`killed`: as bench_failover.py, but the process of a server's actor is killed, and Ray starts the next one.
"""

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import shoal
from bench_failover import JOIN_SECONDS, Pusher
from chaos import wait_for_copies
from figures import check, conditions, cpu_seconds, spread
from shoal.cluster.launch.local_cluster import running
from shoal.tools.planted import PlantedModel, write_log

SERVERS, WORKERS = 2, 2
EXAMPLES = 150_000
REST_SECONDS = 10.0  # before the passes: Ray still starts processes of its own
WAKE_SECONDS = 0.5  # for Ray's processes to do what they have missed while they were stopped
BATCH = 4096
OPTIMIZER = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)
WARM = "warm.tsv"
LOG = "train.tsv"


class Learner:
    """What a worker does."""

    def __init__(self, store: shoal.Store, folder: str) -> None:
        self._store = store
        self._model = shoal.LogisticRegression(OPTIMIZER, store=store)
        store.barrier()
        self.began = time.time()
        self.fit(shoal.read_criteo([Path(folder, WARM)], batch_size=BATCH))
        self._reader = shoal.read_criteo([Path(folder, LOG)], batch_size=BATCH)

    def fit(self, reader: shoal.data.Reader) -> None:
        """Learn this worker's part of a log."""
        self._model.fit(reader.split(self._store.rank, self._store.num_workers), progress=False)

    def learn(self, passes: int) -> float:
        """Return the seconds of so many passes of all workers."""
        self._store.barrier()
        start = time.perf_counter()
        for _ in range(passes):
            self.fit(self._reader)
        self._store.barrier()
        return time.perf_counter() - start

    def digest(self) -> str:
        """Return the digest of the model's keys and weights."""
        table = self._model.table
        keys = np.sort(np.concatenate([keys for keys, _ in table.items()]))
        digest = hashlib.sha256(keys.tobytes() + table.pull(keys).tobytes()).hexdigest()
        self._store.barrier()
        return digest


class Workers(ABC):
    """The workers of a cluster."""

    @abstractmethod
    def call(self, method: str, *arguments: int) -> list[Any]:
        """Call a method of all learners at the same time."""

    @abstractmethod
    def processes(self) -> list[psutil.Process]:
        """Return the processes whose CPU seconds count, besides this one."""


class Launched(Workers):
    """Processes, each of which reads calls and prints results."""

    def __init__(self, address: str, folder: str) -> None:
        command = [sys.executable, __file__, "work", "--address", address, "--folder", folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._workers = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(WORKERS)]
        self.began = float(self.call("began")[0])
        self._processes = psutil.Process().children(recursive=True)

    def call(self, method: str, *arguments: int) -> list[Any]:
        """Call a method of all learners at the same time."""
        for worker in self._workers:
            assert worker.stdin is not None
            print(method, *arguments, file=worker.stdin, flush=True)
        return [worker.stdout.readline().strip() for worker in self._workers if worker.stdout is not None]

    def processes(self) -> list[psutil.Process]:
        """Return those of the cluster."""
        return self._processes

    def end(self) -> None:
        """Let the workers leave."""
        for worker in self._workers:
            worker.communicate()
            check(worker.wait() == 0, "a worker has failed")


def work(address: str, rank: int, folder: str) -> None:
    """Be a worker of a launched cluster."""
    with shoal.connect(address, workers=WORKERS, rank=rank, threads=1, timeout=JOIN_SECONDS) as store:
        learner = Learner(store, folder)
        for line in sys.stdin:
            method, *arguments = line.split()
            found = getattr(learner, method)
            print(found(*map(int, arguments)) if callable(found) else found, flush=True)


@contextlib.contextmanager
def launched(folder: str) -> Iterator[Launched]:
    """Start a cluster and its workers."""
    with running(SERVERS, workers=WORKERS, timeout=JOIN_SECONDS) as cluster:
        workers = Launched(cluster.address, folder)
        yield workers
        workers.end()


class OnRay(Workers):
    """Actors."""

    def __init__(self, cluster: shoal.ray.RayCluster, folder: str, others: list[psutil.Process]) -> None:
        import ray

        class Worker:
            def __init__(self, rank: int) -> None:
                self._store = cluster_connection.connect(rank=rank, workers=WORKERS, threads=1)
                self._learner = Learner(self._store, folder)

            def call(self, method: str, *arguments: int) -> Any:
                found = getattr(self._learner, method)
                return found(*arguments) if callable(found) else found

            def pid(self) -> int:
                return os.getpid()

            def close(self) -> None:
                self._store.close()

        cluster_connection = cluster.connection
        self._get = ray.get
        self._others = set(others)
        self._workers = [ray.remote(Worker).options(num_cpus=1).remote(rank) for rank in range(WORKERS)]
        self.began = self.call("began")[0]
        roles = [cluster.scheduler, *cluster.servers]
        self.roles = {role.joined.pid for role in roles if role.joined is not None}
        self.roles |= set(self._get([worker.pid.remote() for worker in self._workers]))

    def call(self, method: str, *arguments: int) -> list[Any]:
        """Call a method of all learners at the same time."""
        return self._get([worker.call.remote(method, *arguments) for worker in self._workers])

    def processes(self) -> list[psutil.Process]:
        """Return all that Ray has started."""
        return [one for one in psutil.Process().children(recursive=True) if one not in self._others]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop Ray's own processes."""
        own = [one for one in self.processes() if one.pid not in self.roles]
        for process in own:
            process.suspend()
        try:
            yield
        finally:
            for process in own:
                process.resume()

    def end(self) -> None:
        """Let the workers leave."""
        self._get([worker.close.remote() for worker in self._workers])


@contextlib.contextmanager
def on_ray(folder: str, others: list[psutil.Process]) -> Iterator[tuple[float, OnRay]]:
    """Start Ray, a cluster and its workers; yield also when Ray was ready, by time.time()."""
    import ray

    ray.init(
        "local",
        num_cpus=2 * (SERVERS + WORKERS),
        log_to_driver=False,
        logging_level="WARNING",
        include_dashboard=False,
        _system_config={"worker_niceness": 0},
    )
    ready = time.time()
    try:
        config = shoal.ray.ShoalConfig(servers=SERVERS, timeout=JOIN_SECONDS, insecure=True)
        with shoal.ray.start(config, workers=WORKERS) as cluster:
            workers = OnRay(cluster, folder, others)
            yield ready, workers
            workers.end()
    finally:
        ray.shutdown()


def write_logs(folder: str) -> None:
    """Draw what is learned."""
    planted = PlantedModel(seed=1)
    write_log(Path(folder, WARM), planted, 2 * BATCH, 1 << 40)
    write_log(Path(folder, LOG), planted, EXAMPLES, 0)


def used_cpu(workers: Workers) -> float:
    """Return the CPU seconds of a cluster, and of this process, so far."""
    found = 0.0
    for pid in (os.getpid(), *(process.pid for process in workers.processes())):
        with contextlib.suppress(OSError):  # it has ended
            found += cpu_seconds(pid)
    return found


def measure(workers: Workers, passes: int) -> tuple[float, float]:
    """Return seconds and CPU seconds."""
    before = used_cpu(workers)
    seconds = float(workers.call("learn", passes)[0])
    return seconds, used_cpu(workers) - before


def train(turns: int, passes: int) -> None:
    """Measure in turns."""
    native, ray_turns = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_logs(folder)
        with launched(folder) as one, on_ray(folder, psutil.Process().children(recursive=True)) as (_, other):
            time.sleep(REST_SECONDS)
            for turn in range(turns):
                for is_native in (turn % 2 == 0, turn % 2 == 1):
                    if is_native:
                        with other.stopped():
                            native.append(measure(one, passes))
                    else:
                        time.sleep(WAKE_SECONDS)
                        ray_turns.append(measure(other, passes))
            check(len({*one.call("digest"), *other.call("digest")}) == 1, "the models differ")
    examples = EXAMPLES * passes
    for name, measured in (("native", native), ("ray", ray_turns)):
        rates = [examples / seconds for seconds, _ in measured]
        print(f"{name}: {spread(rates)} examples/s, {spread([cpu for _, cpu in measured], 3)} CPU s a turn")
    rng = np.random.default_rng(0)
    for what, column in (("time", 0), ("CPU", 1)):
        pairs = np.array([a[column] / b[column] for a, b in zip(ray_turns, native, strict=True)])
        medians = np.median(rng.choice(pairs, (10_000, len(pairs))), axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        print(
            f"{what} with Ray / without, {turns} pairs: median {np.median(pairs):.3f} (95 % of resampled medians from "
            f"{low:.3f} to {high:.3f}), quartiles {np.percentile(pairs, 25):.3f} and {np.percentile(pairs, 75):.3f}"
        )


def start(turns: int) -> None:
    """Measure the time to start, in turns."""
    native, with_ray, init = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        write_logs(folder)
        for _ in range(turns):
            begun = time.time()
            with launched(folder) as one:
                native.append(one.began - begun)
            begun = time.time()
            with on_ray(folder, []) as (ready, other):
                init.append(ready - begun)
                with_ray.append(other.began - begun)
    print(
        f"seconds to start, {turns} turns: native {spread(native, 2)}, ray {spread(with_ray, 2)}, of which ray.init "
        f"{spread(init, 2)}"
    )


def killed(faults: int, servers: int, seed: int) -> None:
    """Kill processes of servers' actors."""
    import ray

    from shoal.cluster.launch import supervisor

    supervisor._MAX_RESTARTS = 10**6  # as often as there are faults
    rng = random.Random(seed)
    seconds = []
    ray.init("local", num_cpus=2 * servers, log_to_driver=False, logging_level="WARNING", include_dashboard=False)
    config = shoal.ray.ShoalConfig(servers=servers, replicas=1, timeout=JOIN_SECONDS, insecure=True)
    with (
        shoal.ray.start(config) as cluster,
        cluster.connection.connect(consistency=shoal.ASP()) as store,
        Pusher(store, rng.randrange(10**6)) as pusher,
    ):
        for _ in range(faults):
            wait_for_copies(cluster.address, servers, 1)
            time.sleep(rng.uniform(0.2, 1.0))
            victim = rng.choice([role for role in cluster.servers if role.joined is not None])
            assert victim.joined is not None
            began = time.monotonic()
            os.kill(victim.joined.pid, signal.SIGKILL)
            seconds.append(pusher.interruption(began))
    ray.shutdown()
    ms = np.sort(seconds) * 1000
    print(
        f"killed: {len(ms)} faults, interruption median {np.median(ms):.0f} ms, p99 {np.percentile(ms, 99):.0f}, "
        f"minimum {ms[0]:.0f}, maximum {ms[-1]:.0f}; all rows are exact"
    )


def shares(processes: list[psutil.Process], seconds: float) -> dict[int, float]:
    """Return what part of a core each process takes that is at rest, by its id."""
    before = {process.pid: cpu_seconds(process.pid) for process in processes}
    time.sleep(seconds)
    return {pid: (cpu_seconds(pid) - used) / seconds for pid, used in before.items() if psutil.pid_exists(pid)}


def idle(seconds: float) -> None:
    """Measure processes at rest."""
    import ray

    class Empty:
        def pid(self) -> int:
            return os.getpid()

    def show(what: str, found: list[float]) -> None:
        print(f"{what}: {len(found)} processes, {spread([100 * one for one in found], 2)} % of a core each")

    count = 1 + SERVERS + WORKERS
    with tempfile.TemporaryDirectory() as folder:
        write_logs(folder)
        with launched(folder) as native:
            others = psutil.Process().children(recursive=True)
            time.sleep(WAKE_SECONDS)
            show("a launched cluster", list(shares(native.processes(), seconds).values()))
            with on_ray(folder, others) as (_, workers):
                empty = [ray.remote(Empty).options(num_cpus=0).remote() for _ in range(count)]
                pids = set(ray.get([one.pid.remote() for one in empty]))
                time.sleep(REST_SECONDS)
                found = shares(workers.processes(), seconds)
                show("a cluster on Ray", [found[pid] for pid in workers.roles])
                show("empty actors", [found[pid] for pid in pids])
                own = [one for pid, one in found.items() if pid not in workers.roles | pids]
                print(f"Ray's own {len(own)} processes: {100 * sum(own):.2f} % of a core in all")


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train", "start", "killed", "idle", "work"], help="default: all")
    parser.add_argument("--turns", type=int, metavar="N", help="default: 60 of train, 5 of start")
    parser.add_argument("--passes", type=int, default=3, metavar="N", help="in a turn; default: %(default)s")
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of idle; default: %(default)s")
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="of killed; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "work":
        work(given.address, given.rank, given.folder)
        return
    os.environ.update({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    if given.what in (None, "train"):
        train(given.turns or 60, given.passes)
    if given.what in (None, "start"):
        start(given.turns or 5)
    if given.what in (None, "killed"):
        killed(given.faults, given.servers, given.seed)
    if given.what in (None, "idle"):
        idle(given.seconds)
    print(conditions())


if __name__ == "__main__":
    main()
