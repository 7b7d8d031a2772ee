"""Files that are written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.storage.base import FileWriter

WRITE_BYTES = 2 << 20  # written at a time, at multiples of it: some systems then map the file in pages as large
_BUFFERS = 3  # of WRITE_BYTES each: one is filled while the disk reads the others by DMA


def open_direct(path: Path) -> int | None:
    """Create a file for direct I/O; None if the file system does not support it."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some systems create it before they refuse
        return None


class DirectFileWriter(FileWriter):
    """A durable file that is written past the page cache, by a thread of its own.

    Data is collected in buffers whose addresses, lengths and file offsets have the alignment that direct I/O requires;
    the end of the file, which is not aligned, is written through the cache.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(str(path))
        self._path = path
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, "shoal-disk")
        self._free = [memoryview(mmap.mmap(-1, WRITE_BYTES)) for _ in range(_BUFFERS)]
        self._busy: deque[tuple[memoryview, Future[None]]] = deque()
        self._held = 0  # bytes in the last free buffer
        self._sent = 0  # bytes passed to the thread

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._sent + self._held

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._free:
                self._wait()
            some = min(WRITE_BYTES - self._held, len(view))
            self._free[-1][self._held : self._held + some] = view[:some]
            self._held += some
            view = view[some:]
            if self._held == WRITE_BYTES:
                self._send()

    def _send(self) -> None:
        buffer, held, offset = self._free.pop(), self._held, self._sent
        self._held = 0
        self._sent += held
        self._busy.append((buffer, self._thread.submit(self._put, buffer[:held], offset)))

    def _wait(self) -> None:
        """Wait for the oldest write, and reclaim its buffer."""
        buffer, future = self._busy.popleft()
        future.result()
        self._free.append(buffer)

    def _put(self, view: memoryview, offset: int) -> None:
        while view:
            if len(view) % mmap.PAGESIZE:  # the end of the file, or the rest of a short write to a full disk
                _through_the_cache(self._descriptor)
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def _commit(self) -> None:
        if self._held:
            self._send()
        while self._busy:
            self._wait()
        self._thread.shutdown()
        os.fsync(self._descriptor)
        self._close()

    def _abort(self) -> None:
        self._path.unlink(missing_ok=True)
        self._thread.shutdown(cancel_futures=True)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _through_the_cache(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
