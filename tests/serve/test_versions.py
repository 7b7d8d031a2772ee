"""Several models and versions in one prediction server: policies, labels, shares of requests, rollback."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import shoal
from dropped import no_collector
from serving import ask, exported, instances, running, sparse_data, trained
from shoal import cli, models
from shoal.serve import ServedModel, ServedVersions, Settings, make_app, serve
from shoal.serve.versions import UnknownVersionError, parse_policy

ROWS = instances(sparse_data(np.random.default_rng(5), 8))
BODY = json.dumps({"instances": ROWS})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Exports ctr/1, ctr/2, ctr/3 and pairs/1, and the probabilities of each."""
    folder = tmp_path_factory.mktemp("served")
    want = {}
    batch = sparse_data(np.random.default_rng(5), 8)
    for name, version, kind in (
        ("ctr", 1, shoal.LogisticRegression),
        ("ctr", 2, shoal.LogisticRegression),
        ("ctr", 3, shoal.LogisticRegression),
        ("pairs", 1, shoal.FactorizationMachine),
    ):
        model = trained(folder / f"{name}-{version}", kind, seed=version)
        exported(model, folder / name / str(version))
        with models.load(model) as loaded:
            want[name, version] = loaded.probabilities(batch).tolist()
    return folder, want


@pytest.fixture
def ctr(made, tmp_path):
    """The three versions, in a directory that the test may change."""
    shutil.copytree(made[0] / "ctr", tmp_path / "ctr")
    return tmp_path / "ctr"


def versions_of(served):
    return [model.version for model in served.models]


def mapped_files(folder):
    """The files in a folder that this process has mapped."""
    return {
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("whole", [ServedVersions, ServedModel])
def test_files_of_a_version_that_nobody_reads_are_closed_at_once(ctr, whole):
    """They take room on the disk, although they are deleted, and no cycle is looked for while a server waits."""
    third = (ctr / "3").rename(ctr.parent / "3")
    with no_collector(), whole(ctr) as served:
        second = mapped_files(ctr)
        third.rename(ctr / "3")
        assert served.reload()
        assert second
        assert mapped_files(ctr)
        assert not second & mapped_files(ctr)
    del served
    assert not mapped_files(ctr)


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "versions"),
    [("latest", [3]), ("latest:2", [2, 3]), ("latest:9", [1, 2, 3]), ("all", [1, 2, 3]), ("1", [1]), ("1,3", [1, 3])],
)
def test_a_policy_determines_which_versions_are_loaded(made, policy, versions):
    with ServedVersions(made[0] / "ctr", Settings(**parse_policy(policy))) as served:
        assert versions_of(served) == versions
        assert served.now.version == versions[-1]


def test_versions_with_labels_are_loaded_besides(made):
    with ServedVersions(made[0] / "ctr", Settings(labels={"stable": 1})) as served:
        assert versions_of(served) == [1, 3]
        assert served.choose(label="stable").version == 1
        assert served.choose(version=3).version == served.choose().version == 3
        with pytest.raises(UnknownVersionError, match="version 2 is not served: the versions are 1, 3"):
            served.choose(version=2)
        with pytest.raises(UnknownVersionError, match="there is no label 'canary': the labels are stable"):
            served.choose(label="canary")


def test_an_export_by_itself_is_its_only_version(made):
    with ServedVersions(made[0] / "ctr" / "2") as served:
        assert versions_of(served) == [2]
        assert served.reload() is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latest": 0}, "latest is 0"),
        ({"versions": ()}, "versions is empty"),
        ({"versions": "3"}, "versions is '3': pass 'all', or numbers of versions"),
        ({"labels": {"a/b": 1}}, "label 'a/b'"),
        ({"split": {"canary": 1.0}}, "the split names 'canary', which is not a label: the labels are none"),
        ({"labels": {"a": 1}, "split": {"a": 1.5}}, "the share of a is 1.5"),
        ({"labels": {"a": 1, "b": 2}, "split": {"a": 0.5, "b": 0.4}}, "sum to 0.9: they must sum to 1"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latest": 1.5}, "latest is 1.5: pass the number of versions"),
        ({"versions": 3}, "versions is 3: pass 'all', or a tuple of numbers"),
        ({"versions": ("3",)}, "a version is '3': pass a whole number"),
        ({"labels": ["a"]}, r"labels is \['a'\]: pass a mapping"),
        ({"labels": {"a": "1"}}, "label 'a' is '1': pass the number of a version"),
        ({"labels": {"a": 1}, "split": {"a": "1"}}, "the share of a is '1': pass a number"),
    ],
)
def test_settings_of_other_types_are_refused(settings, message):
    with pytest.raises(TypeError, match=message):
        Settings(**settings)


def test_versions_may_be_a_list():
    assert Settings(versions=[3, 5]) == Settings(versions=(3, 5))


def test_what_is_served_is_named_where_it_is_something_else(ctr):
    with ServedVersions(ctr) as served:
        for call, message in (
            (lambda: ServedVersions(ctr, {"latest": 2}), "settings are a dict: pass shoal.serve.Settings"),
            (lambda: served.change({"latest": 2}), "settings are a dict: pass shoal.serve.Settings"),
            (lambda: make_app(str(ctr)), "pass a ServedModel, a ServedVersions, a LiveModel"),
            (lambda: make_app({}), r"served is \{\}: pass a ServedModel"),
            (lambda: make_app(served, hosts="example.com"), "hosts is 'example.com': pass a list of names"),
            (lambda: make_app(served, limits={"connections": 9}), "limits is .*: pass shoal.serve.Limits"),
            (lambda: serve(served, hosts="example.com"), "hosts is 'example.com': pass a list of names"),
            (lambda: serve(served, port="8080"), "port is '8080': pass a whole number"),
            (lambda: served.watch("1"), "the period of watch is '1': pass a number"),
        ):
            with pytest.raises(TypeError, match=message):
                call()
        for ports in ({"port": 1 << 16}, {"grpc_port": 99999}, {"port": 0, "grpc_port": -1}):
            with pytest.raises(ValueError, match="port is "):
                serve(served, **ports)


def test_other_words_are_no_policy():
    for text in ("newest", "latest:x", "1,x", "", "latest:-1"):
        with pytest.raises(ValueError, match="is not a policy: write latest, latest:N, all, or numbers"):
            parse_policy(text)


# ---- shares of requests ----------------------------------------------------------------------------------------------


def test_requests_are_shared_by_the_split_and_those_of_one_key_stay_together(made):
    draws = iter(np.random.default_rng(3).random(2000).tolist())
    settings = Settings(labels={"stable": 1, "canary": 2}, split={"stable": 0.9, "canary": 0.1})
    with ServedVersions(made[0] / "ctr", settings, draw=lambda: next(draws)) as served:
        counts = np.bincount([served.choose().version for _ in range(2000)], minlength=4)
        assert counts[1] + counts[2] == 2000
        assert abs(counts[2] - 200) < 60
        by_key = [served.choose(key=f"user {i}").version for i in range(2000)]
        assert abs(by_key.count(2) - 200) < 60
        assert by_key == [served.choose(key=f"user {i}").version for i in range(2000)]
        assert served.choose(version=1, key="user 1").version == 1


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_a_new_version_is_served_by_the_latest_and_not_by_a_pinned_policy(made, ctr):
    new = ctr / "3"
    shutil.move(new, ctr.parent / "3")
    with ServedVersions(ctr) as latest, ServedVersions(ctr, Settings(versions=(1,))) as pinned:
        assert versions_of(latest) == [2]
        shutil.move(ctr.parent / "3", new)
        shutil.rmtree(ctr / "2")  # no version that is no longer needed holds up a new one
        assert latest.reload() is True
        assert pinned.reload() is False
        assert (versions_of(latest), versions_of(pinned)) == ([3], [1])
        assert latest.reload() is False
        assert (latest.reloads, latest.failures) == (1, 0)


def test_a_rollback_is_a_change_of_the_label_or_of_the_policy(made):
    settings = Settings(labels={"stable": 3})
    with ServedVersions(made[0] / "ctr", settings) as served:
        before = served.choose(label="stable")
        served.change(Settings(labels={"stable": 2}))
        assert served.choose(label="stable").version == 2
        served.change(Settings(versions=(1,)))
        assert served.choose().version == 1
        assert versions_of(served) == [1]
        # A request that has taken its version is answered by it.
        batch = sparse_data(np.random.default_rng(5), 8)
        assert before.predictor.probabilities(batch).tolist() == made[1]["ctr", 3]


def test_a_change_to_a_version_that_is_missing_or_damaged_changes_nothing(ctr, caplog):
    data = next(path for path in sorted((ctr / "2").iterdir()) if path.suffix != ".json" and path.stat().st_size > 100)
    data.write_bytes(data.read_bytes()[:-1])
    with ServedVersions(ctr) as served, caplog.at_level(logging.WARNING, "shoal.serve"):
        for settings, message in (
            (Settings(versions=(7,)), "has no version 7: there are 1, 2, 3"),
            (Settings(labels={"old": 1, "bad": 2}), "has .* bytes instead of"),
        ):
            with pytest.raises(shoal.CorruptionError, match=message):
                served.change(settings)
            assert served.settings == Settings()
            assert versions_of(served) == [3]
        shutil.copytree(ctr / "2", ctr / "4")
        assert served.reload() is False  # the copy has the number 2
        assert served.failures == 0


def test_watching_finds_new_versions(ctr):
    shutil.move(ctr / "3", ctr.parent / "3")
    with ServedVersions(ctr, Settings(latest=2)) as served:
        with pytest.raises(ValueError, match="period of watch is 0"):
            served.watch(0)
        changed = threading.Event()
        reload = served.reload

        def noted():
            fresh = reload()
            if fresh:
                changed.set()
            return fresh

        served.reload = noted
        served.watch(0.01)
        shutil.move(ctr.parent / "3", ctr / "3")
        assert changed.wait(60)
        assert versions_of(served) == [2, 3]


def moved_in(made, folder, name, version):
    """Export version `version` of ctr by itself, where its number is 1, and move it to `folder / name`."""
    staged = folder.parent / f"staged-{name}"
    exported(made[0] / f"ctr-{version}", staged / "new")
    folder.mkdir(exist_ok=True)
    shutil.move(staged / "new", folder / name)


@pytest.mark.parametrize("open_model", [ServedModel, ServedVersions])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_two_exports_with_one_number_are_named_and_the_served_one_stays(made, tmp_path, open_model, names):
    first, second = names
    folder, batch = tmp_path / "ctr", sparse_data(np.random.default_rng(5), 8)
    moved_in(made, folder, first, 1)
    with open_model(folder) as served:
        shutil.copytree(folder / first, folder / "copy")
        assert served.reload() is False  # a copy is the same export
        moved_in(made, folder, second, 2)
        for failures in (1, 2):
            with pytest.raises(
                shoal.CorruptionError, match=r"a and b and copy in .* different exports, and each is versi"
            ):
                served.reload()
            assert served.failures == failures
            assert served.now.predictor.probabilities(batch).tolist() == made[1]["ctr", 1]
        with pytest.raises(shoal.CorruptionError, match="higher --version, or remove the other one"):
            open_model(folder)
        shutil.rmtree(folder / first)
        shutil.rmtree(folder / "copy")
        assert served.reload() is True
        assert served.now.version == 1
        assert served.now.predictor.probabilities(batch).tolist() == made[1]["ctr", 2]


@pytest.mark.parametrize("open_model", [ServedModel, ServedVersions])
@pytest.mark.parametrize("damaged", ["data", "manifest", "tables"])
def test_a_version_that_cannot_be_used_keeps_no_good_one_from_being_served(made, tmp_path, open_model, damaged):
    folder = tmp_path / "ctr"
    for number in (1, 2, 3):
        shutil.copytree(made[0] / "ctr" / str(number), tmp_path / str(number))
    folder.mkdir()
    if damaged == "tables":
        with shoal.local() as store:
            store.table("t").assign(np.array([1], np.uint64), np.ones(1, np.float32))
            store.export(tmp_path / "3", version=3, overwrite=True)
    else:
        file = next((tmp_path / "3").glob("*.frozen" if damaged == "data" else "manifest.json"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    shutil.move(tmp_path / "1", folder / "1")
    with open_model(folder) as served:
        shutil.move(tmp_path / "2", folder / "2")
        shutil.move(tmp_path / "3", folder / "3")
        for _ in range(2):
            with contextlib.suppress(shoal.CorruptionError, ValueError):
                served.reload()
            assert served.now.version == 2
        if damaged != "manifest":
            assert served.failures > 0
    with open_model(folder) as served:
        assert served.now.version == 2


def test_a_version_that_is_named_is_served_or_an_error(ctr):
    file = next((ctr / "2").glob("*.frozen"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(shoal.CorruptionError, match=file.name):
        ServedVersions(ctr, Settings(labels={"old": 2}))
    with ServedVersions(ctr, Settings(versions="all")) as served:
        assert versions_of(served) == [1, 3]


@pytest.mark.parametrize("open_model", [ServedModel, ServedVersions])
def test_nothing_is_opened_after_the_close(ctr, open_model):
    served = open_model(ctr)
    served.close()
    shutil.copytree(ctr / "3", ctr / "4")
    with pytest.raises(shoal.errors.ClosedError, match="was closed"):
        served.reload()


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(made):
    settings = Settings(versions=(2,), labels={"stable": 1, "canary": 3})
    with (
        ServedVersions(made[0] / "ctr", settings) as ctr,
        ServedVersions(made[0] / "pairs") as pairs,
        running({"ctr": ctr, "pairs": pairs}) as (port, _),
    ):
        yield port


def asked(port, path, body=BODY, **headers):
    status, answer, _ = ask(port, "POST", path, body, headers)
    return status, json.loads(answer)


@pytest.mark.parametrize(
    ("path", "name", "version"),
    [
        ("/predict", "ctr", 3),
        ("/models/ctr/predict", "ctr", 3),
        ("/models/ctr/versions/2/predict", "ctr", 2),
        ("/models/ctr/labels/stable/predict", "ctr", 1),
        ("/models/ctr/labels/canary/predict", "ctr", 3),
        ("/models/pairs/predict", "pairs", 1),
    ],
)
def test_each_path_is_answered_by_its_model_and_version(port, made, path, name, version):
    status, answer = asked(port, path)
    assert (status, answer["version"]) == (200, version)
    assert answer["probabilities"] == made[1][name, version]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/models/other/predict", "there is no model 'other': the models are ctr, pairs"),
        ("/models/ctr/versions/9/predict", "version 9 is not served: the versions are 1, 2, 3"),
        ("/models/ctr/labels/beta/predict", "there is no label 'beta': the labels are stable, canary"),
        (
            f"/models/ctr/versions/{'9' * 5000}/predict",
            f"{'9' * 80!r} is not a version: write a number, as in versions/3",
        ),
        ("/models/ctr/versions/-1/predict", "'-1' is not a version: write a number, as in versions/3"),
        (f"/models/{'x' * 5000}/predict", f"there is no model {'x' * 80!r}: the models are ctr, pairs"),
    ],
)
def test_what_is_not_served_is_404(port, path, message):
    assert asked(port, path) == (404, {"error": message})


FOREIGN = [
    {"Origin": "https://ads.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Host": "rebound.example"},
    {"Host": "rebound.example:{port}", "Origin": "http://rebound.example:{port}"},
    {"Host": "127.0.0.1.rebound.example:{port}"},
    {"Host": "[::1"},
]
OWN = [
    {},
    {"Host": "localhost:{port}", "Origin": "http://localhost:{port}"},
    {"Host": "[::1]:{port}"},
    {"Host": "ctr.localhost"},
    {"Host": socket.gethostname().upper()},
    {"Host": "Models.example:443", "Origin": "https://Models.example:443"},
]


@pytest.mark.parametrize("path", ["/reload", "/models/ctr"])
def test_no_web_page_changes_what_is_served(made, path):
    body = '{"labels": {"stable": 2}}'
    with (
        ServedVersions(made[0] / "ctr", Settings(versions="all", labels={"stable": 1})) as served,
        running({"ctr": served}, hosts=["models.example"]) as (port, _),
    ):
        for headers in FOREIGN:
            reported = {name: value.format(port=port) for name, value in headers.items()}
            status, answer, _ = ask(port, "POST", path, body, reported | {"Content-Type": "text/plain"})
            assert (status, served.settings.labels) == (403, {"stable": 1}), (headers, answer)
            assert (
                ask(port, "POST", "/predict", BODY, reported)[0]
                == ask(port, "GET", "/models/ctr", None, reported)[0]
                == 200
            )
        for headers in OWN:
            reported = {name: value.format(port=port) for name, value in headers.items()}
            assert ask(port, "POST", path, body, reported)[0] == 200, headers


def test_an_error_of_the_server_is_counted(made, monkeypatch):
    with running(made[0] / "ctr") as (port, served):
        monkeypatch.setattr(type(served.now), "probabilities", lambda *_: 1 // 0)
        by_python = {"accept": "application/vnd.apache.arrow.stream"}
        assert ask(port, "POST", "/predict", BODY, by_python)[0] == 500
        assert 'shoal_serve_requests_total{code="500"} 1.0' in ask(port, "GET", "/metrics")[1].decode()


def test_the_schema_of_a_model_is_at_its_name(port):
    status, body, _ = ask(port, "GET", "/models/ctr")
    found = json.loads(body)
    assert status == 200
    assert found["versions"] == [{"version": v, "model": "logistic regression"} for v in (1, 2, 3)]
    assert found["policy"] == {"versions": [2]}
    assert found["labels"] == {"stable": 1, "canary": 3}
    assert found["takes"]["keys"] == {"keys": "whole numbers", "values": "numbers, 1 if left out"}
    assert set(found["returns"]) == {"probabilities", "version"}
    status, body, _ = ask(port, "GET", "/models")
    assert json.loads(body)["models"]["pairs"] == {"versions": [1], "labels": {}}
    assert ask(port, "GET", "/models/other")[0] == 404


def test_settings_are_changed_by_post_and_nothing_by_a_bad_one(port):
    before = json.loads(ask(port, "GET", "/models/ctr")[1])
    for body, message in (
        ('{"labels": {"stable": 9}}', "has no version 9"),
        ('{"split": {"beta": 1}}', "the split names 'beta'"),
        ('{"label": {"stable": 1}}', "unknown field"),
        ("[]", "Expected"),
    ):
        status, answer = asked(port, "/models/ctr", body)
        assert status == 400
        assert message in answer["error"]
    assert asked(port, "/models/ctr", " " * 10_000)[0] == 413
    assert json.loads(ask(port, "GET", "/models/ctr")[1]) == before
    split = {"labels": {"stable": 1, "canary": 3}, "split": {"stable": 0.5, "canary": 0.5}}
    assert asked(port, "/models/ctr", json.dumps(split))[1]["split"] == split["split"]
    by_user = {u: asked(port, "/models/ctr/predict", **{"shoal-route": u})[1]["version"] for u in map(str, range(20))}
    assert set(by_user.values()) == {1, 3}
    assert by_user["3"] == asked(port, "/models/ctr/predict", **{"shoal-route": "3"})[1]["version"]
    undo = {"versions": [2], "labels": before["labels"], "split": {}}
    assert asked(port, "/models/ctr", json.dumps(undo)) == (200, before)
    text = ask(port, "GET", "/metrics")[1].decode()
    assert 'shoal_serve_answers_total{model="ctr",version="1"}' in text
    assert asked(port, "/reload", "") == (200, {"version": 3, "reloaded": False})


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "pass either EXPORT or --model NAME=EXPORT"),
        (["ctr", "--model", "a=ctr"], "pass either EXPORT or --model"),
        (["--model", "a=ctr", "--model", "a=b"], "--model names a model twice"),
        (
            ["--model", "a=ctr", "--versions", "b=all"],
            "--versions names 'b', which no --model defines: the models are a",
        ),
        (["--model", "a=ctr", "--versions", "a=new"], "--versions: 'new' is not a policy"),
        (["--model", "a=ctr", "--labels", "a=stable"], "--labels has 'stable': write a label and a number"),
        (["--model", "a=ctr", "--split", "a=stable:x"], "--split has 'stable:x'"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(words, message, capsys):
    assert cli.main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_command_serves_models_by_name(made, monkeypatch, capsys):
    import shoal.serve

    found = {}

    def serve(served, *, ready, **how):
        ready("127.0.0.1", 8080, None)
        found.update({name: (versions_of(one), one.settings) for name, one in served.items()})

    monkeypatch.setattr(shoal.serve, "serve", serve)
    words = ["--model", f"ctr={made[0] / 'ctr'}", "--model", f"pairs={made[0] / 'pairs'}", "--versions", "ctr=latest:2"]
    split = ["--labels", "ctr=stable:1,canary:3", "--split", "ctr=stable:0.9,canary:0.1"]
    assert cli.main(["serve", *words, *split]) == 0
    labels = {"stable": 1, "canary": 3}
    want = Settings(latest=2, labels=labels, split={"stable": 0.9, "canary": 0.1})
    assert found == {"ctr": ([1, 2, 3], want), "pairs": ([1], Settings())}
    said = capsys.readouterr().err
    assert "ctr: version 1, 2, 3, logistic regression, at http://127.0.0.1:8080/models/ctr\n" in said
