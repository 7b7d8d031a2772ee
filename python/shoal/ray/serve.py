"""PredictionServer: a Ray Serve deployment of an exported model, which follows its deltas.

    HTTP --> proxy of Ray Serve --> replica: ServedModel, the routes of shoal.serve.app --> docs/serving.md's answers
    DeploymentHandle --------------> replica: predict(examples) --> probabilities

Each replica maps the files of the export, so the replicas of a node share one copy in the page cache. A replica looks
for a newer version by itself (``watch``) and swaps it in between two requests.

Threads: Ray Serve runs requests in the replica's event loop; predictions of large bodies and of handles run in threads.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ray import serve
from ray.util import metrics
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from shoal.models.learner import Floats
from shoal.serve import Limits, ServedModel, make_app

_GAUGES = {
    "version": "The loaded version",
    "reloads": "Versions loaded after the first",
    "reload_failures": "Versions that could not be loaded",
}


class PredictionReplica:
    """A replica of `PredictionServer`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        watch: float | None = 5.0,
        threads: int = 1,
        verify: bool = True,
        cache: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        hosts: Collection[str] = (),
        refuse_unknown_columns: bool = False,
    ) -> None:
        self._served = ServedModel(
            directory, threads=threads, verify=verify, cache=cache, storage_options=storage_options
        )
        if watch is not None:
            self._served.watch(watch)
        self._app = make_app(self._served, limits=limits, hosts=hosts, refuse_unknown_columns=refuse_unknown_columns)
        self._gauges = {name: metrics.Gauge(f"shoal_serve_{name}", what) for name, what in _GAUGES.items()}
        self.check_health()

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request: ``docs/serving.md`` has the routes."""
        start: dict[str, Any] = {}
        body = bytearray()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.extend(message.get("body", b""))

        await self._app(request.scope, request.receive, send)
        response = Response(bytes(body), start["status"])
        response.raw_headers = list(start["headers"])
        return response

    async def predict(self, examples: Any) -> Floats:
        """Return the probability of label 1 for each example; the method of a ``DeploymentHandle``."""
        predictions: Floats = await run_in_threadpool(self._served.now.predictor.probabilities, examples)
        return predictions

    def version(self) -> int:
        """Return the version of the loaded export."""
        return self._served.now.version

    def check_health(self) -> None:
        """Report the gauges ``ray_shoal_serve_*``; Ray Serve calls this every few seconds."""
        served = self._served
        figures = {"version": served.now.version, "reloads": served.reloads, "reload_failures": served.failures}
        for name, value in figures.items():
            self._gauges[name].set(value)

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.close()


PredictionServer = serve.deployment(name="PredictionServer")(PredictionReplica)
