"""A scheduler with a journal that is killed and started again, in processes of their own: all that ran goes on."""

import logging
import threading
import time

import pytest

import shoal
from cluster_fakes import TIMEOUT, FakeServer, scheduler
from shoal.cluster.protocol.messages import Barrier, BarrierReply, Hello, HelloReply, Order, StartJob
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.errors import NotConnectedError, StorageError

pytestmark = pytest.mark.slow


def until(what):
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def die(cluster):
    """Have a scheduler end without a word, as if it were killed."""
    cluster._membership.stop = lambda now: []


def test_a_scheduler_that_is_started_again_knows_its_peers_and_answers_what_they_asked_before(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with scheduler(1, journal=tmp_path) as one:
        assert one.membership.generation == 1
        server = FakeServer(one.address)
        link = SchedulerClient(one.address, "worker")
        other = SchedulerClient(one.address, "worker")
        joining = threading.Thread(
            target=lambda: other.join(timeout=TIMEOUT, workers=2, consistency=shoal.BSP()), daemon=True
        )
        joining.start()
        joined = link.join(timeout=TIMEOUT, workers=2, consistency=shoal.BSP())
        joining.join(TIMEOUT)
        assert link.welcome.grace == 600.0
        asked = link.ask(Barrier("b"))
        until(lambda: one.membership._job is not None and one.membership._job.barriers)
        die(one)
    with server, link, other:
        second = other.ask(Barrier("b"))  # while there is none
        with scheduler(1, journal=tmp_path, bind="tcp://127.0.0.1:*") as anew:
            assert anew.address == one.address
            for its, number in ((link, asked), (other, second)):
                assert its.answer(number, BarrierReply, timeout=TIMEOUT, doing="a barrier") == BarrierReply()
            assert set(anew.membership.workers) == {0, 1}
            assert anew.membership.generation == 2
            until(lambda: "was started again from its journal (generation 2)" in caplog.text)
            assert anew.refused() == {}
            assert link.fault is None
            assert joined.job == anew.membership._job.number
    assert sum(isinstance(order.body, StartJob) for order in server.orders) == 1


def test_orders_of_a_scheduler_that_was_replaced_are_refused(caplog):
    with scheduler(1) as one, FakeServer(one.address) as server, SchedulerClient(one.address, "worker") as link:
        link.join(timeout=TIMEOUT, consistency=shoal.BSP())
        client = server.link
        client._generation = 5
        outdated = Order(99, StartJob(1, server.orders[0].body.rules, (1,)), 4)
        assert client._is_outdated(outdated)
        assert not client._is_outdated(Order(99, outdated.body, 5))
    assert "sent Order of generation 4, but generation 5 has replaced it: end the older one" in caplog.text


def test_a_second_scheduler_of_a_journal_is_refused_and_the_first_goes_on(tmp_path):
    with scheduler(1, journal=tmp_path) as one:
        with pytest.raises(StorageError, match="is in use by another scheduler"):
            Scheduler("tcp://127.0.0.1:*", servers=1, heartbeat=0.5, journal=tmp_path)
        with FakeServer(one.address) as server:
            assert server.joined.wait(TIMEOUT)


def test_a_scheduler_whose_disk_is_full_ends_and_promises_nothing(tmp_path, monkeypatch):
    cluster = Scheduler("tcp://127.0.0.1:*", servers=1, heartbeat=0.2, journal=tmp_path)
    with cluster, SchedulerClient(cluster.address, "worker") as link:
        monkeypatch.setattr(
            "shoal.cluster.scheduler.journal.Journal._write",
            lambda self, data: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        asked = link.ask(Hello("worker", "w"))
        with pytest.raises(StorageError, match="No space left on device"):
            cluster.run()
        with pytest.raises(NotConnectedError):
            link.answer(asked, HelloReply, timeout=0.2, doing="connecting")
