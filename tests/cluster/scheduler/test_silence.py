"""Servers that do not answer: the rules, simulated with planted bugs, and real processes that are stopped."""

from __future__ import annotations

import math
import random

import pytest
import zmq

from cluster_fakes import TIMEOUT
from shoal import _core
from shoal.cluster.protocol.ping import encode_ping, ping_number
from shoal.cluster.scheduler.silence import _MISSED, PING_SECONDS, Pinger, SilenceDetector
from shoal.cluster.server.data_loop import start_loop

# --- simulated ------------------------------------------------------------------------------------------------------


class World:
    """Endpoints that answer within some time, stop and continue, and a scheduler that is stopped now and then."""

    def __init__(self, seed: int, detector: SilenceDetector, servers: int = 3) -> None:
        self.rng = random.Random(seed)
        self.detector = detector
        self.now = 0.0
        self.flying: list[tuple[float, str, int]] = []  # answers
        self.stopped: dict[int, float] = {}  # when, by rank
        self.busy_until: dict[str, float] = {}
        self.scheduler_until = 0.0  # it is stopped until then
        self.silent: dict[int, tuple[float, str]] = {}
        self.endpoints = {f"tcp://h:{port}": port // 2 for port in range(2 * servers)}
        detector.watch(self.endpoints, self.now)

    def connected(self) -> set[str]:
        """libzmq notices a stopped process after up to a second; a busy one keeps its connection."""
        return {
            address for address, rank in self.endpoints.items() if self.now < self.stopped.get(rank, math.inf) + 0.9
        }

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.rng.uniform(0.001, 0.02)
            if self.now < self.scheduler_until:
                continue
            for due, address, number in [one for one in self.flying if one[0] <= self.now]:
                self.flying.remove((due, address, number))
                self.detector.answered(address, number, self.now)
            if self.now < self.detector.next_time:
                continue
            pings, silent = self.detector.begin_round(self.now, self.connected())
            for rank, why, _ in silent:
                self.silent.setdefault(rank, (self.now, why))
            for address, number in pings.items():
                if self.endpoints[address] not in self.stopped:
                    free = max(self.now, self.busy_until.get(address, 0.0))
                    self.flying.append((free + self.rng.uniform(0.0, 0.2), address, number))

    def trouble(self) -> None:
        """A stop of the scheduler, a busy endpoint, or a slow answer."""
        match self.rng.randrange(3):
            case 0:
                self.scheduler_until = self.now + self.rng.uniform(0.1, 20.0)
            case 1:
                address = self.rng.choice(list(self.endpoints))
                self.busy_until[address] = self.now + self.rng.uniform(0.1, 20.0)
            case 2:
                self.flying = [(due + self.rng.uniform(0.0, 0.7), *rest) for due, *rest in self.flying]
        self.go(self.rng.uniform(0.1, 30.0))


def stopped_server_is_known(seed: int, detector: SilenceDetector) -> None:
    world = World(seed, detector)
    world.go(2.0)
    rank = world.rng.randrange(3)
    world.stopped[rank] = world.now
    at = world.now
    world.go(1.5)
    assert world.silent.keys() == {rank}
    when, why = world.silent[rank]
    assert when - at <= 1.5
    assert why.startswith("it is silent: tcp://h:")
    assert "4 pings" in why


def no_false_alarm(seed: int, detector: SilenceDetector) -> None:
    world = World(seed, detector)
    world.go(1.0)
    for _ in range(20):
        world.trouble()
    assert world.silent == {}
    # And a server that is then stopped is known all the same.
    world.go(25.0)
    world.stopped[1] = world.now
    world.go(1.5)
    assert world.silent.keys() == {1}


@pytest.mark.parametrize("seed", range(20))
def test_a_stopped_server_is_silent_within_a_second_and_a_half(seed):
    stopped_server_is_known(seed, SilenceDetector())


@pytest.mark.parametrize("seed", range(20))
def test_a_stopped_scheduler_and_busy_endpoints_cause_no_alarm(seed):
    no_false_alarm(seed, SilenceDetector())


class CountsLateRounds(SilenceDetector):
    """Planted: a stop of the scheduler counts as silence of the servers."""

    def begin_round(self, now, connected):
        self.next_time = now
        for endpoint in self._endpoints.values():
            if endpoint.answered < endpoint.number and now - endpoint.heard > _MISSED * PING_SECONDS:
                endpoint.missed = _MISSED
        return super().begin_round(now, ())


class AlarmsForBusyEndpoints(SilenceDetector):
    """Planted: the connection is not asked."""

    def begin_round(self, now, connected):
        return super().begin_round(now, ())


class ForgetsNothing(SilenceDetector):
    """Planted: pings that were missed once stay missed."""

    def answered(self, address, number, now):
        endpoint = self._endpoints[address]
        missed = endpoint.missed
        super().answered(address, number, now)
        endpoint.missed = missed

    def begin_round(self, now, connected):
        return super().begin_round(now, ())


class CountsNothing(SilenceDetector):
    """Planted: no round counts."""

    def begin_round(self, now, connected):
        self.next_time = -math.inf
        return super().begin_round(now, connected)


@pytest.mark.parametrize("bug", [CountsLateRounds, AlarmsForBusyEndpoints, ForgetsNothing, CountsNothing])
def test_a_planted_bug_is_found(bug):
    for seed in range(20):
        try:
            no_false_alarm(seed, bug())
        except AssertionError:
            return
    pytest.fail(f"{bug.__name__} was not found")


def test_an_endpoint_counts_from_its_first_answer_on_and_late_answers_are_answers():
    detector = SilenceDetector()
    detector.watch({"a": 0}, 0.0)
    for _ in range(10):
        pings, silent = detector.begin_round(detector.next_time, ())
        assert silent == []  # it has not begun to answer
    assert pings == {"a": 10}
    detector.answered("a", 11, 3.0)  # never sent
    detector.answered("b", 10, 3.0)  # not observed
    detector.answered("a", 10, 3.0)
    for _ in range(4):
        assert detector.begin_round(detector.next_time, ())[1] == []
    assert [rank for rank, _, _ in detector.begin_round(detector.next_time, ())[1]] == [0]
    assert detector.begin_round(detector.next_time, {"a"})[1] == []  # it executes a long request
    detector.answered("a", 16, detector.next_time)
    assert detector.begin_round(detector.next_time, ())[1] == []
    detector.watch({}, 9.0)
    assert detector.next_time == math.inf


def test_only_an_answer_to_a_ping_is_one():
    ping = encode_ping(7)
    service = _core.Endpoint(8, [(0, 8)])
    ((_, answer),) = service.handle(b"peer", [ping])
    assert ping_number(answer) == 7
    assert ping_number([ping]) is None  # a request
    assert ping_number([answer[0][:-1]]) is None
    assert ping_number([]) is None
    pull = _core.encode_header(op=_core.Op.STATS, reply=True, sequence=7, payload=[b""])
    assert ping_number([pull, b""]) is None


# --- real sockets ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_endpoints_answer_until_one_is_stopped():
    import time

    poller = zmq.Poller()
    with zmq.Context() as context:
        services = [_core.Endpoint(8, [(0, 8)]) for _ in range(2)]
        loops = [start_loop(service, context, "tcp://127.0.0.1:0") for service in services]
        pinger = Pinger(context, poller, lambda socket: None)
        try:
            endpoints = {loop.address: rank for rank, loop in enumerate(loops)}
            pinger.watch(endpoints, time.monotonic())
            silent: list[tuple[int, str]] = []

            def turn_until(condition):
                deadline = time.monotonic() + TIMEOUT
                while not condition():
                    assert time.monotonic() < deadline
                    now = time.monotonic()
                    silent.extend(pinger.turn(now))
                    poller.poll(max(1, math.ceil(1000 * (min(pinger.next_time, now + 1.0) - now))))

            turn_until(lambda: all(loop.metrics()["requests"] >= 4 for loop in loops))
            assert silent == []
            loops[1].stop()
            turn_until(lambda: silent)
            assert [rank for rank, _, _ in silent] == [1]
            assert loops[1].address in silent[0][1]
            pinger.watch({loops[0].address: 0}, time.monotonic())
            before = loops[0].metrics()["requests"]
            silent.clear()
            turn_until(lambda: loops[0].metrics()["requests"] >= before + 4)
            assert silent == []
        finally:
            pinger.close()
            for loop in loops:
                loop.stop()
