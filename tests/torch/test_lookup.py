"""Rows of features of every type: pooled, shared, of dims of their own, with columns beside them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="lookups are torch modules")

from torch import nn  # noqa: E402

import shoal  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models.layers import Lookup, keys_for, look_up, pooled, softmax_of  # noqa: E402

ROWS, DIM = 40, 3
POOLINGS = ("sum", "mean", "max", "sqrtn", "attention")
SEEN = {"name": "seen", "type": "sequence", "share": "ad", "side": {"kinds": "kind"}, "side_numeric": ["dwell"]}


def make(name: str, dim: int) -> nn.Module:
    torch.manual_seed(len(name))
    return nn.Embedding(ROWS, dim)


def some(rng, lengths: list[int], *, weighted: bool = False, sides: tuple[str, ...] = (), numeric: int = 0) -> Items:
    count = sum(lengths)

    def keys():
        return torch.from_numpy(rng.integers(0, ROWS, count))

    return Items(
        keys(),
        torch.tensor([0, *np.cumsum(lengths)]),
        torch.from_numpy(rng.random(count).astype(np.float32)) if weighted else None,
        {name: keys() for name in sides},
        torch.from_numpy(rng.random((count, numeric)).astype(np.float32)) if numeric else None,
    )


@pytest.mark.combined(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 3, 1, 0, 7], [1, 1], [500, 0]])
def test_rows_are_pooled_as_their_definitions_say(rng, lengths, pooling, weighted):
    items = some(rng, lengths, weighted=weighted)
    rows = torch.from_numpy(rng.standard_normal((sum(lengths), DIM)).astype(np.float32)).requires_grad_()
    query = torch.from_numpy(rng.standard_normal(DIM).astype(np.float32)).requires_grad_()
    got = pooled(rows, items, pooling, query)
    v, q = rows.detach().double().numpy(), query.detach().double().numpy()
    w = np.ones(len(v)) if items.weights is None else items.weights.double().numpy()
    expected = np.zeros((len(lengths), DIM))
    for i, (begin, end) in enumerate(zip(items.offsets[:-1], items.offsets[1:], strict=True)):
        if begin == end:
            continue
        mine, its = v[begin:end], w[begin:end]
        scores = np.exp(mine @ q - (mine @ q).max())
        expected[i] = {
            "sum": its @ mine,
            "mean": its @ mine / its.sum(),
            "sqrtn": its @ mine / np.sqrt((its**2).sum()),
            "max": (its[:, None] * mine).max(axis=0),
            "attention": (scores / scores.sum() * its) @ mine,
        }[pooling]
    np.testing.assert_allclose(got.detach().double().numpy(), expected, rtol=2e-5, atol=2e-6)
    got.sum().backward()
    assert rows.grad is not None
    assert torch.isfinite(rows.grad).all()


def test_the_gradient_of_pooled_rows_is_that_of_the_definitions(rng):
    items = some(rng, [2, 0, 3], weighted=True)
    items = items._replace(weights=items.weights.double().requires_grad_())
    rows = torch.from_numpy(rng.standard_normal((5, DIM))).requires_grad_()
    query = torch.from_numpy(rng.standard_normal(DIM)).requires_grad_()
    for pooling in POOLINGS:
        assert torch.autograd.gradcheck(
            lambda v, q, w, how=pooling: pooled(v, items._replace(weights=w), how, q), (rows, query, items.weights)
        )


def test_a_softmax_over_items_is_that_of_each_example(rng):
    scores = torch.tensor([1e4, -1e4, 3.0, 1000.0, 999.0])
    got = softmax_of(scores, torch.tensor([0, 0, 1, 3, 3]), 4)
    expected = torch.cat([torch.softmax(scores[:2], 0), torch.ones(1), torch.softmax(scores[3:], 0)])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("per_field", [False, True])
def test_features_that_share_have_one_table_and_others_their_own(rng, per_field):
    tags = {"name": "tags", "type": "list", "pooling": "sum"}
    wide = {"name": "site", "dim": 5}
    features = Features(["ad", wide, "kind", tags, SEEN])
    made: dict[str, int] = {}

    def noting(name: str, dim: int) -> nn.Module:
        assert name not in made
        made[name] = dim
        return make(name, dim)

    lookup = Lookup(noting, "t", features, DIM, per_field=per_field, pools_sequences=False)
    own = {"t-0": DIM, "t-1": 5, "t-2": DIM, "t-3": DIM} if per_field else {"t": DIM, "t-1": 5}
    assert made == own
    lengths = [2, 0, 3]
    x = Inputs(
        torch.from_numpy(rng.integers(0, ROWS, (3, 3))),
        torch.from_numpy(rng.random((3, 3)).astype(np.float32)),
        lists={"tags": some(rng, [1, 0, 2])},
        sequences={"seen": some(rng, lengths, sides=("kinds",), numeric=1)},
    )
    (rows,) = look_up(x, lookup)
    tables = dict(zip(made, lookup.tables, strict=True))

    def table(name: str) -> torch.Tensor:
        return tables[name if per_field or name == "t-1" else "t"].weight

    (matrix,) = lookup.projections.values()
    fixed = torch.stack(
        [table("t-0")[x.keys[:, 0]], table("t-1")[x.keys[:, 1]] @ matrix.weight.T, table("t-2")[x.keys[:, 2]]], dim=1
    )
    its = x.lists["tags"]
    listed = torch.stack([table("t-3")[its.keys[:1]].sum(0), torch.zeros(DIM), table("t-3")[its.keys[1:]].sum(0)])
    expected = torch.cat([fixed * x.values.unsqueeze(2), listed.unsqueeze(1)], dim=1)
    torch.testing.assert_close(rows.fields, expected)
    assert lookup.count == 4
    seen, items = rows.sequences["seen"], x.sequences["seen"]
    assert lookup.width("seen") == 2 * DIM + 1
    assert seen.target == (0, 2)
    beside = [table("t-0")[items.keys], table("t-2")[items.side["kinds"]], items.numeric]
    torch.testing.assert_close(seen.rows, torch.cat(beside, dim=1))


def test_every_table_is_pulled_and_stepped_once(rng):
    features = Features(["ad", "kind", {"name": "tags", "type": "list"}, SEEN])
    x = Inputs(
        torch.from_numpy(rng.integers(0, ROWS, (3, 2))),
        lists={"tags": some(rng, [1, 0, 2])},
        sequences={"seen": some(rng, [2, 0, 3], sides=("kinds",), numeric=1)},
    )
    with shoal.local(threads=1) as store:
        lookup = Lookup(shoal.torch.tables(store), "embedding", features, DIM, pools_sequences=False)
        (rows,) = look_up(x, lookup)
        (rows.fields.sum() + rows.sequences["seen"].rows.sum()).backward()
        table = store.tables["embedding"]
        keys = keys_for(x, lookup, lookup.tables[0])
        assert len(keys) == 3 * 2 + 3 + 2 * 5
        assert (table.stats().step, len(table)) == (1, len(torch.unique(keys)))


def test_a_model_that_pools_sequences_refuses_numbers_beside_them():
    with pytest.raises(ValueError, match=r"'seen' has the numbers \['dwell'\] beside it, and this model pools"):
        Lookup(make, "t", Features(["ad", "kind", SEEN]), DIM)


def test_features_without_rows_are_refused():
    with pytest.raises(ValueError, match="the features are numbers alone, and a model looks rows up"):
        Lookup(make, "t", Features([{"name": "price", "type": "number"}]), DIM)


def test_numbers_of_rows_are_dropped_in_training_alone(rng):
    lookup = Lookup(make, "t", Features(["ad"]), DIM, dropout=0.5)
    x = Inputs(torch.from_numpy(rng.integers(0, ROWS, (100, 1))))
    assert 100 < int((look_up(x, lookup)[0].fields == 0).sum()) < 200
    lookup.eval()
    assert int((look_up(x, lookup)[0].fields == 0).sum()) == 0
