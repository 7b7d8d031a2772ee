"""The command ``shoal``: training, looking at what came of it, and the roles of a cluster.

Every command is a function of parsed arguments that returns what it has to say: text for people, one JSON object for
machines (``--json``). Results go to standard output; bars, notes and errors to standard error.

    exit status   0   done
                  1   it failed: a damaged model, a full disk
                  2   the input is wrong: arguments, a missing file, a malformed line
           130, 143   Ctrl-C, SIGTERM; ``train`` has then saved what it had learned

Expected errors are one line, never a traceback. Heavy imports wait for a command that needs them.

    answers.py     what commands say, and the printing
    arguments.py   what their parsers share
    train.py, ctr.py, predict.py, report.py, inspect.py, compact.py, export.py, serve.py, convert.py, audit.py, demo.py,
    cluster.py, keygen.py, estimate.py
                   the commands: add(commands), and a function for each
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from shoal.base.interrupts import status_of, terminable
from shoal.cli import (
    audit,
    cluster,
    compact,
    convert,
    ctr,
    demo,
    estimate,
    export,
    inspect,
    keygen,
    predict,
    report,
    serve,
    train,
)
from shoal.cli.answers import FAILED, WRONG_INPUT, Answer, complain, one_line, tell
from shoal.cli.arguments import command

__all__ = ["main", "parser"]

EXAMPLES = """\
examples:
  $ shoal demo --out demo                   # watch it train on a log whose truth is known
  $ shoal train lr --train day_0.tsv --format criteo --model ctr
  $ shoal evaluate --model ctr --data day_1.tsv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; those of the process if not given.

    Returns
    -------
    int
        The exit status.
    """
    arguments = parser().parse_args(argv)
    options = vars(arguments).keys()
    try:
        with terminable():
            answer: Answer = arguments.run(arguments)
            tell(answer, arguments)
    except KeyboardInterrupt as interrupt:
        complain("interrupted")
        return status_of(interrupt)
    except BrokenPipeError:
        # Whoever read the output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (
        ValueError,
        ImportError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        complain(one_line(error, options))  # an ImportError: an extra is not installed, and the message has the remedy
        return WRONG_INPUT
    except Exception as error:
        from shoal.errors import ShoalError

        if not isinstance(error, ShoalError | OSError | MemoryError):
            raise
        complain(one_line(error, options))
        return WRONG_INPUT if getattr(error, "errno", None) in _NO_SUCH_PLACE else FAILED
    return answer.status


# Of a StorageError: a file or directory that is not there, is not what it should be, or is not for this user.
_NO_SUCH_PLACE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    whole = command(None, "shoal", "A sparse parameter server: train, use and look at models.", EXAMPLES)
    whole.add_argument("--version", action="version", version=f"shoal {importlib.metadata.version('shoal')}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ctr.add(train.add(commands))
    for module in (predict, report, inspect, compact, export, serve, convert, audit, demo, cluster, keygen, estimate):
        module.add(commands)
    return whole
