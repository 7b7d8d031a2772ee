"""DeepFM with tables of a store: train on a click log, stop early, load the model, predict.

    python examples/ctr_deepfm.py                                   # draws a log
    python examples/ctr_deepfm.py --data day_0.csv --valid day_1.csv --label click --fields user,ad,site

Columns may contain any text: keys are hashes, so there is no vocabulary to build and no number of rows to choose. If
the program is interrupted, the next start continues from the last checkpoint. `shoal train ctr` does the same with a
configuration file (docs/ctr.md). Requires PyTorch: pip install 'shoal[torch]'
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import shoal
from shoal.models import Checkpointing, EarlyStopping


def write_log(path: Path, rows: int, seed: int) -> None:
    """Write impressions of ads: each user likes some ads, on any site."""
    rng = np.random.default_rng(seed)
    user, ad, site = rng.zipf(1.3, rows) % 2000, rng.zipf(1.3, rows) % 300, rng.integers(0, 20, rows)
    taste = np.random.default_rng(0)
    users, ads, sites = taste.normal(size=(2000, 4)), taste.normal(size=(300, 4)), taste.normal(size=20)
    odds = -1 + (users[user] * ads[ad]).sum(axis=1) + 0.5 * sites[site]
    click = rng.random(rows) < 1 / (1 + np.exp(-odds))
    lines = [f"{c:d},u{u},a{a},s{s}" for c, u, a, s in zip(click, user, ad, site, strict=True)]
    path.write_text("\n".join(["click,user,ad,site", *lines]) + "\n")


def main() -> None:
    """Train, and predict the held-out examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CSV with a header (default: drawn)")
    parser.add_argument("--valid", help="CSV for validation")
    parser.add_argument("--label", default="click")
    parser.add_argument("--fields", default="user,ad,site", help="text columns, the user first")
    parser.add_argument("--output", default="clicks", help="directory of the model and its checkpoints")
    parser.add_argument("--epochs", type=int, default=8, help="maximum number of passes")
    options = parser.parse_args()
    if options.data is None:
        options.data, options.valid = "day_0.csv", "day_1.csv"
        for seed, (name, rows) in enumerate([(options.data, 30_000), (options.valid, 10_000)], start=1):
            write_log(Path(name), rows, seed)
    names = options.fields.split(",")
    features = shoal.torch.Features(names, group=names[0])  # GAUC groups impressions by user
    log = {"label": options.label, "categorical": names, "batch_size": 512}

    torch.manual_seed(7)
    with shoal.local() as store:
        make = shoal.torch.tables(store, shoal.Adagrad(lr=0.05), init=shoal.Normal(0.05, seed=7))
        module = shoal.torch.models.DeepFM(make, features, dim=8, hidden=(64, 32))
        optimizer = torch.optim.Adam(module.parameters(), lr=0.002)
        model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
        model.fit(
            shoal.read_csv(options.data, **log),
            valid=shoal.read_csv(options.valid, **log),
            epochs=options.epochs,
            checkpoint=Checkpointing(options.output, resume=True),
            early_stopping=EarlyStopping(1),
        )
        best = model.history.passes[(model.history.best_pass or len(model.history.passes)) - 1]
        rows = sum(len(table) for table in model.tables)
        print(f"best      pass {best.number} of {len(model.history.passes)}, {rows:,} rows")
        print(f"valid     {best.valid}, GAUC {best.grouped.gauc:.4f}")
        first = next(iter(model.reading(shoal.read_csv(options.valid, **log))))
        print("predicted", " ".join(f"{p:.3f}" for p in model.probabilities(first)[:5]))


if __name__ == "__main__":
    main()
