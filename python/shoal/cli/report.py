"""``shoal report``: describe a model in one HTML file."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer
from shoal.cli.arguments import FORMATS, command, format_for_model, machine, open_reader, overwriting, reading

EXAMPLES = """\
examples:
  $ shoal report ctr                        # ctr/report.html, from what training recorded
  $ shoal report ctr --data day_1.tsv --output ctr.html

The HTML file has the learning curve, the calibration and ROC curves on --data (by default as recorded on the --valid of
the training), settings, counts and the largest weights. It is self-contained.
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "report", "Write an HTML report of a model.", EXAMPLES, report)
    parser.add_argument("model", metavar="MODEL", help="directory of the model, or s3://...")
    parser.add_argument("--output", metavar="FILE", help="HTML file, a path or s3://... (default: MODEL/report.html)")
    overwriting(parser, "file of --output")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="validation examples to measure the model on")
    parser.add_argument("--format", choices=FORMATS, help="format of the data (default: that of the training data)")
    parser.add_argument(
        "--top", type=int, default=30, metavar="N", help="number of weights to list (default: %(default)s)"
    )
    reading(parser)
    machine(parser)


def report(arguments: argparse.Namespace) -> Answer:
    """Write the HTML report of a model."""
    from shoal.models import files
    from shoal.storage.open import open_dir
    from shoal.tools import reports

    directory = open_dir(arguments.model)
    if directory.kind() is None:
        raise ValueError(f"{directory}: there is no such model")
    described = files.read(directory)
    data = None
    if arguments.data is not None:
        form = format_for_model(arguments, directory, described.format)
        data = open_reader(arguments.data, form, arguments, described.schema, learned=described.format)
    out = reports.report(
        directory, arguments.output, data, overwrite=arguments.overwrite, top=arguments.top, threads=arguments.threads
    )
    return Answer(f"{'report':<12} {out}", {"model": str(directory), "report": str(out)})
