"""Runs `shoal ...` in forks of one process that has imported the package, which saves each command the imports.

Algorithm: a fork server, as in multiprocessing. A command is a small client. It sends its arguments, folder,
environment and standard streams through a Unix socket, and waits for the exit status. The server forks a child for each
client, passes the client's SIGINT and SIGTERM on to it, and kills it when the client dies.

Invariant: the server imports modules and does nothing else, so a child is in the state of a process after its imports.

A command is one of a shell, which starts processes itself; fork_server.py forks what Python starts, and what a command
that is run here starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fork_server

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
status = server.recv(1)
os._exit(status[0] if status else 1)
"""


@contextlib.contextmanager
def preloaded(modules: Sequence[str], prepare: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Put a command `shoal` first into PATH, which runs in a fork of a process that has imported ``modules``.

    The fork calls ``prepare`` before it runs the command.
    """
    folder = Path(tempfile.mkdtemp())
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    lifeline, end = socket.socketpair()  # closed when this process ends, in any way
    server = os.fork()
    if server == 0:  # not within the try below: the folder is the parent's
        end.close()
        command = _serve(listener, lifeline, modules)  # returns in the children
        prepare()
        if "launch" in command.arguments:
            fork_server.serve_own_children()
        fork_server.run(command)
    path = os.environ["PATH"]
    try:
        listener.close()
        lifeline.close()
        client = folder / "shoal"
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{path}"
        yield
    finally:
        os.environ["PATH"] = path
        end.close()
        os.waitpid(server, 0)
        shutil.rmtree(folder)


def _serve(listener: socket.socket, lifeline: socket.socket, modules: Sequence[str]) -> fork_server.Program:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        with contextlib.suppress(ImportError):  # of an optional package: the program that needs it reports it
            importlib.import_module(name)
    gc.freeze()  # collections in the children leave the shared pages alone
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only a Python handler writes to the wakeup descriptor
    signal.set_wakeup_fd(wake.fileno())
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for watched in (listener, lifeline, woken):
            ready.register(watched, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is lifeline:
                    for child in clients:
                        _signal(child, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is woken:
                    woken.recv(4096)
                elif key.fileobj is listener:
                    client = listener.accept()[0]
                    request, streams = _received(client)
                    child = os.fork()
                    if child == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        signal.signal(signal.SIGINT, signal.default_int_handler)
                        for each in (listener, lifeline, woken, wake, client, *clients.values()):
                            each.close()
                        words, folder, environment = json.loads(request)
                        fork_server.become(environment, folder, streams)
                        return fork_server.Program("module", "shoal", words, [], False)
                    os.setpgid(child, child)
                    for stream in streams:
                        os.close(stream)
                    clients[child] = client
                    ready.register(client, selectors.EVENT_READ, child)
                else:
                    number = clients[key.data].recv(1) if key.data in clients else b""
                    _signal(key.data, number[0] if number else signal.SIGKILL)
                    if not number:
                        ready.unregister(key.fileobj)
            _reap(clients, ready)


def _received(client: socket.socket) -> tuple[bytes, list[int]]:
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    size = int.from_bytes(head, "big")
    request = b""
    while len(request) < size:
        request += client.recv(size - len(request))
    return request, streams


def _signal(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(child, number)
        else:
            os.kill(child, number)


def _reap(clients: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    while clients:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        client = clients.pop(child)
        with contextlib.suppress(KeyError):
            ready.unregister(client)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            client.send(bytes([code if code >= 0 else 128 - code]))
        client.close()
