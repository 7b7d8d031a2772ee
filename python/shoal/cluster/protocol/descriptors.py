"""The limit of file descriptors. Each connection uses one; at the limit a process accepts no connections.

libzmq then retries in a loop, which keeps a core busy until connections end; existing ones keep working. So the
processes of a cluster raise their limit as far as the system permits, and log when it is reached.

Threads: any number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

SPENT = (
    "this process has reached its limit of open files, and accepts no connection until some are closed: raise the "
    "limit (ulimit -n, LimitNOFILE=), or find the peer that holds so many connections"
)
_ENOUGH = 1 << 20


def raise_limit() -> None:
    """Let this process open as many files as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems permit fewer than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def are_spent() -> bool:
    """Whether this process has reached its limit."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
