"""``shoal role``: the scheduler or a server that a launcher starts; no help shows it."""

from __future__ import annotations

from shoal.base.settings import Config
from shoal.cli.answers import Answer, log_line
from shoal.cli.options import Command


def run_role(options: Config) -> Answer:
    """Run the role whose configuration comes from standard input."""
    from shoal.cluster.launch.roles import run_child

    run_child(log_line)
    return Answer("", {})


ROLE = Command("role", "Run a role of a launcher.", "", Config, run_role, role="role")
