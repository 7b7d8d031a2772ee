"""``shoal demo``: train on a synthetic or a real click log and draw the learning curve."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.base.machine import local_path
from shoal.cli.answers import Answer, log_line, naming, no_op
from shoal.cli.arguments import PLAIN_FORMATS, command, machine, overwriting

EXAMPLES = """\
examples:
  $ shoal demo --output demo
  $ shoal demo --output small --examples 20000 --seed 7
  $ shoal demo --output mine --data day_0.tsv --format criteo

Without --data the command generates a log in Criteo's format from a known model, so that the best possible log loss is
known. The last tenth of a real file is held out for validation, unless --valid names another file.
"""


def add(commands: Any) -> None:
    """Add the command."""
    show = command(commands, "demo", "Train on a synthetic click log and draw the learning curve.", EXAMPLES, demo)
    show.add_argument("--output", required=True, metavar="DIR", help="directory of the log, the model and the picture")
    show.add_argument("--data", metavar="FILE", help="a real click log (default: generate one)")
    show.add_argument("--format", choices=PLAIN_FORMATS, help="format of --data")
    show.add_argument("--valid", metavar="FILE", help="validation examples (default: the last tenth of --data)")
    show.add_argument(
        "--examples",
        type=int,
        default=300_000,
        metavar="N",
        help="number of examples to generate (default: %(default)s)",
    )
    show.add_argument("--seed", type=int, default=0, help="seed of the generated log (default: %(default)s)")
    overwriting(show, "log, model and picture")
    machine(show)


def demo(arguments: argparse.Namespace) -> Answer:
    """Train on a synthetic or a real click log and report the result."""
    from shoal.tools import demo

    if arguments.data is not None and arguments.format is None:
        raise ValueError(f"--data requires --format: one of {', '.join(PLAIN_FORMATS)}")
    if arguments.data is None and arguments.valid is not None:
        raise ValueError("--valid requires --data: the generated log has validation examples of its own")
    if arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}: pass 0 or more")
    with naming(arguments.output):
        report = demo.run(
            local_path(arguments.output),
            data=arguments.data,
            data_format=arguments.format or "criteo",
            valid=arguments.valid,
            examples=arguments.examples,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            progress=not arguments.quiet,
            log_line=no_op if arguments.json or arguments.quiet else log_line,
        )
    import msgspec

    return Answer("", msgspec.to_builtins(report))
