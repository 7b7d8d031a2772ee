"""All that decides something, in one process: membership, endpoints, requests; deaths are found out by silence."""

from collections import Counter

import pytest

from shoal import _core
from shoal.errors import Fenced, ServerLost
from sim.network import ROUGH
from sim.schedules import counting, violations
from sim.whole import Whole

MODES = {"bsp": ("bsp", 0), "ssp(2)": ("ssp", 2), "asp": ("asp", 0)}
SEEDS = 5
LATE_MAP = 83  # a server refuses pushes, for its own place in the map has not come yet


def whole(seed, mode, clocks=12):
    name, staleness = MODES[mode]
    cluster = Whole(seed, _core.Service, mode=name, staleness=staleness, workers=3, endpoints=4, weather=ROUGH)
    program = counting(seed, clocks, think=0.05)
    cluster.start([program] * 3)
    return cluster, program


@pytest.mark.parametrize("mode", MODES)
def test_a_job_of_workers_that_live(mode):
    for seed in (*range(SEEDS), LATE_MAP):
        cluster, _ = whole(seed, mode)
        cluster.run()
        assert violations(cluster) == [], f"seed {seed}"
        assert [client.incarnation for client in cluster.clients] == [1, 1, 1]
        assert "the job is over" in cluster.membership.notes


@pytest.mark.parametrize("zombies", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_who_is_silent_is_replaced_and_nothing_is_lost_or_done_twice(mode, zombies):
    seen = Counter()
    for seed in range(SEEDS):
        cluster, program = whole(seed, mode)
        for k in range(2):
            cluster.once(2 + 4 * k + seed % 3, cluster.replace_one, program, zombies)
        cluster.run()
        assert violations(cluster) == [], f"seed {seed}"
        seen["returned"] += sum(client.incarnation > 1 and client.finished for client in cluster.clients)
        seen["later"] += sum(life.start > 0 for life in cluster.history.lives)
        seen["fenced"] += sum(isinstance(zombie.error, Fenced) for zombie in cluster.zombies)
    assert seen["returned"] >= 3
    assert seen["later"] >= 3
    assert seen["fenced"] >= 2 * zombies


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_server_ends_every_worker_with_an_error_that_names_it(mode):
    for seed in range(SEEDS):
        cluster, _ = whole(seed, mode, clocks=100)
        cluster.once(1 + seed, cluster.servers[1].crash)
        while len(cluster.clients) < 3 or not all(client.finished for client in cluster.clients):
            assert cluster.network.step(limit=20.0), f"seed {seed}"
        for client in cluster.clients:
            assert isinstance(client.error, ServerLost), f"seed {seed}: {client.error}"
            assert "server 1 at tcp://10.0.0.2:500" in str(client.error)
