"""``shoal report``: one HTML file with all there is to see of a model."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer
from shoal.cli.arguments import FORMATS, command, machine, open_reader, reading

EXAMPLES = """\
examples:
  $ shoal report ctr                        # ctr/report.html, with what training recorded
  $ shoal report ctr --data day_1.tsv --out ctr.html

One HTML file with the learning curve, calibration and ROC on the held-out data (without --data, as recorded of the
training's --valid), settings, counts and the largest weights. It loads nothing from anywhere.
"""


def add(commands: Any) -> None:
    """Add the command."""
    seen = command(commands, "report", "Write an HTML page with all there is to see of a model.", EXAMPLES, report)
    seen.add_argument("directory", metavar="DIR", help="the model; or s3://...")
    seen.add_argument(
        "--out", metavar="FILE", help="where the page goes, a path or s3://... (default: DIR/report.html)"
    )
    seen.add_argument("--data", nargs="+", metavar="FILE", help="held-out examples to measure")
    seen.add_argument("--format", choices=FORMATS, help="of the data (default: what the model was trained on)")
    seen.add_argument("--top", type=int, default=30, metavar="N", help="weights to list (default: %(default)s)")
    reading(seen)
    machine(seen)


def report(arguments: argparse.Namespace) -> Answer:
    """Write what there is to see of a model as one HTML file."""
    from shoal.models import files
    from shoal.storage.open import open_dir
    from shoal.tools import reports

    directory = open_dir(arguments.directory)
    if directory.kind() is None:
        raise ValueError(f"{directory}: there is no such model")
    described = files.read(directory)
    form = arguments.format or described.format
    data = None
    if arguments.data is not None:
        if form is None:
            raise ValueError(f"{directory} does not tell the format that it was trained on: pass --format")
        data = open_reader(arguments.data, form, arguments, described.schema)
    out = reports.report(directory, arguments.out, data, top=arguments.top, threads=arguments.threads)
    return Answer(f"{'report':<12} {out}", {"model": str(directory), "report": str(out)})
