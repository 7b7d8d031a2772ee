"""Local copies of remote exports: each file is fetched once, checked, and then mapped.

    CACHE/<directory name>-<digest of its address>/       the exports of one directory
        <digest of a manifest>/                           all files of that export
        .fetching                                         locked by the process that fetches one
        .fetch-XXXXXXXX/                                  a copy in progress

An export never changes, and its digest determines its files and their checksums.

Invariants
    C1  A directory named by a digest holds all files of that export, each checked when it was fetched: the directory
        gets that name by a rename at the end.
    C2  One process of the machine fetches at a time; the next one removes what a killed one has left.
    C3  A process that maps an export holds a shared lock on its directory. A locked directory is never removed; others
        are removed a day after they were last opened, or when they are released.

Threads: any number of callers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.base.machine import local_path
from shoal.errors import CorruptionError, StorageError
from shoal.storage.base import FileReader, StorageDir

_log = logging.getLogger(__name__)

_FETCHING = ".fetching"
_PARTS = ".fetch-"
_BLOCK_BYTES = 16 << 20  # per request
_REQUESTS = 8  # in parallel
_KEPT_SECONDS = 86400.0  # after the last opening of an export


class CacheLease:
    """An export's directory in the cache, which is not removed while this object exists."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self.directory = directory
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Release the lock."""
        self._finalizer()


class Cache:
    """A cache of copies of exports. ``directory``: default ``~/.cache/shoal``."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = local_path(directory) if directory is not None else Path.home() / ".cache" / "shoal"

    def __str__(self) -> str:
        return str(self._directory)

    def hold(
        self, storage_dir: StorageDir, digest: str, files: Mapping[str, int], check: Callable[[Path], object]
    ) -> CacheLease:
        """Find an export's copy, or make one.

        Blocks while files are fetched, by this process or another one.
        """
        group = self._group(storage_dir)
        with self._refused():
            group.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = _lock(group / digest)
            if held is None:
                with _alone(group):
                    held = _lock(group / digest)  # another process may have fetched it
                    if held is None:
                        _log.info("fetching %s into %s", storage_dir, group / digest)
                        _remove_left(group, held=digest)
                        _fetch(storage_dir, group, digest, files, check)
                        held = _lock(group / digest)
            if held is None:
                raise StorageError(
                    f"{group / digest} was removed as soon as it was made: another process may be clearing {self}"
                )
            os.utime(group / digest)
            return held

    def drop(self, storage_dir: StorageDir, digest: str) -> None:
        """Remove a damaged copy. Processes that have mapped it continue with their mapping."""
        group = self._group(storage_dir)
        with self._refused(), contextlib.suppress(FileNotFoundError), _alone(group):
            _remove(group / digest)

    def let_go(self, storage_dir: StorageDir, digest: str) -> None:
        """Remove a copy unless a process holds its lock."""
        group = self._group(storage_dir)
        with self._refused(), contextlib.suppress(FileNotFoundError), _alone(group):
            if not _is_held(group / digest):
                _remove(group / digest)

    def _group(self, storage_dir: StorageDir) -> Path:
        above = storage_dir.child("..")
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in above.name)
        return self._directory / f"{name}-{hashlib.sha256(str(above).encode()).hexdigest()[:16]}"

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        """Convert errors of the cache directory to StorageError."""
        try:
            yield
        except (StorageError, CorruptionError, FileNotFoundError):
            raise
        except OSError as error:
            raise StorageError(
                f"the copy of an export cannot be kept in {self}: {error.strerror or error}; make room or give "
                "permission there, or choose another directory (cache=, --cache)"
            ) from error


def _lock(directory: Path) -> CacheLease | None:
    """Lock a directory; None if it does not exist."""
    while True:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a process that is removing it
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
                return CacheLease(directory, descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def _alone(group: Path) -> Iterator[None]:
    """Hold the exclusive lock of a group: one thread of one process modifies it at a time."""
    descriptor = os.open(group / _FETCHING, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_held(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(directory: Path) -> None:
    """Remove a copy atomically: a directory named by a digest is complete or does not exist."""
    aside = directory.with_name(f"{_PARTS}{secrets.token_hex(4)}")
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_left(group: Path, *, held: str) -> None:
    """Remove the remains of killed processes, and copies that were not opened for a day."""
    for path in group.iterdir():
        if path.name == held or not path.is_dir():
            continue
        if path.name.startswith(_PARTS):
            shutil.rmtree(path, ignore_errors=True)
        elif time.time() - path.stat().st_mtime > _KEPT_SECONDS and not _is_held(path):
            _remove(path)


def _fetch(
    storage_dir: StorageDir, group: Path, digest: str, files: Mapping[str, int], check: Callable[[Path], object]
) -> None:
    """Make a copy; the caller holds the group's exclusive lock."""
    made = group / f"{_PARTS}{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    try:
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for name, size in files.items():
                try:
                    with storage_dir.open(name) as source:
                        if source.size != size:
                            raise CorruptionError(
                                f"{storage_dir.address(name)} has {source.size} bytes instead of {size}"
                            )
                        _copy(source, made / name, size, pool, storage_dir.address(name))
                except FileNotFoundError:
                    raise CorruptionError(f"{storage_dir.address(name)} is missing") from None
        check(made)
        made.rename(group / digest)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _copy(source: FileReader, path: Path, size: int, pool: ThreadPoolExecutor, address: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def copy(offset: int) -> None:
        data = memoryview(bytearray(min(_BLOCK_BYTES, size - offset)))
        if source.read_into(data, offset) < len(data):
            raise CorruptionError(f"{address} ends before its {size} bytes")
        while data:
            done = os.pwrite(descriptor, data, offset)
            data, offset = data[done:], offset + done

    try:
        for _ in pool.map(copy, range(0, size, _BLOCK_BYTES)):
            pass
        os.fsync(descriptor)  # a power cut must not leave a copy that looks whole
    finally:
        os.close(descriptor)
