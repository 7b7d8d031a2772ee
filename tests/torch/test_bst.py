"""BST against a slow twin in float64, place by place; empty and long sequences; bits."""

import math
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch modules")

from torch import nn  # noqa: E402

import shoal  # noqa: E402
from click_twins import DIM, FIELDS, ROWS, SMALL, N, agrees, described, make, rows_of, some, through, wide  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models import BST  # noqa: E402

HOW = {"dim": DIM, "hidden": SMALL, "heads": 3}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def normed(x: np.ndarray, norm: nn.LayerNorm) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + norm.eps) * wide(norm.weight) + wide(norm.bias)


def block_of(block, x: list[np.ndarray]) -> list[np.ndarray]:
    """One block over the places that there are, one by one."""
    query, key, value, out = (wide(one.weight) for one in (block.query, block.key, block.value, block.out))
    width = len(query) // block.heads
    after = []
    for mine in x:
        seen = np.zeros(len(query))
        for head in range(block.heads):
            part = slice(head * width, (head + 1) * width)
            scores = [query[part] @ mine @ (key[part] @ other) / math.sqrt(width) for other in x]
            total = sum(math.exp(score) for score in scores)
            for score, other in zip(scores, x, strict=True):
                seen[part] += math.exp(score) / total * (value[part] @ other)
        mine = normed(mine + out @ seen, block.norms[0])
        inner = wide(block.first.weight) @ mine + wide(block.first.bias)
        inner = np.where(inner > 0, inner, 0.01 * inner)
        after.append(normed(mine + wide(block.second.weight) @ inner + wide(block.second.bias), block.norms[1]))
    return after


def transformed(its, candidates: np.ndarray, items: list[np.ndarray]) -> np.ndarray:
    """The places of each example: the candidate, then its items from the last one on."""
    out = np.zeros((N, its.max_len + 1, candidates.shape[1]))
    for example in range(N):
        rows = [candidates[example], *items[example][::-1][: its.max_len]]
        x = [row + place for row, place in zip(rows, wide(its.places), strict=False)]
        for block in its.blocks:
            x = block_of(block, x)
        out[example, : len(x)] = x
    return out.reshape(N, -1)


@pytest.mark.combined(2)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("max_len", [3, 5, 9])
def test_bst_transforms_the_candidate_and_the_last_items(layers, counted, max_len):
    x = some(valued=True, dense=2, history=True)
    counts = np.arange(1, 12) / 2 if counted else np.ones(11)
    if counted:
        weights = torch.from_numpy(counts.astype(np.float32))
        x = x._replace(sequences={"seen": x.sequences["seen"]._replace(weights=weights)})
    features = Features(
        [
            *map(str, range(FIELDS)),
            {"name": "x0", "type": "number"},
            {"name": "x1", "type": "number"},
            {"name": "seen", "type": "sequence", "share": "2", "max_len": max_len},
        ]
    )
    model = BST(make, features, layers=layers, **HOW)
    for parameter in model.transformers.parameters():
        nn.init.normal_(parameter, std=0.4)
    keys, offsets = (one.numpy() for one in x.sequences["seen"][:2])
    rows = wide(model.embedding.tables[0].weight)[keys] * counts[:, None]
    items = [rows[begin:end] for begin, end in pairwise(offsets)]
    fields = rows_of(model.embedding, x)
    seen = transformed(model.transformers[0], fields[:, 2], items)
    out = np.hstack([seen, fields.reshape(N, -1), wide(x.dense)])
    agrees(model, x, through(model.last, through(model.tower, out))[:, 0])


def test_several_sequences_with_side_columns_and_numbers_have_a_transformer_each():
    features = Features(
        [
            "ad",
            "kind",
            {
                "name": "seen",
                "type": "sequence",
                "share": "ad",
                "side": {"kinds": "kind", "shops": "shops"},
                "side_numeric": ["dwell"],
                "max_len": 4,
            },
            {"name": "bought", "type": "sequence", "share": "ad", "max_len": 2},
        ]
    )
    generator = torch.Generator().manual_seed(3)

    def keys(*shape):
        return torch.randint(ROWS, shape, generator=generator)

    seen = Items(
        keys(11),
        torch.tensor([0, 0, 3, 4, 4, 6, 11, 11]),
        side={"kinds": keys(11), "shops": keys(11)},
        numeric=torch.rand(11, 1, generator=generator),
    )
    bought = Items(keys(3), torch.tensor([0, 2, 2, 2, 2, 3, 3, 3]))
    x = Inputs(keys(N, 2), sequences={"seen": seen, "bought": bought})
    model = BST(make, features, **HOW)
    assert [its.places.shape for its in model.transformers] == [(5, 3 * DIM + 1), (3, DIM)]
    table = wide(model.embedding.tables[0].weight)
    fields = table[x.keys.numpy()]
    of_seen = np.hstack([table[seen.keys], table[seen.side["kinds"]], table[seen.side["shops"]], wide(seen.numeric)])
    both = []
    for its, rows, items in zip(model.transformers, (of_seen, table[bought.keys]), (seen, bought), strict=True):
        parts = [rows[begin:end] for begin, end in pairwise(items.offsets)]
        none = np.zeros((N, DIM + 1))
        candidates = fields[:, 0] if items is bought else np.hstack([fields[:, 0], fields[:, 1], none])
        both.append(transformed(its, candidates, parts))
    out = np.hstack([*both, fields.reshape(N, -1)])
    agrees(model, x, through(model.last, through(model.tower, out))[:, 0])


def test_a_batch_without_any_item_has_the_candidates_alone():
    x = some(history=True)
    x = x._replace(sequences={"seen": Items(torch.zeros(0, dtype=torch.int64), torch.zeros(N + 1, dtype=torch.int64))})
    model = BST(make, described(history=True), **HOW)
    fields = rows_of(model.embedding, x)
    seen = transformed(model.transformers[0], fields[:, 2], [np.zeros((0, DIM))] * N)
    agrees(model, x, through(model.last, through(model.tower, np.hstack([seen, fields.reshape(N, -1)])))[:, 0])


def test_an_example_does_not_depend_on_the_others():
    x = some(history=True)
    model = BST(make, described(history=True), **HOW)
    together = wide(model(x))
    items = x.sequences["seen"]
    for i, its in enumerate(items.keys.tensor_split(items.offsets[1:-1])):
        alone = Inputs(x.keys[i : i + 1], sequences={"seen": Items(its, torch.tensor([0, len(its)]))})
        assert model(alone).item() == pytest.approx(together[i], rel=1e-5)


def test_the_order_of_the_items_matters():
    x = some(history=True)
    model = BST(make, described(history=True), **HOW)
    items = x.sequences["seen"]
    turned = torch.cat([part.flip(0) for part in items.keys.tensor_split(items.offsets[1:-1])])
    before, after = wide(model(x)), wide(model(x._replace(sequences={"seen": items._replace(keys=turned)})))
    moved = np.abs(before - after) > 1e-6
    np.testing.assert_array_equal(moved, items.lengths.numpy() > 1)


@pytest.mark.slow
def test_a_fit_has_the_same_bits_every_time(rng):
    """Long sequences of few keys, so that many gradients are of the same row."""
    n, features = 300, described(history=True)
    lengths = torch.from_numpy(rng.integers(0, 6, n))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    keys = torch.from_numpy(rng.integers(0, 9, (n, FIELDS)))
    items = Items(torch.from_numpy(rng.integers(0, 9, int(lengths.sum()))), offsets)
    x, labels = Inputs(keys, sequences={"seen": items}), torch.from_numpy(rng.integers(0, 2, n).astype(np.float32))
    found = []
    for _ in range(2):
        torch.manual_seed(2)
        with shoal.local(threads=2) as store:
            model = BST(shoal.torch.tables(store, shoal.Adagrad(lr=0.1)), features, dropout=0.2, **HOW)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(5):
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(x), labels).backward()
                optimizer.step()
            found.append(wide(model.eval()(x)))
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: BST(make, 3), "BST reads sequences, and there is none"),
        (
            lambda: BST(make, Features(["ad", {"name": "seen", "type": "sequence", "share": "ad"}])),
            "sequence 'seen' has no max_len, and BST learns a vector for each place of it",
        ),
        (
            lambda: BST(make, Features(["ad", {"name": "seen", "type": "sequence", "max_len": 3}])),
            "sequence 'seen' shares the rows of no category",
        ),
        (lambda: BST(make, described(history=True), heads=0), "heads is 0: pass a whole number from 1"),
    ],
)
def test_what_cannot_be_built_is_told(make_it, says):
    with pytest.raises(ValueError, match=says):
        make_it()
