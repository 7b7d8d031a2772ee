"""From a Criteo click log to a deployed model: train, evaluate, save, load, predict.

    python examples/demo.py --output demo     # draws a log
    python examples/from_criteo.py --data demo/planted_train.tsv --valid demo/planted_test.tsv --output ctr
    python examples/from_criteo.py --data day_0.tsv.gz --valid day_1.tsv.gz --output ctr --l1 4

A line of the log is a label, 13 integers and 26 categories, separated by tabs; columns need no preparation or encoding.
One pass is enough: FTRL gives every feature its own learning rate, and l1 keeps the weights of rare features at 0.
"""

import argparse
from pathlib import Path

import shoal


def train(log: Path, directory: Path, optimizer: shoal.FTRL) -> None:
    """Learn from the log in one pass, and save the model."""
    with shoal.LogisticRegression(optimizer) as model:
        model.fit(shoal.read_criteo(log, batch_size=1024))  # a bar shows examples/s, log-loss and AUC
        learned = model.history.passes[0]
        print(f"training        {learned.metrics}, {learned.seconds:.1f} s")
        print(
            f"model           {len(model.table):,} features, {len(model.weights()[0]):,} of them with a nonzero weight"
        )
        model.save(directory, overwrite=True)  # atomic: the old model or the new one, never half of one


def use(log: Path, directory: Path, show: int) -> None:
    """Load the model, evaluate it on unseen examples, and predict some of them one by one."""
    with shoal.LogisticRegression.load(directory) as model:
        print(f"validation      {model.evaluate(shoal.read_criteo(log))}")
        few = next(iter(shoal.read_criteo(log, batch_size=show)))
        for label, probability in zip(few.labels, model.probabilities(few), strict=True):
            print(f"    {probability:6.1%} likely, {'clicked' if label else 'not clicked'}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the log to train on")
    parser.add_argument("--valid", type=Path, required=True, metavar="FILE", help="a later log, for evaluation")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the model")
    parser.add_argument("--alpha", type=float, default=0.08, help="learning rate (default: %(default)s)")
    parser.add_argument("--l1", type=float, default=1.0, help="larger: fewer nonzero weights (default: %(default)s)")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="predictions to print (default: %(default)s)")
    arguments = parser.parse_args()

    train(arguments.data, arguments.output, shoal.FTRL(alpha=arguments.alpha, l1=arguments.l1))
    use(arguments.valid, arguments.output, arguments.show)


if __name__ == "__main__":
    main()
