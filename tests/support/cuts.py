"""Fits that are interrupted within this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from shoal.models.fit_checkpoints import FitCheckpointer


class PowerFailed(Exception):
    pass


@contextmanager
def power_fails_behind(batches: int) -> Iterator[None]:
    """End a fit that writes checkpoints after this many batches; the ``with`` checks that it ended."""
    left = [batches]
    really = FitCheckpointer.batch_done

    def batch_done(checkpointer: FitCheckpointer, *arguments: Any) -> None:
        really(checkpointer, *arguments)
        left[0] -= 1
        if left[0] < 0:
            raise PowerFailed

    with mock.patch.object(FitCheckpointer, "batch_done", batch_done), pytest.raises(PowerFailed):
        yield
