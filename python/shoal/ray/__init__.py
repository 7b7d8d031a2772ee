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

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

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
_NAMES_OF = {
    "shoal.ray.config": "ShoalConfig",
    "shoal.ray.connection": "Connection",
    "shoal.ray.data": "Hash HashColumns",
    "shoal.ray.loop": "restore snapshot store",
    "shoal.ray.serve": "PredictionServer",
    "shoal.ray.servers": "RayCluster start",
    "shoal.ray.trainer": "ShoalTrainer",
}

if not TYPE_CHECKING:  # a type checker would accept any attribute
    __getattr__ = lazy(__name__, _NAMES_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
