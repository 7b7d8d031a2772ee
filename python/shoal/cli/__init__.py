"""The command ``shoal``: training, evaluation, serving, and the processes of a cluster.

A command is a function of a configuration that returns an answer: text for people, one JSON object for programs
(``--json``). Results go to standard output; progress bars, warnings and errors to standard error.

    exit status   0   success
                  1   failure: a damaged model, a full disk
                  2   bad input: arguments, a missing file, a malformed line
      130, 143, 129   Ctrl-C, SIGTERM, SIGHUP; ``train`` has then saved the model as trained so far

Expected errors are one line, never a traceback. Of the commands, only the one that runs is imported; heavy imports
happen in the functions that need them.

    options.py     commands, and their options, which follow from the fields of their configuration
    answers.py     the results of commands, and their output
    reading.py     the options and the readers of data
    one file per command
                   COMMANDS: its name, examples, configuration and function

One rule for arguments: what a command reads as a model, checkpoint or export is positional, examples are ``--data``,
and what it writes is ``--output``.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.base import own_code
from shoal.base.interrupts import status_of, terminable
from shoal.base.settings import to_toml
from shoal.base.streams import open_closed_streams
from shoal.cli.answers import DONE, FAILED, WRONG_INPUT, Answer, emit, log_events, log_line, naming, one_line, warn
from shoal.cli.options import Command, Group, add_command, make_parser, option_names, options_of
from shoal.cli.role import ROLE
from shoal.cli.version import Version

EXAMPLES = """\
examples:
  $ shoal train lr --data day_0.tsv --format criteo --output ctr
  $ shoal evaluate ctr --data day_1.tsv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        parser().print_help()
        return WRONG_INPUT
    with ExitStack() as ended:
        ended.callback(_drop_output_that_fails)
        return _run(words, ended)


def _run(words: list[str], ended: ExitStack) -> int:
    """Run a command; return the exit status."""
    names: Collection[str] = ()
    answer: Answer
    try:
        arguments: dict[str, Any] = {"command": ROLE} if words[0] == "role" else _parse(words)
        command: Command = arguments["command"]
        names = option_names(command)
        ended.enter_context(log_events(command.role, arguments.get("log_format"), quiet=arguments.get("quiet", False)))
        options = options_of(command, arguments)
        if arguments.get("print_config"):
            log_line(to_toml(options).rstrip())
            return DONE
        with terminable():
            own_code.allow(getattr(options, "import_", ()))
            answer = command.run(options)
            with naming("standard output"):
                emit(answer, json=arguments.get("json", False), quiet=arguments.get("quiet", False))
    except KeyboardInterrupt as interrupt:
        warn("interrupted")
        return status_of(interrupt)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        return FAILED
    except (
        ValueError,
        ImportError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        warn(one_line(error, names), logging.ERROR)  # an ImportError: the message names the extra to install
        return WRONG_INPUT
    except Exception as error:
        from shoal.errors import ShoalError

        if not isinstance(error, ShoalError | OSError | MemoryError):
            raise
        warn(one_line(error, names), logging.ERROR)
        return WRONG_INPUT if getattr(error, "errno", None) in _NO_SUCH_PLACE else FAILED
    return answer.status


def _parse(words: list[str]) -> dict[str, Any]:
    return vars(parser(words[0] if words[0] in {*_MODULES, "--version"} else None).parse_args(words))


def _drop_output_that_fails() -> None:
    """Replace standard streams by /dev/null if they cannot be written: Python would report it again when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def run() -> int:
    """Run the command of this process, which ends afterwards: the entry point of ``shoal``.

    Threads of OpenBLAS (NumPy) and of GNU's OpenMP (PyTorch) that have nothing to do look for work before they sleep:
    for 2^26 cycles, also when they start, and for some milliseconds. That took a fifth of a short command's CPU time,
    and on a machine with other work most of the time of a click model. Here they sleep after 2^16 cycles and 10,000
    looks, some 30 and 100 us. Both libraries read their variables when they are loaded. Programs that ``launch``
    starts are not affected.

    The interpreter collects garbage twice when it ends. Nothing that it could find is needed any more, and looking for
    it in the objects of all modules takes an eighth of a short command's CPU time: they are excluded.
    """
    if sys.argv[1:2] != ["launch"]:
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    open_closed_streams()
    try:
        return main()
    finally:
        gc.freeze()


# Of a StorageError: a file or directory that does not exist, has another type, or is not accessible.
_NO_SUCH_PLACE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)


# The module of each command, in the order of the help.
_MODULES = {
    "train": "train",
    "predict": "predict",
    "evaluate": "predict",
    "importance": "importance",
    "report": "report",
    "inspect": "inspect",
    "explain": "lineage",
    "bisect": "lineage",
    "forget": "lineage",
    "replay": "lineage",
    "diff": "diff",
    "compact": "compact",
    "export": "export",
    "serve": "serve",
    "convert": "convert",
    "audit": "audit",
    "scheduler": "cluster",
    "server": "cluster",
    "launch": "cluster",
    "cluster": "cluster_status",
    "keygen": "keygen",
    "estimate": "estimate",
    "doctor": "doctor",
    "completion": "completion",
}


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Create the parser of all commands, or only of the one that runs: the others are not imported.

    ``--version`` needs none.
    """
    whole = make_parser("shoal", "Train, evaluate and serve sparse models; run a parameter server.", EXAMPLES)
    whole.add_argument("--version", action=Version, help="print version, build and CPU features and exit")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = _MODULES.values() if only is None else [_MODULES[only]] if only in _MODULES else []
    for module in dict.fromkeys(wanted):
        among = commands
        for one in importlib.import_module(f"shoal.cli.{module}").COMMANDS:
            if isinstance(one, Group):  # what follows is below it
                group = make_parser(one.name, one.what, one.examples, commands)
                among = group.add_subparsers(title=one.title, metavar=one.metavar, required=True)
            else:
                add_command(among, one)
    return whole
