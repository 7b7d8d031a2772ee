"""The resources of the machine that a process may use."""

import os
from pathlib import Path

__all__ = ["cores", "local_path"]


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, with ``~`` expanded to the home directory."""
    return Path(os.path.expanduser(os.fspath(path)))
