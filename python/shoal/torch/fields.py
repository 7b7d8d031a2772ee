"""Fields: from a batch's rows of any length to tensors of fixed fields, the input of models.

    batch     row 0:  site=a  ad=7  price:0.5  clicked=3  clicked=9          CSR, a key and a field for each feature
              row 1:  site=b        price:2.0

    inputs    keys     [[a, 7], [b, missing in ad]]                          fixed fields, in the order asked for
              dense    [[0.5], [2.0]]
              history  keys [3, 9], offsets [0, 2, 2]                        jagged

A reader omits empty cells. Here each fixed field has a key for a missing value, so that a model can learn a row for it;
a missing dense column is 0, a missing history empty. A numeric column may be a fixed field too: its one key is in
``keys``, and its number in ``values``, the factor of the row of that key.

Invariants
    I1  Every example has one key for each fixed field. More than one feature of a fixed field is an error.
    I2  Features of other fields are ignored.

Threads: descriptions are immutable; `inputs` is a pure function, safe from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.base.suggest import nearest
from shoal.data import Batch, hash_strings
from shoal.data.hashing import MISSING_TEXT
from shoal.data.readers import field_number


class Inputs(NamedTuple):
    """A batch of examples, the input of `shoal.torch.models`.

    Attributes
    ----------
    keys : int64[n, fields]
        One key for each field, the 64 bits of the reader's uint64.
    values : float32[n, fields] or None
        The factor of the row of each key; None: 1.
    history : (int64[nnz], int64[n + 1]) or None
        Jagged: the keys of earlier events, and the offsets of those of each example.
    dense : float32[n, d] or None
        Numeric columns, which have no rows.
    history_values : float32[nnz] or None
        How much each event of the history counts; None: 1.
    """

    keys: Tensor
    values: Tensor | None = None
    history: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    history_values: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of a reader's features that a model uses, and their roles.

    Parameters
    ----------
    names : sequence of str
        Fixed fields, in this order: each example has one feature of each, or none. Columns of csv, parquet and arrow,
        namespaces of vw, numbers of libffm, I1 to C26 of criteo.
    form : str
        Name of the reader's format.
    dense : sequence of str
        Numeric columns that models use as numbers.
    log : bool
        Whether dense columns become ``sign(x) ln(1 + |x|)``, which suits counts.
    history : str or None
        A field of which an example may have any number of features. For the features to share the rows of the item, the
        reader must hash them in the item's field: ``lists={"clicked": "ad"}`` of `shoal.read_csv` and
        `shoal.read_parquet`; libffm's keys are used as they are written.
    item : str or None
        The fixed field of the items in the history; required with ``history``.
    group : str or None
        The field whose key is the group of an example (GAUC); it may also have another role, or none.

    Raises
    ------
    ValueError
        A field has two roles, the item is not a fixed field, or a name is unknown to the format.

    Examples
    --------
    >>> import shoal, torch
    >>> reader = shoal.read_arrow(ads, label="click", numeric=["price"]).with_fields()  # doctest: +SKIP
    >>> fields = Fields(names=["site", "ad"], form="arrow", dense=["price"])
    >>> fields.inputs(next(iter(reader))).keys.shape  # doctest: +SKIP
    torch.Size([2, 2])
    """

    names: Sequence[str]
    form: str = "csv"
    dense: Sequence[str] = ()
    log: bool = False
    history: str | None = None
    item: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        for name in ("names", "dense"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise TypeError(f"{name} is {given!r}: pass a list of names of fields")
            object.__setattr__(self, name, tuple(given))
        if not self.names:
            raise ValueError("names is empty: a model needs one field or more")
        roles = [*self.names, *self.dense, *([] if self.history is None else [self.history])]
        for name in roles:
            if roles.count(name) > 1:
                raise ValueError(f"field {name!r} has two roles: it can be a fixed field, dense, or the history")
        if (self.history is None) != (self.item is None):
            raise ValueError(
                f"history is {self.history!r} and item {self.item!r}: a history needs the item it is about"
            )
        if self.item is not None and self.item not in self.names:
            raise ValueError(f"item is {self.item!r}, none of the fixed fields {list(self.names)}: add it to names")
        _ = self._numbers

    def __len__(self) -> int:
        """Return the number of fixed fields."""
        return len(self.names)

    @functools.cached_property
    def _numbers(self) -> _FieldNumbers:
        return _FieldNumbers(self)

    @property
    def item_index(self) -> int | None:
        """Index of the item among the fixed fields, from 0; None without a history."""
        return None if self.item is None else list(self.names).index(self.item)

    @property
    def missing(self) -> npt.NDArray[np.uint64]:
        """The key of each fixed field that stands for a missing value: that of the text NUL "missing" there."""
        return self._numbers.missing.copy()

    def inputs(self, batch: Batch) -> Inputs:
        """Arrange a batch's features as tensors; see `inputs`."""
        return inputs(batch, self)

    def check_columns(self, schema: Mapping[str, Any]) -> None:
        """Check that a reader by named columns has the fields, as far as it names them; see `shoal.data.Reader.schema`.

        Raises
        ------
        ValueError
            The reader does not read one of the columns. The message names the nearest one.
        """
        if "categorical" not in schema:  # all columns, or a format without columns: checked on the data
            return
        numeric, lists = schema.get("numeric", ()), schema.get("lists", {})
        known = [*schema["categorical"], *numeric, *lists]
        roles = {"names": self.names, "dense": self.dense, "history": (self.history,), "group": (self.group,)}
        for role, names in roles.items():
            there = {"dense": numeric, "history": list(lists)}.get(role, known)
            for name in names:
                if name is not None and name not in there:
                    what = {"dense": "numeric columns", "history": "lists"}.get(role, "columns")
                    near = nearest(name, there)
                    hint = "." if near is None else f": did you mean {near!r}?"
                    raise ValueError(
                        f"{role} has {name!r}, none of the {what} that are read as features{hint} There are "
                        f"{', '.join(map(repr, there)) or 'none'}"
                    )

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Return whether any example has the field ``group``; ``groups`` as from `groups`."""
        return self.group is None or bool(np.any(groups != hash_strings([MISSING_TEXT], self._numbers.group)[0]))

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64]:
        """Return the key of each example in the field ``group``; examples without one share a key.

        Raises
        ------
        ValueError
            There is no such field here, the batch has no fields, or an example has more than one.
        """
        if self.group is None:
            raise ValueError("no field is the group: pass group=")
        number = self._numbers.group
        mine = np.flatnonzero(_fields_of(batch) == np.uint64(number))
        example = _examples(batch)[mine]
        out = np.full(len(batch), hash_strings([MISSING_TEXT], number)[0])
        out[example] = batch.keys[mine]
        if len(mine) > len(np.unique(example)):
            raise ValueError(f"an example has more than one feature of {self.group!r}, which is its group")
        return out


class _FieldNumbers:
    """The fields as numbers, and the target of the features of each."""

    def __init__(self, fields: Fields) -> None:
        def number(name: str) -> int:
            return field_number(fields.form, name)

        fixed = [number(name) for name in fields.names]
        others = [number(name) for name in (*fields.dense, *([] if fields.history is None else [fields.history]))]
        numbers = np.array([*fixed, *others], np.uint64)
        if len(np.unique(numbers)) < len(numbers):
            raise ValueError(f"two of {[*fields.names, *fields.dense, fields.history]} are the same field")
        self.order = np.argsort(numbers)
        self.sorted = numbers[self.order]
        self.missing = np.array([hash_strings([MISSING_TEXT], field)[0] for field in fixed], np.uint64)
        self.group = -1 if fields.group is None else number(fields.group)

    def columns(self, fields: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Find the column of each feature: fixed fields first, then dense ones, then the history; else -1."""
        at = np.minimum(np.searchsorted(self.sorted, fields), len(self.sorted) - 1)
        return np.where(self.sorted[at] == fields, self.order[at], -1)


def inputs(batch: Batch, fields: int | Fields) -> Inputs:
    """Arrange a batch's features as tensors.

    Parameters
    ----------
    batch : Batch
    fields : Fields or int
        The roles of the batch's fields (`shoal.data.Reader.with_fields`). A number: every example has this many
        features, and the i-th one is that of field i.

    Returns
    -------
    Inputs
        ``values`` is None if all are 1.

    Raises
    ------
    ValueError
        The batch has no fields, an example has two features of a fixed field, or, with a number, another number
        of features.
    """
    n = len(batch)
    if isinstance(fields, int):
        lengths = np.diff(batch.indptr)
        if len(bad := np.flatnonzero(lengths != fields)):
            raise ValueError(
                f"example {bad[0]} has {lengths[bad[0]]} features, and the model {fields} fields: read "
                f"the fields (reader.with_fields()), and pass Fields in place of {fields}"
            )
        keys = batch.keys.reshape(n, fields)
        return Inputs(_keys(keys), _values(batch.values, n))
    numbers, fixed, dense = fields._numbers, len(fields.names), len(fields.dense)
    column, example = numbers.columns(_fields_of(batch)), _examples(batch)
    mine = np.flatnonzero((column >= 0) & (column < fixed))
    cells = example[mine] * fixed + column[mine]
    keys = np.tile(numbers.missing, n)
    keys[cells] = batch.keys[mine]
    _check_single(cells, n * fixed, fields)
    values = None if batch.values is None else np.ones(n * fixed, np.float32)
    if values is not None and batch.values is not None:
        values[cells] = batch.values[mine]
    events = column == fixed + dense
    return Inputs(
        _keys(keys.reshape(n, fixed)),
        _values(values, n),
        _history(batch, example, events) if fields.history is not None else None,
        _dense(batch, example, column - fixed, dense, log=fields.log) if dense else None,
        None if fields.history is None or batch.values is None else _values(batch.values[events], None),
    )


def _keys(keys: npt.NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64))


def _values(values: npt.NDArray[np.float32] | None, n: int | None) -> Tensor | None:
    """Return values as a tensor, of n rows if there is an n; None if all are 1."""
    if values is None or np.all(values == 1):
        return None
    return torch.from_numpy(np.ascontiguousarray(values if n is None else values.reshape(n, -1)))


def _history(batch: Batch, example: npt.NDArray[np.int64], mine: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    offsets = np.zeros(len(batch) + 1, np.int64)
    np.cumsum(np.bincount(example[mine], minlength=len(batch)), out=offsets[1:])
    return _keys(batch.keys[mine]), torch.from_numpy(offsets)


def _dense(
    batch: Batch, example: npt.NDArray[np.int64], column: npt.NDArray[np.int64], columns: int, *, log: bool
) -> Tensor:
    out = np.zeros((len(batch), columns), np.float32)
    mine = np.flatnonzero((column >= 0) & (column < columns))
    if batch.values is None:
        raise ValueError("dense columns are numbers, and this batch has none: name them as numeric to the reader")
    out[example[mine], column[mine]] = batch.values[mine]
    return torch.from_numpy(np.sign(out) * np.log1p(np.abs(out)) if log else out)


def _check_single(cells: npt.NDArray[np.int64], count: int, fields: Fields) -> None:
    there = np.zeros(count, np.bool_)
    there[cells] = True
    if np.count_nonzero(there) == len(cells):
        return
    cell = int(np.flatnonzero(np.bincount(cells) > 1)[0])
    example, column = divmod(cell, len(fields))
    raise ValueError(
        f"example {example} has {np.count_nonzero(cells == cell)} features of {fields.names[column]!r}, and a fixed "
        f"field has one: name it as the history, or leave it out"
    )


def _fields_of(batch: Batch) -> npt.NDArray[np.uint64]:
    if batch.fields is None:
        raise ValueError("this batch has no fields for its features: take it from reader.with_fields()")
    return batch.fields


def _examples(batch: Batch) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(batch)), np.diff(batch.indptr))


def to_json(fields: Fields) -> dict[str, Any]:
    """Return the fields as JSON; ``Fields(**result)`` makes them again."""
    return {
        "names": list(fields.names),
        "form": fields.form,
        "dense": list(fields.dense),
        "log": fields.log,
        "history": fields.history,
        "item": fields.item,
        "group": fields.group,
    }
