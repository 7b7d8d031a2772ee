"""Where the libzmq is that pyzmq has loaded: the engine finds it through the module of pyzmq that calls it."""

from __future__ import annotations

import importlib

__all__ = ["backend"]


def backend() -> str:
    """Return the path of pyzmq's extension module, which is loaded then."""
    return str(importlib.import_module("zmq.backend.cython._zmq").__file__)
