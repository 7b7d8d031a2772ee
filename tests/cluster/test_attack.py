"""A cluster of real processes under attack (attack.py): it serves and makes tables throughout, and nothing grows."""

import contextlib
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

import shoal
from attack import Attack, attack, endpoints_of
from shoal.cluster.launch import local_cluster
from shoal.cluster.protocol.address import split
from shoal.cluster.protocol.curve import Keys, make_keys
from shoal.cluster.protocol.messages import TableRecord
from tiers import long_after

pytestmark = pytest.mark.slow

KEYS = np.arange(200, dtype=np.uint64)
ONES = np.ones((200, 4), np.float32)
SECONDS = 5.0
SETTLED = 120.0  # seconds for what was attacked to be as before; a machine may be busy
MEMORY = 128 << 20  # bytes that a process may keep: 30 tables, and what its allocator holds back


def until(what, seconds=SETTLED):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@pytest.mark.parametrize("with_keys", long_after(1, [True, False]))
def test_a_cluster_under_attack_serves_and_makes_tables_and_is_afterwards_as_before(tmp_path, with_keys):
    folder = tmp_path / "keys"
    if with_keys:
        make_keys(folder)
    curve = str(folder) if with_keys else None
    keys = Keys.load(folder, "worker") if with_keys else None
    with (
        local_cluster.running(2, threads=2, curve=curve, address="tcp://127.0.0.1:*") as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        joins = [
            pool.submit(shoal.connect, cluster.address, workers=2, rank=k, consistency=shoal.ASP(), curve=curve)
            for k in range(2)
        ]
        with joins[0].result() as store, joins[1].result() as insider:
            table = store.table("t", dim=4, optimizer=shoal.SGD(lr=1.0))
            roles = [psutil.Process(child.process.pid) for child in (cluster.scheduler, *cluster.servers)]
            endpoints = endpoints_of(cluster.address, keys)
            assert len(endpoints) == 4
            store.table("another", dim=1, optimizer=shoal.SGD(lr=1.0))
            before = [(role.num_fds(), role.memory_info().rss) for role in roles]
            name = insider._scheduler.sender
            attacker = pool.submit(
                attack, cluster.address, endpoints, SECONDS, keys=keys, form=TableRecord.of(table.spec), insider=name
            )
            rounds = 0
            while not attacker.done() or rounds < 10:
                table.push(KEYS, ONES).result()
                rounds += 1
                assert (table.pull(KEYS) == -rounds).all()
                if rounds % 10 == 0 and rounds <= 200:
                    other = store.table(f"made {rounds}", dim=1, optimizer=shoal.SGD(lr=1.0))
                    other.push(KEYS[:20], ONES[:20, :1]).result()
                    assert (other.pull(KEYS[:20]) == -1).all()
                    time.sleep(0.05)
            assert attacker.result()["half_open"] > 0
            refused = store.scheduler_metrics()
            assert refused["key" if with_keys else "garbage"] > 0
            assert refused["invalid"] > 0
            assert refused["unknown"] > 0
            assert refused.get("failed", 0) == 0
            assert sum(endpoint["statuses"].get("bad request", 0) for endpoint in store.server_metrics()) > 0
            assert endpoints_of(cluster.address, keys) == endpoints
            for role, (files, memory) in zip(roles, before, strict=True):
                until(lambda role=role, files=files: role.num_fds() <= files + 8)
                assert role.memory_info().rss < memory + MEMORY
                until(lambda role=role: role.cpu_percent(0.5) < 50)
            assert not any(
                "Traceback" in line for child in (cluster.scheduler, *cluster.servers) for line in child.last
            )
            assert len(cluster.scheduler.last) < 40  # lines: not one for each message


def test_a_scheduler_and_a_server_without_descriptors_say_so_serve_on_and_recover():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    asp = shoal.ASP()
    with (
        local_cluster.running(1, address="tcp://127.0.0.1:*") as cluster,
        shoal.connect(cluster.address, consistency=asp, timeout=SETTLED) as store,
    ):
        table = store.table("t", dim=4, optimizer=shoal.SGD(lr=1.0))
        table.push(KEYS, ONES).result()  # now it is connected
        roles = [psutil.Process(child.process.pid) for child in (cluster.scheduler, *cluster.servers)]
        files = [role.num_fds() for role in roles]
        ports = [cluster.address, *endpoints_of(cluster.address, None)]
        for role in roles:
            assert role.rlimit(psutil.RLIMIT_NOFILE) == (limit[1], limit[1])
            role.rlimit(psutil.RLIMIT_NOFILE, (60, limit[1]))
        with contextlib.ExitStack() as held:
            for port in ports:
                for _ in range(100):
                    held.enter_context(socket.create_connection(split(port), SETTLED))
            for child in (cluster.scheduler, *cluster.servers):
                until(lambda child=child: "has reached its limit of open files" in child.last_output())
            for k in range(3):
                table.push(KEYS, ONES).result()
                assert (table.pull(KEYS) == -k - 2).all()
            assert store.scheduler_metrics()["descriptors"] > 0
        for role, before in zip(roles, files, strict=True):
            until(lambda role=role, before=before: role.num_fds() <= before + 8)
            until(lambda role=role: role.cpu_percent(0.5) < 50)
        other = store.table("u", dim=4, optimizer=shoal.SGD(lr=1.0))
        other.push(KEYS, ONES).result()
        for child in (cluster.scheduler, *cluster.servers):
            assert len(child.last) < 20


def test_the_attacker_leaves_other_machines_alone():
    with pytest.raises(ValueError, match="not on the loopback interface"):
        Attack("tcp://10.0.0.1:5570", [])
