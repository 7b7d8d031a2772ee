"""Kill nodes of a Ray cluster while models train, add other ones, and get the bits of an undisturbed run.

    python bench/bench_ray_nodes.py                  # logistic regression and DeepFM; needs Ray and PyTorch
    python bench/bench_ray_nodes.py --batches 900 --servers 8

As bench_nodes.py, on Ray. A cluster of Ray has a head and three more nodes, raylets on this machine with two servers
each and a copy of each slot on another node. Two workers on the head train logistic regression, then DeepFM; each reads
a Ray dataset of its own, in a fixed order. First an undisturbed run, then one in which a raylet and all its processes
are killed after a third of the clocks of each model. Another node joins, where Ray starts servers; after two thirds the
workers wait until all slots have their copies again. Prints the clocks and the seconds of each run, and checks that
both have the same digests.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import shoal
from chaos import wait_for_copies
from figures import check, conditions

COLUMNS = ["site", "user", "hour"]
MODELS = ("lr", "deepfm")
BATCH = 200
LIMIT_SECONDS = 120.0  # for a node to be killed and another one to join
# A node that is killed counts as dead after a second, by default after twenty.
SYSTEM = {"health_check_period_ms": 250, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
# Else 15, with which the processes of Ray hardly run next to others; processes started in advance; statistics sent.
VARIABLES = {
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Nodes(Protocol):
    """A cluster of Ray whose nodes can be added and killed; the head has the resources "seat" and "rows"."""

    def add(self) -> str:
        """Add a node with places for two servers; returns its id."""

    def kill(self, node_id: str) -> None:
        """Kill a node's raylet and all its processes."""


def draw(rows: dict[str, Any], seed: int) -> dict[str, Any]:
    """Make columns of a click log from the numbers of rows."""
    site, user, hour = (rows["id"] * prime % many + seed for prime, many in ((7919, 50), (104_729, 2000), (31, 24)))
    click = np.sin(site) + np.cos(user * hour) + np.sin(rows["id"] * 0.7) > 0.5
    return {"click": click.astype(int), "site": site, "user": user, "hour": hour}


def learner(model: str, store: shoal.Store) -> Callable[[shoal.Batch], None]:
    """Return a function that learns a batch, and ticks."""
    if model == "lr":
        return shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=store).partial_fit
    import torch

    torch.manual_seed(0)
    features = shoal.torch.Features(COLUMNS, form="arrow")
    module = shoal.torch.models.DeepFM(shoal.torch.tables(store), features, dim=4, hidden=(16,))
    dense = shoal.torch.DenseParameters(store, module, optimizer=shoal.Adam(lr=0.01), name="tower")

    def learn(batch: shoal.Batch) -> None:
        dense.pull()
        logits, labels = module(module.inputs(batch)), torch.from_numpy(batch.labels)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        dense.push()
        store.tick()
        module.zero_grad()

    return learn


def loop(settings: dict[str, Any]) -> None:
    """Train the models one after the other in one worker; report the digests of the tables."""
    import ray.train

    store = shoal.ray.store()
    hashed = shoal.ray.Hash(label="click", categorical=COLUMNS, with_fields=True)
    seconds = {}
    for model in MODELS:
        learn = learner(model, store)
        shard = ray.train.get_dataset_shard(f"clicks {store.rank}")
        store.barrier()
        start = time.perf_counter()
        for number, batch in enumerate(hashed.read(shard, batch_size=BATCH).with_fields()):
            if settings["folder"] and number == settings["batches"] * 2 // 3:
                wait_for(Path(settings["folder"], model))
            learn(batch)
        store.barrier()
        seconds[model] = time.perf_counter() - start
    digests = {name: table.digest() for name, table in store.tables.items()}
    found = {"digests": digests, "clock": store.clock, "seconds": seconds}
    ray.train.report(found, checkpoint=shoal.ray.snapshot())


def wait_for(file: Path) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not file.exists():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no other node has joined within {LIMIT_SECONDS:g} s: {file} does not exist")
        time.sleep(0.01)


def run(servers: int, batches: int, folder: str, disturb: Callable[[Any], None] | None) -> dict[str, Any]:
    """Train in a new cluster; returns what worker 0 reports."""
    import ray.data
    import ray.train

    config = shoal.ray.ShoalConfig(
        servers=servers, replicas=1, resources_per_server={"CPU": 1, "rows": 1}, timeout=LIMIT_SECONDS
    )
    rows = ray.data.range(batches * BATCH, override_num_blocks=4)
    with shoal.ray.start(config, workers=2) as cluster, ThreadPoolExecutor(1) as executor:
        trainer = shoal.ray.ShoalTrainer(
            loop,
            train_loop_config={"batches": batches, "folder": folder if disturb else ""},
            shoal_config=cluster,
            datasets={f"clicks {rank}": rows.map_batches(draw, fn_args=(rank,)) for rank in range(2)},
            dataset_config=ray.train.DataConfig(datasets_to_split=[]),
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"seat": 1}),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        training = executor.submit(trainer.fit)
        if disturb:
            disturb(cluster)  # in the main thread, the only one that can add nodes
        return training.result().metrics


def compare(
    nodes: Nodes,
    victims: list[str],
    servers: int,
    batches: int,
    *,
    undisturbed_servers: int | None = None,
    emit: Callable[[str], None] = print,
) -> None:
    """Run undisturbed, then disturbed: the nodes with ids are killed, one for each model."""
    import ray.data

    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True

    def disturb(cluster: Any) -> None:
        for number, model in enumerate(MODELS):
            due = number * batches + batches // 3
            deadline = time.monotonic() + LIMIT_SECONDS
            while (clock := max((worker["clock"] for worker in cluster.status()["workers"]), default=0)) < due:
                check(time.monotonic() < deadline, f"clock {clock}, not {due}, after {LIMIT_SECONDS:g} s")
                time.sleep(0.02)
            nodes.kill(victims[number])
            victims.append(nodes.add())
            seconds = wait_for_copies(cluster.address, servers, 1)
            emit(f"{model}: a node killed at clock {clock}; another one has joined, copied {seconds:.1f} s later")
            Path(folder, model).touch()

    try:
        with tempfile.TemporaryDirectory() as folder:
            undisturbed = run(undisturbed_servers or servers, batches, folder, None)
            disturbed = run(servers, batches, folder, disturb)
    finally:
        options.preserve_order = False
    for name, found in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        seconds = ", ".join(f"{model} {seconds:.1f} s" for model, seconds in found.pop("seconds").items())
        emit(f"{name}: {found['clock']} clocks; {seconds}")
    check(undisturbed == disturbed, f"the models differ: {undisturbed} and {disturbed}")
    emit("both runs have the same bits")


class LocalNodes:
    """A cluster of Ray on this machine."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 4, "resources": {"seat": 2, "rows": 2}, "include_dashboard": False}
        head |= {"node_ip_address": "127.0.0.2", "_system_config": SYSTEM}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._last = 2
        self._nodes: dict[str, Any] = {}
        self.ids = [self.add() for _ in range(nodes)]
        self.address = self._cluster.address

    def add(self) -> str:
        """Add a node with places for two servers; returns its id."""
        self._last += 1
        node = self._cluster.add_node(
            num_cpus=2, resources={"rows": 2}, node_ip_address=f"127.0.0.{self._last}", include_dashboard=False
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Kill a node's raylet and all its processes."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=8, metavar="N", help="two a node (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=300, metavar="N", help="of a worker (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ |= VARIABLES
    import ray

    nodes = LocalNodes(arguments.servers // 2 - 1)
    try:
        ray.init(address=nodes.address, _node_ip_address="127.0.0.2", log_to_driver=False)
        compare(nodes, nodes.ids, arguments.servers, arguments.batches)
        print(conditions())
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()
