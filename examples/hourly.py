"""Online learning: every hour, load the last model, evaluate it on the new log, train on the log, save.

    python examples/hourly.py                                     # on eight small hours that it draws
    python examples/hourly.py --output ctr --format criteo logs/2026-11-21T*.tsv
    python examples/hourly.py --output ctr --format criteo logs/2026-11-22T00.tsv       # an hour later, by cron

One pass over an hour both evaluates and trains: each batch is predicted before it is learned, so the metrics are those
of a model that had not seen it (progressive validation). The model is saved atomically, with the state of its
optimizer: training on the next hour continues as without a break, and a run that was killed is simply repeated.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import shoal

READERS = {"libsvm": shoal.read_libsvm, "criteo": shoal.read_criteo}
OPTIMIZER = shoal.FTRL(alpha=0.1, beta=1.0, l1=0.5)


def learn_hour(hour: shoal.data.Reader, directory: Path) -> tuple[shoal.metrics.Metrics, int]:
    """Learn one hour; return the metrics of its predictions, and the number of features that the model now has."""
    known = directory.exists()
    with shoal.LogisticRegression.load(directory) if known else shoal.LogisticRegression(OPTIMIZER) as model:
        model.fit(hour, progress=False)
        model.save(directory, overwrite=True)
        return model.history.passes[-1].metrics, len(model.table)


def draw_hours(folder: Path, hours: int = 8, examples: int = 4000) -> list[Path]:
    """Draw logs with drift: 300 ads on 40 sites; every hour the popularity of some ads changes."""
    rng = np.random.default_rng(7)
    ads, sites = rng.normal(0.0, 0.8, 300), rng.normal(-1.5, 0.6, 40)
    paths = [folder / f"hour-{hour:02}.libsvm" for hour in range(hours)]
    for path in paths:
        ad, site = rng.integers(300, size=examples), rng.integers(40, size=examples)
        clicked = rng.random(examples) < 1 / (1 + np.exp(-ads[ad] - sites[site]))
        rows = zip(clicked.astype(int), ad, 1000 + site, strict=True)
        path.write_text("".join(f"{label} {first}:1 {second}:1\n" for label, first, second in rows))
        ads += rng.normal(0.0, 0.1, 300)
    return paths


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hours", nargs="*", type=Path, metavar="FILE", help="logs in the order of time")
    parser.add_argument("--format", choices=READERS, default="libsvm", help="format of the logs (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory of the model (default: temporary)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples a step (default: 32)")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        hours = arguments.hours or draw_hours(Path(scratch))
        directory = arguments.output or Path(scratch, "model")
        print(f"{'hour':<20} {'examples':>9} {'clicked':>8} {'log-loss':>9} {'NE':>7} {'AUC':>7} {'features':>9}")
        for path in hours:
            log = READERS[arguments.format](path, batch_size=arguments.batch_size)
            m, features = learn_hour(log, directory)
            print(
                f"{path.stem:<20} {m.examples:>9,} {m.base_rate:>8.2%} {m.logloss:>9.4f} {m.normalized_entropy:>7.4f} "
                f"{m.auc:>7.4f} {features:>9,}"
            )


if __name__ == "__main__":
    main()
