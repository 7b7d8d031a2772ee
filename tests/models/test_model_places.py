"""Model directories on S3, and here: saved, raced for, cut off, gone on with. Both have the same content.

Whatever happens to a save, the model that was there before is there after it, whole, or the new one is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from cluster_fakes import Wire
from cuts import power_fails_behind
from places import BUCKET, after_writes, interrupt, options, uploads
from shoal.cli import main
from shoal.models import Checkpointing, EarlyStopping, Model, files
from shoal.storage.base import StorageDir
from shoal.storage.local import LocalDir
from shoal.storage.object_store import RemoteDir
from shoal.storage.open import open_dir
from stores import opened
from tiers import everywhere, long_after

pytestmark = pytest.mark.slow


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorageDir:
    if request.param == "local":
        return open_dir(tmp_path / "m")
    return open_dir(f"s3://{BUCKET}/{tmp_path.name}/m", options(request.getfixturevalue("s3")))


def batch(label: int, keys: int = 500) -> shoal.Batch:
    return shoal.Batch(np.full(keys, label, np.float32), np.arange(keys + 1), np.arange(keys, dtype=np.uint64), None)


def save(place: StorageDir, label: int, **how: Any) -> None:
    """Save a model that tells all examples to be of a label."""
    with shoal.local(slots=16) as store:
        model = shoal.LogisticRegression(store=store)
        model.partial_fit(batch(label))
        assert model.save(place, **{"overwrite": True} | how) == place.location


def reported(place: StorageDir) -> int:
    """The label that a model tells; it must be whole."""
    with shoal.models.load(place) as model:
        p = model.probabilities(batch(0))
    assert np.all(p == p[0]), "rows of two models"
    assert abs(p[0] - 0.5) > 0.01
    return int(p[0] > 0.5)


def held(place: StorageDir) -> list[str]:
    """What lies in a directory, without the digits that each save draws."""
    return sorted(re.sub(r"-[0-9a-f]{8}\b", "", name) for name in [*place.names(), *place.subdirectories()])


# ---- there and back --------------------------------------------------------------------------------------------------


def test_a_model_is_replaced_and_what_it_replaces_is_gone(place: StorageDir) -> None:
    names = shoal.data.FeatureNames()
    names.add(np.array([3], np.uint64), ["site=a.com"])
    save(place, 1, names=names)
    assert held(place) == ["checkpoint", "model.json", "names.names"]
    assert shoal.models.load_names(place) == names
    assert reported(place) == 1
    first = set(place.subdirectories())
    with pytest.raises(ValueError, match="holds a model already"):
        save(place, 0, overwrite=False)
    for left in ("checkpoint-0badcafe", "best-000007"):  # of one that was killed
        place.child(left).make()
        with place.child(left).create("x") as file:
            file.write(b"half")
    save(place, 0)
    assert held(place) == ["checkpoint", "model.json"]
    assert not first & set(place.subdirectories())
    assert shoal.models.load_names(place) is None
    assert reported(place) == 0


def test_a_model_on_s3_is_found_by_its_url_and_options(s3: str, tmp_path: Path) -> None:
    url, how = f"s3://{BUCKET}/{tmp_path.name}/m", options(s3)
    with shoal.FactorizationMachine(4) as model:
        model.fit([batch(1), batch(0)], valid=[batch(1)], progress=False)
        model.calibrate(batch(1), "platt")
        assert model.save(url, storage_options=how) == url
        expected = model.probabilities(batch(1))
        with shoal.FactorizationMachine.load(url, storage_options=how) as again:
            assert np.array_equal(again.probabilities(batch(1)), expected)
            assert again.history == model.history
        with shoal.FactorizationMachine(4) as another:
            assert another.restore(url, storage_options=how) is None
            assert np.array_equal(another.probabilities(batch(1)), expected)
    assert shoal.models.load_names(url, storage_options=how) is None
    with pytest.raises(ValueError, match=f"{url} is a factorization machine"):
        shoal.LogisticRegression.load(url, storage_options=how)
    assert shoal.tools.report(url, storage_options=how) == f"{url}/report.html"
    shoal.tools.report(url, f"{url}.html", storage_options=how)
    page = open_dir(url, how).read("report.html")
    assert open_dir(url, how).child("..").read("m.html") == page
    assert b"factorization machine" in page
    with shoal.FactorizationMachine.load(url, storage_options=how) as model:
        model.save(url, storage_options=how, overwrite=True)  # the page is nobody's to remove
    assert held(open_dir(url, how)) == ["checkpoint", "model.json", "report.html"]


def test_what_is_no_model_is_never_written_to(place: StorageDir) -> None:
    place.make()
    with place.create("thesis.tex") as file:
        file.write(b"years of work")
    with pytest.raises(ValueError, match="neither empty nor a model"):
        save(place, 1)
    with pytest.raises(ValueError, match=r"thesis\.tex is a file"):
        save(place.child("thesis.tex"), 1)
    assert place.names() == ["thesis.tex"]
    with pytest.raises(shoal.CorruptionError, match=r"model\.json is missing"):
        reported(place)
    with pytest.raises(shoal.CorruptionError, match=r"is a file where a directory should be"):
        reported(place.child("thesis.tex"))


def test_where_nothing_can_be_written_a_fit_says_so_before_it_learns(s3: str) -> None:
    def never() -> Any:
        raise AssertionError("learned")
        yield

    with shoal.LogisticRegression() as model:
        with pytest.raises(shoal.errors.StorageError, match=r"s3://nowhere/m/\.model\.json.* cannot be written"):
            model.fit(never(), progress=False, checkpoint=Checkpointing("s3://nowhere/m", storage_options=options(s3)))
        assert model.examples == 0


def test_a_cluster_saves_a_model_to_s3_and_loads_it(s3: str, tmp_path: Path) -> None:
    there = open_dir(f"s3://{BUCKET}/{tmp_path.name}/m", options(s3))
    with opened("connected", slots=16) as store:
        model = shoal.LogisticRegression(store=store)
        model.partial_fit(batch(1))
        model.save(there)
    assert reported(there) == 1
    with opened("connected", slots=16) as store:
        again = shoal.LogisticRegression.load(there, store=store)
        assert np.all(again.probabilities(batch(1)) > 0.5)


# ---- cut off ---------------------------------------------------------------------------------------------------------


# One of the slot file's 16 sections, its header, the names behind it.
@pytest.mark.parametrize(("place", "count"), everywhere(1, [9, 1, 18]), indirect=["place"])
def test_a_save_that_is_interrupted_leaves_what_was_there(
    place: StorageDir, s3: str, tmp_path: Path, count: int
) -> None:
    save(place, 1, names=shoal.data.FeatureNames())
    before = sorted([*place.names(), *place.subdirectories()])
    with after_writes(count, interrupt), pytest.raises(KeyboardInterrupt):
        save(place, 0, names=shoal.data.FeatureNames())
    assert sorted([*place.names(), *place.subdirectories()]) == before
    assert uploads(s3, tmp_path.name) == []
    assert reported(place) == 1
    save(place, 0)
    assert reported(place) == 0


def test_a_connection_that_is_lost_while_saving_leaves_what_was_there(s3: str, wire: Wire, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/m"
    near, there = (
        open_dir(url, options(wire.address.replace("tcp", "http"))),
        open_dir(url, options(s3)),
    )
    save(near, 1)

    def lose() -> None:
        wire.close()
        wire.break_off()

    with after_writes(2, lose), pytest.raises(shoal.errors.StorageError, match=f"{url}/.* cannot be written"):
        save(near, 0)
    assert reported(there) == 1
    save(there, 0)
    assert held(there) == ["checkpoint", "model.json"]
    assert reported(there) == 0


# ---- two writers -----------------------------------------------------------------------------------------------------


def at_the_model(monkeypatch: pytest.MonkeyPatch, what: Callable[[Callable[[], None]], None]) -> None:
    """Let ``what`` put a model.json in place, by what it is given."""
    for kind in (LocalDir, RemoteDir):
        real = kind.publish

        def publish(place: Any, name: str, *data: Any, real: Any = real, **how: Any) -> None:
            if name != files.MODEL_FILE:
                real(place, name, *data, **how)
                return
            what(lambda: real(place, name, *data, **how))

        monkeypatch.setattr(kind, "publish", publish)


@pytest.mark.parametrize(("place", "there_before"), everywhere(1, [True, False]), indirect=["place"])
def test_of_two_saves_that_race_one_is_told_and_the_other_is_whole(
    place: StorageDir, monkeypatch: pytest.MonkeyPatch, there_before: bool
) -> None:
    if there_before:
        save(place, 0)
    both = threading.Barrier(2)

    def race(label: int) -> str:
        try:
            save(place, label)
        except shoal.errors.SaveConflictError as error:
            return str(error)
        return ""

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        at_the_model(patch, lambda put: (both.wait(120), put()))  # type: ignore[arg-type,return-value]
        answers = list(pool.map(race, (0, 1)))
    assert answers.count("") == 1
    (text,) = set(answers) - {""}
    assert f"{place}/model.json was written by another process" in text
    assert reported(place) == answers.index("")
    assert held(place) == ["checkpoint", "model.json"]
    save(place, 1)
    assert reported(place) == 1


@pytest.mark.combined
@pytest.mark.parametrize("moment", ["before it is put in place", "behind that"])
def test_a_save_that_comes_between_another_ones_last_steps_is_whole(
    place: StorageDir, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save(place, 0)
    done: list[str] = []

    def other() -> None:
        if not done:
            done.append("begun")
            save(place, 1)

    def put(really: Callable[[], None]) -> None:
        if moment == "before it is put in place":
            other()
            really()
        else:
            really()
            other()

    at_the_model(monkeypatch, put)
    if moment == "before it is put in place":
        with pytest.raises(shoal.errors.SaveConflictError):
            save(place, 0)
    else:
        save(place, 0)
    assert reported(place) == 1
    assert held(place) == ["checkpoint", "model.json"]


# ---- fits that go on -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libsvm file of 600 examples."""
    random = np.random.default_rng(7)
    weights = random.normal(size=300)
    lines = []
    for _ in range(600):
        keys = np.unique(random.integers(0, 300, 6))
        label = int(random.random() < 1 / (1 + np.exp(-weights[keys].sum())))
        lines.append(f"{label} " + " ".join(f"{key}:1" for key in keys))
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def learned(model: Model) -> list[Any]:
    """All that a model knows, to the bit, and what it noted down."""
    rows = [
        (table.stats().step, [(count, section.tobytes()) for count, section, _ in map(table.shard.section, range(64))])
        for table in model.tables
    ]
    return [rows, model.examples, [(p.number, p.metrics, p.valid, p.complete) for p in model.history.passes]]


@pytest.mark.parametrize("patience", long_after(1, [None, 1]))
@pytest.mark.parametrize("stop", long_after(1, [18, 4]))  # within the first pass, and behind it
def test_a_fit_on_s3_goes_on_to_the_bits_of_one_that_never_stopped(
    log: Path, s3: str, tmp_path: Path, patience: int | None, stop: int
) -> None:
    url, how = f"s3://{BUCKET}/{tmp_path.name}/cut", options(s3)
    there = open_dir(url, how)

    def run(directory: Path | str, every: int = 12, **more: Any) -> list[Any]:
        with shoal.local(threads=1, slots=64) as store:
            model = shoal.LogisticRegression(shoal.FTRL(alpha=0.5), store=store, warm_up=False)
            data = shoal.read_libsvm(log, batch_size=50)
            model.fit(
                data,
                valid=data.split(0, 4),
                epochs=2 if patience is None else 6,
                progress=False,
                checkpoint=Checkpointing(directory, every=every, **more),
                early_stopping=None if patience is None else EarlyStopping(patience),
            )
            return learned(model)

    expected = run(tmp_path / "whole")
    with power_fails_behind(stop):
        run(url, every=3, storage_options=how)
    assert files.read(there).fit_state is not None
    best = ["best-000001"] if patience and stop == 18 else []
    assert held(there) == sorted([*best, "checkpoint", "model.json"])
    assert run(url, storage_options=how, resume=True) == expected
    assert held(there) == ["checkpoint", "model.json"]
    with pytest.raises(ValueError, match=f"the fit in {url} has finished"):
        run(url, storage_options=how, resume=True)
    with pytest.raises(ValueError, match=f"{url} holds a model already"):
        run(url, storage_options=how)


@pytest.mark.long
def test_a_process_that_is_killed_over_s3_goes_on_to_the_same_bits(log: Path, s3: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/killed"
    there = open_dir(url, options(s3))
    environment = {**os.environ, "FSSPEC_S3_ENDPOINT_URL": s3}  # fsspec's own configuration
    command = [sys.executable, "-m", "shoal", "train", "lr", "--data", str(log), "--format", "libsvm", "--quiet"]
    command += [
        "--batch-size",
        "10",
        "--epochs",
        "3",
        "--l1",
        "0.1",
        "--checkpoint-every",
        "12",
        "--resume",
        "--output",
    ]
    examples, enough = 0, 300
    for kill in range(2):
        process = subprocess.Popen([*command, url], env=environment)
        deadline = time.monotonic() + 200
        while (now := files.read(there).examples if files.is_model(there) else 0) <= max(examples, enough):
            assert now >= examples, "it began anew"
            assert process.poll() is None, "it had ended"
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.05)
        time.sleep(0.03 * kill)  # within the next save
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        with shoal.models.load(there) as model:  # whole
            assert examples < model.examples < 1800
            examples = model.examples
    subprocess.run([*command, url], env=environment, check=True, timeout=200)
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=200)
    with shoal.local(slots=64) as here, shoal.local(slots=64) as store:
        got = learned(shoal.models.load(there, store=here))
        assert got == learned(shoal.models.load(tmp_path / "whole", store=store))
    assert held(there) == ["checkpoint", "config.toml", "model.json"]


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in the bucket, which fsspec is configured for: commands take no options."""
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", options(s3))
    monkeypatch.chdir(tmp_path)
    return f"s3://{BUCKET}/{tmp_path.name}"


def run(capsys: Any, *command: str) -> Any:
    assert main([*command, "--json", "--quiet"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_every_command_takes_a_model_on_s3(log: Path, bucket: str, capsys: Any) -> None:
    url, data = f"{bucket}/ctr", str(log)
    train = ["train", "lr", "--data", data, "--format", "libsvm", "--batch-size", "50"]
    assert run(capsys, *train, "--names", "--output", url)["model"] == url
    run(capsys, *train, "--names", "--output", "ctr")
    assert main([*train, "--output", url]) == 2
    assert f"{url} holds a model already" in capsys.readouterr().err
    found, here = (run(capsys, "evaluate", model, "--data", data) for model in (url, "ctr"))
    assert {**found, "model": "ctr"} == here
    for model, out in ((url, "p.there"), ("ctr", "p.here")):
        run(capsys, "predict", model, "--data", data, "--output", out)
    assert Path("p.there").read_bytes() == Path("p.here").read_bytes()
    found, here = (run(capsys, "inspect", model, "--top", "3") for model in (url, "ctr"))
    assert found["top"] == here["top"]
    assert found["checkpoint"].startswith(f"{url}/checkpoint-")
    assert run(capsys, "inspect", found["checkpoint"])["kind"] == "checkpoint"
    assert run(capsys, "report", url)["report"] == f"{url}/report.html"
    for model, out in ((url, f"{bucket}/served/1"), ("ctr", "served")):
        assert run(capsys, "export", model, "--output", out)["version"] == 1
    found, here = (run(capsys, "inspect", export)["model"] for export in (f"{bucket}/served/1", "served"))
    assert found == here
    run(capsys, "convert", url, "--output", "rows")
    run(capsys, "convert", "rows", "--output", f"{bucket}/again", "--from", "rows")
    assert run(capsys, "inspect", f"{bucket}/again")["tables"][0]["rows"] == 301  # 300 features and the bias
    assert main(["convert", url, "--output", f"{bucket}/rows"]) == 2
    assert "is read and written on this machine only" in capsys.readouterr().err
    grid = run(capsys, *train, "--grid", "l1=0,1", "--save-all", "--output", f"{bucket}/grid")
    assert {one["model"] for one in grid["grid"]} == {f"{bucket}/grid/l1=0", f"{bucket}/grid/l1=1"}
    for one in grid["grid"]:
        assert run(capsys, "evaluate", one["model"], "--data", data)["examples"] == 600
    for command in (["evaluate", "--data", data], ["report"], ["inspect"]):
        assert main([command[0], f"{bucket}/nothing", *command[1:]]) == 2
        assert f"{bucket}/nothing: there is no such" in capsys.readouterr().err
