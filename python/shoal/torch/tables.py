"""Factories of sparse modules over a store's tables: the argument ``make`` of `shoal.torch.models`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from shoal.base.scalars import make_plain
from shoal.lifecycle import Admission, Expiry
from shoal.optim import Adagrad, Init, Normal, Optimizer, Zeros
from shoal.store.base import Store
from shoal.torch.embedding import Embedding
from shoal.torch.models.layers import Maker

_ADAGRAD = Adagrad(lr=0.02)
_NORMAL = Normal(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """The settings of a table; None: as `tables` has it for all.

    Parameters
    ----------
    optimizer : Optimizer or None
    init : Init or None
    dtype : {"float32", "float16", "bfloat16"} or None
    admit : Admission or None
        Which keys get a row.
    expire : tuple of Expiry or None
        Which rows are dropped; empty: none.
    frozen : bool
        Whether rows stay as they are.
    """

    optimizer: Optimizer | None = None
    init: Init | None = None
    dtype: str | None = None
    admit: Admission | None = None
    expire: tuple[Expiry, ...] | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        make_plain(self)


def tables(
    store: Store,
    optimizer: Optimizer = _ADAGRAD,
    *,
    init: Init = _NORMAL,
    dtype: str = "float32",
    linear_optimizer: Optimizer | None = None,
    admit: Admission | None = None,
    expire: Expiry | Iterable[Expiry] | None = None,
    frozen: bool = False,
    rules: Mapping[str, TableRule] | None = None,
    prefix: str = "",
    seed: int = 0,
) -> Maker:
    """Return a maker of embeddings over tables of a store.

    Parameters
    ----------
    store : Store
    optimizer : Optimizer
        The update rule of the tables.
    init : Init
        Initial values of rows. Those of dim 1, the weights of first order, start at 0.
    dtype : {"float32", "float16", "bfloat16"}
        How rows are stored; those of dim 1 in float32.
    linear_optimizer : Optimizer, optional
        The update rule of tables of dim 1; default: ``optimizer``.
    admit : Admission, optional
        Which keys get a row; see `shoal.Store.table`.
    expire : Expiry or iterable of Expiry, optional
        Which rows a sweep drops; see `shoal.Store.table`.
    frozen : bool
        Whether rows stay as they are, while the rest of a model learns.
    rules : mapping of str to TableRule, optional
        Settings that differ for a table: by its name in the model ("linear", "embedding", of one field "embedding-3"),
        or by the name without the number.
    prefix : str
        Prefix of the tables' names in the store: two models in one store need different ones.
    seed : int
        Of the tables: of the rounding of accumulators and of 16-bit rows.

    Returns
    -------
    callable
        ``make(name, dim)``, an `Embedding` over the table ``prefix + name``, which is created if it does not exist.

    Examples
    --------
    >>> import shoal
    >>> store = shoal.local()
    >>> make = tables(store, shoal.Adagrad(lr=0.05), linear_optimizer=shoal.FTRL(l1=1.0))
    >>> model = shoal.torch.models.DeepFM(make, features=3, dim=8, hidden=(16,))
    >>> {name: (table.dim, type(table.optimizer).__name__) for name, table in store.tables.items()}
    {'linear': (1, 'FTRL'), 'embedding': (8, 'Adagrad')}
    """
    if not isinstance(store, Store):
        raise TypeError(f"store is a {type(store).__name__}: pass a store, such as shoal.local()")
    given = dict(rules or {})
    usual_expiry = () if expire is None else tuple(expire) if isinstance(expire, Iterable) else (expire,)
    for name, rule in given.items():
        if not isinstance(rule, TableRule):
            raise TypeError(f"the rule of table {name!r} is {rule!r:.80}: pass a TableRule")

    def make(name: str, dim: int) -> nn.Module:
        rule = given.get(name) or given.get(name.rpartition("-")[0]) or TableRule()
        narrow = dim == 1
        usual = linear_optimizer if narrow and linear_optimizer is not None else optimizer
        table = store.table(
            prefix + name,
            dim=dim,
            optimizer=rule.optimizer or usual,
            init=rule.init or (Zeros() if narrow else init),
            dtype=rule.dtype or ("float32" if narrow else dtype),
            seed=seed,
            admit=rule.admit or admit,
            expire=usual_expiry if rule.expire is None else rule.expire,
        )
        return Embedding(table).requires_grad_(not (rule.frozen or frozen))

    return make
