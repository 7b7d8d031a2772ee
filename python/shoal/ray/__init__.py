"""Clusters of shoal on Ray: Ray places the processes, restarts them and feeds the workers.

    config.py      ShoalConfig: how many servers, their resources and copies
    servers.py     start: the scheduler and the servers as actors (actors.py), supervised by the starting process
    gauges.py      the counters of servers as metrics of Ray
    connection.py  Connection: address and keys, as tasks and actors receive them
    demand.py      what a run requests, compared with what the nodes of Ray have
    trainer.py     ShoalTrainer: ray.train's DataParallelTrainer with servers
    loop.py        store, snapshot and restore, for the training loop
    launch.py      `shoal launch --engine ray`
    data.py        Hash and HashColumns: datasets of Ray as examples
    serve.py       PredictionServer: a deployment of Ray Serve
    errors.py      the errors of shoal that Ray has wrapped

Rows travel between workers and servers by shoal's own protocol, never through Ray's object store. If a server dies, one
that has a copy of its slots serves them without waiting for Ray, which then starts another server.

The extra ``ray`` installs Ray, ``ray-serve`` Ray Serve. Modules are imported when a name is first used, since the
process of a server needs none of ``ray.train`` and ``ray.data``.
"""

from typing import TYPE_CHECKING, Any

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("shoal.ray needs Ray 2.58 or later: pip install 'shoal[ray]'") from error

if TYPE_CHECKING:
    from shoal.ray.config import ShoalConfig
    from shoal.ray.connection import Connection
    from shoal.ray.data import Hash, HashColumns
    from shoal.ray.loop import restore, snapshot, store
    from shoal.ray.serve import PredictionServer
    from shoal.ray.servers import RayCluster, start
    from shoal.ray.trainer import ShoalTrainer

__all__ = [
    "Connection",
    "Hash",
    "HashColumns",
    "PredictionServer",
    "RayCluster",
    "ShoalConfig",
    "ShoalTrainer",
    "restore",
    "snapshot",
    "start",
    "store",
]

# Where each name is.
_MODULE_OF = {
    "Connection": "shoal.ray.connection",
    "Hash": "shoal.ray.data",
    "HashColumns": "shoal.ray.data",
    "PredictionServer": "shoal.ray.serve",
    "RayCluster": "shoal.ray.servers",
    "ShoalConfig": "shoal.ray.config",
    "ShoalTrainer": "shoal.ray.trainer",
    "restore": "shoal.ray.loop",
    "snapshot": "shoal.ray.loop",
    "start": "shoal.ray.servers",
    "store": "shoal.ray.loop",
}


if not TYPE_CHECKING:  # a type checker would accept any attribute

    def __getattr__(name: str) -> Any:
        import importlib

        if name not in _MODULE_OF:
            raise AttributeError(f"module 'shoal.ray' has no attribute {name!r}")
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
