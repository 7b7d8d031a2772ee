"""The path of the libzmq that pyzmq has loaded, which the engine uses too."""

from __future__ import annotations

import importlib


def backend() -> str:
    """Return the path of pyzmq's extension module, which is loaded then."""
    return str(importlib.import_module("zmq.backend.cython._zmq").__file__)
