"""Two jobs of different consistency on a simulated cluster with copies: neither waits for the other, or changes it.

``make sim SCENARIO=jobs SEEDS=100`` runs more schedules. Each job has a history of its own (sim/jobs.py), on which all
checkers of sim/history.py run; under BSP a job on a table of its own has the bits of a run without the other job and
without faults. Planted bugs (sim/planted_jobs.py) must be found.
"""

import pytest

from sim.planted_jobs import PLANTED
from sim.scenarios import SCENARIOS, Scenario, find_violations, prepare, run
from tiers import long_but

NAMES = [name for name in SCENARIOS if name.startswith("jobs")]
SHORT = {
    "jobs/bsp+asp/own/rough",
    "jobs/bsp+bsp/shared/rough",
    "jobs/ssp+bsp/shared/calm",
    "jobs-moves/bsp+asp/shared/rough",
    "jobs-everything/bsp+asp/own/rough",
    "jobs-everything/asp+bsp/shared/rough",
}
MOST = 20  # seeds until a planted bug must have been found


def check(name, seed):
    cluster = prepare(seed, SCENARIOS[name])
    cluster.run()
    assert find_violations(cluster) == [], cluster.happened
    for side in cluster.sides:
        assert any(client.finished for client in cluster.clients if client.cluster is side)
        assert side.history.pulls
        assert side.history.pushes
    assert cluster.sides[0].job != cluster.sides[1].job
    if not SCENARIOS[name].random_faults:  # else a worker may come back when its job has ended
        assert cluster.membership.named_jobs == []


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(SHORT, NAMES))
def test_two_jobs_lose_nothing_and_do_not_change_each_other(name):
    check(name, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_two_jobs_under_any_faults(seed):
    for name in NAMES:
        if name.startswith("jobs-everything"):
            check(name, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_of_jobs_are_found(name):
    kind, faults, found_by = PLANTED[name]
    scenario = Scenario(mode="bsp", other="asp", jobs=True, workers=2, faults=faults)
    found = set()
    for seed in range(MOST):
        try:
            violations = find_violations(run(seed, scenario, kind))
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            violations = [f"{type(error).__name__}: {error}"]
        if any(found_by in text for text in violations):
            return
        found.update(text[:200] for text in violations)
    pytest.fail(f"{MOST} seeds find only {sorted(found)}")
