"""Calls that are measured: those of a table, and messages of the same sizes over raw libzmq, by pyzmq and by C++.

    table    Table.pull and Table.push, as users call them, of a cluster
    local    the same of a table in this process
    pyzmq    a DEALER and a ROUTER of pyzmq, one message of one frame each way; both sides are Python loops
    C++      the same by a C++ loop on both sides (cpp/zmq_pair.cc), with the libzmq of pyzmq

A request has a header of 64 bytes, which begins with the size of the reply, 8 bytes for each key, and in pushes the
gradients; a reply has a header and in pulls the values, which the client copies to their rows. The other side reads the
header alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import zmq
import zmq.backend.cython._zmq

import shoal
from figures import check

HEADER = 64  # bytes
CAPACITY = 1 << 20  # calls of a turn

Begin = Callable[[int], Callable[[], Any]]  # begins the call of this number; returns the function that waits for it
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Calls:
    """What is called: ``pull`` or ``push`` of so many keys, with some in flight."""

    op: str
    keys: int
    depth: int = 1
    dim: int = 1

    @property
    def request_bytes(self) -> int:
        """Of a message."""
        return HEADER + self.keys * (8 + (4 * self.dim if self.op == "push" else 0))

    @property
    def reply_bytes(self) -> int:
        """Of a message."""
        return HEADER + (4 * self.dim * self.keys if self.op == "pull" else 0)


class System(Protocol):
    """One that makes calls."""

    name: str

    def measure(self, calls: Calls, seconds: float) -> Seconds:
        """Make calls for some seconds; return how long each has taken, by their order."""

    def others(self) -> list[int]:
        """Return the processes that answer."""


def timed(begin: Begin, depth: int, seconds: float) -> Seconds:
    """Make calls for some seconds with ``depth`` in flight; return the seconds of each."""
    in_flight: deque[tuple[float, Callable[[], Any]]] = deque()
    latencies: list[float] = []
    clock = time.perf_counter
    number, end = 0, clock() + seconds
    while True:
        while len(in_flight) < depth and clock() < end:
            in_flight.append((clock(), begin(number)))
            number += 1
        if not in_flight:
            return np.array(latencies)
        start, wait = in_flight.popleft()
        wait()
        latencies.append(clock() - start)


class TableCalls:
    """The calls of a table whose rows exist; it counts what it has pushed."""

    def __init__(self, name: str, table: shoal.Table, rows: int) -> None:
        self.name = name
        self._table = table
        self._rows = rows
        self._pools: dict[int, list[npt.NDArray[np.uint64]]] = {}
        self._pushed = np.zeros((rows, table.dim), np.float32)
        self._grad = np.float32(2.0**-6)  # sums are exact
        for start in range(0, rows, 100_000):
            some = np.arange(start, min(rows, start + 100_000), dtype=np.uint64)
            table.push(some, np.full((len(some), table.dim), self._grad, np.float32)).result()
        self._pushed += self._grad

    def pool(self, keys: int) -> list[npt.NDArray[np.uint64]]:
        """Return batches of unique keys in random order."""
        if keys not in self._pools:
            random = np.random.default_rng([4, keys])
            every = random.permutation(self._rows).astype(np.uint64)
            number = max(4, min(64, 400_000 // keys))
            self._pools[keys] = [
                np.ascontiguousarray(every[(k * keys) % (self._rows - keys) :][:keys]) for k in range(number)
            ]
        return self._pools[keys]

    def begin(self, calls: Calls) -> Begin:
        """Return the function that begins a call of the batches in turn."""
        pool, table = self.pool(calls.keys), self._table
        if calls.op == "push":
            grads = np.full((calls.keys, calls.dim), self._grad, np.float32)
            return lambda k: table.push(pool[k % len(pool)], grads).result
        if calls.depth == 1:
            return lambda k: functools.partial(table.pull, pool[k % len(pool)])
        return lambda k: table.pull_async(pool[k % len(pool)]).result

    def measure(self, calls: Calls, seconds: float) -> Seconds:
        """See `System`."""
        latencies = timed(self.begin(calls), calls.depth, seconds)
        if calls.op == "push":
            self.count(calls.keys, len(latencies))
        return latencies

    def count(self, keys: int, times: int) -> None:
        """Note that the batches were pushed in turn, so many in all."""
        pool = self.pool(keys)
        for k, some in enumerate(pool):
            self._pushed[some] += np.float32(len(range(k, times, len(pool)))) * self._grad

    def check(self) -> None:
        """Check that every row is minus the sum of what was pushed: the optimizer is SGD(lr=1)."""
        for start in range(0, self._rows, 100_000):
            some = np.arange(start, min(self._rows, start + 100_000), dtype=np.uint64)
            check(np.array_equal(self._table.pull(some), -self._pushed[some]), "the rows are not what was pushed")

    def others(self) -> list[int]:
        """See `System`: the children of this process but for the peers."""
        mine = psutil.Process().children(recursive=True)
        return [child.pid for child in mine if "client.peers" not in child.cmdline()]


class Pyzmq:
    """Messages by pyzmq: a DEALER here, and a ROUTER in a Python process."""

    name = "pyzmq"

    def __init__(self, address: str, other: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self._other = other

    def measure(self, calls: Calls, seconds: float) -> Seconds:
        """See `System`."""
        socket, size = self.socket, calls.reply_bytes
        request = size.to_bytes(8, "little").ljust(calls.request_bytes, b"\0")
        rows = memoryview(bytearray(size - HEADER))

        def wait() -> None:
            reply = socket.recv(copy=False).buffer
            rows[:] = reply[HEADER:]  # fails if it has another size

        def begin(_: int) -> Callable[[], None]:
            socket.send(request, copy=False)
            return wait

        return timed(begin, calls.depth, seconds)

    def others(self) -> list[int]:
        """See `System`."""
        return [self._other]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)
        self._context.term()


class Native(Pyzmq):
    """Messages by C++ on both sides."""

    name = "C++"

    def __init__(self, address: str, other: int, library: Path) -> None:
        super().__init__(address, other)
        self._library = load(library)

    def measure(self, calls: Calls, seconds: float) -> Seconds:
        """See `System`."""
        latencies = np.empty(CAPACITY)
        request, rows = np.zeros(calls.request_bytes, np.uint8), np.zeros(max(1, calls.reply_bytes - HEADER), np.uint8)
        made = self._library.pair_call(
            module(), self.socket.underlying, request.ctypes.data, request.nbytes, rows.ctypes.data, calls.reply_bytes,
            HEADER, calls.depth, seconds, latencies.ctypes.data, CAPACITY,
        )  # fmt: skip
        check(made > 0, "the pair has failed")
        return latencies[:made]


def module() -> bytes:
    """Return the path of pyzmq's module, behind which libzmq is found."""
    return os.fsencode(zmq.backend.cython._zmq.__file__)


def load(library: Path) -> Any:
    """Load the functions of zmq_pair.cc."""
    loaded = ctypes.CDLL(str(library))
    pointer, whole, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
    loaded.pair_serve.argtypes = [ctypes.c_char_p, pointer]
    loaded.pair_serve.restype = None
    loaded.pair_call.argtypes = [
        ctypes.c_char_p, pointer, pointer, whole, pointer, whole, whole, number, ctypes.c_double, pointer, number,
    ]  # fmt: skip
    loaded.pair_call.restype = number
    return loaded


def compiled(folder: Path) -> Path:
    """Compile zmq_pair.cc."""
    bench, library = Path(__file__).parent.parent, folder / "zmq_pair.so"
    csrc = bench.parent / "csrc"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{csrc}", "-o", str(library)]
    command += [str(bench / "cpp" / "zmq_pair.cc"), str(csrc / "transport" / "zmq.cc"), "-ldl"]
    subprocess.run(command, check=True)
    return library


@contextlib.contextmanager
def peers() -> Iterator[tuple[Pyzmq, Native]]:
    """Run the other sides of both peers for the length of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library = compiled(folder)

        def started(name: str, *arguments: str | Path) -> tuple[str, int]:
            address = f"ipc://{folder / name}"  # as the processes of a launch
            command = [sys.executable, "-m", "client.peers", address, *arguments]
            paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process.stdout.readline().strip(), process.pid

        raw, native = Pyzmq(*started("raw")), Native(*started("native", library), library)
        stack.callback(raw.close)
        stack.callback(native.close)
        yield raw, native


def serve(address: str, library: str | None) -> None:
    """Answer, by Python or by C++, until the process is killed."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    if library is not None:
        load(Path(library)).pair_serve(module(), router.underlying)
    values: dict[int, bytes] = {}
    while True:
        peer, request = router.recv_multipart(copy=False)
        size = int.from_bytes(request.buffer[:8], "little")
        router.send_multipart([peer, values.setdefault(size, bytes(size))], copy=False)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
