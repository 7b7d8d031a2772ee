"""shoal's collections of embeddings beside TorchRec's where it is installed, and beside torch's modules otherwise.

Tables have SGD with lr 1, so that what a backward pushed is what the rows have lost.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from stores import KINDS, opened

torch = pytest.importorskip("torch", reason="shoal.torch needs it: requirements/torch.txt says how to get it")
from torch.nn import functional as F  # noqa: E402

from shoal.torch.sparse import SparseModule  # noqa: E402

ROWS = 9
# Features of several tables, tables of several features, and one that names none.
TABLES = [("ad", 4, ["ad", "seen"]), ("item", 8, ["seen", "item"]), ("ad2", 4, ["ad"]), ("user", 12, [])]
NAMES = ["ad@ad", "seen@ad", "seen@item", "item", "ad@ad2", "user"]
DIMS = [4, 4, 8, 8, 4, 12]  # FBGEMM's are multiples of 4
FEATURES = ["item", "seen", "unused", "user", "ad"]
SGD = shoal.SGD(lr=1.0)


@pytest.fixture(scope="module")
def torchrec():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("torchrec", reason="TorchRec is no dependency: compared with where it is installed")
        from torchrec.modules import embedding_configs, fused_embedding_modules
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    return SimpleNamespace(
        **vars(fused_embedding_modules), rowwise=RowWiseAdagrad, kjt=found.KeyedJaggedTensor, configs=embedding_configs
    )


@pytest.fixture(params=KINDS)
def store(request):
    with opened(request.param, slots=16) as one:
        yield one


class Keyed:
    """What a KeyedJaggedTensor has, as far as it is used."""

    def __init__(self, names, lengths, values, weights=None):
        self.names, self._values, self._weights = names, values, weights
        self.lengths = lengths
        self._offsets = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0).to(lengths.dtype)])

    def keys(self):
        return self.names

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights

    def stride_per_key(self):
        return [len(self.lengths) // len(self.names)] * len(self.names)

    def one(self, name):
        """Keys, offsets and weights of a feature."""
        n = len(self.lengths) // len(self.names)
        first = self.names.index(name) * n
        ends = self._offsets[first : first + n + 1]
        begin, end = int(ends[0]), int(ends[-1])
        return self._values[begin:end], ends - begin, None if self._weights is None else self._weights[begin:end]


def drawn(rng, n=7, *, weighted=True, dtype=torch.int64, longest=4):
    """Bags with duplicates, some of them empty."""
    lengths = torch.from_numpy(rng.integers(0, longest + 1, n * len(FEATURES)))
    total = int(lengths.sum())
    values = torch.from_numpy(rng.integers(0, ROWS, total)).to(dtype)
    weights = torch.from_numpy(rng.uniform(-1, 2, total).astype(np.float32)) if weighted else None
    return Keyed(FEATURES, lengths.to(dtype), values, weights)


def described(pooling=None):
    more = {} if pooling is None else {"pooling": pooling}
    return [{"name": name, "embedding_dim": dim, "feature_names": of, **more} for name, dim, of in TABLES]


def matrices(rng, kind="embedding_bags"):
    return {
        f"{kind}.{name}.weight": torch.from_numpy(rng.normal(size=(ROWS, dim)).astype(np.float32))
        for name, dim, _ in TABLES
    }


def made(store, weights, rule=SGD, *, pooling="sum", is_weighted=False):
    """A collection with the rows of matrices."""
    bags = shoal.torch.EmbeddingBagCollection(
        described(pooling), shoal.torch.tables(store, rule), is_weighted=is_weighted
    )
    bags.load_torchrec(weights)
    return bags


def scales_of(rng, n):
    """Factors of outputs."""
    return {
        name: torch.from_numpy(rng.normal(size=(n, dim)).astype(np.float32))
        for name, dim in zip(NAMES, DIMS, strict=True)
    }


def twins_of(weights):
    return {name: rows.clone().requires_grad_() for name, rows in weights.items()}


def pooled_by_torch(weights, features, pooling, is_weighted):
    """Name -> rows, of torch's own bags; a weighted mean is divided by the number of keys, as FBGEMM does."""
    out = []
    for name, _, of in TABLES:
        for feature in of or [name]:
            keys, offsets, factors = features.one(feature)
            rows = F.embedding_bag(
                keys.long(),
                weights[f"embedding_bags.{name}.weight"],
                offsets.long(),
                mode="sum" if is_weighted else pooling,
                per_sample_weights=factors if is_weighted else None,
                include_last_offset=True,
            )
            out.append(rows / offsets.diff().clamp(min=1)[:, None] if is_weighted and pooling == "mean" else rows)
    return dict(zip(NAMES, out, strict=True))


def close(got, wanted):
    assert list(got) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(
            got[name], wanted[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.combined(2)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_bags_and_a_step_are_those_of_torch(store, rng, monkeypatch, pooling, is_weighted, dtype):
    weights = matrices(rng)
    features = drawn(rng, dtype=dtype)
    bags = made(store, weights, pooling=pooling, is_weighted=is_weighted)
    twins = twins_of(weights)
    theirs, ours = (features._weights.clone().requires_grad_() for _ in range(2))
    scales = scales_of(rng, 7)
    features._weights = theirs
    expected = pooled_by_torch(twins, features, pooling, is_weighted)
    features._weights = ours
    lookups, begun = [], SparseModule.begin_lookup
    monkeypatch.setattr(SparseModule, "begin_lookup", lambda self, keys: lookups.append(self) or begun(self, keys))
    got = bags(features)
    assert len(lookups) == len(TABLES)
    close(got, expected)
    before = {name: table.stats().step for name, table in store.tables.items()}
    for out in (got, expected):
        sum((out[name] * scales[name]).sum() for name in NAMES).backward()
    store.flush()
    assert {name: table.stats().step - before[name] for name, table in store.tables.items()} == {
        name: 1 for name, _, _ in TABLES
    }
    close(bags.to_torchrec(ROWS), {name: rows.detach() - rows.grad for name, rows in twins.items()})
    if is_weighted:
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_rows_of_keys_and_a_step_are_those_of_torch(store, rng):
    weights = matrices(rng, "embeddings")
    features = drawn(rng, weighted=False)
    rows = shoal.torch.EmbeddingCollection(described(), shoal.torch.tables(store, SGD))
    rows.load_torchrec(weights)
    twins = twins_of(weights)
    got = rows(features)
    assert list(got) == NAMES
    expected = {}
    names = iter(NAMES)
    for name, _, of in TABLES:
        for feature in of or [name]:
            keys, offsets, _ = features.one(feature)
            output = next(names)
            expected[output] = F.embedding(keys, twins[f"embeddings.{name}.weight"])
            assert torch.equal(got[output][1], offsets)
    close({name: one for name, (one, _) in got.items()}, expected)
    for out in ({name: one for name, (one, _) in got.items()}, expected):
        sum((one**2).sum() for one in out.values()).backward()
    store.flush()
    close(rows.to_torchrec(ROWS), {name: one.detach() - one.grad for name, one in twins.items()})


def test_a_mapping_is_read_and_tables_are_pulled_together(store, rng):
    weights = matrices(rng)
    features = drawn(rng)
    bags = made(store, weights, is_weighted=True)
    wide = shoal.torch.Embedding(store.table("wide", dim=1, optimizer=SGD))
    plain = {name: features.one(name) for name in FEATURES}
    pooled, other = shoal.torch.pull_together([(bags, plain), (wide, torch.tensor([1, 2]))])
    close(pooled, pooled_by_torch(weights, features, "sum", True))
    assert other.shape == (2, 1)
    more = {"name": "n", "embedding_dim": 2, "pooling": "sqrtn"}
    roots = shoal.torch.EmbeddingBagCollection([more], shoal.torch.tables(store, SGD, init=shoal.Constant(1.0)))
    out = roots({"n": (torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4, 4]))})["n"]
    torch.testing.assert_close(out, torch.tensor([[2.0, 2.0], [0.0, 0.0]]))


@pytest.mark.slow
def test_a_compiled_collection_is_the_same_without_graph_breaks(rng):
    torch.compiler.reset()
    with shoal.local() as store:
        bags = made(store, matrices(rng), pooling="mean", is_weighted=True)
        compiled = torch.compile(bags, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            features = drawn(rng)
            plain = {name: features.one(name) for name in FEATURES}
            got = compiled(plain)
            close(got, bags(plain))
            sum(out.sum() for out in got.values()).backward()
        assert [table.stats().step for table in store.tables.values()] == [2] * len(TABLES)


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags_and_a_step_are_those_of_torchrec(torchrec, store, rng, pooling, is_weighted):
    how = {"device": torch.device("cpu"), "is_weighted": is_weighted}

    def tables():
        return [
            torchrec.EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=ROWS,
                feature_names=list(of),
                pooling=torchrec.configs.PoolingType[pooling],
            )
            for name, dim, of in [(name, dim, of or [name]) for name, dim, of in TABLES]
        ]

    fused = torchrec.FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 1.0}, **how)
    given = drawn(rng)
    features = torchrec.kjt(
        keys=FEATURES, values=given.values(), lengths=given.lengths, weights=given.weights_or_none()
    )
    bags = shoal.torch.EmbeddingBagCollection(tables(), shoal.torch.tables(store, SGD), is_weighted=is_weighted)
    bags.load_torchrec(fused.state_dict())
    references = [fused]
    has_mean_of_weights = is_weighted and pooling == "MEAN"  # torch's bags have none
    if not has_mean_of_weights:
        references.append(torchrec.EmbeddingBagCollection(tables(), is_weighted=is_weighted))
        references[-1].load_state_dict(fused.state_dict())
    scales = scales_of(rng, 7)
    got = bags(features)
    expected = [one(features) for one in references]
    for out in expected:
        assert type(got) is type(out)
        assert (set(got.keys()), sorted(got.length_per_key())) == (set(out.keys()), sorted(out.length_per_key()))
        close(got.to_dict(), {name: out[name] for name in NAMES})
    if has_mean_of_weights:
        return  # FBGEMM's gradient on CPUs is not divided as its output is
    plain = expected[-1]
    assert (got.keys(), got.length_per_key()) == (plain.keys(), plain.length_per_key())
    torch.testing.assert_close(got.values(), plain.values())
    for out in (got, *expected):
        sum((out[name] * scales[name]).sum() for name in NAMES).backward()
    store.flush()
    after = bags.to_torchrec()
    close(after, fused.state_dict())
    torch.optim.SGD(references[1].parameters(), lr=1.0).step()
    close(after, references[1].state_dict())


def test_rows_of_keys_and_a_step_are_those_of_torchrec(torchrec, store, rng):
    def tables():
        return [
            torchrec.EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=list(of or [name]))
            for name, _, of in TABLES
        ]

    theirs = torchrec.EmbeddingCollection(tables())
    given = drawn(rng, weighted=False)
    features = torchrec.kjt(keys=FEATURES, values=given.values(), lengths=given.lengths)
    repeated = torchrec.kjt(
        FEATURES, given.values(), lengths=given.lengths, inverse_indices=(FEATURES, torch.zeros(5, 7).long())
    )
    rows = shoal.torch.EmbeddingCollection(tables(), shoal.torch.tables(store, SGD))
    rows.load_torchrec(theirs.state_dict())
    with pytest.raises(ValueError, match="inverse_indices are not supported"):
        rows(repeated)
    got, expected = rows(features), theirs(features)
    assert list(got) == list(expected)
    for name, one in expected.items():
        assert type(got[name]) is type(one)
        torch.testing.assert_close(got[name].values(), one.values(), rtol=0, atol=0)
        assert torch.equal(got[name].lengths(), one.lengths())
        assert torch.equal(got[name].offsets(), one.offsets())
    for out in (got, expected):
        sum((one.values() ** 2).sum() for one in out.values()).backward()
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    store.flush()
    close(rows.to_torchrec(), theirs.state_dict())


# ---- state of optimizers ---------------------------------------------------------------------------------------------

RULES = {
    "momentum": (lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9), shoal.Momentum(lr=0.1)),
    "adagrad": (
        lambda rows: torch.optim.Adagrad(rows, lr=0.1, initial_accumulator_value=0.1),
        shoal.Adagrad(lr=0.1, n0=0.1),
    ),
    "adam": (lambda rows: torch.optim.Adam(rows, lr=0.1), shoal.Adam(lr=0.1)),
    "adam by rows": (lambda rows: torch.optim.Adam(rows, lr=0.1), shoal.Adam(lr=0.1, per_row_step=True)),
    "sgd": (lambda rows: torch.optim.SGD(rows, lr=0.1), shoal.SGD(lr=0.1)),
}


def all_keys():
    """A batch in which each feature has each key: dense rules of torch and those of rows are one."""
    lengths = torch.full((len(FEATURES),), ROWS)
    return Keyed(FEATURES, lengths, torch.arange(ROWS).repeat(len(FEATURES)))


@pytest.mark.parametrize("rule", RULES)
def test_training_goes_on_with_the_state_of_torchs_optimizer(rng, rule):
    theirs, ours = RULES[rule]
    twins = twins_of(matrices(rng))
    optimizer = theirs(list(twins.values()))
    scales = scales_of(rng, 1)

    def loss(out):
        return sum((out[name] * scales[name]).sigmoid().sum() for name in NAMES)

    def step():
        optimizer.zero_grad()
        loss(pooled_by_torch(twins, all_keys(), "sum", False)).backward()
        optimizer.step()

    for _ in range(3):
        step()
    keyed = {"state": {f"model.{name}": optimizer.state[rows] for name, rows in twins.items()}, "param_groups": []}
    with shoal.local(slots=16) as store:
        bags = shoal.torch.EmbeddingBagCollection(described(), shoal.torch.tables(store, ours))
        bags.load_torchrec({f"model.{name}": rows for name, rows in twins.items()}, keyed, prefix="model.")
        close(bags.to_torchrec(ROWS), {name: rows.detach() for name, rows in twins.items()})
        for _ in range(2):
            step()
            loss(bags(all_keys())).backward()
        close(bags.to_torchrec(ROWS), {name: rows.detach() for name, rows in twins.items()})


@pytest.mark.parametrize("rule", ["adagrad", "rowwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_with_the_state_of_torchrecs_optimizer(torchrec, rng, rule, dtype):
    theirs = torch.optim.Adagrad if rule == "adagrad" else torchrec.rowwise
    ours = shoal.Adagrad(lr=0.1, eps=1e-8) if rule == "adagrad" else shoal.RowWiseAdagrad(lr=0.1)
    tables = [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=list(of or [name]))
        for name, _, of in TABLES
    ]
    fused = torchrec.FusedEmbeddingBagCollection(tables, theirs, {"lr": 0.1}, device=torch.device("cpu"))

    def step(*modules):
        given = drawn(rng, weighted=False)
        features = torchrec.kjt(keys=FEATURES, values=given.values(), lengths=given.lengths)
        for one in modules:
            out = one(features)
            sum((out[name] * (1 + k)).sin().sum() for k, name in enumerate(NAMES)).backward()

    for _ in range(3):
        step(fused)
    with shoal.local(slots=16) as store:
        bags = shoal.torch.EmbeddingBagCollection(tables, shoal.torch.tables(store, ours, dtype=dtype))
        bags.load_torchrec(fused.state_dict(), fused.fused_optimizer().state_dict())
        for name, table in store.tables.items():
            state = table.state(np.arange(ROWS, dtype=np.uint64))["n" if rule == "adagrad" else "m"]
            (wanted,) = fused.fused_optimizer().state_dict()["state"][f"{name}.weight"].values()
            np.testing.assert_array_equal(state.squeeze(), wanted.numpy())
        if dtype == "float32":
            for _ in range(3):
                step(fused, bags)
            close(bags.to_torchrec(), fused.state_dict())
        else:
            rounded = {name: rows.bfloat16().float() for name, rows in fused.state_dict().items()}
            close(bags.to_torchrec(), rounded)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named(rng):
    one = {"name": "ad", "embedding_dim": 2}
    keys, ends = torch.tensor([1, 2]), torch.tensor([0, 2])
    with shoal.local() as store:
        make = shoal.torch.tables(store, shoal.Adagrad())
        bags = shoal.torch.EmbeddingBagCollection([one], make)
        weighted = shoal.torch.EmbeddingBagCollection([one], make, is_weighted=True)
        ftrl = shoal.torch.EmbeddingBagCollection([one | {"name": "f"}], shoal.torch.tables(store, shoal.FTRL()))
        adam = shoal.torch.EmbeddingBagCollection([one | {"name": "a"}], shoal.torch.tables(store, shoal.Adam()))
        rows = {f"embedding_bags.{name}.weight": torch.zeros(3, 2) for name in ("ad", "f", "a")}
        ones = torch.ones(3, 2)
        for call, error, says in [
            (lambda: shoal.torch.EmbeddingBagCollection([], make), ValueError, "one table or more"),
            (lambda: shoal.torch.EmbeddingBagCollection([one, one], make), ValueError, "'ad' is that of two"),
            (lambda: shoal.torch.EmbeddingBagCollection([{"name": "x"}], make), ValueError, "an embedding_dim, got"),
            (lambda: shoal.torch.EmbeddingBagCollection([one | {"pooling": "NONE"}], make), ValueError, "'none'"),
            (
                lambda: shoal.torch.EmbeddingCollection([one], lambda name, dim: torch.nn.Linear(1, 1)),
                TypeError,
                "embeddings over tables",
            ),
            (lambda: bags({"item": (keys, ends)}), ValueError, "table 'ad' needs feature 'ad', got item"),
            (lambda: bags({"ad": (keys, ends[:1])}), ValueError, "from 0 to its number of keys, 2"),
            (lambda: weighted({"ad": (keys, ends)}), ValueError, "no weights"),
            (lambda: bags.load_torchrec({"ad": ones}), ValueError, "no 'embedding_bags.ad.weight' among"),
            (
                lambda: bags.load_torchrec({"embedding_bags.ad.weight": torch.ones(3, 4)}),
                ValueError,
                r"must be \[rows, 2\], got \[3, 4\]",
            ),
            (lambda: bags.load_torchrec({"embedding_bags.ad.weight": [1]}), TypeError, "is a list: gather it"),
            (lambda: bags.load_torchrec(rows, {"state": {0: {"sum": ones}}}), ValueError, "no parameters 'ad.weight'"),
            (lambda: bags.load_torchrec(rows, {"state": {"ad.weight": {}}}), ValueError, "no 'sum' or 'momentum1'"),
            (
                lambda: bags.load_torchrec(rows, {"state": {"ad.weight": {"sum": torch.ones(3)}}}),
                ValueError,
                "no state of Adagrad",
            ),
            (lambda: ftrl.load_torchrec(rows, {"state": {}}), ValueError, "state of FTRL, which table 'f' has"),
            (
                lambda: adam.load_torchrec(rows, {"state": {"a.weight": {"exp_avg": ones, "exp_avg_sq": ones}}}),
                ValueError,
                "pass step=",
            ),
            (lambda: bags.to_torchrec(), ValueError, "no num_embeddings"),
        ]:
            with pytest.raises(error, match=says):
                call()
        assert all(len(table) == 0 for table in store.tables.values())
        adam.load_torchrec(rows, {"state": {"a.weight": {"exp_avg": ones, "exp_avg_sq": ones}}}, step=5)
        assert store.tables["a"].stats().step == 5
        with pytest.raises(ValueError, match="table 'a' has rows"):
            adam.load_torchrec(rows, {"state": {"a.weight": {"exp_avg": ones, "exp_avg_sq": ones, "step": 5}}})
        with pytest.raises(ValueError, match="1 rows of keys that are not below 2"):
            adam.to_torchrec({"a": 2})


def test_state_is_not_set_on_servers():
    with opened("connected") as store:
        bags = shoal.torch.EmbeddingBagCollection(
            [{"name": "ad", "embedding_dim": 2}], shoal.torch.tables(store, shoal.Adagrad())
        )
        rows = {"embedding_bags.ad.weight": torch.ones(3, 2)}
        with pytest.raises(ValueError, match="on servers, which take no optimizer state"):
            bags.load_torchrec(rows, {"state": {"ad.weight": {"ad.momentum1": torch.ones(3, 2)}}})
        bags.load_torchrec(rows)
        assert bags.to_torchrec(3)["embedding_bags.ad.weight"].tolist() == [[1.0, 1.0]] * 3
