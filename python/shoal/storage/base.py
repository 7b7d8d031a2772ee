"""Places: directories of files that are written once, on this machine or wherever fsspec reaches.

    place_of("ckpt/step-1000")                       a directory of this machine
    place_of("s3://bucket/step-1000", options)       an object store                                  (extra: fsspec)

    create     a new file, from its beginning to its end           size, read    all of a file, or a range
    publish    a small file at one moment, in place of a known     version       what `publish` is to replace
    names      of the files that are there                         remove        one of them
    inner      names of the directories that are there             clear         this one, with all that is in it
    folders    of the directories that hold a certain file         kind          whether this is one, or a file

What a directory holds is what its manifest names, and the manifest is published when all that it names is there. So a
writer that is cut off, or that another was faster than, has changed nothing.

Invariants
    S1  A file that was not committed is nothing: an object store never shows it; a directory of this machine loses it
        with the writer's `with`, or holds it unnamed if the process was killed.
    S2  `publish` puts a file in place of the version that it was told of, or raises `SaveConflictError` and leaves
    what is
        there. Of writers that publish over one version at most one gets through. On this machine all who write through
        this module are kept apart by a lock of the directory; S3 compares by itself (If-None-Match, If-Match), as
        other object stores do for a file that is new; for one that replaces another they are looked at just before.
    S3  What was published is on the disk, and all that was committed before it, where `durable` was asked for.
    S4  What the world refuses (a full disk, no permission, a lost connection) is a `StorageError` that names the file.
        A missing file is a FileNotFoundError.

Threads: a place may be used by any number of threads, a file that is written by one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from shoal.base.machine import local_path
from shoal.errors import CorruptionError, SaveConflictError, StorageError
from shoal.storage.checksummed_json import make_directory, sync_directory, unseal, write_atomically

__all__ = ["LocalPlace", "Place", "RemotePlace", "Source", "Target", "Where", "parts_of", "place_of"]

_PART_BYTES = 16 << 20  # that are sent to an object store at a time: 10,000 parts are the most that S3 takes of a file
_BLOCK_BYTES = 4 << 20  # that are fetched for a range: a request takes a while, however little it asks for
_LONGEST = 30.0  # seconds that another process may take to publish a file
_PAUSE = 0.005  # seconds between two tries to lock a directory
_WRITE_BYTES = 2 << 20  # written at a time, at multiples of it: some systems then map the file in pages as large
_SENT_BYTES = 16 << 20  # written before the disk is told to begin with them
_ROOMS = 3  # of _WRITE_BYTES each, which the disk reads by itself: one is filled, the others are on their way
_BLOCKS = 4  # of a file that are kept, for whoever reads what stands behind or beside
_REMEDIES = {
    errno.ENOSPC: "make room on that disk, or choose another",
    errno.EDQUOT: "the quota is used up: make room, or choose another disk",
    errno.EFBIG: "files may not be so large here (ulimit -f, or the file system's own limit)",
    errno.EACCES: "let this user write and read there, or choose another directory",
    errno.EPERM: "let this user write and read there, or choose another directory",
    errno.EROFS: "that file system takes no changes: choose another",
    errno.EIO: "the disk fails: choose another",
    errno.ENOENT: "there is no such directory or bucket: make it",
}


def place_of(where: Where, options: Mapping[str, Any] | None = None) -> Place:
    """Name a directory, which need not be there.

    Parameters
    ----------
    where : path, URL or Place
        Of this machine, or "s3://bucket/folder" and whatever else fsspec knows. A place stays as it is.
    options : mapping, optional
        Of the file system that a URL is opened by, such as ``{"endpoint_url": ...}``.

    Raises
    ------
    ImportError
        A URL, and fsspec, or what it takes for that kind of URL, is not installed.
    ValueError
        fsspec knows no such kind of URL.

    Examples
    --------
    >>> place_of("ckpt").address("manifest.json")
    'ckpt/manifest.json'
    """
    if isinstance(where, Place):
        return where
    if isinstance(where, str) and "://" in where:
        return RemotePlace(where, options or {})
    return LocalPlace(local_path(where))


class Source(Protocol):
    """A file that is read."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` with what stands at ``offset``: how many bytes there were. Any thread may."""


class Target(ABC):
    """A new file that is written. A context manager: committed at the end of a ``with`` that raises nothing."""

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
        """Append.

        Raises
        ------
        StorageError
            It cannot be written. The file is given up.
        """
        try:
            self._write(data)
        except BaseException:  # no context manager where nothing goes wrong: pieces are small and many
            with self._given_up():
                raise

    def commit(self) -> None:
        """Let the file be; more cannot be written.

        Raises
        ------
        StorageError
            It cannot be written. The file is given up.
        """
        if self._open:
            with self._given_up():
                self._commit()
            self._open = False

    def abort(self) -> None:
        """Let there be no such file, unless it was committed."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # what is left lies where nothing names it
                self._abort()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            with _refused("written", self.address):
                yield
        except BaseException:
            self.abort()
            raise

    @abstractmethod
    def tell(self) -> int:
        """Bytes that were written."""

    @abstractmethod
    def _write(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...


class Place(ABC):
    """A directory. `LocalPlace` and `RemotePlace` are what there is; `place_of` makes them."""

    @property
    @abstractmethod
    def local(self) -> Path | None:
        """The directory of this machine; None elsewhere."""

    @property
    def name(self) -> str:
        """The last part of its path, for people."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def given(self) -> Path | str:
        """What a caller is told: a path of this machine, or a URL."""
        return str(self) if self.local is None else self.local

    @abstractmethod
    def told(self) -> tuple[str, Mapping[str, Any]]:
        """Tell what another process makes the same place of, by `place_of`."""

    @abstractmethod
    def path_to(self, other: Place) -> str:
        """Tell another directory's path from here, which `inside` leads along.

        Raises
        ------
        ValueError
            There is none: it is on another kind of storage.
        """

    @abstractmethod
    def is_same(self, other: Place) -> bool:
        """Tell whether this is the same directory."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Name a file for people."""

    @abstractmethod
    def inside(self, path: str) -> Place:
        """Name a directory by its path from here, such as ``"a"`` or ``"../a"``."""

    def real(self) -> Place:
        """Name the same directory without links, for paths that lead out of it."""
        return self

    @abstractmethod
    def make(self, *, durable: bool = True) -> None:
        """Make the directory, and what is missing above it, where directories are made at all.

        Raises
        ------
        StorageError
            It cannot be made.
        """

    @abstractmethod
    def kind(self) -> Literal["directory", "file"] | None:
        """Tell what is there; an object store has a directory where it has a file in it.

        Raises
        ------
        StorageError
            It cannot be looked at.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the files that are there; none if the directory is not.

        Raises
        ------
        StorageError
            It cannot be read.
        """

    @abstractmethod
    def inner(self) -> list[str]:
        """Names of the directories that are there; none if this one is not.

        Raises
        ------
        StorageError
            It cannot be read.
        """

    @abstractmethod
    def folders(self, name: str) -> dict[str, str]:
        """Find the directories in this one that hold a file of a name.

        Returns
        -------
        dict of str
            By the directory's name: what is another once that file is.

        Raises
        ------
        StorageError
            The directory cannot be read.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file.

        Raises
        ------
        FileNotFoundError
            It is not there.
        StorageError
            It cannot be read.
        """

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[Source]:
        """Read ranges of a file, inside a ``with``; errors as `read`."""

    @abstractmethod
    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> Target:
        """Begin a new file, for a ``with``.

        Parameters
        ----------
        name : str
            That no file has.
        durable : bool
            Whether it is on the disk once it is committed.
        cached : bool
            Whether it is to be in this machine's memory, too, for who reads it next. Without, a durable file goes to
            the disk past the system's cache where that can be, at the disk's own speed.

        Raises
        ------
        StorageError
            It cannot be written, or is there.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises
        ------
        StorageError
            It cannot be removed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove the directory and all that is in it, if it is there.

        Raises
        ------
        StorageError
            Something cannot be removed.
        """

    def read_sealed(self, name: str, *, missing: str, what: str | None = None) -> bytes:
        """Read the body of a sealed file.

        Parameters
        ----------
        name : str
        missing : str
            What it means that the file is not there.
        what : str, optional
            What the directory is, where it is one that a caller has named: that there is no such directory is then the
            caller's mistake, and no damage.

        Raises
        ------
        CorruptionError
            It is missing or was changed.
        FileNotFoundError
            There is no such directory, and ``what`` was given.
        StorageError
            It cannot be read.
        """
        try:
            raw = self.read(name)
        except FileNotFoundError:
            kind = self.kind()
            if kind is None and what is not None:
                raise FileNotFoundError(errno.ENOENT, f"there is no such {what}", str(self)) from None
            if kind == "file":
                raise CorruptionError(f"{self} is a file where a directory should be") from None
            raise CorruptionError(f"{self.address(name)} is missing: {missing}") from None
        return unseal(raw, self.address(name))

    def version(self, name: str) -> str | None:
        """Tell what `publish` is to replace: None if there is no such file."""
        try:
            return _digest(self.read(name))
        except FileNotFoundError:
            return None

    @abstractmethod
    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Put a small file in place, all of it at one moment.

        Parameters
        ----------
        name : str
        data : bytes
        before : str or None
            Its `version` that this one replaces.
        durable : bool
            Whether it, and all that was created here before, is on the disk then.

        Raises
        ------
        SaveConflictError
            It has another version by now. What is there stays.
        StorageError
            It cannot be written.
        """

    def _conflict(self, name: str) -> SaveConflictError:
        return SaveConflictError(
            f"{self.address(name)} was written by another process since this one began, and is left as it is: let one "
            "process write there, or each into a directory of its own"
        )


Where: TypeAlias = str | os.PathLike[str] | Place


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _plain(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is no name of a file in a directory")
    return name


@contextlib.contextmanager
def _refused(done: str, address: str) -> Iterator[None]:
    """Say which file it was that the world refused."""
    try:
        yield
    except StorageError:
        raise
    except OSError as cause:
        if isinstance(cause, FileNotFoundError) and done == "read":
            raise
        if isinstance(cause, NotADirectoryError) and done == "read":  # a file stands where the directory should
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
        raise _storage_error(f"{address} cannot be {done} ({what}): is the storage there?", cause) from cause


def absent(place: Place) -> list[Path]:
    """List the directories that making a place would make, the innermost first; none of one that is elsewhere."""
    found: list[Path] = []
    path = place.local
    while path is not None and not path.exists():
        found.append(path)
        path = path.parent
    return found


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


@contextlib.contextmanager
def leaving_none_empty(place: Place) -> Iterator[None]:
    """Take a directory away again that the block has made, and those above it, if it fails and they are empty."""
    before = absent(place)
    try:
        yield
    except BaseException:
        remove_empty(before)
        raise


def _storage_error(text: str, cause: Exception) -> StorageError:
    error = StorageError(text)
    error.errno = getattr(cause, "errno", None)
    return error


# ---- on this machine -------------------------------------------------------------------------------------------------


class LocalPlace(Place):
    """A directory of this machine."""

    def __init__(self, directory: Path, confined: Callable[[Path], None] | None = None) -> None:
        self._directory = directory
        self._confined = confined  # raises StorageError of a path that is not to be opened
        if confined is not None:
            confined(directory)

    def _file(self, name: str) -> Path:
        path = self._directory / _plain(name)
        if self._confined is not None:
            self._confined(path)
        return path

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def local(self) -> Path:
        """The directory."""
        return self._directory

    def told(self) -> tuple[str, Mapping[str, Any]]:
        """Tell the whole path."""
        return os.path.abspath(self._directory), {}

    def path_to(self, other: Place) -> str:
        """Tell another directory's path from here."""
        if not isinstance(other, LocalPlace):
            raise ValueError(f"there is no path from {self} to {other}: keep both on one kind of storage")
        return os.path.relpath(other._directory, self._directory)

    def is_same(self, other: Place) -> bool:
        """Tell whether this is the same directory, links followed."""
        return isinstance(other, LocalPlace) and self._directory.resolve() == other._directory.resolve()

    def address(self, name: str) -> str:
        """Name a file for people."""
        return str(self._directory / name)

    def inside(self, path: str) -> LocalPlace:
        """Name a directory by its path from here."""
        found = self._directory / path
        # Only where it leads out: the system follows a link before "..", where normpath does not.
        return LocalPlace(Path(os.path.normpath(found)) if ".." in Path(path).parts else found, self._confined)

    def make(self, *, durable: bool = True) -> None:
        """Make the directory, and what is missing above it."""
        with _refused("made", str(self._directory)):
            if durable:
                make_directory(self._directory)
            else:
                self._directory.mkdir(parents=True, exist_ok=True)

    def kind(self) -> Literal["directory", "file"] | None:
        """Tell what is there."""
        with _refused("read", str(self._directory)):
            if not self._directory.exists():
                return None
            return "directory" if self._directory.is_dir() else "file"

    def names(self) -> list[str]:
        """Names of the files that are there."""
        return self._entries(directories=False)

    def inner(self) -> list[str]:
        """Names of the directories that are there."""
        return self._entries(directories=True)

    def _entries(self, *, directories: bool) -> list[str]:
        with _refused("read", str(self._directory)):
            try:
                return sorted(entry.name for entry in os.scandir(self._directory) if entry.is_dir() is directories)
            except FileNotFoundError:
                return []

    def clear(self) -> None:
        """Remove the directory and all that is in it, if it is there."""
        with _refused("removed", str(self._directory)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._directory)

    def real(self) -> LocalPlace:
        """Name the same directory without links."""
        return LocalPlace(self._directory.resolve(), self._confined)

    def folders(self, name: str) -> dict[str, str]:
        """Find the directories in this one that hold a file of a name."""
        found = {}
        with _refused("read", str(self._directory)):
            try:
                entries = sorted(entry.name for entry in os.scandir(self._directory) if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return {}
        for entry in entries:
            with contextlib.suppress(OSError):  # it is not there, or not for this user
                told = os.stat(self._directory / entry / _plain(name))
                found[entry] = f"{told.st_ino} {told.st_size} {told.st_mtime_ns} {told.st_ctime_ns}"
        return found

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        with _refused("read", self.address(name)):
            return self._file(name).read_bytes()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """Read ranges of a file."""
        path = self._file(name)
        with _refused("read", str(path)):
            file = path.open("rb", buffering=0)
        with file:
            yield _LocalSource(file, str(path))

    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> Target:
        """Begin a new file."""
        path = self._file(name)
        with _refused("written", str(path)):
            if durable and not cached and (descriptor := _past_the_cache(path)) is not None:
                return _DirectTarget(path, descriptor)
            return _CachedTarget(path, durable=durable)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _refused("removed", self.address(name)):
            self._file(name).unlink(missing_ok=True)

    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Put a small file in place by a rename."""
        with _refused("written", self.address(name)):
            if durable:
                sync_directory(self._directory)
            with _locked(self._directory):
                if self.version(name) != before:
                    raise self._conflict(name)
                write_atomically(self._file(name), data, durable=durable)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let nobody else publish there; the system ends the lock of a process that is killed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    deadline = time.monotonic() + _LONGEST
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{directory} cannot be written: another process has held its lock for {_LONGEST:g} s; end that one"
                ) from None
            time.sleep(_PAUSE)
        except OSError:
            return  # a file system without locks: the versions are compared all the same


class _LocalSource:
    def __init__(self, file: Any, address: str) -> None:
        self._descriptor = file.fileno()
        self._address = address
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        done = 0
        with _refused("read", self._address):
            while done < len(view):  # one call moves at most 2 GiB
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
                if got == 0:
                    break
                done += got
        return done


class _CachedTarget(Target):
    """A file that is written through the system's cache."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        super().__init__(str(path))
        self._path = path
        self._durable = durable
        self._file = path.open("xb", buffering=0)
        self._room = memoryview(bytearray(_WRITE_BYTES))
        self._held = 0  # bytes in the room
        self._written = 0
        self._sent = 0  # of it, what the disk was told to begin with

    def tell(self) -> int:
        return self._written + self._held

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._held and len(view) >= _WRITE_BYTES:
                some = len(view) // _WRITE_BYTES * _WRITE_BYTES
                self._put(view[:some])
            else:
                some = min(_WRITE_BYTES - self._held, len(view))
                self._room[self._held : self._held + some] = view[:some]
                self._held += some
                if self._held == _WRITE_BYTES:
                    self._put_held()
            view = view[some:]

    def _put_held(self) -> None:
        held, self._held = self._held, 0
        self._put(self._room[:held])

    def _put(self, view: memoryview) -> None:
        self._written += len(view)
        while view:  # one call moves at most 2 GiB
            view = view[self._file.write(view) :]
        if self._durable and self._written - self._sent >= _SENT_BYTES:
            # Have the disk begin with what it will be waited for at the end. What it has written may leave the memory.
            with contextlib.suppress(OSError, AttributeError):  # advice, which not all systems take
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


def _past_the_cache(path: Path) -> int | None:
    """Make a file that the disk fills from the writer's own memory; None where there are no such files."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some systems make it before they refuse
        return None


class _DirectTarget(Target):
    """A durable file that is written past the system's cache, by a thread of its own.

    What is written is gathered in rooms whose beginnings, lengths and places in the file are what disks ask for; the
    end, which has no such length, goes through the cache.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(str(path))
        self._path = path
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, "shoal-disk")
        self._free = [memoryview(mmap.mmap(-1, _WRITE_BYTES)) for _ in range(_ROOMS)]
        self._busy: deque[tuple[memoryview, Future[None]]] = deque()
        self._held = 0  # bytes in the last of the free rooms
        self._sent = 0  # bytes that the thread was given

    def tell(self) -> int:
        return self._sent + self._held

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._free:
                self._wait()
            some = min(_WRITE_BYTES - self._held, len(view))
            self._free[-1][self._held : self._held + some] = view[:some]
            self._held += some
            view = view[some:]
            if self._held == _WRITE_BYTES:
                self._send()

    def _send(self) -> None:
        room, held, offset = self._free.pop(), self._held, self._sent
        self._held = 0
        self._sent += held
        self._busy.append((room, self._thread.submit(self._put, room[:held], offset)))

    def _wait(self) -> None:
        """Wait for the longest under way, and have its room."""
        room, future = self._busy.popleft()
        future.result()
        self._free.append(room)

    def _put(self, view: memoryview, offset: int) -> None:
        while view:
            if len(view) % mmap.PAGESIZE:  # the end, or what a disk has left over that is almost full
                _through_the_cache(self._descriptor)
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def _commit(self) -> None:
        if self._held:
            self._send()
        while self._busy:
            self._wait()
        self._thread.shutdown()
        os.fsync(self._descriptor)
        self._close()

    def _abort(self) -> None:
        self._path.unlink(missing_ok=True)
        self._thread.shutdown(cancel_futures=True)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _through_the_cache(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


# ---- elsewhere -------------------------------------------------------------------------------------------------------


class RemotePlace(Place):
    """A directory that fsspec reaches."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        beside: RemotePlace | None = None,
        confined: Callable[[str], None] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._confined = confined  # raises StorageError of a URL that is not to be opened
        if confined is not None:
            confined(self._url)
        self._options = dict(options)
        self._system: Any
        if beside is not None:  # on the same storage: one connection does for both
            self._system = beside._system
            root = self._system._strip_protocol(self._url)
        else:
            try:
                from fsspec.core import url_to_fs
            except ImportError as error:
                raise ImportError(
                    f"{url} takes fsspec, and s3fs, gcsfs and the like: pip install 'shoal[fsspec]'"
                ) from error
            self._system, root = url_to_fs(self._url, **_copied(self._options))
        self._root = str(root)
        protocol = self._system.protocol
        self._compares = "s3" in (protocol if isinstance(protocol, (tuple, list)) else (protocol,))

    def __str__(self) -> str:
        return self._url

    @property
    def local(self) -> None:
        """It is elsewhere."""
        return

    def told(self) -> tuple[str, Mapping[str, Any]]:
        """Tell the URL, and the options, secrets among them."""
        return self._url, self._options

    def path_to(self, other: Place) -> str:
        """Tell another directory's path from here."""
        (kind, host, folder), (its_kind, its_host, its_folder) = parts_of(str(self)), parts_of(str(other))
        if not isinstance(other, RemotePlace) or (kind, host) != (its_kind, its_host):
            raise ValueError(f"there is no path from {self} to {other}: keep both in one bucket")
        return os.path.relpath(f"/{its_folder}", f"/{folder}")

    def is_same(self, other: Place) -> bool:
        """Tell whether this is the same directory."""
        return parts_of(str(self)) == parts_of(str(other))

    def address(self, name: str) -> str:
        """Name a file for people."""
        return f"{self._url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{_plain(name)}"

    def inside(self, path: str) -> RemotePlace:
        """Name a directory by its path from here."""
        kind, host, folder = parts_of(self._url)
        return RemotePlace(
            f"{kind}://{host}{os.path.normpath(f'/{folder}/{path}')}", self._options, self, self._confined
        )

    def make(self, *, durable: bool = True) -> None:
        """Make the directory where there are such: a bucket, which must be there, needs none for its objects."""
        if not self._compares:
            with _refused("made", self._url):
                self._system.makedirs(self._root, exist_ok=True)

    def kind(self) -> Literal["directory", "file"] | None:
        """Tell what is there."""
        with _refused("read", self._url):
            self._system.invalidate_cache(self._root)
            try:
                return "file" if self._system.info(self._root)["type"] == "file" else "directory"
            except FileNotFoundError:
                return None

    def names(self) -> list[str]:
        """Names of the files that are there."""
        return self._entries("file")

    def inner(self) -> list[str]:
        """Names of the directories that are there."""
        return self._entries("directory")

    def _entries(self, kind: str) -> list[str]:
        with _refused("read", self._url):
            self._system.invalidate_cache(self._root)
            try:
                found = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            names = (one["name"].rsplit("/", 1)[-1] for one in found if one["type"] == kind)
            return sorted(name for name in names if name)  # one that ends with "/" stands for a directory: this one

    def clear(self) -> None:
        """Remove the directory and all that is in it, if it is there."""
        with _refused("removed", self._url), contextlib.suppress(FileNotFoundError):
            self._system.invalidate_cache(self._root)
            self._system.rm(self._root, recursive=True)

    def folders(self, name: str) -> dict[str, str]:
        """Find the directories in this one that hold a file of a name: lists all files below it."""
        with _refused("read", self._url):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        below = {path.strip("/").removeprefix(self._root.strip("/")).strip("/"): told for path, told in found.items()}
        return {
            path.removesuffix(f"/{name}"): _digest(repr(sorted(told.items(), key=str)).encode())
            for path, told in sorted(below.items())
            if path.endswith(f"/{_plain(name)}") and path.count("/") == 1
        }

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        with _refused("read", self.address(name)):
            data: bytes = self._system.cat_file(self._path(name))
            return data

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """Read ranges of a file."""
        with _refused("read", self.address(name)):
            self._system.invalidate_cache(self._root)
            size = int(self._system.size(self._path(name)))
        yield _RemoteSource(self._system, self._path(name), self.address(name), size)

    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> Target:
        """Begin a new file."""
        return _RemoteTarget(self._system, self._path(name), self.address(name))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _refused("removed", self.address(name)), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Put a small object in place, if the one there is the one that was told."""
        with _refused("written", self.address(name)):
            how: dict[str, Any] = {"mode": "create"} if before is None else {}
            if before is not None:
                path = self._path(name)
                self._system.invalidate_cache(self._root)
                if self._compares:  # taken before the look at the bytes: an object that comes between has another
                    how["IfMatch"] = self._tag(path)
                if self.version(name) != before:
                    raise self._conflict(name)
            try:
                self._system.pipe_file(self._path(name), data, **how)
            except Exception as error:
                # The connection may have been lost behind a put that was done, and that then met itself.
                with contextlib.suppress(Exception):
                    if self.version(name) == _digest(data):
                        return
                if isinstance(error, FileExistsError) or _is_precondition(error):
                    raise self._conflict(name) from None
                raise

    def _tag(self, path: str) -> str:
        try:
            return str(self._system.info(path)["ETag"])
        except FileNotFoundError:
            return '""'  # which no object has


def _copied(options: Any) -> Any:
    """Copy what is nested in options: botocore writes into it, and servers compare what they are told."""
    if isinstance(options, Mapping):
        return {name: _copied(value) for name, value in options.items()}
    return [_copied(value) for value in options] if isinstance(options, list) else options


def parts_of(url: str) -> tuple[str, str, str]:
    """Cut a URL into kind, host or bucket, and folder; a path has no kind and no host."""
    kind, _, rest = url.rpartition("://")
    host, _, folder = rest.partition("/") if kind else ("", "", rest)
    return kind, host, os.path.normpath(folder)


def _is_precondition(error: Exception) -> bool:
    """Tell whether S3 found another object than was named; s3fs has no class for it where something is replaced."""
    told: Any = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    status = told.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status in (409, 412) or "PreconditionFailed" in str(error) or "pre-conditions" in str(error)


class _RemoteSource:
    """Ranges of an object: a small one is part of a block, which is kept for a while, a large one is fetched alone."""

    def __init__(self, system: Any, path: str, address: str, size: int) -> None:
        self._system = system
        self._path = path
        self._address = address
        self.size = size
        self._lock = threading.Lock()  # guards _blocks; each block is fetched once, by the thread that put it there
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()

    def read_into(self, view: memoryview, offset: int) -> int:
        end = min(offset + len(view), self.size)
        if end - offset >= _BLOCK_BYTES:
            data = self._fetch(offset, end)
            view[: len(data)] = data
            return len(data)
        done = 0
        while offset + done < end:
            number, start = divmod(offset + done, _BLOCK_BYTES)
            some = self._block(number)[start : start + end - offset - done]
            if not some:  # it is shorter than it was said to be
                break
            view[done : done + len(some)] = some
            done += len(some)
        return done

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.get(number)
            mine = block is None
            if block is None:
                block = self._blocks[number] = Future()
                while len(self._blocks) > _BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(number)
        if mine:
            try:
                block.set_result(self._fetch(number * _BLOCK_BYTES, min((number + 1) * _BLOCK_BYTES, self.size)))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(number, None)
                block.set_exception(error)
        return block.result()

    def _fetch(self, begin: int, end: int) -> bytes:
        with _refused("read", self._address):
            data: bytes = self._system.cat_file(self._path, start=begin, end=end)
            return data


class _RemoteTarget(Target):
    """An object that is sent in parts, and is there when the last one is."""

    def __init__(self, system: Any, path: str, address: str) -> None:
        super().__init__(address)
        self._system = system
        self._path = path
        with _refused("written", address):
            self._file: Any = system.open(path, "wb", block_size=_PART_BYTES, autocommit=False)
        self._written = 0

    def tell(self) -> int:
        return self._written

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._file.write(data)
        self._written += len(data) if isinstance(data, (bytes, bytearray)) else data.nbytes

    def _commit(self) -> None:
        self._file.close()
        if not hasattr(self._file, "commit"):
            return
        try:
            self._file.commit()
        except Exception:
            if not self._is_whole():  # else the answer was lost, and the file is there
                raise

    def _is_whole(self) -> bool:
        self._system.invalidate_cache(self._path)
        try:
            return int(self._system.size(self._path)) == self._written
        except Exception:
            return False

    def _abort(self) -> None:
        # Closing would send what is left.
        self._file.closed = True
        if hasattr(self._file, "discard"):
            self._file.discard()
        else:
            self._system.rm_file(self._path)
