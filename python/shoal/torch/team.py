"""The threads that torch computes with, lent to shoal: batches are sorted, read and stepped by those that are awake.

GNU's OpenMP keeps its threads spinning between two loops, for milliseconds: a store's own threads would be woken on
cores that are spun on. In a thread that calls a module, a store's work is handed to the team of that thread's loops.

Threads: each thread has a team of its own. Fork: a child borrows nothing, since its team's threads are gone.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from shoal import _core

__all__ = ["borrow"]

_MAPS = Path("/proc/self/maps")


def _find() -> int:
    """Return the address of GOMP_parallel in the libgomp that torch has loaded; 0: torch computes with another one."""
    if not torch.backends.openmp.is_available() or not _MAPS.exists():  # type: ignore[no-untyped-call]
        return 0
    loaded = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/libgomp" in line}
    home = str(Path(torch.__file__).parent)  # torch/lib, or torch.libs beside it
    own = [path for path in loaded if path.startswith(home)] or sorted(loaded)
    if len(own) != 1:
        return 0
    try:
        parallel = ctypes.CDLL(own[0]).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(parallel, ctypes.c_void_p).value or 0


_team = _find()


def _forget() -> None:
    global _team
    _team = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def borrow() -> None:
    """Let a store's work in the calling thread go to the team of this thread's OpenMP loops, where there is one."""
    _core.borrow(_team, torch.get_num_threads() if _team else 0)
