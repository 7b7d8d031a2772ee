"""What the command line shows of the inside of models: names and rows."""

import json
import re
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_names_are_added_to_a_finished_fit_of_a_click_model(models, capsys):
    command = ["train", "ctr", "--config", "c.toml", "--output", "late", "--quiet"]
    assert main(command) == 0
    assert shoal.models.load_names("late") is None
    assert main([*command, "--resume", "--names"]) == 0
    assert shoal.models.load_names("late") == shoal.models.load_names("clicks")
    with shoal.torch.load("late") as late, shoal.torch.load("clicks") as model:
        assert [table.digest() for table in late.tables] == [table.digest() for table in model.tables]


# ---- rows ------------------------------------------------------------------------------------------------------------


def key(column: str, text: str) -> int:
    return int(shoal.hash_strings([text], field=int(shoal.hash_strings([column])[0]))[0])


def test_the_rows_of_features_of_a_click_model(models, capsys):
    names = ["ad=a3", "seen=a3", "price=3.5", "site=", "user=u1 * ad=a3", "user=nobody"]
    rows = run(capsys, "inspect", "clicks", *(word for name in names for word in ("--row", name)))["rows"]
    assert [row["name"] for row in rows] == names
    assert rows[0]["key"] == rows[1]["key"] == key("ad", "a3")
    assert rows[2]["key"] == key("price", "1")
    assert rows[3]["key"] == key("site", "\0missing")
    assert [sorted(row["tables"]) for row in rows[:5]] == [["embedding", "linear"]] * 5
    assert rows[5]["tables"] == {}
    with shoal.torch.load("clicks") as model:
        batch = next(iter(shoal.read_csv("train.csv", **model.schema, batch_size=1200).with_fields()))
        assert np.uint64(rows[4]["key"]) in model.prepare(batch).keys.numpy().view(np.uint64)
        for table in model.tables:
            at = np.array([key("ad", "a3")], np.uint64)
            found = rows[0]["tables"][table.name]
            assert found["weights"] == table.pull(at)[0].tolist()
            assert found["state"] == {name: one[0].tolist() for name, one in table.state(at).items() if name != "w"}
    assert main(["inspect", "clicks", "--row", "ad=a3", "--row", "user=nobody"]) == 0
    text = capsys.readouterr().out
    assert f"row ad=a3: key {key('ad', 'a3')}\n    table " in text
    assert f"row user=nobody: key {key('user', 'nobody')}, in none of " in text


def test_the_rows_of_features_of_a_linear_model(models, capsys):
    rows = run(capsys, "inspect", "lr", "--row", "ad=a3", "--row", "price", "--row", str(key("user", "u1")))["rows"]
    assert [row["key"] for row in rows] == [key("ad", "a3"), key("price", ""), key("user", "u1")]
    with shoal.load("lr") as model:
        for row in rows:
            assert row["tables"]["lr"]["weights"] == model.table.pull(np.array([row["key"]], np.uint64))[0].tolist()
    assert list(rows[0]["tables"]["lr"]["state"]) == ["z", "n"]


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("criteo", "1\t" + "\t".join(["5"] * 13) + "\t" + "\t".join(f"{i:08x}" for i in range(26))),
        ("criteo", "1\t" + "\t".join(["-3"] * 13) + "\t" + "\t".join(f"{i:08x}" for i in range(26))),
        ("vw", "1 |user u1 age:3 |ad a3"),
        ("libffm", "1 0:17:1 1:23:1"),
        ("libsvm", "1 17:1 23:2"),
        ("csv", "click,a,b\n1,3.0,x\n"),
    ],
)
def test_a_name_has_the_key_that_readers_compute(form, line, tmp_path):
    from shoal.data.key_names import key_of_name
    from shoal.data.readers import READERS, field_number

    (tmp_path / "data").write_text(line + "\n")
    how = {"label": "click"} if form == "csv" else {}
    texts = {
        "criteo": [f"I{i}={line.split()[1]}" for i in range(1, 14)] + [f"C{i + 1}={i:08x}" for i in range(26)],
        "vw": ["user=u1", "user=age", "ad=a3"],
        "libffm": ["0=17", "1=23"],
        "libsvm": ["17", "23"],
        "csv": ["a=3.0", "b=x"],
    }[form]
    reader = READERS[form](tmp_path / "data", **how)
    batch = next(iter(reader if form == "libsvm" else reader.with_fields()))
    assert [key_of_name(form, text) for text in texts] == batch.keys.tolist()
    if form != "libsvm":
        assert [field_number(form, text.partition("=")[0]) for text in texts] == batch.fields.tolist()


def test_last_uses_are_shown_of_a_table_that_has_them(models, capsys):
    how = ["--format", "csv", "--label", "click", "--expire", "ttl:100", "--admit", "count:2"]
    assert main(["train", "lr", "--data", "train.csv", *how, "--output", "lean", "--quiet"]) == 0
    marks = run(capsys, "inspect", "lean", "--row", "ad=a3")["rows"][0]["tables"]["lr"]["marks"]
    assert marks["clock"] > 0


def test_the_largest_rows_of_a_click_model_have_names(models, capsys):
    top = run(capsys, "inspect", "clicks", "--top", 12)["top"]
    with shoal.torch.load("clicks") as model:
        linear = next(table for table in model.tables if table.name == "linear")
        keys, norms = linear.topk(12)
        assert [one["key"] for one in top] == keys.tolist()
        assert np.abs([one["weight"] for one in top]) == pytest.approx(norms)
    assert {one["name"] for one in top} & {f"user=u{i}" for i in range(12)}


@pytest.mark.parametrize(
    ("model", "row", "says"),
    [
        ("clicks", "usr=u1", "'usr', none of the features: did you mean 'user'?"),
        ("clicks", "both=3", "'both' is a cross: write user=... * ad=..."),
        ("clicks", "price=dear", "is not a number"),
    ],
)
def test_a_name_that_is_no_feature_is_refused(models, model, row, says, capsys):
    assert main(["inspect", model, "--row", row]) == 2
    assert says in capsys.readouterr().err


# ---- differences -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_click_models_are_compared(models, capsys):
    sets = ["--set", "train.optimizer.lr=0.01", "--set", "train.optimizer.name=Adam"]
    assert main(["train", "ctr", "--config", "c.toml", *sets, "--init-from", "clicks", "--output", "b", "--quiet"]) == 0
    with shoal.torch.load("b") as model, shoal.torch.load("clicks") as before:
        table = next(table for table in model.tables if table.name == "linear")
        table.assign(np.array([key("ad", "new"), key("user", "u1")], np.uint64), np.array([[1.0], [50.0]], np.float32))
        table.erase(np.array([key("ad", "a3")], np.uint64))
        model.save("b", overwrite=True)
        old = next(one for one in before.tables if one.name == "linear")
        keys = np.concatenate([some for some, _ in old.items()])
        keys = keys[table.contains(keys)]
        moved = (table.pull(keys) - old.pull(keys)).astype(np.float64)
        rows = [len(old), len(table)]
        dense = {
            name: float((parameter - own).detach().abs().max() / own.detach().abs().max())
            for (name, parameter), own in zip(model.module.named_parameters(), before.module.parameters(), strict=True)
            if own.numel()
        }
    found = run(capsys, "diff", "clicks", "b", "--top", 3)
    linear = found["tables"]["linear"]
    assert linear["rows"] == rows
    assert (linear["only_in_first"], linear["only_in_second"]) == (1, 1)
    assert linear["changed"] == np.count_nonzero(moved)
    assert linear["norm_of_difference"] == pytest.approx(np.linalg.norm(moved))
    assert linear["largest"][0]["name"] == "user=u1"
    assert len(linear["largest"]) == 3
    assert found["settings"]["click.optimizer.lr"] == [0.001, 0.01]
    assert found["second"]["metrics"]["examples"] == 1200
    assert {name: one["change"] for name, one in found["dense"].items()} == pytest.approx(dense)
    assert main(["diff", "clicks", "b"]) == 0
    text = capsys.readouterr().out
    assert "1 only in A, 1 only in B" in text
    assert "user=u1  (" in text


@pytest.mark.slow
def test_a_model_equals_its_checkpoint_and_its_export(models, capsys):
    assert main(["export", "clicks", "--output", "out", "--quiet"]) == 0
    (folder,) = Path("clicks").glob("checkpoint-*")
    for other in (folder, "out"):
        found = run(capsys, "diff", "clicks", other)
        assert {(one["changed"], one["only_in_second"]) for one in found["tables"].values()} == {(0, 0)}
        assert found["settings"] == {}
    assert set(found["tables"]) == {"linear", "embedding"}
    assert {one["change"] for one in found["dense"].values()} == {0.0}


def test_models_without_common_tables_are_compared_by_their_settings(models, capsys):
    found = run(capsys, "diff", "clicks", "lr")
    assert {one["only_in"] for one in found["tables"].values()} == {"A", "B"}
    assert found["settings"]["kind"] == ["click model", "logistic regression"]


# ---- importance ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_importance_of_features_of_a_click_model(models, capsys):
    found = run(capsys, "importance", "clicks", "--data", "train.csv", "--metric", "auc", "--seed", 3)
    assert found == run(capsys, "importance", "clicks", "--data", "train.csv", "--metric", "auc", "--seed", 3)
    assert {one["name"] for one in found["features"]} == {"user", "ad", "site", "price", "seen"}
    assert found["features"][0]["name"] == "user"
    assert found["features"][0]["low"] > 0.05
    assert all(one["low"] <= one["importance"] <= one["high"] for one in found["features"])
    assert (found["examples"], found["blocks"], found["repeats"]) == (1200, 1, 5)
    assert main(["importance", "clicks", "--data", "train.csv", "--repeats", "2"]) == 0
    assert "]  user\n" in capsys.readouterr().out
    assert main(["importance", "clicks", "--data", "train.csv", "--repeats", "1"]) == 0  # which has no interval
    printed = capsys.readouterr().out
    assert "  user\n" in printed
    assert not {"nan", "interval"} & set(re.findall(r"\w+", printed))


def test_the_importance_of_a_feature_is_the_loss_by_an_exchange_of_its_cells(models):
    import math

    how = {"label": "click", "categorical": ["user", "ad", "site"], "numeric": ["price"]}
    with shoal.load("lr") as model:
        found = shoal.tools.importance(model, shoal.read_csv("valid.csv", **how), repeats=3, block=200)
        rows = [line.split(",") for line in Path("valid.csv").read_text().splitlines()]
        head, rows = rows[0], rows[1:]
        losses = []
        for number in range(3):
            block = rows[200 * number : 200 * number + 200]

            def measured(some):
                Path("block.csv").write_text("\n".join(",".join(row) for row in [head, *some]) + "\n")
                return model.evaluate(shoal.read_csv("block.csv", **how)).logloss

            generator = np.random.default_rng([0, number, *b"user"])
            before = measured(block)
            for _ in range(3):
                order = generator.permutation(200)
                losses.append(
                    measured([[*row[:1], block[i][1], *row[2:]] for row, i in zip(block, order, strict=True)]) - before
                )
    user = next(one for one in found.features if one.name == "user")
    half = 2.306 * np.std(losses, ddof=1) / math.sqrt(9)
    assert found.blocks == 3
    assert (user.importance, user.high - user.low) == pytest.approx((np.mean(losses), 2 * half))


def test_items_move_with_what_is_beside_them():
    from shoal.tools.permutation import _permuted

    lengths = np.array([2, 0, 1])
    batch = shoal.Batch(
        labels=np.zeros(3, np.float32),
        indptr=np.array([0, 5, 6, 9]),
        keys=np.array([1, 10, 2, 11, 50, 51, 3, 12, 52], np.uint64),
        values=None,
        fields=np.array([1, 2, 1, 2, 9, 9, 1, 2, 9], np.uint64),
    )
    moved = _permuted(batch, np.isin(batch.fields, [1, 2]), np.array([2, 0, 1]))
    assert moved.indptr.tolist() == [0, 3, 8, 9]
    own = [moved.keys[moved.indptr[i] : moved.indptr[i + 1]].tolist() for i in range(3)]
    assert [sorted(keys) for keys in own] == [[3, 12, 50], [1, 2, 10, 11, 51], [52]]
    assert [key for key in own[1] if key < 10] == [1, 2]
    assert lengths.sum() == 3


def test_features_of_one_column_are_one():
    from shoal.tools.permutation import _columns_of

    features = shoal.torch.Features(
        [
            {"name": "price", "type": "number"},
            "user",
            {"name": "level", "column": "price", "type": "bucket", "edges": [1.0]},
            {"name": "seen", "type": "sequence", "side": ["kinds"], "side_numeric": ["ages"]},
        ]
    )
    assert _columns_of(features) == {"user": ("user",), "price, level": ("price",), "seen": ("seen", "kinds", "ages")}


# ---- segments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["clicks", "lr"])
def test_metrics_by_segment_are_those_of_its_examples(models, model, capsys):
    how = ["evaluate", model, "--data", "valid.csv", "--segments", "site,seen", "--group", "user"]
    found = run(capsys, *how)
    rows = [line.split(",") for line in Path("valid.csv").read_text().splitlines()[1:]]
    with (shoal.torch.load if model == "clicks" else shoal.load)(model) as loaded:
        margins = loaded.decision_function(loaded.reading(shoal.read_csv("valid.csv", **loaded.schema)))
    labels = np.array([int(row[0]) for row in rows])
    sites = np.array([row[3] for row in rows])
    segments = found["segments"]["site"]
    assert {one["text"] for one in segments} == {None, "s1", "s2", "s3"}
    for one in segments:
        at = sites == (one["text"] or "")
        expected = shoal.metrics.measure(labels[at], margins[at])
        assert one["others"] == 0
        assert {name: one[name] for name in ("logloss", "auc", "calibration", "examples")} == pytest.approx(
            {name: getattr(expected, name) for name in ("logloss", "auc", "calibration", "examples")}
        )
    assert [one["examples"] for one in segments] == sorted((one["examples"] for one in segments), reverse=True)
    many = found["segments"]["seen"]
    assert len(many) == 21
    assert sum(one["examples"] for one in many) == 600
    assert many[-1]["others"] == len({row[5] for row in rows}) - 20
    assert found["gauc"] == pytest.approx(shoal.metrics.gauc(labels, margins, [row[1] for row in rows]).gauc)
    assert main(how) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[:1] in (["s1"], ["s2"], ["(none)"])]
    assert any(f"{many[-1]['others']} others" in line for line in lines)


@pytest.mark.slow
def test_reports_have_metrics_by_segment(models):
    pytest.importorskip("matplotlib")
    assert main(["report", "lr", "--data", "valid.csv", "--segments", "site", "--output", "r.html", "--quiet"]) == 0
    page = Path("r.html").read_text()
    assert "<h2>By site</h2>" in page
    assert "<td>s1</td>" in page


def test_segments_without_fields_are_refused(models, capsys):
    Path("x.libsvm").write_text("1 1:1\n0 2:1\n")
    assert main(["train", "lr", "--data", "x.libsvm", "--format", "libsvm", "--output", "x", "--quiet"]) == 0
    assert main(["evaluate", "x", "--data", "x.libsvm", "--segments", "site"]) == 2
    assert "--segments names a field, and libsvm has none" in capsys.readouterr().err
    assert main(["report", "x", "--segments", "site"]) == 2
    assert "--segments requires --data" in capsys.readouterr().err
