"""Directories of files that are written once: the storage of checkpoints, exports and models.

    open_dir("ckpt/step-1000")                       a directory of this machine                (local.py)
    open_dir("s3://bucket/step-1000", options)       an object store, by fsspec                 (object_store.py)

    create     a new file, written front to back      size, read    a whole file, or a range of it
    publish    a small file, replaced atomically      version       what `publish` expects to replace

A directory holds what its manifest names, and the manifest is published after all files that it names. A writer that
is interrupted, or loses a race, has changed nothing.

Invariants
    S1  A file that was not committed does not exist: an object store never shows it; a local directory removes it at
        the end of the writer's `with` block. A killed process may leave a file that no manifest names.
    S2  `publish` replaces the version it expects, or raises `SaveConflictError` and changes nothing. Of several
        writers that replace the same version at most one succeeds. Local writers are serialised by a lock of the
        directory; S3 compares versions itself (If-None-Match, If-Match), and other object stores compare for new files.
        For an existing file of another store the version is read immediately before the write.
    S3  With `durable`, a published file and all files committed before it are on disk.
    S4  An error of the storage (disk full, no permission, connection lost) is a `StorageError` that names the file.
        A missing file is a FileNotFoundError.

Threads: any number of threads may use one directory; a file that is written belongs to one thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from shoal.errors import CorruptionError, SaveConflictError, StorageError
from shoal.storage.checksummed_json import decode_checksummed


class FileReader(Protocol):
    """A file that is open for reading."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset`` on; return the number of bytes read. Safe from any thread."""


class FileWriter(ABC):
    """A new file, open for writing. A context manager: committed at the end of a ``with`` block that does not raise."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data."""
        try:
            self._write(data)
        except BaseException:  # no context manager on the fast path: pieces are small and many
            with self._given_up():
                raise

    def commit(self) -> None:
        """Make the file visible; no more data can be written."""
        if self._open:
            with self._given_up():
                self._commit()
            self._open = False

    def abort(self) -> None:
        """Discard the file, unless it was committed."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # no manifest names what is left
                self._abort()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            with storage_errors("written", self.address):
                yield
        except BaseException:
            self.abort()
            raise

    @abstractmethod
    def tell(self) -> int:
        """Return the number of bytes written."""

    @abstractmethod
    def _write(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...


class StorageDir(ABC):
    """A directory: a `LocalDir` or a `RemoteDir`. `open_dir` makes one."""

    @property
    @abstractmethod
    def local(self) -> Path | None:
        """The directory of this machine; None elsewhere."""

    @property
    def name(self) -> str:
        """The last part of its path, for messages."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def location(self) -> Path | str:
        """The path of a local directory, or a URL: what public functions return."""
        return str(self) if self.local is None else self.local

    @abstractmethod
    def to_spec(self) -> tuple[str, Mapping[str, Any]]:
        """Return the path and options with which another process opens the same directory by `open_dir`."""

    @abstractmethod
    def path_to(self, other: StorageDir) -> str:
        """Return another directory's path relative to this one: `child` follows it."""

    @abstractmethod
    def is_same(self, other: StorageDir) -> bool:
        """Return whether this is the same directory."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Return the full name of a file, for messages."""

    @abstractmethod
    def child(self, path: str) -> StorageDir:
        """Return the directory at a path relative to this one, such as ``"a"`` or ``"../a"``."""

    def real(self) -> StorageDir:
        """Return the same directory without links, for paths that lead out of it."""
        return self

    @abstractmethod
    def make(self, *, durable: bool = True) -> None:
        """Make the directory and its missing parents, if the storage has directories."""

    @abstractmethod
    def kind(self) -> Literal["directory", "file"] | None:
        """Return the kind of the entry, None if it is missing; an object store has a directory if a file is in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the files; none if the directory is missing."""

    @abstractmethod
    def subdirectories(self) -> list[str]:
        """Names of the subdirectories; none if this directory is missing."""

    @abstractmethod
    def subdirectories_with(self, name: str) -> dict[str, str]:
        """Find the subdirectories that hold a file of a given name."""

    @abstractmethod
    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """Read a whole file."""

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[FileReader]:
        """Read ranges of a file, inside a ``with``; errors as `read`."""

    @abstractmethod
    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> FileWriter:
        """Open a new file for writing, for a ``with`` block."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def clear(self) -> None:
        """Remove the directory and its contents if it exists."""

    def read_checksummed(self, name: str, *, missing: str, what: str | None = None) -> bytes:
        """Read the body of a checksummed file."""
        try:
            raw = self.read(name, limit=MAX_JSON_BYTES)
        except FileNotFoundError:
            kind = self.kind()
            if kind is None and what is not None:
                raise FileNotFoundError(errno.ENOENT, f"there is no such {what}", str(self)) from None
            if kind == "file":
                raise CorruptionError(f"{self} is a file where a directory should be") from None
            raise CorruptionError(f"{self.address(name)} is missing: {missing}") from None
        return decode_checksummed(raw, self.address(name))

    def version(self, name: str) -> str | None:
        """Return the version of a file, which `publish` replaces: None if there is no such file."""
        try:
            return content_digest(self.read(name, limit=MAX_JSON_BYTES))
        except FileNotFoundError:
            return None

    @abstractmethod
    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Replace a small file atomically."""

    def _conflict(self, name: str) -> SaveConflictError:
        return SaveConflictError(
            f"{self.address(name)} was written by another process after this one began, and is kept: let one process "
            "write there, or use a directory for each"
        )


MAX_JSON_BYTES = 1 << 30  # of a manifest: 1024 tables of 16384 slots
StoragePath: TypeAlias = str | os.PathLike[str] | StorageDir


def content_digest(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def check_name(name: str) -> str:
    """Return ``name``; raise ValueError if it is not a plain file name."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in a directory")
    return name


_REMEDIES = {
    errno.ENOSPC: "make room on that disk, or choose another",
    errno.EDQUOT: "the quota is used up: make room, or choose another disk",
    errno.EFBIG: "the file exceeds a limit (ulimit -f, or that of the file system)",
    errno.EACCES: "grant this user read and write access, or choose another directory",
    errno.EPERM: "grant this user read and write access, or choose another directory",
    errno.EROFS: "the file system is read-only: choose another",
    errno.EIO: "the disk reports errors: choose another",
    errno.ENOENT: "there is no such directory or bucket: make it",
    errno.EEXIST: "a file, or a symbolic link to what is missing, has this name: remove it, or choose another",
}


@contextlib.contextmanager
def storage_errors(done: str, address: str) -> Iterator[None]:
    """Convert errors of the storage to StorageError, which names the file."""
    try:
        yield
    except StorageError:
        raise
    except OSError as cause:
        if isinstance(cause, FileNotFoundError) and done == "read":
            raise
        if isinstance(cause, NotADirectoryError) and done == "read":  # there is a file in place of the directory
            raise FileNotFoundError(cause.errno, cause.strerror, address) from cause
        remedy = _REMEDIES.get(cause.errno or 0)
        what = cause.strerror or str(cause) or type(cause).__name__
        raise _storage_error(
            f"{address} cannot be {done}: {what}" + (f"; {remedy}" if remedy else ""), cause
        ) from cause
    except Exception as cause:
        if isinstance(cause, (TypeError, ValueError, AttributeError, AssertionError)):
            raise  # a defect, or the caller's
        what = f"{type(cause).__name__}: {cause}"
        raise _storage_error(f"{address} cannot be {done} ({what}): is the storage reachable?", cause) from cause


def _storage_error(text: str, cause: Exception) -> StorageError:
    error = StorageError(text)
    error.errno = getattr(cause, "errno", None)
    return error


def missing_directories(storage_dir: StorageDir) -> list[Path]:
    """List the missing directories of a local path, innermost first; none of a remote one."""
    found: list[Path] = []
    path = storage_dir.local
    while path is not None and not path.exists():
        found.append(path)
        path = path.parent
    return found


def remove_empty_directories(directories: Sequence[Path]) -> None:
    """Remove directories, the innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


@contextlib.contextmanager
def remove_if_failed(storage_dir: StorageDir) -> Iterator[None]:
    """Remove a directory that the block has made, and its new parents, if the block fails and they are empty."""
    before = missing_directories(storage_dir)
    try:
        yield
    except BaseException:
        remove_empty_directories(before)
        raise
