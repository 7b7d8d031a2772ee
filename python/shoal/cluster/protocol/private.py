"""Private directories: of one user, mode 0700, in which the processes of a cluster on one machine have their sockets.

Whoever opens a socket in such a directory runs as its user (or as root), and could do itself all that a peer can ask
for. So a cluster all of whose sockets are in one needs no keys, and no limits for the paths that peers name.

Threads: any.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from shoal.base.machine import temporary_root

_LONGEST_NAME = "server-00000000-0000"  # of a socket
_PREFIX = "shoal-"


def is_private(directory: str) -> bool:
    """Whether a directory, which is no link, is this user's and closed to all others, who cannot replace it either."""
    user = os.geteuid()
    try:
        state = os.lstat(directory)
        above = [path.stat() for path in Path(directory).resolve().parents]
    except (OSError, RuntimeError):
        return False
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o077
    return is_own and all(
        one.st_uid in (0, user) and (not one.st_mode & 0o022 or one.st_mode & stat.S_ISVTX) for one in above
    )


def make_private() -> str | None:
    """Make a private directory in which sockets can be bound; None: there is no place for one.

    The place is that of temporary files (TMPDIR), or /tmp where a socket's path would be too long there, or where
    files have no modes or sockets. Who has made it removes it.
    """
    for place in dict.fromkeys((os.path.abspath(temporary_root()), "/tmp")):
        try:
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        except OSError:
            continue
        if is_private(directory) and _holds_sockets(directory):
            return directory
        remove_private(directory)
    return None


def remove_private(directory: str) -> None:
    """Remove a private directory with all that is in it, as far as that is possible."""
    shutil.rmtree(directory, ignore_errors=True)


def _holds_sockets(directory: str) -> bool:
    if not hasattr(socket, "AF_UNIX"):
        return False
    path = os.path.join(directory, _LONGEST_NAME)
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.bind(path)
        except OSError:  # its path is too long, or the file system has no sockets
            return False
        with contextlib.suppress(OSError):
            os.unlink(path)
    return True
