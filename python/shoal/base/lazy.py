"""Names of a package that are imported when they are first used: ``import shoal`` loads none of its modules."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: ``names_of`` has the names of each module, and "" those of modules."""
    module_of = {name: module for module, names in names_of.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        if module:
            found = getattr(importlib.import_module(module), name)
        else:
            found = importlib.import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, found)
        return found

    return load
