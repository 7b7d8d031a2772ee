"""Sums over workers by gloo: what ends one, and what does not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ShoalError
from shoal.torch.gloo_group import GlooGroup, wait_for_all


class _Late:
    """A sum that ends between a wait whose time is over, and the question whether it has ended."""

    def __init__(self, work: Any, error: RuntimeError | None) -> None:
        self._work, self._error = work, error

    def wait(self, *time: Any) -> None:
        if time:
            raise RuntimeError("Operation timed out!")
        self._work.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return True


def group(error: RuntimeError | None = None) -> GlooGroup:
    made = GlooGroup(SimpleNamespace(rank=0, num_workers=1), dist.HashStore(), 5.0, 5.0)  # type: ignore[arg-type]
    real = made._group
    made._group = SimpleNamespace(allreduce=lambda *what: _Late(real.allreduce(*what), error))
    return made


def test_a_sum_that_ends_when_its_wait_does_has_not_failed():
    numbers = torch.arange(3.0)
    group().all_reduce(numbers, lambda: None)
    assert numbers.tolist() == [0.0, 1.0, 2.0]


def test_a_sum_that_failed_then_says_why():
    with pytest.raises(RuntimeError, match="Connection closed"):
        group(RuntimeError("Connection closed by peer")).all_reduce(torch.arange(3.0), lambda: None)


def test_a_worker_that_does_not_come_is_named_and_waited_for_no_longer_than_its_check_allows():
    meeting, two = dist.HashStore(), SimpleNamespace(rank=0, num_workers=2)
    with pytest.raises(RuntimeError, match="worker 1 did not come within"):
        wait_for_all(two, meeting, 0.05, lambda: None)  # type: ignore[arg-type]

    def lost() -> None:
        raise ShoalError("it was declared dead")

    with pytest.raises(ShoalError, match="declared dead"):
        wait_for_all(two, meeting, 60.0, lost)  # type: ignore[arg-type]
    wait_for_all(SimpleNamespace(rank=1, num_workers=2), meeting, 60.0, lost)  # type: ignore[arg-type]
