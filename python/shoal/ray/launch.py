"""``shoal launch --engine ray``: the cluster of Ray on which a program runs.

Each worker is an actor that requests one CPU and runs the program as a child process, in the directory of the launcher
if its node has one of that name. The lines of its output are sent to the launcher in batches.

Threads: `connected` is called by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import ray

from shoal.ray.config import ShoalConfig
from shoal.ray.demand import Demand, wait_for_nodes
from shoal.ray.servers import WORKER


@contextlib.contextmanager
def connected(config: ShoalConfig, workers: int) -> Iterator[None]:
    """Connect to the cluster of Ray that RAY_ADDRESS names or that runs on this machine, or start one for the block.

    One that is started has as many CPUs as all processes request, or those of this machine if they are more.
    """
    demand = Demand([("servers", config.servers, config.resources_per_server), ("workers", workers, WORKER)])
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        cpus = config.servers * config.resources_per_server.get("CPU", 0) + workers * WORKER["CPU"]
        ray.init(
            "local",
            num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # as of processes that shoal launches; the default is 15
            **quiet,
        )
    signal.signal(signal.SIGTERM, before)  # Ray's own ends the process
    try:
        wait_for_nodes(demand, config.timeout)
        yield
    finally:
        ray.shutdown()
