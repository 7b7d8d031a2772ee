"""What the command line shows of the inside of models: names and rows."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="click models are torch modules")

import shoal
from shoal.cli import main

CONFIG = """
[data]
format = "csv"
data = ["train.csv"]
valid = ["valid.csv"]
label = "click"
{features}
[model]
name = "deepfm"
dim = 4
hidden = [8]
[train]
batch_size = 100
[tables]
optimizer = {{ name = "Adam", lr = 0.02 }}
"""

FEATURES = [
    'name = "user"',
    'name = "ad"',
    'name = "site"',
    'name = "price"\ntype = "bucket"\nedges = [2.5, 5.0]',
    'name = "seen"\ntype = "sequence"\nshare = "ad"',
    'name = "both"\ntype = "cross"\nof = ["user", "ad"]',
]


def write_logs(folder: Path) -> None:
    random = np.random.default_rng(8)
    for name, count in (("train", 1200), ("valid", 600)):
        lines = ["click,user,ad,site,price,seen"]
        for _ in range(count):
            user, ad, site = random.integers(0, 12), random.integers(0, 9), random.integers(0, 4)
            seen = [f"a{x}" for x in random.integers(0, 9, random.integers(0, 4))]
            margin = 2.0 * (user % 3) + 0.2 * (ad % 4) - 2
            click = int(random.random() < 1 / (1 + np.exp(-margin)))
            where = f"s{site}" if site else ""
            lines.append(f"{click},u{user},a{ad},{where},{10 * random.random():.3f},{'|'.join(seen)}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A log, a click model with names in ``clicks``, and a linear one in ``lr``."""
    folder = tmp_path_factory.mktemp("inside")
    write_logs(folder)
    features = "\n".join(f"[[features]]\n{one}" for one in FEATURES)
    (folder / "c.toml").write_text(CONFIG.format(features=features))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "ctr", "--config", "c.toml", "--names", "--output", "clicks", "--quiet"]) == 0
        linear = ["--format", "csv", "--label", "click", "--numeric", "price", "--ignore", "seen"]
        assert main(["train", "lr", "--data", "train.csv", *linear, "--names", "--output", "lr", "--quiet"]) == 0
    return folder


@pytest.fixture(autouse=True)
def there(models, monkeypatch):
    monkeypatch.chdir(models)


def run(capsys, *words) -> dict:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_kept_with_a_click_model(models, capsys):
    names = shoal.models.load_names("clicks")
    assert {f"user=u{i}" for i in range(12)} | {f"ad=a{i}" for i in range(9)} <= set(names.values())
    assert shoal.hash_strings(["a3"], field=int(shoal.hash_strings(["ad"])[0]))[0] in names
    assert run(capsys, "inspect", "clicks")["names"] == len(names)
    with shoal.torch.load("clicks") as model:
        model.save("again", names=names)
        assert shoal.models.load_names("again") == names
        model.save("again", overwrite=True)
    assert shoal.models.load_names("again") is None
    shutil.rmtree("again")


def test_names_are_added_to_a_finished_fit_of_a_click_model(models, capsys):
    command = ["train", "ctr", "--config", "c.toml", "--output", "late", "--quiet"]
    assert main(command) == 0
    assert shoal.models.load_names("late") is None
    assert main([*command, "--resume", "--names"]) == 0
    assert shoal.models.load_names("late") == shoal.models.load_names("clicks")
    with shoal.torch.load("late") as late, shoal.torch.load("clicks") as model:
        assert [table.digest() for table in late.tables] == [table.digest() for table in model.tables]
