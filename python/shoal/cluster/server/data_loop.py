"""Data loops: endpoints of a server that serve without Python.

Python makes the context, chooses the address and sets the keys. After that a C++ thread on the same libzmq serves the
requests, and no Python thread can delay it.

Threads: see csrc/server/data_loop.h.
"""

from __future__ import annotations

from typing import Any

import zmq

from shoal import _core
from shoal.cluster.protocol.curve import DOMAIN, Keys
from shoal.cluster.protocol.libzmq import backend

__all__ = ["start_loop"]


def start_loop(
    service: _core.Service,
    context: zmq.Context[Any],
    address: str,
    *,
    keys: Keys | None = None,
    heartbeat: float = 2.0,
    dead_after: float | None = None,
    max_message: int = 64 << 20,
    unsent_bytes: int = 1 << 30,
) -> _core.DataLoop:
    """Bind an address and serve a service there, in a thread of C++.

    Parameters
    ----------
    service : _core.Service
        Answers the requests; kept alive by the loop.
    context : zmq.Context
        Stop the loop before it is terminated; a loop whose context is terminated ends by itself.
    address : str
        ``tcp://host:port``, where port 0 is any that is free, or another transport of ZeroMQ.
    keys : Keys, optional
        Accept only peers that the context's :class:`shoal.cluster.protocol.curve.Guard` admits.
    heartbeat : float
        Seconds between heartbeats on a silent connection; 0 for none.
    dead_after : float, optional
        Seconds of silence until a peer counts as dead; default: 5 heartbeats.
    max_message : int
        Bytes of a frame. A peer that sends a longer one is disconnected.
    unsent_bytes : int
        Bytes of values that may wait to be sent; a request that would exceed them is refused as OVERLOADED.

    Returns
    -------
    _core.DataLoop
        ``address`` is what was bound; ``stop()``, ``running``, ``metrics()``.

    Raises
    ------
    TransportError
        The address cannot be bound, or pyzmq has no shared libzmq.
    """
    silence = 5 * heartbeat if dead_after is None else dead_after
    return _core.DataLoop(
        service,
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
