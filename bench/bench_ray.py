"""Clusters on Ray compared with those of `shoal launch`, on this machine.

    python bench/bench_ray.py train [--turns 5]      learning logistic regression, in turns; the time to start
    python bench/bench_ray.py killed [--faults 20]   a server's actor is killed: how long a worker is interrupted

`train`: two servers and two workers learn from the same log, passes of which are timed from barrier to barrier, five
seconds after the start, when Ray has started its own processes. In a turn without Ray none of its processes runs. CPU
seconds are those of all processes that the benchmark has started, Ray's own included, during the passes. The time to
start is that from nothing to the first barrier of the workers; for Ray also that of `ray.init` alone. The models are
compared: they have the same bits.

Messages have no keys in both cases: clusters on Ray have keys by default unless all addresses are loopback.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import shoal
from bench_failover import JOIN_SECONDS, Pusher
from copies import wait_for_copies
from figures import check, conditions
from shoal.cluster.launch.local_cluster import running
from shoal.tools import demo

SERVERS, WORKERS = 2, 2
EXAMPLES = 150_000
REST_SECONDS = 5.0  # before the passes: Ray still starts processes of its own
BATCH = 4096
OPTIMIZER = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)
WARM = "warm.tsv"
LOG = "train.tsv"


@dataclass
class Turn:
    """What a worker has measured."""

    began: float  # when all workers were ready, by time.time()
    seconds: float
    cpu_seconds: float
    digest: str


def used_cpu(root: int) -> float:
    """Return the CPU seconds of a process and of all that it has started and that still run."""
    found = 0.0
    benchmark = psutil.Process(root)
    for process in (benchmark, *benchmark.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def learn(store: shoal.Store, folder: str, passes: int, root: int) -> Turn:
    """Learn as one worker."""
    with shoal.LogisticRegression(OPTIMIZER, store) as model:
        store.barrier()
        began = time.time()
        first = shoal.read_criteo([Path(folder, WARM)], batch_size=BATCH)
        model.fit(first.split(store.rank, store.num_workers), progress=False)
        reader = shoal.read_criteo([Path(folder, LOG)], batch_size=BATCH)
        store.barrier()
        time.sleep(REST_SECONDS)
        cpu, start = used_cpu(root), time.perf_counter()
        for _ in range(passes):
            model.fit(reader.split(store.rank, store.num_workers), progress=False)
        store.barrier()
        seconds, cpu = time.perf_counter() - start, used_cpu(root) - cpu
        keys = np.sort(np.concatenate([keys for keys, _ in model.table.items()]))
        digest = hashlib.sha256(keys.tobytes() + model.table.pull(keys).tobytes()).hexdigest()
        store.barrier()
        return Turn(began, seconds, cpu, digest)


def work(address: str, rank: int, folder: str, passes: int) -> None:
    """Be a worker of a launched cluster."""
    with shoal.connect(address, workers=WORKERS, rank=rank, threads=1, timeout=JOIN_SECONDS) as store:
        turn = learn(store, folder, passes, os.getppid())
    print(turn.began, turn.seconds, turn.cpu_seconds, turn.digest)


def native_turn(folder: str, passes: int) -> tuple[float, Turn]:
    """Return the seconds to start and the figures of worker 0."""
    start = time.time()
    with running(SERVERS, workers=WORKERS, timeout=JOIN_SECONDS) as cluster:
        command = [sys.executable, __file__, "work", "--address", cluster.address, "--folder", folder]
        workers = [
            subprocess.Popen(
                [*command, "--passes", str(passes), "--rank", str(rank)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORKERS)
        ]
        began, seconds, cpu, digest = workers[0].communicate()[0].split()
        check(all(one.wait() == 0 for one in workers), "a worker has failed")
    turn = Turn(float(began), float(seconds), float(cpu), digest)
    return turn.began - start, turn


def ray_turn(folder: str, passes: int) -> tuple[float, float, Turn]:
    """Return the seconds to start Ray, all seconds to start, and the figures of worker 0."""
    import ray

    root = os.getpid()
    start = time.time()
    ray.init(
        "local", num_cpus=2 * (SERVERS + WORKERS), log_to_driver=False, logging_level="WARNING", include_dashboard=False
    )
    ready = time.time() - start
    try:
        with shoal.ray.start(
            shoal.ray.ShoalConfig(servers=SERVERS, timeout=JOIN_SECONDS, insecure=True), workers=WORKERS
        ) as cluster:

            @ray.remote(num_cpus=1)
            def work_on_ray(connection: shoal.ray.Connection, rank: int) -> tuple[float, float, float, str]:
                with connection.connect(rank=rank, workers=WORKERS, threads=1) as store:
                    turn = learn(store, folder, passes, root)
                return turn.began, turn.seconds, turn.cpu_seconds, turn.digest

            work = [work_on_ray.remote(cluster.connection, rank) for rank in range(WORKERS)]
            turn = Turn(*ray.get(work)[0])
    finally:
        ray.shutdown()
    return ready, turn.began - start, turn


def train(turns: int, passes: int) -> None:
    """Measure in turns."""
    with tempfile.TemporaryDirectory() as folder:
        planted = demo.PlantedModel(seed=1)
        demo.write_log(Path(folder, WARM), planted, 2 * BATCH, 1 << 40)
        demo.write_log(Path(folder, LOG), planted, EXAMPLES, 0)
        native, on_ray, init, starts, starts_on_ray = [], [], [], [], []
        for _ in range(turns):
            started, turn = native_turn(folder, passes)
            starts.append(started)
            native.append(turn)
            ready, started, turn = ray_turn(folder, passes)
            init.append(ready)
            starts_on_ray.append(started)
            on_ray.append(turn)
    check(len({turn.digest for turn in (*native, *on_ray)}) == 1, "the models differ")
    examples = EXAMPLES * passes
    for name, measured in (("native", native), ("ray", on_ray)):
        rates = np.array([examples / turn.seconds for turn in measured])
        cpu = np.array([turn.cpu_seconds for turn in measured])
        print(
            f"{name}: {np.median(rates):,.0f} examples/s (from {rates.min():,.0f} to {rates.max():,.0f}), "
            f"{np.median(cpu):.2f} CPU s (from {cpu.min():.2f} to {cpu.max():.2f})"
        )
    pairs = np.array([one.cpu_seconds / other.cpu_seconds for one, other in zip(on_ray, native, strict=True)])
    print(f"CPU with Ray / without: median {np.median(pairs):.3f}, from {pairs.min():.3f} to {pairs.max():.3f}")
    pairs = np.array([one.seconds / other.seconds for one, other in zip(on_ray, native, strict=True)])
    print(
        f"time with Ray / without, in pairs: median {np.median(pairs):.3f}, from {pairs.min():.3f} to {pairs.max():.3f}"
    )
    print(
        f"to start: native {np.median(starts):.2f} s, ray {np.median(starts_on_ray):.2f} s, of which ray.init "
        f"{np.median(init):.2f} s"
    )


def killed(faults: int, servers: int, seed: int) -> None:
    """Kill processes of servers' actors."""
    import ray

    from shoal.ray import servers as supervision

    supervision._MAX_RESTARTS = 10**6  # as often as there are faults
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
            victim = rng.choice([role for role in cluster.servers if role.place is not None])
            assert victim.place is not None
            began = time.monotonic()
            os.kill(victim.place.pid, signal.SIGKILL)
            seconds.append(pusher.interruption(began))
    ray.shutdown()
    ms = np.sort(seconds) * 1000
    print(
        f"killed: {len(ms)} faults, interruption median {np.median(ms):.0f} ms, p99 {np.percentile(ms, 99):.0f}, "
        f"minimum {ms[0]:.0f}, maximum {ms[-1]:.0f}; all rows are exact"
    )


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train", "killed", "work"], help="default: both")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--passes", type=int, default=12, metavar="N", help="default: %(default)s")
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="of killed; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "work":
        work(given.address, given.rank, given.folder, given.passes)
        return
    os.environ.update({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    if given.what in (None, "train"):
        train(given.turns, given.passes)
    if given.what in (None, "killed"):
        killed(given.faults, given.servers, given.seed)
    print(conditions())


if __name__ == "__main__":
    main()
