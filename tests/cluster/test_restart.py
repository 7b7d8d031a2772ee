"""A scheduler that dies and is started again at its address: servers and workers that are there go on."""

import signal
import time

import numpy as np
import pytest

import shoal
from processes import processes
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
    with processes(servers=2, heartbeat=1.0) as cluster:
        servers = [cluster.start_server(storage_roots=(str(tmp_path),)) for _ in range(2)]
        with shoal.connect(cluster.address, timeout=PATIENCE) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=1.0))
            table.push(KEYS, ONES).result()
            store.tick()
            cluster.end(cluster.children[0], signal.SIGKILL)
            anew = cluster.start_scheduler(servers=2, heartbeat=1.0)  # without a journal
            until(lambda: "a process that this scheduler does not know" in anew.last_output())
            for child in servers:
                until(lambda child=child: "restarted and does not know this server any more" in child.last_output())
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
            assert all(child.process.poll() is None for child in servers)
    with shoal.local() as store:
        store.load(tmp_path / "saved")
        assert (store.table("t", optimizer=shoal.SGD(lr=1.0)).pull(KEYS) == -4).all()
