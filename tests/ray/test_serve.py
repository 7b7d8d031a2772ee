"""A deployment of Ray Serve: docs/serving.md's answers, the deltas of the export, and handles."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is an extra: pip install 'shoal[ray]'")
for needed in ("fastapi", "grpc_reflection", "starlette"):
    pytest.importorskip(needed, reason="ray-serve is an extra: pip install 'shoal[ray-serve]'")
pa = pytest.importorskip("pyarrow")

with warnings.catch_warnings():  # of pydantic, about Ray
    warnings.simplefilter("ignore")
    from ray import serve

import shoal  # noqa: E402
from cluster_fakes import HeldPort  # noqa: E402
from ray_nodes import run_page_block, wait_until  # noqa: E402
from serving import ask, exported, instances, predict, sparse_data, trained  # noqa: E402
from shoal.serve.bodies import ARROW  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings(r"ignore::Warning:ray\..*"),
]


@pytest.fixture
def port(ray_cluster):
    with HeldPort() as held:
        serve.start(http_options={"host": "127.0.0.1", "port": held.port}, proxy_location="HeadOnly")
        yield held.port
        serve.shutdown()


def test_a_deployment_answers_as_shoal_serve_does_and_follows_deltas(port, tmp_path):
    batch = sparse_data(np.random.default_rng(5), 50)
    exported(trained(tmp_path / "m"), tmp_path / "serve" / "1")
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        first = model.probabilities(batch)
        model.partial_fit(sparse_data(np.random.default_rng(6)))
        model.save(tmp_path / "m", overwrite=True)
        second = model.probabilities(batch)
    assert np.any(first != second)

    names = {"batch": batch}
    here = {"num_replicas=4": "num_replicas=1", "s3://bucket/serve/ctr": str(tmp_path / "serve"), "=30": "=0.2"}
    run_page_block("serve.run(", names, here)
    handle = names["handle"]
    np.testing.assert_array_equal(predict(port, instances(batch), "/ctr/predict"), first)
    np.testing.assert_array_equal(handle.predict.remote([batch]).result(timeout_s=60), first)
    status, body, _ = ask(port, "GET", "/ctr/healthz")
    assert (status, json.loads(body)) == (200, {"status": "ok", "version": 1})
    status, body, headers = ask(port, "POST", "/ctr/predict", '{"instances": [{"keys": [-1]}]}')
    assert status == 400
    assert "instance 0" in json.loads(body)["error"]
    assert ask(port, "GET", "/ctr/elsewhere")[0] == 404

    exported(tmp_path / "m", tmp_path / "serve" / "2", "--since", tmp_path / "serve" / "1")
    wait_until(lambda: handle.version.remote().result(timeout_s=60) == 2, "the delta is not served")
    np.testing.assert_array_equal(predict(port, instances(batch), "/ctr/predict"), second)
    sink = pa.BufferOutputStream()
    columns = {name: [row[name] for row in instances(batch)] for name in ("keys", "values")}
    types = {"keys": pa.list_(pa.uint64()), "values": pa.list_(pa.float32())}
    table = pa.table({name: pa.array(lists, types[name]) for name, lists in columns.items()})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    status, body, headers = ask(port, "POST", "/ctr/predict", sink.getvalue().to_pybytes(), {"Content-Type": ARROW})
    assert (status, headers["shoal-version"], headers["content-type"]) == (200, "2", ARROW)
    np.testing.assert_array_equal(pa.ipc.open_stream(body).read_all()["probability"].to_numpy(), second)
