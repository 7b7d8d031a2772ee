"""EmbeddingBagCollection and EmbeddingCollection: TorchRec's, over tables of a store.

    KeyedJaggedTensor --features of a table, one after the other--> one lookup a table, all begun together
    one output for each feature of each table <--cut-- rows, pooled or not; backward: one push a table

TorchRec is not needed: whatever has the methods of its tensors and the attributes of its configurations will do, and
plain mappings in their place. A table of several features is one table: their keys share rows.

Threads: as `shoal.torch.sparse`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shoal.optim import Adam
from shoal.table.table import Table
from shoal.torch.bag import EmbeddingBag
from shoal.torch.embedding import Embedding
from shoal.torch.models.layers import Maker
from shoal.torch.sparse import SparseModule

_ROWS = 1 << 16  # read or written in one call
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MOMENTS: dict[str, tuple[str, ...]] = {
    "m": ("exp_avg", "momentum1", "momentum_1"),
    "v": ("exp_avg_sq", "momentum2", "momentum_2"),
}
# The columns of an optimizer beside the weights, with the names that torch, FBGEMM and TorchRec have for them.
_STATES: dict[str, dict[str, tuple[str, ...]]] = {
    "SGD": {},
    "Momentum": {"v": ("momentum_buffer", "momentum1", "momentum_1")},
    "Adagrad": {"n": ("sum", "momentum1", "momentum_1")},
    "RowWiseAdagrad": {"m": ("sum", "momentum1", "momentum_1")},
    "Adam": _MOMENTS,
    "AdamW": _MOMENTS,
}


class Jagged(NamedTuple):
    """The keys of a feature: example i has those from offsets[i] to offsets[i + 1]."""

    keys: Tensor
    offsets: Tensor
    weights: Tensor | None = None


Features: TypeAlias = Mapping[str, Sequence[Any]] | Any
_Started: TypeAlias = list[tuple[Any, Any]]  # a module, and what its begin returned


class _Given(NamedTuple):
    """What a forward was given."""

    features: dict[str, Jagged]
    torchrec: Any  # its module of tensors, if these are of TorchRec


class _Table(NamedTuple):
    """A table's configuration."""

    name: str
    dim: int
    features: list[str]
    pooling: str
    rows: int | None

    @classmethod
    def of(cls, given: Any) -> _Table:
        def read(name: str) -> Any:
            return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)

        name, dim = read("name"), read("embedding_dim")
        if not name or dim is None:
            raise ValueError(f"a table has a name and an embedding_dim, got {given!r}")
        pooling = read("pooling") or "sum"
        return cls(
            str(name),
            int(dim),
            list(read("feature_names") or [name]),
            str(getattr(pooling, "value", pooling)).lower(),
            read("num_embeddings"),
        )


def _jagged(features: Features) -> _Given:
    if isinstance(features, Mapping):
        return _Given({name: _checked(name, Jagged(*one)) for name, one in features.items()}, None)
    repeats = getattr(features, "inverse_indices_or_none", None)
    if repeats is not None and repeats() is not None:
        raise ValueError("inverse_indices are not supported: pass a KeyedJaggedTensor of one batch size")
    keys, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
    found: dict[str, Jagged] = {}
    first = 0
    for name, stride in zip(features.keys(), features.stride_per_key(), strict=True):
        ends = offsets[first : first + stride + 1]
        first += stride
        begin, end = (int(ends[0]), int(ends[-1])) if len(ends) else (0, 0)
        of_feature = slice(begin, end)
        found[name] = Jagged(keys[of_feature], ends - begin, None if weights is None else weights[of_feature])
    if not type(features).__module__.startswith("torchrec."):
        return _Given(found, None)
    from torchrec.sparse import jagged_tensor

    return _Given(found, jagged_tensor)


def _checked(name: str, one: Jagged) -> Jagged:
    if torch.compiler.is_compiling():  # no values are known yet
        return one
    if one.offsets.dim() != 1 or not len(one.offsets) or one.offsets[0] != 0 or one.offsets[-1] != len(one.keys):
        raise ValueError(
            f"the offsets of feature {name!r} must go from 0 to its number of keys, {len(one.keys):,}: those of n "
            "examples are n + 1"
        )
    return one


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Collection(nn.Module):
    """What both collections are: tables, their features, and the names of their outputs."""

    _PREFIX: str  # of tables in a state_dict of TorchRec

    def __init__(self, tables: Iterable[Any], modules: Callable[[_Table], SparseModule]) -> None:
        super().__init__()
        self._tables = [_Table.of(one) for one in tables]
        if not self._tables:
            raise ValueError("a collection has one table or more, got none")
        names = Counter(table.name for table in self._tables)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"tables have names of their own, {twice[0]!r} is that of two")
        used = Counter(feature for table in self._tables for feature in table.features)
        # As in TorchRec: a feature of several tables has an output for each.
        self.names = [
            f"{feature}@{table.name}" if used[feature] > 1 else feature
            for table in self._tables
            for feature in table.features
        ]
        self._modules_by_table = {table.name: modules(table) for table in self._tables}

    def forward(self, features: Features) -> Any:
        """Read the rows of all features.

        Parameters
        ----------
        features : KeyedJaggedTensor, or mapping of str to (keys, offsets) or (keys, offsets, weights)
            The keys of each feature: int64[nnz], or int32; offsets int64[n + 1]; weights float32[nnz]. Features that no
            table has are ignored.

        Returns
        -------
        KeyedTensor and mapping of str to JaggedTensor, or mappings of tensors
            What TorchRec returns for its KeyedJaggedTensor; otherwise by name float32[n, dim] of
            `EmbeddingBagCollection`, and (float32[nnz, dim], offsets) of `EmbeddingCollection`. A feature of several
            tables is named ``feature@table``.

        Raises
        ------
        ValueError, TypeError
            A feature is missing, or its tensors are inconsistent.
        WrongProcessError
            The store was made before a fork, by the parent.
        ShoalError
            A pull failed, or an earlier push did.

        Notes
        -----
        Blocks until the rows have arrived.
        """
        if torch.compiler.is_compiling():  # the compiler sees only tensors: each module makes its own request
            given = _jagged(features)
            return self._outputs([module(*arguments) for module, arguments in self._requests(given)], given)
        return self.finish(*self.begin(features))

    def begin(self, features: Features) -> tuple[_Started, _Given]:
        """Begin the pulls of all tables: the first half of forward, for `pull_together`."""
        given = _jagged(features)
        return [(module, module.begin(*arguments)) for module, arguments in self._requests(given)], given

    def finish(self, started: _Started, given: _Given) -> Any:
        """Wait for the rows, and return those of each feature: the second half of forward."""
        return self._outputs([module.finish(*one) for module, one in started], given)

    def _requests(self, given: _Given) -> list[tuple[Any, tuple[Any, ...]]]:
        """Return the module of each table, with the arguments of its call."""
        requests: list[tuple[Any, tuple[Any, ...]]] = []
        for table in self._tables:
            if missing := [name for name in table.features if name not in given.features]:
                raise ValueError(
                    f"table {table.name!r} needs feature {missing[0]!r}, got {', '.join(given.features) or 'none'}"
                )
            of_table = [given.features[name] for name in table.features]
            keys = _joined([one.keys for one in of_table])
            if keys.dtype == torch.int32:
                keys = keys.long()
            requests.append((self._modules_by_table[table.name], (keys, *self._more_of(table, of_table))))
        return requests

    def _more_of(self, table: _Table, of_table: list[Jagged]) -> tuple[Any, ...]:
        """Return the arguments of a table's module beside the keys."""
        raise NotImplementedError

    def _outputs(self, rows_of_tables: list[Tensor], given: _Given) -> Any:
        """Return the outputs of each feature, from those of the modules."""
        raise NotImplementedError

    def _tables_with_weights(self, weights: Mapping[str, Any], prefix: str) -> list[tuple[_Table, Table, Tensor]]:
        found = []
        for table in self._tables:
            name = f"{prefix}{self._PREFIX}.{table.name}.weight"
            if name not in weights:
                raise ValueError(f"there is no {name!r} among the weights: they have {', '.join(weights) or 'none'}")
            rows = _whole(name, weights[name])
            if rows.dim() != 2 or rows.shape[1] != table.dim:
                raise ValueError(f"{name} must be [rows, {table.dim}], got {list(rows.shape)}")
            found.append((table, self._modules_by_table[table.name].table, rows))
        return found

    def load_torchrec(
        self,
        weights: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        prefix: str = "",
    ) -> None:
        """Set the rows of all tables to those of a TorchRec model: row i becomes that of key i.

        Parameters
        ----------
        weights : mapping of str to tensor
            The ``state_dict`` of TorchRec's collection, or of a model that has one.
        optimizer : mapping, optional
            The ``state_dict`` of its optimizer, by the names of its parameters, as TorchRec's fused and keyed
            optimizers make it: the state of each table's `Momentum`, `Adagrad`, `RowWiseAdagrad`, `Adam` or `AdamW`
            is set too. Tables of a local store only, and without rows.
        step : int, optional
            Steps so far, for Adam's bias corrections, if the optimizer's state has none.
        prefix : str
            What stands before the collection's names in ``weights``, such as "model.ebc.".

        Raises
        ------
        ValueError
            A table or its state is missing or has another shape; its optimizer has no counterpart; rows with state are
            to be set on servers (load them in a local store, save it, and load the checkpoint there) or in a table
            that has rows.
        TypeError
            A weight is neither a tensor nor a distributed one.

        Examples
        --------
        >>> import torch
        >>> store = shoal.local()
        >>> tables = [{"name": "ad", "embedding_dim": 2, "feature_names": ["ad", "seen"]}]
        >>> bags = shoal.torch.EmbeddingBagCollection(tables, shoal.torch.tables(store, shoal.Adagrad(lr=0.1)))
        >>> bags.load_torchrec(
        ...     {"embedding_bags.ad.weight": torch.eye(2)},
        ...     {"state": {"embedding_bags.ad.weight": {"ad.momentum1": torch.ones(2, 2)}}},
        ... )
        >>> store.tables["ad"].state(np.array([1], np.uint64))
        {'w': array([[0., 1.]], dtype=float32), 'n': array([[1., 1.]], dtype=float32)}
        """
        found = self._tables_with_weights(weights, prefix)
        if optimizer is None:
            for _, table, rows in found:
                for keys, begin, end in _pieces(len(rows)):
                    table.assign(keys, rows[begin:end].numpy())
            return
        states = [_state_of(config, table, rows, optimizer, step) for config, table, rows in found]
        for _, table, _ in found:
            if len(table):
                raise ValueError(f"table {table.name!r} has rows: their state is set in an empty one")
        for (_, table, _), (columns, steps) in zip(found, states, strict=True):
            for keys, begin, end in _pieces(len(columns["w"])):
                table.restore(keys, {name: column[begin:end].numpy() for name, column in columns.items()}, step=steps)

    def to_torchrec(self, num_embeddings: int | Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Return the rows of all tables as the ``state_dict`` of TorchRec's collection: row i is that of key i.

        Parameters
        ----------
        num_embeddings : int or mapping of str to int, optional
            Number of rows, or that of each table. Default: those of the configurations.

        Returns
        -------
        mapping of str to float32[rows, dim]

        Raises
        ------
        ValueError
            The number of a table's rows is not known, or the table has a row of a key that is not below it.
        """
        weights = {}
        for config in self._tables:
            table = self._modules_by_table[config.name].table
            count = num_embeddings.get(config.name) if isinstance(num_embeddings, Mapping) else num_embeddings
            count = config.rows if count is None else count
            if count is None:
                raise ValueError(f"table {config.name!r} has no num_embeddings: pass the number of its rows")
            rows, known = torch.empty(count, config.dim), 0
            for keys, begin, end in _pieces(count):
                table.pull(keys, out=rows[begin:end].numpy())
                known += int(table.contains(keys).sum())
            if known < len(table):
                raise ValueError(
                    f"table {config.name!r} has {len(table) - known:,} rows of keys that are not below {count:,}: a "
                    "matrix has no place for them"
                )
            weights[f"{self._PREFIX}.{config.name}.weight"] = rows
        return weights


class EmbeddingBagCollection(_Collection):
    """Pooled rows of several tables by feature; the counterpart of TorchRec's ``EmbeddingBagCollection``.

    Parameters
    ----------
    tables : list of EmbeddingBagConfig, or of mappings
        ``name``, ``embedding_dim``, ``feature_names`` (default: the name) and ``pooling``: SUM (the default) or MEAN,
        in mappings also the other modes of `EmbeddingBag`. ``num_embeddings`` is no limit: all keys are valid.
    make : callable
        Makes a table, such as `shoal.torch.tables` returns: ``make(name, dim)``. Its settings are those of the rows:
        ``data_type`` and ``init_fn`` of a configuration are not used.
    is_weighted : bool
        Whether to weigh the keys by the features' weights. As with FBGEMM, MEAN then divides by the number of keys.

    Notes
    -----
    A step makes one pull and one push of each table, and the pulls of all tables are begun together. The gradients of
    all features of a table are added before its optimizer steps.

    Examples
    --------
    >>> import torch
    >>> store = shoal.local()
    >>> bags = EmbeddingBagCollection(
    ...     [{"name": "ad", "embedding_dim": 4, "feature_names": ["ad", "seen"], "pooling": "mean"}],
    ...     shoal.torch.tables(store),
    ... )
    >>> out = bags({"ad": (torch.tensor([7, 3]), torch.tensor([0, 1, 2])),
    ...             "seen": (torch.tensor([3, 7, 9]), torch.tensor([0, 3, 3]))})
    >>> {name: tuple(pooled.shape) for name, pooled in out.items()}
    {'ad': (2, 4), 'seen': (2, 4)}
    """

    _PREFIX = "embedding_bags"

    def __init__(self, tables: Iterable[Any], make: Maker, *, is_weighted: bool = False) -> None:
        self.is_weighted = is_weighted

        def bag(table: _Table) -> SparseModule:
            mode: Any = "sum" if is_weighted and table.pooling == "mean" else table.pooling
            return EmbeddingBag(_table_of(make, table), mode, include_last_offset=True)

        super().__init__(tables, bag)
        self.embedding_bags = nn.ModuleDict(self._modules_by_table)

    def _more_of(self, table: _Table, of_table: list[Jagged]) -> tuple[Any, ...]:
        offsets: list[Tensor] = []
        before = 0
        for one in of_table:
            ends = one.offsets + before if before else one.offsets
            offsets.append(ends[1:] if offsets else ends)
            before += len(one.keys)
        weights = None
        if self.is_weighted:
            if any(one.weights is None for one in of_table):
                raise ValueError(f"the features of table {table.name!r} have no weights: is_weighted needs them")
            weights = _joined([one.weights for one in of_table if one.weights is not None])
        return _joined(offsets), weights

    def _outputs(self, rows_of_tables: list[Tensor], given: _Given) -> Any:
        pieces: list[Tensor] = []
        for table, rows in zip(self._tables, rows_of_tables, strict=True):
            of_table = [given.features[name] for name in table.features]
            pooled: Sequence[Tensor] = torch.split(rows, [len(features.offsets) - 1 for features in of_table])
            if self.is_weighted and table.pooling == "mean":
                counts = [features.offsets.diff().clamp(min=1) for features in of_table]
                pooled = [sums / of_bag[:, None] for sums, of_bag in zip(pooled, counts, strict=True)]
            pieces += pooled
        if given.torchrec is None:
            return dict(zip(self.names, pieces, strict=True))
        dims = [table.dim for table in self._tables for _ in table.features]
        return given.torchrec.KeyedTensor(keys=self.names, length_per_key=dims, values=torch.cat(pieces, dim=1))


class EmbeddingCollection(_Collection):
    """Rows of several tables by feature, one for each key; the counterpart of TorchRec's ``EmbeddingCollection``.

    Parameters
    ----------
    tables : list of EmbeddingConfig, or of mappings
        As of `EmbeddingBagCollection`, without a pooling.
    make : callable
        As of `EmbeddingBagCollection`.

    Examples
    --------
    >>> import torch
    >>> store = shoal.local()
    >>> rows = EmbeddingCollection([{"name": "ad", "embedding_dim": 4}], shoal.torch.tables(store))
    >>> rows({"ad": (torch.tensor([7, 3]), torch.tensor([0, 2, 2]))})["ad"][0].shape
    torch.Size([2, 4])
    """

    _PREFIX = "embeddings"

    def __init__(self, tables: Iterable[Any], make: Maker) -> None:
        super().__init__(tables, lambda table: Embedding(_table_of(make, table)))
        self.embeddings = nn.ModuleDict(self._modules_by_table)

    def _more_of(self, table: _Table, of_table: list[Jagged]) -> tuple[Any, ...]:
        return ()

    def _outputs(self, rows_of_tables: list[Tensor], given: _Given) -> Any:
        pieces: list[tuple[Tensor, Tensor]] = []
        for table, rows in zip(self._tables, rows_of_tables, strict=True):
            of_table = [given.features[name] for name in table.features]
            cut = torch.split(rows, [len(features.keys) for features in of_table])
            pieces += zip(cut, (features.offsets for features in of_table), strict=True)
        if given.torchrec is None:
            return dict(zip(self.names, pieces, strict=True))
        jagged = given.torchrec.JaggedTensor
        return {
            name: jagged(values=rows, lengths=offsets.diff(), offsets=offsets)
            for name, (rows, offsets) in zip(self.names, pieces, strict=True)
        }


def _table_of(make: Maker, config: _Table) -> Table:
    made = make(config.name, config.dim)
    if not isinstance(made, SparseModule):
        raise TypeError(f"make must return embeddings over tables, as shoal.torch.tables(store) does, got {made!r}")
    return made.table


def _pieces(rows: int) -> Iterable[tuple[Any, int, int]]:
    for begin in range(0, rows, _ROWS):
        end = min(begin + _ROWS, rows)
        yield np.arange(begin, end, dtype=np.uint64), begin, end


def _whole(name: str, tensor: Any) -> Tensor:
    if hasattr(tensor, "full_tensor"):  # of a DTensor
        tensor = tensor.full_tensor()
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: gather it into a tensor first")
    return tensor.detach().cpu().float()


def _state_of(
    config: _Table, table: Table, rows: Tensor, optimizer: Mapping[str, Any], step: int | None
) -> tuple[dict[str, Tensor], int | None]:
    """Return the columns of a table with the state of a torch optimizer, and the number of its steps."""
    rule = table.optimizer
    wanted = _STATES.get(type(rule).__name__)
    if wanted is None:
        raise ValueError(f"the state of {type(rule).__name__}, which table {table.name!r} has, cannot be converted")
    dtype = _DTYPES.get(table.spec.dtype)
    columns = {"w": rows if dtype is None else rows.to(dtype).float()}
    if not wanted:
        return columns, None
    name = f"{config.name}.weight"
    of_parameters = optimizer.get("state", optimizer)
    known = [one for one in of_parameters if str(one) == name or str(one).endswith(f".{name}")]
    if len(known) != 1:
        raise ValueError(
            f"the optimizer's state has {len(known) or 'no'} parameters {name!r} among "
            f"{', '.join(map(str, of_parameters)) or 'none'}: pass that of a fused or keyed optimizer, by names"
        )
    given = {str(key).rpartition(".")[2]: value for key, value in of_parameters[known[0]].items()}
    for column, spellings in wanted.items():
        found = [given[one] for one in spellings if one in given]
        if not found:
            raise ValueError(
                f"the optimizer's state of {known[0]!r} has no {spellings[0]!r} or {spellings[1]!r}, which "
                f"{type(rule).__name__} of table {table.name!r} needs: it has {', '.join(given) or 'none'}"
            )
        width = 1 if type(rule).__name__ == "RowWiseAdagrad" else config.dim
        values = _whole(f"{column!r} of {known[0]}", found[0])
        if values.numel() != len(rows) * width:
            raise ValueError(f"{found[0].shape} of {known[0]!r} is no state of {type(rule).__name__}: wrong optimizer?")
        columns[column] = values.reshape(len(rows), width)
    if not isinstance(rule, Adam):
        return columns, None
    steps = given.get("step", step)
    if steps is None:
        raise ValueError(f"the optimizer's state of {known[0]!r} has no 'step', which Adam needs: pass step=")
    if rule.per_row_step:
        columns["t"] = torch.full((len(rows), 1), float(steps))
    return columns, int(steps)
