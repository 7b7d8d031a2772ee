"""``shoal keygen``: generate the CURVE keys of a cluster."""

from __future__ import annotations

from typing import Annotated

from shoal.base.settings import Setting
from shoal.cli.answers import Answer, naming
from shoal.cli.options import Command, Output
from shoal.config import Dir

EXAMPLES = """\
examples:
  $ shoal keygen --output keys                    # a key pair each for scheduler, server and worker
  $ shoal keygen --output keys --role alice       # a further key pair that is accepted

Copy the .key files to every machine, and each .key_secret file only to the machines that run its role. Then start every
role with --curve DIR. Secret files have mode 0600.
"""


class Keygen(Output, frozen=True, kw_only=True):
    """The options of the command."""

    output: Annotated[Dir, "directory of the keys; created if it does not exist"]
    role: Annotated[
        tuple[str, ...], "name of a key pair; repeatable (default: scheduler, server, worker)", Setting(metavar="NAME")
    ] = ()


def keygen(options: Keygen) -> Answer:
    """Generate the CURVE keys of a cluster."""
    from shoal.cluster.protocol.curve import ROLES, make_keys

    with naming(options.output):
        made = make_keys(options.output, options.role or ROLES)
    lines = [str(file) + ("  secret" if file.suffix == ".key_secret" else "") for file in made]
    return Answer("\n".join(lines), {"directory": options.output, "files": [str(file) for file in made]})


COMMANDS = (Command("keygen", "Generate the CURVE keys of a cluster.", EXAMPLES, Keygen, keygen),)
