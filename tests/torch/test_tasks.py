"""Models of several labels: losses, masks, what is measured and predicted."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="models are torch modules")

import shoal  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.metrics import auc, logloss  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs  # noqa: E402
from shoal.torch.losses import loss_of  # noqa: E402
from shoal.torch.model import Model, by_task, check_losses, losses_of  # noqa: E402
from shoal.torch.models.layers import Lookup, look_up  # noqa: E402

LABELS = {
    "ctr": "click",
    "cvr": {"column": "conv", "mask": "ctr", "weight": 2.0},
    "spend": {"column": "revenue", "loss": "poisson"},
    "stay": {"column": "seconds", "loss": "mse", "weight": 0.5},
}


class Shared(Model):
    """A linear output of the rows for each task."""

    def __init__(self, make, features, *, dim: int = 4):
        super().__init__(features)
        self.embedding = Lookup(make, "embedding", self.features, dim)
        self.outs = torch.nn.ModuleDict({task: torch.nn.Linear(dim, 1) for task in self.features.tasks})

    def forward(self, x):
        (rows,) = look_up(x, self.embedding)
        pooled = rows.fields.sum(dim=1)
        return {task: out(pooled).squeeze(1) for task, out in self.outs.items()}

    def metrics(self, outputs, labels, weights):
        assert outputs.keys() == labels.keys()
        assert weights is None
        return {"paired": float(np.corrcoef(outputs["spend"], labels["spend"])[0, 1])}


@pytest.fixture
def log(tmp_path, rng):
    """Clicks that depend on the user, conversions on the ad, some unknown; and numbers."""
    rows = []
    for _ in range(600):
        user, ad = rng.integers(0, 6, 2)
        click = int(rng.random() < user / 6)
        conv = "" if rng.random() < 0.1 else str(int(click and rng.random() < ad / 6))
        rows.append(f"{click},{conv},{rng.poisson(1 + ad)},{float(user)},u{user},a{ad}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["click,conv,revenue,seconds,user,ad", *rows]) + "\n")
    return path


def fitted(log, store, features=None):
    torch.manual_seed(3)
    features = features or Features(["user", "ad"], labels=LABELS)
    module = Shared(shoal.torch.tables(store, shoal.Adagrad(lr=0.3)), features)
    reader = shoal.read_csv(log, label="click", batch_size=50, **features.columns)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    model = shoal.torch.ClickModel(module, store=store, optimizer=optimizer)
    return model.fit(reader, epochs=8, progress=False), reader


@pytest.mark.slow
def test_every_task_is_learned_measured_and_predicted(log):
    columns = np.genfromtxt(log, delimiter=",", skip_header=1, usecols=range(4))
    click, conv, revenue, seconds = columns.T
    with shoal.local(threads=1) as store:
        model, reader = fitted(log, store)
        found, predicted = model.evaluate_tasks(reader), model.predict_tasks(reader)
        assert list(predicted) == ["ctr", "cvr", "spend", "stay"]
        assert list(found) == [*predicted, "paired"]
        spent = np.log(predicted["spend"])
        np.testing.assert_array_equal(predicted["ctr"], model.probabilities(reader))
        assert str(found["ctr"]) == str(model.evaluate(reader))
        (unlabelled := log.with_name("new.csv")).write_text("user,ad\nu1,a2\nu3,a4\n")
        new = shoal.read_csv(unlabelled, **reader.schema).unlabelled()
        assert [len(one) for one in model.predict_tasks(new).values()] == [2, 2, 2, 2]
        assert len(model.probabilities(new)) == 2
    assert found["paired"] == pytest.approx(np.corrcoef(spent, revenue)[0, 1])
    counted = (click == 1) & ~np.isnan(conv)
    assert found["cvr"].examples == counted.sum() < 600
    margins = np.log(predicted["cvr"]) - np.log1p(-predicted["cvr"])
    assert found["cvr"].logloss == pytest.approx(logloss(conv[counted], margins[counted]), rel=1e-6)
    assert found["cvr"].auc == pytest.approx(auc(conv[counted], margins[counted]))
    assert found["cvr"].auc > 0.75
    assert found["spend"].mse == pytest.approx(np.mean((predicted["spend"] - revenue) ** 2))
    assert found["spend"].mae == pytest.approx(np.mean(np.abs(predicted["spend"] - revenue)))
    assert found["spend"].calibration == pytest.approx(revenue.sum() / predicted["spend"].sum())
    assert abs(found["spend"].calibration - 1) < 0.1
    assert found["stay"].mse < 0.3 * seconds.var()


def test_the_loss_is_the_sum_of_the_tasks_means_over_all_examples(rng):
    n = 30
    features = Features(["user"], labels=LABELS)
    names = list(features.tasks)
    outputs = {name: torch.from_numpy(rng.standard_normal(n)).requires_grad_() for name in names}
    labels = {name: torch.from_numpy(rng.integers(0, 2, n).astype(np.float64)) for name in names}
    labels["cvr"][3], labels["spend"][4] = math.nan, math.nan
    model = Model(features)
    for weights in (None, torch.from_numpy(rng.random(n))):
        got = model.loss(outputs, Inputs(torch.zeros(n, 1)), labels, weights, losses_of(features))
        expected = 0.0
        for i in range(n):
            w = 1.0 if weights is None else float(weights[i])
            z, y = ({name: float(one[i].detach()) for name, one in given.items()} for given in (outputs, labels))
            expected += w * (math.log1p(math.exp(z["ctr"])) - y["ctr"] * z["ctr"])
            if y["ctr"] == 1 and not math.isnan(y["cvr"]):
                expected += 2 * w * (math.log1p(math.exp(z["cvr"])) - y["cvr"] * z["cvr"])
            if not math.isnan(y["spend"]):
                expected += w * (math.exp(z["spend"]) - y["spend"] * z["spend"])
            expected += 0.5 * w * (z["stay"] - y["stay"]) ** 2
        assert float(got.detach()) == pytest.approx(expected / n, rel=1e-9)
    got.backward()
    assert outputs["cvr"].grad[3] == outputs["spend"].grad[4] == 0


@pytest.mark.parametrize("loss", ["bce", "focal", "mse", "poisson"])
def test_no_weights_are_weights_of_1(rng, loss):
    outputs, labels = torch.from_numpy(rng.standard_normal(9)), torch.from_numpy(rng.integers(0, 2, 9).astype(float))
    assert loss_of(loss)(outputs, labels, None) == loss_of(loss)(outputs, labels, torch.ones(9, dtype=torch.float64))


def test_what_a_model_returns_and_labels_that_do_not_fit_are_told():
    features = Features(["user"], labels={"ctr": "click", "cvr": "conv"})
    with pytest.raises(ValueError, match="the model returns cvr, and none is the first label, 'ctr'"):
        by_task({"cvr": torch.zeros(2)}, features)
    with pytest.raises(ValueError, match="the first label, 'spend', is a number"):
        check_losses(Features(["user"], labels={"spend": {"column": "x", "loss": "mse"}}))
    with pytest.raises(ValueError, match="has no loss 'bec': did you mean 'bce'"):
        check_losses(Features(["user"], labels={"ctr": {"column": "x", "loss": "bec"}}))
    with pytest.raises(ValueError, match=r"outputs for \['a'\], and labels for \['b'\]"):
        Model(features).loss({"a": torch.zeros(1)}, Inputs(torch.zeros(1, 1)), {"b": torch.zeros(1)}, None, {})


def test_a_model_without_named_labels_has_one_task(log):
    with shoal.local(threads=1) as store:
        features = Features(["user", "ad"])
        module = shoal.torch.models.LR(shoal.torch.tables(store), features)
        reader = shoal.read_csv(log, label="click", **features.columns)
        model = shoal.torch.ClickModel(module, store=store).fit(reader, progress=False)
        assert {name: str(its) for name, its in model.evaluate_tasks(reader).items()} == {
            "label": str(model.evaluate(reader))
        }
        assert list(model.predict_tasks(reader)) == ["label"]
        assert model.features.to_json()["labels"] == {}


@pytest.mark.slow
def test_the_commands_measure_and_predict_every_task(log, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = 'labels = { ctr = "click", cvr = { column = "conv", mask = "ctr" } }'
    features = "".join(f'[[features]]\nname = "{name}"\n' for name in ("user", "ad"))
    model = '[model]\nname = "mmoe"\ndim = 4\nhidden = [8]\n[train]\nbatch_size = 50\n'
    (tmp_path / "c.toml").write_text(f'[data]\nformat = "csv"\ndata = ["{log}"]\n{labels}\n{features}{model}')
    assert main(["train", "ctr", "--config", "c.toml", "--output", "m", "--quiet"]) == 0
    assert main(["evaluate", "m", "--data", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["ctr"]["logloss"] == found["logloss"]
    assert 0 < found["tasks"]["cvr"]["examples"] < found["examples"] == 600
    with shoal.load("m") as loaded:
        reader = shoal.read_csv(log, **loaded.schema)
        predicted = loaded.predict_tasks(reader)
    for task in ("ctr", "cvr"):
        assert main(["predict", "m", "--data", str(log), "--task", task, "--output", f"{task}.txt", "--quiet"]) == 0
        np.testing.assert_array_equal(np.loadtxt(f"{task}.txt"), predicted[task])
    assert main(["predict", "m", "--data", str(log), "--task", "cvt", "--output", "no.txt"]) == 2
    assert "--task cvt: this model has the tasks ctr, cvr" in capsys.readouterr().err
