"""Files: the inputs of a reader, by name, and how they are opened.

    "day_0.tsv", Path(...)       a regular file
    "logs/day_*.tsv.gz"          all files of a pattern, in the order of their names
    "s3://bucket/day_*.tsv"      a URL that fsspec opens, also with patterns        (extra: fsspec)
    "-", sys.stdin.buffer        a stream, for one pass
    [any of these, ...]          one after the other

A description of a file holds no open file: each pass opens it again, and the description can be pickled.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedIOBase, FileIO
from typing import Any, BinaryIO, ClassVar, Protocol

import msgspec

from shoal.base.machine import checked_name
from shoal.data.live import Part
from shoal.errors import StorageError

_NOT_THERE = (404, 410)  # statuses of HTTP

Opened = FileIO | BufferedIOBase


class File(Protocol):
    """Something with bytes, a name for messages, and a size if that is known beforehand.

    Only a file that is `seekable` can be split, and read more than once.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def seekable(self) -> bool: ...  # noqa: D102
    def size(self) -> int | None: ...  # noqa: D102
    def open(self) -> Opened: ...  # noqa: D102


class LocalFile(msgspec.Struct, frozen=True):
    """A regular file of this machine."""

    name: str
    seekable: ClassVar[bool] = True

    def size(self) -> int:
        """Bytes."""
        return os.stat(self.name).st_size

    def open(self) -> FileIO:
        """Open it; a pipe or a device is refused, since a second pass could not read it again."""
        # Non-blocking, as the mere opening of a pipe waits for its other end. It means nothing to a regular file.
        file = FileIO(self.name, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError(
                f"{self.name!r} is not a regular file: write the data to a file, which each pass reads anew, or pass "
                "it as standard input, '-'"
            )
        return file


class RemoteFile(msgspec.Struct, frozen=True):
    """A file that fsspec opens, with the options of its file system."""

    name: str
    options: Mapping[str, Any]
    seekable: ClassVar[bool] = True

    def size(self) -> int:
        """Bytes."""
        system, path = system_of(self.name, self.options)
        return _size_in(_info(system, path, self.name), self.name)

    def open(self) -> BufferedIOBase:
        """Open it; it is fetched in blocks, a little ahead of what is read."""
        system, path = system_of(self.name, self.options)
        opened: BufferedIOBase = system.open(path, "rb", cache_type="readahead")
        return opened


class Stream:
    """An open file, such as standard input: one pass, from its current position."""

    seekable = False

    def __init__(self, file: Any) -> None:
        self.name = str(getattr(file, "name", None) or "the stream")
        self._file: Opened | None = file

    def size(self) -> None:
        """Unknown."""

    def open(self) -> Opened:
        """Hand the file out, once."""
        file, self._file = self._file, None
        if file is None:
            raise ValueError(f"{self.name} was read already, and a stream has one pass: write the data to a file")
        return file

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name} is a stream of this process: pass a file to pickle its reader")


class Live:
    """A `File` of what appears while it is read, and can be divided: its parts are read by themselves."""

    name: str
    seekable = False
    ends = False  # so far as is known

    def parts(self, workers: int) -> list[Part]:
        """Return its parts for that many workers, from where it begins."""
        return [Part(rank=rank, num_splits=workers) for rank in range(workers)]

    def size(self) -> None:
        """Unknown."""

    def open(self) -> Opened:
        """Refuse: it has no bytes of its own."""
        raise TypeError(f"{self.name} is not a file")


Where = str | os.PathLike[str] | BinaryIO | BufferedIOBase | FileIO | Live
Wheres = Where | Sequence[Where]


def files_of(where: Wheres, options: Mapping[str, Any] | None = None) -> tuple[File, ...]:
    """Find the files that ``where`` names, in order."""
    wheres = where if isinstance(where, Sequence) and not isinstance(where, str | bytes) else [where]
    found = [file for one in wheres for file in _files_of_one(one, options or {})]
    if not found:
        raise ValueError("there is no file to read: pass at least one")
    if len(found) > 1 and any(isinstance(file, Live) for file in found):
        raise ValueError(f"{found[0].name} and other files cannot be read as one: make a reader of each")
    return tuple(found)


def _files_of_one(where: Any, options: Mapping[str, Any]) -> list[File]:
    if isinstance(where, Live):
        return [where]
    if hasattr(where, "read"):
        if where.read(0) == "":
            raise TypeError(f"{where!r} reads text: open it with 'rb'")
        return [Stream(where)]
    name = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(name, str):
        raise TypeError(f"{where!r} is not a path: pass a str, a Path, an open binary file, or a list of them")
    if name == "-":
        return [Stream(sys.stdin.buffer)]
    if "://" in name:
        return _remote(name, options)
    name = os.path.expanduser(name)
    if glob.has_magic(name) and not os.path.exists(name):
        return [LocalFile(checked_name(path)) for path in _some(sorted(glob.glob(name, recursive=True)), name)]
    if os.path.isdir(name):
        raise IsADirectoryError(f"{name!r} is a directory: name its files, as in {os.path.join(name, '*')!r}")
    file = LocalFile(checked_name(name))
    file.open().close()  # an unreadable file raises at once
    return [file]


def _remote(url: str, options: Mapping[str, Any]) -> list[File]:
    system, path = system_of(url, options)
    if not glob.has_magic(path):
        _size_in(_info(system, path, url), url)  # what cannot be read raises at once
        return [RemoteFile(url, options)]
    with reaching(url):
        found = sorted(system.glob(path))
    return [RemoteFile(system.unstrip_protocol(one), options) for one in _some(found, url)]


def _info(system: Any, path: str, url: str) -> Mapping[str, Any]:
    """Return what the storage knows of a file."""
    with reaching(url):
        found: Mapping[str, Any] = system.info(path)
    return found


def _size_in(info: Mapping[str, Any], url: str) -> int:
    if info.get("size") is None:
        raise StorageError(
            f"{url}: the server does not say how long the file is (Content-Length): download it, or pass the open "
            f"response as a stream"
        )
    return int(info["size"])


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn the errors of a storage into ours: only what is not there is a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        cause = error.__cause__ if url.startswith(("http://", "https://")) else None  # whose error hides any other
        status = getattr(cause, "status", None)
        if cause is None or status in _NOT_THERE:
            raise FileNotFoundError(f"there is no {url}") from error
        what = (
            f"HTTP {status} {getattr(cause, 'message', '')}".rstrip() if status else f"{type(cause).__name__}: {cause}"
        )
        raise StorageError(f"{url} cannot be read ({what}): check the address and the credentials") from error
    except (OSError, TypeError, ValueError, AttributeError, AssertionError):
        raise  # of OSError the names are there; the others are a defect, or the caller's
    except Exception as error:  # the storage's own, of whatever library reaches it
        raise StorageError(
            f"{url} cannot be found ({type(error).__name__}: {error}): check the address and the credentials"
        ) from error


def _some(names: list[str], pattern: str) -> list[str]:
    if not names:
        raise FileNotFoundError(f"no file matches {pattern!r}")
    return names


def system_of(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url} requires fsspec, and s3fs, gcsfs or the like: pip install 'shoal[fsspec]'") from error
    system, path = url_to_fs(url, **options)
    return system, path
