"""A scheduler that dies and is started again at its address: servers and workers that are there go on."""

import signal
import time

import numpy as np
import pytest

import shoal
from shoal.cluster.launch import local_cluster
from shoal.errors import NotConnectedError

pytestmark = pytest.mark.slow

KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((500, 1), np.float32)
PATIENCE = 120.0


def until(what):
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_servers_serve_and_a_worker_trains_and_saves_on_after_a_scheduler_was_started_anew(tmp_path, caplog):
    with (
        local_cluster.running(2, heartbeat=1.0, timeout=PATIENCE, storage_roots=[tmp_path], restart=False) as cluster,
        shoal.connect(cluster.address, timeout=PATIENCE) as store,
    ):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS, ONES).result()
        store.tick()
        cluster.scheduler.signal(signal.SIGKILL)
        cluster.scheduler.process.wait()
        counts = ["--servers", "2", "--heartbeat", "1.0"]
        anew = cluster._role("scheduler", ["scheduler", "--bind", cluster.address, *counts])
        try:
            until(lambda: anew.find(r"scheduler at (tcp://\S+),"))
            until(lambda: anew.find("(a process that this scheduler does not know)"))
            for child in cluster.servers:
                until(lambda child=child: child.find("(was restarted and does not know this server any more)"))
            until(lambda: "does not know this worker any more" in caplog.text)
            for clock in range(2, 5):
                table.push(KEYS, ONES).result()
                store.tick()
                assert (table.pull(KEYS) == -clock).all()
            store.save(tmp_path / "saved")
            with pytest.raises(NotConnectedError, match=r"restarted since\. Start the whole cluster again"):
                store.table("another", dim=2)
            with pytest.raises(NotConnectedError, match="restarted since"):
                store.barrier()
            assert (table.pull(KEYS) == -4).all()
            assert all(child.process.poll() is None for child in cluster.servers)
        finally:
            anew.signal(signal.SIGTERM)
            anew.end(time.monotonic() + PATIENCE)
    with shoal.local() as store:
        store.load(tmp_path / "saved")
        assert (store.table("t", optimizer=shoal.SGD(lr=1.0)).pull(KEYS) == -4).all()
