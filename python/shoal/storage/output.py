"""One file of results: the checks before it is written.

    a new file                                       may be written
    an input of the same command                     never
    a file of a model, a checkpoint or an export     never
    any other file that exists                       only with ``overwrite``

Pipes and devices are written to, not replaced. Of a symbolic link the file that it names is replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.base.machine import local_path
from shoal.storage.base import storage_errors
from shoal.storage.open import open_dir

# The files whose presence makes a directory a model, a checkpoint or an export.
MANIFESTS = ("model.json", "manifest.json")


def check_output(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    inputs: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Check that a file of results may be written; nothing is changed."""
    name = os.fspath(path)
    for one in inputs:
        if _is_same(name, one):
            raise ValueError(f"{name} is one of the files that are read: name another file for the output")
    target = open_dir(name, storage_options)
    if target.kind() == "directory" or name.endswith("/"):
        raise ValueError(f"{name} is a directory: name a file")
    if target.kind() is None or (target.local is not None and not target.local.is_file()):
        return
    folder = open_dir(os.path.dirname(name) or ".", storage_options)
    folders = [folder] if target.local is None else [folder, open_dir(str(target.local.resolve().parent))]
    if any(place.version(manifest) is not None for place in folders for manifest in MANIFESTS):
        raise ValueError(f"{name} is in the directory of a model, a checkpoint or an export: name a file elsewhere")
    if not overwrite:
        raise ValueError(f"{name} exists already: pass overwrite=True (--overwrite), or name another file")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a new, empty file, which replaces that at ``path``, if the block ends well, once on disk.

    It has the permissions of what it replaces. A symbolic link stays, and the file that it names is replaced.
    """
    name = os.fspath(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")  # not longer than names may be
    try:
        with storage_errors("written", name):
            temporary.touch(exist_ok=False)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        yield temporary
        with storage_errors("written", name):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _is_same(name: str, other: str) -> bool:
    """Return whether two names are of one file, links resolved."""
    name, other = _without_scheme(name), _without_scheme(other)
    if "://" in name or "://" in other:
        return name == other
    try:
        return os.path.samefile(local_path(name), local_path(other))
    except OSError:
        return False


def _without_scheme(name: str) -> str:
    """Return the path of a local file that a URL names, also through an archive or a cache; else the name."""
    last = name.rpartition("::")[2]
    for scheme in ("file://", "local://"):
        if last.startswith(scheme):
            return last.removeprefix(scheme)
    return name
