"""Opening files that others may have written: regular files only, without waiting, and no more bytes than expected.

Threads: no state.
"""

import os
import stat
from pathlib import Path

from shoal.errors import StorageError

TOO_LARGE = "{} cannot be read: it has {} bytes, and at most {} are expected"


def open_regular(path: Path) -> int:
    """Open a file for reading; return its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe does not wait for its writer
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise StorageError(f"{path} cannot be read: it is {kind}, not a file")
    return descriptor


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Read a whole file."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise StorageError(TOO_LARGE.format(path, size, limit))
        data: bytes = file.readall()
    return data
