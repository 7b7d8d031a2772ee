"""``shoal serve``: serve predictions of an exported model over HTTP."""

from __future__ import annotations

import argparse
import io
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from shoal.cli.answers import Answer, naming, warn
from shoal.cli.arguments import cached, command, log_options, machine, port, seconds, size

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

  the tables of a running cluster, as they are while it trains:
  $ shoal serve tcp://10.0.0.1:5570/lr
  $ shoal serve tcp://10.0.0.1:5570/lr --like serve/lr/1             # with its columns and calibration
  $ shoal serve tcp://10.0.0.1:5570 --config ctr.toml                # a click model whose dense part is on the servers

docs/serving.md documents the requests and responses. Ctrl-C completes the requests in progress first.
"""

_TCP = "tcp://"
_LIVE_SECONDS = 10.0  # in which the servers answer a read


def add(commands: Any) -> None:
    """Add the command."""
    run = command(commands, "serve", "Serve predictions of an exported model over HTTP.", EXAMPLES, serve)
    run.add_argument(
        "path",
        nargs="?",
        metavar="EXPORT",
        help="export of a model, or a directory of exports, of which the newest is served; or s3://...; or a table of "
        "a running cluster, tcp://HOST:PORT/TABLE, whose current rows are read; tcp://HOST:PORT with --like or "
        "--config",
    )
    run.add_argument(
        "--like",
        metavar="MODEL",
        help="for tables of a running cluster: an export or a directory of a model, also of a checkpoint, with the "
        "kind, columns and calibration to use (default: logistic regression with a bias; instances have keys)",
    )
    run.add_argument(
        "--config",
        metavar="FILE",
        help="for tables of a running cluster: the configuration with which its workers run train ctr; dense in "
        "[train] must be servers",
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
        "--watch",
        type=seconds,
        metavar="SECONDS",
        help="check for a newer version at this interval (default: never); for a click model of a cluster: read its "
        "dense part again (default: 1)",
    )
    run.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept POST /reload and POST /models/NAME at this host name too, as behind a proxy; repeatable (default: "
        "numeric addresses, localhost and the name of this machine)",
    )
    run.add_argument(
        "--refuse-unknown-columns",
        action="store_true",
        help="answer requests with columns that the model does not know with status 400 (default: pass them over, and "
        "count them)",
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
    log_options(run, "serve")


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
                    f"--{option} names {name!r}, which no --model defines: the models are {', '.join(found) or 'none'}"
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


def _live(arguments: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that makes the model over a running cluster's table."""
    from shoal.cluster.worker.connect import connect
    from shoal.models import files
    from shoal.serve.live import DENSE_SECONDS, LiveModel, by_keys

    address, _, table = arguments.path.removeprefix(_TCP).partition("/")
    described = arguments.like is not None or arguments.config is not None
    if not address or not (table or described):
        raise ValueError(
            f"{arguments.path!r} is not a table of a cluster: write it as tcp://HOST:PORT/TABLE, or name a model with "
            "--like or --config"
        )
    if arguments.like is not None and arguments.config is not None:
        raise ValueError("--like and --config both describe the model: leave one out")
    if arguments.config is not None:
        if table:
            raise ValueError(f"--config names the tables: write tcp://{address} without /{table}")
        description = _configured(arguments.config)
    elif arguments.like is not None:
        description = _alike(arguments, table)
    else:
        description = by_keys(table)
    if arguments.watch is not None and description["kind"] != files.CLICK:
        raise ValueError("--watch applies to exports and click models: leave it out, rows of a cluster are current")

    def open_store() -> Any:
        return connect(_TCP + address, mode="read", timeout=_LIVE_SECONDS, threads=arguments.threads or 1)

    return lambda: LiveModel(open_store, description, dense_seconds=arguments.watch or DENSE_SECONDS)


def _alike(arguments: argparse.Namespace, table: str) -> dict[str, Any]:
    """Return the description of the model of ``--like``."""
    from shoal.export import open_export
    from shoal.models import files

    if files.is_model(arguments.like):
        found: Mapping[str, Any] | None = files.describe(files.read(arguments.like))
    else:
        with open_export(arguments.like, verify=not arguments.no_verify, cache=arguments.cache) as export:
            found = export.now.model
    if found is None:
        raise ValueError(f"--like {arguments.like} is an export of tables, not of a model: pass that of a model")
    if table and found["table"] != table:
        raise ValueError(
            f"--like {arguments.like} is a model whose table is {found['table']!r}, and {table!r} is to be served"
        )
    return dict(found)


def _configured(file: str) -> dict[str, Any]:
    """Return the description of the click model that a configuration makes."""
    from shoal.cli.ctr import open_config_reader
    from shoal.models import files

    try:
        from shoal.torch.config import read
    except ImportError:
        raise ValueError("click models require PyTorch: pip install 'shoal[torch]'") from None
    config = read(file)
    reader = open_config_reader(config, io.BytesIO())  # its data are elsewhere
    return {
        "kind": files.CLICK,
        "format": reader.format,
        "schema": reader.schema,
        "calibration": None,
        "examples": 0,
        "click": config.made_by(),
    }


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
    from shoal.serve import Limits, LiveModel, ServedModel, ServedVersions, Settings
    from shoal.serve import serve as run

    limits = Limits(
        body_bytes=arguments.max_body,
        decoded_bytes=arguments.max_decoded,
        in_flight_bytes=arguments.max_in_flight,
        connections=arguments.max_connections,
        request_seconds=arguments.request_timeout,
    )
    models = _models(arguments)
    for option in ("like", "config"):
        if getattr(arguments, option) is not None and not (arguments.path or "").startswith(_TCP):
            raise ValueError(
                f"--{option} describes tables of a running cluster: serve tcp://HOST:PORT, or leave it out"
            )
    how: dict[str, Any] = {
        "threads": arguments.threads or 1,
        "verify": not arguments.no_verify,
        "cache": arguments.cache,
    }
    with ExitStack() as closing:
        served: ServedModel | LiveModel | dict[str, ServedVersions]
        watched: list[ServedModel | ServedVersions] = []
        if arguments.path is not None and arguments.path.startswith(_TCP):
            served = closing.enter_context(_live(arguments)())
        elif arguments.path is not None:
            served = closing.enter_context(ServedModel(arguments.path, **how))
            watched.append(served)
        else:
            served = {
                name: closing.enter_context(ServedVersions(path, Settings(**settings), **how))
                for name, (path, settings) in models.items()
            }
            watched += served.values()
        for one in watched:
            if arguments.watch is not None:
                one.watch(arguments.watch)

        def ready(host: str, port: int) -> None:
            if arguments.quiet:
                return
            at = f"http://{host}:{port}"
            if isinstance(served, LiveModel):
                warn(f"{served.now.kind}, rows of {arguments.path}, at {at}", logging.INFO)
            elif isinstance(served, ServedModel):
                warn(f"version {served.now.version}, {served.now.kind}, at {at}", logging.INFO)
            else:
                for name, some in served.items():
                    which = ", ".join(str(model.version) for model in some.models)
                    warn(f"{name}: version {which}, {some.now.kind}, at {at}/models/{name}", logging.INFO)

        with naming(f"{arguments.host}:{arguments.port}"):
            run(
                served,
                host=arguments.host,
                port=arguments.port,
                reuse_port=arguments.reuse_port,
                limits=limits,
                hosts=arguments.allow_host,
                refuse_unknown_columns=arguments.refuse_unknown_columns,
                ready=ready,
            )
        first = next(iter(served.values())) if isinstance(served, dict) else served
        reloads = sum(one.reloads for one in served.values()) if isinstance(served, dict) else served.reloads
        return Answer("", {"version": first.now.version, "reloads": reloads})
