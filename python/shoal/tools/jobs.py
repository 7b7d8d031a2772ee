"""The rate of a linear model's training on a cluster, predicted from rates of one worker and one server.

A clock is one batch of each worker. What it costs, in seconds, for batches of n examples of f features, a share u of
which are different keys, W workers, S servers (a server of T threads counts as T servers):

    parse, sort     n f / rate                                      two threads of a worker, ahead of its batch
    own             n f / learned + worker_clock                    the thread that pulls, learns and pushes
    serve           n f u / S / rates of rows + server_clock        one server, for one worker's batch
    transfer        n f u bytes_per_key / bandwidth                 a worker's connection; W / S of it a server's
    wait            messages that travel, threads that wake up

These follow one another: own, transfer, serve, wait. Under BSP all workers do so at the same time, hence a clock takes
``own + max(1, W / S) transfer + W serve + wait``. Under SSP and ASP a worker waits for its own, and for those that are
at the servers before it (mean value analysis of that queue); once pulls begin early, from 128 W n examples on, for
nobody. A clock always takes at least the longest of the sides: parse, sort,
own, W serve, the transfer of a server; and where all processes share c cores, the sum of all CPU time divided by c.
With more processes than cores all CPU time is a fifth more, since they evict each other's rows; and under BSP a process
that waits for a core makes all others wait: as if a third more was to be done (both measured: docs/sizing.md).

Threads: no state. `measure_job_rates` starts a cluster of its own.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from shoal.base.scalars import plain
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.worker.connect import connect
from shoal.consistency import Consistency, as_consistency
from shoal.data import Batch
from shoal.data.readers import read_criteo
from shoal.models.logistic import LogisticRegression
from shoal.models.model import EARLY_SHARE
from shoal.optim import FTRL, Optimizer
from shoal.tools.planted import PlantedModel, write_log

_FTRL = FTRL()
_SAMPLE_FEATURES = 16_000_000  # of a measured pass
_NEW = 0.3  # of the keys of a batch, as in the first pass over a click log
_SMALL, _SMALL_CLOCKS, _ROUNDS = 32, 100, 3  # examples of a batch, batches of a pass that shows the cost of a clock
_PARSED = 20_000  # examples
_CROWDED, _LOCKSTEP = 1.2, 1.35  # times the CPU time, and that of all cores under BSP, with more processes than cores
_MOST_SERVERS = 1024


class JobRates(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one worker and one server, by their CPU time.

    Parameters
    ----------
    parsed_per_second, sorted_per_second, learned_per_second : float
        Features: parsed from text by one thread, sorted by one, and learned from by one, which pulls and pushes them.
    touched_per_second, created_per_second : float
        Rows that one thread of a server looks up for a pull and steps in a push: rows that exist, and new ones.
    worker_clock_seconds, server_clock_seconds, wait_seconds : float
        Of a clock, whatever its size: CPU time of the worker, of a server, and the time in which neither computes.
    bytes_per_key : float
        On the wire, both ways, for each different key of a batch that is pulled and pushed.
    """

    parsed_per_second: float
    sorted_per_second: float
    learned_per_second: float
    touched_per_second: float
    created_per_second: float
    worker_clock_seconds: float
    server_clock_seconds: float
    wait_seconds: float
    bytes_per_key: float

    def __post_init__(self) -> None:
        for name, value in structs.asdict(self).items():
            if not (isinstance(plain(value), int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")


class JobEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted training of a linear model on a cluster.

    Parameters
    ----------
    examples_per_second : float
        Of all workers together, over the pass.
    clock_seconds : float
        Time of a batch of each worker, at this rate.
    bound : str
        What a clock waits for: ``parsing``, ``sorting``, ``learning``, ``servers``, ``network``, ``cores``; or
        ``chain``, if these follow one another.
    worker_share, server_share, network_share : float
        Of the chain of a clock, the parts that cannot overlap under BSP; the rest are wake-ups.
    servers_wanted : int or None
        Least number of servers that are no slower than the workers; None: no number is, batches are too small.
    rates : JobRates
    """

    examples_per_second: float
    clock_seconds: float
    bound: str
    worker_share: float
    server_share: float
    network_share: float
    servers_wanted: int | None
    rates: JobRates


def estimate_job(
    rates: JobRates,
    *,
    workers: int,
    servers: int = 1,
    batch_size: int = 8192,
    consistency: Consistency | str = "bsp",
    features: int = 39,
    distinct: float = 1.0,
    examples: int = 0,
    keys: int = 0,
    bandwidth: float | None = None,
    cores: int | None = None,
) -> JobEstimate:
    """Predict the rate of a linear model's pass on a cluster.

    Parameters
    ----------
    rates : JobRates
        Results of :func:`measure_job_rates`, or other known rates.
    workers, servers : int
        A server of several threads counts as so many servers.
    batch_size : int
        Examples of a worker's batch.
    consistency : Consistency or str
    features : int
        Of an example.
    distinct : float
        Share of the features of a batch that are different keys, above 0 up to 1.
    examples, keys : int
        Examples of the pass, and rows that it creates. Without examples the pass is long, and its rows exist.
    bandwidth : float, optional
        Bytes a second of each process's connection; default: the network takes no time.
    cores : int, optional
        Cores that all processes share; default: every thread has one.

    Returns
    -------
    JobEstimate

    Raises
    ------
    ValueError
        A number is out of its range.

    Notes
    -----
    The module's text has the formulas. Filters, caches and replicas are not counted, nor examples that are expensive to
    parse.
    """
    workers, servers, batch_size, features = map(plain, (workers, servers, batch_size, features))
    examples, keys, cores = map(plain, (examples, keys, cores))
    for name, number, least in (
        ("workers", workers, 1),
        ("servers", servers, 1),
        ("batch_size", batch_size, 1),
        ("features", features, 1),
        ("examples", examples, 0),
        ("keys", keys, 0),
        ("cores", cores, 1),
    ):
        if number is not None and (not isinstance(number, int) or number < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}")
    if not 0 < distinct <= 1:
        raise ValueError(f"distinct is the share of a batch's features that are different keys, got {distinct!r}")
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise ValueError(f"bandwidth must be a number of bytes a second above 0, got {bandwidth!r}")
    given, rows = batch_size * features, batch_size * features * distinct
    new = min(1.0, keys / (examples * features * distinct)) if examples else 0.0
    row = (1 - new) / rates.touched_per_second + new / rates.created_per_second
    is_bulk = as_consistency(consistency).is_bulk
    is_crowded = cores is not None and workers + servers > cores
    slower = _CROWDED if is_crowded else 1.0
    parse, sort = slower * given / rates.parsed_per_second, slower * given / rates.sorted_per_second
    own = slower * (given / rates.learned_per_second + rates.worker_clock_seconds)
    transfer = 0.0 if bandwidth is None else rows * rates.bytes_per_key / bandwidth

    def served(count: int) -> float:
        return slower * (rows / count * row + rates.server_clock_seconds)

    serve, busiest = served(servers), transfer * max(1.0, workers / servers)
    sides = {"parsing": parse, "sorting": sort, "learning": own, "servers": workers * serve, "network": busiest}
    if cores is not None:
        lost = _LOCKSTEP if is_crowded and is_bulk else 1.0
        sides["cores"] = lost * workers * (parse + sort + own + servers * serve) / cores
    if is_bulk:
        parts, late = [own, workers * serve, busiest], 1.0
        chain = sum(parts) + rates.wait_seconds
    else:
        queue = chain = stay = 0.0
        for count in range(1, workers + 1):
            stay = serve * (1 + queue)
            chain = own + transfer + stay + rates.wait_seconds
            queue = count * stay / chain
        parts = [own, stay, transfer]
        late = min(1.0, workers * batch_size / (EARLY_SHARE * examples)) if examples else 0.0
    bound = max(sides, key=lambda side: sides[side])
    clock = late * max(chain, sides[bound]) + (1 - late) * sides[bound]
    slowest = max(parse, sort, own, transfer)
    wanted = (n for n in range(1, _MOST_SERVERS + 1) if max(workers * served(n), transfer * workers / n) <= slowest)
    return JobEstimate(
        examples_per_second=workers * batch_size / clock,
        clock_seconds=clock,
        bound="chain" if late > 0.5 and chain > sides[bound] else bound,
        worker_share=parts[0] / chain,
        server_share=parts[1] / chain,
        network_share=parts[2] / chain,
        servers_wanted=next(wanted, None),
        rates=rates,
    )


def measure_job_rates(
    *, optimizer: Optimizer = _FTRL, batch_size: int = 8192, features: int = 39, distinct: float = 1.0
) -> JobRates:
    """Measure the speed of a worker and a server on this machine.

    Parameters
    ----------
    optimizer : Optimizer
        Of the table, whose rows have one weight.
    batch_size, features, distinct
        As for :func:`estimate_job`.

    Returns
    -------
    JobRates

    Notes
    -----
    Blocks for some seconds: with a cluster of one server on this machine this process learns from batches that bring
    new keys, from the same ones again, and from very small ones. CPU time is measured, so other work on the machine
    matters less. Known keys are drawn uniformly; those of click logs are skewed, and their rows rather in a cache.
    """
    random = np.random.default_rng(1)
    rows = max(1, int(batch_size * features * distinct))
    count = max(3, -(-_SAMPLE_FEATURES // (batch_size * features)))
    with (
        running(1, workers=1) as cluster,
        connect(cluster.address, workers=1, threads=1) as store,
        tempfile.TemporaryDirectory() as made,
    ):
        server = cluster.servers[0]
        assert isinstance(server, ChildProcess)
        model = LogisticRegression(optimizer, store=store, warm_up=False)

        def fitted(batches: Sequence[Batch]) -> tuple[float, float, float]:
            """Return the CPU seconds of this process and of the server in a pass, and the seconds."""
            start, own, theirs = time.perf_counter(), time.process_time(), _cpu_seconds(server.process.pid)
            model.fit(batches, progress=False)
            own, seconds = time.process_time() - own, time.perf_counter() - start
            return own, _cpu_seconds(server.process.pid) - theirs, seconds

        def drawn(examples: int, keys: npt.NDArray[np.uint64]) -> Batch:
            more = random.choice(keys, examples * features - len(keys))
            some = random.permutation(np.concatenate([keys, more]))
            some[::features] = labels = random.integers(0, 2, examples, np.uint64)  # keys that tell the label
            return Batch(labels.astype(np.float32), np.arange(0, len(some) + 1, features), some, None)

        fresh = max(1, int(rows * _NEW))
        everything = 2 + random.permutation(rows + (count - 1) * fresh).astype(np.uint64)
        batches = [drawn(batch_size, everything[:rows])]
        for end in range(rows + fresh, len(everything) + 1, fresh):  # some keys are new, the others uniform
            known = random.choice(everything[: end - fresh], rows - fresh)
            batches.append(drawn(batch_size, np.concatenate([known, everything[end - fresh : end]])))
        first, before = fitted(batches), store.metrics()
        again = [fitted(batches) for _ in range(_ROUNDS)]
        after = store.metrics()
        small = [drawn(_SMALL, random.choice(everything, _SMALL * features)) for _ in range(_SMALL_CLOCKS)]
        clocks = [fitted(small) for _ in range(_ROUNDS)]
        began = time.process_time()
        unique = sum(len(store.key_batch(batch.keys)) for batch in batches)
        sorting = time.process_time() - began
        log = Path(made, "log")
        write_log(log, PlantedModel(seed=1), _PARSED, 0)
        parsing: list[float] = []
        for _ in range(_ROUNDS):
            began = time.process_time()
            parsed = sum(batch.nnz for batch in read_criteo(log, batch_size=batch_size))
            parsing.append(time.process_time() - began)
    own, theirs, wait = (
        min(some) / _SMALL_CLOCKS
        for some in zip(*((own, theirs, seconds - own - theirs) for own, theirs, seconds in clocks), strict=True)
    )
    learning = statistics.median(one[0] for one in again) - count * own
    touching = statistics.median(one[1] for one in again) - count * theirs
    given = count * batch_size * features
    creating = first[1] - count * theirs - touching * (1 - len(everything) / unique)
    sent = sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
    return JobRates(
        parsed_per_second=parsed / min(parsing),
        sorted_per_second=given / sorting,
        learned_per_second=given / max(learning - sorting, learning / 10),
        touched_per_second=unique / touching,
        created_per_second=len(everything) / max(creating, touching * len(everything) / unique),
        worker_clock_seconds=own,
        server_clock_seconds=theirs,
        wait_seconds=max(wait, 1e-6),
        bytes_per_key=sent / unique / _ROUNDS,
    )


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of the living threads of a process, to the nanosecond."""
    tasks = Path("/proc", str(pid), "task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) * 1e-9
