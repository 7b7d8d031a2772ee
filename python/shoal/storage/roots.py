"""Storage roots: the directories and URLs below which a process opens directories that another process names.

    roots = StorageRoots(["/models", "s3://bucket/ctr"])
    roots.open("/models/step-7", {})        a directory below a root, also after ".." and links were resolved

The name of a directory is text from another process: a path or URL, and options of its file system. A path is compared
after its links are resolved, and each file again when it is opened. A URL is compared after its dots are resolved, and
must have a root's own protocol and host, without chained protocols. Options that identify the caller (`CREDENTIALS`)
are accepted; any other option could redirect a request, and must be one of this process's own options.

A link that a local user creates between the comparison and the opening is followed: users who may write below a root
are trusted with what this process may write.

Threads: immutable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import StorageError
from shoal.storage.base import StorageDir
from shoal.storage.local import LocalDir
from shoal.storage.object_store import RemoteDir, parts_of

CREDENTIALS = frozenset({"anon", "key", "secret", "token", "username", "password"})


class StorageRoots:
    """Directories and URLs below which another process may name directories.

    Examples
    --------
    >>> StorageRoots(["/models"]).open("/models/../etc", {})
    Traceback (most recent call last):
        ...
    shoal.errors.StorageError: /models/../etc is outside of /models, ...
    """

    def __init__(
        self, roots: Sequence[str | os.PathLike[str]] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        if isinstance(roots, (str, os.PathLike)):
            raise TypeError(f"storage roots are a list of directories and URLs: pass [{os.fspath(roots)!r}]")
        if roots is None:
            here = Path.cwd()
            roots = [] if here == Path(here.anchor) else [here]
        self._options = dict(options or {})
        self._directories: list[Path] = []
        self._urls: list[tuple[str, str, str]] = []
        for path in roots:
            root = os.fspath(path)
            if not root:
                raise ValueError("a storage root is empty: pass a directory, or a URL such as s3://bucket/folder")
            if "://" not in root:
                self._directories.append(Path(root).resolve())
                continue
            kind, host, folder = parts_of(root)
            if "::" in root or kind in ("file", "local"):
                raise ValueError(
                    f"{root!r} is not a storage root: pass a directory by its path, a URL by one protocol alone"
                )
            self._urls.append((kind, host, _below(folder)))

    def __str__(self) -> str:
        urls = [f"{kind}://{host}/{folder}".rstrip("/") for kind, host, folder in self._urls]
        return ", ".join([*map(str, self._directories), *urls])

    def open(self, where: str, options: Mapping[str, Any]) -> StorageDir:
        """Open a directory that another process names."""
        if "\0" in where:
            raise self._outside(where)
        if "://" not in where:
            return LocalDir(Path(where), self._check_path)
        self._check_url(where)
        for name, value in options.items():
            if name not in CREDENTIALS and (name not in self._options or self._options[name] != value):
                raise StorageError(
                    f"storage option {name!r} may lead to another storage, and this server was not started with it: "
                    f"start it with --storage-options {name}=VALUE (storage_options= of shoal.launch), or leave it out"
                )
        kind, host, folder = parts_of(where)
        return RemoteDir(f"{kind}://{host}/{_below(folder)}", {**self._options, **options}, confined=self._check_url)

    def _check_path(self, path: Path) -> None:
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # a link that leads to itself
            raise self._outside(str(path)) from None
        if any(part.is_symlink() for part in (real, *real.parents)):  # such a link, from Python 3.13 on
            raise self._outside(str(path))
        if not any(real.is_relative_to(root) for root in self._directories):
            raise self._outside(str(path))

    def _check_url(self, url: str) -> None:
        kind, host, folder = parts_of(url)
        folder = _below(folder)
        if "::" in url or not any(
            (kind, host) == (its, of) and (not root or folder == root or folder.startswith(f"{root}/"))
            for its, of, root in self._urls
        ):
            raise self._outside(url)

    def _outside(self, where: str) -> StorageError:
        return StorageError(
            f"{where} is outside of {self or 'every directory'}, where this server may read and write: start it with "
            "--storage-roots DIR (storage_roots= of shoal.launch), or connect with shared_storage=False and let the "
            "worker read and write"
        )

    def __bool__(self) -> bool:
        return bool(self._directories or self._urls)


def _below(folder: str) -> str:
    """Resolve the dots of a folder; its host is the top."""
    return os.path.normpath(f"/{folder}").strip("/")
