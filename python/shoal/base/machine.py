"""The resources of the machine that a process may use."""

import os
import sys
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 1 << 60  # bytes from which on a limit of a container is none


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def temporary_root() -> str:
    """Return the directory for temporary files; FileNotFoundError: there is none that can be written."""
    import tempfile  # many commands need none

    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        text = f"{error.strerror}: set TMPDIR to a directory that this user can write"
        raise FileNotFoundError(error.errno, text) from None


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, with ``~`` expanded to the home directory."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{path!r:.80} is not a path: pass a str or a Path")
    if "://" in text:
        raise ValueError(f"{text} is a URL, and this is read and written on this machine only: pass a local path")
    return Path(os.path.expanduser(checked_name(text)))


def checked_name(name: str) -> str:
    """Return the name of a file; ValueError: its bytes are no text, and nothing that is written could name it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the name {os.fsencode(name)!r} of a file is not {sys.getfilesystemencoding()}: rename the file"
        ) from None
    return name


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that further processes here may use, within the limit of the container; 0 if unknown."""
    free = meminfo(root).get("MemAvailable", 0)
    limit = read_text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < NO_LIMIT:
        used = read_text(root / "sys/fs/cgroup/memory.current").strip()
        free = min(free, int(limit) - (int(used) if used.isdigit() else 0))
    return max(free, 0)


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty where there is none."""
    found = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def read_text(file: Path) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
