"""What the engine answers without Python: predictions of models that it computes.

    versions    (name of the model, number, inputs, model)
    routes      (path, protocol, choices): a choice is the share of requests up to which it answers, and a version

A route whose versions include one that Python computes is left to Python, as are paths that are written in
another way. The engine's handler is made anew for every change of what is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from shoal import _core
from shoal.serve.served import Model, ServedModel
from shoal.serve.versions import ServedVersions

Choices = list[tuple[float, Model]]
_SHOAL, _TENSORFLOW, _INFERENCE = (
    _core.ServingProtocol.SHOAL,
    _core.ServingProtocol.TENSORFLOW,
    _core.ServingProtocol.INFERENCE,
)
Route = tuple[str, _core.ServingProtocol, str, Choices]  # with the name of the model


def make_handler(
    served: Mapping[str, ServedModel | ServedVersions],
    *,
    only: str,
    decoded_bytes: int,
    refuse_unknown: bool,
    counters: _core.PredictionCounters,
    budget: _core.ByteBudget,
) -> _core.PredictionHandler:
    """Make what answers for models by name; the first one has ``/predict``, and ``only`` is a name for one without."""
    versions: dict[tuple[str, int], int] = {}
    natives: list[tuple[str, int, _core.InputSchema, _core.ExportedModel]] = []
    routes: list[tuple[str, _core.ServingProtocol, list[tuple[float, int]]]] = []
    for path, protocol, name, choices in _routes(served, only):
        found = []
        for below, model in choices:
            if model.native is None:
                break
            place = versions.setdefault((name, id(model)), len(natives))
            if place == len(natives):
                natives.append((name, model.version, model.inputs.native, model.native))
            found.append((below, place))
        else:
            routes.append((path, protocol, found))
    return _core.PredictionHandler(
        natives, routes, decoded_bytes=decoded_bytes, refuse_unknown=refuse_unknown, counters=counters, budget=budget
    )


def _routes(served: Mapping[str, ServedModel | ServedVersions], only: str) -> Iterator[Route]:
    for i, (name, one) in enumerate(served.items()):
        if i == 0:
            yield "/predict", _SHOAL, name, _choices(one)
        at = name or only
        if quote(at, safe="") != at:
            continue
        for which, choices in _selections(one):
            if name:
                yield f"/models/{at}{which}/predict", _SHOAL, name, choices
            yield f"/v1/models/{at}{which}:predict", _TENSORFLOW, name, choices
            if not which.startswith("/labels"):
                yield f"/v2/models/{at}{which}/infer", _INFERENCE, name or only, choices


def _selections(one: ServedModel | ServedVersions) -> Iterator[tuple[str, Choices]]:
    """Yield the part of a path that selects versions, and these."""
    yield "", _choices(one)
    if isinstance(one, ServedModel):
        yield f"/versions/{one.now.version}", [(1.0, one.now)]
        return
    models = {model.version: model for model in one.models}
    for version, model in models.items():
        yield f"/versions/{version}", [(1.0, model)]
    for label, version in one.settings.labels.items():
        if version in models and quote(label, safe="") == label:
            yield f"/labels/{label}", [(1.0, models[version])]


def _choices(one: ServedModel | ServedVersions) -> Choices:
    """Return what answers a request that names no version: by the split, or the highest version."""
    if isinstance(one, ServedModel) or not one.settings.split:
        return [(1.0, one.now)]
    models = {model.version: model for model in one.models}
    shares = itertools.accumulate(one.settings.split.values())
    return [
        (below, models[one.settings.labels[label]]) for label, below in zip(one.settings.split, shares, strict=True)
    ]
