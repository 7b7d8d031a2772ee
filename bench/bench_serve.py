"""The prediction server compared with its kernel alone: requests per second, and their latency.

    python bench/bench_serve.py
    python bench/bench_serve.py --examples 1 32 256 --clients 1 4 --seconds 5

A logistic regression of a million keys is exported in float16 and served by a separate process (`shoal serve`). Clients
are threads of this process; each sends requests of so many examples with 39 keys each over one connection, one after
the other. The kernel is the same prediction of the same batches without HTTP and JSON, in this process. Answers are
checked.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import shoal
from figures import check
from shoal.serve.served import make_model

FEATURES = 39


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


def load(port: int, bodies: list[bytes], clients: int, seconds: float) -> tuple[float, np.ndarray]:
    """Send requests; returns the rate per second, and the latencies."""
    taken: list[list[float]] = [[] for _ in range(clients)]
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        k = number
        while (began := time.perf_counter()) < end:
            connection.request("POST", "/predict", bodies[k % len(bodies)])
            response = connection.getresponse()
            response.read()
            check(response.status == 200, "a request failed")
            taken[number].append(time.perf_counter() - began)
            k += clients
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = np.concatenate(taken)
    return len(every) / seconds, every


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--examples", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serving = train(Path(folder), options.keys)
        command = [sys.executable, "-m", "shoal", "serve", str(serving), "--port", "0"]
        with (
            shoal.export.open(serving, threads=1) as export,
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        ):
            try:
                assert server.stderr is not None
                port = int(server.stderr.readline().rstrip().rpartition(":")[2])
                model = make_model(export.now, 1).predictor
                print(
                    "| examples a request | clients | requests/s | p50 ms | p99 ms | examples/s | kernel, examples/s |"
                )
                print("|" + "---|" * 7)
                for examples in options.examples:
                    batches = requests(64, examples, options.keys)
                    bodies = [body_of(batch) for batch in batches]
                    connection = http.client.HTTPConnection("127.0.0.1", port)
                    connection.request("POST", "/predict", bodies[0])
                    answer = json.loads(connection.getresponse().read())["probabilities"]
                    connection.close()
                    check(answer == model.probabilities(batches[0]).tolist(), "an answer differs from the model's")
                    for clients in options.clients:
                        count, began = 0, time.perf_counter()
                        while time.perf_counter() - began < options.seconds / 3:
                            model.probabilities(batches[count % 64])
                            count += 1
                        kernel = count * examples / (time.perf_counter() - began)
                        rate, taken = load(port, bodies, clients, options.seconds)
                        p50, p99 = np.percentile(taken, [50, 99]) * 1e3
                        print(
                            f"| {examples} | {clients} | {rate:,.0f} | {p50:.2f} | {p99:.2f} | {rate * examples:,.0f} "
                            f"| {kernel:,.0f} |",
                            flush=True,
                        )
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
