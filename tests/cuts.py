"""Fits that are cut off, within this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from shoal.models.fit_checkpoints import Keeper


class PowerFailed(Exception):
    pass


@contextmanager
def power_fails_behind(batches: int) -> Iterator[None]:
    """End a fit that keeps checkpoints, behind so many batches; the ``with`` makes sure that it did."""
    left = [batches]
    really = Keeper.batch_done

    def batch_done(keeper: Keeper, *arguments: Any) -> None:
        really(keeper, *arguments)
        left[0] -= 1
        if left[0] < 0:
            raise PowerFailed

    with mock.patch.object(Keeper, "batch_done", batch_done), pytest.raises(PowerFailed):
        yield
