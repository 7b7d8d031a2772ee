"""Clusters with copies of all arcs in one process: servers fail, join, are drained, and nothing is lost.

``make sim SEEDS=100`` runs more schedules of the same scenarios. What must hold, the checks of it, and planted bugs
(sim/planted_replicas.py) that these checks find:

==  ================================================  ===========================================  =====================
no  invariant                                         check                                        planted bug
==  ================================================  ===========================================  =====================
1   an acknowledged write is in exactly one effect    history: exactly once, bounds, torn rows     RepliesBeforeCommit,
    after as many deaths as there are copies                                                       RenumbersPushes
2   one committing primary of an arc; every backup    monitor: records acknowledged and executed,  RepliesBeforeCommit,
    executes a record before it is acknowledged       servers that serve the same arc              AssignsAllAtOnce
3   a copy equals its primary at an equal position,   monitor: bytes of both arcs, five times a    BackupDrifts,
    also after several copies had different ones      second and in the end; divergence            SendsNothingMissing,
                                                                                                   LeastStampServes
4   under BSP the bits are those of an undisturbed    scenarios: sections of all tables, results   LosesCounts
    run                                               of all calls, against a run without faults
5   for one worker a row never goes back              history: versions, read my writes            RepliesBeforeCommit
6   functions, sweeps and erases act once, and are    workloads: rows that one worker alone        RenumbersFunctions
    answered the same                                 changes; scenarios: results of all calls
7   a copy under writes equals its source             monitor: bytes of both arcs, with budgets,   CopyMissesRecords
                                                      admission filters, and a low copy rate
8   a restarted scheduler has the same state; an      monitor: its state, maps of one epoch,       ForgetsInputs,
    older one is refused                              generations of executed orders               SendsBeforeStoring,
                                                                                                   ObeysOldSchedulers
9   everything ends or goes on by its deadline        history: progress; the cluster comes to      SkipsAdmissions,
                                                      rest with all copies, and nothing is held    KeepsConfirmations
10  a save that is done has the rows of one clock,    saves: the loaded checkpoint, as a pull of   WritesPresentRows,
    one that fails changes and holds nothing          the history; bytes of saves of one clock;    PublishesEarly,
                                                      errors, the former one, open sessions        KeepsSnapshots
==  ================================================  ===========================================  =====================
"""

from collections import Counter

import pytest

from shoal.cluster.protocol import messages as m
from sim.planted_replicas import BUGS
from sim.scenarios import LONG, SCENARIOS, Scenario, find_violations, prepare, run
from sim.sweep import main, run_some
from tiers import long_but

# Under BSP, whose bits are known, plans that no other one contains; of random ones, all modes.
SHORT = {
    *(f"{plan}/bsp/rough" for plan in ("drain-join-kill", "disk", "pings", "moves", "saves", "tables", "kill-two")),
    *(f"everything/{mode}/rough" for mode in ("bsp", "ssp", "asp")),
    *(f"anything/{mode}" for mode in ("bsp", "ssp", "asp")),
    "budget/ssp/rough",
}
SEEDS = {"everything": 3, "everything-2": 2, "saves-everything": 3, "anything": 5}  # of a plan; 1 of others
FURTHER = [(name, seed) for name in SCENARIOS for seed in range(1, SEEDS.get(name.partition("/")[0], 1))]
MOST = 40  # seeds until a planted bug must have been found


def check(scenario, seed):
    cluster = prepare(seed, scenario)
    cluster.run()
    assert find_violations(cluster) == [], cluster.happened
    assert scenario.random_faults or sorted(cluster.happened) == sorted(scenario.faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(SHORT, SCENARIOS.keys()))
def test_faults_lose_nothing_and_do_nothing_twice(name):
    check(SCENARIOS[name], 0)


@pytest.mark.long
@pytest.mark.parametrize(("name", "seed"), FURTHER)
def test_further_seeds_lose_nothing_and_do_nothing_twice(name, seed):
    check(SCENARIOS[name], seed)


@pytest.mark.slow
def test_a_server_that_was_declared_dead_and_runs_on_acknowledges_nothing():
    """It is stopped for long, and its former workers repeat their requests there."""
    fenced = 0
    for seed in range(4):
        cluster = prepare(seed, Scenario(mode="asp"))
        stopped = []

        def stop(cluster=cluster, stopped=stopped):
            stopped.append(cluster.random.choice(cluster.living()))
            stopped[0].stop(LONG)

        cluster.once(3, stop)
        cluster.run()
        assert find_violations(cluster) == [], f"seed {seed}"
        fenced += isinstance(stopped[0].fault, m.ErrorReply)
    assert fenced >= 3


@pytest.mark.long
def test_all_faults_happen():
    """Random plans contain each kind of fault, and most of what they plan happens."""
    scenario = SCENARIOS["everything-2/asp/calm"]
    happened, planned = Counter(), 0
    for seed in range(20, 60):  # from where eight plans contain each kind
        cluster = run(seed, scenario)
        happened.update(cluster.happened)
        planned += cluster.planned
        if seed >= 27 and set(scenario.kinds()) == set(happened):
            break
    assert set(scenario.kinds()) == set(happened)
    assert happened.total() > planned / 2


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.invariant}-{bug.kind.__name__}")
def test_planted_bugs_are_found(bug):
    found = set()
    for seed in range(bug.first, bug.first + MOST):
        try:
            cluster = run(seed, bug.scenario, bug.kind)
            violations = find_violations(cluster)
        except (AssertionError, KeyError, ValueError, RuntimeError, AttributeError) as error:
            violations = [f"{type(error).__name__}: {error}"]
        if any(bug.found_by in text for text in violations):
            return
        found.update(text[:200] for text in violations)
    pytest.fail(f"{MOST} seeds find only {sorted(found)}")


def test_every_invariant_has_a_planted_bug():
    assert {bug.invariant for bug in BUGS} == set(range(1, 11))


# --- sweeps ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_counts_its_runs_and_faults(capsys):
    assert main(["--seeds", "1", "--scenario", "kill/asp/calm"]) == 0
    assert "1 runs, 1 faults, 0 failures, " in capsys.readouterr().out  # after progress, if it took long


@pytest.mark.slow
def test_a_sweep_names_the_scenario_and_the_seed_of_a_failure(monkeypatch):
    monkeypatch.setattr("sim.sweep.find_violations", lambda cluster: ["wrong"] if cluster.seed == 7 else [])
    traces, faults, failures = run_some(("kill/asp/calm", range(6, 8)))
    assert (len(traces), faults.total()) == (2, 2)
    assert failures == [("kill/asp/calm", 7, ("kill",), ["wrong"])]


@pytest.mark.slow
def test_a_run_has_the_same_trace_each_time_and_other_seeds_have_others(capsys, tmp_path):
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        assert main(["--seeds", "2", "--scenario", "kill/asp/calm", "--traces", str(file)]) == 0
    first, second = (file.read_text() for file in files)
    assert first == second
    assert len({line.partition(" ")[2].split(" ", 1)[1] for line in first.splitlines()}) == 2


def test_a_sweep_of_no_scenario_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--scenario", "earthquake"])
    assert "earthquake" in capsys.readouterr().err
