"""Stores of every kind, for tests of what all of them promise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster

KINDS = ("local", "connected")


@contextlib.contextmanager
def opened(kind: str, *, slots: int = 1024) -> Iterator[shoal.Store]:
    """Open an empty store whose pushes are seen as they are made: of one process, or with four data loops."""
    if kind == "local":
        with shoal.local(threads=2, slots=slots) as store:
            yield store
    else:
        with (
            cluster(2, 2, slots=slots) as made,
            shoal.connect(made.address, consistency=shoal.ASP(), threads=2, timeout=TIMEOUT) as store,
        ):
            yield store
