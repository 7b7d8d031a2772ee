"""Transactions: new data files and the manifest that names them, which replaces the previous manifest atomically.

    with ManifestTransaction(storage_dir, "manifest.json", is_ours) as new:
        writer = DataFileWriter(storage_dir, f"{new.stem}-0", ".slots", header)
        file, offset = writer.append(data)          any number of times, into files of about 1 GiB
        writer.finish()                             writer.files has their names and sizes
        new.publish(body)                           replaces the manifest

Invariants
    P1  No existing file is touched before the new manifest is published: the names of new files contain `stem`, eight
        random hexadecimal digits.
    P2  When the manifest is published, all files that it names are committed. Files of the previous manifest are
        removed afterwards, or by the next transaction if the storage refuses.
    P3  A transaction that fails removes its own files and leaves the previous ones.

Threads: a writer and a transaction belong to one thread; `map_in_order` works ahead of it in a pool.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from shoal.errors import StorageError
from shoal.storage.base import FileWriter, StorageDir, missing_directories, remove_empty_directories
from shoal.storage.checksummed_json import encode_checksummed

Item = TypeVar("Item")
Result = TypeVar("Result")

_FILE_BYTES = 1 << 30  # a file is closed once it has this size

_log = logging.getLogger(__name__)


class DataFile(msgspec.Struct, frozen=True):
    """A file that a manifest names."""

    name: str
    bytes: int


class DataFileWriter:
    """Appends data to new files, each of which begins with a header."""

    def __init__(
        self,
        storage_dir: StorageDir,
        stem: str,
        suffix: str,
        header: bytes,
        *,
        durable: bool = True,
        cached: bool = True,
    ) -> None:
        self._storage_dir = storage_dir
        self._stem = stem
        self._suffix = suffix
        self._header = header
        self._durable = durable
        self._cached = cached
        self._file: FileWriter | None = None
        self.files: list[DataFile] = []

    def append(self, data: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Append data; return the index of its file and its offset there."""
        if self._file is None:
            name = f"{self._stem}-{len(self.files)}{self._suffix}"
            self.files.append(DataFile(name, 0))
            self._file = self._storage_dir.create(name, durable=self._durable, cached=self._cached)
            self._file.write(self._header)
        file, offset = len(self.files) - 1, self._file.tell()
        self._file.write(data.data)
        if self._file.tell() >= _FILE_BYTES:
            self.finish()
        return file, offset

    def finish(self) -> None:
        """Commit the file; later data goes into a new one."""
        if self._file is not None:
            size = self._file.tell()
            self._file.commit()
            self.files[-1] = DataFile(self.files[-1].name, size)
            self._file = None

    def close(self) -> None:
        """Discard an unfinished file."""
        if self._file is not None:
            self._file.abort()
            self._file = None


def check_replaceable(
    storage_dir: StorageDir,
    manifest: str,
    what: str,
    is_ours: Callable[[str], bool],
    *,
    overwrite: bool,
    form: str | None = None,
) -> None:
    """Check that a directory may be replaced: it is missing, empty, or has such a manifest; nothing is changed."""
    if storage_dir.kind() != "directory":  # making the directory refuses a file
        return
    if storage_dir.version(manifest) is not None:
        if form is not None and f'"format":"{form}"'.encode() not in storage_dir.read(manifest)[:200]:
            raise ValueError(f"{storage_dir} holds a {manifest} that does not belong to {what}: choose another name")
        if not overwrite:
            raise ValueError(
                f"{storage_dir} holds {what} already: pass overwrite=True (--overwrite), or choose another name"
            )
        return
    left_behind = re.compile(rf"\.{re.escape(manifest)}\.[0-9a-f]{{8}}\.tmp")  # by a writer that was killed
    for name in (*storage_dir.names(), *storage_dir.subdirectories()):
        if not (is_ours(name) or left_behind.fullmatch(name)):
            raise ValueError(f"{storage_dir} is neither empty nor {what}, it holds {name}: choose another name")


class ManifestTransaction:
    """New files and their manifest, which replace those of a directory. A context manager."""

    def __init__(
        self,
        storage_dir: StorageDir,
        manifest: str,
        is_ours: Callable[[str], bool],
        *,
        with_subdirectories: bool = False,
        durable: bool = True,
    ) -> None:
        self.stem = secrets.token_hex(4)
        self._storage_dir = storage_dir
        self._manifest = manifest
        self._is_ours = is_ours
        self._with_subdirectories = with_subdirectories
        self._durable = durable
        self._before: str | None = None
        self._published: bytes | None = None
        self._old: list[_Entry] = []
        self._absent: list[Path] = []

    def __enter__(self) -> Self:
        self._absent = missing_directories(self._storage_dir)
        self._storage_dir.make(durable=self._durable)
        self._before = self._storage_dir.version(self._manifest)
        return self

    def publish(self, body: bytes) -> None:
        """Publish the manifest: ``body``, one JSON value, with its checksum."""
        # Files that exist now belong to the replaced manifest, to writers that were killed, or to a writer that will
        # fail with a conflict. Later files may belong to a writer that begins after this one: they are kept.
        self._old = [one for one in self._listed() if self._is_ours(one.name) and self.stem not in one.name]
        self._published = encode_checksummed(body)
        self._storage_dir.publish(self._manifest, self._published, before=self._before, durable=self._durable)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # No manifest names a file that cannot be removed, and the next transaction removes it.
        if kind is None:
            try:
                self._remove(self._old)
            except StorageError as refused:
                _log.warning(
                    "%s was published, but not all files that it replaces could be removed: %s", self._address, refused
                )
            return
        with suppress(StorageError):
            if not self._is_in_place():
                self._remove([one for one in self._listed() if self.stem in one.name])
                remove_empty_directories(self._absent)

    @property
    def _address(self) -> str:
        return self._storage_dir.address(self._manifest)

    def _is_in_place(self) -> bool:
        """Whether the manifest was published in spite of the error."""
        with suppress(FileNotFoundError):
            return self._storage_dir.read(self._manifest) == self._published
        return False

    def _listed(self) -> list[_Entry]:
        inner = self._storage_dir.subdirectories() if self._with_subdirectories else []
        return [*(_Entry(name, False) for name in self._storage_dir.names()), *(_Entry(name, True) for name in inner)]

    def _remove(self, entries: Iterable[_Entry]) -> None:
        for name, is_folder in entries:
            if is_folder:
                self._storage_dir.child(name).clear()
            else:
                self._storage_dir.remove(name)


class _Entry(NamedTuple):
    """An entry of a directory."""

    name: str
    is_folder: bool


def map_in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Do ``work`` on the items in the pool, ``ahead`` of them before the consumer; yield the results in order."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
