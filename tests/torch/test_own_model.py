"""A model of a user's own: allowed, trained, evaluated, predicted and exported by the commands."""

import importlib
import json
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="models are torch modules")

import shoal  # noqa: E402
from shoal.base import own_code  # noqa: E402
from shoal.cli import main  # noqa: E402

CODE = """\
import torch

from shoal.torch import Model
from shoal.torch.models import Lookup, look_up


class Gated(Model):
    def __init__(self, make, features, *, dim: int = 4):
        super().__init__(features)
        self.embedding = Lookup(make, "embedding", self.features, dim)
        self.gates = Lookup(make, "gates", self.features, 1)
        self.last = torch.nn.Linear(self.embedding.count * dim, 1)

    def forward(self, x):
        rows, gates = look_up(x, self.embedding, self.gates)
        return self.last((rows.fields * torch.sigmoid(gates.fields)).flatten(start_dim=1)).squeeze(1)


class NoModel(torch.nn.Module):
    pass
"""

CONFIG = """\
[data]
data = ["{folder}/x.csv"]
format = "csv"
label = "y"
[[features]]
name = "user"
[[features]]
name = "ad"
[model]
name = "{name}"
dim = 3
[tables.rules.gates]
optimizer = {{ name = "SGD", lr = 0.5 }}
[train]
batch_size = 50
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """A folder with examples and the module, of a name of its own; nothing is allowed before, nor afterwards."""
    monkeypatch.setattr(own_code, "_allowed", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(CODE)
    lines = [f"{user % 2},u{user},a{ad}" for user, ad in rng.integers(0, 9, (300, 2))]
    (tmp_path / "x.csv").write_text("\n".join(["y,user,ad", *lines]) + "\n")
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("own_models", None)


def written(folder, name: str = "own_models:Gated") -> str:
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, name=name))
    return str(path)


@pytest.mark.slow
def test_a_model_of_ones_own_goes_through_all_commands(folder, capsys):
    config, allow = written(folder), ["--import", "own_models"]
    assert main(["train", "ctr", "--config", config, *allow, "--output", "m", "--quiet"]) == 0
    assert main(["evaluate", "m", "--data", "x.csv", *allow, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] > 0.9
    assert main(["predict", "m", "--data", "x.csv", *allow, "--output", "p.txt", "--quiet"]) == 0
    expected = np.loadtxt("p.txt")
    with shoal.torch.load("m", imports=["own_models"]) as model:
        table = model.store.tables["gates"]
        assert (table.dim, table.optimizer) == (1, shoal.SGD(lr=0.5))
        assert model.made_by["code"]["module"] == "own_models"
        assert len(model.made_by["code"]["digest"]) == 64
        reader = shoal.read_csv("x.csv", label="y")
        np.testing.assert_array_equal(model.probabilities(reader), expected)
    assert main(["report", "m", *allow, "--quiet"]) == 0
    assert main(["export", "m", "--output", "e", "--quiet"]) == 0
    with shoal.export.open("e") as exported:
        assert sorted(exported.tables) == ["embedding", "gates"]
    with shoal.serve.ServedModel("e") as served:
        np.testing.assert_array_equal(served.now.predictor.probabilities(reader), expected)


@pytest.mark.slow
def test_evaluate_has_the_metrics_of_a_model_of_ones_own(folder, capsys):
    own = """

class Counting(Gated):
    def metrics(self, outputs, labels, weights):
        return {"clicks": float(sum(next(iter(labels.values()))))}
"""
    (folder / "own_models.py").write_text(CODE + own)
    config, allow = written(folder, "own_models:Counting"), ["--import", "own_models"]
    assert main(["train", "ctr", "--config", config, *allow, "--output", "m", "--quiet"]) == 0
    clicks = float(sum(int(line[0]) for line in (folder / "x.csv").read_text().split()[1:]))
    assert main(["evaluate", "m", "--data", "x.csv", *allow, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["clicks"] == clicks
    assert main(["evaluate", "m", "--data", "x.csv", *allow]) == 0
    assert f"\nclicks       {clicks}\n" in capsys.readouterr().out


def test_no_code_is_imported_that_was_not_allowed(folder, capsys, caplog):
    config = written(folder)
    assert main(["train", "ctr", "--config", config, "--output", "m"]) == 2
    assert "imported only if you allow it: pass --import own_models" in capsys.readouterr().err
    assert "own_models" not in sys.modules
    assert main(["train", "ctr", "--config", config, "--import", "own_models", "--output", "m", "--quiet"]) == 0
    own_code._allowed.clear()
    with pytest.raises(ValueError, match=r"in Python shoal.torch.load\(..., imports=\['own_models'\]\)"):
        shoal.torch.load("m")
    (folder / "own_models.py").write_text(CODE + "\n# changed\n")
    shoal.torch.load("m", imports=["own_models"]).close()
    assert "the code of own_models:Gated has changed since the model was saved" in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_models:Gatd", "own_models has no Gatd"),
        ("own_models:NoModel", "no subclass of shoal.torch.Model"),
        ("own_models.more:Gated", "own_models.more cannot be imported: ModuleNotFoundError"),
        ("other:Gated", "pass --import other"),
    ],
)
def test_what_is_wrong_with_a_model_of_ones_own_is_told(folder, capsys, name, says):
    assert main(["train", "ctr", "--config", written(folder, name), "--import", "own_models", "--output", "m"]) == 2
    assert says in capsys.readouterr().err
    assert main(["train", "ctr", "--config", written(folder), "--import", "own-models", "--output", "m"]) == 2
    assert "'own-models' is not the name of a package" in capsys.readouterr().err
