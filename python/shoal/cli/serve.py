"""``shoal serve``: predictions of an exported model over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli.answers import Answer, complain
from shoal.cli.arguments import cached, command, machine

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
    run.add_argument("--port", type=int, default=8080, help="0: any that is free (default: %(default)s)")
    run.add_argument(
        "--watch", type=float, metavar="SECONDS", help="look for a newer version so often (default: never)"
    )
    run.add_argument("--reuse-port", action="store_true", help="several processes may listen there")
    run.add_argument(
        "--max-body", type=int, default=64 << 20, metavar="BYTES", help="refuse larger requests (default: 64 MiB)"
    )
    run.add_argument("--no-verify", action="store_true", help="start at once, without reading every byte")
    cached(run)
    machine(run)


def serve(arguments: argparse.Namespace) -> Answer:
    """Serve until told to stop."""
    try:
        from shoal.serve import Served
        from shoal.serve import serve as run
    except ModuleNotFoundError as error:
        raise ValueError(f"shoal serve takes {error.name}: pip install 'shoal[serve]'") from None

    with Served(
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

        run(
            served,
            host=arguments.host,
            port=arguments.port,
            reuse_port=arguments.reuse_port,
            most_bytes=arguments.max_body,
            ready=ready,
        )
        return Answer("", {"version": served.now.version, "reloads": served.reloads})
