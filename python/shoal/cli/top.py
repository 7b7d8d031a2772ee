"""``shoal top ADDRESS``: what a running cluster does, on a screen, once as text, or as JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from shoal.base.streams import escape_lines
from shoal.cli.answers import FAILED, Answer, print_output
from shoal.cli.arguments import command, machine, scheduler_options, seconds
from shoal.cli.top_view import describe

EXAMPLES = """\
examples:
  $ shoal top tcp://10.0.0.1:5570 --curve keys
  $ shoal top tcp://10.0.0.1:5570 --once
  $ shoal top tcp://10.0.0.1:5570 --json

Rates and times are those of the last 10 seconds. On a terminal, with pip install 'shoal[top]', Tab and the arrow keys
move through the tables, s sorts by the column of the cursor, p pauses, d changes between dark and light, and q ends the
display; without that extra Ctrl-C ends it. The exit status is 1 if a server was lost with its rows.
"""

_CLEAR = "\x1b[H\x1b[2J"


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(commands, "top", "Show what the servers and workers of a running cluster do.", EXAMPLES, run)
    parser.add_argument("address", metavar="ADDRESS", help="tcp://HOST:PORT of the scheduler")
    parser.add_argument("--once", action="store_true", help="print the view once; so without a terminal, too")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds between two refreshes (default: %(default)s)",
    )
    scheduler_options(parser)
    machine(parser, threads=False)


def run(arguments: argparse.Namespace) -> Answer:
    """Ask the scheduler for the view, and describe it; repeat that on a terminal."""
    from shoal.cluster.protocol.curve import Keys
    from shoal.cluster.protocol.environment import find_keys
    from shoal.cluster.protocol.scheduler_client import SchedulerClient

    directory = arguments.curve or find_keys(os.environ)
    keys = None if directory is None else Keys.load(directory, "worker")
    is_once = arguments.once or arguments.json or not sys.stdout.isatty()
    with SchedulerClient(arguments.address, "observer", keys=keys) as client:

        def ask() -> dict[str, Any]:
            return client.view(timeout=arguments.timeout)

        view = ask()
        if not is_once:
            view = _screen(ask, view, arguments.interval, client.close)
    return Answer(describe(view), view, FAILED if view["lost"] else 0)


def _screen(
    ask: Callable[[], dict[str, Any]], view: dict[str, Any], interval: float, cancel: Callable[[], None]
) -> dict[str, Any]:
    """Display views until the user ends it, and return the last one: by Textual, or as text without it."""
    try:
        from shoal.cli.top_screen import TopScreen
    except ImportError:
        while True:
            print_output(
                f"{_CLEAR}{escape_lines(describe(view))}\n\nA screen with sorted tables: pip install 'shoal[top]'"
            )
            time.sleep(interval)
            view = ask()
    screen = TopScreen(ask, view, interval, cancel)
    screen.run()
    return screen.view
