"""File descriptors: each connection takes one, and a process without any can accept none.

libzmq then tries again and again, which takes a core until connections end; those that there are go on. So the roles of
a cluster allow themselves as many as the system lets them, and say when that is not enough.

Threads: any number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

__all__ = ["SPENT", "are_spent", "raise_limit"]

SPENT = (
    "this process has opened as many files and connections as it may, and accepts no more until some are closed: raise "
    "its limit (ulimit -n, LimitNOFILE=), or find out who holds so many connections"
)
_ENOUGH = 1 << 20


def raise_limit() -> None:
    """Let this process open as many files as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow fewer than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def are_spent() -> bool:
    """Whether this process can open nothing more."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
