"""ShoalTrainer: ray.train's DataParallelTrainer with the servers of a parameter server.

Threads: a trainer is used by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from shoal.ray.config import ShoalConfig
from shoal.ray.connection import Connection
from shoal.ray.demand import Demand, reserved, wait_for_nodes
from shoal.ray.errors import find_cause
from shoal.ray.loop import in_cluster
from shoal.ray.servers import RayCluster, start

if TYPE_CHECKING:
    from ray.train.backend import BackendConfig


class ShoalTrainer(DataParallelTrainer):  # type: ignore[misc] # Ray has no types for it
    """Run a training loop on workers of Ray Train, with tables on servers of shoal.

    Parameters
    ----------
    train_loop_per_worker : callable
        Called in each worker, without arguments or with ``train_loop_config``. It gets its store from
        :func:`shoal.ray.store`.
    shoal_config : ShoalConfig, RayCluster or Connection, optional
        A description of the servers, which then run only during :meth:`fit`; or a running cluster, whose tables are
        kept.
    train_loop_config : mapping, optional
        Argument of the loop.
    scaling_config : ray.train.ScalingConfig, optional
        The workers: ``num_workers=4``, or ``num_workers=(2, 16)`` for a group whose size follows the resources of the
        cluster.
    run_config : ray.train.RunConfig, optional
        Name, storage path, failures and checkpoints of the run.
    datasets : mapping, optional
        Ray datasets, of which ``ray.train.get_dataset_shard(name)`` is a worker's shard.
    dataset_config : ray.train.DataConfig, optional
        How they are split.
    backend_config : ray.train.BackendConfig, optional
        Setup of another framework in the workers, such as ``ray.train.torch.TorchConfig()``.

    Examples
    --------
    ::

        def loop():
            store = shoal.ray.store()
            with shoal.LogisticRegression(shoal.FTRL(), store=store) as model:
                ...
            ray.train.report({}, checkpoint=shoal.ray.snapshot())

        shoal.ray.ShoalTrainer(
            loop,
            shoal_config=shoal.ray.ShoalConfig(servers=4, replicas=1),
            scaling_config=ray.train.ScalingConfig(num_workers=8),
        ).fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        shoal_config: ShoalConfig | RayCluster | Connection | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: ray.train.DataConfig | None = None,
        backend_config: BackendConfig | None = None,
    ) -> None:
        if not isinstance(shoal_config, ShoalConfig | RayCluster | Connection | None):
            raise TypeError(f"shoal_config is a ShoalConfig, a RayCluster or a Connection, got {shoal_config!r}")
        self.shoal_config = ShoalConfig() if shoal_config is None else shoal_config
        self._loop = train_loop_per_worker
        super().__init__(
            train_loop_per_worker,
            train_loop_config=None if train_loop_config is None else dict(train_loop_config),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=dataset_config,
            backend_config=backend_config,
        )

    def fit(self) -> ray.train.Result:
        """Start the servers, run the loop on all workers until it returns, and end the servers.

        Returns
        -------
        ray.train.Result

        Raises
        ------
        DeadlineExceededError
            The nodes of Ray have less in all than the servers and workers request, and no other node has joined within
            the ``timeout`` of ``shoal_config``.
        ShoalError
            The run has failed with an error of shoal, in a worker or a server. It is raised from Ray's own error.
        ray.train.TrainingFailedError
            It has failed for another reason.
        """
        if not ray.is_initialized():
            ray.init()
        wait_for_nodes(self._demand(), self._timeout())
        storage_path = str(self.run_config.storage_path)
        loop: Callable[..., Any] = self._loop
        with contextlib.ExitStack() as ending:
            cluster = None if isinstance(self.shoal_config, Connection) else self.shoal_config
            if isinstance(cluster, ShoalConfig):
                config = cluster
                if config.shared_storage:
                    roots = [*(config.storage_roots or ()), storage_path]
                    config = dataclasses.replace(config, storage_roots=roots)
                cluster = ending.enter_context(start(config, workers=max(1, self.scaling_config.max_workers)))
            connection = self.shoal_config if cluster is None else cluster.connection
            assert isinstance(connection, Connection)
            if cluster is not None and (self.datasets or self.scaling_config.elasticity_enabled):
                each, count = cluster.config.resources_per_server, cluster.config.servers + cluster.config.spares
                ending.enter_context(reserved(cluster.name, [each] * count))
            self.train_loop_per_worker = in_cluster(loop, connection, storage_path)
            try:
                return super().fit()
            except ray.train.TrainingFailedError as error:
                cause = find_cause(error)
                if cluster is not None and cluster.fault is not None:
                    cause = cluster.fault
                if cause is None:
                    raise
                raise cause from error
            finally:
                self.train_loop_per_worker = loop

    def _demand(self) -> Demand:
        """Return what the servers, the fewest workers and the tasks that read the datasets request."""
        config = self.shoal_config.config if isinstance(self.shoal_config, RayCluster) else self.shoal_config
        scaling = self.scaling_config
        bundles = [("workers", scaling.min_workers, scaling._resources_per_worker_not_none)]
        if isinstance(config, ShoalConfig):  # those of a connection are not known
            bundles.insert(0, ("servers", config.servers, config.resources_per_server))
        return Demand(bundles, any(not _is_read(dataset) for dataset in (self.datasets or {}).values()))

    def _timeout(self) -> float:
        config = self.shoal_config.config if isinstance(self.shoal_config, RayCluster) else self.shoal_config
        return config.timeout


def _is_read(dataset: Any) -> bool:
    from ray.data.dataset import MaterializedDataset  # ray.data takes a second to import

    return isinstance(dataset, MaterializedDataset)
