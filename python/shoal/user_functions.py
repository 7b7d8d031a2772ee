"""Functions of users over the rows of a table, called in the processes that hold the rows.

    by_source      mark a function to be sent as its source text
    Description    what a request says of a function: where its code is, and its parameters
    run_rows       the function that the engine calls for the rows of a slot
    merged, counted   the result of a call, from the answers of all slots

A description is JSON: the import path or the source of the function, and its parameters. A process calls functions
that it has described itself, and those that its resolver finds: a server installs one (`set_resolver`), which knows
what the server may run.

An exception of the function is an answer like others: it is remembered and replicated with the call, and the caller
raises it as `UserCodeError`.

Threads: any number.
"""

import ast
import builtins
import inspect
import json
import linecache
import textwrap
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.errors import UserCodeError

Words = npt.NDArray[np.float64]
_KNOWN = 1024  # functions that a process remembers
_LONGEST_SOURCE = 65536
_LONGEST_TRACEBACK = 8192
_CHANGED, _FLOATS, _INTS, _FAILED = range(4)  # kinds of answers


class SourceFunction:
    """A function that is sent to servers as its source text: made by `by_source`.

    Attributes
    ----------
    source : str
        The text of its ``def`` statement.
    """

    def __init__(self, name: str, source: str) -> None:
        self.__name__ = name
        self.source = source

    def __repr__(self) -> str:
        return f"SourceFunction({self.__name__!r})"

    @cached_property
    def _function(self) -> Callable[..., Any]:
        file = f"<source of {self.__name__}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        names: dict[str, Any] = {"np": np, "__builtins__": builtins, "__name__": file}
        exec(compile(self.source, file, "exec"), names)
        function: Callable[..., Any] = names[self.__name__]
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as servers do: with ``np`` and the built-in names only."""
        return self._function(*args, **kwargs)


def by_source(fn: Callable[..., Any]) -> SourceFunction:
    """Mark a function to be sent as its source, for servers with ``--allow-code source``. May be used as a decorator.

    Parameters
    ----------
    fn : function
        Made by a ``def`` statement whose source can be read, also in a notebook. It can use ``np``, the built-in names,
        and what it imports itself, but no other names of its module, in any process.

    Returns
    -------
    SourceFunction

    Raises
    ------
    ValueError
        There is no such source, or it uses variables of an enclosing function.

    Examples
    --------
    >>> from shoal.user_functions import SourceFunction
    >>> SourceFunction("double", "def double(x): return np.multiply(x, 2)")([1, 2]).tolist()
    [2, 4]
    """
    name = getattr(fn, "__name__", repr(fn))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"the source of {name} cannot be read: define it by a def statement of its own") from error
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{name} is not defined by a def statement: write one")
    if variables := fn.__code__.co_freevars:
        raise ValueError(f"{name} uses {variables[0]!r} of an enclosing function: pass it by params")
    node.decorator_list = []
    source = ast.unparse(node)
    if len(source) > _LONGEST_SOURCE:
        raise ValueError(f"the source of {name} has {len(source)} characters: {_LONGEST_SOURCE} is the maximum")
    return SourceFunction(node.name, source)


class Description(NamedTuple):
    """A function and its parameters, as a request has them."""

    text: bytes
    # Why no server can run it; empty if one can.
    unsendable: str

    def parameters(self, hashes: npt.NDArray[np.uint64] | None) -> Words:
        """Return the parameters of the engine's function: csrc/shard/user_function.h."""
        padded = np.frombuffer(self.text + bytes(-len(self.text) % 8), np.float64)
        given = np.empty(0) if hashes is None else hashes.view(np.float64)
        return np.concatenate([[len(self.text), hashes is not None], padded, given])


_known: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()  # by description


def describe(fn: Callable[..., Any], params: Mapping[str, Any] | None = None) -> Description:
    """Describe a function; this process then finds it by its description."""
    if not callable(fn):
        raise TypeError(f"a function of rows is called with keys, weights and state, got {fn!r:.100}")
    params = dict(params or {})
    for name, value in params.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str | np.integer | np.floating):
            raise TypeError(f"params are numbers, texts and truth values by name, got {name!r}: {value!r:.100}")
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}
    code: dict[str, Any]
    unsendable = ""
    if isinstance(fn, SourceFunction):
        code = {"name": fn.__name__, "source": fn.source}
    else:
        module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
        code = {"path": f"{module}:{name}"}
        if module in {"", "__main__"} or "<" in name or not name:
            code["id"] = id(fn)
            unsendable = (
                f"{name or fn!r} of module {module or '?'} cannot be imported by servers: put it into a module of its "
                "own, or send it as shoal.by_source(fn)"
            )
    text = json.dumps(code | {"params": plain}, sort_keys=True).encode()
    _known[text] = fn
    _known.move_to_end(text)
    while len(_known) > _KNOWN:
        _known.popitem(last=False)
    return Description(text, unsendable)


def _refuse(code: Mapping[str, Any]) -> Callable[..., Any]:
    raise UserCodeError("this process runs no functions of users")


_resolve: Callable[[Mapping[str, Any]], Callable[..., Any]] = _refuse
_resolved: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()  # by description


def set_resolver(resolve: Callable[[Mapping[str, Any]], Callable[..., Any]]) -> None:
    """Have this process find functions that others describe: ``resolve(code)`` returns one or raises `UserCodeError`.

    ``code`` has ``path``, an import path such as ``module:function``, or ``name`` and ``source``.
    """
    global _resolve
    _resolve = resolve
    _resolved.clear()


def _find(text: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    code = json.loads(text)
    params = code.pop("params")
    found = _known.get(text) or _resolved.get(text)
    if found is None:
        found = _resolved[text] = _resolve(code)
        while len(_resolved) > _KNOWN:
            _resolved.popitem(last=False)
    return found, params


# --- answers --------------------------------------------------------------------------------------------------------


def _words_of(value: Any) -> Words:
    array = np.asarray(value)
    if array.dtype.kind in "biu" and array.dtype != np.uint64:
        kind, data = _INTS, array.astype(np.int64).ravel().view(np.float64)
    elif array.dtype.kind == "f":
        kind, data = _FLOATS, array.astype(np.float64).ravel()
    else:
        raise TypeError(
            f"a function of rows returns a number or an array of float64 or int64, got {type(value).__name__}"
            + (f" of {array.dtype}" if isinstance(value, np.ndarray) else "")
        )
    return np.concatenate([[kind, array.ndim, *array.shape], data])


class _Columns(dict[str, npt.NDArray[np.float32]]):
    """State columns of the rows of a slot, by name. ``state["n"] = values`` writes into a column."""

    def __setitem__(self, name: str, value: npt.ArrayLike) -> None:
        if name not in self:
            raise KeyError(f"rows have no state column {name!r}: there is {', '.join(self) or 'none'}")
        if value is not self[name]:
            self[name][...] = value


def run_rows(
    description: bytes,
    writes: bool,
    hashes: npt.NDArray[np.uint64],
    weights: npt.NDArray[np.float32],
    state: dict[str, npt.NDArray[np.float32]],
) -> tuple[bool, Words]:
    """Call the function that a description names for the rows of a slot. Called by the engine."""
    try:
        fn, params = _find(description)
        with np.errstate(all="ignore"):  # rows that are not finite are left unchanged, and counted
            value = fn(_core.unmix(hashes), weights, _Columns(state), **params)
        if not writes:
            return True, _words_of(value)
        if value is not None:
            raise TypeError(
                f"a function that is applied returned {type(value).__name__}: it must change weights and state in "
                "place and return None; write weights *= ... or weights[:] = ..."
            )
        return True, np.empty(0)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit: the process is not the function's
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        text = str(error) if isinstance(error, UserCodeError) else "".join([lines[0], *lines[2:]])
        data = text.encode("utf-8", "replace")[-_LONGEST_TRACEBACK:]
        padded = np.frombuffer(data + bytes(-len(data) % 8), np.float64)
        return False, np.concatenate([[_FAILED, len(data)], padded])


def _records(words: Words) -> Iterator[tuple[int, Words]]:
    at = 0
    while at < len(words):
        size = int(words[at + 1])
        yield int(words[at]), words[at + 2 : at + 2 + size]
        at += 2 + size


def failure(answers: list[Words]) -> UserCodeError | None:
    """Return the error of a call whose function has failed on some slot: of the first one; None if it has not."""
    failed = [(slot, words) for answer in answers for slot, words in _records(answer) if words[0] == _FAILED]
    if not failed:
        return None
    _, words = min(failed, key=lambda record: record[0])
    text = words[2:].tobytes()[: int(words[1])].decode("utf-8", "replace")
    return UserCodeError(f"a function of rows failed: {text.strip()}")


def counted(answers: list[Words]) -> int:
    """Return the number of rows that a function has changed."""
    return sum(int(words[1]) for answer in answers for _, words in _records(answer))


def merged(answers: list[Words], combine: Callable[[Any, Any], Any], initial: Any) -> Any:
    """Combine the values of all slots, in the order of the slots."""
    records = sorted((record for answer in answers for record in _records(answer)), key=lambda record: record[0])
    total, like = initial, None
    for number, (_, words) in enumerate(records):
        kind, ndim = int(words[0]), int(words[1])
        shape = tuple(int(size) for size in words[2 : 2 + ndim])
        if like is None:
            like = (kind, shape)
        elif (kind, shape) != like:
            raise ValueError(
                f"a function of rows returns values of one shape and type, got {_type_name(*like)} and "
                f"{_type_name(kind, shape)}"
            )
        data = words[2 + ndim :]
        value = (data.view(np.int64) if kind == _INTS else data).reshape(shape)[()]
        total = value if number == 0 and initial is None else combine(total, value)
    return total


def _type_name(kind: int, shape: tuple[int, ...]) -> str:
    return f"{'int64' if kind == _INTS else 'float64'}{list(shape)}"


_core.set_rows_function(run_rows)
