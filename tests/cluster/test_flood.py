"""Peers that send faster than they are read, and then break off: whoever is flooded goes on."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time

import pytest

TIMEOUT = 120.0

pytestmark = pytest.mark.slow

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
PROPERTIES = b"".join(
    bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
    for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
)
PING = b"\x04PING" + struct.pack(">H", 100) + b"x"

SCHEDULER = """
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig
with Scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", servers=1)) as scheduler:
    print(scheduler.address, flush=True)
    scheduler.run()
"""
DATA_LOOP = """
import sys, time, zmq
from shoal import _core
from shoal.cluster.server.data_loop import start_loop
context = zmq.Context()
loop = start_loop(_core.Endpoint(16, [(0, 16)]), context, "tcp://127.0.0.1:0", heartbeat=0.2)
print(loop.address, flush=True)
sys.stdin.read()
"""


def handshake(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
    connection.sendall(GREETING)
    ready = b"\x05READY" + PROPERTIES
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    receive_until(connection, b"READY")
    return connection


def receive_until(connection, end):
    got = b""
    while end not in got:
        part = connection.recv(4096)
        assert part, "the connection was ended"
        got += part


@pytest.mark.parametrize("program", [SCHEDULER, DATA_LOOP], ids=["scheduler", "data loop"])
def test_who_is_flooded_by_a_peer_that_breaks_off_goes_on(program):
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().rpartition(":")[2])
            message = b"\x00\x0a" + b"a" * 10
            for _ in range(10):
                with handshake(port) as connection:
                    with contextlib.suppress(OSError):
                        connection.sendall((10 * message + b"\x04" + bytes([len(PING)]) + PING) * 2000)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                time.sleep(0.05)
            with handshake(port) as connection:
                receive_until(connection, b"PING")  # it has got over the heartbeats of all connections
            assert process.poll() is None
            handshake(port).close()
        finally:
            process.kill()
