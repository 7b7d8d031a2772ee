"""The borrowed thread pool: a store's work in a thread that calls modules runs in the OpenMP threads of torch.

GNU's OpenMP runtime lets its threads spin between two parallel regions, for 4 ms by default, so threads of the store
would compete with them for the cores. Work is therefore passed to ``GOMP_parallel`` of the libgomp that torch loaded.

Why not a setting. OMP_WAIT_POLICY=passive and GOMP_SPINCOUNT also end the competition, but they are read when the
process starts, apply to all of its OpenMP code, and make the dense part slower. On a quiet machine of two cores the
rows of a step took 15.5 ms with threads of the store, 9.4 ms if OpenMP also spins 0.1 ms only, and 7 ms in the
borrowed pool; the dense part took 77 to 78 ms, and 85 ms with few spins (docs/decisions/0046-torch-threads.md).
Why the process map. torch does not export its thread pool; its wheels have a libgomp of their own, under a name with a
digest in it; and the process may have loaded another one.

Threads: each thread has an OpenMP pool of its own. Fork: a child borrows no pool, since its threads are gone.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from shoal import _core

_MAPS = Path("/proc/self/maps")


def _find() -> int:
    """Return the address of GOMP_parallel in the libgomp that torch has loaded; 0: torch computes with another one."""
    if not torch.backends.openmp.is_available() or not _MAPS.exists():  # type: ignore[no-untyped-call]
        return 0
    loaded = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/libgomp" in line}
    home = str(Path(torch.__file__).parent)  # torch/lib, or torch.libs next to it
    own = [path for path in loaded if path.startswith(home)] or sorted(loaded)
    if len(own) != 1:
        return 0
    try:
        parallel = ctypes.CDLL(own[0]).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(parallel, ctypes.c_void_p).value or 0


_parallel = _find()


def _drop_in_child() -> None:
    global _parallel
    _parallel = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)


def borrow() -> None:
    """Run a store's work in the calling thread in this thread's OpenMP pool, if there is one."""
    _core.set_thread_team(_parallel, torch.get_num_threads() if _parallel else 0)
