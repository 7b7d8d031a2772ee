"""Peers: the workers of a fit answer each other's questions, whatever their training threads wait for.

    worker a    ask(address of b, question) --TCP--> a thread of b: answer(question)      one connection a question

    message     length, 8 bytes little-endian    that many bytes
    question    the secret of the asked worker, 16 bytes, and the question itself

Workers learn addresses and secrets by way of the servers. Like gloo's, these connections are not encrypted.

Threads: a server has one that accepts, and one for each question that it answers; `ask` is for any.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

_LENGTH_BYTES = 8
_SECRET_BYTES = 16
_MAX_QUESTION_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 36
_RETRY_SECONDS = 0.1
_QUESTION_SECONDS = 10.0  # for a question to arrive, and for an answer to be taken


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a worker answers. A later worker of the same rank has a higher ``incarnation``."""

    incarnation: int
    host: str
    port: int
    secret: bytes


class PeerServer:
    """Answers the questions of other workers, in threads, until it is closed."""

    def __init__(self, host: str, incarnation: int, answer: Callable[[bytes], bytes]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._answer = answer
        self._listener = socket.create_server((host, 0), family=family)
        self._is_open = True
        port = int(self._listener.getsockname()[1])
        self.address = PeerAddress(incarnation, host, port, secrets.token_bytes(_SECRET_BYTES))
        self._thread = threading.Thread(target=self._serve, name="shoal peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more questions."""
        self._is_open = False
        with contextlib.suppress(OSError):
            socket.create_connection((self.address.host, self.address.port), _QUESTION_SECONDS).close()  # wakes it
        self._thread.join(_QUESTION_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._is_open:
                    return
                time.sleep(_RETRY_SECONDS)  # too many open files, for example
                continue
            if not self._is_open:
                connection.close()
                return
            try:
                threading.Thread(target=self._handle, args=(connection,), name="shoal peer", daemon=True).start()
            except RuntimeError:  # no thread can be started now: the asker asks again
                connection.close()

    def _handle(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the asker asks again
            connection.settimeout(_QUESTION_SECONDS)
            given = _receive(connection, _MAX_QUESTION_BYTES)
            if hmac.compare_digest(given[:_SECRET_BYTES], self.address.secret):
                _send(connection, self._answer(given[_SECRET_BYTES:]))


def ask(address: PeerAddress, question: bytes, timeout: float) -> bytes:
    """Ask a worker, and return its answer."""
    with socket.create_connection((address.host, address.port), timeout) as connection:
        _send(connection, address.secret + question)
        return _receive(connection, _MAX_ANSWER_BYTES)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "little"))
    connection.sendall(content)


def _receive(connection: socket.socket, most: int) -> bytes:
    length = int.from_bytes(_receive_exactly(connection, _LENGTH_BYTES), "little")
    if length > most:
        raise ConnectionError(f"a message of {length} bytes, at most {most} are taken")
    return bytes(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    content = bytearray()
    while len(content) < count:
        piece = connection.recv(min(count - len(content), 1 << 20))
        if not piece:
            raise ConnectionError("the connection ended within a message")
        content += piece
    return content
