"""``shoal keygen``: generate the CURVE keys of a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer, naming
from shoal.cli.arguments import command, machine

EXAMPLES = """\
examples:
  $ shoal keygen --output keys                    # a key pair each for scheduler, server and worker
  $ shoal keygen --output keys --role alice       # a further key pair that is accepted

Copy the .key files to every machine, and each .key_secret file only to the machines that run its role. Then start every
role with --curve DIR. Secret files have mode 0600.
"""


def add(commands: Any) -> None:
    """Add the command."""
    make = command(commands, "keygen", "Generate the CURVE keys of a cluster.", EXAMPLES, keygen)
    make.add_argument(
        "--output", required=True, metavar="DIR", help="directory of the keys; created if it does not exist"
    )
    make.add_argument(
        "--role",
        action="append",
        metavar="NAME",
        help="name of a key pair; repeatable (default: scheduler, server, worker)",
    )
    machine(make, threads=False)


def keygen(arguments: argparse.Namespace) -> Answer:
    """Generate the CURVE keys of a cluster."""
    from shoal.cluster.protocol.curve import ROLES, make_keys

    with naming(arguments.output):
        made = make_keys(arguments.output, arguments.role or ROLES)
    lines = [str(file) + ("  secret" if file.suffix == ".key_secret" else "") for file in made]
    return Answer("\n".join(lines), {"directory": arguments.output, "files": [str(file) for file in made]})
