"""The files of an export and of the exports it is based on, mapped into memory.

A delta is read together with its successive bases, the newest layer first. A page of a file is read
when it is first used and is shared by all processes of the machine.

Threads: immutable once built; any number of readers.
"""

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.errors import CorruptionError
from shoal.export import manifest as manifests
from shoal.export.cache import Cache, CacheLease
from shoal.export.manifest import Extra, Manifest, TableEntry
from shoal.storage.base import StorageDir
from shoal.storage.regular import open_regular, read_regular

_log = logging.getLogger(__name__)
_LONGEST_CHAIN = 64
_TRIES = 3  # of opening an export that is replaced meanwhile
_Files: TypeAlias = list[list[npt.NDArray[np.uint8]]]  # by table
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class MappedExport:
    """The files of one export, mapped and checked; a remote export is mapped from a copy in the cache."""

    def __init__(self, storage_dir: StorageDir, manifest: Manifest, digest: str, *, verify: bool, cache: Cache) -> None:
        self.storage_dir = storage_dir
        self.manifest = manifest
        self.digest = digest
        self._held: CacheLease | None = None
        if storage_dir.local is not None:
            self.directory = storage_dir.local
            self.files = _map_all(manifest, storage_dir.local, storage_dir.address, verify=verify)
            return
        held = self._copy(cache)
        try:
            self.files = self._map_copy(held.directory, verify=verify)
        except CorruptionError as error:
            _log.warning("the copy of an export is fetched again: %s", error)
            held.release()
            cache.drop(storage_dir, digest)
            held = self._copy(cache)
            self.files = self._map_copy(held.directory, verify=verify)
        self._held = held
        self.directory = held.directory

    def _copy(self, cache: Cache) -> CacheLease:
        sizes = {file.name: file.bytes for table in self.manifest.tables for file in table.files}
        sizes |= {extra.name: extra.bytes for extra in self.manifest.extras}

        def check(directory: Path) -> None:
            self._map_in(directory, self.storage_dir.address, verify=True)

        return cache.hold(self.storage_dir, self.digest, sizes, check)

    def _map_copy(self, directory: Path, *, verify: bool) -> _Files:
        return self._map_in(directory, lambda name: str(directory / name), verify=verify)

    def _map_in(self, directory: Path, address: Callable[[str], str], *, verify: bool) -> _Files:
        """Map the files of a copy; with ``verify``, also check the model's files."""
        files = _map_all(self.manifest, directory, address, verify=verify)
        for extra in self.manifest.extras if verify else ():
            _read_extra(directory, extra, address)
        return files

    def release(self) -> None:
        """Release its copy in the cache. Mapped files stay mapped."""
        if self._held is not None:
            self._held.release()

    def let_go(self, cache: Cache) -> None:
        """Remove its copy unless another process maps it."""
        self.release()
        if self.storage_dir.local is None:
            cache.let_go(self.storage_dir, self.digest)

    def extra(self, name: str) -> bytes:
        """Read and check one of the model's files."""
        for extra in self.manifest.extras:
            if extra.name.partition("-")[2] == name:
                return _read_extra(self.directory, extra, lambda name: str(self.directory / name))
        raise CorruptionError(f"{self.storage_dir} has no file {name!r} of its model")


def _map_all(manifest: Manifest, directory: Path, address: Callable[[str], str], *, verify: bool) -> _Files:
    """Map the data files of an export; ``address`` returns their names for messages."""
    files = [[_map(directory / file.name, file.bytes, address(file.name)) for file in t.files] for t in manifest.tables]
    if verify:
        for table, mapped in zip(manifest.tables, files, strict=True):
            for section in table.sections:
                data = mapped[section.file][section.offset : section.offset + section.bytes]
                if _core.crc32c(data) != section.crc32c:
                    path = address(table.files[section.file].name)
                    raise CorruptionError(f"{path} is damaged: the checksum of slot {section.slot} does not match")
    return files


def _read_extra(directory: Path, extra: Extra, address: Callable[[str], str]) -> bytes:
    try:
        data = read_regular(directory / extra.name, extra.bytes)
    except FileNotFoundError:
        raise CorruptionError(f"{address(extra.name)} is missing") from None
    if len(data) != extra.bytes or _core.crc32c(data) != extra.crc32c:
        raise CorruptionError(f"{address(extra.name)} is damaged: its checksum does not match")
    return data


def _map(path: Path, size: int, address: str) -> npt.NDArray[np.uint8]:
    """Map a data file, whose pages all processes share."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise CorruptionError(f"{address} is missing") from None
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CorruptionError(f"{address} has {found} bytes instead of {size}")
        if size < len(manifests.HEADER):
            raise CorruptionError(f"{address} is damaged: {size} bytes are too few for a data file")
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # advice: a failure affects speed only
            mapped.madvise(_HUGE_PAGES)
    data = np.frombuffer(mapped, np.uint8)
    if data[: len(manifests.HEADER)].tobytes() != manifests.HEADER:
        raise CorruptionError(f"{address} is damaged: it does not begin with the header of a data file")
    return data


class Layers:
    """An export and its bases, the oldest first: the engine's tables over their files."""

    def __init__(self, mapped: list[MappedExport]) -> None:
        self.mapped = mapped
        newest = mapped[-1]
        self.digest = newest.digest
        self.number = newest.manifest.number
        self.slots = newest.manifest.slots
        self.tables: dict[str, TableEntry] = {}
        self.natives: dict[str, _core.ExportReader] = {}
        for one in mapped:
            if one.manifest.slots != self.slots:
                raise CorruptionError(
                    f"{one.storage_dir} has {one.manifest.slots} slots, {newest.storage_dir} {self.slots}"
                )
            for table, files in zip(one.manifest.tables, one.files, strict=True):
                known = self.tables.get(table.name)
                if known is not None and known.description() != table.description():
                    raise CorruptionError(
                        f"table {table.name!r} of {one.storage_dir} has another description than that of its base"
                    )
                self.tables[table.name] = table
                native = self.natives.setdefault(table.name, manifests.make_reader(table, self.slots))
                if table.sections:
                    native.add_layer()
                for k, file in enumerate(files):
                    try:
                        native.add(file, table.sections_of(k))
                    except ValueError as error:
                        raise CorruptionError(f"{one.storage_dir.address(table.files[k].name)}: {error}") from None

    def close(self) -> None:
        """Release the copies of its files. Mapped files stay mapped."""
        for one in self.mapped:
            one.release()

    @property
    def model(self) -> dict[str, Any] | None:
        """The model's description."""
        return self.mapped[-1].manifest.model

    @property
    def extras(self) -> list[str]:
        """Names of the model's files."""
        return [extra.name.partition("-")[2] for extra in self.mapped[-1].manifest.extras]

    def extra(self, name: str) -> bytes:
        """Read a file of the model."""
        return self.mapped[-1].extra(name)

    def digest_of(self, name: str) -> str | None:
        """Return the digest of the newest layer that has a table, which determines its rows; None if none has it."""
        return next(
            (one.digest for one in reversed(self.mapped) if any(table.name == name for table in one.manifest.tables)),
            None,
        )

    def forms_of(self, name: str) -> list[TableEntry]:
        """Return the entries of a table in all layers."""
        return [table for one in self.mapped for table in one.manifest.tables if table.name == name]


def read_layers(
    storage_dir: StorageDir, *, verify: bool = True, known: Layers | None = None, cache: Cache | None = None
) -> Layers:
    """Map an export and its bases; files that ``known`` has mapped are not mapped again."""
    copies = cache or Cache()
    there = {} if known is None else {(str(one.storage_dir), one.digest): one for one in known.mapped}

    def mapped(where: StorageDir, manifest: Manifest, digest: str) -> MappedExport:
        return there.get((str(where), digest)) or MappedExport(where, manifest, digest, verify=verify, cache=copies)

    for attempt in range(_TRIES):
        manifest, digest = manifests.read(storage_dir, what="export")
        try:
            return Layers(_chain(storage_dir.real(), manifest, digest, mapped))
        except CorruptionError:
            # It may have been replaced since its manifest was read.
            if attempt == _TRIES - 1 or manifests.read(storage_dir)[1] == digest:
                raise
    raise AssertionError("the last try returns or raises")


def _chain(
    where: StorageDir, manifest: Manifest, digest: str, mapped: Callable[[StorageDir, Manifest, str], MappedExport]
) -> list[MappedExport]:
    """Map the files of an export and of its bases, the oldest first."""
    chain: list[MappedExport] = []
    while True:
        chain.append(mapped(where, manifest, digest))
        if manifest.base is None:
            return chain[::-1]
        if len(chain) == _LONGEST_CHAIN:
            raise CorruptionError(f"{chain[0].storage_dir} is based on a chain of more than {_LONGEST_CHAIN} exports")
        base, wanted = where.child(manifest.base.path).real(), manifest.base.digest
        manifest, digest = manifests.read(base)
        if digest != wanted:
            raise CorruptionError(
                f"{base} is not the export that the delta {where} is based on: it was replaced; write a full "
                "export, or a delta based on the present one"
            )
        where = base
