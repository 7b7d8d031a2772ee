"""Features: the description of what a click model reads of an example, written once, in TOML and in Python alike.

    category, bucket, cross, embedded number    one key of each example     the fixed fields of `Inputs.keys`
    list, cross with a list                     any number of keys          `Inputs.lists`
    sequence                                    any number, in order        `Inputs.sequences`
    number, vector                              numbers                     `Inputs.dense`
    labels                                      of several tasks            `Inputs.labels`

`shoal.config.Feature` has the settings of each. arrangement.py arranges the features of a batch by a description.

Threads: descriptions are immutable.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.base.scalars import whole
from shoal.base.settings import read as read_settings
from shoal.base.suggest import nearest
from shoal.config import Feature, Task
from shoal.data import Batch, hash_strings
from shoal.data.hashing import MISSING_TEXT, number_of_text
from shoal.data.interactions import combined_key
from shoal.data.key_names import key_of_name
from shoal.data.readers import field_number

Described: TypeAlias = Feature | Mapping[str, Any] | str

_MOST_NUMBERED = 1 << 16  # far more than a model has
_JAGGED = ("list", "sequence")
_ONLY = {  # the types that a setting is for
    "pooling": ("list", "sequence", "cross"),
    "weights": ("list", "sequence"),
    "side": ("sequence",),
    "side_numeric": ("sequence",),
    "max_len": ("list", "sequence"),
    "log": ("number", "vector"),
    "embed": ("number",),
    "edges": ("bucket",),
    "quantiles": ("bucket",),
    "of": ("cross",),
    "size": ("vector",),
    "share": ("category", "list", "sequence"),
    "dim": ("category", "list", "sequence", "bucket", "cross", "number"),
}


class Features:
    """The features of a click model, their labels, and the columns that they are in.

    Parameters
    ----------
    features : sequence of Feature, mapping or str
        In the order in which models have them. A mapping has the settings of a `Feature`, a text is the name of a
        category.
    form : str
        Name of the reader's format. Columns are those of csv, parquet and arrow, namespaces of vw, numbers of libffm,
        I1 to C26 of criteo.
    group : str or None
        The column whose key is the group of an example (GAUC); it may also have another role, or none.
    labels : mapping of str to Task, mapping or str
        Labels of several tasks by name: a column, or the settings of a `Task`. The first is the label of the batch
        itself, the others are columns that the reader has as numbers. Default: one label, that of the batch.

    Raises
    ------
    TypeError, ValueError
        A name is there twice, a setting does not fit a type, or a name is unknown to the format: the message names it.

    Notes
    -----
    The default type is "category". Two features may have one column: a number and its buckets.

    **Keys.** Each fixed field of an example has exactly one key. A missing cell has the key of the text NUL "missing"
    in its column, so that a model learns a row for it. An interval of a bucket has the key of its number as text, a
    cross that of `shoal.read_csv`'s interactions.

    Examples
    --------
    >>> features = Features(["user", {"name": "price", "type": "number"}, {"name": "tags", "type": "list"}])
    >>> features.columns
    {'categorical': ['user'], 'numeric': ['price'], 'lists': {'tags': 'tags'}, 'vectors': [], 'labels': []}
    """

    def __init__(
        self,
        features: Iterable[Described],
        *,
        form: str = "csv",
        group: str | None = None,
        labels: Mapping[str, Task | Mapping[str, Any] | str] | None = None,
    ) -> None:
        if isinstance(features, str) or not isinstance(features, Iterable):
            raise TypeError(f"features is {features!r}: pass a list of features")
        self.all = tuple(_feature(one) for one in features)
        self.form = form
        self.group = group
        if labels is not None and not isinstance(labels, Mapping):
            raise TypeError(f"labels is {labels!r:.80}: pass a mapping of names, {{'click': 'click'}}")
        self.labels = {name: _task(name, one) for name, one in (labels or {}).items()}
        self._of = {one.name: one for one in self.all}
        names = [one.name for one in self.all]
        if not names:
            raise ValueError("features is empty: a model needs one feature or more")
        for name, times in Counter(names).items():
            if times > 1:
                raise ValueError(f"feature {name!r} is there twice: give each a name of its own, and say its column")
        for one in self.all:
            self._check(one)
        for name, task in self.labels.items():
            if task.mask is not None and task.mask not in self.labels:
                raise ValueError(f"the mask of label {name!r} is {task.mask!r}, none of the labels {list(self.labels)}")
        self.fixed = tuple(one for one in self.all if not self._is_jagged(one) and not _is_dense(one))
        self.lists = tuple(one for one in self.all if self._is_jagged(one) and one.type != "sequence")
        self.sequences = tuple(one for one in self.all if one.type == "sequence")
        self.dense = tuple(one for one in self.all if _is_dense(one))
        _ = self.group_number, self.missing, self.places  # raise for names that the format does not know

    @classmethod
    def numbered(cls, fields: int) -> Features:
        """Return features of ``fields`` categories, whose columns are 0, 1, ... of libffm."""
        fields = whole("features", fields, 1, "features, or how many categories there are")
        if fields > _MOST_NUMBERED:
            raise ValueError(f"features is {fields}: pass at most {_MOST_NUMBERED}")
        return cls([{"name": str(number)} for number in range(fields)], form="libffm")

    def _check(self, one: Feature) -> None:
        where = f"feature {one.name!r} of type {one.type}"
        usual = Feature(name=one.name)
        for setting, types in _ONLY.items():
            if getattr(one, setting) != getattr(usual, setting) and one.type not in types:
                raise ValueError(f"{where} has {setting}, which is for {', '.join(types)}: leave it out")
        if one.type == "cross":
            if len(one.of) < 2:
                raise ValueError(f"{where} is of {list(one.of)}: name two features or more")
            for name in one.of:
                if (source := self._named(name, where)).type in ("cross", "number", "vector"):
                    raise ValueError(f"{where} is of {name!r}, a {source.type}: name categories, buckets or lists")
        elif one.type == "bucket":
            if bool(one.edges) == bool(one.quantiles):
                raise ValueError(f"{where} needs edges, or a number of quantiles")
            if list(one.edges) != sorted(set(one.edges)):
                raise ValueError(f"{where} has the edges {list(one.edges)}: they must ascend")
        elif one.type == "vector" and one.size is None:
            raise ValueError(f"{where} has no size: the numbers in each of its cells")
        if one.share is not None:
            other = self._named(one.share, where)
            if other.type not in ("category", "list", "sequence") or other.share is not None:
                raise ValueError(f"{where} shares the rows of {one.share!r}, which has none of its own")
            if one.dim is not None and one.dim != other.dim:
                raise ValueError(f"{where} has dim {one.dim}, and the rows of {one.share!r} another: leave it out")
        for name in sides_of(one).values():
            if name in self._of and self._of[name].type not in ("category", "list", "sequence"):
                raise ValueError(f"{where} has a side that shares the rows of {name!r}, a {self._of[name].type}")

    def _named(self, name: str, where: str) -> Feature:
        if name not in self._of:
            near = nearest(name, list(self._of))
            hint = "" if near is None else f": did you mean {near!r}?"
            raise ValueError(f"{where} names {name!r}, none of the features {', '.join(self._of)}{hint}")
        return self._of[name]

    def _is_jagged(self, one: Feature) -> bool:
        if one.type == "cross":
            return any(self._of[name].type in _JAGGED for name in one.of)
        return one.type in _JAGGED

    # ---- what models need ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of fixed fields, those of `Inputs.keys`."""
        return len(self.fixed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(tuple(self._of))

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{one.name}: {one.type}' for one in self.all)})"

    def __getitem__(self, name: str) -> Feature:
        """Return a feature by its name."""
        return self._of[name]

    @property
    def dense_width(self) -> int:
        """Numbers of each example that are inputs of the dense part."""
        return sum(one.size or 1 for one in self.dense)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels; empty: one label, without a name."""
        return tuple(self.labels)

    def index_of(self, name: str) -> int:
        """Return the place of a feature among the fixed fields, from 0."""
        names = [one.name for one in self.fixed]
        if name not in names:
            raise ValueError(f"{name!r} is none of the fields with one key: {', '.join(names)}")
        return names.index(name)

    # ---- what readers need ---------------------------------------------------------------------------------------

    @functools.cached_property
    def columns(self) -> dict[str, Any]:
        """The columns as arguments of `shoal.read_csv`: categorical, numeric, lists, vectors and labels."""
        categorical: dict[str, None] = {}
        numeric: dict[str, None] = {}
        vectors: dict[str, None] = {}
        lists: dict[str, str] = {}
        for one in self.all:
            column = column_of(one)
            if one.type == "category":
                categorical[column] = None
            elif one.type in ("number", "bucket"):
                numeric[column] = None
            elif one.type == "vector":
                vectors[column] = None
            elif one.type in _JAGGED:
                lists[column] = self.hashed(one)
                lists |= {side: self.hashed_as(share) for side, share in sides_of(one).items()}
                vectors |= dict.fromkeys([*one.side_numeric, *([] if one.weights is None else [one.weights])])
        if self.group is not None and not {self.group} & {*categorical, *numeric, *lists}:
            categorical[self.group] = None
        labels = dict.fromkeys(task.column for task in list(self.labels.values())[1:])
        kinds: dict[str, set[str]] = {
            "categorical": {*categorical},
            "numeric": {*numeric},
            "lists": {*lists},
            "vectors": {*vectors},
            "labels": {*labels},
        }
        for first, second in itertools.combinations(kinds, 2):
            if both := kinds[first] & kinds[second]:
                raise ValueError(f"column {min(both)!r} is read as {first} and as {second}: a column is one of them")
        return {
            "categorical": list(categorical),
            "numeric": list(numeric),
            "lists": lists,
            "vectors": list(vectors),
            "labels": list(labels),
        }

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The columns that are read, in the order of their first feature, with their places."""
        columns: dict[str, int] = {}
        for one in self.all:
            if one.type != "cross":
                for column in (column_of(one), one.weights, *sides_of(one), *one.side_numeric):
                    if column is not None:
                        columns.setdefault(column, len(columns))
        for task in list(self.labels.values())[1:]:
            columns.setdefault(task.column, len(columns))
        if len({self.number(column) for column in columns}) < len(columns):
            raise ValueError(f"two of the columns {list(columns)} are the same field")
        return columns

    def hashed(self, one: Feature) -> str:
        """Return the column in which a feature's texts are hashed."""
        return column_of(one) if one.share is None else self.hashed_as(one.share)

    def hashed_as(self, name: str) -> str:
        """Return the column of the feature of this name, or else the column."""
        return column_of(self._of[name]) if name in self._of else name

    def number(self, column: str) -> int:
        """Return the number of a column's field, as in `shoal.Batch.fields`."""
        return field_number(self.form, column)

    @functools.cached_property
    def missing(self) -> npt.NDArray[np.uint64]:
        """The key of each fixed field that stands for a missing value: that of the text NUL "missing" there."""
        fields = [
            int(hash_strings(["/".join(one.of)])[0]) if one.type == "cross" else self.number(self.hashed(one))
            for one in self.fixed
        ]
        return np.array([hash_strings([MISSING_TEXT], field)[0] for field in fields], np.uint64)

    @functools.cached_property
    def group_number(self) -> int:
        """The number of the group's field; -1 without a group."""
        return -1 if self.group is None else self.number(self.group)

    def check_columns(self, schema: Mapping[str, Any]) -> None:
        """Check that a reader by named columns has those of the features; see `shoal.data.Reader.schema`.

        Raises
        ------
        ValueError
            The reader does not read a column, or in another role. The message names the nearest one and the remedy.
        """
        if "categorical" not in schema:  # all columns, or a format without columns: checked on the data
            return
        there: dict[str, list[str]] = {kind: list(schema.get(kind, ())) for kind in self.columns}
        everything = [name for names in there.values() for name in names]
        if self.group is not None and self.group not in everything:
            raise ValueError(_unknown("group", self.group, "columns that are read", everything))
        for kind, names in self.columns.items():
            for name in names if kind != "labels" else ():
                if name in there[kind] or name == self.group:
                    continue
                if name in everything:
                    other = next(one for one, some in there.items() if name in some)
                    raise ValueError(f"column {name!r} is read as {other}, and its feature needs {kind}: read it so")
                raise ValueError(_unknown("features", name, f"{kind} columns that are read", everything))
        for name, shared in self.columns["lists"].items():
            if schema["lists"][name] != shared:
                raise ValueError(
                    f"list {name!r} is read with the keys of {schema['lists'][name]!r}, and its feature shares the "
                    f"rows of {shared!r}: read it with lists={{{name!r}: {shared!r}}}"
                )

    def check_labels(self, schema: Mapping[str, Any]) -> None:
        """Check that a reader by named columns has the labels of all tasks, which data to predict lacks."""
        for name, task in list(self.labels.items())[1:]:
            column = task.column
            if "categorical" in schema and column not in (*schema.get("labels", ()), *schema.get("numeric", ())):
                raise ValueError(
                    f"the reader has no column {column!r}, the labels of {name!r}: pass labels=[{column!r}]"
                )

    # ---- keys and names ------------------------------------------------------------------------------------------

    def key_of(self, name: str) -> int:
        """Return the key of NAME=TEXT, the text of a feature or a column; without a text the key of a missing value.

        Of a bucket the text is a number. The key of a cross is that of FIRST=TEXT * SECOND=TEXT, and a number is a key.
        """
        if name.isdecimal():
            return int(name)
        if " * " in name:
            return functools.reduce(combined_key, map(self.key_of, name.split(" * ")))
        called, _, text = name.partition("=")
        one = self._of.get(called) or next((one for one in self.all if column_of(one) == called), None)
        column = self._column_hashed(called) if one is None else self.hashed(one)
        if one is not None and one.type == "cross":
            raise ValueError(f"{called!r} is a cross: write {' * '.join(f'{part}=...' for part in one.of)}")
        if one is not None and one.type == "number" and one.embed:
            return key_of_name(self.form, column)
        if one is not None and _is_dense(one):
            raise ValueError(f"{called!r} is a {one.type}, which has no rows")
        if not text:
            return int(hash_strings([MISSING_TEXT], self.number(column))[0])
        if one is not None and one.type == "bucket":
            place = np.searchsorted(np.array(one.edges), number_of_text(text), side="right")
            return int(hash_strings([str(place)], self.number(column))[0])
        return key_of_name(self.form, f"{column}={text}")

    def _column_hashed(self, column: str) -> str:
        """Return the column as which a side column is hashed."""
        for one in self.all:
            if column in (sides := sides_of(one)):
                return self.hashed_as(sides[column])
        raise ValueError(_unknown("the name", column, "features", list(self._of)))

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """The names of keys that are no text of the data: of missing values, and of the intervals of buckets."""
        found: dict[int, str] = {}
        for one in self.all:
            if one.type == "cross" or _is_dense(one):
                continue
            number = self.number(self.hashed(one))
            if one.type == "bucket":
                at = [f"{edge:g}" for edge in one.edges]
                between = [f"{one.name} in [{low}, {high})" for low, high in itertools.pairwise(at)]
                texts = [f"{one.name} < {at[0]}", *between, f"{one.name} >= {at[-1]}"] if at else []
                keys = hash_strings([str(i) for i in range(len(texts))], number)
                found |= dict(zip(keys.tolist(), texts, strict=True))
            found.setdefault(int(hash_strings([MISSING_TEXT], number)[0]), f"{self.hashed(one)} missing")
        return found

    # ---- groups --------------------------------------------------------------------------------------------------

    def has_groups(self, groups: npt.NDArray[np.uint64]) -> bool:
        """Return whether any example has the field ``group``; ``groups`` as from `groups`."""
        return self.group is None or bool(np.any(groups != hash_strings([MISSING_TEXT], self.group_number)[0]))

    def groups(self, batch: Batch) -> npt.NDArray[np.uint64]:
        """Return the key of each example in the field ``group``; examples without one share a key.

        Raises
        ------
        ValueError
            There is no such field here, the batch has no fields, or an example has more than one.
        """
        if self.group is None:
            raise ValueError("no field is the group: pass group=")
        mine = np.flatnonzero(fields_of(batch) == np.uint64(self.group_number))
        example = examples_of(batch)[mine]
        out = np.full(len(batch), hash_strings([MISSING_TEXT], self.group_number)[0])
        out[example] = batch.keys[mine]
        if len(mine) > len(np.unique(example)):
            raise ValueError(f"an example has more than one feature of {self.group!r}, which is its group")
        return out

    # ---- buckets by quantiles ------------------------------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """Whether intervals of buckets are still to be found in data."""
        return any(one.type == "bucket" and not one.edges for one in self.all)

    def fitted(self, batches: Iterable[Batch], examples: int = 100_000) -> Features:
        """Return the features with the intervals of buckets found in the first examples.

        Parameters
        ----------
        batches : iterable of Batch
            With fields, such as a reader's `shoal.data.Reader.with_fields`.
        examples : int
            How many of the first are looked at.

        Returns
        -------
        Features
            Itself, if all buckets have edges.

        Raises
        ------
        ValueError
            There is no number in one of the columns.
        """
        wanted = [one for one in self.all if one.type == "bucket" and not one.edges]
        if not wanted:
            return self
        seen: dict[str, list[npt.NDArray[np.float32]]] = {one.name: [] for one in wanted}
        count = 0
        for batch in batches:
            for one in wanted:
                mine = fields_of(batch) == np.uint64(self.number(column_of(one)))
                seen[one.name].append(np.ones(0, np.float32) if batch.values is None else batch.values[mine])
            count += len(batch)
            if count >= examples:
                break
        edges: dict[str, tuple[float, ...]] = {}
        for one in wanted:
            numbers = np.concatenate(seen[one.name] or [np.empty(0, np.float32)])
            if not len(numbers):
                raise ValueError(f"bucket {one.name!r}: the first {count:,} examples have no number in its column")
            places = np.arange(1, one.quantiles or 1) / (one.quantiles or 1)
            found = np.unique(np.quantile(numbers, places, method="inverted_cdf"))
            edges[one.name] = tuple(float(edge) for edge in found if edge > numbers.min()) or (float(numbers.max()),)
        made = [
            msgspec.structs.replace(one, edges=edges[one.name], quantiles=None) if one.name in edges else one
            for one in self.all
        ]
        return Features(made, form=self.form, group=self.group, labels=self.labels)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON; `from_json` makes it again."""
        return {
            "features": [_as_json(one, Feature(name=one.name)) for one in self.all],
            "form": self.form,
            "group": self.group,
            "labels": {name: _as_json(task, Task(column="")) for name, task in self.labels.items()},
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Features:
        """Make the features that `to_json` described."""
        return cls(described["features"], form=described["form"], group=described["group"], labels=described["labels"])


def _feature(given: Described) -> Feature:
    if isinstance(given, Feature):
        return given
    if isinstance(given, str):
        return Feature(name=given)
    if not isinstance(given, Mapping):
        raise TypeError(f"{given!r:.80} is no feature: pass a name, or a mapping with name, type and its settings")
    name = given.get("name")
    return read_settings(Feature, given, "[[features]]" if name is None else f"[[features]] {name}")


def _task(name: str, given: Task | Mapping[str, Any] | str) -> Task:
    if isinstance(given, Task):
        return given
    if not isinstance(given, str | Mapping):
        raise TypeError(f"label {name!r} is {given!r:.80}: pass the name of its column, or a Task")
    return Task(column=given) if isinstance(given, str) else read_settings(Task, given, f"label {name!r}")


def _as_json(one: Feature | Task, usual: Feature | Task) -> dict[str, Any]:
    names = one.__struct_fields__
    kept = [name for name in names if name in ("name", "column") or getattr(one, name) != getattr(usual, name)]
    values = {name: getattr(one, name) for name in kept if getattr(one, name) is not None}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _is_dense(one: Feature) -> bool:
    return one.type == "vector" or (one.type == "number" and not one.embed)


def column_of(one: Feature) -> str:
    """Return the column of a feature."""
    return one.name if one.column is None else one.column


def sides_of(one: Feature) -> dict[str, str]:
    """Return the side columns of texts, and of each the feature or column whose rows it has."""
    return dict(one.side) if isinstance(one.side, dict) else {name: name for name in one.side}


def fields_of(batch: Batch) -> npt.NDArray[np.uint64]:
    """Return the fields of a batch's features."""
    if batch.fields is None:
        raise ValueError("this batch has no fields for its features: take it from reader.with_fields()")
    return batch.fields


def examples_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the example of each feature."""
    return np.repeat(np.arange(len(batch)), np.diff(batch.indptr))


def _unknown(role: str, name: str, what: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    hint = "." if near is None else f": did you mean {near!r}?"
    return f"{role} has {name!r}, none of the {what}{hint} There are {', '.join(map(repr, known)) or 'none'}"
