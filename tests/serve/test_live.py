"""A prediction server over the tables of a running cluster: it follows training, and outlives its connection."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from live_serving import (
    serving,
)
from serving import ask, exported, instances, predict, sparse_data
from shoal.cli.serve import Serve, _address_and_table, _live
from shoal.cluster.launch.local_cluster import running
from shoal.serve import LiveModel
from shoal.serve.live import by_keys
from stores import joined


def connecting(made):
    return lambda: shoal.connect(made.address, mode="read", timeout=TIMEOUT, threads=1)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_predictions_follow_training(rng):
    batch = sparse_data(rng)
    with cluster(2, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        model = shoal.LogisticRegression(store=store, table="lr")
        model.partial_fit(batch)
        with LiveModel(connecting(made), by_keys("lr")) as live, serving(live) as port:
            for _ in range(3):
                store.flush()
                np.testing.assert_allclose(predict(port, instances(batch)), model.probabilities(batch), rtol=1e-6)
                before = predict(port, instances(batch))
                model.partial_fit(batch)
            store.flush()
            assert np.abs(predict(port, instances(batch)) - before).max() > 1e-3
            status, body, _ = ask(port, "GET", "/versions")
            found = json.loads(body)
            assert (status, found["version"], found["model"]) == (200, 0, "logistic regression")
            assert found["tables"] == {"lr": {"dim": 1, "dtype": "float32"}}
            assert live.reload() is False


def test_an_export_describes_what_the_tables_do_not(rng, tmp_path):
    batch = sparse_data(rng)
    with shoal.local() as store, shoal.FactorizationMachine(4, store=store, table="fm") as local:
        local.partial_fit(batch)
        local.save(tmp_path / "model")
    export = exported(tmp_path / "model", tmp_path / "export")
    with cluster(2, 1, slots=16) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        model = shoal.FactorizationMachine(4, store=store, table="fm", seed=7)
        model.partial_fit(batch)
        store.flush()
        options = Serve(path=f"{made.address}/fm", like=str(export))
        with _live(options)() as live:
            np.testing.assert_allclose(live.now.predictor.probabilities(batch), model.probabilities(batch), rtol=1e-6)
        with pytest.raises(ValueError, match="a model whose table is 'fm', and 'other' is to be served"):
            _live(Serve(path=f"{made.address}/other", like=str(export)))
        with pytest.raises(ValueError, match="no table 'other': its tables are 'fm', "):
            _live(Serve(path=f"{made.address}/other"))()
        with pytest.raises(ValueError, match="tcp://HOST:PORT/TABLE"):
            _live(Serve(path=made.address))


def test_a_table_is_named_behind_the_address_of_a_socket():
    with running() as made, shoal.connect(made.address, workers=1, rank=0) as store:
        shoal.LogisticRegression(store=store, table="lr")
        assert _address_and_table(made.address) == (made.address, "")
        assert _address_and_table(f"{made.address}/lr/a") == (made.address, "lr/a")
        with _live(Serve(path=f"{made.address}/lr"))() as live:
            assert live.now.predictor is not None
        with pytest.raises(ValueError, match="no table 'other'"):
            _live(Serve(path=f"{made.address}/other"))()
    with pytest.raises(ValueError, match=r"no scheduler listens there\. Write the address that it prints, and /TABLE"):
        _live(Serve(path=f"{made.address}/lr"))


@pytest.mark.slow
def test_requests_fail_while_the_connection_is_lost_and_it_is_made_anew(rng):
    batch = sparse_data(rng)
    with cluster(2, 1, slots=16, heartbeat=2.0) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        model = shoal.LogisticRegression(store=store, table="lr")
        model.partial_fit(batch)
        store.flush()
        with LiveModel(connecting(made), by_keys("lr")) as live, serving(live) as port:
            known = made.scheduler.membership._peers.known
            peer = next(one for one in known.values() if one.role == "reader")
            deadline = time.monotonic() + TIMEOUT
            while peer.sender in known:
                peer.link.last_heard = -math.inf
                made.scheduler._wake()
                time.sleep(0.01)
            body = json.dumps({"instances": instances(batch)})
            seen = []
            while not seen or seen[-1] != 200 or 503 not in seen:
                assert time.monotonic() < deadline, seen
                status, answer, headers = ask(port, "POST", "/predict", body)
                seen.append(status)
                if status == 503:
                    assert "was declared dead" in json.loads(answer)["error"]
                    assert headers["retry-after"] == "1"
                time.sleep(0.01)
            assert set(seen) == {200, 503}
            assert live.reloads == 1
            np.testing.assert_allclose(predict(port, instances(batch)), model.probabilities(batch), rtol=1e-6)
