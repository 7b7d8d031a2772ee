"""Which place a process has, by what its launcher has put into the environment."""

from __future__ import annotations

import pytest

from shoal.cluster.protocol.environment import (
    ProcessIdentity,
    find_group,
    find_scheduler,
    find_worker,
    first_host,
    volcano,
)

SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n[07-09]", "SLURM_NTASKS": "99"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "5"}
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "3",
    "VC_SERVER_NUM": "2",
    "VC_SCHEDULER_HOSTS": "job-scheduler-0.job",
}
OWN = {"SHOAL_RANK": "0", "SHOAL_WORKERS": "2", "SHOAL_SCHEDULER": "tcp://h:1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script itself, not a step of it
        (SRUN, ProcessIdentity("srun", 2, 8, "n07")),
        ({**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "x,y"}, ProcessIdentity("srun", 2, 8, "x")),
        (MPI, ProcessIdentity("mpirun", 3, 5, "127.0.0.1")),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ProcessIdentity("mpirun", 3, 5, None)),
        (TORCH, ProcessIdentity("torchrun", 1, 4)),
        (VOLCANO, ProcessIdentity("Volcano", 1, 3)),
        ({**SRUN, **MPI}, ProcessIdentity("mpirun", 3, 5, "127.0.0.1")),
        ({**SRUN, **MPI, **TORCH, **VOLCANO}, ProcessIdentity("torchrun", 1, 4)),
        ({**SRUN, **MPI, **TORCH, **OWN}, ProcessIdentity("shoal", 0, 2)),
    ],
)
def test_the_innermost_launcher_gives_a_worker_its_place(environment, place):
    assert find_worker(environment) == place


def test_the_schedulers_address_is_the_one_that_was_given_or_volcanos_host():
    assert find_scheduler({}) is None
    assert find_scheduler(VOLCANO) == "tcp://job-scheduler-0.job:5570"
    assert find_scheduler({**VOLCANO, **OWN}) == "tcp://h:1"
    assert volcano(VOLCANO).servers == 2
    assert find_group(VOLCANO) is None


def test_a_variable_that_is_no_number_or_out_of_range_is_named():
    with pytest.raises(ValueError, match="RANK='one' in the environment is not a number"):
        find_worker({"RANK": "one", "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK=5 in the environment is out of range: 5 processes"):
        find_worker({**MPI, "OMPI_COMM_WORLD_RANK": "5"})
    with pytest.raises(ValueError, match="VC_TASK_INDEX=7 in the environment is out of range: 3 processes"):
        find_worker({**VOLCANO, "VC_TASK_INDEX": "7"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[012,015]", "n012"),
        ("a[9]b,c", "a9b"),
        ("r1-n[2-3]-x", "r1-n2-x"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, host):
    assert first_host(nodes) == host


def test_an_empty_list_of_nodes_is_refused():
    with pytest.raises(ValueError, match="not a node list"):
        first_host(",")
