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
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_serve import body_of, requests, train
from figures import check

SCRIPT = """\
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local next = 0
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


def move_label(port: int, version: int) -> None:
    """Point the label at a version."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/models/lr", json.dumps({"labels": {"stable": version}}))
    check(connection.getresponse().status == 200, "the label did not move")
    connection.close()


def load(url: str, script: Path, connections: int, seconds: float, port: int, swaps: int) -> list[float]:
    """Run wrk; returns requests, microseconds, p50, p99, the longest, and failures."""
    command = ["wrk", "-t", "1", "-c", str(connections), "-d", f"{seconds:g}s", "-s", str(script), "--latency", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        for swap in range(swaps):
            time.sleep(seconds / (swaps + 1))
            move_label(port, 1 + (swap + 1) % 2)
        out, _ = running.communicate()
    check(running.returncode == 0, "wrk failed")
    found = re.search(r"^found (.*)$", out, re.MULTILINE)
    assert found is not None, out
    return [float(word) for word in found[1].split()]


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
                    bodies = folder / "bodies"
                    bodies.write_bytes(b"\n".join(map(body_of, requests(64, examples, options.keys))) + b"\n")
                    script = folder / "load.lua"
                    script.write_text(SCRIPT % bodies)
                    for connections in options.connections:
                        for swaps in (0, options.swaps):
                            found = load(url, script, connections, options.seconds, port, swaps)
                            count, spent, p50, p99, longest, failed = found
                            cells = [
                                f"{examples} | {connections} | {swaps} | {count / spent * 1e6:,.0f}",
                                *(f"{some / 1e3:.2f}" for some in (p50, p99, longest)),
                                f"{failed:.0f} of {count:,.0f}",
                            ]
                            print("| " + " | ".join(cells) + " |", flush=True)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
