"""``shoal keygen``: the keys of a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer, naming
from shoal.cli.arguments import command, machine

EXAMPLES = """\
examples:
  $ shoal keygen keys                       # a pair each for scheduler, server and worker
  $ shoal keygen keys --role alice          # one more that is let in

Give every machine the .key files, and only those .key_secret files of the roles that run there; then start each role
with --curve DIR. Secret files have mode 0600.
"""


def add(commands: Any) -> None:
    """Add the command."""
    make = command(commands, "keygen", "Make the keys of a cluster.", EXAMPLES, keygen)
    make.add_argument("directory", metavar="DIR", help="where to put them; made if it is not there")
    make.add_argument(
        "--role",
        action="append",
        metavar="NAME",
        help="whose keys; again for more (default: scheduler, server, worker)",
    )
    machine(make, threads=False)


def keygen(arguments: argparse.Namespace) -> Answer:
    """Make the keys of a cluster."""
    from shoal.cluster.protocol.curve import ROLES, make_keys

    with naming(arguments.directory):
        made = make_keys(arguments.directory, arguments.role or ROLES)
    lines = [str(file) + ("  secret" if file.suffix == ".key_secret" else "") for file in made]
    return Answer("\n".join(lines), {"directory": arguments.directory, "files": [str(file) for file in made]})
