"""From a pandas frame to a deployed model: train, evaluate, inspect the weights, save, load, predict.

    python examples/from_pandas.py                                  # draws a frame
    python examples/from_pandas.py --data ads.csv.gz --label click --numeric price --pairs site,device

Text, numbers, missing cells and categories need no preparation: each distinct text of a column is a feature, a numeric
column is one feature, and a missing cell is no feature. Frames of polars, tables of pyarrow and relations of DuckDB are
accepted as well. Requires pandas and pyarrow: pip install 'shoal[arrow]' pandas
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import shoal


def draw(rows: int, seed: int = 7) -> pd.DataFrame:
    """Draw impressions of ads: clicks depend on the site, the price, and the pair of site and device."""
    rng = np.random.default_rng(seed)
    site, device = rng.zipf(1.5, rows) % 500, rng.integers(0, 3, rows)
    price = rng.lognormal(size=rows)
    liking, together = rng.normal(size=500), rng.normal(size=(500, 3))
    odds = -1.5 + liking[site] + together[site, device] - 0.3 * price
    return pd.DataFrame(
        {
            "click": (rng.random(rows) < 1 / (1 + np.exp(-odds))).astype(np.int8),
            "site": pd.Series([f"site-{s}.com" for s in site], dtype="category"),
            "device": np.array(["phone", "tablet", "desktop"])[device],
            "price": np.where(rng.random(rows) < 0.1, np.nan, price),
        }
    )


def train(frame: pd.DataFrame, directory: Path, label: str, numeric: list[str], pairs: list[str]) -> None:
    """Learn from the frame in one pass, print the largest weights, and save the model."""
    names = shoal.data.FeatureNames()
    reader = shoal.read_arrow(frame, label=label, numeric=numeric, interactions=pairs, batch_size=256, names=names)
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.2, l1=0.5)) as model:
        model.fit(reader)  # a bar shows examples/s, log-loss and AUC
        print(f"training        {model.history.passes[0].metrics}")
        for name, weight in zip(*model.top(5, names=names), strict=True):
            print(f"    {weight:+7.3f} {name}")
        model.save(directory, overwrite=True, names=names)


def use(frame: pd.DataFrame, directory: Path, label: str) -> None:
    """Load the model, evaluate it on unseen rows, and predict rows without a label."""
    with shoal.LogisticRegression.load(directory) as model:
        schema = model.schema  # label, numeric columns, pairs: the model remembers
        print(f"validation      {model.evaluate(shoal.read_arrow(frame, **schema))}")
        unlabelled = frame.drop(columns=label).head(5)
        scores = model.probabilities(shoal.read_arrow(unlabelled.assign(**{label: 0}), **schema))
        print(unlabelled.assign(probability=scores).to_string(index=False))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="read the frame from here; its last fifth is held out"
    )
    parser.add_argument("--label", default="click", metavar="NAME", help="column of 0 and 1 (default: %(default)s)")
    parser.add_argument(
        "--numeric", default="price", metavar="A,B,...", help="columns of numbers (default: %(default)s)"
    )
    parser.add_argument("--pairs", default="site,device", metavar="A,B", help="columns to cross (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("ads"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args()
    frame = draw(60_000) if arguments.data is None else pd.read_csv(arguments.data)
    numeric, pairs = ([name for name in text.split(",") if name] for text in (arguments.numeric, arguments.pairs))
    seen = len(frame) * 4 // 5
    train(frame[:seen], arguments.output, arguments.label, numeric, pairs)
    use(frame[seen:], arguments.output, arguments.label)


if __name__ == "__main__":
    main()
