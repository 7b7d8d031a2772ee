"""Rules of a table's lifecycle on the command line: training by them, and what a rule would drop."""

from __future__ import annotations

import json

import pytest

import shoal
from shoal.cli import main


@pytest.fixture
def examples(tmp_path):
    path = tmp_path / "train.libsvm"
    path.write_text("".join(f"{n % 2} {n % 7 + 1}:1 {100 + n}:1\n" for n in range(300)))
    return path


def train(examples, target, *more):
    how = ["--format", "libsvm", "--batch-size", "10", "--no-warm-up", "--quiet", *more]
    return main(["train", "lr", "--data", str(examples), "--output", str(target), *how])


def test_a_model_is_trained_by_rules_and_keeps_them(examples, tmp_path, capsys):
    assert train(examples, tmp_path / "m", "--admit", "count:2", "--expire", "ttl:5", "--expire", "norm:1e-9") == 0
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert model.table.spec.admit == shoal.AfterCount(2)
        assert model.table.spec.expire == (shoal.TimeToLive(5), shoal.MinNorm(1e-9))
        assert len(model.table) == 8  # keys 1 to 7 and the bias
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m"), "--forecast", "norm:1e9", "--forecast", "ttl:1"]) == 0
    reported = capsys.readouterr().out
    assert "admits AfterCount(n=2" in reported
    assert "removes TimeToLive(clocks=5), MinNorm(floor=1e-09), at clock 31" in reported
    assert "forecast of table lr: 8 rows" in reported
    assert "MinNorm(floor=1000000000.0): 8 rows" in reported
    assert main(["inspect", str(tmp_path / "m"), "--forecast", "norm:1e9", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["forecast"]["lr"][0]["rows"] == 8
    assert facts["tables"][0]["admit"][0] == "AfterCount"


def test_rows_that_were_not_seen_go_at_the_end_of_a_pass(examples, tmp_path):
    assert train(examples, tmp_path / "m", "--expire", "ttl:3") == 0
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert 8 <= len(model.table) < 60


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--admit", "ttl:3"], "'ttl:3' is not an admission rule: write one of count:N"),
        (["--expire", "ttl"], "'ttl' is not an expiry rule: write one of ttl:CLOCKS"),
        (["--admit", "count:2", "--grid", "alpha=0.1,0.2"], "--grid does not support --admit and --expire"),
        (["--admit", "count:2", "--solver", "dbpg"], "does not support admit and expire"),
    ],
)
def test_what_is_no_rule_is_refused(examples, tmp_path, capsys, more, text):
    try:
        status = train(examples, tmp_path / "m", *more)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_every_command_loads_a_model_whose_limits_are_below_the_usual_number_of_slots(examples, tmp_path, capsys):
    model, exports = str(tmp_path / "m"), [str(tmp_path / "e/1"), str(tmp_path / "e/2")]
    assert train(examples, model, "--slots", "16", "--expire", "rows:100") == 0
    data = ["--data", str(examples)]
    capsys.readouterr()
    for words in [
        ["evaluate", model, *data],
        ["predict", model, *data, "--output", str(tmp_path / "p")],
        ["report", model, *data],
        ["inspect", model, "--top", "3", "--forecast", "norm:0.1"],
        ["export", model, "--output", exports[0]],
        ["export", model, "--output", exports[1], "--since", exports[0]],
        ["convert", model, "--output", str(tmp_path / "rows")],
    ]:
        if words[0] == "convert":
            pytest.importorskip("pyarrow")
        assert main([*words, "--quiet"]) == 0, capsys.readouterr().err
    with shoal.load(model) as loaded, shoal.LogisticRegression.load(model) as other:
        assert loaded.store.slots == other.store.slots == 16  # where sweeps drop the same rows as before
        loaded.fit(shoal.read_libsvm(examples), progress=False)
        assert 8 <= len(loaded.table) <= 100


def test_a_checkpoint_that_does_not_fit_a_store_names_the_remedy(examples, tmp_path):
    assert train(examples, tmp_path / "m", "--slots", "16", "--expire", "rows:100") == 0
    with shoal.local(slots=1024) as store, pytest.raises(ValueError, match="make the store with fewer slots"):
        shoal.load(tmp_path / "m", store=store)
