"""The code of users that a server may run: the classes of optimizers that tables name, and functions of rows.

A description names a class or a function by its module. A server imports the module only if it was started with its
name, or with the directory that contains it, and runs the source of a function only if it was started with the word
``source``; by default it does neither. Such code has all rights of the process.

Threads: one.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from shoal.errors import UserCodeError
from shoal.table.spec import TableRecord
from shoal.user_functions import SourceFunction
from shoal.user_optimizer import UserOptimizer, class_path, make_user_optimizer, why_unavailable

SOURCE = "source"  # allows functions that are sent as their source


class AllowedCode:
    """The directories and modules that a server was started with."""

    def __init__(self, allowed: Sequence[str | os.PathLike[str]] = ()) -> None:
        self._directories: list[str] = []
        self._modules: list[str] = []
        self._runs_source = False
        for given in allowed:
            one = os.fspath(given)
            if one == SOURCE:
                self._runs_source = True
            elif os.path.isdir(one):
                self._directories.append(os.path.realpath(one))
            elif all(part.isidentifier() for part in one.split(".")):
                self._modules.append(one)
            else:
                raise ValueError(f"allow_code {one!r} is neither a directory nor the name of a module")

    def refusal(self, form: TableRecord) -> str:
        """Import the class of a table's optimizer, if it is a user's; return why that is not possible, or ""."""
        if form.optimizer != UserOptimizer.__name__:
            return ""
        path = class_path(form.params)
        module = path.partition(":")[0]
        what = f"the optimizer of table {form.name!r} is {path}, code of a user"
        if module == "__main__":
            return f"{what} that is defined in the main program of a worker: put the class into a module of its own"
        if refusal := self._import(module, what):
            return refusal
        reason = why_unavailable(make_user_optimizer(form.params))
        return reason and f"{what}: {reason}"

    def function(self, code: Mapping[str, Any]) -> Callable[..., Any]:
        """Find a function of rows, by its import path or its source."""
        if "source" in code:
            if not self._runs_source:
                raise UserCodeError(
                    f"{code['name']} was sent as its source, which this server may not run: start all servers with "
                    f"--allow-code {SOURCE} (shoal.launch(allow_code=[{SOURCE!r}]))"
                )
            return SourceFunction(str(code["name"]), str(code["source"]))
        module, _, name = str(code["path"]).partition(":")
        what = f"the function of rows is {module}:{name}, code of a user"
        if refusal := self._import(module, what):
            raise UserCodeError(refusal)
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found) or getattr(found, "__module__", "") != module:  # not what the module has imported
            raise UserCodeError(f"{what}, and the module of this server has no such function")
        return cast("Callable[..., Any]", found)

    def _import(self, module: str, what: str) -> str:
        """Import a module if that is allowed; return why it is not possible, or ""."""
        file = self._file(module)
        if file is None and not any(module == one or module.startswith(one + ".") for one in self._modules):
            return (
                f"{what}, which this server may not run: start all servers with --allow-code {module}, or with the "
                "directory of the module (shoal.launch(allow_code=...))"
            )
        try:
            found = importlib.import_module(module)
        except Exception as error:
            return f"{what}, and importing {module} failed: {type(error).__name__}: {error}"
        if file is not None and os.path.realpath(found.__file__ or "") != file:
            return f"{what} in {file}, and {module} is already {found.__file__}: give the module another name"
        return ""

    def check(self, forms: Iterable[TableRecord]) -> None:
        """Import the classes of the tables of a cluster."""
        for form in forms:
            if refusal := self.refusal(form):
                raise UserCodeError(refusal)

    def _file(self, module: str) -> str | None:
        """Find a module in the directories, which become places to import from."""
        for directory in self._directories:
            path = os.path.join(directory, *module.split("."))
            for file in (path + ".py", os.path.join(path, "__init__.py")):
                if os.path.isfile(file) and os.path.realpath(file).startswith(directory + os.sep):
                    if directory not in sys.path:
                        sys.path.append(directory)
                    return os.path.realpath(file)
        return None
