"""``shoal demo``: watch a model train on a planted or a real click log."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.base.machine import local_path
from shoal.cli.answers import Answer, naming, nothing, say
from shoal.cli.arguments import PLAIN_FORMATS, command, machine

EXAMPLES = """\
examples:
  $ shoal demo --out demo
  $ shoal demo --out demo --examples 20000 --seed 7
  $ shoal demo --out mine --data day_0.tsv --format criteo

Without --data it draws a log of Criteo's form from a planted model, so that the best reachable log-loss is known.
Of a real file the last tenth is held out, unless --valid names another one.
"""


def add(commands: Any) -> None:
    """Add the command."""
    show = command(commands, "demo", "Watch a model train, and see how near it comes to the truth.", EXAMPLES, demo)
    show.add_argument("--out", required=True, metavar="DIR", help="where log, model and picture go")
    show.add_argument("--data", metavar="FILE", help="a real file (default: draw one)")
    show.add_argument("--format", choices=PLAIN_FORMATS, help="of the real file")
    show.add_argument("--valid", metavar="FILE", help="its held-out file (default: the last tenth)")
    show.add_argument("--examples", type=int, default=300_000, metavar="N", help="to draw (default: %(default)s)")
    show.add_argument("--seed", type=int, default=0, help="of the planted model (default: %(default)s)")
    machine(show)


def demo(arguments: argparse.Namespace) -> Answer:
    """Train on a planted or a real click log and tell how it went."""
    from shoal.tools import demo

    if arguments.data is not None and arguments.format is None:
        raise ValueError(f"--data needs --format: one of {', '.join(PLAIN_FORMATS)}")
    if arguments.data is None and arguments.valid is not None:
        raise ValueError("--valid goes with --data: the planted log has a held-out part of its own")
    if arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}: pass 0 or more")
    with naming(arguments.out):
        report = demo.run(
            local_path(arguments.out),
            data=arguments.data,
            data_format=arguments.format or "criteo",
            valid=arguments.valid,
            examples=arguments.examples,
            seed=arguments.seed,
            threads=arguments.threads,
            progress=not arguments.quiet,
            log_line=nothing if arguments.json or arguments.quiet else say,
        )
    import msgspec

    return Answer("", msgspec.to_builtins(report))
