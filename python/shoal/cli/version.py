"""``shoal --version``: the version, the build and the processor, as a bug report needs them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shoal.cli.answers import log_line, naming


def describe() -> str:
    """Return the version of shoal, how its engine was compiled, and what it runs on."""
    import importlib.metadata
    import platform

    import zmq

    from shoal import _core

    build = _core.build_info()
    checks = ", invariants checked" if build["checked"] else ""
    features = ", ".join(build["cpu_features"]) or "baseline"
    return "\n".join(
        [
            f"shoal {importlib.metadata.version('shoal')}",
            f"{'build':<8} {build['build_type']}, {build['compiler']}{checks}",
            f"{'CPU':<8} {platform.machine()}: {features}",
            f"{'runtime':<8} Python {platform.python_version()}, pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}",
        ]
    )


class Version(argparse.Action):
    """Print `describe` and exit."""

    def __init__(self, **how: Any) -> None:
        super().__init__(nargs=0, **how)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the version and exit with status 0."""
        with naming("standard output"):
            log_line(describe())
        parser.exit(0)
