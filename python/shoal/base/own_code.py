"""Code of users that a file may name: nothing is imported that the process was not told to.

    name = "mypkg.models:BST"      --import mypkg, or imports=["mypkg"] of shoal.torch.load: the package, or the module,
                                    and what is in it

Threads: `allow` before use; `named` from any thread.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_allowed: set[str] = set()


def allow(names: Iterable[str]) -> None:
    """Allow the import of packages or modules in this process."""
    if isinstance(names, str):
        raise TypeError(f"imports is {names!r}: pass a list of names of packages")
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not the name of a package: pass one such as mypkg")
        _allowed.add(name)


def is_own(name: str) -> bool:
    """Whether a name is one of a user's code, as mypkg.models:BST."""
    return ":" in name


def named(name: str, what: str, *, instead: str = "") -> Any:
    """Import what a name stands for; ``what`` says what has the name, ``instead`` what to do in Python, in errors.

    Raises
    ------
    ValueError
        Its package is not allowed, or there is no such module or name in it.
    """
    module, _, attribute = name.partition(":")
    package = module.partition(".")[0]
    if not any(module == one or module.startswith(f"{one}.") for one in _allowed):
        raise ValueError(
            f"{what} is {name!r}, and its code is imported only if you allow it: pass --import {package}; in Python "
            f"{instead}shoal.torch.load(..., imports=[{package!r}])"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # a command finds the modules beside its files, behind all others
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"{what} is {name!r}, and {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(found, attribute):
        raise ValueError(f"{what} is {name!r}, and {module} has no {attribute}")
    return getattr(found, attribute)


def recorded(found: Any) -> dict[str, str]:
    """Return where code is from, for the record: its module, the version of its package, a digest of the file."""
    import hashlib  # these take a while, which commands without such code do not wait for
    import importlib.metadata
    import inspect

    module = inspect.getmodule(found)
    name = "" if module is None else module.__name__
    source = None if module is None else getattr(module, "__file__", None)
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source and Path(source).is_file() else ""
    try:
        version = importlib.metadata.version(name.partition(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        version = str(getattr(sys.modules.get(name.partition(".")[0]), "__version__", ""))
    return {"module": name, "version": version, "digest": digest}
