"""``shoal serve``: serve predictions of an exported model over HTTP."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from shoal.cli.answers import Answer, naming, warn
from shoal.cli.arguments import cached, command, machine, port, seconds, size

EXAMPLES = """\
examples:
  $ shoal export ctr --output serve/ctr/1 --dtype float16
  $ shoal serve serve/ctr --port 8080 --watch 5
  $ curl localhost:8080/predict -d '{"instances": [{"keys": [17, 4711]}]}'
  $ shoal export ctr --output serve/ctr/2 --since serve/ctr/1      # served within five seconds
  $ shoal serve s3://models/ctr --watch 30

docs/serving.md documents the requests and responses. Ctrl-C completes the requests in progress first.
"""


def add(commands: Any) -> None:
    """Add the command."""
    run = command(commands, "serve", "Serve predictions of an exported model over HTTP.", EXAMPLES, serve)
    run.add_argument(
        "path",
        metavar="EXPORT",
        help="export of a model, or a directory of exports, of which the newest is served; or s3://...",
    )
    run.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    run.add_argument(
        "--port", type=port, default=8080, help="port to listen on; 0: any free port (default: %(default)s)"
    )
    run.add_argument(
        "--watch", type=seconds, metavar="SECONDS", help="check for a newer version at this interval (default: never)"
    )
    run.add_argument("--reuse-port", action="store_true", help="allow several processes to listen on the port")
    for flag, default, text in (
        ("--max-body", 64 << 20, "largest request body (default: 64 MiB)"),
        ("--max-decoded", 512 << 20, "largest memory of a decoded request (default: 512 MiB)"),
        (
            "--max-in-flight",
            1 << 30,
            "memory of all requests in progress; further ones get status 503 (default: 1 GiB)",
        ),
    ):
        run.add_argument(flag, type=_some_bytes, default=default, metavar="SIZE", help=text)
    run.add_argument(
        "--max-connections",
        type=_count,
        default=1024,
        metavar="N",
        help="number of connections; a further one replaces the longest idle one (default: %(default)s)",
    )
    run.add_argument(
        "--request-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="time in which a request must arrive and a response must be accepted, or the connection is closed "
        "(default: %(default)s)",
    )
    run.add_argument("--no-verify", action="store_true", help="start without verifying checksums")
    cached(run)
    machine(run)


def _some_bytes(text: str) -> int:
    """Parse a size above 0."""
    if (found := size(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0: write it as 8GiB, 512M or 100000")
    return found


def _count(text: str) -> int:
    """Parse a number of 1 or more."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def serve(arguments: argparse.Namespace) -> Answer:
    """Serve until a signal arrives."""
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
        arguments.path,
        threads=arguments.threads or 1,
        verify=not arguments.no_verify,
        cache=arguments.cache,
    ) as served:
        if arguments.watch is not None:
            served.watch(arguments.watch)
        first = served.now

        def ready(host: str, port: int) -> None:
            if not arguments.quiet:
                warn(f"version {first.version}, {first.kind}, at http://{host}:{port}")

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
