"""A cluster with copies of all arcs in one process: servers are killed, stopped and cut off, and nothing is lost.

`SEEDS` of the environment runs more schedules, in any number of processes: each is one seed, which a failure names.
"""

import os
import random

import pytest

from shoal import _core
from shoal.cluster.protocol import messages as m
from sim.network import CALM, ROUGH, Weather
from sim.replicated import Replicated
from sim.schedules import counting, violations

MODES = {"bsp": ("bsp", 0), "ssp(2)": ("ssp", 2), "asp": ("asp", 0)}
SEEDS = range(int(os.environ.get("SEEDS", "3")))
SHORT, LONG = 0.1, 0.6  # seconds; a server is declared dead after 0.25


def world(seed: int, mode: str, weather: Weather, kind: type[Replicated] = Replicated, clocks: int = 20):
    name, staleness = MODES[mode]
    cluster = kind(seed, _core.Service, mode=name, staleness=staleness, workers=3, endpoints=3, weather=weather)
    program = counting(seed, clocks, think=0.05)
    cluster.start([program] * 3)
    return cluster, program


def plan(cluster: Replicated, program, faults: list[str]) -> list[str]:
    """Let faults happen at random moments; returns those that have happened."""
    rng = random.Random(cluster.random.random())
    happened = []

    def happen(fault: str) -> None:
        happened.append(fault)
        servers = cluster.living()
        if fault == "kill":
            rng.choice(servers).kill()
        elif fault == "stop":
            rng.choice(servers).stop(rng.choice([SHORT, LONG]))
        elif fault == "cut":
            one, other = rng.choice([(rng.choice(servers), None), (None, rng.choice(servers)), rng.sample(servers, 2)])
            cluster.cut(one, other, rng.choice([SHORT, LONG]))
        elif fault == "scheduler":
            cluster.kill_scheduler(rng.choice([0.05, 0.5]))
        elif fault == "worker":
            cluster.replace_one(program, rng.random() < 0.5)
        elif fault == "join":
            cluster.add_server()

    for k, fault in enumerate(faults):
        if fault in ("kill", "stop", "cut"):
            cluster.once(2 + 2 * k, cluster.when_redundant, happen, fault)
        else:
            cluster.once(2 + 2 * k, happen, fault)
    return happened


def check(cluster: Replicated, what: str) -> None:
    assert violations(cluster) == [], what
    assert cluster.history.errors == [], what
    assert cluster.unequal() == [], what


@pytest.mark.parametrize("weather", [CALM, ROUGH], ids=["calm", "rough"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "faults",
    [
        ["kill"],
        ["stop"],
        ["cut"],
        ["scheduler"],
        ["worker"],
        ["kill", "scheduler"],
        ["worker", "kill", "worker"],
        ["kill", "join", "kill"],
    ],
    ids="-".join,
)
def test_faults_lose_nothing_and_do_nothing_twice(faults, mode, weather):
    for seed in SEEDS:
        cluster, program = world(seed, mode, weather)
        happened = plan(cluster, program, faults)
        cluster.run()
        check(cluster, f"seed {seed}: {happened}")
        assert sorted(happened) == sorted(faults), f"seed {seed}"
        if "kill" in faults:
            assert sum(not server.alive for server in cluster.servers) == faults.count("kill")


def test_a_server_that_was_declared_dead_and_runs_on_acknowledges_nothing():
    """It is stopped for long, and its former workers repeat their requests there."""
    fenced = 0
    for seed in range(10):
        cluster, _ = world(seed, "asp", CALM)
        stopped = []

        def stop(cluster=cluster, stopped=stopped):
            stopped.append(cluster.random.choice(cluster.living()))
            stopped[0].stop(LONG)

        cluster.once(3, stop)
        cluster.run()
        check(cluster, f"seed {seed}")
        fenced += isinstance(stopped[0].fault, m.ErrorReply)
    assert fenced >= 8


# --- planted bugs ---------------------------------------------------------------------------------------------------


def finds(kind: type[Replicated], mode: str, faults: list[str], weather: Weather = CALM, seeds: int = 40) -> bool:
    """Whether a schedule shows what is wrong."""
    for seed in range(seeds):
        cluster, program = world(seed, mode, weather, kind)
        plan(cluster, program, faults)
        try:
            cluster.run()
            check(cluster, "")
        except (AssertionError, KeyError, ValueError, RuntimeError):
            return True
    return False


class Hasty(Replicated):
    """Replies leave before their records are committed: what was only sent counts as acknowledged."""

    def arrive(self, address, peer, frames):
        super().arrive(address, peer, frames)
        if b"~" in bytes(peer):
            return
        service = self.services[address]
        for stream in service.replication()["streams"]:
            if stream["sent"] > stream["acknowledged"]:
                low, high = stream["stream"] & 0xFFFFFFFF, stream["stream"] >> 32
                reply = _core.encode_header(
                    op=_core.Op.REPLICATE, reply=True, sequence=stream["sent"], table=low, job=high
                )
                self.reply(address, service.handle_backup(stream["stream"], [reply]))


class Renumbering(Replicated):
    """A worker sends what is not acknowledged under new numbers when the map changes."""

    def note_map(self, map):
        if self.map is not None and map.epoch > self.map.epoch:
            for client in self.clients:
                client.requests._write += 1
                for call in list(client.requests._open.values()):
                    if call.op == _core.Op.PUSH:
                        client.requests._write += 1
                        del client.requests._open[call.sequence]
                        call.sequence = client.requests._write
                        client.requests._open[call.sequence] = call
        super().note_map(map)


def test_planted_replies_before_their_commit_are_found():
    assert finds(Hasty, "asp", ["kill"], Weather(jitter=0.02))


def test_planted_writes_under_new_numbers_are_found():
    assert finds(Renumbering, "asp", ["kill"], Weather(jitter=0.02))
