"""Retrieval: the vectors that a two-tower model has for users and items, and measures of the items it finds.

    model --user_vectors(examples)--> float32[u, out]  --.
    model --item_vectors(examples)--> each item once     --> recall_at(k), ndcg_at(k): all products, block by block

Threads: as torch's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shoal.base.scalars import whole
from shoal.data import Batch, FeatureNames, Reader
from shoal.metrics.checked import as_floats
from shoal.models.features import column_of
from shoal.torch.click_model import ClickModel
from shoal.torch.inputs import Inputs
from shoal.torch.models.two_tower import TwoTower

__all__ = ["ItemVectors", "item_vectors", "ndcg_at", "recall_at", "user_vectors"]

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_BLOCK = 1 << 24  # products and comparisons at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemVectors:
    """Items, each once, in the order in which they came.

    Attributes
    ----------
    keys : uint64[n]
        Of the feature that identifies an item.
    names : list of str or None
        Its texts, such as those of a column; None where the data has none.
    vectors : float32[n, out]
    """

    keys: npt.NDArray[np.uint64]
    names: list[str | None]
    vectors: Floats


def user_vectors(model: ClickModel, data: Iterable[Batch]) -> Floats:
    """Compute the vector of each example's user.

    Parameters
    ----------
    model : ClickModel
        Of a `shoal.torch.models.TwoTower`.
    data : Reader or iterable of Batch

    Returns
    -------
    float32[n, out]
    """
    module = _two_tower(model)
    parts = [its for _, its in _vectors(model, data, module.user_vectors)]
    return np.concatenate([np.empty((0, module.out), np.float32), *parts])


def item_vectors(model: ClickModel, data: Iterable[Batch]) -> ItemVectors:
    """Compute the vectors of the items of examples, each as it is in the first example that has it.

    Parameters
    ----------
    model : ClickModel
        Of a `shoal.torch.models.TwoTower`.
    data : Reader or iterable of Batch
        Only a reader has names.

    Returns
    -------
    ItemVectors

    Examples
    --------
    >>> features = shoal.torch.Features(["user", "ad"])
    >>> module = shoal.torch.models.TwoTower(make, features, user=["user"], item=["ad"])  # doctest: +SKIP
    >>> model = shoal.torch.ClickModel(module, store=store).fit(reader)  # doctest: +SKIP
    >>> items = shoal.torch.retrieval.item_vectors(model, reader)  # doctest: +SKIP
    >>> dict(zip(items.names, items.vectors))["a7"]  # doctest: +SKIP
    """
    module = _two_tower(model)
    names = FeatureNames()
    data = data.with_names(names) if isinstance(data, Reader) else data
    head = column_of(module.features.fixed[module.identity]) + "="
    found: dict[int, Floats] = {}
    for x, its in _vectors(model, data, module.item_vectors):
        keys = x.keys[:, module.identity].numpy().view(np.uint64)
        _, first = np.unique(keys, return_index=True)
        for example in np.sort(first).tolist():
            found.setdefault(int(keys[example]), its[example])
    texts = [names.get(key) for key in found]
    return ItemVectors(
        keys=np.array([*found], np.uint64),
        names=[None if text is None else text.removeprefix(head) for text in texts],
        vectors=np.concatenate([np.empty((0, module.out), np.float32), *(its[None] for its in found.values())]),
    )


def _two_tower(model: ClickModel) -> TwoTower:
    if not isinstance(model, ClickModel):
        raise TypeError(f"model is a {type(model).__name__}: pass the shoal.torch.ClickModel that trains the module")
    if not isinstance(model.module, TwoTower):
        raise TypeError(f"{type(model.module).__name__} has no vectors of users and items: pass a model of a TwoTower")
    return model.module


def _vectors(
    model: ClickModel, data: Iterable[Batch], of: Callable[[Inputs], torch.Tensor]
) -> Iterator[tuple[Inputs, Floats]]:
    model.refresh()
    model.module.eval()
    for batch in model.reading(data.unlabelled() if isinstance(data, Reader) else data):
        x = model.prepare(batch)
        with torch.no_grad():
            yield x, of(x).numpy()


def recall_at(k: int, users: npt.ArrayLike, items: npt.ArrayLike, truth: Sequence[npt.ArrayLike]) -> float:
    """Compute recall@k: the mean over users of the share of their right items that are among the first k.

    Parameters
    ----------
    k : int
    users : float32[u, d]
    items : float32[m, d]
    truth : sequence of u integer arrays
        The rows in ``items`` that are right for each user, each once. Users without any do not count.

    Returns
    -------
    float
        NaN if no user counts.

    Notes
    -----
    Items are ranked by their product with the user's vector; of equal ones the lower row is first. All products are
    computed, in float32.

    Examples
    --------
    >>> items = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
    >>> recall_at(1, [[1.0, 0.0], [0.0, 1.0]], items, [[0, 2], [1]])
    0.75
    """
    found = _ranks(k, users, items, truth)
    return _mean([np.count_nonzero(ranks < k) / len(ranks) for ranks in found if len(ranks)])


def ndcg_at(k: int, users: npt.ArrayLike, items: npt.ArrayLike, truth: Sequence[npt.ArrayLike]) -> float:
    """Compute NDCG@k: the mean over users of sum 1 / log2(rank + 1) of the right items among the first k.

    It is divided by its greatest value for as many right items; a rank is 1 or more. Arguments, ties and users without
    right items are those of `recall_at`.

    Parameters
    ----------
    k : int
    users : float32[u, d]
    items : float32[m, d]
    truth : sequence of u integer arrays

    Returns
    -------
    float

    Examples
    --------
    >>> items = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
    >>> round(ndcg_at(3, [[1.0, 0.0], [0.0, 1.0]], items, [[2], [1]]), 4)
    0.8155
    """
    found = [ranks for ranks in _ranks(k, users, items, truth) if len(ranks)]
    gains = 1 / np.log2(np.arange(max(map(len, found), default=0)) + 2)
    return _mean([(1 / np.log2(ranks[ranks < k] + 2)).sum() / gains[: min(k, len(ranks))].sum() for ranks in found])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _ranks(k: int, users: npt.ArrayLike, items: npt.ArrayLike, truth: Sequence[npt.ArrayLike]) -> Iterator[Integers]:
    """Return for each user the ranks of the right items, from 0."""
    whole("k", k, 1)
    left, right = (as_floats(its, name).astype(np.float32) for name, its in (("users", users), ("items", items)))
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1] or len(left) != len(truth):
        raise ValueError(
            f"users are {left.shape}, items {right.shape} and truth is of {len(truth)} users: pass float32[u, d], "
            "float32[m, d] and u arrays"
        )
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("users or items have numbers that are not finite, which have no rank")
    block = max(1, _BLOCK // max(1, len(right)))
    for begin in range(0, len(left), block):
        scores = left[begin : begin + block] @ right.T
        for mine, its in zip(scores, truth[begin : begin + block], strict=True):
            given = np.asarray(its).reshape(-1)
            if len(given) and given.dtype.kind not in "iu":
                raise TypeError(f"truth has {its!r:.80}: pass rows of items; of a mask, np.flatnonzero(mask)")
            wanted = given.astype(np.int64)
            if len(np.unique(wanted)) < len(wanted):
                raise ValueError(f"truth has {its!r:.80}: name each item once")
            if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(right):
                raise ValueError(f"truth has item {wanted.max()} or {wanted.min()}, and there are {len(right)}")
            yield np.concatenate(
                [_ranks_of(mine, wanted[at : at + block]) for at in range(0, max(1, len(wanted)), block)]
            )


def _ranks_of(scores: Floats, wanted: Integers) -> Integers:
    """Return how many items are before each wanted one."""
    own = scores[wanted][:, None]
    ties = (scores == own) & (np.arange(len(scores)) < wanted[:, None])
    ranks: Integers = np.count_nonzero((scores > own) | ties, axis=1)
    return ranks
