"""Directories of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.errors import StorageError
from shoal.storage.base import FileReader, FileWriter, StorageDir, check_name, storage_errors
from shoal.storage.checksummed_json import make_directory, sync_directory, write_atomically
from shoal.storage.direct_io import WRITE_BYTES, DirectFileWriter, open_direct
from shoal.storage.regular import open_regular, read_regular

_LOCK_SECONDS = 30.0  # seconds that another process may take to publish a file
_RETRY_SECONDS = 0.005  # seconds between two tries to lock a directory
_SENT_BYTES = 16 << 20  # written before write-back is started


class LocalDir(StorageDir):
    """A directory of this machine."""

    def __init__(self, directory: Path, confined: Callable[[Path], None] | None = None) -> None:
        self._directory = directory
        self._confined = confined  # raises StorageError for a path that may not be opened
        if confined is not None:
            confined(directory)

    def _file(self, name: str) -> Path:
        path = self._directory / check_name(name)
        if self._confined is not None:
            self._confined(path)
        return path

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def local(self) -> Path:
        """The directory."""
        return self._directory

    def to_spec(self) -> tuple[str, Mapping[str, Any]]:
        """Return the absolute path."""
        return os.path.abspath(self._directory), {}

    def path_to(self, other: StorageDir) -> str:
        """Return another directory's path relative to this one."""
        if not isinstance(other, LocalDir):
            raise ValueError(f"there is no path from {self} to {other}: keep both on one kind of storage")
        return os.path.relpath(other._directory, self._directory)

    def is_same(self, other: StorageDir) -> bool:
        """Return whether this is the same directory, links resolved."""
        return isinstance(other, LocalDir) and self._directory.resolve() == other._directory.resolve()

    def address(self, name: str) -> str:
        """Return the full name of a file, for messages."""
        return str(self._directory / name)

    def child(self, path: str) -> LocalDir:
        """Return the directory at a path relative to this one."""
        found = self._directory / path
        # Only if it leads out: the system follows a link before "..", normpath does not.
        return LocalDir(Path(os.path.normpath(found)) if ".." in Path(path).parts else found, self._confined)

    def make(self, *, durable: bool = True) -> None:
        """Make the directory and its missing parents."""
        with storage_errors("made", str(self._directory)):
            if durable:
                make_directory(self._directory)
            else:
                self._directory.mkdir(parents=True, exist_ok=True)

    def kind(self) -> Literal["directory", "file"] | None:
        """Return the kind of the entry."""
        with storage_errors("read", str(self._directory)):
            if not self._directory.exists():
                return None
            return "directory" if self._directory.is_dir() else "file"

    def names(self) -> list[str]:
        """Names of the files."""
        return self._entries(directories=False)

    def subdirectories(self) -> list[str]:
        """Names of the subdirectories."""
        return self._entries(directories=True)

    def _entries(self, *, directories: bool) -> list[str]:
        with storage_errors("read", str(self._directory)):
            try:
                return sorted(entry.name for entry in os.scandir(self._directory) if entry.is_dir() is directories)
            except FileNotFoundError:
                return []

    def clear(self) -> None:
        """Remove the directory and its contents if it exists."""
        with storage_errors("removed", str(self._directory)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._directory)

    def real(self) -> LocalDir:
        """Return the same directory without links."""
        return LocalDir(self._directory.resolve(), self._confined)

    def subdirectories_with(self, name: str) -> dict[str, str]:
        """Find the subdirectories that hold a file of a given name."""
        found = {}
        with storage_errors("read", str(self._directory)):
            try:
                entries = sorted(entry.name for entry in os.scandir(self._directory) if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return {}
        for entry in entries:
            with contextlib.suppress(OSError):  # it is missing, or this user may not read it
                status = os.stat(self._directory / entry / check_name(name))
                found[entry] = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        return found

    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """Read a whole file."""
        with storage_errors("read", self.address(name)):
            return read_regular(self._file(name), limit)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[FileReader]:
        """Read ranges of a file."""
        path = self._file(name)
        with storage_errors("read", str(path)):
            descriptor = open_regular(path)
        try:
            yield _LocalFileReader(descriptor, str(path))
        finally:
            os.close(descriptor)

    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> FileWriter:
        """Open a new file for writing."""
        path = self._file(name)
        with storage_errors("written", str(path)):
            if durable and not cached and (descriptor := open_direct(path)) is not None:
                return DirectFileWriter(path, descriptor)
            return _CachedFileWriter(path, durable=durable)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with storage_errors("removed", self.address(name)):
            self._file(name).unlink(missing_ok=True)

    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Replace a small file by a rename."""
        with storage_errors("written", self.address(name)):
            if durable:
                sync_directory(self._directory)
            with _locked(self._directory):
                if self.version(name) != before:
                    raise self._conflict(name)
                write_atomically(self._file(name), data, durable=durable)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which the system releases when a process is killed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{directory} cannot be written: another process has held its lock for {_LOCK_SECONDS:g} s; "
                    "end that process"
                ) from None
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return  # a file system without locks: versions are compared nevertheless


class _LocalFileReader:
    def __init__(self, descriptor: int, address: str) -> None:
        self._descriptor = descriptor
        self._address = address
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        done = 0
        with storage_errors("read", self._address):
            while done < len(view):  # one call moves at most 2 GiB
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
                if got == 0:
                    break
                done += got
        return done


class _CachedFileWriter(FileWriter):
    """A file that is written through the page cache."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        super().__init__(str(path))
        self._path = path
        self._durable = durable
        self._file = path.open("xb", buffering=0)
        self._buffer = memoryview(bytearray(WRITE_BYTES))
        self._held = 0  # bytes in the buffer
        self._written = 0
        self._sent = 0  # bytes of it whose write-back was started

    def tell(self) -> int:
        return self._written + self._held

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._held and len(view) >= WRITE_BYTES:
                some = len(view) // WRITE_BYTES * WRITE_BYTES
                self._put(view[:some])
            else:
                some = min(WRITE_BYTES - self._held, len(view))
                self._buffer[self._held : self._held + some] = view[:some]
                self._held += some
                if self._held == WRITE_BYTES:
                    self._put_held()
            view = view[some:]

    def _put_held(self) -> None:
        held, self._held = self._held, 0
        self._put(self._buffer[:held])

    def _put(self, view: memoryview) -> None:
        self._written += len(view)
        while view:  # one call moves at most 2 GiB
            view = view[self._file.write(view) :]
        if self._durable and self._written - self._sent >= _SENT_BYTES:
            # Start write-back early, so that the final sync is short. Written pages may leave the cache.
            with contextlib.suppress(OSError, AttributeError):  # advice that some systems do not support
                os.posix_fadvise(self._file.fileno(), self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._written

    def _commit(self) -> None:
        self._put_held()
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()

    def _abort(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()
