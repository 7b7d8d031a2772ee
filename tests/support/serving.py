"""Prediction servers for tests: models that are exported, a server in a thread, and its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading

import numpy as np

import shoal
from shoal import cli
from shoal.serve import ServedModel, ServedVersions, serve

ROWS = [
    {"site": "a.com", "price": 0.5, "tags": ["x", "y"]},
    {"site": "b.com", "price": 2, "tags": []},
    {"site": "c.com", "price": -1.25, "tags": ["z"]},
]


def sparse_data(rng, n=400):
    lengths = rng.integers(0, 6, n)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = rng.integers(0, 200, indptr[-1]).astype(np.uint64) * np.uint64(2**57 + 3)
    values = rng.standard_normal(indptr[-1]).astype(np.float32)
    return shoal.Batch(rng.integers(0, 2, n).astype(np.float32), indptr, keys, values)


def instances(batch, values=True):
    cut = [slice(a, b) for a, b in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)]
    rows = [{"keys": batch.keys[c].tolist(), "values": batch.values[c].tolist()} for c in cut]
    return rows if values else [{"keys": row["keys"]} for row in rows]


@contextlib.contextmanager
def running(directory, **how):
    """Serve a directory, versions, or served models by name, in a thread: the port, or ports, and what is served."""
    is_open = isinstance(directory, dict | ServedVersions)
    with contextlib.nullcontext(directory) if is_open else ServedModel(directory) as served:
        ports, started, ended = [], threading.Event(), threading.Event()

        def ready(host, number, grpc_number):
            ports.extend([number] if grpc_number is None else [number, grpc_number])
            started.set()

        def run():
            serve(served, port=0, ready=ready, until=ended, **how)

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(120)
        try:
            yield ports[0] if len(ports) == 1 else ports, served
        finally:
            ended.set()
            thread.join()


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        connection.close()


def predict(port, rows, path="/predict"):
    status, body, _ = ask(port, "POST", path, json.dumps({"instances": rows}))
    assert status == 200, body
    return np.array(json.loads(body)["probabilities"])


def trained(folder, kind=shoal.LogisticRegression, seed=1, **how):
    rng = np.random.default_rng(seed)
    with kind(**how) as model:
        model.partial_fit(sparse_data(rng))
        model.save(folder, overwrite=True)
    return folder


def exported(model, folder, *more):
    assert cli.main(["export", str(model), "--output", str(folder), "--quiet", *map(str, more)]) == 0
    return folder


def exported_columns(folder):
    """Export a model of the columns of ROWS."""
    lines = ["click,site,price,tags"]
    lines += [f"{i % 3 % 2},{'abc'[i % 3]}.com,{i % 7 / 2},{'x|y' if i % 2 else 'z'}" for i in range(120)]
    (folder / "d.csv").write_text("\n".join([*lines, ""]))
    with shoal.LogisticRegression() as model:
        reader = shoal.read_csv(
            folder / "d.csv", label="click", categorical=["site"], numeric=["price"], lists={"tags": "tags"}
        )
        model.fit(reader, progress=False)
        model.save(folder / "m")
    return exported(folder / "m", folder / "e")
