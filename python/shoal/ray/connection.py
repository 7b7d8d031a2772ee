"""Connection: what a process needs in order to join a cluster. Sent to tasks and actors of Ray.

The keys of a cluster exist as files on the machine where they were made. A connection contains those of workers as
text, and writes them to a private directory of the process that joins, for as long as it needs them.

Threads: immutable. `environment` changes the environment of the process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.launch.workers import worker_environment
from shoal.consistency import Consistency

if TYPE_CHECKING:
    from shoal.cluster.worker.cache import Cache
    from shoal.cluster.worker.cluster_store import ClusterStore
    from shoal.cluster.worker.filters import Filters


def read_keys(directory: str | os.PathLike[str], role: str) -> dict[str, str]:
    """Read the files that a role needs: all public keys, and its own secret one."""
    return {
        file.name: file.read_text(encoding="ascii")
        for file in sorted(Path(directory).iterdir())
        if file.suffix == ".key" or file.name == f"{role}.key_secret"
    }


@contextlib.contextmanager
def key_directory(keys: Mapping[str, str] | None) -> Iterator[str | None]:
    """Write keys to a directory that only this user can read, and remove it afterwards; None if there are none."""
    if keys is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="shoal-keys-") as directory:  # with mode 0700
        for name, text in keys.items():
            mode = 0o600 if name.endswith("_secret") else 0o644
            descriptor = os.open(Path(directory, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "w", encoding="ascii") as out:
                out.write(text)
        yield directory


@dataclass(frozen=True, slots=True)
class Connection:
    """The address of a cluster, the keys of its workers, and the defaults of their stores.

    Parameters
    ----------
    address : str
        The scheduler's.
    keys : mapping, optional
        Text of the files of keys, by name; None if the cluster has none.
    consistency : Consistency
    timeout : float
        Seconds: the deadline of calls.
    shared_storage : bool
        As in :func:`shoal.connect`.
    """

    address: str
    keys: Mapping[str, str] | None = field(repr=False)
    consistency: Consistency
    timeout: float
    shared_storage: bool

    @contextlib.contextmanager
    def environment(self, rank: int, workers: int) -> Iterator[dict[str, str]]:
        """Set the variables that :func:`shoal.connect` reads, for the length of a ``with`` block.

        Yields
        ------
        dict of str
            The variables, for a child process.
        """
        with key_directory(self.keys) as directory:
            values = worker_environment(self.address, rank, workers, directory)
            before = {name: os.environ.get(name) for name in values}
            os.environ.update(values)
            try:
                yield values
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def connect(
        self,
        *,
        rank: int | None = None,
        workers: int | None = None,
        consistency: Consistency | None = None,
        threads: int | None = None,
        filters: Filters | Mapping[str, Filters] | None = None,
        cache: Cache | Mapping[str, Cache] | None = None,
    ) -> ClusterStore:
        """Join the cluster as a worker: see :func:`shoal.connect`, whose parameters these are."""
        from shoal.cluster.worker.connect import connect

        with key_directory(self.keys) as directory:  # the store has read them when it is made
            return connect(
                self.address,
                consistency=self.consistency if consistency is None else consistency,
                workers=workers,
                rank=rank,
                timeout=self.timeout,
                threads=threads,
                curve=directory,
                filters=filters,
                cache=cache,
                shared_storage=self.shared_storage,
            )
