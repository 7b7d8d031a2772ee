"""Fits of models over tables that stop anywhere and go on: with the bits of a fit that never stopped."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cuts import power_fails_behind
from shoal.base.interrupts import terminable
from shoal.cli import main
from shoal.models import Checkpointing, EarlyStopping, Model, files
from shoal.models.evaluation import begun_early
from shoal.models.fit_checkpoints import FitCheckpointer
from shoal.models.model_trainer import ModelTrainer
from tiers import long_after, long_but

BATCH = 50


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libsvm file of 800 examples, in which a third of the keys occurs often."""
    random = np.random.default_rng(5)
    weights = random.normal(size=400)
    lines = []
    for _ in range(800):
        keys = np.unique(np.where(random.random(6) < 0.7, random.integers(0, 40, 6), random.integers(0, 400, 6)))
        label = int(random.random() < 1 / (1 + np.exp(-weights[keys].sum())))
        lines.append(f"{label} " + " ".join(f"{key}:{1 + key % 3}" for key in keys))
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def reader(log: Path) -> shoal.data.Reader:
    return shoal.read_libsvm(log, batch_size=BATCH)


def logistic(store: shoal.Store, **how: Any) -> Model:
    return shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.3), store=store, **how)


def machine(store: shoal.Store, **how: Any) -> Model:
    return shoal.FactorizationMachine(4, store=store, dtype="bfloat16", **how)


RULES = {"admit": shoal.AfterCount(2, within=9), "expire": (shoal.TimeToLive(9), shoal.DecayedScore(0.9, 0.2))}
PLAIN = {"warm_up": False}
FITS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "lr": (logistic, {}, {}),
    "lr, plain batches": (logistic, PLAIN, {}),
    "lr, shuffled": (logistic, {}, {"shuffle": 4}),
    "lr, sampled": (logistic, PLAIN | {"negative_rate": 0.5}, {}),
    "lr, patient": (logistic, PLAIN, {"early_stopping": EarlyStopping(1), "epochs": 5}),
    "lr, with rules": (logistic, PLAIN | RULES, {}),
    "fm": (machine, PLAIN, {}),
    "fm, with rules": (machine, RULES, {"shuffle": 2}),
}


def learned(model: Model) -> list[Any]:
    """All that a model knows, to the bit, and what it noted down."""
    out: list[Any] = [model.examples, [p for p in model.history.points if p.auc == p.auc]]
    for table in model.tables:
        out += [
            (rows, section.tobytes(), kept.tobytes()) for rows, section, kept in map(table.shard.section, range(64))
        ]
        out.append(table.stats().step)
    return [*out, [(p.number, p.metrics, p.valid, p.features, p.complete) for p in model.history.passes]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["lr, shuffled", "lr, sampled", "lr, patient", "fm, with rules"], list(FITS)))
@pytest.mark.parametrize("stop", long_after(1, [20, 5]))  # within the first pass, and behind it
def test_a_fit_that_goes_on_has_the_bits_of_one_that_never_stopped(
    log: Path, tmp_path: Path, kind: str, stop: int
) -> None:
    make, settings, how = FITS[kind]

    def run(directory: Path, *, resume: bool = False) -> list[Any]:
        with shoal.local(threads=1, slots=64) as store:
            model: Model = make(store, seed=3, **settings)
            data = reader(log)
            plan = {"epochs": 2, "valid": data.split(0, 4), "progress": False, **how}
            model.fit(data, **plan, checkpoint=Checkpointing(directory, every=3, resume=resume))
            return learned(model)

    expected = run(tmp_path / "whole")
    with power_fails_behind(stop):
        run(tmp_path / "cut")
    assert files.read(tmp_path / "cut").fit_state is not None
    assert run(tmp_path / "cut", resume=True) == expected
    assert files.read(tmp_path / "cut").fit_state is None
    assert not list((tmp_path / "cut").glob("best-*"))


def test_what_is_no_fit_to_go_on_with_is_refused(log: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"progress": False}
    with shoal.local(slots=64) as store:
        model = logistic(store)
        model.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c"))
        with pytest.raises(shoal.errors.FitFinishedError, match=r"the fit in .* has finished"):
            model.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c", resume=True))
        with pytest.raises(ValueError, match="holds a model already"):
            model.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c"))
        model.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c", overwrite=True))
        with pytest.raises(TypeError, match=r"pass shoal.models.Checkpointing\(directory\)"):
            model.fit(reader(log), **how, checkpoint=tmp_path / "c")
        with pytest.raises(ValueError, match="every is 0"):
            Checkpointing(tmp_path / "c", every=0)
        with pytest.raises(ValueError, match="resume is 'always'"):
            Checkpointing(tmp_path / "c", resume="always")  # type: ignore[arg-type]
        before = learned(model)
        for other, what in (
            (
                machine(store, table="other"),
                r"is a logistic regression of .* is a factorization machine",
            ),
            (logistic(store, table="another"), "this is a logistic regression of another"),
            (logistic(store, bias=False), r"with bias=True, this is .* with bias=False"),
        ):
            with pytest.raises(ValueError, match=what):
                other.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c", resume=True))
        assert learned(model) == before
    with shoal.local(slots=64) as store:
        exact = shoal.LogisticRegression(store=store, solver=shoal.models.DBPG())
        with pytest.raises(ValueError, match="writes no checkpoints"):
            exact.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "d"))


@pytest.mark.slow
def test_with_other_settings_than_it_was_begun_with_a_fit_does_not_go_on(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(checkpointer: FitCheckpointer, *_: Any) -> None:
        raise KeyboardInterrupt

    how: dict[str, Any] = {"epochs": 3, "progress": False}
    resumed = {**how, "checkpoint": Checkpointing(tmp_path / "c", resume=True)}
    with monkeypatch.context() as patch, shoal.local(slots=64) as store:
        patch.setattr(
            FitCheckpointer,
            "pass_done",
            lambda checkpointer, at: (FitCheckpointer.interrupted(checkpointer, at), interrupt(checkpointer)),
        )
        model = logistic(store)
        with pytest.raises(KeyboardInterrupt):
            model.fit(reader(log), **how, checkpoint=Checkpointing(tmp_path / "c"))
    for name, value in (("seed", 4), ("shuffle", 2), ("warm_up", False), ("negative_rate", 0.5)):
        of_fit = name == "shuffle"
        with shoal.local(slots=64) as store:
            model = logistic(store, **({} if of_fit else {name: value}))
            with pytest.raises(ValueError, match=f"begun with {name}="):
                model.fit(reader(log), **{**resumed, **({name: value} if of_fit else {})})
    with shoal.local(slots=64) as store:
        model = logistic(store)
        model.fit(reader(log), **{**resumed, "epochs": 4})  # more passes may be
        assert len(model.history.passes) == 4


def cut_off(
    directory: Path,
    data: shoal.data.Reader,
    valid: shoal.data.Reader | None = None,
    *,
    shuffle: int = 0,
    **settings: Any,
) -> None:
    """Leave a fit that stands behind its tenth batch."""
    with shoal.local(slots=64) as store, power_fails_behind(10):
        logistic(store, **settings).fit(
            data, valid=valid, progress=False, shuffle=shuffle, checkpoint=Checkpointing(directory, every=1)
        )


@pytest.mark.slow
def test_with_other_data_than_it_was_begun_with_a_fit_does_not_go_on(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    path, other, valid = tmp_path / "a", tmp_path / "b", tmp_path / "v"
    for file, some in ((path, lines[:700]), (other, lines[700:]), (valid, lines[:9])):
        file.write_text("".join(some))
    begun = path.read_text()
    cut_off(tmp_path / "c", reader(path), reader(valid))
    before = {file: file.read_bytes() for file in (tmp_path / "c").rglob("*") if file.is_file()}

    def says(match: str, data: Any, held_out: Any = None, how: Any = True) -> None:
        with shoal.local(slots=64) as store:
            model = logistic(store)
            with pytest.raises(ValueError, match=match):
                model.fit(data, valid=held_out, progress=False, checkpoint=Checkpointing(tmp_path / "c", resume=how))
            assert model.examples == 0

    says(r"batch_size was 50, and is 60", shoal.read_libsvm(path, batch_size=60))
    says(r"split was \[0, 1\], and is \[0, 2\]", reader(path).split(0, 2))
    says(r"a was read there, and .*b is given in its place", reader(other))
    says(
        r"b was not part of the data: pass resume='appended' to",
        shoal.read_libsvm([path, other], batch_size=50),
    )
    says(r"valid: .* v was read there|valid: .*v was read there, and .*b is given", reader(path), reader(other))
    says(r"was begun with a reader of files", list(reader(path)))
    path.write_text(begun + "1 3:1\n")
    says(r"a had [\d,]+ bytes, and has [\d,]+ bytes: pass resume='appended'", reader(path))
    path.write_text("0" + begun[1:] if begun[0] == "1" else "1" + begun[1:])
    for how in (True, "appended"):
        says(r"a is another file: its first [\d,]+ bytes differ: pass the same data", reader(path), how=how)
    path.write_text(begun[:-20])
    says(r"a had [\d,]+ bytes, and has [\d,]+ bytes: pass the same data", reader(path), how="appended")
    assert {file: file.read_bytes() for file in (tmp_path / "c").rglob("*") if file.is_file()} == before


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("how", [{}, {"warm_up": False}])
@pytest.mark.parametrize("added", ["lines", "a file"])
def test_a_fit_goes_on_over_files_that_were_appended_to_where_that_is_allowed(
    log: Path, tmp_path: Path, how: dict[str, Any], added: str
) -> None:
    lines = log.read_text().splitlines(keepends=True)
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("".join(lines[:700]))
    second.write_text("".join(lines[700:]))
    cut_off(tmp_path / "c", reader(first), **how)
    if added == "lines":
        first.write_text("".join(lines))
    data = reader(first) if added == "lines" else shoal.read_libsvm([first, second], batch_size=BATCH)
    with shoal.local(slots=64) as store:
        model = logistic(store, **how).fit(
            data, progress=False, checkpoint=Checkpointing(tmp_path / "c", resume="appended")
        )
        assert model.examples == 800
        assert model.history.fits[-1].source == data.fingerprint()
        expected = logistic(store, table="whole", **how).fit(data, progress=False)
        assert model.weights()[1].tobytes() == expected.weights()[1].tobytes()


@pytest.mark.slow
def test_a_shuffled_pass_does_not_go_on_over_data_that_was_appended_to(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(log.read_text())
    cut_off(tmp_path / "c", reader(path), shuffle=2)
    with path.open("a") as file:
        file.write("1 3:1\n")
    with (
        shoal.local(slots=64) as store,
        pytest.raises(ValueError, match="a shuffled pass, whose order more data"),
    ):
        logistic(store).fit(
            reader(path), shuffle=2, progress=False, checkpoint=Checkpointing(tmp_path / "c", resume="appended")
        )


def test_ctrl_c_while_a_pass_is_measured_leaves_a_checkpoint_to_go_on_from(log: Path, tmp_path: Path) -> None:
    class PressesCtrlC:
        def __iter__(self) -> Any:
            signal.raise_signal(signal.SIGTERM)
            yield from reader(log)

    how: dict[str, Any] = {"epochs": 2, "progress": False}
    begun, resumed = (Checkpointing(tmp_path / "c", resume=resume) for resume in (False, True))
    with shoal.local(slots=64) as store:
        interrupted = logistic(store)
        with terminable(), pytest.raises(KeyboardInterrupt):
            interrupted.fit(reader(log), valid=PressesCtrlC(), checkpoint=begun, **how)
        assert interrupted.history.passes[0].complete
    with shoal.local(slots=64) as store:
        model = logistic(store)
        model.fit(reader(log), valid=reader(log), checkpoint=resumed, **how)
        assert [done.valid is None for done in model.history.passes] == [False, False]


@pytest.mark.parametrize("when", ["after the last batch", "after the pass was measured"])
def test_ctrl_c_between_two_passes_ends_the_fit_which_goes_on_with_the_same_bits(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def ends_with_ctrl_c(*prepared: Any, **how: Any) -> Any:
        yield from begun_early(*prepared, **how)
        signal.raise_signal(signal.SIGINT)

    def update_stopped(trainer: ModelTrainer) -> None:
        if trainer.model.history.passes:
            signal.raise_signal(signal.SIGINT)

    how: dict[str, Any] = {"epochs": 3, "progress": False}
    begun, resumed = (Checkpointing(tmp_path / "c", resume=resume) for resume in (False, True))
    with shoal.local(slots=64) as store:
        whole = logistic(store).fit(reader(log), **how)
        expected = learned(whole)
    with monkeypatch.context() as patch, shoal.local(slots=64) as store:
        if when == "after the last batch":
            patch.setattr("shoal.models.training.begun_early", ends_with_ctrl_c)
        else:
            patch.setattr(ModelTrainer, "update_stopped", update_stopped)
        model = logistic(store)
        with pytest.raises(KeyboardInterrupt):
            model.fit(reader(log), checkpoint=begun, **how)
        assert len(model.history.passes) == 1
    with shoal.local(slots=64) as store:
        model = logistic(store).fit(reader(log), checkpoint=resumed, **how)
        assert [done.complete for done in model.history.passes] == [True, True, True]
        assert learned(model) == expected


@pytest.mark.slow
def test_a_checkpoint_within_a_pass_is_exported_without_its_rows(log: Path, tmp_path: Path) -> None:
    cut_off(tmp_path / "c", reader(log))
    assert main(["export", str(tmp_path / "c"), "--output", str(tmp_path / "e")]) == 0
    with shoal.local(slots=64) as store:
        store.load(files.checkpoint_in(tmp_path / "c")[0])
        names = set(store.tables)
        store.export(tmp_path / "all")
    assert "lr-progress" in names
    for place in ("e", "all"):
        with shoal.export.open(tmp_path / place) as export:
            assert set(export.tables) == names - {"lr-progress"}


def test_checkpoints_of_a_long_fit_have_the_metrics_of_one_pass(log: Path, tmp_path: Path) -> None:
    counted = []
    with shoal.local() as store:
        model = logistic(store)
        model.fit(
            reader(log),
            epochs=5,
            progress=False,
            callbacks=lambda progress: counted.append(len(store.tables[f"{model.name}-progress"])),
            checkpoint=Checkpointing(tmp_path / "model", every=7),
        )
    assert len(set(counted[1:])) == 1


def test_ctrl_c_while_a_checkpoint_is_written_waits_for_it(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(checkpointer: FitCheckpointer, at: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        FitCheckpointer.interrupted(checkpointer, at)

    how: dict[str, Any] = {"epochs": 2, "progress": False}
    begun, resumed = (Checkpointing(tmp_path / "c", resume=resume) for resume in (False, True))
    with monkeypatch.context() as patch, shoal.local(slots=64) as store:
        patch.setattr(FitCheckpointer, "pass_done", pressed)
        with pytest.raises(KeyboardInterrupt):
            logistic(store).fit(reader(log), checkpoint=begun, **how)
    with shoal.local(slots=64) as store:
        model = logistic(store).fit(reader(log), checkpoint=resumed, **how)
        assert [done.complete for done in model.history.passes] == [True, True]


@pytest.mark.slow
def test_a_command_that_goes_on_with_a_fit_that_is_over_says_so_and_succeeds(
    log: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "train",
        "lr",
        "--data",
        str(log),
        "--valid",
        str(log),
        "--format",
        "libsvm",
        "--batch-size",
        "50",
        "--output",
    ]
    kept = [*command, str(tmp_path / "c"), "--checkpoint-every", "9", "--epochs", "2", "--resume", "--json"]
    assert main(kept) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*kept[:-1]]) == 0
    reported = capsys.readouterr().out.splitlines()
    assert len(reported) == 1
    assert "has finished already, after" in reported[0]
    assert main(kept) == 0
    assert json.loads(capsys.readouterr().out)["over"] is True
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    capsys.readouterr()
    for other, says in (
        (["--seed", "3"], "has finished, and was begun with seed=0, now it is 3: begin another one"),
        (["--epochs", "3"], "has finished, and was begun with epochs=2, now it is 3"),
        (
            ["--batch-size", "51"],
            "begun with other data: batch_size was 50, and is 51: it has finished",
        ),
        (["--alpha", "0.2"], "table 'lr' has optimizer FTRL(alpha=0.1"),
    ):  # the fit that is asked for is another one
        assert main([*kept, *other]) == 2
        assert says in capsys.readouterr().err
    # One that was killed before it was calibrated is not all done.
    assert main([*kept, "--calibrate", "platt"]) == 0
    assert "over" not in json.loads(capsys.readouterr().out)
    with shoal.LogisticRegression.load(tmp_path / "c") as model:
        assert model.calibration is not None
    assert main([*kept, "--calibrate", "platt"]) == 0
    assert json.loads(capsys.readouterr().out)["over"] is True
    # One that Ctrl-C ended, without checkpoints, is not over either.
    with monkeypatch.context() as patch:
        patch.setattr(shoal.LogisticRegression, "learn", raising_after(9, shoal.LogisticRegression.learn))
        assert main([*command, str(tmp_path / "i")]) == 130
    assert main([*command, str(tmp_path / "i"), "--resume"]) == 2
    assert "was interrupted in pass 1 and wrote no checkpoint" in capsys.readouterr().err


def raising_after(count: int, real: Any) -> Any:
    left = [count]

    def learn(*how: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*how)

    return learn


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--resume", "--grid", "l1=0,1"], "--grid writes no checkpoints"),
        (["--checkpoint-every", "0"], "--checkpoint-every is 0"),
        (["--resume", "appendix"], "--resume is 'appendix': pass True, False or 'appended'"),
        (["--checkpoint-every", "2", "--solver", "dbpg"], "writes no checkpoints"),
    ],
)
def test_on_the_command_line_too(log: Path, tmp_path: Path, capsys: Any, arguments: list[str], text: str) -> None:
    command = ["train", "lr", "--data", str(log), "--format", "libsvm", "--output", str(tmp_path / "m"), "--quiet"]
    assert main([*command, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_fit_that_was_interrupted_names_all_features(
    log: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    command = ["train", "lr", "--data", str(log), "--format", "libsvm", "--batch-size", "64", "--quiet", "--names"]
    assert main([*command, "--output", str(tmp_path / "whole")]) == 0
    expected = shoal.models.load_names(tmp_path / "whole")
    kept = [*command, "--output", str(tmp_path / "kept"), "--checkpoint-every", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(shoal.LogisticRegression, "learn", raising_after(7, shoal.LogisticRegression.learn))
        assert main(kept) == 130
    assert shoal.models.load_names(tmp_path / "kept") is None
    assert main([*kept, "--resume"]) == 0
    assert shoal.models.load_names(tmp_path / "kept") == expected
    # A fit that is over is only named.
    late = [*command, "--output", str(tmp_path / "late"), "--checkpoint-every", "3"]
    late.remove("--names")
    assert main(late) == 0
    assert shoal.models.load_names(tmp_path / "late") is None
    assert main([*late, "--resume", "--names"]) == 0
    assert shoal.models.load_names(tmp_path / "late") == expected
    capsys.readouterr()
    assert main([*late, "--resume", "--names"]) == 0
    assert "has finished already" not in capsys.readouterr().out  # quiet
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    stream = [*command, "--output", str(tmp_path / "stream"), "--checkpoint-every", "3"]
    stream[stream.index(str(log))] = "-"
    assert main(stream) == 2
    assert "--names of a stream" in capsys.readouterr().err
