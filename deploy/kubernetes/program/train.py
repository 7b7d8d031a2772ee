"""Logistic regression on a cluster, one copy of this program for each worker.

    python train.py --output /model/ctr                              # a click log that is drawn
    python train.py --data '/data/day_*.tsv' --output /model/ctr     # Criteo's format; the same files for all workers

The scheduler's address, the rank and the number of workers are in the environment: SHOAL_SCHEDULER, SHOAL_RANK and
SHOAL_WORKERS. The scheduler assigns splits of the data to workers, so a worker that dies is replaced by any other.
Worker 0 saves the model.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

import shoal
from shoal.tools.planted import PlantedModel, write_log


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", metavar="FILE", help="click logs (default: drawn)")
    parser.add_argument("--examples", type=int, default=20_000, metavar="N", help="to draw (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="passes (default: %(default)s)")
    parser.add_argument("--split-bytes", type=int, default=1 << 20, metavar="N", help="of a split (default: 1 MiB)")
    parser.add_argument("--output", metavar="DIR", help="directory of the model")
    arguments = parser.parse_args()
    directory = None if arguments.output is None else Path(arguments.output).absolute()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as drawn:
        if arguments.data is None:
            drawn.enter_context(contextlib.chdir(scratch))  # the file has the same name for all workers
            arguments.data = [Path("log.tsv")]
            write_log(arguments.data[0], PlantedModel(seed=1), arguments.examples, 0)
        train = shoal.read_criteo(arguments.data, batch_size=512)
        with (
            shoal.connect(timeout=600, shared_storage=False) as store,
            shoal.LogisticRegression(shoal.FTRL(alpha=0.1, l1=0.5), store=store) as model,
        ):
            for epoch in range(arguments.epochs):
                for split in store.splits(train, split_bytes=arguments.split_bytes):
                    model.fit(split, progress=False)
                print(f"worker {store.rank}: pass {epoch + 1} of {arguments.epochs}", flush=True)
            if store.rank == 0:
                print(f"{model.evaluate(train)}, {len(model.table):,} rows", flush=True)
                if directory is not None:
                    model.save(directory, overwrite=True)


if __name__ == "__main__":
    main()
