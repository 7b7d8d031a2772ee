"""The prediction server under load by wrk, compared with its kernel alone: requests per second, and their latency.

    python bench/bench_serve.py                       # needs wrk (apt-get install wrk)
    python bench/bench_serve.py --examples 1 32 256 --connections 1 4 --seconds 5
    make bench && python bench/bench_serve.py --rates 22000
    python bench/bench_serve.py --grpc                # needs h2load, and shoal[grpc]
    python bench/bench_serve.py --click               # needs shoal[torch,onnx]

A logistic regression of a million keys is exported in float16 and served by a separate process (`shoal serve`) on one
core; wrk sends requests of so many examples with 39 keys each from another one. A row is measured at full load, and at
about half of it: then more connections wait a millisecond after each answer. The kernel is the same prediction of the
same batches without HTTP and JSON, in this process. An answer of each kind is checked; any that is not 200, and any
error of a connection, fails the benchmark.

With --click the model is a DeepFM of 26 texts and 13 numbers, exported with --onnx, and asked by named columns.

With --rates requests of one example are sent at these rates over 16 connections (bench/cpp/paced_requests.cc): the
latency of each counts from the moment at which it was due. With --grpc h2load sends calls of one example over gRPC,
each once the last one is answered.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shoal
from figures import check, spread
from shoal.serve import bodies as forms
from shoal.serve.limits import Account, Budget, Limits
from shoal.serve.served import Model, make_model

FEATURES = 39
TEXTS, NUMBERS, CATEGORIES = 26, 13, 10_000  # of the click model
SCRIPT = """\
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local next = 0
%s
request = function()
  next = next %% #bodies + 1
  return wrk.format(nil, nil, nil, bodies[next])
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("found %%d %%d %%f %%f %%f %%d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), latency.max,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""
PAUSE = "delay = function() return 1 end"  # a millisecond
PACED = Path(__file__).parent.parent / "build" / "release" / "bench" / "cpp" / "paced_requests"


def train(folder: Path, keys: int) -> Path:
    """Export a model with so many keys."""
    rng = np.random.default_rng(1)
    with shoal.LogisticRegression(optimizer=shoal.Adagrad(lr=0.1)) as model:
        for start in range(0, keys, 1 << 17):
            n = min(1 << 17, keys - start)
            indptr = np.arange(0, n + 1, dtype=np.int64)
            some = np.arange(start, start + n, dtype=np.uint64)
            model.partial_fit(shoal.Batch(rng.integers(0, 2, n).astype(np.float32), indptr, some, None))
        model.save(folder / "model")
    command = [sys.executable, "-m", "shoal", "export", str(folder / "model")]
    subprocess.run([*command, "--output", str(folder / "serving" / "1"), "--dtype", "float16", "--quiet"], check=True)
    return folder / "serving"


def instances(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw examples of named columns."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, CATEGORIES, (count, TEXTS)).tolist()
    numbers = rng.random((count, NUMBERS)).round(3).tolist()
    return [
        {f"C{i}": f"v{one}" for i, one in enumerate(some)} | {f"I{i}": one for i, one in enumerate(others)}
        for some, others in zip(texts, numbers, strict=True)
    ]


def train_click(folder: Path) -> Path:
    """Export a click model with a graph of ONNX."""
    from shoal.torch import config

    rows = instances(1 << 14, 1)
    lines = [",".join(["click", *rows[0]])]
    lines += [",".join([str(i % 2), *map(str, row.values())]) for i, row in enumerate(rows)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    numbers = [{"name": f"I{i}", "type": "number"} for i in range(NUMBERS)]
    described = {
        "data": {"format": "csv", "data": [str(folder / "log.csv")], "label": "click"},
        "features": [{"name": f"C{i}"} for i in range(TEXTS)] + numbers,
        "model": {"name": "deepfm", "dim": 16, "hidden": [128, 64]},
        "tables": {"optimizer": {"name": "Adagrad", "lr": 0.1}},
    }
    parsed = config.parse(described)
    reader = shoal.read_csv(folder / "log.csv", label="click", batch_size=1024, **config.schema_of(parsed))
    with shoal.local() as store:
        model = config.build(parsed, store).fit(reader.with_fields(), epochs=1, progress=False)
        model.export(folder / "serving" / "1", onnx=True)
    return folder / "serving"


def decoded(model: Model, body: bytes) -> shoal.Batch:
    """Read the body of a request."""
    with Account(Budget(Limits())) as account:
        return forms.examples(body, forms.JSON, model.inputs, account)


def requests(count: int, examples: int, keys: int) -> list[shoal.Batch]:
    """Draw batches."""
    rng = np.random.default_rng(2)
    indptr = np.arange(0, (examples + 1) * FEATURES, FEATURES, dtype=np.int64)
    labels = np.zeros(examples, np.float32)
    return [
        shoal.Batch(labels, indptr, rng.integers(0, keys, examples * FEATURES).astype(np.uint64), None)
        for _ in range(count)
    ]


def body_of(batch: shoal.Batch) -> bytes:
    """Encode a request."""
    rows = batch.keys.reshape(-1, FEATURES).tolist()
    return json.dumps({"instances": [{"keys": row} for row in rows]}).encode()


def grpc_message(batch: shoal.Batch) -> bytes:
    """Encode a call of one example, with the five bytes that gRPC puts before a message."""
    from shoal.serve.open_inference import MESSAGES

    tensor = MESSAGES["Tensor"](name="keys", datatype="UINT64", shape=[1, FEATURES]).SerializeToString()
    raw = batch.keys.tobytes()
    request = MESSAGES["ModelInferRequest"](model_name="default", inputs=[tensor], raw_input_contents=[raw])
    message: bytes = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


class Load(NamedTuple):
    """What wrk has measured."""

    requests: int
    rate: float  # requests a second
    p50: float  # ms
    p99: float
    longest: float
    failed: int


def wrk(url: str, script: Path, connections: int, seconds: float, core: int | None = None) -> subprocess.Popen[str]:
    """Start wrk with one thread."""
    command = ["wrk", "-t", "1", "-c", str(connections), "-d", f"{seconds:g}s", "-s", str(script), "--latency", url]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    return subprocess.Popen([*pinned, *command], stdout=subprocess.PIPE, text=True)


def measured(running: subprocess.Popen[str]) -> Load:
    """Wait for wrk."""
    out, _ = running.communicate()
    check(running.returncode == 0, "wrk failed")
    found = re.search(r"^found (.*)$", out, re.MULTILINE)
    assert found is not None, out
    count, spent, p50, p99, longest, failed = [float(word) for word in found[1].split()]
    return Load(int(count), count / spent * 1e6, p50 / 1e3, p99 / 1e3, longest / 1e3, int(failed))


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU time of a process so far."""
    words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def send_paced(port: int, folder: Path, batch: shoal.Batch, rate: int, seconds: float, core: int) -> Load:
    """Send requests of a batch at a rate."""
    (folder / "body").write_bytes(body_of(batch))
    command = [str(PACED), str(port), str(rate), f"{seconds:g}", "16", str(folder / "body")]
    done = subprocess.run(["taskset", "-c", str(core), *command], check=True, capture_output=True, text=True)
    count, spent, p50, p99, longest, failed = [float(word) for word in done.stdout.split()]
    return Load(int(count), count / spent * 1e6, p50 / 1e3, p99 / 1e3, longest / 1e3, int(failed))


def h2load(url: str, folder: Path, body: bytes, seconds: float, core: int) -> Load:
    """Call a method of gRPC over 4 connections."""
    (folder / "body").write_bytes(body)
    log = folder / "log"
    log.unlink(missing_ok=True)
    command = ["taskset", "-c", str(core), "h2load", "-t", "1", "-D", f"{seconds:g}", "-d", str(folder / "body")]
    command += ["-c", "4", "-H", "content-type: application/grpc", "-H", "te: trailers"]  # codespell:ignore te
    subprocess.run([*command, f"--log-file={log}", url], check=True, stdout=subprocess.DEVNULL)
    begins, statuses, microseconds = np.loadtxt(log, np.int64, delimiter="\t", unpack=True)
    spent = (begins + microseconds).max() - begins.min()
    p50, p99 = np.percentile(microseconds, [50, 99]) / 1e3
    failed = int(np.count_nonzero(statuses != 200))
    return Load(len(begins), len(begins) / spent * 1e6, p50, p99, microseconds.max() / 1e3, failed)


def measure_one_example(port: int, grpc_port: int | None, folder: Path, options: argparse.Namespace, core: int) -> None:
    """Measure requests of one example, at rates or over gRPC, and print a Markdown table."""
    (batch,) = requests(1, 1, options.keys)
    rows: list[tuple[str, Callable[[], Load]]] = [
        (f"HTTP, {rate} a second", partial(send_paced, port, folder, batch, rate, options.seconds, core))
        for rate in options.rates
    ]
    if grpc_port is not None:
        url = f"http://127.0.0.1:{grpc_port}/inference.GRPCInferenceService/ModelInfer"
        rows.append(("gRPC, 4 connections", partial(h2load, url, folder, grpc_message(batch), options.seconds, core)))
    print("| requests | requests/s | p50 ms | p99 ms | longest ms |")
    print("|" + "---|" * 5)
    for name, measure in rows:
        found = [measure() for _ in range(options.rounds)]
        check(all(one.failed == 0 for one in found), "a request failed")
        cells = [spread([getattr(one, of) for one in found], 2) for of in ("rate", "p50", "p99", "longest")]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    counted = connection.getresponse().read().decode()
    connection.close()
    check(
        not re.search(r'^shoal_serve_grpc_requests_total\{code="(?!OK|CANCELLED)', counted, re.MULTILINE),
        "a call failed",
    )


def write_script(folder: Path, bodies: list[bytes], *, paced: bool = False) -> Path:
    """Write what wrk runs: the bodies, one after the other."""
    (folder / "bodies").write_bytes(b"\n".join(bodies) + b"\n")
    script = folder / f"load{paced:d}.lua"
    script.write_text(SCRIPT % (folder / "bodies", PAUSE if paced else ""))
    return script


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--examples", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=1, help="measure each row so often: median (range)")
    parser.add_argument("--rates", nargs="+", type=int, default=[], help="requests a second of one example")
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--click", action="store_true", help="a click model in place of the logistic regression")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving = train_click(folder) if options.click else train(folder, options.keys)
        command = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "shoal", "serve", str(serving), "--port", "0"]
        command += ["--grpc-port", "0"] * options.grpc
        with (
            shoal.export.open(serving, threads=1) as export,
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        ):
            try:
                assert server.stderr is not None
                port = int(server.stderr.readline().rstrip().rpartition(":")[2])
                if options.rates or options.grpc:
                    grpc_port = int(server.stderr.readline().rpartition(":")[2]) if options.grpc else None
                    measure_one_example(port, grpc_port, folder, options, cores[-1])
                    return
                url = f"http://127.0.0.1:{port}/predict"
                model = make_model(export.now, 1)
                print("| examples a request | connections | requests/s | p50 ms | p99 ms | examples/s ", end="")
                print("| CPU us a request | kernel, examples/s | at half of it: requests/s, p99 ms |")
                print("|" + "---|" * 9)
                for examples in options.examples:
                    if options.click:
                        asked = [instances(examples, seed) for seed in range(64)]
                        bodies = [json.dumps({"instances": one}).encode() for one in asked]
                        batches = [decoded(model, body) for body in bodies]
                    else:
                        batches = requests(64, examples, options.keys)
                        bodies = [body_of(batch) for batch in batches]
                    connection = http.client.HTTPConnection("127.0.0.1", port)
                    connection.request("POST", "/predict", bodies[0])
                    answer = json.loads(connection.getresponse().read())["probabilities"]
                    connection.close()
                    check(answer == model.probabilities(batches[0]).tolist(), "an answer differs from the model's")
                    for connections in options.connections:
                        rows: list[tuple[Load, float, Load, float]] = []
                        for _ in range(options.rounds):
                            count, began = 0, time.perf_counter()
                            while time.perf_counter() - began < options.seconds / 3:
                                model.probabilities(batches[count % 64])
                                count += 1
                            kernel = count * examples / (time.perf_counter() - began)
                            script = write_script(folder, bodies)
                            spent = cpu_seconds(server)
                            full = measured(wrk(url, script, connections, options.seconds, cores[-1]))
                            spent = (cpu_seconds(server) - spent) / max(1, full.requests) * 1e6
                            waiting = max(1, round(full.rate / 2 * 1.15e-3))
                            paced = write_script(folder, bodies, paced=True)
                            half = measured(wrk(url, paced, waiting, options.seconds, cores[-1]))
                            check(full.failed == half.failed == 0, "a request failed")
                            rows.append((full, kernel, half, spent))
                        cells = [
                            spread([full.rate for full, *_ in rows], 0),
                            spread([full.p50 for full, *_ in rows], 2),
                            spread([full.p99 for full, *_ in rows], 2),
                            spread([full.rate * examples for full, *_ in rows], 0),
                            spread([spent for *_, spent in rows], 0),
                            spread([kernel for _, kernel, *_ in rows], 0),
                            spread([half.rate for _, _, half, _ in rows], 0)
                            + "; "
                            + spread([half.p99 for _, _, half, _ in rows], 2),
                        ]
                        print(f"| {examples} | {connections} | " + " | ".join(cells) + " |", flush=True)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
