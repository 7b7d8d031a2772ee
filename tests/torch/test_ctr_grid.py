"""Grids of click models: each as if it were trained alone, and the command line."""

import json
import tomllib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.cli.reading import schema_of  # noqa: E402
from shoal.models.plan import early_stopping_of  # noqa: E402
from shoal.torch import ClickModelGrid  # noqa: E402
from shoal.torch.config import build, parse  # noqa: E402

CONFIG = """
[data]
format = "csv"
label = "click"
categorical = ["user", "ad"]
numeric = ["price"]
dense = ["price"]
[model]
name = "deepfm"
dim = 4
hidden = [8]
dropout = 0.3
[tables]
optimizer = { name = "Adagrad", lr = 0.05 }
expire = ["ttl:20"]
[train]
batch_size = 50
epochs = 4
patience = 1
"""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A log in which users like some ads, and a configuration."""
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(4)
    files = {}
    for name, count in (("train", 600), ("valid", 300)):
        rows = ["click,user,ad,price"]
        for _ in range(count):
            user, ad, price = random.integers(0, 40), random.integers(0, 9), random.random()
            rows.append(f"{int(random.random() < (0.7 if (user + ad) % 3 == 0 else 0.2))},{user},{ad},{price:.3f}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
        files[name] = f'{"data" if name == "train" else name} = ["{folder / name}.csv"]'
    (folder / "ctr.toml").write_text(CONFIG.replace("[data]", "\n".join(["[data]", *files.values()])))
    return folder


def config_of(clicks):
    return shoal.torch.config.read(clicks / "ctr.toml")


def readers(config):
    return [
        shoal.read_csv(list(files), batch_size=config.train.batch_size, **schema_of(config.data, "csv"))
        for files in (config.data.data, config.data.valid)
    ]


def status_of(command):
    """Run a command; argparse ends the process where it refuses an option."""
    try:
        return main(command)
    except SystemExit as ended:
        return ended.code


def weights_of(model):
    rows = [table.digest() for table in model.tables]
    return rows, [parameter.detach().numpy().tobytes() for parameter in model.module.parameters()]


@pytest.mark.slow
def test_each_model_of_a_grid_has_the_bits_of_one_that_is_trained_alone(clicks):
    config = config_of(clicks)
    values = {"model.dim": [2, 4], "train.optimizer.lr": [0.001, 0.05], "tables.optimizer.lr": [0.05]}
    with ClickModelGrid(config, values) as grid:
        train, valid = readers(config)
        grid.fit(train, valid=valid, progress=False)
        assert len(grid) == 4
        stopped = set()
        for model, alone in zip(grid.models, grid.configs, strict=True):
            with shoal.local() as store:
                twin = build(alone, store)
                how = {"epochs": alone.train.epochs, "shuffle": alone.train.shuffle}
                early_stopping = early_stopping_of(alone.train)
                twin.fit(train, valid=valid, progress=False, early_stopping=early_stopping, **how)
                assert weights_of(model) == weights_of(twin)
                assert [one.valid for one in model.history.passes] == [one.valid for one in twin.history.passes]
                stopped.add(len(twin.history.passes))
        assert len(stopped) > 1  # early stopping ends them after different passes
        best = grid.results()[0]
        assert best.valid.logloss == min(result.valid.logloss for result in grid.results())
        assert grid.best("auc") is grid.results("auc")[0].model
        with pytest.raises(ValueError, match="metric is 'gauc', which is of validation data with groups"):
            grid.results("gauc")


@pytest.mark.slow
def test_a_grid_varies_the_architecture_and_leaves_torchs_random_numbers_alone(clicks):
    config = config_of(clicks)
    before = torch.get_rng_state()
    with ClickModelGrid(config, {"model.name": ["deepfm", "dcnv2"]}, slots=64) as grid:
        train, valid = readers(config)
        grid.fit(train, valid=valid, progress=False)
        assert [type(model.module).__name__ for model in grid.models] == ["DeepFM", "DCNV2"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "the grid is empty"),
        ({"model.dim": []}, "no value for 'model.dim'"),
        ({"model.dim": [4, 4]}, "'model.dim' twice"),
        ({"train.batch_size": [10, 20]}, "cannot vary 'train.batch_size'"),
        ({"batch_size": [10, 20]}, "cannot vary 'batch_size'"),
        ({"model.dims": [4]}, r"with model.dims=4: \[model\] of deepfm has no key 'dims': did you mean 'dim'"),
        ({"model.dim": ["four"]}, "with model.dim=four: "),
        ({"tables.rules.linear.lr": [1.0]}, "the configuration has no tables.rules.linear: add it"),
    ],
)
def test_what_is_wrong_with_a_grid_is_told(clicks, values, says):
    with pytest.raises(ValueError, match=says):
        ClickModelGrid(config_of(clicks), values)
    with pytest.raises(ValueError, match="not fitted"), ClickModelGrid(config_of(clicks), {"model.dim": [2]}) as grid:
        grid.results()


def test_a_grid_refuses_rows_that_are_pulled_ahead(clicks):
    text = (clicks / "ctr.toml").read_text().replace("[train]", "[train]\nstaleness = 1")
    with pytest.raises(ValueError, match="staleness is 1"):
        ClickModelGrid(parse(tomllib.loads(text)), {"model.dim": [2]})


@pytest.mark.slow
def test_the_command_saves_the_best_model_or_all(clicks, tmp_path, capsys):
    command = ["train", "ctr", "--config", str(clicks / "ctr.toml"), "--grid", "model.dim=2,4"]
    command += ["--grid", "train.optimizer.lr=0.001,0.05"]
    assert main([*command, "--output", str(tmp_path / "best")]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == [
        "model.dim",
        "train.optimizer.lr",
        "logloss",
        "AUC",
        "valid",
        "logloss",
        "valid",
        "AUC",
        "dense",
        "parameters",
    ]
    assert main([*command, "--output", str(tmp_path / "all"), "--save-all", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == sorted(
        f"model.dim={dim},train.optimizer.lr={lr}" for dim in (2, 4) for lr in ("0.001", "0.05")
    )
    best, valid = facts["grid"][0], str(clicks / "valid.csv")
    for folder in (tmp_path / "best", best["model"]):
        assert main(["evaluate", str(folder), "--data", valid, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["logloss"] == pytest.approx(best["valid"]["logloss"], rel=1e-6)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--grid", "model.dim"], "is not a setting with values"),
        (["--grid", "model.dim=2", "--grid", "model.dim=4"], "names a setting twice"),
        (["--grid", "model.dim=2", "--resume"], "--grid writes no checkpoints"),
        (["--grid", "model.dim=2", "--cluster", "tcp://127.0.0.1:1"], "--grid trains in one process"),
        (["--save-all"], "--save-all requires --grid"),
    ],
)
def test_the_command_tells_what_is_wrong(clicks, tmp_path, capsys, more, says):
    command = ["train", "ctr", "--config", str(clicks / "ctr.toml"), "--output", str(tmp_path / "model"), *more]
    assert status_of(command) != 0
    assert says in capsys.readouterr().err
