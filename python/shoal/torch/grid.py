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

from shoal.data import Batch
from shoal.models import fitting
from shoal.models.grid import Grid
from shoal.models.plan import FitInput, Learning, Plan
from shoal.store.local import local
from shoal.torch.click_model import ClickModel
from shoal.torch.config import Config, build, parse

_SHORT = {"architecture": "model.name", "dim": "model.dim", "lr": "train.optimizer.lr"}  # as the options
_VARIED = ("model", "tables", "train.optimizer")


class ClickModelGrid(Grid[ClickModel]):
    """Click models of all combinations of some settings of a configuration, trained in the same passes.

    Parameters
    ----------
    config : Config or mapping
        A configuration as of ``shoal train ctr``: what `shoal.torch.config.read` returns, or the content of the file.
    grid : mapping of str to sequence
        Settings and the values to try; every combination is a model. A setting is a path in the sections ``model``,
        ``tables`` and ``train.optimizer``, such as ``"model.dropout"`` or ``"tables.optimizer.lr"``, or one of
        ``"architecture"``, ``"dim"`` and ``"lr"``, as the options of the command.
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
    ...     "data": {"train": [], "format": "csv", "label": "y", "categorical": ["user"]},
    ...     "model": {"name": "fm", "dim": 2},
    ... }
    >>> with ClickModelGrid(config, {"dim": [2, 4], "lr": [0.01]}) as grid:
    ...     grid.settings
    [{'dim': 2, 'lr': 0.01}, {'dim': 4, 'lr': 0.01}]
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        grid: Mapping[str, Sequence[Any]],
        *,
        threads: int | None = None,
        slots: int = 1024,
    ) -> None:
        super().__init__(grid)
        base = config if isinstance(config, Config) else parse(config)
        self._configs = [_with(base, settings) for settings in self._settings]
        with ExitStack() as failed:
            failed.callback(self.close)
            for one in self._configs:
                store = self._stores.enter_context(local(threads=threads, slots=slots))
                with torch.random.fork_rng(devices=[]):
                    model = build(one, store)
                    model.own_random()
                self._models.append(model)
            failed.pop_all()

    @property
    def configs(self) -> list[Config]:
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
        learning = Learning(negative_rate=train.negative_rate, warm_up=False, seed=train.seed)
        plan = Plan.of(learning, train.epochs, train.shuffle, train.early_stopping)
        fitting.fit(self._models, FitInput(first.reading(reader), first.reading(valid), plan), progress=progress)
        return self


def _with(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with other settings."""
    raw = msgspec.to_builtins(config)
    if raw["train"]["staleness"]:
        raise ValueError(
            f"[train] staleness is {raw['train']['staleness']}, and the models of a grid pull no rows ahead: leave it "
            "out"
        )
    rules = raw["tables"].pop("rules")
    raw["tables"] |= {
        name: {key: value for key, value in rule.items() if value is not None} for name, rule in rules.items()
    }
    for name, value in settings.items():
        place = _SHORT.get(name, name)
        if not any(place.startswith(f"{varied}.") for varied in _VARIED):
            raise ValueError(
                f"a grid cannot vary {name!r}, as all of its models learn from the same batches: it is "
                f"{', '.join(_SHORT)}, or a setting such as model.dropout, tables.optimizer.lr, train.optimizer.betas"
            )
        *sections, key = place.split(".")
        section = raw
        for one in sections:
            section = section.get(one) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ValueError(f"the grid varies {name!r}, and the configuration has no {'.'.join(sections)}: add it")
        section[key] = value
    try:
        return parse(raw)
    except ValueError as error:
        raise ValueError(f"with {', '.join(f'{name}={value}' for name, value in settings.items())}: {error}") from None
