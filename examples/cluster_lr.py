"""Logistic regression on a cluster. Only the store differs: tables are on servers, and workers share the data.

    python examples/cluster_lr.py                                           # one worker, two servers that it starts
    shoal launch --servers 2 --workers 4 examples/cluster_lr.py --data 'day_0/*.tsv' --valid day_1.tsv --output ctr
    python examples/cluster_lr.py --cluster tcp://scheduler:5570 --workers 16 --data ...     # on each of 16 machines

Under BSP the workers make every step together: the bits are the same on any number of servers, and with one worker they
are those of shoal.local(). Under SSP a worker may be some batches ahead of the slowest, and pushes take effect on
arrival: this is faster if workers differ in speed, but runs are not repeatable. Each worker learns a fixed share of the
data; `store.splits(train)` would assign splits dynamically instead. The first worker measures and saves; others may
leave before that.
"""

import argparse
import os
import tempfile
from pathlib import Path

import shoal
from shoal.tools.planted import PlantedModel, write_log

OPTIMIZER = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)


def open_store(arguments: argparse.Namespace) -> shoal.Store:
    """Join the cluster that has started this process, or start one."""
    rule = shoal.SSP(arguments.staleness) if arguments.staleness else shoal.BSP()
    if arguments.cluster:
        return shoal.connect(arguments.cluster, consistency=rule, workers=arguments.workers)
    return shoal.launch(servers=arguments.servers, consistency=rule)


def learn(store: shoal.Store, train: shoal.data.Reader, test: shoal.data.Reader, directory: str | None) -> None:
    """Do the work of one worker."""
    with shoal.LogisticRegression(OPTIMIZER, store=store) as model:
        model.fit(train.split(store.rank, store.num_workers), progress=False)
        done = model.history.passes[-1]
        print(
            f"worker {store.rank} of {store.num_workers}: {done.metrics}, {done.metrics.examples / done.seconds:,.0f}/s"
        )
        if store.rank == 0:
            print(f"validation: {model.evaluate(test)}")
            print(f"{len(model.table):,} rows, {model.table.count():,} nonzero weights")
            if directory is not None:
                model.save(directory, overwrite=True)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("SHOAL_SCHEDULER"), help="the scheduler")
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers (default: from the environment)")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="to start without a cluster (default: 2)")
    parser.add_argument("--staleness", type=int, default=0, metavar="N", help="in batches; 0 is BSP (default: 0)")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="click logs (Criteo's format; default: drawn)")
    parser.add_argument("--valid", nargs="+", metavar="FILE", help="logs for evaluation only")
    parser.add_argument("--output", metavar="DIR", help="directory of the model")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        if arguments.data is None:
            planted = PlantedModel(seed=1)  # every worker draws the same log
            arguments.data, arguments.valid = [Path(scratch, "train.tsv")], [Path(scratch, "test.tsv")]
            write_log(arguments.data[0], planted, 20_000, 0)
            write_log(arguments.valid[0], planted, 5_000, 1 << 40)
        train = shoal.read_criteo(arguments.data, batch_size=512)
        with open_store(arguments) as store:
            learn(store, train, shoal.read_criteo(arguments.valid or arguments.data), arguments.output)


if __name__ == "__main__":
    main()
