"""Logistic regression on Ray, which places the servers and workers and feeds them with a dataset.

    python examples/ray_lr.py                                   # on this machine; pip install 'shoal[ray]'
    python examples/ray_lr.py --data s3://logs/day_*.parquet    # columns click, site, user and price
    ray job submit --working-dir . -- python examples/ray_lr.py --data ...

Each worker learns from its share of the dataset, and the rows are on two servers with a copy of each slot on the other
one: training continues while a server is lost. Prints the metrics of the run, and the directory of its snapshot.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import shoal


def draw(path: Path, seed: int) -> None:
    """Write a click log with a planted model, as Parquet."""
    import pyarrow.parquet

    rng = np.random.default_rng(seed)
    site, user, price = rng.integers(0, 50, 20_000), rng.integers(0, 200, 20_000), rng.random(20_000)
    click = rng.random(20_000) < 1 / (1 + np.exp(1 + 3 * price - 2 * np.sin(site) - np.cos(user)))
    columns = {"click": click.astype(int), "site": [f"{s}.com" for s in site], "user": user, "price": price}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", metavar="FILE", help="Parquet files (default: two are drawn)")
    parser.add_argument("--output", metavar="DIR", help="storage of the run (default: that of Ray)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        files = arguments.data or [str(Path(scratch, f"ads_{number}.parquet")) for number in range(2)]
        if not arguments.data:
            for seed, file in enumerate(files):
                draw(Path(file), seed)
        train(files, arguments.output)


def train(files: list[str], output: str | None) -> None:
    """Train on the cluster of Ray that this program runs on, or on this machine."""
    import ray.data
    import ray.train

    hashed = shoal.ray.Hash(label="click", categorical=["site", "user"], numeric=["price"])

    def loop() -> None:  # runs in each worker
        with shoal.LogisticRegression(shoal.FTRL(alpha=0.1), store=shoal.ray.store()) as model:
            model.fit(hashed.read(ray.train.get_dataset_shard("train")), progress=False)
            metrics = model.history.passes[-1].metrics
            ray.train.report({"logloss": metrics.logloss, "auc": metrics.auc}, checkpoint=shoal.ray.snapshot())

    trainer = shoal.ray.ShoalTrainer(
        loop,
        shoal_config=shoal.ray.ShoalConfig(servers=2, replicas=1),
        datasets={"train": ray.data.read_parquet(files)},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(storage_path=output),
    )
    result = trainer.fit()
    print(f"log-loss {result.metrics['logloss']:.4f}, AUC {result.metrics['auc']:.4f}; {result.checkpoint.path}")


if __name__ == "__main__":
    main()
