"""A worker that trains a click model whose dense part is summed by all-reduce, and ends itself where it is told to.

    python allreduce_worker.py ADDRESS RANK WORKERS CONFIG OUT [POINT]

A point is a name of `POINTS`, which say before or after which call, and at which one of them, the process gets SIGKILL.
With "-stop" it gets SIGSTOP, with "-error" it raises an error, with "-late" it waits for a second. Resumes the fit
whose checkpoint is in OUT, if there is one, and writes what it has learned, as JSON, to standard output.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import shoal
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.models import Checkpointing, EarlyStopping, files
from shoal.models.progress import Progress
from shoal.models.training import Training
from shoal.torch.click_model import ClickModel
from shoal.torch.config import build, parse
from shoal.torch.gloo_group import GlooGroup

TIMEOUT = 120.0
EPOCHS, EVERY = 2, 4

# An object, its method, which call, and whether the process ends before it, after it, or while it runs.
POINTS: dict[str, tuple[Any, str, int, str]] = {
    "connect": (GlooGroup, "__init__", 1, "before"),
    "connected": (GlooGroup, "__init__", 1, "after"),
    "sizes": (GlooGroup, "all_reduce", 13, "before"),
    "gradients": (GlooGroup, "all_reduce", 14, "before"),
    "within gradients": (GlooGroup, "all_reduce", 14, "within"),
    "after gradients": (GlooGroup, "all_reduce", 14, "after"),
    "ticked": (ClusterStore, "tick", 7, "after"),
    "end of a pass": (Training, "_end_pass", 1, "before"),
    "validation": (ClickModel, "_margins", 2, "after"),
    "checkpoint": (files, "save", 2, "before"),
    "after a checkpoint": (files, "save", 2, "after"),
    "restored": (Progress, "begin", 1, "before"),
}


def end_at(point: str) -> None:
    """End this process at a point."""
    name, _, how = point.partition("-")
    owner, method, number, when = POINTS[name]
    call, count = getattr(owner, method), 0

    def end() -> None:
        if how == "error":
            raise ValueError(name)
        if how == "late":
            time.sleep(1.0)
            return
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count != number:
            return call(*arguments, **more)
        if when == "before":
            end()
        if when == "within":
            threading.Thread(target=lambda: (time.sleep(0.0003), end())).start()
        result = call(*arguments, **more)
        if when == "after":
            end()
        return result

    setattr(owner, method, counted)


def main(address: str, rank: str, workers: str, config: str, out: str, point: str = "") -> None:
    """Train, and write what was learned."""
    store = shoal.connect(address, workers=int(workers), rank=int(rank), threads=1, timeout=TIMEOUT)
    with store:
        if point:
            end_at(point)
        settings = tomllib.loads(Path(config).read_text())
        model = build(parse(settings), store)
        (path,) = settings["data"]["data"]
        reader = shoal.read_csv(path, batch_size=20, label="click", categorical=["user", "ad"], numeric=["price"])
        reader = reader.split(store.rank, store.num_workers)
        model.fit(
            reader,
            valid=reader,
            epochs=EPOCHS,
            progress=False,
            checkpoint=Checkpointing(out, every=EVERY, resume=True),
            early_stopping=EarlyStopping(EPOCHS),
        )
        store.barrier()
        tables = {name: table for name, table in store.tables.items() if not name.endswith("-progress")}
        digests = {name: table.digest() for name, table in tables.items()}
        store.barrier()
        passes = model.history.passes
        optimizer = model._dense.optimizer
        assert optimizer is not None
        states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        dense = [value.detach().numpy().tobytes() for value in (*model.module.parameters(), *states)]
        learned = {
            "rows": digests,
            "dense": hashlib.sha256(b"".join(dense)).hexdigest(),
            "examples": model.examples,
            "counted": [one.metrics.examples for one in passes],
            "valid": [one.valid.logloss for one in passes if one.valid is not None],
        }
        print(json.dumps(learned))


if __name__ == "__main__":
    main(*sys.argv[1:])
