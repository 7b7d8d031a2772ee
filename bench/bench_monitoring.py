"""What watching a cluster costs, and how soon an alert fires after a server is killed.

    python bench/bench_monitoring.py                 three minutes, 200 MB; the alert needs prometheus on the PATH

Cost. A scheduler and a server run as processes, and this one pulls and pushes 10,000 keys of dim 16 for some seconds at
a time, in turns: unobserved, with all roles scraped once a second (Prometheus usually does so every 5 to 15 s), and
with the data of the scheduler's page requested once a second in addition. What counts is the CPU time of the scheduler
and of the server: per step, compared with the turn before that was unobserved, and per second. A step's time differs by
more than observing can cost; so the time of the server's threads that serve no requests is measured as well, as a share
of the server's: they answer scrapes and send heartbeats. What counting costs the thread that executes requests is not
in it.

Alert. A Prometheus with the project's rules scrapes and evaluates every 5 s, as in deploy/prometheus. A server with a
replica is killed (SIGKILL) under pushes. The time is from the kill until Prometheus lists ShoalServerLost as firing.

Checks: the scraped counters grow by exactly the pushes that were made, the view shows the server's rows, and no push
is lost by the kill.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from figures import check, conditions, cpu_seconds, spread
from shoal.cluster.launch.local_cluster import LocalCluster, running

RULES = Path(__file__).parents[1] / "deploy" / "prometheus" / "shoal.rules.yml"
KEYS, DIM = 10_000, 16


def get(port: int, path: str) -> str:
    """Return an answer of a process on this machine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def ports_of(cluster: LocalCluster) -> list[int]:
    """Return the ports of metrics of the scheduler and the servers."""
    return [int(role.joined.probes.rpartition(":")[2]) for role in cluster.roles if role.joined is not None]


def counted(port: int, name: str) -> float:
    """Return the sum of a counter's series."""
    lines = [line for line in get(port, "/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def thread_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU time of a server's threads that serve requests, and of the others (Linux counts nanoseconds).

    Requests are served by the busiest thread and by those of libzmq, which it names.
    """
    serving, others = [0], [0]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            is_libzmq = (task / "comm").read_text().startswith("ZMQbg")
            (serving if is_libzmq else others).append(int((task / "schedstat").read_text().split()[0]))
    busiest = max(others)
    return (sum(serving) + busiest) * 1e-9, (sum(others) - busiest) * 1e-9


def watch(ports: list[int], is_viewed: bool, stop: threading.Event, failures: list[str]) -> None:
    """Scrape each process once a second, and request the data of the page; what is wrong goes to failures."""
    try:
        while not stop.wait(1.0):
            for port in ports:
                get(port, "/metrics")
            if is_viewed and (rows := json.loads(get(ports[0], "/view.json"))["total"]["rows"]) != KEYS:
                failures.append(f"the view shows {rows} rows, not {KEYS}")
    except Exception as error:
        failures.append(repr(error))


def measure_cost(rounds: int, seconds: float) -> list[str]:
    """Return the lines of the table."""
    names = ("unobserved", "scraped", "scraped, and the page")
    server: dict[str, list[float]] = {name: [] for name in names}
    scheduler: dict[str, list[float]] = {name: [] for name in names}
    others: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        cluster = stack.enter_context(running(1, metrics_port="*"))
        ports, pids = ports_of(cluster), [role.joined.pid for role in cluster.roles if role.joined is not None]
        store = stack.enter_context(shoal.connect(cluster.address, workers=1, consistency=shoal.ASP()))
        table = store.table("w", dim=DIM, optimizer=shoal.SGD(lr=1e-3))
        keys, grads = np.arange(KEYS), np.ones((KEYS, DIM), np.float32)
        table.push(keys, grads).result()
        for number in range(rounds + 1):
            for name in names:
                stop, failures = threading.Event(), list[str]()
                arguments = (ports, name == names[2], stop, failures)
                watcher = threading.Thread(target=watch, args=arguments)
                if name != names[0]:
                    watcher.start()
                before = counted(ports[1], 'shoal_server_requests_total{op="push"')
                ran = [cpu_seconds(pid) for pid in reversed(pids)]
                threads = thread_seconds(pids[1])
                begin, steps = time.monotonic(), 0
                while time.monotonic() - begin < seconds:
                    table.pull(keys)
                    table.push(keys, grads).result()
                    steps += 1
                wall = time.monotonic() - begin
                now = [cpu_seconds(pid) for pid in reversed(pids)]
                serving, rest = (
                    after - earlier for after, earlier in zip(thread_seconds(pids[1]), threads, strict=True)
                )
                stop.set()
                if name != names[0]:
                    watcher.join(30)
                    check(not failures, "; ".join(failures))
                pushed = counted(ports[1], 'shoal_server_requests_total{op="push"') - before
                check(pushed == steps, f"{pushed:.0f} pushes were counted, not {steps}")
                if number:  # the first round warms up
                    server[name].append((now[0] - ran[0]) / steps * 1e6)
                    scheduler[name].append((now[1] - ran[1]) / wall * 1e3)
                    others[name].append(100 * rest / (serving + rest))
    lines = [
        "| | server, us of CPU time a step | difference, % | other threads, % | scheduler, thousandths of a core |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        more = [100 * (one / base - 1) for one, base in zip(server[name], server[names[0]], strict=True)]
        figures = [spread(server[name], 1), spread(more, 2), spread(others[name], 2), spread(scheduler[name], 1)]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def alert_seconds(interval: float) -> float:
    """Kill a server; return the seconds until the alert fires."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(running(2, replicas=1, metrics_port="*"))
        cluster._reports.put(None)  # no other server is started
        targets = [f"127.0.0.1:{port}" for port in ports_of(cluster)]
        config: dict[str, Any] = {
            "global": {"scrape_interval": f"{interval:g}s", "evaluation_interval": f"{interval:g}s"},
            "scrape_configs": [
                {
                    "job_name": "shoal",
                    "static_configs": [{"targets": targets}],
                }
            ],
            "rule_files": [str(RULES)],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        held = stack.enter_context(socket.socket())  # bound: nobody else gets the port, and Prometheus can listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        prometheus = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(prometheus.wait, 30)
        stack.callback(prometheus.kill)
        with shoal.connect(cluster.address, workers=1, consistency=shoal.ASP()) as store:
            table = store.table("w", dim=1, optimizer=shoal.SGD(lr=1.0))
            keys, pushes = np.arange(100), 0
            until, killed = time.monotonic() + 3 * interval + 5, None  # Prometheus has scraped two values
            while True:
                table.push(keys, -np.ones((100, 1), np.float32)).result()
                pushes += 1
                if killed is None and time.monotonic() > until:
                    cluster.servers[1].signal(signal.SIGKILL)
                    killed = time.monotonic()
                if killed is not None:
                    alerts = json.loads(get(port, "/api/v1/alerts"))["data"]["alerts"]
                    if ("ShoalServerLost", "firing") in {(a["labels"]["alertname"], a["state"]) for a in alerts}:
                        break
                    check(time.monotonic() - killed < 120, "no alert within 120 s")
                time.sleep(0.1)
            took = time.monotonic() - killed
            check(bool((table.pull(keys) == pushes).all()), "a push is lost or was made twice")
    return took


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    print(conditions())
    print("\n".join(measure_cost(args.rounds, args.seconds)))
    if shutil.which("prometheus"):
        print(f"seconds from a kill to the alert: {spread([alert_seconds(5.0) for _ in range(args.kills)], 1)}")
    else:
        print("no alert: prometheus is not on the PATH")


if __name__ == "__main__":
    main()
