"""Data loops: endpoints of a server that serve without Python.

Python makes the context, chooses the address and sets the keys. After that a C++ thread on the same libzmq serves the
requests, and no Python thread can delay it.

Threads: see csrc/endpoint/data_loop.h.
"""

from __future__ import annotations

from typing import Any

import zmq

from shoal import _core
from shoal.cluster.protocol.curve import DOMAIN, Keys
from shoal.cluster.protocol.libzmq import backend


def start_loop(
    endpoint: _core.Endpoint,
    context: zmq.Context[Any],
    address: str,
    *,
    keys: Keys | None = None,
    heartbeat: float = 2.0,
    dead_after: float | None = None,
    max_message: int = 64 << 20,
    unsent_bytes: int = 1 << 30,
) -> _core.DataLoop:
    """Bind an address and serve an endpoint there, in a thread of C++."""
    silence = 5 * heartbeat if dead_after is None else dead_after
    return _core.DataLoop(
        endpoint,
        context.underlying,
        backend(),
        address,
        heartbeat_ms=round(heartbeat * 1000),
        dead_after_ms=round(silence * 1000),
        max_message=max_message,
        unsent_bytes=unsent_bytes,
        curve_secret="" if keys is None else keys.secret.decode("ascii"),
        curve_public="" if keys is None else keys.public.decode("ascii"),
        zap_domain="" if keys is None else DOMAIN,
    )
