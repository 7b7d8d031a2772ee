"""``shoal serve``: predictions of an exported model over HTTP."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from shoal.cli.answers import Answer, complain, naming
from shoal.cli.arguments import cached, command, machine, port, seconds, size

EXAMPLES = """\
examples:
  $ shoal export ctr serve/ctr/1 --dtype float16
  $ shoal serve serve/ctr --port 8080 --watch 5
  $ curl localhost:8080/predict -d '{"instances": [{"keys": [17, 4711]}]}'
  $ shoal export ctr serve/ctr/2 --since serve/ctr/1      # is in place within five seconds
  $ shoal serve s3://models/ctr --watch 30

docs/serving.md has the requests and answers. Ctrl-C ends requests under way first.
"""


def add(commands: Any) -> None:
    """Add the command."""
    run = command(commands, "serve", "Answer predictions of an exported model over HTTP.", EXAMPLES, serve)
    run.add_argument(
        "directory",
        metavar="DIR",
        help="an export of a model, or a directory of them: the newest is served; or s3://...",
    )
    run.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    run.add_argument("--port", type=port, default=8080, help="0: any that is free (default: %(default)s)")
    run.add_argument(
        "--watch", type=seconds, metavar="SECONDS", help="look for a newer version so often (default: never)"
    )
    run.add_argument("--reuse-port", action="store_true", help="several processes may listen there")
    for flag, default, text in (
        ("--max-body", 64 << 20, "refuse larger requests (default: 64 MiB)"),
        ("--max-decoded", 512 << 20, "refuse requests that take more memory once decoded (default: 512 MiB)"),
        ("--max-in-flight", 1 << 30, "memory for all requests at a time; more are answered 503 (default: 1 GiB)"),
    ):
        run.add_argument(flag, type=_some_bytes, default=default, metavar="SIZE", help=text)
    run.add_argument(
        "--max-connections",
        type=_count,
        default=1024,
        metavar="N",
        help="connections at a time; one more takes the place of the one that is idle longest (default: %(default)s)",
    )
    run.add_argument(
        "--request-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="close connections whose request does not arrive, or whose answer is not taken, in this time "
        "(default: %(default)s)",
    )
    run.add_argument("--no-verify", action="store_true", help="start at once, without reading every byte")
    cached(run)
    machine(run)


def _some_bytes(text: str) -> int:
    """Read a size above 0."""
    if (found := size(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0: write it as 8GiB, 512M or 100000")
    return found


def _count(text: str) -> int:
    """Read a number of 1 or more."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def serve(arguments: argparse.Namespace) -> Answer:
    """Serve until told to stop."""
    from shoal.serve import Limits, ServedModel
    from shoal.serve import serve as run

    limits = Limits(
        body_bytes=arguments.max_body,
        decoded_bytes=arguments.max_decoded,
        in_flight_bytes=arguments.max_in_flight,
        connections=arguments.max_connections,
        request_seconds=arguments.request_timeout,
    )
    logging.basicConfig(format="shoal: %(message)s", level=logging.ERROR if arguments.quiet else logging.INFO)
    with ServedModel(
        arguments.directory,
        threads=arguments.threads or 1,
        verify=not arguments.no_verify,
        cache=arguments.cache,
    ) as served:
        if arguments.watch is not None:
            served.watch(arguments.watch)
        first = served.now

        def ready(host: str, port: int) -> None:
            if not arguments.quiet:
                complain(f"version {first.version}, {first.kind}, at http://{host}:{port}")

        with naming(f"{arguments.host}:{arguments.port}"):
            run(
                served,
                host=arguments.host,
                port=arguments.port,
                reuse_port=arguments.reuse_port,
                limits=limits,
                ready=ready,
            )
        return Answer("", {"version": served.now.version, "reloads": served.reloads})
