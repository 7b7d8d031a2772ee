"""User-defined optimizers: a Python class whose method steps many rows at once.

    UserOptimizer    the base class; a table that has one calls its ``step`` in the process that holds the rows
    run_step         the function that the engine calls

The parameters that the engine has for such an optimizer describe it in full: the import path and the version of its
class, its parameters, and the rows' state. Manifests and messages contain them. The class is found among the classes
that this process has imported: reading a checkpoint runs no code. Where the class is missing, or has another version,
the table can be read, saved and inspected; a push raises `UserCodeError`.

Threads: any number.
"""

from __future__ import annotations

import keyword
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from shoal import _core
from shoal.base.scalars import make_plain, plain
from shoal.errors import UserCodeError
from shoal.optim import Optimizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_RULE = "UserOptimizer"  # of the engine
_MOST_STATES = 4
_LONGEST_NAME = 32
_LONGEST_PATH = 240  # the engine's names have 256
_CLASS = "class."
_PARAM = "param."
_BOUNDS = ("clip_value", "clip_norm")
_OWN_NAMES = frozenset({"w", "t"})  # the columns of weights and of a row's number of steps

_classes: dict[str, type[UserOptimizer]] = {}  # by path
_optimizers: dict[tuple[tuple[str, float], ...], UserOptimizer] = {}  # by the engine's parameters


def _path(kind: type[UserOptimizer]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class _Code(NamedTuple):
    """What the engine's parameters say of a class: ``path`` is ``module:Class``."""

    path: str
    version: int
    params: dict[str, float]

    @classmethod
    def of(cls, engine_params: Mapping[str, float]) -> Self:
        """Find it among the engine's parameters."""
        named = [name for name in engine_params if name.startswith(_CLASS)]
        if len(named) != 1:
            raise ValueError(f"an optimizer {_RULE} has one class, got {named!r:.200}")
        version = engine_params[named[0]]
        bounds = {name: engine_params[name] for name in _BOUNDS if name in engine_params}
        params = {name.removeprefix(_PARAM): v for name, v in engine_params.items() if name.startswith(_PARAM)}
        return cls(named[0].removeprefix(_CLASS), int(version), params | bounds)

    def __str__(self) -> str:
        return f"{self.path} version {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UserOptimizer(Optimizer, ABC):
    """Base class of user-defined optimizers.

    A subclass is a frozen dataclass whose fields are its parameters: numbers with defaults. It defines `step`, and
    `initial_state` if rows have state. The engine keeps the rows: lookups, sums over duplicates, admission, expiry,
    memory budgets, checkpoints and rounding to 16 bits are as for other optimizers.

    Attributes
    ----------
    version : int
        Recorded in checkpoints together with the class: increase it whenever `step` or `initial_state` changes, since a
        table can only be trained further with the same version. Default: 1.
    row_steps : bool
        Whether each row counts its own steps, in 4 bytes. Default: no; ``steps`` is the number of the push.

    Examples
    --------
    Lion (Chen et al., NeurIPS'23), whose step is the sign of a mean:

    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> import shoal
    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Lion(shoal.UserOptimizer):
    ...     lr: float = 1e-4
    ...     b1: float = 0.9
    ...     b2: float = 0.99
    ...
    ...     def initial_state(self):
    ...         return {"m": 0.0}
    ...
    ...     def step(self, weights, state, grads, steps):
    ...         (m,) = state
    ...         weights -= self.lr * np.sign(self.b1 * m + (1 - self.b1) * grads)
    ...         m += (1 - self.b2) * (grads - m)
    >>> with shoal.local() as store:
    ...     table = store.table("t", dim=2, optimizer=Lion(lr=0.5))
    ...     table.push(np.array([7, 3, 7], np.uint64), np.array([[1, 1], [0, -2], [1, -1]], np.float32)).result()
    ...     print(table.pull(np.array([7, 3], np.uint64)))
    [[-0.5  0. ]
     [ 0.   0.5]]
    """

    version: ClassVar[int] = 1
    row_steps: ClassVar[bool] = False

    @property
    def has_rate(self) -> bool:
        """Whether there is a learning rate that may change: `step` computes it."""
        return False

    @classmethod
    def __init_subclass__(cls, **kwargs: Any) -> None:
        ABC.__init_subclass__(**kwargs)
        _classes[_path(cls)] = cls

    def __post_init__(self) -> None:
        make_plain(self, checked=False)  # its own declarations: its parameters come back as floats
        version, row_steps = self.version, self.row_steps
        name = type(self).__name__
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"{name} needs a version from 1, got {version!r}")
        if not isinstance(row_steps, bool):
            raise TypeError(f"{name} needs True or False for row_steps, got {row_steps!r}")
        if self.schedule is not None:
            raise ValueError(f"{name} takes no schedule: compute the rate in step, from steps")
        _core.check_optimizer(_RULE, self.engine_params())

    def initial_state(self) -> Mapping[str, float]:
        """Return the names of the state columns, in order, and the number that each starts with.

        Each column has one float32 per weight. At most 4; default: none.
        """
        return {}

    @abstractmethod
    def step(
        self,
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        grads: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int64],
    ) -> None:
        """Make one step of n rows: change ``weights`` and ``state`` in place, and return None.

        Parameters
        ----------
        weights : float32[n, dim]
            Also of tables that store 16 bits.
        state : float32[columns, n, dim]
            The columns of `initial_state`.
        grads : float32[n, dim]
            Summed over duplicates and clipped. May be overwritten.
        steps : int64[n, 1]
            With ``row_steps`` the number of each row's step, from 1; else the number of the push. Read-only.

        Notes
        -----
        A call gets some of the rows of a push, in the order of their hashes: a large push makes several calls, possibly
        at the same time in several threads, and on a cluster each server makes its own. If each row is treated
        separately, as by elementwise functions and those along the last axis, results do not depend on this. An
        exception fails the push and changes no row. Rows whose gradient is all zeros, or whose gradient or result is
        not finite, keep every bit. The engine owns the arrays: references that outlive the call keep their memory in
        use. Tables may be read, but not changed.
        """

    @property
    def rule(self) -> str:
        """Name of the engine's rule."""
        return _RULE

    def engine_params(self) -> dict[str, float]:
        """Describe the rows to the engine, and name the code."""
        name = type(self).__name__
        states = self.initial_state()
        if not isinstance(states, Mapping):
            raise TypeError(f'{name}.initial_state returns names and numbers such as {{"n": 0.0}}, got {states!r:.100}')
        if len(states) > _MOST_STATES:
            raise ValueError(f"{name} has {len(states)} state columns: {_MOST_STATES} is the maximum")
        for column, value in ((column, plain(value)) for column, value in states.items()):
            if not isinstance(column, str) or not column.isidentifier() or keyword.iskeyword(column):
                raise ValueError(f"{name} has a state column {column!r}: its name must be an identifier")
            if not column.isascii() or len(column) > _LONGEST_NAME or column in _OWN_NAMES:
                raise ValueError(
                    f"{name} has a state column {column!r}: take another name, of {_LONGEST_NAME} ASCII letters at "
                    "most, and neither w nor t"
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} needs a number that state column {column!r} starts with, got {value!r}")
        columns = {f"state{k}.{column}": float(value) for k, (column, value) in enumerate(states.items())}
        params = {name if name in _BOUNDS else _PARAM + name: value for name, value in self.params().items()}
        path = _path(type(self))
        if len(path) > _LONGEST_PATH:
            raise ValueError(f"{path} has {len(path)} characters: {_LONGEST_PATH} is the maximum")
        return {_CLASS + path: float(self.version), "row_steps": float(self.row_steps), **params, **columns}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Unavailable(UserOptimizer):
    """Stands for an optimizer whose class this process does not have."""

    engine: tuple[tuple[str, float], ...]
    reason: str

    def __repr__(self) -> str:
        return f"{_Code.of(self.engine_params())}, which cannot step here: {self.reason}"

    def params(self) -> dict[str, float]:
        return _Code.of(self.engine_params()).params

    def engine_params(self) -> dict[str, float]:
        return dict(self.engine)

    def step(
        self,
        weights: npt.NDArray[np.float32],
        state: npt.NDArray[np.float32],
        grads: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int64],
    ) -> None:
        raise UserCodeError(f"the table's optimizer is {_Code.of(self.engine_params())}: {self.reason}")


_classes.clear()  # of the class above: it is not a user's


def class_path(engine_params: Mapping[str, float]) -> str:
    """Return the path of the class, ``module:Class``, that the engine's parameters name; ValueError without one."""
    return _Code.of(engine_params).path


def why_unavailable(optimizer: UserOptimizer) -> str:
    """Return why the steps of an optimizer raise `UserCodeError`; empty if they do not."""
    return (
        f"version {_Code.of(optimizer.engine_params()).version}: {optimizer.reason}"
        if isinstance(optimizer, _Unavailable)
        else ""
    )


def make_user_optimizer(engine_params: Mapping[str, float]) -> UserOptimizer:
    """Rebuild an optimizer from its :meth:`UserOptimizer.engine_params`.

    Where this process does not have its class, the result describes the rows, and its steps raise `UserCodeError`.
    """
    found = _find(_Code.of(engine_params), engine_params)
    if isinstance(found, str):
        return _Unavailable(engine=tuple(engine_params.items()), reason=found)
    return found


def _find(code: _Code, engine_params: Mapping[str, float]) -> UserOptimizer | str:
    """Return the optimizer, or why this process does not have it."""
    kind = _classes.get(code.path)
    if kind is None:
        return f"this process has no such class: import {code.path.partition(':')[0]} first"
    if kind.version != code.version:
        return f"this process has version {kind.version} of it: import version {code.version}"
    whole = {one.name: type(one.default) for one in fields(kind) if isinstance(one.default, int)}
    values: dict[str, Any] = {name: whole.get(name, float)(value) for name, value in code.params.items()}
    try:
        found = kind(**values)
        same = found.engine_params() == dict(engine_params)
    except (TypeError, ValueError) as error:
        return f"the class of this process does not take its parameters ({error}): raise the version of a changed class"
    return found if same else "the class of this process has other state columns: raise the version of a changed class"


def run_step(
    engine_params: dict[str, float],
    weights: npt.NDArray[np.float32],
    state: npt.NDArray[np.float32],
    grads: npt.NDArray[np.float32],
    steps: npt.NDArray[np.int64],
) -> None:
    """Step some rows with the optimizer that the parameters describe. Called by the engine."""
    import numpy as np  # a scheduler describes tables without it

    key = tuple(engine_params.items())  # in the order of the names
    found = _optimizers.get(key)
    kind = None if found is None else _classes.get(_path(type(found)))
    if found is None or type(found) is not kind:  # the class was defined again
        found = _optimizers[key] = make_user_optimizer(engine_params)
    try:
        with np.errstate(all="ignore"):  # rows that are not finite are left unchanged, and counted
            result: object = found.step(weights, state, grads, steps)
        if result is not None:
            raise TypeError(
                f"step returned {type(result).__name__}: it must change weights and state in place and return None; "
                "write weights -= ... or weights[:] = ..."
            )
    except Exception as error:
        error.add_note(f"In a step of {_Code.of(engine_params)} for {len(weights)} rows: the push has changed nothing.")
        raise


_core.set_user_function(run_step)
