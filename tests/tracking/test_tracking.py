"""Trackers and callbacks: what MLflow and TensorBoard have after a fit, read back by their own clients."""

import json
import logging
import math
from pathlib import Path

import mlflow.exceptions
import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import shoal
from shoal import Batch
from shoal.cli import main
from shoal.models import Callback, EarlyStopping
from shoal.storage.open import open_dir
from shoal.tracking import Tracker
from shoal.tracking.mlflow import MLflow, copy_model

LR = ["train", "lr", "--format", "libsvm", "--batch-size", "100", "--no-warm-up", "--quiet"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)


@pytest.fixture(scope="module")
def mlruns(tmp_path_factory):
    """A folder of MLflow whose database is made: that takes a second."""
    folder = tmp_path_factory.mktemp("tracking") / "mlruns"
    shoal.tracking.MLflow(str(folder))
    return folder


def client_of(folder):
    return MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


def runs_of(client, experiment):
    """The runs of an experiment, the first one first."""
    number = client.get_experiment_by_name(experiment).experiment_id
    return client.search_runs([number], order_by=["attributes.start_time ASC"])


def batches(seed=0, count=10, size=100):
    """Examples whose label follows one of five keys."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        keys = rng.integers(0, 5, size, dtype=np.uint64)
        labels = (rng.random(size) < 0.1 + 0.2 * keys).astype(np.float32)
        yield Batch(labels, np.arange(size + 1), keys, None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same as libsvm text: train.libsvm and valid.libsvm."""
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("train", 0), ("valid", 1)):
        pairs = [pair for batch in batches(seed) for pair in zip(batch.labels, batch.keys, strict=True)]
        lines = [f"{label:.0f} {key}:1" for label, key in pairs]
        (folder / f"{name}.libsvm").write_text("\n".join(lines) + "\n")
    return folder


# ---- callbacks -------------------------------------------------------------------------------------------------------


class Calls(Callback):
    """Keeps the calls."""

    def __init__(self, fail_at=None):
        self.calls = []
        self.fail_at = fail_at

    def note(self, name, *what):
        self.calls.append((name, *what))
        if name == self.fail_at:
            raise RuntimeError(name)

    def fit_begins(self, progress):
        self.note("begins", progress.pass_number, progress.settings["lr.alpha"], progress.settings["epochs"])

    def batch_done(self, progress):
        self.note("batch", progress.batches)

    def pass_done(self, progress):
        self.note("pass", progress.pass_number)

    def fit_ends(self, progress, error):
        self.note("ends", progress.examples, type(error))


def test_a_callback_sees_the_beginning_the_batches_the_passes_and_the_end():
    calls = Calls()
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.25), warm_up=False) as model:
        model.fit(list(batches(count=2)), epochs=2, progress=False, callbacks=calls)
    assert calls.calls == [
        ("begins", 0, 0.25, 2),
        ("batch", 1),
        ("batch", 2),
        ("pass", 1),
        ("batch", 3),
        ("batch", 4),
        ("pass", 2),
        ("ends", 400, type(None)),
    ]


@pytest.mark.parametrize("fail_at", ["begins", "batch", "pass", "ends"])
def test_the_end_of_a_failed_fit_reaches_those_callbacks_whose_beginning_returned(fail_at):
    first, failing, last = Calls(), Calls(fail_at), Calls()
    with shoal.LogisticRegression(warm_up=False) as model, pytest.raises(RuntimeError, match=fail_at):
        model.fit(list(batches(count=1)), progress=False, callbacks=[first, failing, last])
    failed = type(None) if fail_at == "ends" else RuntimeError
    examples = 0 if fail_at == "begins" else 100
    assert first.calls[-1] == ("ends", examples, failed)
    if fail_at == "begins":
        assert last.calls == []
        assert failing.calls[-1][0] == "begins"
    else:
        assert last.calls[-1] == failing.calls[-1] == ("ends", examples, failed)


def test_the_weights_at_the_end_are_those_that_are_kept():
    """With patience the best pass's weights are restored before `fit_ends`."""
    seen = {}

    class End(Callback):
        def pass_done(self, progress):
            seen[progress.pass_number] = progress.model.weights()[1].tolist()

        def fit_ends(self, progress, error):
            seen["end"] = progress.model.weights()[1].tolist()

    train, valid = list(batches(count=4, size=8)), list(batches(1, count=4, size=8))
    with shoal.LogisticRegression(shoal.FTRL(alpha=30.0), warm_up=False) as model:
        model.fit(train, valid=valid, epochs=20, progress=False, callbacks=End(), early_stopping=EarlyStopping(1))
        best = model.history.best_pass
        assert len(model.history.passes) > best
        assert seen["end"] == seen[best] != seen[len(model.history.passes)]


class Notes(Tracker):
    """A tracker of one's own."""

    def __init__(self, **how):
        super().__init__(**how)
        self.written = []
        self.ends = []

    def begin_run(self, settings):
        self.settings = dict(settings)

    def write(self, examples, numbers):
        self.written.append((examples, dict(numbers)))

    def end_run(self, model, saved, error):
        self.ends.append((model, saved, error))


def test_a_tracker_gets_progressive_numbers_and_those_of_passes_and_validation():
    notes = Notes(log_every=5, settings={"mine": 7})
    with shoal.LogisticRegression(warm_up=False) as model:
        model.fit(list(batches()), valid=list(batches(1)), progress=False, callbacks=notes)
        done = model.history.passes[0]
        rows = len(model.table)
    assert notes.settings["mine"] == 7
    assert notes.settings["lr.optimizer"] == "FTRL"
    assert [examples for examples, _ in notes.written] == [500, 1000, 1000]
    assert notes.written[1][1]["progressive/logloss"] == done.metrics.logloss
    assert notes.written[0][1].keys() == {
        f"progressive/{name}" for name in ("logloss", "auc", "calibration", "examples_per_second")
    }
    last = notes.written[2][1]
    assert (last["valid/auc"], last["pass/logloss"], last["rows/lr"]) == (done.valid.auc, done.metrics.logloss, rows)
    assert notes.ends == [(model, None, None)]


def test_numbers_that_are_not_finite_are_left_out():
    notes = Notes(log_every=1)
    one_class = Batch(np.ones(3, np.float32), np.arange(4), np.arange(3, dtype=np.uint64), None)
    with shoal.LogisticRegression(warm_up=False) as model:
        model.fit([one_class], progress=False, callbacks=notes)
        assert math.isnan(model.history.passes[0].metrics.auc)
    assert "progressive/auc" not in notes.written[0][1]


def test_fits_in_one_block_make_one_run_and_its_error_is_that_of_the_last_fit():
    with shoal.LogisticRegression() as model:
        with Notes() as notes:
            for _ in range(2):
                model.fit(list(batches(count=1)), progress=False, callbacks=notes)
            assert notes.ends == []
            notes.model_saved("here")
        assert notes.ends == [(model, "here", None)]

        def stop(progress):
            raise KeyboardInterrupt

        with Notes() as stopped, pytest.raises(KeyboardInterrupt):
            model.fit(list(batches(count=1)), progress=False, callbacks=[stopped, stop])
        ((left, _, error),) = stopped.ends
        assert left is None
        assert type(error) is KeyboardInterrupt
    with pytest.raises(ValueError, match="log_every is 0"):
        Notes(log_every=0)


def test_a_fitted_model_is_written_from_its_history():
    live, later = Notes(log_every=1), Notes()
    with shoal.LogisticRegression(warm_up=False) as model:
        with pytest.raises(TypeError, match="model is a str: pass the fitted model"):
            later.log_fitted("model")
        with pytest.raises(ValueError, match="not fitted yet"):
            later.log_fitted(model)
        model.fit(list(batches(count=3)), valid=list(batches(1, 3)), progress=False, callbacks=live)
        later.log_fitted(model, "here")
    assert later.settings == live.settings
    assert later.ends == [(model, "here", None)]

    def flat(notes):
        return {(n, name): x for n, numbers in notes.written for name, x in numbers.items() if "second" not in name}

    assert flat(later).items() <= flat(live).items()
    assert {name for _, name in flat(live)} - {name for _, name in flat(later)} == {"progressive/calibration"}


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_gets_event_files(tmp_path):
    tracker = shoal.tracking.TensorBoard(tmp_path, "a", log_every=5)
    with shoal.LogisticRegression(warm_up=False) as model:
        model.fit(list(batches()), valid=list(batches(1)), progress=False, callbacks=tracker)
        done = model.history.passes[0]
    assert tracker.directory == tmp_path / "a-1"
    events = EventAccumulator(str(tracker.directory))
    events.Reload()
    assert [event.step for event in events.Tensors("progressive/logloss")] == [500, 1000]
    (event,) = events.Tensors("valid/auc")
    assert event.tensor_proto.float_val[0] == np.float32(done.valid.auc)
    (settings,) = events.Tensors("settings")
    assert b"| lr.optimizer | FTRL |" in settings.tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_runs_of_one_tensorboard_directory_have_directories_of_their_own(tmp_path):
    found = []
    for name, resume in (("a", False), ("a", False), ("a", True), ("b", True), ("a[1]", False), ("a[1]", True)):
        tracker = shoal.tracking.TensorBoard(tmp_path, name, resume=resume)
        tracker.begin_run({})
        tracker.write(1, {"x": 1.0})
        tracker.end_run(None, None, None)
        found.append(tracker.directory.name)
    assert found == ["a-1", "a-2", "a-2", "b-1", "a[1]-1", "a[1]-1"]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(set(found))


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*type hint")  # of MLflow about its own types
def test_mlflow_gets_a_run_with_the_model_its_report_and_a_version(mlruns, tmp_path):
    tracker = shoal.tracking.MLflow(
        str(mlruns), "python", "first", log_every=5, register="keys", settings={"note": "x" * 7000}
    )
    held_out = list(batches(1))
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.25), warm_up=False) as model:
        model.fit(list(batches()), valid=held_out, progress=False, callbacks=tracker)
        expected = model.probabilities(held_out[0])
        auc = model.history.passes[0].valid.auc
    client = client_of(mlruns)
    (run,) = runs_of(client, "python")
    assert (run.info.run_id, run.info.run_name, run.info.status) == (tracker.run_id, "first", "FINISHED")
    assert (run.data.params["lr.alpha"], run.data.params["epochs"]) == ("0.25", "1")
    assert len(run.data.params["note"]) == 6000
    assert run.data.metrics["valid/auc"] == auc
    history = client.get_metric_history(tracker.run_id, "progressive/logloss")
    assert [metric.step for metric in history] == [500, 1000]
    assert {one.path for one in client.list_artifacts(tracker.run_id)} == {"model", "report.html", "settings.json"}
    settings = json.loads((mlruns / "artifacts" / tracker.run_id / "artifacts" / "settings.json").read_text())
    assert len(settings["note"]) == 7000
    # The registered version predicts as the model, loaded by MLflow itself.
    assert tracker.version == "1"
    from mlflow import pyfunc, set_tracking_uri

    set_tracking_uri(f"sqlite:///{mlruns / 'mlflow.db'}")
    found = pyfunc.load_model("models:/keys/1")
    loaded = found.unwrap_python_model() if hasattr(found._model_impl, "python_model") else found._model_impl
    with loaded.model as again:
        assert again.probabilities(held_out[0]).tolist() == expected.tolist()
    second = shoal.tracking.MLflow(str(mlruns), "python", register="keys")
    with shoal.LogisticRegression() as model:
        model.fit(list(batches(count=1)), progress=False, callbacks=second)
    assert second.version == "2"


@pytest.mark.slow
def test_a_run_of_mlflow_is_resumed_by_its_name_and_keeps_its_settings(mlruns):
    with shoal.LogisticRegression(warm_up=False) as model:
        for resume in (False, True, False):
            how = {"log_every": 1, "log_model": False, "resume": resume, "settings": {"seed": resume}}
            tracker = shoal.tracking.MLflow(str(mlruns), "resumed", "it's", **how)
            model.fit(list(batches(count=1)), progress=False, callbacks=tracker)
    client = client_of(mlruns)
    first, other = runs_of(client, "resumed")
    history = client.get_metric_history(first.info.run_id, "pass/logloss")
    assert [metric.step for metric in history] == [100, 200]
    assert first.data.params["seed"] == "False"
    assert first.info.status == other.info.status == "FINISHED"
    with pytest.raises(ValueError, match="a run is resumed by its name, and name is None"):
        shoal.tracking.MLflow(str(mlruns), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED")])
def test_a_fit_that_does_not_end_well_is_one_in_mlflow_too(mlruns, error, status):
    def stop(progress):
        raise error

    with shoal.LogisticRegression() as model, pytest.raises(error):
        model.fit(list(batches(count=1)), progress=False, callbacks=[shoal.tracking.MLflow(str(mlruns), status), stop])
    client = client_of(mlruns)
    (run,) = runs_of(client, status)
    assert run.info.status == status
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["settings.json"]


def test_metrics_that_mlflow_does_not_accept_are_lost_with_one_warning_and_the_fit_goes_on(mlruns, monkeypatch, caplog):
    def refuse(*arguments, **more):
        if "metrics" in more:
            raise mlflow.exceptions.MlflowException("the disk\nis full")

    tracker = shoal.tracking.MLflow(str(mlruns), "lost", log_every=1, log_model=False)
    monkeypatch.setattr(tracker._client, "log_batch", refuse)
    with shoal.LogisticRegression(warm_up=False) as model, caplog.at_level(logging.WARNING, "shoal.tracking"):
        model.fit(list(batches(count=3)), progress=False, callbacks=tracker)
        assert model.examples == 300
    (record,) = [one for one in caplog.records if one.name.startswith("shoal.tracking")]
    assert record.getMessage() == f"metrics of the run {tracker.run_id} are lost: the disk is full"
    (run,) = runs_of(client_of(mlruns), "lost")
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_a_model_that_mlflow_does_not_store_is_an_error_and_the_run_has_failed(mlruns, monkeypatch):
    def refuse(*arguments, **more):
        raise mlflow.exceptions.MlflowException("no room")

    tracker = shoal.tracking.MLflow(str(mlruns), "full")
    monkeypatch.setattr(tracker._client, "log_artifacts", refuse)
    with shoal.LogisticRegression() as model:
        with pytest.raises(shoal.errors.StorageError, match="does not store the model: no room"):
            model.fit(list(batches(count=1)), progress=False, callbacks=tracker)
        assert model.examples == 100
    assert runs_of(client_of(mlruns), "full")[0].info.status == "FAILED"
    with pytest.raises(ValueError, match="register is 'a', and the run has no model"):
        shoal.tracking.MLflow(str(mlruns), log_model=False, register="a")


@pytest.mark.slow
def test_files_of_earlier_versions_of_mlflow_are_used_where_mlflow_allows_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "old").as_uri()
    with shoal.LogisticRegression() as model:
        model.fit(list(batches(count=1)), progress=False, callbacks=shoal.tracking.MLflow(uri, "files"))
    client = MlflowClient(tracking_uri=uri)
    (run,) = runs_of(client, "files")
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"model", "report.html", "settings.json"}
    shoal.tracking.MLflow(str(tmp_path / "old"), "files")  # as a folder too
    assert not (tmp_path / "old" / "mlflow.db").exists()


@pytest.mark.slow
def test_a_model_of_a_cluster_is_stored_from_its_directory(mlruns, tmp_path):
    with shoal.launch(servers=1, storage_roots=[tmp_path]) as store:
        model = shoal.LogisticRegression(store=store)
        with shoal.tracking.MLflow(str(mlruns), "cluster") as run:
            model.fit(list(batches(count=1)), progress=False, callbacks=run)
            run.model_saved(model.save(tmp_path / "model"))
        with pytest.raises(shoal.errors.StorageError, match=r"model_saved\(directory\); or pass log_model=False"):
            model.fit(list(batches(count=1)), progress=False, callbacks=shoal.tracking.MLflow(str(mlruns), "cluster"))
    stored = mlruns / "artifacts" / run.run_id / "artifacts" / "model"
    with shoal.load(stored) as again, shoal.load(tmp_path / "model") as saved:
        assert again.weights()[1].tolist() == saved.weights()[1].tolist()


def test_a_model_is_copied_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "model" / "checkpoint").mkdir(parents=True)
    (tmp_path / "model" / "model.json").write_bytes(b"")
    (tmp_path / "model" / "checkpoint" / "rows").write_bytes(content := bytes(range(256)) * 5000)
    copy_model(open_dir(tmp_path / "model"), tmp_path / "copy")
    assert (tmp_path / "copy" / "checkpoint" / "rows").read_bytes() == content
    assert (tmp_path / "copy" / "model.json").read_bytes() == b""


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_lr_writes_its_runs_with_the_calibrated_model(data, mlruns, tmp_path):
    out, boards = tmp_path / "first", tmp_path / "boards"
    files = ["--data", str(data / "train.libsvm"), "--valid", str(data / "valid.libsvm"), "--calibrate", "platt"]
    track = ["--mlflow", str(mlruns), "--experiment", "lines", "--register", "lines", "--tensorboard", str(boards)]
    assert main([*LR, *files, *track, "--log-every", "4", "--output", str(out)]) == 0
    client = client_of(mlruns)
    (run,) = runs_of(client, "lines")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["lr.alpha"] == "0.1"
    assert [one.step for one in client.get_metric_history(run.info.run_id, "progressive/auc")] == [400, 800]
    stored = mlruns / "artifacts" / run.info.run_id / "artifacts" / "model"
    assert (stored / "model.json").read_bytes() == (out / "model.json").read_bytes()
    assert b'"calibration":{' in (out / "model.json").read_bytes()
    assert client.get_model_version("lines", "1").run_id == run.info.run_id
    assert [one.name for one in boards.iterdir()] == ["first-1"]


@pytest.mark.slow
def test_train_fm_resumes_its_run(data, mlruns, tmp_path, monkeypatch):
    files = ["--data", str(data / "train.libsvm"), "--output", str(tmp_path / "few")]
    command = ["train", "fm", *LR[2:], *files, "--resume"]
    track = ["--mlflow", str(mlruns), "--experiment", "fm", "--no-log-model"]

    def stop(self, progress):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracker, "pass_done", stop)  # a fit that is interrupted after its first pass
    assert main([*command, *track, "--epochs", "2"]) == 130
    (run,) = runs_of(client_of(mlruns), "fm")
    assert run.info.status == "KILLED"
    assert main([*command, *track, "--epochs", "2"]) == 0
    client = client_of(mlruns)
    (run,) = runs_of(client, "fm")
    assert [one.step for one in client.get_metric_history(run.info.run_id, "pass/auc")] == [2000]
    assert run.info.status == "FINISHED"
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["settings.json"]


@pytest.mark.slow
def test_a_grid_and_a_batch_solver_are_written_when_they_are_fitted(data, mlruns, tmp_path):
    files = ["--data", str(data / "train.libsvm"), "--mlflow", str(mlruns)]
    grid = ["--grid", "alpha=0.05,0.5", "--save-all", "--experiment", "grid"]
    assert main([*LR, *files, *grid, "--output", str(tmp_path / "grid")]) == 0
    client = client_of(mlruns)
    assert {run.info.run_name: run.data.params["alpha"] for run in runs_of(client, "grid")} == {
        "alpha=0.05": "0.05",
        "alpha=0.5": "0.5",
    }
    solver = ["--solver", "dbpg", "--l1", "1", "--experiment", "dbpg"]
    assert main([*LR, *files, *solver, "--output", str(tmp_path / "solved")]) == 0
    (run,) = runs_of(client, "dbpg")
    assert "pass/logloss" in run.data.metrics


def test_options_of_tracking_that_have_no_effect_are_refused(data, tmp_path, capsys):
    files = ["--data", str(data / "train.libsvm"), "--output", str(tmp_path / "x")]
    for words, says in (
        (["--register", "a"], "--register requires --mlflow"),
        (["--no-log-model"], "--no-log-model requires --mlflow"),
        (["--log-every", "5"], "--log-every requires --mlflow or --tensorboard"),
        (["--tensorboard", str(tmp_path), "--log-every", "0"], "--log-every is 0"),
    ):
        assert main([*LR, *files, *words]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_what_mlflow_refuses_is_one_line(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "0").mkdir(parents=True)
    (tmp_path / "old" / "0" / "meta.yaml").write_text("name: Default\n")  # files, as MLflow wrote them before
    for uri in ("old", "nonsense://x"):
        assert main([*LR, "--data", str(data / "train.libsvm"), "--output", "out", "--mlflow", uri]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"shoal: MLflow refuses '{uri}': ")
        assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid:80"])
def test_a_server_of_mlflow_that_is_not_there_is_an_error_at_once(host, monkeypatch):
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    # Had MLflow been asked, it would have tried again for more than a minute.
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *_: pytest.fail("MLflow was asked"))
    with pytest.raises(
        shoal.errors.StorageError, match=f"MLflow at http://{host} cannot be reached .*: is the server running"
    ):
        shoal.tracking.MLflow(f"http://{host}")


@pytest.mark.slow
def test_a_run_that_would_end_with_a_report_needs_matplotlib_from_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.tracking.mlflow.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="matplotlib"):
        MLflow(f"sqlite:///{tmp_path}/runs.db")
    MLflow(f"sqlite:///{tmp_path}/runs.db", log_model=False)


@pytest.mark.parametrize("name", ["", "a/b", "../run", None, 3])
def test_a_run_of_tensorboard_has_the_name_of_a_folder(name, tmp_path):
    with pytest.raises(ValueError, match="pass the name of a folder"):
        shoal.tracking.TensorBoard(tmp_path, name)


def test_a_database_of_mlflow_is_found_by_a_path_too(mlruns):
    shoal.tracking.MLflow(mlruns, "by path", log_model=False)
    assert client_of(mlruns).get_experiment_by_name("by path") is not None
