"""Logistic regression on a Ray cluster: servers and workers are actors that Ray places.

    python train_ray.py --servers 3 --workers 2            # inside a Ray cluster, or on one machine
    python train_ray.py --storage s3://bucket/runs         # keep the model

The scheduler assigns splits of the data to workers, so all nodes need the files under the same names. Here each worker
draws the same log.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import ray.train

import shoal
import shoal.ray
from shoal.tools.planted import PlantedModel, write_log


def loop(config: dict[str, Any]) -> None:
    """Do the work of one worker."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        write_log(Path("log.tsv"), PlantedModel(seed=1), config["examples"], 0)
        train = shoal.read_criteo("log.tsv", batch_size=512)
        store = shoal.ray.store()
        with shoal.LogisticRegression(shoal.FTRL(alpha=0.1, l1=0.5), store=store) as model:
            for _ in range(config["epochs"]):
                for split in store.splits(train, split_bytes=1 << 20):
                    model.fit(split, progress=False)
            if store.rank == 0:
                print(f"{model.evaluate(train)}, {len(model.table):,} rows", flush=True)
            ray.train.report({}, checkpoint=shoal.ray.snapshot() if config["storage"] else None)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--examples", type=int, default=20_000, metavar="N", help="to draw (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="passes (default: %(default)s)")
    parser.add_argument("--storage", metavar="PATH", help="directory or URL that all nodes can write (default: none)")
    arguments = parser.parse_args()
    shoal.ray.ShoalTrainer(
        loop,
        shoal_config=shoal.ray.ShoalConfig(servers=arguments.servers, replicas=1),
        train_loop_config=vars(arguments),
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig(storage_path=arguments.storage),
    ).fit()


if __name__ == "__main__":
    main()
