"""All that decides something, in one process: membership, endpoints, requests; deaths are found out by silence."""

from collections import Counter

import pytest

import shoal
from shoal import _core
from shoal.cluster.protocol import messages as m
from shoal.cluster.protocol.messages import OrderReply, TableRecord
from shoal.errors import FencedError, MemoryBudgetExceededError, ServerLostError
from sim.network import ROUGH
from sim.schedules import counting, violations
from sim.whole import Whole
from tiers import rounds

pytestmark = pytest.mark.rounds

MODES = {"bsp": ("bsp", 0), "ssp(2)": ("ssp", 2), "asp": ("asp", 0)}
SEEDS = rounds(12)
LATE_MAP = 83  # a server refuses pushes, for its own place in the map has not come yet


class Narrow:
    """An endpoint without room for wide tables."""

    def __init__(self, *slots):
        self._service = _core.Endpoint(*slots)

    def __getattr__(self, name):
        return getattr(self._service, name)

    def add_table(self, id, spec):
        if spec.floats > 1000:
            raise MemoryBudgetExceededError("no room")
        self._service.add_table(id, spec)


class Bounded(Whole):
    """The last endpoint of server 1 has little memory for tables."""

    def serve(self, service, address, arcs):
        return super().serve(Narrow if address == "tcp://10.0.0.2:5001" else service, address, arcs)


def whole(seed, mode, clocks=12, kind=Whole):
    name, staleness = MODES[mode]
    cluster = kind(seed, _core.Endpoint, mode=name, staleness=staleness, workers=3, endpoints=4, weather=ROUGH)
    program = counting(seed, clocks, think=0.05)
    cluster.start([program] * 3)
    return cluster, program


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_job_of_workers_that_live(mode):
    for seed in (*range(SEEDS), LATE_MAP):
        cluster, _ = whole(seed, mode)
        cluster.run()
        assert violations(cluster) == [], f"seed {seed}"
        assert [client.incarnation for client in cluster.clients] == [1, 1, 1]
        assert "the job has ended" in cluster.membership.notes


@pytest.mark.combined
@pytest.mark.slow
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
        seen["fenced"] += sum(isinstance(zombie.error, FencedError) for zombie in cluster.zombies)
    assert seen["returned"] >= 3
    assert seen["later"] >= 3
    assert seen["fenced"] >= 2 * zombies


@pytest.mark.slow
def test_a_seed_is_replayed_exactly_whatever_ran_before():
    def outcome():
        cluster, program = whole(4, "bsp")
        for clock in (3, 7):
            cluster.once(clock, cluster.replace_one, program, True)
        cluster.run()
        return cluster.network.now, cluster.network.delivered

    kept = [outcome()]
    others = [[object() for _ in range(1000 * k)] for k in range(6)]  # other addresses for the next run's objects
    assert len({*kept, *(outcome() for _ in others)}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_that_dies_and_replays_its_inputs_changes_nothing_for_anybody(mode):
    generations = 0
    for seed in range(SEEDS):
        cluster, program = whole(seed, mode)
        for clock in range(0, 12, 3):
            cluster.once(clock, cluster.kill_scheduler, 0.02 + seed * 0.3)
        cluster.once(2, cluster.replace_one, program, bool(seed % 2))
        cluster.once(5, cluster.replace_one, program, False)
        cluster.run()
        assert violations(cluster) == [], f"seed {seed}"
        assert any(client.finished for client in cluster.clients), f"seed {seed}"
        generations += cluster.membership.state.generation
    assert generations >= SEEDS


@pytest.mark.long
def test_planted_an_order_result_that_is_not_recorded_is_found():
    class Forgetful(Whole):
        def record(self, entry):
            if not isinstance(entry.body, OrderReply):
                super().record(entry)

    for seed in range(10):
        cluster, program = whole(seed, "bsp", kind=Forgetful)
        for clock in (0, 3, 6):
            cluster.once(clock, cluster.kill_scheduler, 0.1)
        cluster.once(2, cluster.replace_one, program, False)
        try:
            cluster.run()
        except (AssertionError, KeyError, ValueError, RuntimeError):
            return
        if violations(cluster) or not all(client.finished for client in cluster.clients):
            return
    pytest.fail("no schedule shows it")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_a_server_has_no_room_for_is_nowhere_and_all_workers_go_on(mode):
    def ask(worker, form):
        worker.ask(m.CreateTable(form))

    def ask_all_later(cluster):
        """Ask for the second table when all have been refused the first: it gets number 0, and 1 is in use."""
        if all(len(one.tables) == 1 + (k > 0) for k, one in enumerate(cluster.worker_processes)):
            for one in cluster.worker_processes:
                ask(one, forms[1])
        else:
            cluster.network.after(0.02, ask_all_later, cluster)

    with shoal.local(slots=16) as store:
        forms = [TableRecord.of(store.table(name, dim=dim).spec) for name, dim in (("wide", 4096), ("narrow", 2))]
    for seed in range(SEEDS):
        cluster, _ = whole(seed, mode, clocks=24, kind=Bounded)
        for clock in (2, 4):  # three at once, two of them once more
            for k in range(clock // 3, 3):
                cluster.once(clock, ask, cluster.worker_processes[k], forms[0])
        cluster.once(7, ask_all_later, cluster)
        cluster.run()
        assert violations(cluster) == [], f"seed {seed}"
        assert all(client.finished and client.error is None for client in cluster.clients)
        for one in cluster.worker_processes:
            refused = [body for body in one.tables if isinstance(body, m.ErrorReply)]
            assert all("server 1 at tcp://10.0.0.2:5000, tcp://10.0.0.2:5001" in body.text for body in refused)
            assert [body for body in one.tables if body not in refused] == [m.TableReply(0, forms[1])], f"seed {seed}"
            assert len(refused) == 1 + (one is not cluster.worker_processes[0]), f"seed {seed}"
        assert {tuple(service.tables()) for service in cluster.services.values()} == {(0, 1)}


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_server_ends_every_worker_with_an_error_that_names_it(mode):
    for seed in range(SEEDS):
        cluster, _ = whole(seed, mode, clocks=100)
        cluster.once(1 + seed, cluster.servers[1].crash)
        while len(cluster.clients) < 3 or not all(client.finished for client in cluster.clients):
            assert cluster.network.step(limit=20.0), f"seed {seed}"
        for client in cluster.clients:
            assert isinstance(client.error, ServerLostError), f"seed {seed}: {client.error}"
            assert "server 1 at tcp://10.0.0.2:500" in str(client.error)
