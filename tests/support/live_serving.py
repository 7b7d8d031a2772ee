"""Prediction servers over the tables of a running cluster."""

from __future__ import annotations

import contextlib
import threading

from cluster_fakes import TIMEOUT
from shoal.serve import serve


@contextlib.contextmanager
def serving(live):
    ports, started, ended = [], threading.Event(), threading.Event()

    def ready(host, number, grpc_number):
        ports.append(number)
        started.set()

    thread = threading.Thread(target=lambda: serve(live, port=0, ready=ready, until=ended))
    thread.start()
    assert started.wait(TIMEOUT)
    try:
        yield ports[0]
    finally:
        ended.set()
        thread.join()
