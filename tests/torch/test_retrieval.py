"""Two towers: their vectors, the loss against its formula, frequencies, resumed fits; recall and NDCG by sorting."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch modules")

import shoal  # noqa: E402
from click_twins import DIM, FIELDS, ROWS, SMALL, N, agrees, described, make, rows_of, some, through, wide  # noqa: E402
from shoal.data import hash_strings  # noqa: E402
from shoal.models import Checkpointing, callbacks  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models import LR, TwoTower  # noqa: E402
from shoal.torch.models.two_tower import ITEMS, USERS, Frequencies, sampled_softmax  # noqa: E402
from shoal.torch.retrieval import item_vectors, ndcg_at, recall_at, user_vectors  # noqa: E402

SIDES = {"user": ["0", "1", "3", "x1"], "item": ["2", "4", "x0"]}
HOW = {"dim": DIM, "hidden": SMALL, "out": 3}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(axis=1, keepdims=True))


def vectors_of(side, x: np.ndarray) -> np.ndarray:
    return unit(through(side.last, through(side.tower, x)))


def test_the_logit_is_the_product_of_the_vectors_over_the_temperature():
    x = some(valued=True, dense=2)
    model = TwoTower(make, described(2), temperature=0.2, **SIDES, **HOW).eval()
    rows, dense = rows_of(model.embedding, x), wide(x.dense)
    users = vectors_of(model.user, np.hstack([rows[:, 0], rows[:, 1], rows[:, 3], dense[:, 1:]]))
    items = vectors_of(model.item, np.hstack([rows[:, 2], rows[:, 4], dense[:, :1]]))
    np.testing.assert_allclose(wide(model.user_vectors(x)), users, atol=1e-6)
    np.testing.assert_allclose(wide(model.item_vectors(x)), items, atol=1e-6)
    agrees(model, x, (users * items).sum(axis=1) / 0.2)
    trained = model.train()(x)
    assert list(trained) == ["label", USERS, ITEMS]
    assert torch.equal(trained["label"], model.eval()(x))


def test_a_side_has_its_lists_and_pooled_sequences_with_their_side_columns():
    seen = {"name": "seen", "type": "sequence", "share": "ad", "side": {"kinds": "kind"}}
    features = Features(["user", "ad", "kind", {"name": "tags", "type": "list"}, seen])
    model = TwoTower(make, features, user=["user", "seen"], item=["ad", "tags", "kind"], **HOW)
    assert (model.user.places, model.item.places) == ([0, 4, 5], [1, 3, 2])
    jagged = Items(torch.arange(N), torch.arange(N + 1), side={"kinds": torch.arange(N)})
    x = Inputs(torch.randint(ROWS, (N, 3)), lists={"tags": jagged}, sequences={"seen": jagged})
    users, items = model.user_vectors(x), model.item_vectors(x)
    x = x._replace(sequences={"seen": jagged._replace(keys=jagged.keys + 1)})
    assert torch.equal(model.item_vectors(x), items)
    assert not torch.equal(model.user_vectors(x), users)


def softmax_loss(scores: np.ndarray, log_q: np.ndarray, items: np.ndarray, i: int) -> float:
    """Pair i's, with all other items as negatives."""
    own = scores[i, i] - log_q[i]
    others = [scores[i, j] - log_q[j] for j in range(len(items)) if items[j] != items[i]]
    return math.log(math.exp(own) + sum(map(math.exp, others))) - own


def test_the_sampled_softmax_is_corrected_and_has_no_accidental_hits(rng):
    n = 9
    scores, log_q = rng.standard_normal((n, n)), np.log(rng.random(n))
    items = np.array([3, 1, 4, 1, 5, 9, 2, 1, 5])
    got = sampled_softmax(torch.from_numpy(scores), torch.from_numpy(log_q), torch.from_numpy(items))
    np.testing.assert_allclose(got, [softmax_loss(scores, log_q, items, i) for i in range(n)], rtol=1e-12)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_loss_is_of_the_positives_with_frequencies_so_far(rng, weighted, correct):
    n = 40
    model = TwoTower(make, described(2), temperature=0.5, correct=correct, **SIDES, **HOW).train()
    counts: dict[int, int] = {}
    for step in range(3):
        keys = rng.integers(0, 7, (n, FIELDS))
        x = Inputs(torch.from_numpy(keys), dense=torch.zeros(n, 2))
        labels = rng.integers(0, 2, n).astype(np.float32) if step else np.ones(n, np.float32)
        weights = rng.random(n).astype(np.float32) if weighted else np.ones(n, np.float32)
        outputs = model(x)
        given = torch.from_numpy(weights) if weighted else None
        loss = model.loss(outputs, x, {"label": torch.from_numpy(labels)}, given, {})
        positive = np.flatnonzero(labels)
        items = keys[positive, 2]
        for item in items.tolist():
            counts[item] = counts.get(item, 0) + 1
        scores = wide(outputs[USERS])[positive] @ wide(outputs[ITEMS])[positive].T / 0.5
        log_q = np.log([counts[item] / sum(counts.values()) for item in items.tolist()]) * correct
        expected = sum(weights[row] * softmax_loss(scores, log_q, items, i) for i, row in enumerate(positive))
        assert loss.item() == pytest.approx(expected / n, rel=1e-5)
        loss.backward()
    assert (torch.sort(model.frequencies.counts).values[:, -7:].sum(dim=1) == sum(counts.values())).all()


def test_a_batch_without_positives_has_the_loss_0_and_gradients():
    model = TwoTower(make, described(2), **SIDES, **HOW)
    x = some(dense=2)
    loss = model.loss(model(x), x, {"label": torch.zeros(N)}, None, {})
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("width", [2, 64, 1 << 14])
def test_frequencies_are_never_too_small_and_exact_where_counters_suffice(rng, width):
    sketch = Frequencies(width)
    keys = hash_strings([f"item {i}" for i in range(50)]).view(np.int64)
    drawn = rng.integers(0, 50, (4, 300)) // (1 + rng.integers(0, 6, (4, 300)))
    for some_keys in drawn:
        sketch.add(torch.from_numpy(keys[some_keys]))
    true = np.bincount(drawn.reshape(-1), minlength=50)
    found = np.exp(wide(sketch.log(torch.from_numpy(keys)))) * drawn.size
    assert (found > true - 1e-3).all()
    if width == 1 << 14:
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-9)
    if width == 64:
        assert (found - true).mean() < 2 * math.e * drawn.size / 64
    assert (sketch.counts.sum(dim=1) == drawn.size).all()


def test_the_places_of_keys_are_the_highest_bits_of_products_modulo_2_64():
    sketch = Frequencies(1 << 10)
    keys = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    factors = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
    expected = [[(key * factor % 2**64) >> 54 for key in keys] for factor in factors]
    assert sketch._places(torch.from_numpy(np.array(keys, np.uint64).view(np.int64))).tolist() == expected


# ---- measures --------------------------------------------------------------------------------------------------------


def sorted_ranks(users, items, truth):
    """By sorting all items of a user, the lower one first among equal ones."""
    for user, its in zip(users, truth, strict=True):
        order = sorted(range(len(items)), key=lambda i: (-float(np.dot(user, items[i])), i))
        yield [order.index(one) for one in its]


@pytest.mark.parametrize("k", [1, 3, 10, 50])
@pytest.mark.parametrize("block", [1, 40, 1 << 24])
def test_recall_and_ndcg_are_those_of_sorted_items_with_ties(rng, monkeypatch, k, block):
    monkeypatch.setattr("shoal.torch.retrieval._BLOCK", block)
    users = rng.integers(-2, 3, (12, 3)).astype(np.float32)  # small whole numbers: many ties, and exact products
    items = rng.integers(-1, 2, (30, 3)).astype(np.float32)
    truth = [rng.choice(30, size, replace=False) for size in rng.integers(0, 6, 12)]
    ranks = [its for its in sorted_ranks(users, items, truth) if its]
    assert len(ranks) < 12
    recall = np.mean([sum(rank < k for rank in its) / len(its) for its in ranks])
    assert recall_at(k, users, items, truth) == pytest.approx(recall)
    gains = [sum(1 / math.log2(rank + 2) for rank in its if rank < k) for its in ranks]
    best = [sum(1 / math.log2(rank + 2) for rank in range(min(k, len(its)))) for its in ranks]
    assert ndcg_at(k, users, items, truth) == pytest.approx(np.mean(np.array(gains) / best))


def test_measures_of_nothing_and_wrong_shapes():
    assert math.isnan(recall_at(3, np.zeros((0, 2)), np.zeros((4, 2)), []))
    assert math.isnan(ndcg_at(3, np.zeros((1, 2)), np.zeros((4, 2)), [[]]))
    with pytest.raises(ValueError, match="k is 0"):
        recall_at(0, np.zeros((1, 2)), np.zeros((4, 2)), [[1]])
    with pytest.raises(ValueError, match=r"users are \(1, 2\), items \(4, 3\) and truth is of 1"):
        recall_at(1, np.zeros((1, 2)), np.zeros((4, 3)), [[1]])
    for wrong in ([0.5], [True, False], [None]):
        with pytest.raises(TypeError, match=r"truth has .*: pass rows of items"):
            ndcg_at(1, np.zeros((1, 2)), np.zeros((4, 2)), [wrong])
    with pytest.raises(ValueError, match=r"truth has \[1, 1\]: name each item once"):
        recall_at(1, np.zeros((1, 2)), np.zeros((4, 2)), [[1, 1]])
    with pytest.raises(TypeError, match="users are Tensor"):
        recall_at(1, torch.zeros((1, 2), requires_grad=True), np.zeros((4, 2)), [[1]])
    for measure in (recall_at, ndcg_at):
        assert measure(10**30, np.zeros((1, 2)), np.zeros((4, 2)), [[1]]) == measure(4, [[0]], [[0]] * 4, [[1]])
        with pytest.raises(TypeError, match=r"k is 1\.5"):
            measure(1.5, np.zeros((1, 2)), np.zeros((4, 2)), [[1]])
    with pytest.raises(TypeError, match=r"model is a NoneType: pass the shoal.torch.ClickModel"):
        user_vectors(None, [])
    with pytest.raises(ValueError, match="truth has item 4"):
        recall_at(1, np.zeros((1, 2)), np.zeros((4, 2)), [[4]])
    with pytest.raises(ValueError, match="not finite"):
        ndcg_at(1, np.full((1, 2), np.nan), np.zeros((4, 2)), [[1]])


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Each user likes every fourth ad; some ads are shown far more often."""
    random = np.random.default_rng(4)
    rows = []
    for _ in range(2000):
        user = int(random.integers(0, 40))
        ad = int(random.choice(20, p=np.arange(1, 21) / 210))
        rows.append(f"{int(ad % 4 == user % 4)},u{user},a{ad},{'' if ad else 'x'}")
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("\n".join(["click,user,ad,kind", *rows]) + "\n")
    return path


def two_tower(store):
    features = Features(["user", "ad", "kind"])
    sizes = {"dim": 8, "hidden": (16,), "out": 8, "temperature": 0.3}
    maker = shoal.torch.tables(store, shoal.Adagrad(lr=0.2), init=shoal.Normal(0.1))
    module = TwoTower(maker, features, user=["user"], item=["ad", "kind"], **sizes)
    return shoal.torch.ClickModel(module, store=store, optimizer=torch.optim.Adam(module.parameters(), lr=0.01))


def reader_of(log):
    return shoal.read_csv(log, label="click", categorical=["user", "ad", "kind"], batch_size=100)


@pytest.mark.slow
def test_the_nearest_items_are_those_that_a_user_likes(log):
    with shoal.local(threads=1) as store:
        torch.manual_seed(6)
        model = two_tower(store).fit(reader_of(log), epochs=10, progress=False)
        assert model.evaluate(reader_of(log)).auc > 0.99
        users, items = user_vectors(model, reader_of(log)), item_vectors(model, reader_of(log))
    assert users.shape == (2000, 8)
    lines = [line.split(",") for line in log.read_text().splitlines()[1:]]
    assert items.names == list(dict.fromkeys(ad for _, _, ad, _ in lines))
    key = hash_strings(["ad"])[0]
    np.testing.assert_array_equal(items.keys, hash_strings(items.names, int(key)))
    liked = [[i for i, ad in enumerate(items.names) if int(ad[1:]) % 4 == int(user[1:]) % 4] for _, user, _, _ in lines]
    assert recall_at(5, users, items.vectors, liked) > 0.95
    assert ndcg_at(5, users, items.vectors, liked) > 0.95


def test_items_of_batches_have_keys_and_no_names(log):
    with shoal.local(threads=1) as store:
        model = two_tower(store)
        batches = list(reader_of(log).with_fields())
        items, again = item_vectors(model, iter(batches)), item_vectors(model, reader_of(log))
        assert items.names == [None] * 20
        np.testing.assert_array_equal(items.keys, again.keys)
        np.testing.assert_array_equal(items.vectors, again.vectors)
        assert item_vectors(model, []).vectors.shape == user_vectors(model, []).shape == (0, 8)
        other = shoal.torch.ClickModel(LR(shoal.torch.tables(store), Features(["ad"])), store=store)
        with pytest.raises(TypeError, match="LR has no vectors of users and items"):
            item_vectors(other, [])


class Stop(callbacks.Callback):
    def __init__(self):
        self.batches = 0

    def batch_done(self, progress):
        self.batches += 1
        if self.batches == 33:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_resumed_fit_has_the_frequencies_and_bits_of_an_undisturbed_one(log, tmp_path):
    how = {"epochs": 3, "progress": False}

    def fitted(store, folder, *, stop=False, resume=False):
        torch.manual_seed(6)
        model = two_tower(store)
        saved = Checkpointing(folder, every=5, resume=resume)
        model.fit(reader_of(log), checkpoint=saved, callbacks=[Stop()] if stop else [], **how)
        state = {name: one.numpy().copy() for name, one in model.module.state_dict().items() if torch.is_tensor(one)}
        return state, item_vectors(model, reader_of(log)).vectors

    with shoal.local(threads=1) as store:
        expected, vectors = fitted(store, tmp_path / "whole")
    with shoal.local(threads=1) as store, pytest.raises(KeyboardInterrupt):
        fitted(store, tmp_path / "cut", stop=True)
    with shoal.local(threads=1) as store:
        found, again = fitted(store, tmp_path / "cut", resume=True)
    clicks = sum(line[0] == "1" for line in log.read_text().splitlines()[1:])
    assert expected["frequencies.counts"].sum() == 4 * 3 * clicks
    assert list(found) == list(expected)
    for name, one in expected.items():
        np.testing.assert_array_equal(found[name], one)
    np.testing.assert_array_equal(again, vectors)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"user": ["0"]}, "item is empty: name the features of the items"),
        ({"user": ["0", "1", "3"], "item": ["2"]}, "user and item name '4' wrongly"),
        ({"user": ["0", "1", "3", "2"], "item": ["2", "4", "5"]}, "name '2', '5' wrongly"),
        ({"user": ["0", "1", "3"], "item": ["2", "4"], "temperature": 0.0}, "temperature is 0"),
        ({"user": ["0", "1", "3"], "item": ["2", "4"], "counters": 100}, "counters is 100: pass a power of two"),
    ],
)
def test_what_cannot_be_built_is_told(how, says):
    with pytest.raises(ValueError, match=says):
        TwoTower(make, described(), **how)


def test_an_item_is_identified_by_a_category():
    with pytest.raises(ValueError, match="'x0' is none of the fields with one key"):
        TwoTower(make, described(1), user=["0", "1"], item=["x0", "2", "3", "4"])
