"""Every click model from a configuration: the command trains and saves it, and what is loaded has the same bits."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")

import shoal  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.torch.config import build, load, read, schema_of  # noqa: E402
from shoal.torch.models import MODELS  # noqa: E402
from tiers import long_but  # noqa: E402

LABEL, LABELS = 'label = "click"', 'labels = { ctr = "click", cvr = "conv" }'
USUAL = ("lr", "bst", "mmoe", "two_tower")
SEVERAL, DENSELESS = ("mmoe", "ple", "esmm"), ("lr", "fm", "fwfm")


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Clicks of users who like some ads, more of those that they have seen; some buy."""
    random = np.random.default_rng(8)
    rows = []
    for _ in range(600):
        user, ad = (int(one) for one in random.integers(0, 9, 2))
        seen = "|".join(f"a{one}" for one in random.integers(0, 9, random.integers(0, 6)))
        margin = 2 * ((7 * user + 3 * ad) % 3 == 0) - 1.5 + (f"a{ad}" in seen.split("|"))
        click = int(random.random() < 1 / (1 + np.exp(-margin)))
        rows.append(f"{click},{int(click and ad > 4)},u{user},a{ad},{seen},{random.random():.3f}")
    path = tmp_path_factory.mktemp("log") / "log.csv"
    path.write_text("\n".join(["click,conv,user,ad,seen,price", *rows]) + "\n")
    return path


def config(log: Path, name: str) -> str:
    features = ['name = "user"', 'name = "ad"', 'name = "seen"\ntype = "sequence"\nshare = "ad"\nmax_len = 4']
    if name not in DENSELESS:
        features.append('name = "price"\ntype = "number"')
    model = {"name": f'"{name}"'} | ({} if name == "lr" else {"dim": 4})
    model |= {} if name in DENSELESS else {"hidden": [8]}
    model |= {"user": '["user", "seen"]', "item": '["ad", "price"]'} if name == "two_tower" else {}
    parts = [
        f'[data]\nformat = "csv"\ndata = ["{log}"]\n{LABELS if name in SEVERAL else LABEL}',
        *(f"[[features]]\n{one}" for one in features),
        "[model]\n" + "\n".join(f"{key} = {value}" for key, value in model.items()),
        '[tables]\noptimizer = { name = "Adagrad", lr = 0.1 }',
        '[train]\nbatch_size = 50\nepochs = 3\nseed = 4\noptimizer = { name = "Adam", lr = 0.01 }',
    ]
    return "\n".join(parts) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(USUAL, list(MODELS)))
def test_the_command_trains_a_model_that_is_loaded_to_the_bit(name, log, tmp_path, capsys):
    path, out = tmp_path / "ctr.toml", str(tmp_path / "model")
    path.write_text(config(log, name))
    assert main(["train", "ctr", "--config", str(path), "--output", out, "--quiet"]) == 0
    described = read(path)
    with shoal.local() as store, load(out) as loaded:
        reader = shoal.read_csv(log, label="click", batch_size=50, **schema_of(described))
        model = build(described, store).fit(reader, epochs=3, progress=False)
        expected, found = model.predict_tasks(reader), loaded.predict_tasks(reader)
        assert list(found) == list(expected)
        for task, its in expected.items():
            np.testing.assert_array_equal(found[task], its)
        assert model.evaluate(reader).auc > 0.55
