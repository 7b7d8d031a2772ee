"""Parts of fits made again: explained rows, the batch that broke a test, models without some examples."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from click_config import click_config
from click_days import write_days
from shoal.cli import main
from shoal.data import key_of_name
from shoal.lineage import bisect, explain, forget
from shoal.models import Checkpointing, EarlyStopping, Model, files
from tiers import long_after, long_but

BATCH = 100
FILES, ROWS = 3, 700
USER = "user=u17"  # occurs from the second file on


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of csv, the first of which does not have the user."""
    return write_days(
        tmp_path_factory.mktemp("days"),
        FILES,
        ROWS,
        lambda random, day, row: 17 if day and row % 97 == 5 else int(random.integers(100, 160)),
    )


def reader(days: list[str]) -> shoal.data.Reader:
    return shoal.read_csv(days, label="click", numeric=["price"], batch_size=BATCH)


def user_key() -> int:
    return key_of_name("csv", USER)


def logistic(**how: Any) -> Model:
    return shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.3), **how)


def machine(**how: Any) -> Model:
    return shoal.FactorizationMachine(4, **how)


MODELS: dict[str, Callable[..., Model]] = {
    "logistic": logistic,
    "normalized": lambda **how: logistic(normalized=True, **how),
    "sampled": lambda **how: logistic(negative_rate=0.5, **how),
    "without warm-up": lambda **how: logistic(warm_up=False, **how),
    "machine": machine,
}
FITS: dict[str, dict[str, Any]] = {
    "once": {},
    "twice": {"epochs": 2},
    "shuffled": {"epochs": 2, "shuffle": 3},
}
SHORT = [("logistic", "twice"), ("sampled", "shuffled"), ("normalized", "once"), ("machine", "once")]
LONG = [*((kind, "twice") for kind in MODELS if kind != "logistic"), ("logistic", "once")]
CASES = long_after(len(SHORT), [*SHORT, *LONG])


def fitted(make: Callable[..., Model], data: shoal.data.Reader, **how: Any) -> Model:
    return make().fit(data, progress=False, **how)


def digests(model: Model) -> dict[str, str]:
    return {table.name: table.digest() for table in model.tables}


@pytest.fixture(scope="module")
def all_kept(tmp_path_factory: pytest.TempPathFactory, days: list[str]) -> Path:
    """A model that has kept its checkpoints, which stays as it is."""
    place = tmp_path_factory.mktemp("kept") / "model"
    with fitted(logistic, reader(days), checkpoint=Checkpointing(place, every=4, keep=True)):
        return place


@pytest.fixture
def kept(all_kept: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(all_kept, tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_what_is_forgotten_was_never_learned(kind: str, how: str, tmp_path: Path, days: list[str]) -> None:
    make, settings = MODELS[kind], FITS[how]
    kept = Checkpointing(tmp_path / "model", every=4, keep=True)
    with fitted(make, reader(days), checkpoint=kept, **settings) as model:
        before = digests(model)
    certificate = forget(tmp_path / "model", [USER], tmp_path / "other")
    with fitted(make, reader(days).without([user_key()]), **settings) as fresh, shoal.load(tmp_path / "other") as made:
        assert digests(fresh) == digests(made) == certificate.rows_after != before == certificate.rows_before
        assert fresh.examples == made.examples
    if how != "shuffled":
        assert 0 < certificate.made_again_from <= certificate.first
    assert certificate.examples_left_out == sum(ROWS // 97 + (ROWS % 97 > 5) for _ in range(FILES - 1))
    assert json.loads((tmp_path / "other" / "certificate.json").read_text())["rows_after"] == certificate.rows_after


@pytest.mark.slow
@pytest.mark.parametrize("how", long_but(["shuffled"], FITS.keys()))
def test_lines_and_files_are_forgotten(how: str, tmp_path: Path, days: list[str]) -> None:
    kept = Checkpointing(tmp_path / "model", every=4, keep=True)
    with fitted(logistic, reader(days), checkpoint=kept, **FITS[how]) as model:
        before = digests(model)
    places = [f"{days[1]}:9", f"{days[1]}:300-420", f"{days[1]}:410-421", "day_2.csv"]
    certificate = forget(tmp_path / "model", [], tmp_path / "other", examples=places)
    with fitted(logistic, reader(days).without(examples=places), **FITS[how]) as fresh:
        assert digests(fresh) == certificate.rows_after != before
    assert certificate.examples_left_out == 1 + 122 + ROWS
    assert certificate.examples == [f"{days[1]}:9", f"{days[1]}:300-421", f"{days[2]}:1-"]
    assert (tmp_path / "other" / "left-out.txt").read_text().splitlines() == certificate.examples


@pytest.mark.slow
def test_the_lines_of_a_feature_are_forgotten_as_the_feature_is(kept: Path, tmp_path: Path, days: list[str]) -> None:
    places = [
        f"{day}:{number}"
        for day in days
        for number, line in enumerate(Path(day).read_text().splitlines(), 1)
        if ",u17," in line
    ]
    by_line = forget(kept, [], tmp_path / "lines", examples=places)
    by_feature = forget(kept, [USER], tmp_path / "feature")
    assert by_line.rows_after == by_feature.rows_after
    assert by_line.first == by_feature.first
    assert by_line.examples_left_out == by_feature.examples_left_out == len(places)


def test_lines_that_are_forgotten_could_have_been_absent(tmp_path: Path, days: list[str]) -> None:
    """Where each file is a batch, the batches are those of files without the lines."""
    whole = shoal.read_csv(days, label="click", numeric=["price"], batch_size=ROWS)
    kept = Checkpointing(tmp_path / "model", every=1, keep=True)
    with fitted(lambda: logistic(warm_up=False), whole, checkpoint=kept):
        certificate = forget(tmp_path / "model", [], tmp_path / "other", examples=[f"{days[1]}:2-9", f"{days[1]}:701"])
    lines = Path(days[1]).read_text().splitlines(keepends=True)
    (tmp_path / "day_1.csv").write_text("".join([lines[0], *lines[9:700]]))
    files = [days[0], tmp_path / "day_1.csv", days[2]]
    batches = [batch for one in files for batch in shoal.read_csv(one, label="click", numeric=["price"])]
    with fitted(lambda: logistic(warm_up=False), batches) as fresh:
        assert digests(fresh) == certificate.rows_after
    assert certificate.made_again_from == ROWS
    assert certificate.examples_left_out == 9


@pytest.mark.slow
def test_what_was_forgotten_before_is_in_the_next_certificate(kept: Path, tmp_path: Path, days: list[str]) -> None:
    forget(kept, [USER], tmp_path / "one", examples=[f"{days[0]}:5"])
    second = forget(tmp_path / "one", ["ad=a3"], tmp_path / "two", examples=[f"{days[1]}:11"])
    keys = [user_key(), key_of_name("csv", "ad=a3")]
    with fitted(logistic, reader(days).without(keys, examples=[f"{days[0]}:5", f"{days[1]}:11"])) as fresh:
        assert digests(fresh) == second.rows_after
    assert second.examples == [f"{days[0]}:5", f"{days[1]}:11"]
    assert second.features == ["ad=a3", str(user_key())]
    assert f"--without {user_key()}" in second.to_check or str(user_key()) in second.to_check
    with pytest.raises(ValueError, match=r"day_0.csv: of 1 line that is named, 1 hold no example"):
        forget(tmp_path / "one", [], tmp_path / "three", examples=[f"{days[0]}:5"])
    (life,) = explain(tmp_path / "one", ["ad=a4"])
    assert life.first.line is None, "lines before it were left out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "why"),
    [
        (["day_0.csv:1"], "is in none of the 3 files"),
        (["{0}:1"], "of 1 line that is named, 1 hold no example"),
        (["{0}:0"], "names lines 0: lines count from 1, and ascend"),
        (["{0}:9-3"], "names lines 9-3"),
        (["{0}:700-702"], "of 3 lines that are named, 1 hold no example"),
        (["{0}:99999999999999999999"], "is in none of the 3 files"),
        (["{0}:9000-"], "no example of .* nothing is forgotten"),
        (["day_7*"], "is in none of the 3 files"),
        ([""], "is in none of the 3 files"),
        (["{0}:x"], "is in none of the 3 files"),
    ],
)
def test_lines_that_are_none_are_not_forgotten(
    places: list[str], why: str, all_kept: Path, tmp_path: Path, days: list[str]
) -> None:
    with pytest.raises(ValueError, match=why):
        forget(all_kept, [], tmp_path / "other", examples=[one.format(*days) for one in places])
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_more_is_forgotten_of_a_model_that_has_forgotten(kept: Path, tmp_path: Path, days: list[str]) -> None:
    forget(kept, [USER], tmp_path / "one")
    second = forget(tmp_path / "one", ["ad=a3"], tmp_path / "two")
    keys = [user_key(), key_of_name("csv", "ad=a3")]
    with fitted(logistic, reader(days).without(keys)) as fresh:
        assert digests(fresh) == second.rows_after
    with pytest.raises(ValueError, match=r"no example of .* has 'user=u17'"):
        explain(tmp_path / "two", [USER])
    life = explain(tmp_path / "one", ["ad=a3"])[0]
    with shoal.load(tmp_path / "one") as model:
        assert life.weights[-1][1]["lr"][0] == model.table.pull(np.array([life.key], np.uint64))[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_the_steps_of_a_row_lead_to_its_weight(kind: str, how: str, tmp_path: Path, days: list[str]) -> None:
    kept = Checkpointing(tmp_path / "model", every=5, keep=True)
    with fitted(MODELS[kind], reader(days), checkpoint=kept, **FITS[how]) as model:
        (life,) = explain(tmp_path / "model", [USER], steps=10**6)
        key = np.array([life.key], np.uint64)
        now = {one.name: tuple(one.pull(key)[0].tolist()) for one in model.tables if one.contains(key)[0]}
    steps = sorted(life.steps, key=lambda step: step.begin)
    assert steps[0].before == {}
    assert steps[-1].after == life.weights[-1][1] == now
    for one, other in itertools.pairwise(steps):
        assert one.end <= other.begin
        assert one.after == other.before, "nothing else moves the row"
    assert sorted(life.steps, key=lambda step: -step.size) == life.steps
    passes = FITS[how].get("epochs", 1)
    assert sum(step.examples for step in steps) <= passes * sum(one.examples for one in life.files)
    if kind != "sampled":
        assert sum(step.examples for step in steps) == passes * sum(one.examples for one in life.files)
    assert [one.file for one in life.files] == days[1:]
    assert (life.first.file, life.first.example, life.first.line) == (days[1], 6, 7)
    text = Path(life.last.file).read_text().splitlines()[(life.last.line or 0) - 1]
    assert text.split(",")[:2] == [f"{life.last.label:g}", "u17"]


def test_no_line_is_named_where_lines_were_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,user\nmaybe,u1\n0,u2\n1,u17\n")
    data = shoal.read_csv(path, label="click", batch_size=2, on_error="skip")
    with fitted(logistic, data, checkpoint=Checkpointing(tmp_path / "model", keep=True)):
        (life,) = explain(tmp_path / "model", [USER])
    assert (life.first.line, life.first.example) == (None, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", long_but(["shuffled"], FITS.keys()))
def test_the_batch_that_breaks_a_model_is_found(how: str, tmp_path: Path, days: list[str]) -> None:
    kept = Checkpointing(tmp_path / "model", every=4, keep=True)
    with fitted(logistic, reader(days), checkpoint=kept, **FITS[how]):
        (life,) = explain(tmp_path / "model", [USER], steps=10**6)
    wanted = min(life.steps, key=lambda step: step.begin)
    tested = []

    def is_good(place: str) -> bool:
        tested.append(place)
        with shoal.load(place) as model:
            return not model.table.contains(np.array([user_key()], np.uint64))[0]

    found = bisect(tmp_path / "model" / "kept-000000000000", tmp_path / "model", is_good)
    assert (found.begin, found.end, found.epoch) == (wanted.begin, wanted.end, wanted.epoch)
    assert found.probes == len(tested) <= 12
    if how != "shuffled":
        (span,) = found.spans
        assert span.file == days[1]
        assert span.first <= life.first.example <= span.last


@pytest.mark.slow
def test_no_search_begins_between_models_that_are_both_good_or_both_bad(all_kept: Path) -> None:
    kept = all_kept
    first = files.kept(kept)[0].location
    with pytest.raises(ValueError, match="passes the test: nothing has broken it"):
        bisect(first, kept, lambda place: True)
    with pytest.raises(ValueError, match="fails the test already"):
        bisect(first, kept, lambda place: False)
    with pytest.raises(ValueError, match="is no earlier checkpoint"):
        bisect(kept, kept, lambda place: True)


@pytest.mark.slow
def test_the_checkpoints_of_a_fit_that_was_killed_are_kept_on(tmp_path: Path, days: list[str]) -> None:
    how = Checkpointing(tmp_path / "model", every=2, keep=True, resume=True)
    uninterrupted = Checkpointing(tmp_path / "whole", every=2, keep=True)

    class Killed(Exception):
        """In place of kill -9: nothing is saved after it."""

    def kill(progress: Any) -> None:
        if progress.examples > 900:
            raise Killed

    class Killer(shoal.models.Callback):
        def batch_done(self, progress: Any) -> None:
            kill(progress)

    with pytest.raises(Killed):
        fitted(logistic, reader(days), checkpoint=how, callbacks=[Killer()])
    of_cut = forget(tmp_path / "model", [USER], tmp_path / "whole again")
    assert of_cut.examples_before < of_cut.examples_after
    with fitted(logistic, reader(days), checkpoint=how), fitted(logistic, reader(days), checkpoint=uninterrupted):
        assert list(files.kept(tmp_path / "model")) == list(files.kept(tmp_path / "whole"))
    found = [forget(tmp_path / name, [USER], tmp_path / f"{name} without") for name in ("model", "whole")]
    assert of_cut.rows_after == found[0].rows_after == found[1].rows_after
    assert all(one.examples_before > one.examples_after == of_cut.examples_after for one in found)


@pytest.mark.slow
def test_a_new_fit_drops_what_the_one_before_has_kept(kept: Path, days: list[str]) -> None:
    before = list(files.kept(kept))
    with fitted(logistic, reader(days[:1]), checkpoint=Checkpointing(kept, keep=True, overwrite=True)):
        now = files.kept(kept)
    assert list(now) == [0, ROWS] != before
    for examples, place in now.items():
        with shoal.load(place.location) as model:
            assert model.examples == examples


def test_early_stopping_is_made_again(tmp_path: Path, days: list[str]) -> None:
    how = {"epochs": 4, "early_stopping": EarlyStopping(1), "valid": reader(days[2:])}
    kept = Checkpointing(tmp_path / "model", keep=True)
    with fitted(logistic, reader(days[:2]), checkpoint=kept, **how):
        certificate = forget(tmp_path / "model", [USER], tmp_path / "other")
    with fitted(logistic, reader(days[:2]).without([user_key()]), **how) as fresh:
        assert digests(fresh) == certificate.rows_after


@pytest.mark.slow
@pytest.mark.parametrize("tool", [explain, lambda model, features: forget(model, features, f"{model}-other")])
def test_what_cannot_be_made_again_says_why(tool: Any, kept: Path, tmp_path: Path, days: list[str]) -> None:
    with fitted(logistic, reader(days), checkpoint=Checkpointing(tmp_path / "none")):
        pass
    with pytest.raises(ValueError, match="no kept checkpoints to begin from: train with --keep-checkpoints"):
        tool(tmp_path / "none", [USER])
    with pytest.raises(ValueError, match=r"no example of .* has 'user=nobody'"):
        tool(kept, ["user=nobody"])
    for wrong, why in ((["9" * 23], "is no key"), ([], "pass a list"), (USER, "pass a list of names")):
        with pytest.raises(ValueError, match=why):
            tool(kept, wrong)
    with fitted(logistic, list(reader(days)), checkpoint=Checkpointing(tmp_path / "list", keep=True)):
        pass
    with pytest.raises(ValueError, match="data that no reader read"):
        tool(tmp_path / "list", [USER])
    with open(days[0], "rb") as pipe:
        stream = shoal.read_csv(pipe, label="click", numeric=["price"])
        with fitted(logistic, stream, checkpoint=Checkpointing(tmp_path / "pipe", keep=True)):
            pass
    with pytest.raises(ValueError, match=r"was a stream, .*day_0\.csv: it cannot be read again"):
        tool(tmp_path / "pipe", [USER])
    copies = [tmp_path / os.path.basename(day) for day in days]
    for day, one in zip(days, copies, strict=True):
        one.write_bytes(Path(day).read_bytes())
    with fitted(logistic, reader([str(one) for one in copies]), checkpoint=Checkpointing(tmp_path / "c", keep=True)):
        pass
    copies[1].write_text(copies[1].read_text().replace("u17", "u18"))
    with pytest.raises(ValueError, match=r"has changed since, so no fit can be made again: .*day_1.csv is another"):
        tool(tmp_path / "c", [USER])
    assert not (tmp_path / "c-other").exists()
    (kept / "kept-000000000000" / "model.json").unlink()
    with pytest.raises(ValueError, match=r"the first kept checkpoint of .* is of \d+ examples"):
        tool(kept, [USER])


@pytest.mark.slow
@pytest.mark.parametrize("tool", [explain, lambda model, features: forget(model, features, f"{model}-other")])
def test_a_damaged_checkpoint_is_named_where_it_is(tool: Any, kept: Path) -> None:
    for place in files.kept(kept).values():
        for path in Path(str(place)).glob("*/*"):
            content = bytearray(path.read_bytes())
            if path.suffix == ".slots":
                content[len(content) // 2] ^= 1
                path.unlink()
                path.write_bytes(content)
    with pytest.raises(shoal.CorruptionError, match=rf"{kept}/kept-\d+/checkpoint.* is damaged") as raised:
        tool(kept, [USER])
    assert "shoal-again" not in str(raised.value)
    assert "model-other" not in str(raised.value)


def test_a_model_is_not_forgotten_over_itself(kept: Path) -> None:
    with pytest.raises(ValueError, match="is the model itself"):
        forget(kept, [USER], kept, overwrite=True)
    (kept.parent / "mine").mkdir()
    (kept.parent / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        forget(kept, [USER], kept.parent / "mine", overwrite=True)
    assert (kept.parent / "mine" / "thesis.txt").read_text() == "x"


@pytest.mark.slow
def test_the_commands(
    tmp_path: Path, days: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--data", *days, "--format", "csv", "--label", "click", "--batch-size", str(BATCH), "--quiet"]
    assert main(["train", "lr", *data, "--output", "ads", "--checkpoint-every", "4", "--keep-checkpoints"]) == 0
    capsys.readouterr()
    assert main(["explain", "ads", USER, "ad=a3"]) == 0
    said = capsys.readouterr().out
    assert f"first seen  {days[1]}:7, example 6" in said
    assert "largest steps" in said
    # A command that is good while the file of rows that it greps for is not there.
    first = f"ads/{min(os.listdir('ads'), key=lambda name: (not name.startswith('kept'), name))}"
    good = f"{sys.executable} -m shoal inspect {{}} --row {USER} | grep -q 'in none'"
    assert main(["bisect", "--good", first, "--bad", "ads", "--test", good, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["spans"][0]["file"] == days[1]
    assert main(["bisect", "--good", first, "--bad", "ads", "--test", "no-such-program {}"]) == 2
    assert "no-such-program" in capsys.readouterr().err
    assert main(["forget", "ads", "--where", USER, "--output", "without"]) == 0
    command = capsys.readouterr().out.partition("to check      ")[2].split()
    assert main([*command[1:], "--quiet"]) == 0
    capsys.readouterr()
    assert main(["diff", "without", "CHECK", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["tables"]["lr"]
    assert (table["changed"], table["only_in_first"], table["only_in_second"]) == (0, 0, 0)


@pytest.mark.slow
def test_lines_and_files_are_forgotten_by_command(
    tmp_path: Path, days: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--data", *days, "--format", "csv", "--label", "click", "--batch-size", str(BATCH), "--quiet"]
    assert main(["train", "lr", *data, "--output", "ads", "--checkpoint-every", "4", "--keep-checkpoints"]) == 0
    capsys.readouterr()
    assert main(["explain", "ads", USER]) == 0
    seen = capsys.readouterr().out.partition("first seen")[2].split()[0].rstrip(",")
    Path("lines.txt").write_text(f"{seen}\n\n{days[1]}:20-22\n")
    how = ["--examples", "lines.txt", "--files", "day_2.*", "--where", "ad=a3", "--output", "without"]
    assert main(["forget", "ads", *how]) == 0
    command = capsys.readouterr().out.partition("to check      ")[2].split()
    assert main([*command[1:], "--quiet"]) == 0
    capsys.readouterr()
    assert main(["diff", "without", "CHECK", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["tables"]["lr"]
    assert (table["changed"], table["only_in_first"], table["only_in_second"]) == (0, 0, 0)
    assert main(["forget", "ads", "--output", "other"]) == 2
    assert "--where FEATURE, --examples FILE or --files GLOB" in capsys.readouterr().err


@pytest.mark.slow
def test_a_click_model_forgets_and_is_explained(tmp_path: Path, days: list[str]) -> None:
    pytest.importorskip("torch")
    log = tmp_path / "log.csv"
    log.write_text("".join(Path(day).read_text() if not i else "".join(Path(day).read_text().splitlines(True)[1:])
                           for i, day in enumerate(days)))  # fmt: skip
    config = tmp_path / "ctr.toml"
    config.write_text(click_config(log, train={"batch_size": BATCH, "epochs": 2}, output={"keep_checkpoints": True}))
    run = ["train", "ctr", "--config", str(config), "--quiet", "--checkpoint-every", "3", "--output"]
    assert main([*run, str(tmp_path / "model")]) == 0
    (life,) = explain(tmp_path / "model", [USER], steps=10**6)
    steps = sorted(life.steps, key=lambda step: step.begin)
    assert all(one.after == other.before for one, other in itertools.pairwise(steps))
    certificate = forget(tmp_path / "model", [USER], tmp_path / "other")
    assert main([*run, str(tmp_path / "check"), "--without", USER]) == 0
    with shoal.load(tmp_path / "check") as fresh, shoal.load(tmp_path / "other") as made:
        assert digests(fresh) == digests(made) == certificate.rows_after
        data = shoal.read_csv(log, label="click", categorical=["user", "ad"])
        assert np.array_equal(fresh.probabilities(data), made.probabilities(data))


def test_a_reader_without_some_examples(days: list[str]) -> None:
    whole, some = reader(days), reader(days).without([user_key()])
    batches, others = list(whole), list(some)
    assert [len(batch) for batch in others] != [len(batch) for batch in batches]
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        has = np.array([user_key() in batch.keys[a:b] for a, b in zip(batch.indptr, batch.indptr[1:], strict=False)])
        assert np.array_equal(batch.labels[~has], other.labels)
        assert np.array_equal(np.diff(batch.indptr)[~has], np.diff(other.indptr))
        kept = np.repeat(~has, np.diff(batch.indptr))
        assert np.array_equal(batch.keys[kept], other.keys)
        assert batch.values is not None
        assert other.values is not None
        assert np.array_equal(batch.values[kept], other.values)
    assert some.changes(whole.fingerprint()) == "the examples that are left out (without) were others"
    assert some.without([]).changes(some.fingerprint()) is None
    assert sum(map(len, reader(days).without(range(10)))) == FILES * ROWS
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="whole numbers from 0"):
            whole.without([wrong])
