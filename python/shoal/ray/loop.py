"""What a training loop of :class:`shoal.ray.ShoalTrainer` calls: its store, snapshots of the tables, restoring them.

    store()      the store of this worker, made by the first call, closed after the loop
    snapshot()   a checkpoint of all tables for `ray.train.report`
    restore()    the tables of the newest reported checkpoint, after a restart of the workers

When Ray restarts or resizes the group of workers, the loop begins again, and the tables still have the rows that the
former workers have pushed. A loop that must continue from a consistent state calls `restore`.

Threads: the functions are called by the loop's thread.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from shoal.ray.connection import Connection

if TYPE_CHECKING:
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.cluster_store import ClusterStore
    from shoal.cluster.worker.filters import Filters


class _Session:
    """The loop that runs in this process."""

    def __init__(self, connection: Connection, storage_path: str) -> None:
        self.connection = connection
        self.storage_path = storage_path  # of the run, as its nodes see it
        self.store: ClusterStore | None = None
        self.written: str | None = None  # directory of the last snapshot, until Ray has uploaded it
        self.snapshots = 0

    def close(self) -> None:
        if self.written is not None:
            shutil.rmtree(self.written, ignore_errors=True)
        if self.store is not None:
            self.store.close()


_session: _Session | None = None


def in_cluster(loop: Callable[..., Any], connection: Connection, storage_path: str) -> Callable[..., Any]:
    """Return a training loop with the environment of a worker of a cluster, and the same parameters."""

    @functools.wraps(loop)
    def run(*arguments: Any) -> Any:
        with _running(connection, storage_path):
            return loop(*arguments)

    return run


@contextlib.contextmanager
def _running(connection: Connection, storage_path: str) -> Iterator[None]:
    global _session
    context = ray.train.get_context()
    session = _Session(connection, storage_path)
    with connection.environment(context.get_world_rank(), context.get_world_size()):
        _session = session
        try:
            yield
        except BaseException:
            _session = None
            with contextlib.suppress(Exception):  # the loop's own error is the one to report
                session.close()
            raise
        _session = None
        session.close()


def _current() -> _Session:
    if _session is None:
        raise RuntimeError("no training loop runs here: call it in the loop of a shoal.ray.ShoalTrainer")
    return _session


def store(
    *,
    threads: int | None = None,
    filters: Filters | Mapping[str, Filters] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
) -> ClusterStore:
    """Return the store of this worker. The first call joins the cluster; the store is closed after the loop.

    Parameters
    ----------
    threads : int, optional
        Threads that sort and sum this worker's batches; default: the CPUs that Ray has assigned to it.
    filters : Filters, or one for each table's name, optional
    cache : Cache, or one for each table's name, optional
        Both as in :func:`shoal.connect`. The parameters have an effect in the first call only.

    Returns
    -------
    ClusterStore

    Raises
    ------
    RuntimeError
        It is called outside of a training loop.
    NotConnectedError, DeadlineExceededError
        As :func:`shoal.connect`.

    Notes
    -----
    Blocks until all workers have joined.
    """
    session = _current()
    if session.store is None:
        context = ray.train.get_context()
        if threads is None:
            threads = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
        session.store = session.connection.connect(
            rank=context.get_world_rank(),
            workers=context.get_world_size(),
            threads=threads,
            filters=filters,
            cache=cache,
        )
    return session.store


def snapshot() -> ray.train.Checkpoint | None:
    """Save all tables of this worker's store, for ``ray.train.report(metrics, checkpoint=shoal.ray.snapshot())``.

    Returns
    -------
    ray.train.Checkpoint or None
        The checkpoint on worker 0, None on the others. With ``ShoalConfig(shared_storage=True)`` the servers have
        written it to the storage path of the run: report it with ``CheckpointUploadMode.NO_UPLOAD``. Otherwise worker 0
        has written it to a temporary directory, which is removed by its next call or after the loop: report it with the
        default mode, which uploads it before ``report`` returns.

    Notes
    -----
    The rows are those that a pull of worker 0 would read. ``shoal.load``, ``shoal export`` and `restore` read the
    directory.
    """
    session = _current()
    saved = store()
    if saved.rank != 0:
        return None
    if session.connection.shared_storage:
        context = ray.train.get_context()
        session.snapshots += 1
        name = f"shoal_{ray.get_runtime_context().get_actor_id()}_{session.snapshots:06}"
        saved.save(f"{session.storage_path}/{context.get_experiment_name()}/{name}")
        storage = context.get_storage()
        return ray.train.Checkpoint(f"{storage.experiment_fs_path}/{name}", storage.storage_filesystem)
    if session.written is not None:
        shutil.rmtree(session.written, ignore_errors=True)
    session.written = tempfile.mkdtemp(prefix="shoal-snapshot-")
    directory = Path(session.written, "tables")
    saved.save(directory)
    return ray.train.Checkpoint.from_directory(directory)


def restore(checkpoint: ray.train.Checkpoint | None = None) -> bool:
    """Read the tables of a snapshot: create them, or replace the rows of existing ones. All workers must call it.

    Parameters
    ----------
    checkpoint : ray.train.Checkpoint, optional
        Default: the newest reported one.

    Returns
    -------
    bool
        Whether there was a checkpoint.
    """
    session = _current()
    if checkpoint is None:
        checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return False
    if session.connection.shared_storage:
        storage = ray.train.get_context().get_storage()
        inside = Path(checkpoint.path).relative_to(storage.storage_fs_path)
        store().load(f"{session.storage_path}/{inside.as_posix()}")
        return True
    with checkpoint.as_directory() as directory:
        store().load(directory)
    return True
