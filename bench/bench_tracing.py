"""What traces of calls cost the worker: its CPU time for a call, with and without them.

    python bench/bench_tracing.py                    one minute; needs pip install 'shoal[otel]'
    python bench/bench_tracing.py requests           the worker's requests alone, without a server: a second

Three workers of one job in this process pull and push the same keys of a server in turns, some hundred calls at a time:
one that is not traced, one whose calls the sampler refuses, and one whose spans go through a BatchSpanProcessor to an
exporter that drops them. The CPU time is that of this process, per call, the thread that makes spans included; the
server is another process. Rounds are compared in pairs.

`requests` calls the code that cuts, encodes and settles calls with answers made in advance, untraced, and prints the
fastest of many rounds: for a comparison with another version of the package, in another environment.

Checks: a traced call has made its spans (itself, a request, the server, and the shard), and the others none.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

import shoal
from figures import check, conditions, spread
from shoal import _core
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.protocol.slot_map import cut_evenly
from shoal.cluster.worker.calls import WorkerIdentity
from shoal.cluster.worker.requests import Requests

KINDS = ("untraced", "not sampled", "traced")


def trace_calls(counts: list[int]) -> Any:
    """Set up the SDK with an exporter that counts spans; return an object whose `on` decides what is sampled."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult

    class Exporter(SpanExporter):
        """Counts spans."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            """Drop spans."""
            counts.append(len(spans))
            return SpanExportResult.SUCCESS

    class Switch(Sampler):
        """Samples all calls, or none."""

        on = True
        samplers = (ParentBased(ALWAYS_OFF), ParentBased(ALWAYS_ON))

        def should_sample(self, *arguments: Any, **named: Any) -> SamplingResult:
            """Decide."""
            return self.samplers[self.on].should_sample(*arguments, **named)

        def get_description(self) -> str:
            """Return what it is."""
            return "switch"

    switch = Switch()
    provider = TracerProvider(sampler=switch, shutdown_on_exit=False)
    # As large as a turn: what a full queue drops costs nothing.
    provider.add_span_processor(BatchSpanProcessor(Exporter(), max_queue_size=1 << 16))
    trace.set_tracer_provider(provider)
    return switch, provider


def caller(name: str, table: shoal.Table, size: int) -> Callable[[], Any]:
    """Return a function that makes a call and waits for it."""
    keys, grads = np.arange(size, dtype=np.uint64), np.zeros(size, np.float32)
    return (lambda: table.pull(keys)) if name == "pull" else (lambda: table.push(keys, grads).result())


def measure(rounds: int, calls: int) -> None:
    """Print the CPU time of a pull and of a push."""
    counts: list[int] = []
    switch, provider = trace_calls(counts)
    with running(1, workers=3, timeout=60.0) as cluster, ExitStack() as stack:

        def connect(rank: int) -> shoal.Store:
            return shoal.connect(
                cluster.address, workers=3, rank=rank, threads=1, consistency=shoal.ASP(), tracing=rank > 0
            )

        with ThreadPoolExecutor(3) as pool:
            stores = dict(zip(KINDS, pool.map(connect, range(3)), strict=True))
        for store in stores.values():
            stack.enter_context(store)
        print(f"us of CPU time per call of the worker; medians (ranges) of {rounds} rounds of {calls} calls")
        for size in (40, 10_000):
            tables = {kind: store.table(f"t{size}", optimizer=shoal.SGD(lr=1.0)) for kind, store in stores.items()}
            for name in ("pull", "push"):
                seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for number in range(-1, rounds):
                    for kind in KINDS:
                        switch.on = kind == "traced"
                        call = caller(name, tables[kind], size)
                        provider.force_flush()
                        counts.clear()
                        begin = time.process_time()
                        for _ in range(calls):
                            call()
                        provider.force_flush()
                        used = time.process_time() - begin
                        check(sum(counts) == (4 * calls if kind == "traced" else 0), f"{sum(counts)} spans, {kind}")
                        if number >= 0:
                            seconds[kind].append(1e6 * used / calls)
                for kind in KINDS:
                    more = [a - b for a, b in zip(seconds[kind], seconds["untraced"], strict=True)]
                    print(
                        f"{name} of {size:,} keys, {kind}: {spread(seconds[kind], 1)}, "
                        f"more than untraced: {statistics.median(more):.1f}"
                    )


def measure_requests(rounds: int, calls: int) -> None:
    """Print the time of a pull and of a push in the code that makes and settles requests."""
    thread, slots, address = _core.ThreadPool(1), 1024, "tcp://a:1"
    requests = Requests(WorkerIdentity(0, 1, 7), cut_evenly(1, slots, [(address, 0)]), atomic_clocks=False)
    batch = _core.KeyBatch(np.arange(40, dtype=np.uint64), slots, thread)
    rows = np.zeros((40, 1), np.float32)
    common = {"hashes": batch.hashes, "begins": batch.offsets, "dim": 1}
    for name, op, what, payload in (
        ("pull", _core.Op.PULL, {"out": rows}, [rows]),
        ("push", _core.Op.PUSH, {"values": rows}, []),
    ):
        fastest = []
        for _ in range(rounds):
            used = 0.0
            for _ in range(calls):
                begin = time.perf_counter()
                call = requests.submit(op, 1, 0, 0.0, 60.0, **common, **what)
                used += time.perf_counter() - begin
                _, frames = requests.outgoing.popleft()
                asked = _core.decode(frames, replies=False)
                fields = {"dtype": 1, "dim": 1, "count": 40} if payload else {}
                header = _core.encode_header(
                    op=op, reply=True, payload=payload, table=1, worker=0, incarnation=1, job=7, epoch=1,
                    sequence=asked.sequence, part=asked.part, **fields,
                )  # fmt: skip
                begin = time.perf_counter()
                requests.receive(address, [header, *payload], 0.0)
                used += time.perf_counter() - begin
                check(call.done and call.error is None, f"the {name} is not done")
            fastest.append(1e6 * used / calls)
        print(f"{name} of 40 keys, requests alone: {min(fastest):.2f} us (fastest of {rounds} rounds of {calls})")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["calls", "requests"], default="calls")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    print(conditions())
    (measure if arguments.what == "calls" else measure_requests)(arguments.rounds, arguments.calls)


if __name__ == "__main__":
    main()
