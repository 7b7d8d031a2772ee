"""What a port answers over HTTP."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from cluster_fakes import TIMEOUT


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def until(what):
    deadline = time.monotonic() + TIMEOUT
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found
