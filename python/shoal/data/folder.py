"""Following: the files of directories as they appear, in the order of their names, each once.

    clicks/2026-11-29T12/part-0.csv        read
    clicks/2026-11-29T12/.part-1.csv.tmp   not yet: it is still being written
    clicks/2026-11-29T12/_SUCCESS          never: no data

A file is read as soon as it is found, so it has to be complete by then: written under a hidden name, or elsewhere on
the same disk, and renamed into place. What several files have in common is only that each is read once: of those that
are found together the names decide, and a later one with a lesser name comes after them.

Several workers read a range of each file. Each has an order of its own, which its position remembers: a digest of the
name of each file that it has begun.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from shoal.data.files import File, Live, LocalFile, RemoteFile, reaching, system_of
from shoal.data.settings import FileSplit, Settings
from shoal.data.source import WAIT_SECONDS
from shoal.errors import CorruptionError

_log = logging.getLogger(__name__)

_HIDDEN = (".", "_")  # what Hadoop, Spark, Flink and rsync write under until it is complete, and their markers
_UNFINISHED = (".tmp", ".inprogress", "._COPYING_")
_LOOK_SECONDS = 1.0
_LOOK_SHARE = 0.1  # of the time, of large directories


class Following(Live):
    """Directories whose files are read as they appear, in place of a path of a function such as `shoal.read_csv`.

    Parameters
    ----------
    paths : str or path
        Directories, also URLs such as ``"s3://bucket/clicks"``; with all directories below them.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Raises
    ------
    ValueError
        There is no path.
    FileNotFoundError, NotADirectoryError
        A path of this machine is not a directory.

    Notes
    -----
    A pass never ends by itself. A file is not read if its name, or that of a directory below a path, begins with ``.``
    or ``_``, or ends with ``.tmp``, ``.inprogress`` or ``._COPYING_``: rename it when it is complete.
    ``docs/streams.md`` has the rules.

    Examples
    --------
    >>> reader = shoal.read_csv(Following("clicks/"), label="click")  # doctest: +SKIP
    """

    def __init__(self, *paths: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        if not paths:
            raise ValueError("there is no directory to follow: pass at least one")
        self._roots = tuple(os.fspath(path) for path in paths)
        self._options = dict(storage_options or {})
        for root in self._roots:
            if "://" not in root and not os.path.isdir(root):
                error = NotADirectoryError if os.path.exists(root) else FileNotFoundError
                raise error(f"{root} is not a directory: pass one whose files are to be followed")
        self.name = self._roots[0] if len(self._roots) == 1 else f"{self._roots[0]} and {len(self._roots) - 1:,} more"

    def files(self) -> list[tuple[str, File]]:
        """Return the complete files that are there: their names, by which they are in order, and themselves."""
        found: list[tuple[str, File]] = []
        for root in self._roots:
            names = self._remote(root) if "://" in root else _local(root)
            found.extend((name, file) for name, file in names if _is_complete(name))
        return sorted(found, key=lambda one: one[0])

    def _remote(self, root: str) -> list[tuple[str, File]]:
        system, path = system_of(root, self._options)
        with reaching(root):
            system.invalidate_cache()
            found = system.find(path)
        return [
            (str(PurePosixPath(one).relative_to(path)), RemoteFile(system.unstrip_protocol(one), self._options))
            for one in found
        ]

    def splits(self, settings: Settings, begun: list[int]) -> Generator[FileSplit | None]:
        """Yield the splits of files as they appear; None if there is none.

        ``begun`` has the digests of the files that were begun, the last of which is read from its position on; the
        others are appended.
        """
        due, waiting = 0.0, list(self._current(begun))
        while True:
            if not waiting and time.monotonic() >= due:
                before = time.monotonic()
                known = set(begun)
                waiting = [one for one in self.files() if digest(one[0]) not in known]
                now = time.monotonic()
                due = now + max(_LOOK_SECONDS, (now - before) / _LOOK_SHARE)
            if not waiting:
                yield None
                time.sleep(WAIT_SECONDS)
                continue
            name, file = waiting.pop(0)
            if not begun or digest(name) != begun[-1]:
                begun.append(digest(name))
            size = file.size()
            yield FileSplit(len(begun) - 1, file, settings.rank, settings.num_splits, 0.0, 0.0, size)
            if _size(file) not in (size, None):
                raise CorruptionError(
                    f"{file.name} has changed while it was read, or after: it had {size:,} bytes when it was begun; "
                    "write a file under a hidden name, and rename it when it is complete"
                )

    def _current(self, begun: Sequence[int]) -> Generator[tuple[str, File]]:
        """Yield the file that was begun last, if it is still there."""
        if not begun:
            return
        found = [one for one in self.files() if digest(one[0]) == begun[-1]]
        if not found:
            _log.warning("%s: the file that was begun last is gone; reading continues with the others", self.name)
        yield from found


def digest(name: str) -> int:
    """Return what positions have of a name: 63 bits, not 0."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()) >> 1 or 1


def _size(file: File) -> int | None:
    try:
        return file.size()
    except FileNotFoundError:
        return None


def _local(root: str) -> Generator[tuple[str, File]]:
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            yield os.path.relpath(path, root), LocalFile(path)


def _is_complete(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not any(part.startswith(_HIDDEN) for part in parts) and not name.endswith(_UNFINISHED)
