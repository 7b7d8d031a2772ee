"""The page of the scheduler's metrics port, and what it displays: what a cluster does."""

import json
import math
import re
import shutil
import subprocess
import urllib.request

import numpy as np
import pytest
from msgspec.structs import replace

import shoal
from cluster_fakes import TIMEOUT
from http_probe import get, until
from shoal.cluster.protocol import health, metrics
from shoal.cluster.protocol.messages import Figures
from shoal.cluster.protocol.status import as_dict
from shoal.cluster.scheduler.monitor import MemberFigures, Monitor, quantile
from status_example import (
    STATUS,
)


def figures(keys, pulls, rows=50.0):
    numbers = {"keys": keys, "messages": keys / 10, "rows": rows, "row_bytes": 500.0, "rows:w": rows, "bytes:w": 500.0}
    numbers |= {"hot:18446744073709551615:w:x": 0.25, "hot:7:w:x": 0.1}
    return Figures(numbers, {"pull": pulls, "staleness": {0: 1, 3: 9}})


def observed(*times):
    monitor = Monitor()
    for k, now in enumerate(times):
        server = MemberFigures(b"s", "server", 0, now, figures(1000.0 * k, {1000: 10, 4000: 90 * k}))
        worker = MemberFigures(
            b"w", "worker", 0, now, Figures({"clock": k, "examples": 50.0 * k, "loss": 0.5, "auc": 0.75})
        )
        monitor.observe(STATUS, [server, worker], now)
    return monitor


def test_rates_and_quantiles_are_those_of_the_last_seconds():
    view = observed(10.0, 12.0, 14.0).view
    first, second = view["servers"]
    assert first["keys_per_second"] == 500
    assert first["pull"]["p50"] == pytest.approx(4.5e-6, rel=0.2)  # the ten pulls of before count no more
    assert (first["arcs"], first["slots"], first["copies"], first["rows"]) == (1, 8, 0, 50)
    assert (second["copies"], second["keys_per_second"], second["pull"]["p99"]) == (1, 0, None)
    (worker,) = view["workers"]
    assert (worker["examples_per_second"], worker["loss"], worker["auc"]) == (25, 0.5, 0.75)
    assert view["tables"] == [{"name": "w", "rows": 50, "memory_bytes": 500}]
    assert [one["first_slot"] for one in view["hottest"]] == [0]
    assert view["hottest_keys"] == [
        {"table": "w:x", "key": key, "server": 0, "share": share, "requests_per_second": 500 * share}
        for key, share in (("18446744073709551615", 0.25), ("7", 0.1))
    ]
    assert view["history"]["seconds"] == [-4, -2, 0]
    assert view["history"]["loss"] == [0.4, 0.4, 0.4]  # of the worker's own loop, and of the fit that runs
    assert view["total"]["auc"] == 0.8
    json.dumps(view, allow_nan=False)


def test_a_fit_has_the_rate_of_its_first_model_through_its_passes():
    monitor = Monitor()
    (fit,) = STATUS.fits[:1]
    (model,) = fit.models
    for now, known, examples in ((10.0, 1000, 40), (12.0, 1000, 80), (14.0, 1100, 20), (30.0, 1100, 20)):
        changed = replace(fit, known=known, models=(replace(model, examples=examples),))
        monitor.observe(replace(STATUS, fits=(changed, STATUS.fits[1])), [], now)
        rates = [one["examples_per_second"] for one in monitor.view["fits"]]
        assert rates == [{10.0: 0, 12.0: 20, 14.0: 20, 30.0: 0}[now], 0]
    assert monitor.view["fits"][0]["models"] == [as_dict(model) | {"examples": 20}]
    monitor.observe(replace(STATUS, fits=()), [], 31.0)
    assert (monitor.view["fits"], monitor._fits) == ([], {})


@pytest.mark.slow
def test_the_memory_of_a_monitor_is_bounded_and_forgets_members():
    monitor = observed(*np.arange(0.0, 600.0, 1.0))
    assert len(monitor.view["history"]["seconds"]) <= 450
    assert max(map(len, monitor._samples.values())) < 20
    monitor.observe(STATUS, [], 601.0)
    assert not monitor._samples
    assert monitor.view["servers"][0]["keys_per_second"] == 0
    again = MemberFigures(b"t", "server", 0, 602.0, figures(1.0, {}))  # its counters begin again
    monitor.observe(STATUS, [again], 602.0)
    assert monitor.view["servers"][0]["keys_per_second"] == 0


def test_a_quantile_is_within_its_bucket():
    rng = np.random.default_rng(5)
    values = rng.lognormal(12, 1, 5000)
    counts = {}
    for value in values:
        shift = int(math.log2(value)) - 2
        least = int(value) >> shift << shift
        counts[least] = counts.get(least, 0) + 1
    for share in (0.01, 0.5, 0.9, 0.99):
        assert quantile(counts, share) == pytest.approx(np.quantile(values, share), rel=0.3)
    assert quantile({}, 0.5) is None


def test_the_page_is_complete_in_itself_and_its_numbers_are_json():
    with health.HealthServer("tcp://127.0.0.1:*") as server:
        assert get(f"{server.address}/")[0] == 404
        view = observed(1.0, 2.0).view | {"lost": "<script>"}
        view["total"]["loss"] = math.nan
        server.watch(list, "scheduler", metrics.SCHEDULER, dict, view=lambda: view)
        status, page = get(f"{server.address}/")
        assert status == 200
        assert not re.search(r'(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg")', page)
        assert "innerHTML" not in page
        with urllib.request.urlopen(f"{server.address}/view.json", timeout=TIMEOUT) as reply:
            assert reply.headers["Content-Type"] == "application/json"
            assert json.load(reply)["total"]["loss"] is None
        with urllib.request.urlopen(f"{server.address}/", timeout=TIMEOUT) as reply:
            assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]


def chromium(url, *options):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (Debian: apt install chromium)")
def test_a_browser_displays_the_view():
    with health.HealthServer("tcp://127.0.0.1:*") as server:
        server.watch(list, "scheduler", metrics.SCHEDULER, dict, view=lambda: observed(10.0, 12.0).view)
        shown = chromium(f"{server.address}/", "--dump-dom").stdout
    for part in (
        "cluster 8c1d6f0e21b7a945",
        "process 1 on a",
        "Hottest slots",
        "topics/1",
        "18446744073709551615",
        "disconnected",
        "<path",
    ):
        assert part in shown


def luminances(image):
    """Return the relative luminances of WCAG 2."""
    linear = np.where(image <= 0.04045, image / 12.92, ((image + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (Debian: apt install chromium)")
def test_the_page_is_readable_in_dark_and_light(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="the screenshots are read by matplotlib")
    with health.HealthServer("tcp://127.0.0.1:*") as server:
        server.watch(list, "scheduler", metrics.SCHEDULER, dict, view=lambda: observed(10.0, 12.0).view)
        for scheme, is_dark in enumerate((True, False)):
            file = tmp_path / f"{scheme}.png"
            settings = f"--blink-settings=preferredColorScheme={scheme}"
            chromium(f"{server.address}/", settings, "--window-size=1000,1100", f"--screenshot={file}")
            found = luminances(image.imread(file)[..., :3].astype(float))
            background = np.median(found)
            assert background < 0.05 if is_dark else background > 0.9
            lighter, darker = np.maximum(found, background), np.minimum(found, background)
            contrast = (lighter + 0.05) / (darker + 0.05)
            assert (contrast > 7).mean() > 0.005  # text
            assert (contrast > 4.5).any(axis=1).sum() > 250  # rows of pixels: the whole page has text and curves


@pytest.mark.slow
def test_a_cluster_that_trains_is_displayed():
    from processes import processes

    with processes(metrics_port="*", heartbeat=0.3, servers=1) as cluster:
        cluster.start_server()
        url = cluster.children[0].joined.probes
        with shoal.connect(cluster.address, consistency=shoal.ASP(), timeout=TIMEOUT) as store:
            table = store.table("w", dim=2, optimizer=shoal.SGD(lr=0.1))
            keys = np.arange(100, dtype=np.uint64)

            for _ in range(14_000):  # one key in 2,048 is counted
                table.pull(keys[:1])

            def is_shown():
                table.push(keys, np.ones((100, 2), np.float32)).result()
                table.pull(keys)
                store.tick()
                store.activity.learned(100, lambda: (0.25, 0.75))
                view = json.loads(get(f"{url}/view.json")[1])
                is_complete = all(view["total"][name] for name in ("keys_per_second", "loss", "rows"))
                return view if is_complete and view["hottest_keys"] else None

            view = until(is_shown)
            assert view["total"]["rows"] == 100
            assert view["tables"][0]["name"] == "w"
            assert view["servers"][0]["pull"]["p50"] > 0
            assert view["workers"][0]["examples"] >= 100
            assert (view["hottest_keys"][0]["table"], view["hottest_keys"][0]["key"]) == ("w", "0")
            assert (view["total"]["loss"], view["total"]["auc"]) == (0.25, 0.75)
