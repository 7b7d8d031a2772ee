"""``shoal serve``: serve predictions of an exported model over HTTP and gRPC."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from shoal.base.settings import Setting
from shoal.base.sizes import memory_bytes
from shoal.cli.answers import Answer, naming, warn
from shoal.cli.options import Command, Imports, Output
from shoal.cli.reading import Cache
from shoal.config import Count, File, LogFormat, Seconds, Size, Threads

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

_TCP, _IPC = "tcp://", "ipc://"
_LIVE_SECONDS = 10.0  # in which the servers answer a read


class Serve(Output, frozen=True, kw_only=True):
    """The options of the command."""

    path: Annotated[
        str | None,
        "export of a model, or a directory of exports, of which the newest is served; or s3://...; or a table of a "
        "running cluster, tcp://HOST:PORT/TABLE, whose current rows are read; tcp://HOST:PORT with --like or --config",
        Setting(metavar="EXPORT", positional=True),
    ] = None
    import_: Imports = ()
    like: Annotated[
        str | None,
        "for tables of a running cluster: an export or a directory of a model, also of a checkpoint, with the kind, "
        "columns and calibration to use (default: logistic regression with a bias; instances have keys)",
        Setting(metavar="MODEL"),
    ] = None
    config: Annotated[
        File | None,
        "for tables of a running cluster: the configuration with which its workers run train ctr; dense in [train] "
        "must be servers",
    ] = None
    model: Annotated[
        tuple[str, ...],
        "serve this export, or directory of exports, at /models/NAME; repeatable; instead of EXPORT",
        Setting(metavar="NAME=EXPORT", check="shoal.cli.serve:_named"),
    ] = ()
    versions: Annotated[
        tuple[str, ...],
        "versions of a model to serve: latest (default), latest:N, all, or numbers as 3,5",
        Setting(metavar="NAME=WHICH", check="shoal.cli.serve:_named"),
    ] = ()
    labels: Annotated[
        tuple[str, ...],
        "labels of versions, as ctr=stable:3,canary:4, which are served at /models/NAME/labels/LABEL",
        Setting(metavar="NAME=LABEL:N", check="shoal.cli.serve:_named"),
    ] = ()
    split: Annotated[
        tuple[str, ...],
        "shares of the requests that name no version, as ctr=stable:0.95,canary:0.05",
        Setting(metavar="NAME=LABEL:SHARE", check="shoal.cli.serve:_named"),
    ] = ()
    host: Annotated[str, "address to listen on", Setting(metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0: any free port", Setting(ge=0, le=65535, metavar="PORT")] = 8080
    grpc_port: Annotated[
        int | None,
        "answer the Open Inference Protocol over gRPC at this port, too; 0: any free port (default: HTTP alone)",
        Setting(ge=0, le=65535, metavar="PORT"),
    ] = None
    watch: Annotated[
        Seconds | None,
        "check for a newer version at this interval; for a click model of a cluster: read its dense part again (there "
        "every second without it) (default: never)",
    ] = None
    allow_host: Annotated[
        tuple[str, ...],
        "accept POST /reload and POST /models/NAME at this host name too, as behind a proxy; repeatable (default: "
        "numeric addresses, localhost and the name of this machine)",
        Setting(metavar="NAME"),
    ] = ()
    refuse_unknown_columns: Annotated[
        bool,
        "answer requests with columns that the model does not know with status 400; without it they are passed over, "
        "and counted",
    ] = False
    reuse_port: Annotated[bool, "allow several processes to listen on the port"] = False
    max_body: Annotated[Size, "largest request body"] = "64MiB"
    max_decoded: Annotated[Size, "largest memory of a decoded request"] = "512MiB"
    max_in_flight: Annotated[Size, "memory of all requests in progress; further ones get status 503"] = "1GiB"
    max_connections: Annotated[Count, "number of connections; a further one replaces the longest idle one"] = 1024
    request_timeout: Annotated[
        Seconds, "time in which a request must arrive and a response must be accepted, or the connection is closed"
    ] = 30.0
    verify: Annotated[
        bool, "whether to verify checksums first", Setting(negated="start without verifying checksums")
    ] = True
    cache: Cache = None
    threads: Threads = None
    log_format: LogFormat = None


def _named(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value) or "/" in name:
        raise ValueError(f"{text!r} is not a model's name and a value: write it as ctr=serve/ctr")
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


def _models(options: Serve) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the export and the settings of each model, by name."""
    from shoal.serve.versions import parse_policy

    if (options.path is None) == (not options.model):
        raise ValueError("pass either EXPORT or --model NAME=EXPORT")
    named = dict(_named(text) for text in options.model)
    if len(named) < len(options.model):
        raise ValueError("--model names a model twice: give each a name of its own")
    found: dict[str, tuple[str, dict[str, Any]]] = {name: (path, {}) for name, path in named.items()}
    for option in ("versions", "labels", "split"):
        for name, text in map(_named, getattr(options, option)):
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


def _address_and_table(path: str) -> tuple[str, str]:
    """Split the path of a table of a cluster into the scheduler's address and the table; either may be empty."""
    if not path.startswith(_IPC):
        address, _, table = path.removeprefix(_TCP).partition("/")
        return _TCP + address if address else "", table
    place = Path(path.removeprefix(_IPC))
    for found in (place, *place.parents):
        if found.is_socket():
            return f"{_IPC}{found}", "" if found == place else str(place.relative_to(found))
    raise ValueError(f"{path!r}: no scheduler listens there. Write the address that it prints, and /TABLE")


def _live(options: Serve) -> Callable[[], Any]:
    """Return a function that makes the model over a running cluster's table."""
    from shoal.cluster.worker.connect import connect
    from shoal.models import files
    from shoal.serve.live import DENSE_SECONDS, LiveModel, by_keys

    address, table = _address_and_table(options.path or "")
    described = options.like is not None or options.config is not None
    if not address or not (table or described):
        raise ValueError(
            f"{options.path!r} is not a table of a cluster: write it as tcp://HOST:PORT/TABLE, or name a model with "
            "--like or --config"
        )
    if options.like is not None and options.config is not None:
        raise ValueError("--like and --config both describe the model: leave one out")
    if options.config is not None:
        if table:
            raise ValueError(f"--config names the tables: write {address} without /{table}")
        description = _configured(options.config)
    elif options.like is not None:
        description = _alike(options, options.like, table)
    else:
        description = by_keys(table)
    if options.watch is not None and description["kind"] != files.CLICK:
        raise ValueError("--watch applies to exports and click models: leave it out, rows of a cluster are current")

    def open_store() -> Any:
        return connect(address, mode="read", timeout=_LIVE_SECONDS, threads=options.threads or 1)

    return lambda: LiveModel(open_store, description, dense_seconds=options.watch or DENSE_SECONDS)


def _alike(options: Serve, like: str, table: str) -> dict[str, Any]:
    """Return the description of the model of ``--like``."""
    from shoal import export as exports
    from shoal.models import files

    if files.is_model(like):
        found: Mapping[str, Any] | None = files.describe(files.read(like))
    else:
        with exports.open(like, verify=options.verify, cache=options.cache) as export:
            found = export.now.model
    if found is None:
        raise ValueError(f"--like {like} is an export of tables, not of a model: pass that of a model")
    if table and found["table"] != table:
        raise ValueError(f"--like {like} is a model whose table is {found['table']!r}, and {table!r} is to be served")
    return dict(found)


def _configured(file: str) -> dict[str, Any]:
    """Return the description of the click model that a configuration makes."""
    from shoal.cli.train import open_config_reader
    from shoal.models import files

    try:
        from shoal.torch.config import made_by, read
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
        "click": made_by(config),
    }


def serve(options: Serve) -> Answer:
    """Serve until a signal arrives."""
    from shoal.serve import Limits, LiveModel, ServedModel, ServedVersions, Settings
    from shoal.serve import serve as run

    limits = Limits(
        body_bytes=memory_bytes(options.max_body),
        decoded_bytes=memory_bytes(options.max_decoded),
        in_flight_bytes=memory_bytes(options.max_in_flight),
        connections=options.max_connections,
        request_seconds=options.request_timeout,
    )
    models = _models(options)
    for option in ("like", "config"):
        if getattr(options, option) is not None and not (options.path or "").startswith((_TCP, _IPC)):
            raise ValueError(
                f"--{option} describes tables of a running cluster: serve tcp://HOST:PORT, or leave it out"
            )
    how: dict[str, Any] = {
        "threads": options.threads or 1,
        "verify": options.verify,
        "cache": options.cache,
    }
    with ExitStack() as closing:
        served: ServedModel | LiveModel | dict[str, ServedVersions]
        watched: list[ServedModel | ServedVersions] = []
        if options.path is not None and options.path.startswith((_TCP, _IPC)):
            served = closing.enter_context(_live(options)())
        elif options.path is not None:
            served = closing.enter_context(ServedModel(options.path, **how))
            watched.append(served)
        else:
            served = {
                name: closing.enter_context(ServedVersions(path, Settings(**settings), **how))
                for name, (path, settings) in models.items()
            }
            watched += served.values()
        for one in watched:
            if options.watch is not None:
                one.watch(options.watch)

        def ready(host: str, port: int, grpc_port: int | None) -> None:
            if options.quiet:
                return
            at = f"http://{host}:{port}"
            if isinstance(served, LiveModel):
                warn(f"{served.now.kind}, rows of {options.path}, at {at}", logging.INFO)
            elif isinstance(served, ServedModel):
                warn(f"version {served.now.version}, {served.now.kind}, at {at}", logging.INFO)
            else:
                for name, some in served.items():
                    which = ", ".join(str(model.version) for model in some.models)
                    warn(f"{name}: version {which}, {some.now.kind}, at {at}/models/{name}", logging.INFO)
            if grpc_port is not None:
                warn(f"gRPC at {host}:{grpc_port}", logging.INFO)

        with naming(f"{options.host}:{options.port}"):
            run(
                served,
                host=options.host,
                port=options.port,
                grpc_port=options.grpc_port,
                reuse_port=options.reuse_port,
                limits=limits,
                hosts=options.allow_host,
                refuse_unknown_columns=options.refuse_unknown_columns,
                ready=ready,
            )
        first = next(iter(served.values())) if isinstance(served, dict) else served
        reloads = sum(one.reloads for one in served.values()) if isinstance(served, dict) else served.reloads
        return Answer("", {"version": first.now.version, "reloads": reloads})


COMMANDS = (
    Command("serve", "Serve predictions of an exported model over HTTP or gRPC.", EXAMPLES, Serve, serve, role="serve"),
)
