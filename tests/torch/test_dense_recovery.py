"""Sums over all workers, of which some have the result already, or are new: with stores that only have clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the dense part is torch's")

import shoal  # noqa: E402
from cluster_fakes import TIMEOUT  # noqa: E402
from shoal.torch.dense_recovery import DenseRecovery  # noqa: E402
from shoal.torch.step_log import GRADIENTS, JOIN, SIZES, Sizes, StepLog  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")

RATE, VALUES = 0.5, 3


class Coordinator:
    """What workers have published, and no barrier: all of them come."""

    def __init__(self) -> None:
        self.published: dict[int, bytes] = {}
        self.left: list[int] = []

    def of(self, rank: int) -> Any:
        return SimpleNamespace(
            publish_address=lambda address: self.published.update({rank: address}),
            addresses=lambda: dict(self.published),
            wait_for_all=lambda: None,
            find_left=lambda: self.left,
        )


class Worker:
    """One worker with a dense part of its own, and an optimizer with a state."""

    def __init__(self, job: Job, rank: int, clock: int, incarnation: int = 1) -> None:
        self.store: Any = SimpleNamespace(
            rank=rank,
            num_workers=job.workers,
            clock=clock,
            incarnation=incarnation,
            is_replacement=incarnation > 1,
            replacement_seconds=TIMEOUT,
            host="127.0.0.1",
            lost_workers=frozenset(),
        )
        self.parameter = torch.nn.Parameter(torch.full((VALUES,), float(rank)))
        self.optimizer = torch.optim.SGD([self.parameter], lr=RATE, momentum=0.5)
        self.steps = StepLog([self.parameter], lambda: self.optimizer)
        self.recovery = DenseRecovery(self.store, job.coordinator.of(rank), self.steps)

    def step(self, gradient: float) -> None:
        """Make a step of its clock with all others, and end it."""
        self.recovery.step(lambda: torch.full((VALUES,), gradient), self._apply)
        self.store.clock += 1

    def _apply(self, total: torch.Tensor) -> None:
        self.parameter.grad = total
        self.optimizer.step()

    @property
    def state(self) -> tuple[list[float], list[float]]:
        momentum = self.optimizer.state_dict()["state"][0]["momentum_buffer"]
        return self.parameter.tolist(), momentum.tolist()


class Job:
    """Workers that have joined at clock 5, and what they do at the same time."""

    def __init__(self, stack: contextlib.ExitStack, workers: int) -> None:
        self.workers = workers
        self.coordinator = Coordinator()
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor(workers))
        self.members = [self.add(rank, 5) for rank in range(workers)]
        for member in self.members:
            self.coordinator.published[member.store.rank] = msgspec.msgpack.encode(member.recovery._server.address)
        self.together(lambda member: member.recovery.join(has_begun=False))

    def add(self, rank: int, clock: int, incarnation: int = 1) -> Worker:
        made = Worker(self, rank, clock, incarnation)
        self._stack.callback(made.recovery.close)
        return made

    def together(self, work: Callable[[Worker], Any], *members: Worker) -> list[Any]:
        ends = [self._pool.submit(work, member) for member in members or self.members]
        return [end.result(TIMEOUT) for end in ends]


@pytest.fixture
def job() -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(stack, 3)


def test_all_begin_with_the_dense_part_of_worker_0_and_make_the_same_steps(job: Job) -> None:
    assert [member.parameter.tolist() for member in job.members] == [[0.0] * VALUES] * 3
    job.together(lambda member: member.step(1.0 + member.store.rank))
    assert [member.state for member in job.members] == [([-3.0] * VALUES, [6.0] * VALUES)] * 3


def test_sizes_are_summed_and_kept_for_two_clocks(job: Job) -> None:
    for _ in range(3):
        found = job.together(lambda member: member.recovery.sizes(lambda: torch.tensor([member.store.rank, 1, 0])))
        assert found == [Sizes(3, True, False)] * 3
        for member in job.members:
            member.store.clock += 1
    assert all(sorted(member.steps.sizes) == [6, 7] for member in job.members)
    assert not job.members[0].recovery.has_ended(7)


def test_a_worker_whose_sum_has_failed_takes_what_another_one_has(job: Job) -> None:
    first, second, third = job.members
    job.together(lambda member: member.step(1.0))
    with first.steps.stepping(6):  # the sum of clock 6 has reached worker 0 alone
        first._apply(torch.full((VALUES,), 4.0))
    for member in job.members:
        member.recovery._group = None
    job.together(lambda member: member.step(7.0), second, third)
    assert second.state == third.state == first.state


def test_a_replacement_takes_what_it_has_missed_of_its_first_step(job: Job) -> None:
    """It needs the dense part from before the step, to compute its gradients, and takes that from after it."""
    job.together(lambda member: member.step(1.0))
    before = job.members[1].state
    job.together(lambda member: member.step(1.0))
    job.members[2].recovery.close()
    again = job.add(2, 6, incarnation=2)
    again.recovery.join(has_begun=True)
    assert (again.parameter.tolist(), again.steps.is_partial) == (before[0], True)
    again.step(99.0)
    assert again.state == job.members[0].state
    job.together(lambda member: member.step(1.0), *job.members[:2], again)
    assert again.state == job.members[0].state == job.members[1].state


def test_the_state_of_an_optimizer_is_taken_where_the_step_is_made_after_all(job: Job) -> None:
    """The worker that had made the step dies as well, before its result has reached anyone."""
    job.together(lambda member: member.step(1.0))
    first, second, third = job.members
    with first.steps.stepping(6):
        first._apply(torch.full((VALUES,), 3.0))
    wanted = first.state
    second.recovery.close()
    again = job.add(1, 6, incarnation=2)
    # It asks worker 0 first.
    again.recovery.join(has_begun=True)
    assert again.steps.is_partial
    first.recovery.close()
    another = job.add(0, 6, incarnation=2)
    another.recovery.join(has_begun=True)
    job.together(lambda member: member.step(1.0), another, again, third)
    assert another.state == again.state == third.state == wanted


def test_a_replacement_knows_no_clock_before_its_own(job: Job) -> None:
    job.together(lambda member: member.step(1.0))
    job.members[2].recovery.close()
    again = job.add(2, 6, incarnation=2)
    again.recovery.join(has_begun=True)
    assert not again.steps.dense(5, JOIN, 6)
    assert not again.steps.dense(5, SIZES, 6)
    assert again.steps.dense(6, SIZES, 6)
    assert not again.steps.dense(6, GRADIENTS, 6)


def test_a_worker_that_was_replaced_ends(job: Job) -> None:
    again = job.add(2, 5, incarnation=2)
    again.recovery.join(has_begun=True)
    with pytest.raises(shoal.FencedError, match=r"worker 2 \(incarnation 1\) was declared dead"):
        job.members[2].step(1.0)


def test_a_worker_that_leaves_is_not_waited_for(job: Job) -> None:
    job.coordinator.left = [1]
    with pytest.raises(shoal.WorkerLostError, match=r"worker 1 of 3 has ended this fit early"):
        job.members[0].step(1.0)


def test_without_a_worker_that_has_it_the_dense_part_is_lost(job: Job) -> None:
    for member in job.members:
        member.recovery.close()
    again = [job.add(rank, 6, incarnation=2) for rank in range(3)]
    ends = [job._pool.submit(member.recovery.join, has_begun=True) for member in again]
    with pytest.raises(shoal.WorkerLostError, match=r"all 3 workers have died, .*--resume"):
        ends[0].result(TIMEOUT)
    job.coordinator.left = [0]
    for end in ends[1:]:
        with pytest.raises(shoal.WorkerLostError, match="worker 0 of 3 has ended this fit early"):
            end.result(TIMEOUT)
