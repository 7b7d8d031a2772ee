"""Kill a node of a cluster while a model trains, start another one, and get the bits of an undisturbed run.

    python bench/bench_nodes.py                      # logistic regression on 4 nodes of 2 servers each
    python bench/bench_nodes.py --model deepfm       # DeepFM; needs PyTorch: pip install 'shoal[torch]'

A node is two servers on this machine, which state its name as they do on Kubernetes. Copies of a slot are on different
nodes. First an undisturbed run, then one in which a node is killed (SIGKILL to its servers) after a
third of the clocks; when all slots have their copies again, another node joins. Prints the seconds of each run, and the
longest clock: it contains the interruption.

`--local --pause 0.05` checks the bits without timings, in fewer clocks: the undisturbed run has its tables in this
process, and the disturbed one waits in each clock after the kill until the new node serves.
"""

import argparse
import concurrent.futures
import contextlib
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import shoal
from shoal.cluster.launch.child import ChildProcess
from shoal.cluster.launch.local_cluster import start_role
from shoal.config import SchedulerConfig, ServerConfig
from shoal.tools.planted import PlantedModel, write_log

NODES, SERVERS = 4, 2


Node = list[ChildProcess]


def start_node(name: str, address: str) -> Node:
    """Start the servers of a node of the cluster at an address."""
    config = ServerConfig(scheduler=address, node=name, timeout=120.0)
    return [start_role(name, config, lambda *_: None) for _ in range(SERVERS)]


def kill(node: Node) -> None:
    """Kill the servers of a node."""
    for server in node:
        server.signal(signal.SIGKILL)


@contextlib.contextmanager
def cluster(directory: str) -> Iterator[tuple[shoal.Store, str, dict[str, Node]]]:
    """Run a scheduler and nodes, with this process as the only worker; yields store, address and nodes."""
    joined: queue.Queue[Any] = queue.Queue()
    config = SchedulerConfig(bind="tcp://127.0.0.1:*", servers=NODES * SERVERS, replicas=1, journal=directory)
    scheduler = start_role("scheduler", config, lambda _, report: joined.put(report))
    address = joined.get(timeout=120).address
    nodes = {f"node-{k}": start_node(f"node-{k}", address) for k in range(NODES)}
    try:
        with shoal.connect(address, timeout=120) as store:
            yield store, address, nodes
    finally:
        for node in [[scheduler], *nodes.values()]:
            kill(node)


BatchDone = Callable[[], None]


class _AfterBatches(shoal.models.Callback):
    def __init__(self, function: BatchDone) -> None:
        self._function = function

    def batch_done(self, progress: shoal.models.FitProgress) -> None:
        """Call the function."""
        self._function()


def train_lr(store: shoal.Store, epochs: int, batch_done: BatchDone) -> str:
    """Train a logistic regression; returns the digest of its table."""
    train = shoal.read_criteo("log.tsv", batch_size=256)
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.1, l1=0.5), store=store) as model:
        model.fit(train, epochs=epochs, progress=False, callbacks=_AfterBatches(batch_done))
        return model.table.digest()


def train_deepfm(store: shoal.Store, epochs: int, batch_done: BatchDone) -> str:
    """Train DeepFM; returns the digests of its tables."""
    import torch

    torch.manual_seed(7)
    names = [f"C{k}" for k in range(1, 9)]
    tables = shoal.torch.tables(store, shoal.Adagrad(lr=0.05), init=shoal.Normal(0.05, seed=7))
    features = shoal.torch.Features(names, form="criteo")
    module = shoal.torch.models.DeepFM(tables, features, dim=8, hidden=(32,))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.002)
    train = shoal.read_criteo("log.tsv", batch_size=256)
    model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
    model.fit(train, epochs=epochs, progress=False, callbacks=_AfterBatches(batch_done))
    return " ".join(table.digest() for table in model.tables)


def disturb(store: shoal.Store, address: str, nodes: dict[str, Node], clock: int, ended: threading.Event) -> None:
    """Kill a node when the worker has reached a clock, and start another one when all slots have copies again."""
    while store.clock < clock and not ended.wait(0.001):
        pass
    kill(nodes.pop("node-1"))
    print(f"clock {store.clock}: node-1 is killed")
    wait_until(store, ended, is_whole)
    print(f"clock {store.clock}: all slots have copies again; node-{NODES} is started")
    nodes[f"node-{NODES}"] = start_node(f"node-{NODES}", address)
    wait_until(store, ended, lambda servers, arcs: len({arc["server"] for arc in arcs}) == NODES * SERVERS)
    print(f"clock {store.clock}: node-{NODES} serves slots")


def is_whole(servers: Any, arcs: Any) -> bool:
    """Whether a node is known to be dead, and all slots have a copy again."""
    living = {server["rank"] for server in servers}
    held = [{arc["server"], *arc["copies"]} for arc in arcs]  # of the map before, until the new one is carried out
    return len(living) == (NODES - 1) * SERVERS and all(len(ranks) > 1 and ranks <= living for ranks in held)


def wait_until(store: shoal.Store, ended: threading.Event, holds: Callable[[Any, Any], bool]) -> None:
    """Wait until something holds of the servers and the arcs in the status of the cluster."""
    while not ended.wait(0.02):
        status = store.cluster()
        if holds(status["servers"], status["arcs"]):
            return
    raise SystemExit("the run ended too early: pass more --epochs")


def longest_clock(store: shoal.Store, ended: threading.Event) -> float:
    """Return the longest time between two ticks, in seconds, by looking at the clock a thousand times per second."""
    longest, clock, since = 0.0, 0, time.monotonic()
    while not ended.wait(0.001):
        if store.clock != clock:
            now = time.monotonic()
            if clock:  # before the first tick tables are made
                longest = max(longest, now - since)
            clock, since = store.clock, now
    return longest


Train = Callable[[shoal.Store, int, BatchDone], str]


def run(train: Train, epochs: int, clocks: int, pause: float) -> tuple[str, int]:
    """Train on a new cluster; returns digests and clocks. If clocks are given, a node is killed after a third."""
    ended = threading.Event()
    with (
        tempfile.TemporaryDirectory() as journal,
        cluster(journal) as (store, address, nodes),
        ThreadPoolExecutor(2) as threads,
    ):
        begun = time.monotonic()
        longest = threads.submit(longest_clock, store, ended)
        disturber = threads.submit(disturb, store, address, nodes, clocks // 3, ended) if clocks else None

        def wait() -> None:
            if pause and disturber is not None and store.clock > clocks // 3:
                concurrent.futures.wait([disturber], pause)

        try:
            digest = train(store, epochs, wait)
            seconds = time.monotonic() - begun
        finally:
            ended.set()
        if disturber is not None:
            disturber.result()
        print(f"{store.clock} clocks in {seconds:.1f} s, the longest {longest.result():.3f} s; digest {digest}")
        return digest, store.clock


def run_local(train: Train, epochs: int) -> tuple[str, int]:
    """Train with the tables in this process; returns digests and clocks."""
    with shoal.local() as store:
        digest = train(store, epochs, lambda: None)
        print(f"{store.clock} clocks; digest {digest}")
        return digest, store.clock


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("lr", "deepfm"), default="lr")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over 20,000 examples")
    parser.add_argument("--local", action="store_true", help="train undisturbed with the tables in this process")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of each clock from the kill until the new node serves",
    )
    arguments = parser.parse_args()
    train = {"lr": train_lr, "deepfm": train_deepfm}[arguments.model]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        write_log(Path("log.tsv"), PlantedModel(seed=1), 20_000, 0)
        epochs, pause = arguments.epochs, arguments.pause
        undisturbed, clocks = run_local(train, epochs) if arguments.local else run(train, epochs, 0, 0.0)
        if run(train, epochs, clocks, pause)[0] != undisturbed:
            raise SystemExit("the digests differ")
    print("both runs have the same bits")


if __name__ == "__main__":
    main()
