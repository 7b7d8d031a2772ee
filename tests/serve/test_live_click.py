"""A prediction server over the tables of a cluster that trains a click model: rows and dense part as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")


import shoal  # noqa: E402
from cluster_fakes import TIMEOUT, HeldPort  # noqa: E402
from cluster_standin import cluster  # noqa: E402
from live_serving import serving  # noqa: E402
from serving import ask, exported, predict  # noqa: E402
from shoal.cli.serve import Serve, _live  # noqa: E402
from shoal.cli.train import open_config_reader  # noqa: E402
from shoal.cluster.launch import local_cluster  # noqa: E402
from shoal.serve import LiveModel  # noqa: E402
from shoal.torch import config as ctr  # noqa: E402
from shoal.torch.live import LiveClickModel  # noqa: E402
from stores import joined  # noqa: E402

MODEL = """
[model]
name = "deepfm"
dim = 4
hidden = [8, 160]
[tables]
optimizer = { name = "Adagrad", lr = 0.1 }
[train]
dense = "servers"
optimizer = { name = "Adam", lr = 0.01 }
batch_size = 50
"""

SAME = 2e-5  # float32: torch multiplies batches of other sizes in another order


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs in two formats, and a configuration of each."""
    folder = tmp_path_factory.mktemp("logs")
    rng = np.random.default_rng(6)
    rows, lines = ["click,user,ad,price"], []
    for _ in range(400):
        click, user, ad = rng.integers(2), rng.integers(20), rng.integers(9)
        rows.append(f"{click},u{user},a{ad},{rng.random():.3f}")
        numbers = [str(rng.integers(9)) if rng.random() < 0.8 else "" for _ in range(13)]
        lines.append("\t".join([str(click), *numbers, *(f"{rng.integers(30):08x}" for _ in range(26))]))
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")
    columns = 'label = "click"\ncategorical = ["user", "ad"]\nnumeric = ["price"]\ndense = ["price"]'
    (folder / "csv.toml").write_text(
        f'[data]\nformat = "csv"\ndata = ["{folder}/log.csv"]\n{columns}\n{MODEL}\n'
        f'[output]\noutput = "{folder}/unused"\n'
    )
    (folder / "criteo.toml").write_text(f'[data]\nformat = "criteo"\ndata = ["{folder}/log.tsv"]\n{MODEL}')
    return folder


def instances(logs: Path, form: str) -> list[Any]:
    if form == "criteo":
        return (logs / "log.tsv").read_text().splitlines()[:60]
    rows = [line.split(",")[1:] for line in (logs / "log.csv").read_text().splitlines()[1:61]]
    return [{"user": user, "ad": ad, "price": float(price)} for user, ad, price in rows]


def asked(address: str, **how: Any) -> LiveModel:
    """Make the model that ``shoal serve`` serves."""
    found: LiveModel = _live(Serve(path=address, **how))()
    return found


@pytest.mark.parametrize("form", ["csv", "criteo"])
def test_answers_are_those_of_a_model_saved_from_the_same_tables(logs: Path, tmp_path: Path, form: str) -> None:
    config = ctr.read(logs / f"{form}.toml")
    rows = instances(logs, form)
    reader = open_config_reader(config, config.data.data)
    with cluster(2, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        model = ctr.build(config, store)

        def saved_answers() -> Any:
            model.fit(reader, progress=False)
            store.flush()
            model.save(tmp_path / "m", overwrite=True)
            with ctr.load(tmp_path / "m") as saved:
                return saved.probabilities(saved.reading(reader))[:60]

        want = saved_answers()
        of_export = asked(made.address, like=str(exported(tmp_path / "m", tmp_path / "e")))
        with of_export, asked(made.address, config=str(logs / f"{form}.toml"), watch=0.05) as live:
            assert live.now.predictor.format == of_export.now.predictor.format
            assert live.now.predictor.schema == of_export.now.predictor.schema
            with serving(live) as port, serving(of_export) as other:
                np.testing.assert_allclose(predict(port, rows), want, rtol=SAME)
                np.testing.assert_allclose(predict(other, rows), want, rtol=SAME)
                before, want = want, saved_answers()
                assert np.abs(want - before).max() > 1e-3
                deadline = time.monotonic() + TIMEOUT
                while not np.allclose(predict(port, rows), want, rtol=SAME, atol=0):
                    assert time.monotonic() < deadline
                reported = json.loads(ask(port, "GET", "/versions")[1])
                assert (reported["version"], reported["model"]) == (0, "click model")
                assert json.loads(ask(other, "POST", "/reload")[1])["reloaded"] in (True, False)
                np.testing.assert_allclose(predict(other, rows), want, rtol=SAME)
        with asked(f"{made.address}/{model.tables[0].name}", like=str(tmp_path / "m")) as live:
            assert live.now.predictor.examples == model.examples


def test_a_newer_dense_part_makes_another_model(logs: Path) -> None:
    config = ctr.read(logs / "csv.toml")
    batch = next(iter(open_config_reader(config, config.data.data).with_fields()))
    with cluster(2, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        model = ctr.build(config, store)
        model.fit([batch], progress=False)
        store.flush()
        with shoal.connect(made.address, mode="read", timeout=TIMEOUT) as reader:
            description = {
                "calibration": None,
                "examples": 0,
                "format": "csv",
                "schema": {},
                "click": ctr.made_by(config),
            }
            old = LiveClickModel.of(description, reader)
            assert old.refreshed() is None
            parameters = [one.detach().clone() for one in old.module.parameters()]
            model.fit([batch], progress=False)
            store.flush()
            new = old.refreshed()
            assert new is not None
            assert all(torch.equal(a, b) for a, b in zip(parameters, old.module.parameters(), strict=True))
            want = model.probabilities([batch])  # pulls the dense part
            np.testing.assert_array_equal(new.probabilities(batch), want)
            assert [one.table for one in new.module.modules() if hasattr(one, "table")] == [*old.tables]
            assert new.refreshed() is None


@pytest.mark.slow
def test_a_model_that_no_worker_has_begun_to_train_is_not_served(logs: Path, tmp_path: Path) -> None:
    config = ctr.read(logs / "csv.toml")
    with cluster(1, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        how = {"config": str(logs / "csv.toml")}
        with pytest.raises(ValueError, match="the cluster has no table 'linear'"):
            asked(made.address, **how)
        model = ctr.build(config, store)
        with pytest.raises(ValueError, match="the cluster has no table 'dense'"):
            asked(made.address, **how)
        size = sum(one.numel() for one in model.module.parameters())
        array = store.dense("dense", size, optimizer=shoal.Adam(lr=0.01))
        with pytest.raises(ValueError, match="no worker has set the dense part"):
            asked(made.address, **how)
        array.assign(np.ones(size, np.float32))
        with asked(made.address, **how) as live, serving(live) as port:
            body = json.dumps({"instances": instances(logs, "csv")})
            status, answer, _ = ask(port, "POST", "/predict", body)
            assert (status, "until the first push" in json.loads(answer)["error"]) == (400, True)
            model.tables[0].push(np.arange(1, dtype=np.uint64), np.ones((1, model.tables[0].dim), np.float32)).result()
            assert len(predict(port, instances(logs, "csv"))) == 60
        other, text = tmp_path / "other.toml", (logs / "csv.toml").read_text()
        for hidden, why in (([8], "with 2 blocks and not 1"), ([8, 150], "with other parameters"), ([8, 400], "not 4")):
            other.write_text(text.replace("hidden = [8, 160]", f"hidden = {hidden}"))
            with pytest.raises(ValueError, match=why):
                asked(made.address, config=str(other))
        other.write_text(text.replace("dim = 4", "dim = 5"))
        with pytest.raises(ValueError, match="table 'embedding'"):
            asked(made.address, config=str(other))


def test_a_dense_part_in_workers_is_refused(logs: Path, tmp_path: Path) -> None:
    text = (logs / "csv.toml").read_text().replace('dense = "servers"', 'dense = "allreduce"')
    (tmp_path / "c.toml").write_text(text)
    with cluster(1, 1, slots=16) as made, joined(made.address, 1) as (store,):
        ctr.build(ctr.read(tmp_path / "c.toml"), store)
        with pytest.raises(ValueError, match=r'\(dense = "allreduce"\).*train it with dense = "servers"'):
            asked(made.address, config=str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("path", "how", "text"),
    [
        ("tcp://h:1", {}, "with --like or --config"),
        ("tcp://h:1", {"like": "a", "config": "b"}, "leave one out"),
        ("tcp://h:1/embedding", {"config": "csv.toml"}, "write tcp://h:1 without /embedding"),
        ("tcp://h:1/lr", {"watch": 1.0}, "leave it out"),
    ],
)
def test_what_is_to_be_served_must_be_clear(logs: Path, path: str, how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        asked(path, **how)


@pytest.mark.slow
def test_the_command_serves_while_a_worker_trains(logs: Path, tmp_path: Path) -> None:
    config, rows = ctr.read(logs / "csv.toml"), instances(logs, "csv")
    reader = open_config_reader(config, config.data.data)
    enough = threading.Event()
    with (
        local_cluster.running(2, timeout=TIMEOUT, storage_roots=[str(tmp_path)]) as servers,
        joined(servers.address, 1) as (store,),
        ThreadPoolExecutor(1) as pool,
        HeldPort() as held,
    ):
        model = ctr.build(config, store)

        def train() -> None:
            while not enough.is_set():
                model.fit(reader, progress=False)

        model.fit(reader, progress=False)
        command = [sys.executable, "-m", "shoal", "serve", servers.address, "--config", str(logs / "csv.toml")]
        port = held.port
        serving = subprocess.Popen(
            [*command, "--watch", "0.1", "--port", str(port)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert serving.stderr is not None
            line = serving.stderr.readline()
            assert f"at http://127.0.0.1:{port}" in line, line + serving.stderr.read()
            training, deadline = pool.submit(train), time.monotonic() + TIMEOUT
            seen: set[bytes] = set()
            while len(seen) < 3 and not training.done() and time.monotonic() < deadline:
                seen.add(predict(port, rows).tobytes())
            enough.set()
            training.result()
            assert len(seen) == 3
            store.flush()
            model.save(tmp_path / "m")
            with ctr.load(tmp_path / "m") as saved:
                want = saved.probabilities(saved.reading(reader))[:60]
            while not np.allclose(found := predict(port, rows), want, rtol=SAME, atol=0):
                assert time.monotonic() < deadline, (found, want)
        finally:
            enough.set()
            serving.terminate()
            serving.communicate(timeout=TIMEOUT)
        assert serving.returncode == 143
