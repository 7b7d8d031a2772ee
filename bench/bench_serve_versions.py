"""The prediction server under load by wrk while versions are swapped: requests per second, latency, failures.

    python bench/bench_serve_versions.py                       # needs wrk (apt-get install wrk)
    python bench/bench_serve_versions.py --connections 4 16 --swaps 20 --seconds 12

One process of `shoal serve` has two versions of a logistic regression of a million keys in float16, with labels. wrk
sends requests of so many examples with 39 keys each. Each row of the table is measured once undisturbed, and once while
the label that is asked for moves from one version to the other at equal intervals. Every answer that is not 200, and
every error of a connection, counts as failed.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_serve import Load, body_of, measured, requests, train, write_script, wrk
from figures import check


def move_label(port: int, version: int) -> None:
    """Point the label at a version."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/models/lr", json.dumps({"labels": {"stable": version}}))
    check(connection.getresponse().status == 200, "the label did not move")
    connection.close()


def load(url: str, script: Path, connections: int, seconds: float, port: int, swaps: int) -> Load:
    """Run wrk while the label moves."""
    running = wrk(url, script, connections, seconds)
    for swap in range(swaps):
        time.sleep(seconds / (swaps + 1))
        move_label(port, 1 + (swap + 1) % 2)
    return measured(running)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--examples", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--connections", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving = train(folder, options.keys)
        again = [sys.executable, "-m", "shoal", "export", str(folder / "model"), "--output", str(serving / "2")]
        subprocess.run([*again, "--dtype", "float16", "--quiet"], check=True)
        words = ["--model", f"lr={serving}", "--versions", "lr=all", "--labels", "lr=stable:1"]
        held = socket.socket()  # bound: nobody else gets the port, and a server can listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        command = [sys.executable, "-m", "shoal", "serve", *words, "--port", str(port)]
        with held, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                check(bool(server.stderr.readline()), "the server has ended")
                url = f"http://127.0.0.1:{port}/models/lr/labels/stable/predict"
                print(
                    "| examples a request | connections | swaps | requests/s | p50 ms | p99 ms | longest ms | failed |"
                )
                print("|" + "---|" * 8)
                for examples in options.examples:
                    script = write_script(folder, list(map(body_of, requests(64, examples, options.keys))))
                    for connections in options.connections:
                        for swaps in (0, options.swaps):
                            found = load(url, script, connections, options.seconds, port, swaps)
                            cells = [
                                f"{examples} | {connections} | {swaps} | {found.rate:,.0f}",
                                *(f"{ms:.2f}" for ms in (found.p50, found.p99, found.longest)),
                                f"{found.failed} of {found.requests:,}",
                            ]
                            print("| " + " | ".join(cells) + " |", flush=True)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
