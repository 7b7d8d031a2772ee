"""FitReader: the fits of models whose rows a server has (base/fit_rows.py), for displays.

Their rows are read as they are, which no worker waits for, counts or sees. Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from shoal import _core
from shoal.base.fit_rows import DIM, HEADER, PASSES, SUFFIX, SUMS, Header, PassMetrics, place
from shoal.cluster.protocol.status import MAX_FITS, MAX_MODELS, FitModelStatus, FitStatus, running_first

_BUSY_SECONDS = 0.01  # to wait for an endpoint that is executing a request
_MOST = 1 << 62  # numbers from here on are not those of a fit


class FitReader:
    """Reads the fits of a server's endpoints."""

    def __init__(self, endpoints: Mapping[str, _core.Endpoint], names: Callable[[], Mapping[int, str]]) -> None:
        self._endpoints = dict(endpoints)
        self._names = names
        self._known: dict[tuple[str, int], FitStatus] = {}  # by address and table

    def read(self) -> tuple[FitStatus, ...]:
        """Return the fits, at most `MAX_FITS`; those of an endpoint that is busy are as they were before."""
        known = {}
        for table, name in self._names().items():
            if name.endswith(SUFFIX):
                for address, endpoint in self._endpoints.items():
                    before = self._known.get((address, table))
                    fit = _read(endpoint, table, name.removesuffix(SUFFIX), before)
                    if fit is not None:
                        known[address, table] = fit
        self._known = known
        return running_first(known.values())[:MAX_FITS]


def _read(endpoint: _core.Endpoint, table: int, name: str, before: FitStatus | None) -> FitStatus | None:
    found = _peek(endpoint, table, [place(HEADER)])
    if found is None:
        return before
    header = Header.from_row(found[0]) if found else Header()
    is_fit = header.fit > 0 and header.models > 0 and all(0 <= number < _MOST for number in header.to_row())
    if not is_fit:  # none has begun, or the rows are a user's
        return None
    epoch, known = header.epoch, header.known
    models = _sums(endpoint, table, header, epoch)
    if models and epoch and (header.is_over or epoch >= header.epochs) and not any(one.examples for one in models):
        epoch -= 1  # the last one: the next will not begin
        models = _sums(endpoint, table, header, epoch)
        known -= models[0].examples if models else 0
    if not models:
        return before
    state: Literal["over", "running"] = "over" if header.is_over else "running"
    about = (name, header.job, header.fit, state)
    return FitStatus(*about, epoch + 1, header.epochs, max(0, known), header.models, models)


def _sums(endpoint: _core.Endpoint, table: int, header: Header, epoch: int) -> tuple[FitModelStatus, ...]:
    """Return what the models have learned from in a pass; empty if their rows cannot be read now."""
    models = range(min(header.models, MAX_MODELS))
    rows = _peek(endpoint, table, [place(SUMS, model, epoch % PASSES) for model in models])
    return tuple(FitModelStatus(*PassMetrics.from_row(row, header.classes)) for row in rows or ())


def _peek(endpoint: _core.Endpoint, table: int, places: list[int]) -> list[list[int]] | None:
    """Return rows; none if the endpoint does not serve them, None if it is busy."""
    found = endpoint.peek(table, _core.unmix(np.array(places, np.uint64)), _BUSY_SECONDS)
    if found is None:
        return None
    rows: list[list[int]] = found.tolist() if found.shape[1] == DIM else []
    return rows
