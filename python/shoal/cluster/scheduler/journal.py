"""The journal of the scheduler: the inputs of its state machine, in files.

    directory/
      lock               held by the scheduler that uses the journal (flock); has its process id
      committed          the number of the next commit, as of the last one or an earlier one
      snapshot-NNNN      the state of the membership before commit NNNN
      log-NNNN           the commits from NNNN on

    snapshot   "SHOALSNP", the version as u16, and one frame whose payload is a `State`
    log        "SHOALJNL", the version as u16, and a frame for each commit; its payload is an array of `Input`
    committed  the number u64, CRC-32 of it u32
    frame      "SHJR", length of the payload u32, number u64, CRC-32 of the payload u32, CRC-32 of these fields u32;
               then the payload, in MessagePack. All numbers are little-endian.

A commit is one write and one fsync for all inputs that were appended before (group commit, DeWitt et al., SIGMOD'84);
what depends on them is sent afterwards. The number of the next commit is then written into `committed`, without an
fsync: it is never ahead of the log, and shows whether the log was cut short later. When the log has grown, and no
operation is in progress, a snapshot replaces it: an empty log is created, then the snapshot is written under another
name and renamed, then the older files are removed.

Invariants (tests/cluster/scheduler/test_journal.py)
  J1  After `commit` has returned, every later `load` returns the appended inputs, whatever ends the process.
  J2  The greatest snapshot and its log are complete, except for the last frame of the log, which may be torn: it was
      not committed, and `load` cuts it off.
  J3  Any other damage raises CorruptionError: a frame that cannot be read was committed if one that can be read follows
      it, or if its number is below `committed`.
  J4  At most one process uses a journal.
  J5  Only regular files of the directory itself are opened, no symbolic links.
  J6  After a failed write nothing more is committed: every call raises.

Threads: one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from shoal.base.decoders import msgpack_decoder
from shoal.base.machine import local_path
from shoal.cluster.scheduler.inputs import Input
from shoal.cluster.scheduler.state import State
from shoal.errors import CorruptionError, StorageError

_log = logging.getLogger("shoal.scheduler")

VERSION = 1
_SNAPSHOT, _LOG = b"SHOALSNP", b"SHOALJNL"
_MARKER = b"SHJR"
_FILE = struct.Struct("<8sH")
_FIELDS = struct.Struct("<4sIQI")
_CHECKSUM = struct.Struct("<I")
_COMMITTED = struct.Struct("<Q")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MIN_LOG_BYTES = 1 << 22  # before a snapshot replaces a log
_NAME = re.compile(r"(snapshot|log)-(\d{16})")

_REMEDY = "restore the directory from a copy, or end the cluster's processes and start it again with an empty directory"

_inputs = msgpack_decoder(list[Input])
_state = msgpack_decoder(State)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()


def encode_frame(number: int, payload: bytes) -> bytes:
    """Return a frame."""
    fields = _FIELDS.pack(_MARKER, len(payload), number, zlib.crc32(payload))
    return fields + _CHECKSUM.pack(zlib.crc32(fields)) + payload


def decode_frame(data: bytes, at: int) -> tuple[int, bytes] | None:
    """Return number and payload of the frame at a position; None if there is no whole frame."""
    if at + _HEADER_BYTES > len(data):
        return None
    marker, length, number, checksum = _FIELDS.unpack_from(data, at)
    (own,) = _CHECKSUM.unpack_from(data, at + _FIELDS.size)
    if marker != _MARKER or own != zlib.crc32(data[at : at + _FIELDS.size]):
        return None
    begin = at + _HEADER_BYTES
    payload = data[begin : begin + length]
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    return number, payload


def count_frames(data: bytes, begin: int) -> int:
    """Return how many whole frames there are from a position on, wherever they begin."""
    count, at = 0, data.find(_MARKER, begin)
    while at >= 0:
        found = decode_frame(data, at)
        count += found is not None
        at = data.find(_MARKER, at + (1 if found is None else _HEADER_BYTES + len(found[1])))
    return count


def open_file(path: Path, flags: int) -> int:
    """Open a regular file, without following a link or waiting for a pipe; return its descriptor."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link: remove it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a file: remove it", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Read a regular file; errors as of `open_file`."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.readall()


def _commits(count: int) -> str:
    return f"{count} commit{'' if count == 1 else 's'}"


class Journal:
    """A journal in a directory, which is created if it does not exist. A context manager that closes itself."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = local_path(directory)
        self._file = -1
        self._number = 0  # of the next commit
        self._log_bytes = 0
        self._snapshot_bytes = 0
        self._appended: list[Input] = []
        self._failed: StorageError | None = None
        self._lock = self._committed = -1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = open_file(self._directory / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            self._committed = open_file(self._directory / "committed", os.O_RDWR | os.O_CREAT)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace")
            self.close()
            raise StorageError(
                f"the journal {self._directory} is in use by another scheduler (process {holder or 'unknown'}): end "
                "that one, or pass another directory"
            ) from None
        except OSError as error:
            self.close()
            raise StorageError(error.errno, f"the journal {self._directory} cannot be used: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """The directory."""
        return self._directory

    @property
    def has_grown(self) -> bool:
        """Whether the log is long enough that a snapshot should replace it."""
        return self._log_bytes > max(_MIN_LOG_BYTES, 2 * self._snapshot_bytes)

    def clear(self) -> None:
        """Remove all that a former cluster has stored."""
        try:
            snapshots, logs = self._numbers()
            for kind, numbers in (("snapshot", snapshots), ("log", logs)):  # a log is removed after its snapshot
                for number in numbers:
                    self._path(kind, number).unlink()
            os.ftruncate(self._committed, 0)
        except OSError as error:
            self._fail("be written", error)

    def load(self) -> tuple[State, list[Input]] | None:
        """Read the journal, and continue it."""
        try:
            return self._load()
        except OSError as error:
            self._fail("be read", error)

    def _load(self) -> tuple[State, list[Input]] | None:
        snapshots, logs = self._numbers()
        newest = max(snapshots, default=-1)
        for number in logs:
            if number > newest and (count := count_frames(read_file(self._path("log", number)), 0)):
                what = f"it has {_commits(count)}, but its snapshot is missing"
                self._damaged(self._path("log", number), 0, what)
        committed = self._read_committed()
        if newest < 0:
            if committed:
                self._damaged(self._directory, 0, f"commits up to {committed - 1} were stored, and are missing")
            return None
        if newest not in logs:
            self._damaged(self._path("log", newest), 0, "it is missing")
        path = self._path("snapshot", newest)
        data = read_file(path)
        self._check_file(path, data, _SNAPSHOT)
        found = decode_frame(data, _FILE.size)
        if found is None or found[0] != newest:
            self._damaged(path, _FILE.size, "its content does not have the checksum that was written")
        try:
            state = _state.decode(found[1])
        except _UNREADABLE as error:
            self._damaged(path, _FILE.size, f"its content cannot be read ({error})")
        self._snapshot_bytes = len(data)
        self._number = newest
        entries = list(self._read_log(self._path("log", newest), committed))
        self._remove_others()
        return state, entries

    def _read_log(self, path: Path, committed: int) -> Iterator[Input]:
        data = read_file(path)
        self._file = open_file(path, os.O_WRONLY | os.O_APPEND)
        if len(data) < _FILE.size and committed <= self._number:  # the process ended while it wrote the first bytes
            os.ftruncate(self._file, 0)
            data = _FILE.pack(_LOG, VERSION)
            self._write(data)
        self._check_file(path, data, _LOG)
        at = _FILE.size
        while at < len(data):
            found = decode_frame(data, at)
            if found is None:
                if count := count_frames(data, at + 1):
                    self._damaged(path, at, f"a commit cannot be read, and whole ones follow it ({count})")
                if self._number < committed:
                    break
                _log.warning(
                    "the journal %s ends with %d bytes that were not committed: they are cut off", path, len(data) - at
                )
                os.ftruncate(self._file, at)
                os.fsync(self._file)
                break
            number, payload = found
            if number != self._number:
                self._damaged(path, at, f"commit {self._number} is missing, {number} follows")
            try:
                yield from _inputs.decode(payload)
            except _UNREADABLE as error:
                self._damaged(path, at, f"commit {number} cannot be read ({error})")
            self._number += 1
            at += _HEADER_BYTES + len(payload)
        if self._number < committed:
            what = f"it ends before commit {self._number}, and commits up to {committed - 1} were stored"
            self._damaged(path, at, f"{what}: {_commits(committed - self._number)} missing")
        self._log_bytes = at

    def _read_committed(self) -> int:
        """Return the number of the next commit, or less: 0 if it was not written whole."""
        data = os.pread(self._committed, _COMMITTED.size + _CHECKSUM.size, 0)
        with contextlib.suppress(struct.error):
            if _CHECKSUM.unpack_from(data, _COMMITTED.size) == (zlib.crc32(data[: _COMMITTED.size]),):
                return int(_COMMITTED.unpack_from(data)[0])
        return 0

    def _write_committed(self) -> None:
        data = _COMMITTED.pack(self._number)
        os.pwrite(self._committed, data + _CHECKSUM.pack(zlib.crc32(data)), 0)

    def _check_file(self, path: Path, data: bytes, magic: bytes) -> None:
        if len(data) < _FILE.size or not data.startswith(magic):
            self._damaged(path, 0, f"it does not begin with {magic.decode()}")
        (_, version) = _FILE.unpack_from(data)
        if version != VERSION:
            raise CorruptionError(
                f"{path} has version {version}, and this version of shoal reads version {VERSION}: continue with the "
                "version of shoal that wrote it, or end the cluster's processes and start it again with an empty "
                "directory"
            )

    def _damaged(self, path: Path, at: int, what: str) -> NoReturn:
        raise CorruptionError(f"{path}, byte {at}: {what}: {_REMEDY}")

    def append(self, entry: Input) -> None:
        """Add an input to the next commit."""
        self._appended.append(entry)

    def commit(self) -> None:
        """Store all appended inputs; returns when they are on the disk."""
        if self._failed is not None:
            raise StorageError(*self._failed.args)
        if not self._appended:
            return
        frame = encode_frame(self._number, _encoder.encode(self._appended))
        try:
            self._write(frame)
            self._number += 1
            self._write_committed()
        except OSError as error:
            self._fail("be written", error)
        self._appended.clear()
        self._log_bytes += len(frame)

    def begin(self, state: State) -> None:
        """Store a state in place of all that was committed before; appended inputs must be committed."""
        if self._failed is not None:
            raise StorageError(*self._failed.args)
        if self._appended:
            raise RuntimeError("commit the appended inputs first")
        number = self._number + 1
        try:
            self._begin(number, state)
        except OSError as error:
            self._fail("be written", error)

    def _begin(self, number: int, state: State) -> None:
        log = open_file(self._path("log", number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if self._file >= 0:
            os.close(self._file)
        self._file = log
        self._write(_FILE.pack(_LOG, VERSION))
        data = _FILE.pack(_SNAPSHOT, VERSION) + encode_frame(number, _encoder.encode(state))
        temporary = self._directory / "snapshot.tmp"
        with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._sync_directory()  # the log is there before its snapshot
        temporary.rename(self._path("snapshot", number))
        self._sync_directory()
        self._number, self._snapshot_bytes, self._log_bytes = number, len(data), _FILE.size
        self._write_committed()
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove the files of other snapshots than the current one."""
        (self._directory / "snapshot.tmp").unlink(missing_ok=True)
        snapshots, logs = self._numbers()
        current = max(snapshots)
        for kind, numbers in (("snapshot", snapshots), ("log", logs)):
            for number in numbers:
                if number != current:
                    self._path(kind, number).unlink()

    def _numbers(self) -> tuple[list[int], list[int]]:
        found: dict[str, list[int]] = {"snapshot": [], "log": []}
        for name in os.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match is not None:
                found[match[1]].append(int(match[2]))
        return found["snapshot"], found["log"]

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f"{kind}-{number:016d}"

    def _write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            at += os.write(self._file, data[at:])
        os.fsync(self._file)

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _fail(self, what: str, error: OSError) -> NoReturn:
        self._failed = StorageError(
            error.errno,
            f"the journal {self._directory} cannot {what}: {error.strerror}. The scheduler ends before it promises "
            "anything that it could not keep: make room, and start it again with the same journal",
        )
        raise self._failed from error

    def close(self) -> None:
        """Release the journal, without a commit."""
        for file in (self._file, self._committed, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._committed = self._lock = -1
