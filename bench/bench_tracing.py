"""What traces of calls cost the worker: its CPU time for a call, with and without them.

    python bench/bench_tracing.py                    one minute; needs pip install 'shoal[otel]'

Three workers of one job in this process pull and push the same keys of a server in turns, some hundred calls at a time:
one that is not traced, one whose calls the sampler refuses, and one whose spans go through a BatchSpanProcessor to an
exporter that drops them. The CPU time is that of this process, per call, the thread that makes spans included; the
server is another process. Rounds are compared in pairs.

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
from shoal.cluster.launch.local_cluster import running

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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    print(conditions())
    measure(arguments.rounds, arguments.calls)


if __name__ == "__main__":
    main()
