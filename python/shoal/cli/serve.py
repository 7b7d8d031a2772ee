"""``shoal serve``: serve predictions of an exported model over HTTP."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from contextlib import ExitStack
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

  two models; of ctr two versions, the newer one for a twentieth of the requests:
  $ shoal serve --model ctr=serve/ctr --model pairs=serve/pairs --labels ctr=stable:1,canary:2 \\
      --split ctr=stable:0.95,canary:0.05

docs/serving.md documents the requests and responses. Ctrl-C completes the requests in progress first.
"""


def add(commands: Any) -> None:
    """Add the command."""
    run = command(commands, "serve", "Serve predictions of an exported model over HTTP.", EXAMPLES, serve)
    run.add_argument(
        "path",
        nargs="?",
        metavar="EXPORT",
        help="export of a model, or a directory of exports, of which the newest is served; or s3://...",
    )
    group = run.add_argument_group("models", "Several models, and several versions of each.")
    group.add_argument(
        "--model",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=EXPORT",
        help="serve this export, or directory of exports, at /models/NAME; repeatable; instead of EXPORT",
    )
    group.add_argument(
        "--versions",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=WHICH",
        help="versions of a model to serve: latest (default), latest:N, all, or numbers as 3,5",
    )
    group.add_argument(
        "--labels",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=LABEL:N,...",
        help="labels of versions, as ctr=stable:3,canary:4, which are served at /models/NAME/labels/LABEL",
    )
    group.add_argument(
        "--split",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=LABEL:SHARE,...",
        help="shares of the requests that name no version, as ctr=stable:0.95,canary:0.05",
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


def _named(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not a model's name and a value: write it as ctr=serve/ctr")
    return name, value


def _pairs(option: str, text: str, number: Callable[[str], Any]) -> dict[str, Any]:
    """Parse LABEL:NUMBER,..."""
    found = {}
    for one in text.split(","):
        label, _, value = one.rpartition(":")
        try:
            found[label] = number(value)
        except ValueError:
            label = ""
        if not label:
            raise ValueError(f"{option} has {one!r}: write a label and a number, as in canary:4") from None
    return found


def _models(arguments: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the export and the settings of each model, by name."""
    from shoal.serve.versions import parse_policy

    if (arguments.path is None) == (not arguments.model):
        raise ValueError("pass either EXPORT or --model NAME=EXPORT")
    named = dict(arguments.model)
    if len(named) < len(arguments.model):
        raise ValueError("--model names a model twice: give each a name of its own")
    found: dict[str, tuple[str, dict[str, Any]]] = {name: (path, {}) for name, path in named.items()}
    for option in ("versions", "labels", "split"):
        for name, text in getattr(arguments, option):
            if name not in found:
                raise ValueError(
                    f"--{option} names {name!r}, which is no --model: those are {', '.join(found) or 'none'}"
                )
            try:
                found[name][1].update(
                    parse_policy(text)
                    if option == "versions"
                    else {option: _pairs(f"--{option}", text, int if option == "labels" else float)}
                )
            except ValueError as error:
                raise ValueError(str(error) if str(error).startswith("--") else f"--{option}: {error}") from None
    return found


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
    from shoal.serve import Limits, ServedModel, ServedVersions, Settings
    from shoal.serve import serve as run

    limits = Limits(
        body_bytes=arguments.max_body,
        decoded_bytes=arguments.max_decoded,
        in_flight_bytes=arguments.max_in_flight,
        connections=arguments.max_connections,
        request_seconds=arguments.request_timeout,
    )
    logging.basicConfig(format="shoal: %(message)s", level=logging.ERROR if arguments.quiet else logging.INFO)
    models = _models(arguments)
    how: dict[str, Any] = {
        "threads": arguments.threads or 1,
        "verify": not arguments.no_verify,
        "cache": arguments.cache,
    }
    with ExitStack() as closing:
        served: ServedModel | dict[str, ServedVersions]
        if arguments.path is not None:
            served = closing.enter_context(ServedModel(arguments.path, **how))
            watched: list[ServedModel | ServedVersions] = [served]
        else:
            served = {
                name: closing.enter_context(ServedVersions(path, Settings(**settings), **how))
                for name, (path, settings) in models.items()
            }
            watched = list(served.values())
        for one in watched:
            if arguments.watch is not None:
                one.watch(arguments.watch)

        def ready(host: str, port: int) -> None:
            if arguments.quiet:
                return
            if isinstance(served, ServedModel):
                warn(f"version {served.now.version}, {served.now.kind}, at http://{host}:{port}")
            else:
                for name, some in served.items():
                    which = ", ".join(str(model.version) for model in some.models)
                    warn(f"{name}: version {which}, {some.now.kind}, at http://{host}:{port}/models/{name}")

        with naming(f"{arguments.host}:{arguments.port}"):
            run(
                served,
                host=arguments.host,
                port=arguments.port,
                reuse_port=arguments.reuse_port,
                limits=limits,
                ready=ready,
            )
        reloads = sum(one.reloads for one in watched)
        return Answer("", {"version": watched[0].now.version, "reloads": reloads})
