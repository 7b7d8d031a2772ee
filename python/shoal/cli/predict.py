"""``shoal predict`` and ``shoal evaluate``: write predictions of a model, and measure them."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from shoal.base.machine import local_path
from shoal.base.plural import counted
from shoal.cli.answers import Answer, naming, warn
from shoal.cli.arguments import FORMATS, command, format_for_model, machine, open_reader, overwriting, reading

if TYPE_CHECKING:
    from shoal.data import Reader
    from shoal.models.predictor import Predictor

PREDICT_EXAMPLES = """\
examples:
  $ shoal predict ctr --data day_1.tsv --output day_1.probabilities
  $ shoal predict ctr --data day_1.tsv --output - | head -3

The output has one probability of label 1 per example, in the order of the data, with all digits of a float64; of a
model of several classes the probabilities of all classes, separated by tabs. The file appears when it is complete; an
existing one is replaced only with --overwrite. The data has the model's format. Labels are ignored and may be missing:
the label column of csv and parquet, the first column of criteo, the first word of libsvm and libffm, the text before
the bar of vw.
"""

EVALUATE_EXAMPLES = """\
examples:
  $ shoal evaluate ctr --data day_1.tsv
  $ shoal evaluate small --data test.libsvm --json

  logloss      mean negative log-likelihood, in nats per example
  AUC          share of (positive, negative) pairs in the right order; ties count half
  calibration  positives divided by predicted positives: 1 is perfect
  NE           normalized entropy: logloss divided by that of always predicting the share of positives
  accuracy     of several classes: share of the examples whose likeliest class is their own
"""


def add(commands: Any) -> None:
    """Add the commands."""
    one = command(commands, "predict", "Write the predicted probabilities of examples.", PREDICT_EXAMPLES, predict)
    one.add_argument("--output", required=True, metavar="FILE", help="file of the probabilities; - is standard output")
    overwriting(one, "file")
    two = command(commands, "evaluate", "Measure a model on labelled examples.", EVALUATE_EXAMPLES, evaluate)
    for parser in (one, two):
        parser.add_argument("model", metavar="MODEL", help="directory of the model, or s3://...")
        parser.add_argument(
            "--data", required=True, nargs="+", metavar="FILE", help="examples: files, patterns, URLs, or -"
        )
        parser.add_argument("--format", choices=FORMATS, help="format of the data (default: that of the training data)")
        reading(parser)
        machine(parser)


def predict(arguments: argparse.Namespace) -> Answer:
    """Write one probability per line."""
    from shoal.storage.output import check_output

    if arguments.output == "-" and arguments.json:
        raise ValueError("--output - and --json both use standard output: name a file")
    with _loaded(arguments) as (model, reader):
        examples = 0
        called = "standard output" if arguments.output == "-" else arguments.output
        if arguments.output not in ("", "-"):
            check_output(arguments.output, overwrite=arguments.overwrite, inputs=reader.paths)
        with naming(called), _output(arguments.output) as file:
            for batch in reader.unlabelled():
                p = model.predict_proba(batch)
                if p.ndim == 2:  # of several classes
                    file.write("".join(["\t".join(map(repr, row)) + "\n" for row in p.tolist()]))
                else:
                    file.write("".join([f"{x!r}\n" for x in p.tolist()]))
                examples += len(p)
        skipped = f"{counted(reader.skipped, 'malformed line')} skipped, without output"
        note = f", {skipped}" if reader.skipped else ""
        text = "" if arguments.output == "-" else f"{examples:,} probabilities in {arguments.output}{note}"
        if note and arguments.output == "-":
            warn(skipped)
        return Answer(text, {"examples": examples, "skipped": reader.skipped, "output": arguments.output})


def evaluate(arguments: argparse.Namespace) -> Answer:
    """Measure predictions against the labels."""
    from shoal.models.evaluation import measure

    note = ""
    with _loaded(arguments) as (model, reader):
        metrics, _, grouped = measure([model], reader)[0]
        if grouped is not None:
            note = (
                f"\nGAUC {grouped.gauc:.6f}  ({grouped.groups:,} groups, {grouped.left_out:,} with one class skipped)"
            )
        note += f"\n{counted(reader.skipped, 'malformed line')} skipped" if reader.skipped else ""
        facts: dict[str, Any] = {
            "model": arguments.model,
            "data": reader.path,
            "logloss": metrics.logloss,
            "examples": metrics.examples,
            "weight": metrics.weight,
            "skipped": reader.skipped,
        }
        if metrics.accuracy is not None:
            facts["accuracy"] = metrics.accuracy
        else:
            facts |= {
                "auc": metrics.auc,
                "calibration": metrics.calibration,
                "base_rate": metrics.base_rate,
                "normalized_entropy": metrics.normalized_entropy,
                "gauc": None if grouped is None else grouped.gauc,
            }
        return Answer(f"{metrics}{note}", facts)


@contextmanager
def _loaded(arguments: argparse.Namespace) -> Iterator[tuple[Predictor, Reader]]:
    """Load the model, and open the data in the model's format."""
    from shoal import models
    from shoal.models import files
    from shoal.storage.open import open_dir

    where = open_dir(arguments.model)
    if where.kind() is None:
        raise ValueError(f"{where}: there is no such model")
    with files.store_for(where, threads=arguments.threads) as store:
        model: Predictor
        if files.read(where).model == files.CLICK:
            from shoal.torch import load

            model = load(where, store=store)
        else:
            model = models.load(where, store=store)
        form = format_for_model(arguments, arguments.model, model.format)
        reader = open_reader(arguments.data, form, arguments, model.schema)
        reader = model.reading(reader)
        model.check_format(reader)
        yield model, reader


@contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """Open standard output for ``-``, otherwise a file that replaces ``path`` when it is complete."""
    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    if not path:
        raise ValueError("--output is empty: name a file, or - for standard output")
    target = local_path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a directory: name a file, or - for standard output")
    if target.exists() and not target.is_file():  # a pipe, a device: nothing to replace
        with target.open("w", encoding="ascii") as file:
            yield file
        return
    if not target.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {target.parent}")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="ascii") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
