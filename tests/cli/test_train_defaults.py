"""Settings of commands that depend on others."""

import pytest

from shoal.cli.train import _ftrl, _solver
from shoal.cli.train_options import TrainOptions
from shoal.config import RegressionConfig
from shoal.models import DBPG


@pytest.mark.parametrize(("given", "online", "batch"), [(None, 0.0, DBPG().l1), (0.0, 0.0, 0.0), (2.5, 2.5, 2.5)])
def test_the_batch_solver_has_the_same_penalty_from_the_command_line_as_in_python(given, online, batch):
    assert _ftrl(RegressionConfig(l1=given)).l1 == online
    settings = RegressionConfig(l1=given, solver="dbpg")
    assert _solver(TrainOptions(lr=settings), settings).l1 == batch
