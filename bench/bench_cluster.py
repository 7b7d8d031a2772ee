"""A cluster on loopback, one server and one worker process, compared with raw pyzmq and the local store.

    python bench/bench_cluster.py [--rows 1000000] [--rounds 5] [--batches 1000 10000 100000]

Batches are sorted, unique keys of existing rows; dim 1 uses FTRL, dim 16 Adagrad; the consistency is ASP. These take
turns within one run:

    local   the store in this process: table and kernel alone, one thread
    raw     pyzmq moves the same bytes, header frame included, in one message each way: a Python loop that reads none of
            them replies always from the same memory; the worker copies the reply into its rows
    read    the same, and each side reads every byte that it received once: shows the cost of reading
    shoal   a worker's calls, a data loop and a table: checksums, exactly-once windows, optimizer steps

Each is measured with one request at a time, and with four in flight. Rates are millions of keys a second, median
(minimum-maximum); latency is that of a call in microseconds; CPU time is in nanoseconds a key, of the worker's and of
the server's process. Then pulls are repeated while a Python thread of the server computes without a pause. Every
measurement checks its result.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil
import zmq

import shoal
from figures import check, spread
from shoal import _core
from shoal.cluster.protocol.slot_map import cut_evenly
from shoal.cluster.server.data_loop import start_loop
from shoal.cluster.worker.calls import WorkerIdentity
from shoal.cluster.worker.channel import Channel
from shoal.cluster.worker.remote_shard import RemoteShard
from shoal.cluster.worker.requests import Requests
from shoal.table.shard import LocalShard
from shoal.table.spec import TableSpec

SLOTS = 1024
JOB = 1
TABLES = {
    dim: TableSpec(name=f"dim {dim}", dim=dim, optimizer=optimizer, init=shoal.Zeros(), dtype="float32", seed=0)
    for dim, optimizer in {1: shoal.FTRL(l1=1.0), 16: shoal.Adagrad(lr=0.05)}.items()
}


# ---- the server's process --------------------------------------------------------------------------------------------


def serve(threads: int, busy: bool) -> None:
    """Serve a table of each dim with some data loops, and raw messages, until standard input ends."""
    _core.keep_freed_memory()  # as a server's process does; this also helps the raw peer, which is in the same process
    context = zmq.Context()
    where = cut_evenly(1, SLOTS, [(f"endpoint {k}", 0) for k in range(threads)])
    services = [service_of(where.arc_ranges(endpoint.id)) for endpoint in where.endpoints]
    loops = [start_loop(service, context, "tcp://127.0.0.1:0") for service in services]
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    threading.Thread(target=echo, args=(router,), daemon=True).start()
    if busy:
        threading.Thread(target=compute, daemon=True).start()
    print(router.getsockopt_string(zmq.LAST_ENDPOINT), *(loop.address for loop in loops), flush=True)
    sys.stdin.read()


def service_of(arcs: list[tuple[int, int]]) -> _core.Service:
    """Make the service of an endpoint's arcs."""
    service = _core.Service(SLOTS, arcs)
    service.set_map(1, arcs)
    service.start_job(JOB, "asp")
    service.admit(0, 1, 0)
    for dim, spec in TABLES.items():
        service.add_table(
            dim,
            dim=dim,
            dtype=spec.dtype,
            optimizer=type(spec.optimizer).__name__,
            params=spec.optimizer.params(),
            init=type(spec.init).__name__,
            init_parameter=spec.init.parameter,
            init_seed=spec.init.init_seed,
            seed=spec.seed,
        )
    return service


def echo(router: zmq.Socket) -> None:
    """Answer each message with a header and as many bytes as its first 8 request; read it if its next one says so."""
    replies: dict[int, bytearray] = {}
    while True:
        peer, header, *payload = router.recv_multipart(copy=False)
        size = int.from_bytes(header.buffer[:8], "little")
        if header.buffer[8]:
            for frame in payload:
                read_bytes(frame.buffer)
        if size not in replies:
            replies[size] = bytearray(size)
        frames = [peer, bytes(64)] + ([replies[size]] if size else [])
        router.send_multipart(frames, copy=False)


def read_bytes(buffer: memoryview) -> None:
    """Read every byte of some whole words."""
    np.bitwise_xor.reduce(np.frombuffer(buffer, np.uint32))


def compute() -> None:
    """Compute in Python without a pause, holding the interpreter's lock."""
    x = 0
    while True:
        x += 1


@contextlib.contextmanager
def server(threads: int, busy: bool = False) -> Iterator[tuple[psutil.Process, str, list[str]]]:
    """Start the server's process: (process, address of the raw socket, addresses of the data loops)."""
    program = [sys.executable, __file__, "--serve", "--threads", str(threads), *(["--busy"] if busy else [])]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            raw, *loops = process.stdout.readline().split()
            yield psutil.Process(process.pid), raw, loops
        finally:
            process.stdin.close()


# ---- the worker ------------------------------------------------------------------------------------------------------


class Shoal:
    """A worker's tables without the scheduler: the slot map is given."""

    def __init__(self, loops: list[str]) -> None:
        where = cut_evenly(1, SLOTS, [(address, 0) for address in loops])
        self.channel = Channel(Requests(WorkerIdentity(0, 1, JOB), where))
        self.shards = {dim: RemoteShard(self.channel, dim, spec) for dim, spec in TABLES.items()}

    def pull(self, batch: _core.KeyBatch, rows: np.ndarray) -> Callable[[], None]:
        """Begin a pull; returns the function that waits for it."""
        return self.shards[rows.shape[1]].pull(batch, rows).result

    def push(self, batch: _core.KeyBatch, grads: np.ndarray) -> Callable[[], None]:
        """Begin a push."""
        return self.shards[grads.shape[1]].push(batch, grads).result


class Raw:
    """The same bytes by pyzmq alone."""

    def __init__(self, address: str, *, reads: bool = False) -> None:
        self.reads = reads
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def _ask(self, frames: list, size: int) -> None:
        header = size.to_bytes(8, "little") + bytes([self.reads]) + bytes(55)
        self.socket.send_multipart([header, *frames], copy=False)

    def pull(self, batch: _core.KeyBatch, rows: np.ndarray) -> Callable[[], None]:
        """Send the hashes; the values of the reply are copied to their rows."""
        self._ask([batch.hashes], rows.nbytes)

        def wait() -> None:
            _, values = self.socket.recv_multipart(copy=False)
            if self.reads:
                read_bytes(values.buffer)
            memoryview(rows).cast("B")[:] = values.buffer

        return wait

    def push(self, batch: _core.KeyBatch, grads: np.ndarray) -> Callable[[], None]:
        """Send hashes and gradients."""
        self._ask([batch.hashes, grads], 0)
        return lambda: check(len(self.socket.recv_multipart(copy=False)) == 1, "an unexpected reply")


class Local:
    """The store in this process."""

    def __init__(self) -> None:
        self.workers = _core.ThreadPool(1)
        self.shards = {dim: LocalShard.of(spec, SLOTS, self.workers) for dim, spec in TABLES.items()}

    def pull(self, batch: _core.KeyBatch, rows: np.ndarray) -> Callable[[], None]:
        """Pull at once."""
        self.shards[rows.shape[1]].pull(batch, rows)
        return lambda: None

    def push(self, batch: _core.KeyBatch, grads: np.ndarray) -> Callable[[], None]:
        """Push at once."""
        self.shards[grads.shape[1]].push(batch, grads)
        return lambda: None


@dataclass
class Figures:
    """The results of the rounds of one line."""

    rates: list[float] = field(default_factory=list)  # keys a second
    latencies: list[float] = field(default_factory=list)  # seconds
    worker_cpu: list[float] = field(default_factory=list)  # seconds a key
    server_cpu: list[float] = field(default_factory=list)

    def rate(self) -> float:
        """Return the median."""
        return statistics.median(self.rates)

    def latency(self, percent: float) -> float:
        """Return a percentile in microseconds."""
        return float(np.percentile(self.latencies, percent)) * 1e6

    def cpu(self) -> str:
        """Format nanoseconds a key: worker + server."""
        return " + ".join(f"{statistics.median(each) * 1e9:.1f}" for each in (self.worker_cpu, self.server_cpu))


def measure(begin: Callable, batches: list, arrays: list, depth: int, seconds: float, of: psutil.Process) -> tuple:
    """Send requests for some time with ``depth`` in flight: keys, seconds, latencies, CPU seconds of both processes."""
    under_way: deque = deque()
    latencies: list[float] = []
    keys = 0

    def finish() -> None:
        start, wait = under_way.popleft()
        wait()
        latencies.append(time.perf_counter() - start)

    here, there = time.process_time(), sum(of.cpu_times()[:2])
    start = time.perf_counter()
    at = 0
    while time.perf_counter() - start < seconds:
        while len(under_way) < depth:
            k = at % len(batches)
            under_way.append((time.perf_counter(), begin(batches[k], arrays[at % len(arrays)])))
            keys += len(batches[k])
            at += 1
        finish()
    while under_way:
        finish()
    spent = time.perf_counter() - start
    return keys, spent, latencies, time.process_time() - here, sum(of.cpu_times()[:2]) - there


class Bench:
    """Batches, the tables that hold their keys, and rounds in turns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.local = Local()
        random = np.random.default_rng(4)
        self.keys = random.permutation(options.rows).astype(np.uint64)
        self.random = random

    def batches(self, n: int) -> list[_core.KeyBatch]:
        """Make some batches of n existing keys."""
        count = max(4, min(64, 400_000 // n))
        return [
            _core.KeyBatch(self.random.choice(self.keys, n, replace=False), SLOTS, self.local.workers)
            for _ in range(count)
        ]

    def fill(self, system: "Shoal | Local") -> None:
        """Create the rows."""
        for dim in TABLES:
            for start in range(0, len(self.keys), 100_000):
                some = _core.KeyBatch(self.keys[start : start + 100_000], SLOTS, self.local.workers)
                system.push(some, np.full((len(some), dim), 0.3, np.float32))()

    def check(self, system: Shoal) -> None:
        """Compare the bits of both stores, which have received the same pushes."""
        for dim in TABLES:
            for batch in self.batches(50_000)[:2]:
                far, near = (np.full((50_000, dim), np.nan, np.float32) for _ in range(2))
                system.pull(batch, far)()
                self.local.pull(batch, near)()
                check(np.array_equal(far, near), f"the server's rows of dim {dim} are not the local store's")

    def run(self, names: list[str], what: list[tuple], process: psutil.Process, raw_at: str, loops: list[str]) -> dict:
        """Measure each of ``what``: (op, dim, keys, depth) for each system, in turns."""
        served, raw, read = Shoal(loops), Raw(raw_at), Raw(raw_at, reads=True)
        systems = {"local": self.local, "raw": raw, "read": read, "shoal": served}
        try:
            self.fill(served)
            if "local" in names:
                self.fill(self.local)
                self.check(served)
            figures: dict = {}
            for op, dim, n, depth in what:
                batches = self.batches(n)
                arrays = [np.full((n, dim), 0.01, np.float32) for _ in range(depth + 1)]
                for turn in range(self.options.rounds + 1):
                    for name in names:
                        if name == "local" and depth > 1:
                            continue
                        begin = getattr(systems[name], op)
                        seconds = 0.05 if turn == 0 else self.options.seconds
                        keys, spent, latencies, here, there = measure(begin, batches, arrays, depth, seconds, process)
                        if turn > 0:
                            line = figures.setdefault((op, dim, n, depth, name), Figures())
                            line.rates.append(keys / spent)
                            line.latencies += latencies
                            line.worker_cpu.append(here / keys)
                            line.server_cpu.append(there / keys)
            return figures
        finally:
            served.channel.close()
            for each in (raw, read):
                each.socket.close(0)
                each.context.term()


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--batches", nargs="+", type=int, default=[1000, 10_000, 100_000])
    parser.add_argument("--dims", nargs="+", type=int, default=[1, 16], choices=sorted(TABLES))
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--threads", type=int, default=2, help="data loops of the server")
    parser.add_argument("--no-busy", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.threads, options.busy)

    bench = Bench(options)
    what = [
        (op, dim, n, depth)
        for dim in options.dims
        for n in options.batches
        for op in ("pull", "push")
        for depth in options.depths
    ]
    with server(options.threads) as (process, raw_at, loops):
        figures = bench.run(["local", "raw", "read", "shoal"], what, process, raw_at, loops)
    print(
        "| op, dim, keys | under way | local | raw | read | shoal | GB/s | shoal / raw | p50, p99 raw | p50, p99 shoal "
        "| CPU raw | CPU shoal |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for op, dim, n, depth in what:
        local, raw, read, ours = (figures.get((op, dim, n, depth, name)) for name in ("local", "raw", "read", "shoal"))
        print(
            f"| {op}, {dim}, {n:,} | {depth} | {spread([x / 1e6 for x in local.rates], 1) if local else ''} "
            f"| {spread([x / 1e6 for x in raw.rates], 1)} | {read.rate() / 1e6:.1f} "
            f"| {spread([x / 1e6 for x in ours.rates], 1)} "
            f"| {ours.rate() * (8 + 4 * dim) / 1e9:.2f} | {ours.rate() / raw.rate():.2f} "
            f"| {raw.latency(50):,.0f}, {raw.latency(99):,.0f} | {ours.latency(50):,.0f}, {ours.latency(99):,.0f} "
            f"| {raw.cpu()} | {ours.cpu()} |",
            flush=True,
        )
    if options.no_busy:
        return None
    what = [("pull", 1, n, 1) for n in options.batches]
    print(
        "\n| pull, dim 1, keys | busy Python thread in the server | raw: calls/s, p50, p99 | shoal: calls/s, p50, p99 |"
    )
    print("|---|---|---|---|")
    for busy in (False, True):
        with server(options.threads, busy) as (process, raw_at, loops):
            figures = bench.run(["raw", "shoal"], what, process, raw_at, loops)
        for op, dim, n, depth in what:
            lines = [figures[op, dim, n, depth, name] for name in ("raw", "shoal")]
            cells = [f"{x.rate() / n:,.0f}, {x.latency(50):,.0f}, {x.latency(99):,.0f}" for x in lines]
            print(f"| {n:,} | {'yes' if busy else 'no'} | {' | '.join(cells)} |", flush=True)
    return None


if __name__ == "__main__":
    main()
