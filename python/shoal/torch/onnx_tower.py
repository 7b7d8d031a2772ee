"""The dense part of a click model as an ONNX graph: rows and numbers in, margins out.

    rows/embedding          float32[n, fields, dim]    --.
    values                  float32[n, fields]           |
    dense                   float32[n, d]                |    the module's forward,
    rows/embedding/seen     float32[items, dim]          |--> traced once by torch.export  --> margins/ctr float32[n]
    offsets/seen            int64[n + 1]                 |
    weights/seen            float32[items]             --'

The border is what a `Lookup` asks its tables for: the rows of the fixed fields of each table, and those of each column
of items. Pooling, attention and everything behind them is in the graph, so one rule holds for every module whose tables
are those of lookups. docs/export-format.md describes the inputs.

Invariants
    I1  The graph is traced from the module that predicts; nothing here computes what a model does.
    I2  A graph that is returned gave, on random batches, the margins of torch within `TOLERANCE`.

Threads: no state; the module is copied, its tables are not read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import Dim

from shoal.config import Feature
from shoal.models.features import Features, sides_of
from shoal.torch.inputs import Inputs, Items
from shoal.torch.model import Model, by_task
from shoal.torch.models.layers import Lookup, Source
from shoal.torch.onnx_operators import translations
from shoal.torch.sparse import SparseModule

Feed: TypeAlias = dict[str, npt.NDArray[Any]]

OPSET = 18
SOURCES = "shoal.rows"  # in the file's metadata: of each input of rows, which keys they are of
TOLERANCE = 1e-6  # of a margin m, times max(1, |m|)
_CHECKED = ((1, 0), (2, 1), (7, 3), (64, 5))  # examples of the random batches, and the most items of each


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Behind the first dimension.
    items : str or None
        The list or sequence of whose items it has one each; None: it has one of each example.
    is_offsets : bool
        Whether it has where the items of each example begin, and the number of all.
    source : dict
        Of rows: the table, and the fixed fields, or the items and the side column, whose keys' rows they are.
    """

    name: str
    shape: tuple[int, ...] = ()
    items: str | None = None
    is_offsets: bool = False
    source: dict[str, Any] | None = None

    @property
    def along(self) -> str:
        """The name of the first dimension."""
        if self.is_offsets:
            return "examples + 1"
        return "examples" if self.items is None else f"items/{self.items}"


class _Given:
    """The rows at hand by number of the table, in the order in which lookups ask for them."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Tensor]] = {}


class _Rows(nn.Module):
    """Stands for a table: returns the rows that are given, whatever the keys are."""

    def __init__(self, number: int, given: _Given) -> None:
        super().__init__()
        self.number, self.given = number, given

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rows:
        return self

    def forward(self, keys: Tensor) -> Tensor:
        """Return float32[..., dim] of keys int64[...]."""
        rows = self.given.rows[self.number]
        return rows[0] if len(rows) == 1 else torch.cat([its.flatten(0, -2) for its in rows])


class Tower(nn.Module):
    """A copy of a click model's module whose tables are inputs.

    Parameters
    ----------
    module : nn.Module
    features : Features
        What it reads.
    """

    def __init__(self, module: nn.Module, features: Features) -> None:
        super().__init__()
        self.features, self._given = features, _Given()
        self._outputs: dict[str, None] = {}
        self.draws_keys = False  # whether keys are random numbers, which must not matter
        if isinstance(module, Model) and type(module).inputs is not Model.inputs:
            raise ValueError(
                f"{type(module).__name__} has inputs() of its own, which only its code can arrange: export without onnx"
            )
        tables = [one for one in module.modules() if isinstance(one, SparseModule)]
        numbers = {id(one): number for number, one in enumerate(tables)}
        sources = [its for one in module.modules() if isinstance(one, Lookup) for its in one.sources]
        rows = [_rows_of(its, features) for its in sources]
        self._asked = [(numbers[id(its.table)], one) for its, one in zip(sources, rows, strict=True)]
        if lost := [one.table.name for number, one in enumerate(tables) if number not in dict(self._asked)]:
            raise ValueError(
                f"table {lost[0]!r} is no Lookup's, so there is no telling which of its rows are an input of the dense "
                "part: look its keys up by shoal.torch.models.Lookup, or export without onnx"
            )
        self.inputs = [*(its for _, its in self._asked), *_others(features)]
        names = [one.name for one in self.inputs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two inputs of the dense part are {twice[0]!r}: give tables and features other names")
        stand_ins: dict[int, Any] = {id(one): _Rows(number, self._given) for number, one in enumerate(tables)}
        self.module = copy.deepcopy(module, stand_ins).eval().requires_grad_(requires_grad=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, known after a call of `forward`."""
        return tuple(self._outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the margins of each task from tensors in the order of `inputs`."""
        named = {one.name: its for one, its in zip(self.inputs, tensors, strict=True)}
        self._given.rows = {}
        for number, one in self._asked:
            self._given.rows.setdefault(number, []).append(named[one.name])
        margins = by_task(self.module(self._arranged(named)), self.features)
        self._outputs.update(dict.fromkeys(margins))
        return tuple(margins.values())

    def _arranged(self, named: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs of the module, with keys of which only the shapes count."""
        features = self.features
        found = {one.name: self._items_of(one, named) for one in (*features.lists, *features.sequences)}
        n = named["values"].shape[0] if features.fixed else next(iter(found.values())).offsets.shape[0] - 1
        return Inputs(
            self._keys(n, len(features)),
            named.get("values"),
            named.get("dense"),
            {one.name: found[one.name] for one in features.lists},
            {one.name: found[one.name] for one in features.sequences},
        )

    def _items_of(self, one: Feature, named: Mapping[str, Tensor]) -> Items:
        weights = named[f"weights/{one.name}"]
        keys = self._keys(weights.shape[0])
        side = dict.fromkeys(sides_of(one), keys)
        return Items(keys, named[f"offsets/{one.name}"], weights, side, named.get(f"numeric/{one.name}"))

    def _keys(self, *shape: int) -> Tensor:
        if self.draws_keys:
            return torch.from_numpy(np.random.default_rng(0).integers(1, 1 << 62, shape))
        return torch.zeros(shape, dtype=torch.int64)


def _rows_of(source: Source, features: Features) -> Input:
    if not isinstance(source.table, SparseModule):
        raise ValueError(
            f"a Lookup has a {type(source.table).__name__} in place of a table of a store: its rows are no input of "
            "the dense part, export without onnx"
        )
    table = source.table.table
    described: dict[str, Any] = {"table": table.name}
    if source.items is None:
        described["fields"] = [features.fixed[column].name for column in source.fields]
        return Input(f"rows/{table.name}", (len(source.fields), table.dim), source=described)
    described |= {"items": source.items} | ({} if source.side is None else {"side": source.side})
    return Input("rows/" + "/".join(described.values()), (table.dim,), source.items, source=described)


def _others(features: Features) -> Iterator[Input]:
    """Yield the inputs that are no rows."""
    if features.fixed:
        yield Input("values", (len(features),))
    if features.dense_width:
        yield Input("dense", (features.dense_width,))
    for one in (*features.lists, *features.sequences):
        yield Input(f"offsets/{one.name}", (), one.name, is_offsets=True)
        yield Input(f"weights/{one.name}", (), one.name)
        if one.side_numeric:
            yield Input(f"numeric/{one.name}", (len(one.side_numeric),), one.name)


def _jagged(inputs: Sequence[Input]) -> list[str]:
    """Return the lists and sequences of inputs."""
    return list(dict.fromkeys(one.items for one in inputs if one.items is not None))


def random_feed(inputs: Sequence[Input], n: int, most: int, seed: int) -> Feed:
    """Make the inputs of ``n`` examples with up to ``most`` items of each list or sequence."""
    random = np.random.default_rng(seed)
    offsets: dict[str, npt.NDArray[np.int64]] = {}
    for one in inputs:
        if one.items is not None and one.items not in offsets:
            offsets[one.items] = np.concatenate([[0], np.cumsum(random.integers(0, most + 1, n))])
    feed: Feed = {}
    for one in inputs:
        if one.is_offsets and one.items is not None:
            feed[one.name] = offsets[one.items]
            continue
        count = n if one.items is None else int(offsets[one.items][-1])
        size = (count, *one.shape)
        its = random.uniform(0.5, 1.5, size) if one.source is None else random.normal(0, 0.1, size)
        feed[one.name] = its.astype(np.float32)
    return feed


def onnx_tower(module: nn.Module, features: Features) -> bytes:
    """Trace the dense part of a click model, and check it on random batches.

    Parameters
    ----------
    module : nn.Module
        Over tables of a store that are those of `Lookup`; it is copied, and no row is read.
    features : Features
        What it reads.

    Returns
    -------
    bytes
        A file of ONNX.

    Raises
    ------
    ImportError
        onnx, onnxscript or onnxruntime is not installed (extra: onnx).
    ValueError
        The module cannot be traced, or the graph has other margins than torch: the message says by how much.
    """
    runtime = _packages()
    tower = Tower(module, features)
    graph, outputs = _traced(tower)
    tower.draws_keys = True  # in what the graph is compared with: a module that computes with keys is found out
    session = runtime.InferenceSession(graph, _quiet(runtime), providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]
    for seed, (n, most) in enumerate(_CHECKED):
        feed = random_feed(tower.inputs, n, most, seed)
        with torch.no_grad():
            expected = tower(*(torch.from_numpy(its) for its in feed.values()))
        found = session.run(None, {name: feed[name] for name in taken})
        for name, its, own in zip(outputs, expected, found, strict=True):
            _check(f"margins/{name}", its.double().numpy(), np.asarray(own, np.float64), n)
    return graph


def _check(name: str, expected: npt.NDArray[np.float64], found: npt.NDArray[np.float64], n: int) -> None:
    """Raise ValueError if margins differ."""
    if found.shape != expected.shape:
        raise ValueError(
            f"the ONNX graph has {name} of the shape {found.shape} for {n} examples, torch {expected.shape}"
        )
    off = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    if not np.all(off <= TOLERANCE):  # also if one is NaN
        raise ValueError(
            f"the ONNX graph has other margins than torch: {name} of {n} random examples differs by {np.max(off):.3g} "
            f"times max(1, |margin|), and {TOLERANCE:g} is allowed: nothing was written"
        )


def _packages() -> Any:
    """Import what writes and checks graphs; return onnxruntime."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"an ONNX graph needs onnx, onnxscript and onnxruntime ({error}): pip install 'shoal[onnx]'"
        ) from None
    return onnxruntime


def _quiet(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors: what an optimizer leaves as it is, is no warning to the user
    return options


def _traced(tower: Tower) -> tuple[bytes, tuple[str, ...]]:
    """Return the graph of a tower, and the names of its outputs."""
    feed = random_feed(tower.inputs, 5, 4, 0)
    example = tuple(torch.from_numpy(its) for its in feed.values())
    examples = Dim("examples")
    items = {name: Dim(f"items_{number}") for number, name in enumerate(_jagged(tower.inputs))}
    sizes = tuple(
        {0: examples + 1 if one.is_offsets else examples if one.items is None else items[one.items]}
        for one in tower.inputs
    )
    try:
        with _quiet_exporter(), torch.no_grad():
            tower(*example)
            names = tower.outputs
            exported = torch.export.export(tower, example, dynamic_shapes=(sizes,), strict=False)
            program: Any = torch.onnx.export(
                exported,
                input_names=[one.name for one in tower.inputs],
                output_names=[f"margins/{name}" for name in names],
                opset_version=OPSET,
                custom_translation_table=dict(translations()),
                dynamo=True,
                verbose=False,
            )
            _tidy(program.model, tower.inputs)
            program.model.metadata_props[SOURCES] = json.dumps(
                {one.name: one.source for one in tower.inputs if one.source is not None}
            )
            file = io.BytesIO()
            program.save(file)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the dense part of {type(tower.module).__name__} cannot be traced to ONNX: export without it "
            f"({type(error).__name__}: {reason:.300})"
        ) from error
    return file.getvalue(), names


def _tidy(model: Any, inputs: Sequence[Input]) -> None:
    """Remove inputs that nothing uses, and where in the sources each node is from; name the numbers of examples."""
    graph = model.graph
    described = {one.name: one for one in inputs}
    for one in graph.inputs:
        one.shape[0] = described[one.name].along
    for one in graph.outputs:
        one.shape[0] = "examples"
    for one in [one for one in graph.inputs if not one.uses()]:
        graph.inputs.remove(one)
    for node in graph.all_nodes():
        for its in (node, *node.outputs):
            its.metadata_props.clear()
        for one in node.outputs:
            if not one.is_graph_output():
                one.shape = None  # in other words for the same numbers: what runs the graph infers it
        node.doc_string = None
    for its in (*graph.inputs, *graph.initializers.values(), graph, model):
        its.metadata_props.clear()


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Leave out the warnings of the exporter, which are about its own code."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "torch.onnx")]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
