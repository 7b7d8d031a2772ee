"""Workers with caches in a simulated cluster: the bounds of what they see hold, and planted bugs are found."""

from dataclasses import replace

import pytest

from shoal import _core
from shoal._core import RowCacheDefect
from sim.cached import CachePlan
from sim.network import ROUGH_IN_ORDER, Weather
from sim.planted_caches import PLANTED
from sim.schedules import Plan, run, violations
from tiers import long_after

CALM = Weather(ordered=True)  # as connections are: a pull may follow pushes that are not acknowledged
SSP = Plan(mode="ssp", staleness=3, clocks=8, weather=ROUGH_IN_ORDER, cache=CachePlan(staleness=1, rows=64))
ASP = Plan(mode="asp", clocks=8, weather=ROUGH_IN_ORDER, cache=CachePlan(staleness=2, rows=64))
PLANS = {
    "ssp": SSP,
    "ssp, all of its bound": replace(SSP, staleness=2, cache=CachePlan(staleness=2)),
    "ssp, nothing is held": replace(SSP, staleness=2, weather=CALM, cache=CachePlan(staleness=0, rows=64)),
    "asp": ASP,
    "asp, no room": replace(ASP, cache=CachePlan(staleness=3, rows=8)),
    "deaths": replace(SSP, deaths=2, zombies=True),
    "moves": replace(SSP, moves=4, endpoints=3),
}


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("local_steps", [False, True])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", long_after(1, range(3)))
def test_caches_keep_the_promises_of_their_job(name, seed, local_steps):
    plan = PLANS[name]
    plan = replace(plan, cache=replace(plan.cache, local_steps=local_steps))
    assert violations(run(seed, plan)) == []
    if not plan.moves:  # which only the model of an endpoint makes
        assert violations(run(100 + seed, plan, _core.Endpoint)) == []


def test_caches_read_most_rows_here_when_there_is_time():
    plan = Plan(mode="asp", clocks=30, weather=CALM, cache=CachePlan(staleness=8, rows=64))
    cluster = run(1, plan)
    stats = [client.cached.rows.metrics() for client in cluster.clients]
    assert violations(cluster) == []
    assert sum(one["hits"] for one in stats) > sum(one["fetched"] for one in stats)
    assert sum(one["sent"] for one in stats) < 0.5 * sum(one["added"] for one in stats)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_in_a_cache_is_found(name):
    wrong, plan, checkers = PLANTED[name]
    part = "row_defect" if isinstance(wrong, RowCacheDefect) else "defect"
    plan = replace(plan, cache=replace(plan.cache, **{part: wrong}))
    for seed in range(200):
        if checkers & {checker for checker, _ in violations(run(seed, plan))}:
            return
    pytest.fail(f"{sorted(checkers)} found nothing in 200 runs")
