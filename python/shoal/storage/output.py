"""One file of results: the checks before it is written.

    a new file                                       may be written
    an input of the same command                     never
    a file of a model, a checkpoint or an export     never
    any other file that exists                       only with ``overwrite``

Pipes and devices are written to, not replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.base.machine import local_path
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
    if target.kind() == "directory":
        raise ValueError(f"{name} is a directory: name a file")
    if target.kind() is None or (target.local is not None and not target.local.is_file()):
        return
    folder = open_dir(os.path.dirname(name) or ".", storage_options)
    folders = [folder] if target.local is None else [folder, open_dir(str(target.local.resolve().parent))]
    if any(place.version(manifest) is not None for place in folders for manifest in MANIFESTS):
        raise ValueError(f"{name} is in the directory of a model, a checkpoint or an export: name a file elsewhere")
    if not overwrite:
        raise ValueError(f"{name} exists already: pass overwrite=True (--overwrite), or name another file")


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
