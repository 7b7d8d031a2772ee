"""Directories of file systems that fsspec supports."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

from shoal.errors import StorageError
from shoal.storage.base import FileReader, FileWriter, StorageDir, check_name, content_digest, storage_errors
from shoal.storage.regular import TOO_LARGE

_PART_BYTES = 16 << 20  # of one upload request: S3 accepts at most 10,000 parts per file
_BLOCK_BYTES = 4 << 20  # of one download request, also for smaller ranges: latency dominates small requests
_BLOCKS = 4  # of a file that are cached for later reads near them


class RemoteDir(StorageDir):
    """A directory of a file system that fsspec supports."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        sibling: RemoteDir | None = None,
        confined: Callable[[str], None] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._confined = confined  # raises StorageError for a URL that may not be opened
        if confined is not None:
            confined(self._url)
        self._options = dict(options)
        self._system: Any
        if sibling is not None:  # on the same storage: both share a connection
            self._system = sibling._system
            root = self._system._strip_protocol(self._url)
        else:
            try:
                from fsspec.core import url_to_fs
            except ImportError as error:
                raise ImportError(
                    f"{url} requires fsspec, and s3fs, gcsfs or the like: pip install 'shoal[fsspec]'"
                ) from error
            self._system, root = url_to_fs(self._url, **_copied(self._options))
        self._root = str(root)
        protocol = self._system.protocol
        self._compares = "s3" in (protocol if isinstance(protocol, (tuple, list)) else (protocol,))

    def __str__(self) -> str:
        return self._url

    @property
    def local(self) -> None:
        """None: it is not local."""
        return

    def to_spec(self) -> tuple[str, Mapping[str, Any]]:
        """Return the URL and the options, including secrets."""
        return self._url, self._options

    def path_to(self, other: StorageDir) -> str:
        """Return another directory's path relative to this one."""
        (kind, host, folder), (its_kind, its_host, its_folder) = parts_of(str(self)), parts_of(str(other))
        if not isinstance(other, RemoteDir) or (kind, host) != (its_kind, its_host):
            raise ValueError(f"there is no path from {self} to {other}: keep both in one bucket")
        return os.path.relpath(f"/{its_folder}", f"/{folder}")

    def is_same(self, other: StorageDir) -> bool:
        """Return whether this is the same directory."""
        return parts_of(str(self)) == parts_of(str(other))

    def address(self, name: str) -> str:
        """Return the full name of a file, for messages."""
        return f"{self._url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def child(self, path: str) -> RemoteDir:
        """Return the directory at a path relative to this one."""
        kind, host, folder = parts_of(self._url)
        return RemoteDir(f"{kind}://{host}{os.path.normpath(f'/{folder}/{path}')}", self._options, self, self._confined)

    def make(self, *, durable: bool = True) -> None:
        """Make the directory if the storage has directories; an object store does not, and its bucket must exist."""
        if not self._compares:
            with storage_errors("made", self._url):
                self._system.makedirs(self._root, exist_ok=True)

    def kind(self) -> Literal["directory", "file"] | None:
        """Return the kind of the entry."""
        with storage_errors("read", self._url):
            self._system.invalidate_cache(self._root)
            try:
                return "file" if self._system.info(self._root)["type"] == "file" else "directory"
            except FileNotFoundError:
                return None

    def names(self) -> list[str]:
        """Names of the files."""
        return self._entries("file")

    def subdirectories(self) -> list[str]:
        """Names of the subdirectories."""
        return self._entries("directory")

    def _entries(self, kind: str) -> list[str]:
        with storage_errors("read", self._url):
            self._system.invalidate_cache(self._root)
            try:
                found = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            names = (one["name"].rsplit("/", 1)[-1] for one in found if one["type"] == kind)
            return sorted(name for name in names if name)  # a name that ends with "/" marks the directory itself

    def clear(self) -> None:
        """Remove the directory and its contents if it exists."""
        with storage_errors("removed", self._url), contextlib.suppress(FileNotFoundError):
            self._system.invalidate_cache(self._root)
            self._system.rm(self._root, recursive=True)

    def subdirectories_with(self, name: str) -> dict[str, str]:
        """Find the subdirectories that hold a file of a given name: lists all files below this one."""
        with storage_errors("read", self._url):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        below = {path.strip("/").removeprefix(self._root.strip("/")).strip("/"): info for path, info in found.items()}
        return {
            path.removesuffix(f"/{name}"): content_digest(repr(sorted(info.items(), key=str)).encode())
            for path, info in sorted(below.items())
            if path.endswith(f"/{check_name(name)}") and path.count("/") == 1
        }

    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """Read a whole file."""
        with storage_errors("read", self.address(name)):
            if limit is not None and (size := int(self._system.size(self._path(name)))) > limit:
                raise StorageError(TOO_LARGE.format(self.address(name), size, limit))
            data: bytes = self._system.cat_file(self._path(name))
            return data

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[FileReader]:
        """Read ranges of a file."""
        with storage_errors("read", self.address(name)):
            self._system.invalidate_cache(self._root)
            size = int(self._system.size(self._path(name)))
        yield _RemoteFileReader(self._system, self._path(name), self.address(name), size)

    def create(self, name: str, *, durable: bool = True, cached: bool = True) -> FileWriter:
        """Open a new file for writing."""
        return _RemoteFileWriter(self._system, self._path(name), self.address(name))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with storage_errors("removed", self.address(name)), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def publish(self, name: str, data: bytes, *, before: str | None, durable: bool = True) -> None:
        """Replace a small object if it has the expected version."""
        with storage_errors("written", self.address(name)):
            how: dict[str, Any] = {"mode": "create"} if before is None else {}
            if before is not None:
                path = self._path(name)
                self._system.invalidate_cache(self._root)
                if self._compares:  # read before the bytes: an object written in between has another version
                    how["IfMatch"] = self._tag(path)
                if self.version(name) != before:
                    raise self._conflict(name)
            try:
                self._system.pipe_file(self._path(name), data, **how)
            except Exception as error:
                # A put may have succeeded before the connection was lost; its retry then conflicts with it.
                with contextlib.suppress(Exception):
                    if self.version(name) == content_digest(data):
                        return
                if isinstance(error, FileExistsError) or _is_precondition(error):
                    raise self._conflict(name) from None
                raise

    def _tag(self, path: str) -> str:
        try:
            return str(self._system.info(path)["ETag"])
        except FileNotFoundError:
            return '""'  # no object has this version


def _copied(options: Any) -> Any:
    """Copy nested options: botocore modifies them, and servers compare them."""
    if isinstance(options, Mapping):
        return {name: _copied(value) for name, value in options.items()}
    return [_copied(value) for value in options] if isinstance(options, list) else options


def parts_of(url: str) -> tuple[str, str, str]:
    """Split a URL into kind, host or bucket, and folder; a path has no kind and no host."""
    kind, _, rest = url.rpartition("://")
    host, _, folder = rest.partition("/") if kind else ("", "", rest)
    return kind, host, os.path.normpath(folder)


def _is_precondition(error: Exception) -> bool:
    """Return whether S3 found another version than expected; s3fs has no exception class for that when it replaces."""
    response: Any = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status in (409, 412) or "PreconditionFailed" in str(error) or "pre-conditions" in str(error)


class _RemoteFileReader:
    """Ranges of an object: small ones are read from cached blocks, large ones are fetched alone."""

    def __init__(self, system: Any, path: str, address: str, size: int) -> None:
        self._system = system
        self._path = path
        self._address = address
        self.size = size
        self._lock = threading.Lock()  # guards _blocks; each block is fetched once, by the thread that inserted it
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
            if not some:  # it is shorter than its reported size
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
        with storage_errors("read", self._address):
            data: bytes = self._system.cat_file(self._path, start=begin, end=end)
            return data


class _RemoteFileWriter(FileWriter):
    """An object that is uploaded in parts and becomes visible after the last part."""

    def __init__(self, system: Any, path: str, address: str) -> None:
        super().__init__(address)
        self._system = system
        self._path = path
        with storage_errors("written", address):
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
            if not self._is_whole():  # otherwise the reply was lost, and the file exists
                raise

    def _is_whole(self) -> bool:
        self._system.invalidate_cache(self._path)
        try:
            return int(self._system.size(self._path)) == self._written
        except Exception:
            return False

    def _abort(self) -> None:
        # Closing would upload the rest.
        self._file.closed = True
        if hasattr(self._file, "discard"):
            self._file.discard()
        else:
            self._system.rm_file(self._path)
