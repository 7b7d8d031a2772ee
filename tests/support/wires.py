"""A wire between a client and a port, that changes, loses or cuts what it carries."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable

TIMEOUT = 120.0

# (connection, whether to the port, bytes carried so far that way, data) -> what arrives, and whether it is cut then.
Change = Callable[[int, bool, int, bytes], tuple[bytes, bool]]


class Wire:
    """Carries bytes between a port of its own and another."""

    def __init__(self, port: int, change: Change) -> None:
        self._change = change
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.cuts = 0
        self._cut_all = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """End all connections; new ones are forwarded."""
        self._cut_all = True

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            selector.register(self._listener, selectors.EVENT_READ)
            pairs: dict[socket.socket, tuple[socket.socket, int, bool]] = {}
            carried: dict[socket.socket, int] = {}

            def end(one: socket.socket) -> None:
                for each in (one, pairs[one][0]):
                    selector.unregister(each)
                    del pairs[each]
                    each.close()

            while not self._stop.is_set():
                for key, _ in selector.select(0.005):
                    if key.fileobj is self._listener:
                        near, _ = self._listener.accept()
                        far = socket.create_connection(("127.0.0.1", self._port))
                        for one, other, up in ((near, far, True), (far, near, False)):
                            stack.enter_context(one)
                            pairs[one], carried[one] = (other, self.connections, up), 0
                            selector.register(one, selectors.EVENT_READ)
                        self.connections += 1
                        continue
                    one = key.fileobj
                    if one not in pairs:
                        continue
                    other, number, up = pairs[one]
                    data = b""
                    with contextlib.suppress(OSError):
                        data = one.recv(1 << 16)
                    part, is_cut = self._change(number, up, carried[one], data) if data else (b"", False)
                    carried[one] += len(data)
                    with contextlib.suppress(OSError):
                        other.sendall(part)
                    if not data or is_cut:
                        self.cuts += is_cut
                        end(one)
                if self._cut_all:
                    self._cut_all = False
                    while pairs:
                        self.cuts += 1
                        end(next(iter(pairs)))

    def close(self) -> None:
        """Close it: further connections are refused."""
        self._stop.set()
        self._thread.join(TIMEOUT)


class Faults:
    """A change of a wire: faults at random places of its connections, until there were ``most``.

    Parameters
    ----------
    rng : random.Random
    kinds : list of {"cut", "flip", "drop"}
        A connection is cut, a bit is changed, some bytes are left out.
    within : int or list of int
        Bytes of a connection after which the next fault comes at the latest; of several, each takes its turn.
    most : int, optional
    """

    def __init__(self, rng: random.Random, kinds: list[str], within: int | list[int], most: int | None = None) -> None:
        self._rng = rng
        self._kinds = kinds
        self._within = [within] if isinstance(within, int) else within
        self._most = most
        self._planned: dict[int, tuple[str, bool, int]] = {}
        self._carried: Counter[tuple[int, bool]] = Counter()
        self.done: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether there were as many as there are to be."""
        return self._most is not None and len(self.done) >= self._most

    def __call__(self, connection: int, up: bool, carried: int, data: bytes) -> tuple[bytes, bool]:
        if self.is_over:
            return data, False
        self._carried[connection, up] = carried + len(data)
        if connection not in self._planned:
            self._plan(connection)
        kind, upward, place = self._planned[connection]
        at = place - carried
        if up != upward or not 0 <= at < len(data):
            return data, False
        self.done.append(f"{kind} {'up' if up else 'down'} at {place}")
        self._plan(connection)
        if kind == "flip":
            return data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :], False
        if kind == "drop":
            return data[:at] + data[at + self._rng.randrange(1, 40) :], False
        return data[:at], True

    def _plan(self, connection: int) -> None:
        upward = self._rng.random() < 0.5
        place = self._carried[connection, upward] + self._rng.randrange(self._within[connection % len(self._within)])
        self._planned[connection] = self._rng.choice(self._kinds), upward, place
