"""A value or a step that would make the dense part of a click model NaN: an error, and the good checkpoint stays."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from shoal.data import Batch  # noqa: E402
from shoal.models import Checkpointing  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.finite import are_finite, check_finite, overflow  # noqa: E402
from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models import DeepFM  # noqa: E402
from shoal.torch.tables import tables  # noqa: E402

FIELDS = Features(["site", {"name": "price", "type": "number"}, {"name": "age", "type": "number"}])


def log(path, bad=None, value="3e38", rows=640):
    lines = ["click,site,price,age"]
    random = np.random.default_rng(3)
    for i in range(rows):
        price = value if i == bad else f"{random.random():.3f}"
        lines.append(f"{int(random.random() < 0.3 + 0.1 * (i % 5))},s{i % 5},{price},{random.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return shoal.read_csv(path, label="click", categorical=["site"], numeric=["price", "age"], batch_size=64)


def module(store):
    torch.manual_seed(5)
    return DeepFM(tables(store), FIELDS, dim=4, hidden=(8,))


def tower(place):
    (file,) = place.glob("tower-*.pt")
    return torch.load(file, weights_only=True)["module"]


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("dense", ["allreduce", "servers"])
@pytest.mark.parametrize("value", ["3e38", "1e25"])
def test_a_value_that_overflows_is_named_with_its_field_and_the_checkpoint_stays(tmp_path, value, dense):
    with shoal.local() as store:
        model = ClickModel(module(store), store=store, dense=dense)
        data = log(tmp_path / "bad.csv", bad=400, value=value)
        with pytest.raises(ValueError, match="not finite") as error:
            model.fit(data, checkpoint=Checkpointing(tmp_path / "m", every=2), progress=False)
    assert "examples 385 to 448" in str(error.value)
    assert f"feature 'price' is {float(value):.4g} in its example 16" in str(error.value)
    assert all(torch.isfinite(one).all() for one in tower(tmp_path / "m").values() if torch.is_tensor(one))
    with shoal.local() as store:
        model = ClickModel(module(store), store=store, dense=dense)
        model.restore(tmp_path / "m")
        assert model.examples == 384


def test_a_step_that_is_too_long_is_said_where_no_value_is_large(tmp_path):
    with shoal.local() as store:
        optimizer = functools.partial(torch.optim.SGD, lr=1e30)
        model = ClickModel(module(store), store=store, optimizer=optimizer)
        with pytest.raises(ValueError, match=r"not finite.*no value is large.*smaller learning rate"):
            model.fit(log(tmp_path / "good.csv"), progress=False, epochs=3)


def test_a_model_that_is_not_finite_replaces_no_good_one(tmp_path):
    with shoal.local() as store:
        model = ClickModel(module(store), store=store)
        reader = model.reading(log(tmp_path / "good.csv"))
        for batch in reader:
            model.learn(batch, model.prepare(batch), model.accumulator())
        model.save(tmp_path / "m")
        good = (tmp_path / "m/model.json").read_bytes()
        with torch.no_grad():
            next(one for one in model.module.parameters() if one.numel()).fill_(float("nan"))
        with pytest.raises(ValueError, match=r"dense parameter '.+' are not finite: the model is not saved"):
            model.save(tmp_path / "m", overwrite=True)
        assert (tmp_path / "m/model.json").read_bytes() == good
        with shoal.local() as other:
            assert ClickModel(module(other), store=other).restore(tmp_path / "m") is None


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], True), ([1.0, -3e38], True), ([1.0, float("nan")], False), ([float("-inf"), 0.0], False)],
)
def test_numbers_are_finite_or_not(numbers, expected):
    given = [torch.ones(3), None, torch.tensor(numbers), torch.zeros(0)]
    assert are_finite(given) is expected
    assert are_finite([]) is True


def test_numbers_that_are_not_floating_are_not_checked():
    counts = torch.nn.BatchNorm1d(3)  # has a count of batches, an integer
    check_finite(counts)
    counts.running_mean[1] = float("inf")
    with pytest.raises(ValueError, match=r"1 of 3 numbers of the dense parameter 'running_mean'"):
        check_finite(counts)


@pytest.mark.parametrize("dense", ["allreduce", "servers"])
def test_a_row_that_overflows_is_named_with_its_key_and_table_and_the_checkpoint_stays(tmp_path, dense):
    data = log(tmp_path / "good.csv")

    class Grows(shoal.models.Callback):
        def batch_done(self, progress):
            if progress.examples == 256:
                store.tables["embedding"].assign(np.array([site]), np.full((1, 4), 3e38, np.float32))

    with shoal.local() as store:
        model = ClickModel(module(store), store=store, dense=dense)
        site = model.prepare(next(iter(model.reading(data)))).keys.numpy().view(np.uint64)[2, 0]
        with pytest.raises(ValueError, match="not finite") as error:
            model.fit(data, checkpoint=Checkpointing(tmp_path / "m", every=2), callbacks=[Grows()], progress=False)
    row = f"a weight of the row of key {site} of feature 'site' in table 'embedding' is 3e+38: use a smaller"
    assert "examples 257 to 320" in str(error.value)
    assert row in str(error.value)
    assert all(torch.isfinite(one).all() for one in tower(tmp_path / "m").values() if torch.is_tensor(one))


def test_the_row_of_an_item_of_a_history_is_named_too():
    features = Features(["item", {"name": "seen", "type": "sequence", "share": "item"}])
    seen = Items(torch.tensor([5, 7, 5]), torch.tensor([0, 2, 3]))
    given = Inputs(torch.tensor([[1], [2]]), sequences={"seen": seen})
    with shoal.local() as store:
        table = store.table("embedding", dim=2)
        table.assign(np.array([7], np.uint64), np.full((1, 2), -1e30, np.float32))
        said = str(overflow("predictions", 0, given, features, [table]))
    assert "a weight of the row of key 7 of feature 'seen' in table 'embedding' is 1e+30" in said


def test_the_largest_weight_of_a_feature_is_named_too(tmp_path):
    with shoal.local() as store:
        torch.manual_seed(5)
        model = ClickModel(DeepFM(tables(store), 2, dim=4, hidden=(8,)), store=store)
        values = np.array([1, 1, 1, 3e38], np.float32)
        batch = Batch(np.array([0, 1], np.float32), np.array([0, 2, 4]), np.array([1, 2, 1, 2], np.uint64), values)
        with pytest.raises(ValueError, match=r"examples 1 to 2 .* field 1 is 3e\+38 in its example 1, by key 2:"):
            model.learn(batch, model.prepare(batch), model.accumulator())
