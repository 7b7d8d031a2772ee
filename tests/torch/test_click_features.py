"""Click models over features of every type, from text and from Parquet, by a file and in Python."""

import json

import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")
pyarrow = pytest.importorskip("pyarrow", reason="the log is written as Parquet too")
parquet = pytest.importorskip("pyarrow.parquet")

import shoal  # noqa: E402
from shoal.cli import main  # noqa: E402
from shoal.torch.config import parse  # noqa: E402

FEATURES = [
    {"name": "user"},
    {"name": "ad"},
    {"name": "kind"},
    {"name": "price", "type": "number", "log": True},
    {"name": "range", "column": "price", "type": "bucket", "quantiles": 4},
    {"name": "user_range", "type": "cross", "of": ["user", "range"]},
    {"name": "tags", "type": "list", "weights": "scores", "pooling": "attention"},
    {"name": "liked", "type": "cross", "of": ["ad", "tags"], "pooling": "sum"},
    {"name": "seen", "type": "sequence", "share": "ad", "side": {"kinds": "kind"}, "max_len": 3},
    {"name": "bought", "type": "sequence", "share": "ad", "pooling": "max"},
    {"name": "image", "type": "vector", "size": 2},
]
DWELL = {"side_numeric": ["dwell"]}
ROWS = 400


@pytest.fixture
def log(tmp_path, rng):
    """A log of every type of column as csv and Parquet; items of lists, and cells, may be missing."""
    rows = []
    for _ in range(ROWS):
        user, ad = int(rng.integers(8)), int(rng.integers(9))
        seen = rng.integers(0, 9, rng.integers(0, 6)).tolist()
        tags = rng.integers(0, 5, rng.integers(0, 4)).tolist()
        rows.append(
            {
                "click": int(rng.random() < (0.8 if ad in seen else 0.2)),
                "user": None if rng.random() < 0.1 else f"u{user}",
                "ad": f"a{ad}",
                "kind": f"k{ad % 3}",
                "price": None if rng.random() < 0.1 else round(float(rng.lognormal()), 3),
                "tags": [f"t{one}" for one in tags] or None,
                "scores": [round(float(rng.random()), 2) for _ in tags] or None,
                "seen": [f"a{one}" for one in seen] or None,
                "kinds": [None if rng.random() < 0.2 else f"k{one % 3}" for one in seen] or None,
                "dwell": [None if rng.random() < 0.2 else round(float(rng.random()), 2) for _ in seen] or None,
                "bought": [f"a{one}" for one in rng.integers(0, 9, rng.integers(0, 3))] or None,
                "image": [round(float(one), 2) for one in rng.random(2)] if rng.random() < 0.9 else None,
            }
        )
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "log.parquet")

    def text(cell) -> str:
        if isinstance(cell, list):
            return "|".join(map(text, cell))
        return "" if cell is None else str(cell)

    lines = [",".join(text(cell) for cell in row.values()) for row in rows]
    (tmp_path / "log.csv").write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return tmp_path


def raw(log, form: str, model: str, **more) -> dict:
    features = [one | DWELL if one["name"] == "seen" and model == "din" else one for one in FEATURES]
    return {
        "data": {"data": [str(log / f"log.{form}")], "format": form, "label": "click"},
        "features": features,
        "model": {"name": model, "dim": 4, "hidden": [8], **more},
        "train": {"batch_size": 50, "seed": 3},
    }


def trained(log, form: str, model: str, tmp_path, **more):
    """Train by the command: the digests of the tables and the predictions of the other form's file."""
    given = raw(log, form, model, **more)
    path = tmp_path / f"{form}.toml"
    data = "".join(f"{name} = {json.dumps(value)}\n" for name, value in given["data"].items())
    rest = {name: given[name] for name in ("model", "train")}
    text = "[data]\n" + data
    for one in given["features"]:
        text += "[[features]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in one.items())
    for name, section in rest.items():
        text += f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
    path.write_text(text)
    output = tmp_path / f"{form}-{model}"
    assert main(["train", "ctr", "--config", str(path), "--output", str(output), "--quiet"]) == 0
    other = log / f"log.{'csv' if form == 'parquet' else 'parquet'}"
    probabilities = tmp_path / f"{form}.txt"
    how = ["--data", str(other), "--format", other.suffix[1:], "--output", str(probabilities), "--overwrite", "--quiet"]
    assert main(["predict", str(output), *how]) == 0
    with shoal.load(output) as loaded:
        edges = loaded.features["range"].edges
        return {name: table.digest() for name, table in loaded.store.tables.items()}, probabilities.read_text(), edges


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepfm", "din"])
def test_text_and_parquet_train_the_same_bits_with_features_of_every_type(log, tmp_path, model):
    csv, columns = (trained(log, form, model, tmp_path) for form in ("csv", "parquet"))
    assert csv == columns
    assert len(csv[1].splitlines()) == ROWS
    assert len(set(csv[1].splitlines())) > ROWS / 2
    assert len(csv[2]) == 3


@pytest.mark.slow
def test_a_model_learns_that_the_ad_was_seen(log, tmp_path):
    """Whether the ad is among those seen is what clicks depend on: attention finds it."""
    given = raw(log, "csv", "din", attention=[8])
    given["features"] = [one for one in given["features"] if one["name"] in ("ad", "kind", "seen")]
    given["tables"] = {"optimizer": {"name": "Adagrad", "lr": 0.2}, "init": {"name": "Normal", "std": 0.5}}
    given["train"] |= {"optimizer": {"name": "Adam", "lr": 0.01}}
    config = parse(given)
    with shoal.local(threads=1) as store:
        model = shoal.torch.config.build(config, store)
        reader = shoal.read_csv(log / "log.csv", label="click", batch_size=50, **model.features.columns)
        model.fit(reader, epochs=30, progress=False)
        assert model.evaluate(reader).auc > 0.75


@pytest.mark.slow
def test_an_older_file_names_the_same_features_by_roles(log):
    """Columns by their roles are features: the bits of the model are those of the same features by name."""
    data = {"categorical": ["user", "ad"], "numeric": ["price"], "dense": ["price"], "log": True}
    data |= {"history": "seen", "item": "ad"}
    features = [
        {"name": "user"},
        {"name": "ad"},
        {"name": "price", "type": "number", "log": True},
        {"name": "seen", "type": "sequence", "share": "ad"},
    ]
    found = []
    for older in (True, False):
        given = raw(log, "csv", "din")
        given["data"] |= data if older else {}
        given["features"] = [] if older else features
        with shoal.local(threads=1) as store:
            model = shoal.torch.config.build(parse(given), store)
            reader = shoal.read_csv(log / "log.csv", label="click", batch_size=50, **model.features.columns)
            model.fit(reader, progress=False)
            found.append((model.features.to_json(), {name: one.digest() for name, one in store.tables.items()}))
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=r"\[data\] has categorical, and there are \[\[features\]\]"):
        parse(raw(log, "csv", "din") | {"data": raw(log, "csv", "din")["data"] | {"categorical": ["user"]}})


def test_a_stream_has_no_first_examples_for_quantiles(log, capsys, monkeypatch, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        '[data]\nformat = "csv"\nlabel = "click"\n[[features]]\nname = "user"\n[[features]]\nname = "price"\n'
        'type = "bucket"\nquantiles = 3\n[model]\nname = "fm"\n'
    )
    with (log / "log.csv").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["train", "ctr", "--config", str(path), "--data", "-", "--output", str(tmp_path / "m")]) == 2
    assert "quantiles, which are found before a stream is read: give edges" in capsys.readouterr().err


def test_a_reader_that_gives_a_list_other_keys_is_refused(log):
    """Its items would share no row with the item, without a word."""
    features = shoal.torch.Features(["ad", {"name": "seen", "type": "sequence", "share": "ad"}])
    with shoal.local(threads=1) as store:
        module = shoal.torch.models.DeepFM(shoal.torch.tables(store), features, dim=2, hidden=(4,))
        model = shoal.torch.ClickModel(module, store=store)
        own = shoal.read_csv(log / "log.csv", label="click", categorical=["ad"], lists={"seen": "seen"})
        with pytest.raises(
            ValueError, match=r"'seen' is read with the keys of 'seen', .* read it with lists={'seen': 'ad'"
        ):
            model.fit(own, progress=False)
        text = shoal.read_csv(log / "log.csv", label="click", categorical=["ad", "seen"])
        with pytest.raises(ValueError, match="column 'seen' is read as categorical, and its feature needs lists"):
            model.fit(text, progress=False)
        assert model.examples == 0
