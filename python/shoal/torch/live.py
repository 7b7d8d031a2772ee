"""LiveClickModel: the click model that the workers of a cluster train, as a reader of the cluster has it.

    rows          read from the servers by each prediction
    dense part    read from the servers' table "dense" by `refreshed`, which makes another model with its values

A model never changes: a prediction uses one dense part throughout, while another thread reads a newer one. The models
share the modules over tables, and all else that is not a parameter is copied.

Threads: any.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from shoal.store.base import Store
from shoal.table.table import Table
from shoal.torch.click_model import ClickModel
from shoal.torch.config import build
from shoal.torch.dense import cut, trained
from shoal.torch.dense_part import DENSE_TABLE
from shoal.torch.sparse import SparseModule


class LiveClickModel(ClickModel):
    """A click model over the tables of a cluster that trains it with ``dense = "servers"``; it only predicts."""

    _dense_table: Table | None = None  # None: the module has no parameters
    _has_learned = False

    @classmethod
    def of(cls, description: Mapping[str, Any], store: Store) -> Self:
        """Make the model of a description, with the dense part as it is now."""
        made_by = description["click"]
        if not made_by:
            raise ValueError("the module of this click model was not made by a configuration, so it cannot be rebuilt")
        with torch.random.fork_rng(devices=[]):
            made = build(made_by, store)
        size = sum(parameter.numel() for _, parameter in trained(made.module))
        if size and made_by.get("dense", "allreduce") != "servers":
            raise ValueError(
                'the dense part of this click model is in its workers (dense = "allreduce"), and only servers can be '
                'read: train it with dense = "servers" in [train], or export its checkpoints (shoal export) and serve '
                "the exports with --watch"
            )
        model = cls(made.module, store=store)
        model.made_by = made_by
        model.take_exported(description, None)
        if size:
            model._dense_table = store.table(DENSE_TABLE)
        return model.refreshed() or model

    def refreshed(self) -> Self | None:
        """Read the dense part; return the model with its values, or None if they have not changed."""
        table = self._dense_table
        if table is None:
            self.tables[0].contains(np.zeros(1, np.uint64))  # raises if they cannot be read
            return None
        size = sum(parameter.numel() for _, parameter in trained(self.module))
        keys = np.arange(-(-size // table.dim), dtype=np.uint64)
        numbers = table.pull(keys).reshape(-1)
        if not self._has_learned:
            self._check_dense(table, keys, numbers[size:])
        array = torch.from_numpy(numbers)
        pairs = [(old, its) for _, old, its in cut(dict(trained(self.module)), array)]
        if all(torch.equal(old, its) for old, its in pairs):
            return None
        # What the copy shares or replaces: deepcopy copies the rest.
        memo: dict[int, Any] = {id(one): one for one in self.module.modules() if isinstance(one, SparseModule)}
        memo |= {id(old): nn.Parameter(its.clone()) for old, its in pairs}
        model = copy.copy(self)
        model.module = copy.deepcopy(self.module, memo)
        return model

    @staticmethod
    def _check_dense(table: Table, keys: npt.NDArray[np.uint64], padding: npt.NDArray[np.float32]) -> None:
        """Raise ValueError if the table is not seen to have the values of this module, no more and no fewer."""
        held = len(table)
        if not held:
            raise ValueError(f"no worker has set the dense part in table {table.name!r} yet: try again when they train")
        if held != len(keys) or not table.contains(keys).all() or padding.any():
            what = "other parameters" if held == len(keys) else f"{held} blocks and not {len(keys)}"
            raise ValueError(
                f"table {table.name!r} is the dense part of another click model, with {what}: pass the configuration "
                "that the workers train"
            )

    def check_fitted(self) -> None:
        """Raise ValueError if no worker has pushed yet."""
        if not self._has_learned and not any(len(table) for table in self.tables):
            raise ValueError("this model is not trained yet: its tables have no rows until the first push of a worker")
        self._has_learned = True
