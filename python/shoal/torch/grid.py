"""Grid: one click model for each of several settings, trained in one pass that reads and prepares every batch once.

    configuration + grid {"model.dim": [4, 8], "train.optimizer.lr": [0.001, 0.01]}      --> 4 configurations, 4 models
    batch --> Inputs, once --> each model in turn: its rows, its dense part, its random numbers

Each model is bit-identical to one that is trained alone, early stopping included. Memory: the tables and the dense part
of each model. Time of a pass: one parse and one preparation, and for each model forward, backward and both steps.

Threads: the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import torch

from shoal.base.settings import read as read_settings
from shoal.config import TrainConfig
from shoal.data import Batch
from shoal.models import fitting
from shoal.models.grid import Grid
from shoal.models.plan import FitInput, Learning, Plan, early_stopping_of
from shoal.store.local import local
from shoal.torch.click_model import ClickModel
from shoal.torch.config import ADAM, build, checked, parse
from shoal.torch.recipe import described, recipe_of

_VARIED = ("model", "tables", "train.optimizer")


class ClickModelGrid(Grid[ClickModel]):
    """Click models of all combinations of some settings of a configuration, trained in the same passes.

    Parameters
    ----------
    config : TrainConfig or mapping
        A configuration as of ``shoal train ctr``: what `shoal.torch.config.read` returns, or the content of the file.
    grid : mapping of str to sequence
        Settings and the values to try; every combination is a model. A setting is a path in the sections ``model``,
        ``tables`` and ``train.optimizer``, such as ``"model.dropout"`` or ``"tables.optimizer.lr"``.
    threads, slots : int, optional
        Of each model's store, as `shoal.local`.

    Raises
    ------
    ValueError
        The grid is empty, names a setting that the models cannot differ in, or a value is invalid or there twice.

    Notes
    -----
    All models learn from the same batches, in one process; none is checkpointed during the fit. Each has a store of its
    own. Not thread-safe.

    Examples
    --------
    >>> config = {
    ...     "data": {"data": [], "format": "csv", "label": "y", "categorical": ["user"]},
    ...     "model": {"name": "fm", "dim": 2},
    ... }
    >>> with ClickModelGrid(config, {"model.dim": [2, 4], "train.optimizer.lr": [0.01]}) as grid:
    ...     grid.settings
    [{'model.dim': 2, 'train.optimizer.lr': 0.01}, {'model.dim': 4, 'train.optimizer.lr': 0.01}]
    """

    def __init__(
        self,
        config: TrainConfig | Mapping[str, Any],
        grid: Mapping[str, Sequence[Any]],
        *,
        threads: int | None = None,
        slots: int = 1024,
    ) -> None:
        super().__init__(grid)
        base = config if isinstance(config, TrainConfig) else parse(config)
        self._configs = [_with(base, settings) for settings in self._settings]
        with ExitStack() as failed:
            failed.callback(self.close)
            for one in self._configs:
                store = self._stores.enter_context(local(threads=threads, slots=slots))
                with torch.random.fork_rng(devices=[]):
                    self._models.append(build(one, store))
            failed.pop_all()

    @property
    def configs(self) -> list[TrainConfig]:
        """The whole configuration of each model, in the same order."""
        return list(self._configs)

    def fit(
        self, reader: Iterable[Batch], *, valid: Iterable[Batch] | None = None, progress: bool | float = True
    ) -> Self:
        """Learn from all batches of a reader, all models at once, by the configuration's section ``train``.

        Parameters
        ----------
        reader : Reader or iterable of Batch
            Iterated once for each pass.
        valid : Reader or iterable of Batch, optional
            Measured after each pass; each model stops early by itself.
        progress : bool or float
            As `shoal.models.Model.fit`.

        Returns
        -------
        ClickModelGrid
            Itself.
        """
        first, train = self._models[0], self._configs[0].train
        plateau = recipe_of(described(train)).plateau
        learning = Learning(negative_rate=train.negative_rate, warm_up=False, seed=train.seed, plateau=plateau)
        plan = Plan.of(learning, train.epochs, train.shuffle, early_stopping_of(train))
        fitting.fit(self._models, FitInput(first.reading(reader), first.reading(valid), plan), progress=progress)
        return self


def _with(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration with other settings."""
    raw = msgspec.to_builtins(config)
    if raw["train"]["staleness"]:
        raise ValueError(
            f"[train] staleness is {raw['train']['staleness']}, and the models of a grid pull no rows ahead: leave it "
            "out"
        )
    raw["train"]["optimizer"] = dict(raw["train"]["optimizer"] or ADAM)
    for name, value in settings.items():
        if not any(name.startswith(f"{varied}.") for varied in _VARIED):
            raise ValueError(
                f"a grid cannot vary {name!r}, as all of its models learn from the same batches: it is a setting such "
                "as model.name, model.dropout, tables.optimizer.lr or train.optimizer.lr"
            )
        *sections, key = name.split(".")
        section = raw
        for one in sections:
            section = section.get(one) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ValueError(f"the grid varies {name!r}, and the configuration has no {'.'.join(sections)}: add it")
        section[key] = value
    try:
        return checked(read_settings(type(config), raw))
    except ValueError as error:
        raise ValueError(f"with {', '.join(f'{name}={value}' for name, value in settings.items())}: {error}") from None
