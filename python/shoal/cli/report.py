"""``shoal report``: describe a model in one HTML file."""

from __future__ import annotations

from typing import Annotated

from shoal.base.settings import Setting
from shoal.cli.answers import Answer
from shoal.cli.options import Command
from shoal.cli.reading import Model, ModelFormat, Reading, Segments, columns_of, format_for_model, open_reader
from shoal.config import File, Number, Threads

EXAMPLES = """\
examples:
  $ shoal report ctr                        # ctr/report.html, from what training recorded
  $ shoal report ctr --data day_1.tsv --output ctr.html
  $ shoal report ads --data ads_1.csv --segments site,user

The HTML file has the learning curve, the calibration and ROC curves on --data (by default as recorded on the --valid of
the training), settings, counts and the largest weights. It is self-contained.
"""


class Report(Reading, frozen=True, kw_only=True):
    """The options of the command."""

    model: Model
    output: Annotated[File | None, "HTML file, a path or s3://... (default: MODEL/report.html)"] = None
    overwrite: Annotated[bool, "replace an existing file of --output"] = False
    data: Annotated[
        tuple[str, ...], "validation examples to measure the model on", Setting(metavar="FILE", several=True)
    ] = ()
    format: ModelFormat = None
    segments: Segments = ()
    top: Annotated[Number, "number of weights to list"] = 30
    threads: Threads = None


def report(options: Report) -> Answer:
    """Write the HTML report of a model."""
    from shoal.models import files
    from shoal.storage.open import open_dir
    from shoal.tools import reports

    directory = open_dir(options.model)
    if directory.kind() is None:
        raise ValueError(f"{directory}: there is no such model")
    described = files.read(directory)
    data, segments = None, {}
    if options.segments and (not options.data or options.on_error == "skip"):
        raise ValueError("--segments requires --data, which it reads twice, without --on-error skip")
    if options.data:
        form = format_for_model(options.data, options.format, directory, described.format)
        data = open_reader(options.data, form, options, described.schema, learned=described.format)
        if options.segments:
            segments = columns_of(options.data, options, data, options.segments, "--segments")
    out = reports.report(
        directory,
        options.output,
        data,
        segments=segments,
        overwrite=options.overwrite,
        top=options.top,
        threads=options.threads,
    )
    return Answer(f"{'report':<12} {out}", {"model": str(directory), "report": str(out)})


COMMANDS = (Command("report", "Write an HTML report of a model.", EXAMPLES, Report, report),)
