"""Runs Python programs in forks of a process that has imported the package, which saves each of them its imports.

`install` puts `ForkedPopen` in the place of ``subprocess.Popen``. It forks where a command is this Python with
``-m MODULE``, ``-c TEXT`` or a script, and starts every other command as before. The process is a child of its caller,
like one that was started, with process id, streams, signals and exit status of its own.

    caller                    fork server                          process
    Popen(command)   --->     forks twice; the first child ends
                                                                   becomes a child of the caller, the nearest subreaper
    process id       <---     <---                                 has the caller's folder, streams, environment
                                                                   runs the command

A program that may start others gets a fork server of its own, before it runs. One server has imported what commands
need, another one torch as well.

Invariant: a server imports modules and does nothing else, so a fork is in the state of a process after its imports.

Started, not forked, is what a fork cannot be: a command with other options of Python than -W ACTION and -u, with other
environment variables of those that programs read at their start, with a function to run before; a text that reads
``sys.modules`` or its memory; everything in the block of `true_starts`, which tests of the start itself need; and
everything where there are no subreapers (Linux has them). Forks of one server have one seed of ``hash(str)``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.launch import guard

PACKAGE = (
    "shoal.checkpoint",
    "shoal.cli",
    "shoal.cluster.launch.workers",
    "shoal.cluster.protocol.health",
    "shoal.cluster.scheduler.scheduler",
    "shoal.cluster.server.server",
    "shoal.cluster.worker.cluster_store",
    "shoal.cluster.worker.connect",
    "shoal.models",
    "shoal.store.local",
)
TORCH = (*PACKAGE, "shoal.torch", "shoal.torch.config", "torch._dynamo")

# Ends a worker of `shoal launch` with its launcher; executes the program whose command line it is given.
GUARD = str(Path(guard.__file__))

# A program that sees how it differs: by what it has imported, and how much memory it has.
_LOOKS_INWARD = re.compile(r"sys\.modules|/proc/self/statm")

# Read when a program or a library is loaded; torch is told of OMP_NUM_THREADS, and streams of PYTHONUNBUFFERED.
_READ_AT_START = re.compile(r"PYTHON(?!UNBUFFERED$).*|(LD|GLIBC|MALLOC|OPENBLAS|MKL|KMP)_.*|OMP_(?!NUM_THREADS$).*")

_TIMEOUT = 120.0  # seconds for a server to import its modules
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Program:
    """What a command line of Python runs."""

    kind: str  # "module", "text", "script"
    target: str
    arguments: list[str]
    actions: list[str]  # of warnings
    is_unbuffered: bool

    @classmethod
    def of(cls, words: Sequence[str], folder: str) -> Program | None:
        """Return what a command line runs, or None if it is not one that a fork can run."""
        rest = list(words[1:])
        if words[:1] != [sys.executable]:
            return None
        if rest[:3] == ["-I", "-S", GUARD]:
            del rest[:2]  # with which it starts faster
        actions: list[str] = []
        is_unbuffered = False
        while rest:
            word = rest.pop(0)
            if word == "-u":
                is_unbuffered = True
            elif word == "-W" and rest and rest[0] in ("error", "ignore", "default", "always"):
                actions.append(rest.pop(0))
            elif word == "-c" and rest and _LOOKS_INWARD.search(rest[0]):
                return None
            elif word in ("-m", "-c") and rest:
                return cls("module" if word == "-m" else "text", rest.pop(0), rest, actions, is_unbuffered)
            elif word.startswith("-") or not os.path.isfile(os.path.join(folder, word)):
                return None
            else:
                return cls("script", word, rest, actions, is_unbuffered)
        return None

    def texts(self, folder: str) -> str:
        """Return the programs that the command line contains and names."""
        words = [self.target, *self.arguments]
        scripts = [Path(folder, word) for word in words if word.endswith((".py", ".md"))]  # documents.py runs a page
        return "\n".join([self.target, *(path.read_text() for path in scripts if path.is_file())])

    def uses_torch(self, folder: str) -> bool:
        return "ctr" in self.arguments or re.search(r"\btorch\b", self.texts(folder)) is not None

    def may_start_others(self, folder: str) -> bool:
        return (
            "launch" in self.arguments
            or re.search(r"launch|subprocess|torch\.distributed\.run", self.texts(folder)) is not None
        )


# ---- the caller ------------------------------------------------------------------------------------------------------


class _Server:
    """A fork server, as the process that uses it has it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        connection.settimeout(_TIMEOUT)
        self._connection = connection
        self._pid = pid
        self._owner = os.getpid()
        self._environment = _read_at_start(os.environ)
        atexit.register(self._stop)

    def can_start(self, environment: Mapping[str, str]) -> bool:
        return os.getpid() == self._owner and _read_at_start(environment) == self._environment

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Return the id of the process that runs a program."""
        encoded = json.dumps(request).encode()
        with _starting, _subreaper():
            socket.send_fds(self._connection, [len(encoded).to_bytes(8, "big")], list(streams))
            self._connection.sendall(encoded)
            pid = int.from_bytes(_receive(self._connection, 8), "big")
        if pid == 0:
            raise OSError(f"the fork server cannot prepare {request['program']}: its standard error says why")
        return pid

    def forget(self) -> None:
        """Leave the server to the process that this one was forked from."""
        self._connection.close()
        atexit.unregister(self._stop)

    def _stop(self) -> None:
        self._connection.close()
        if os.getpid() == self._owner:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


_TruePopen = subprocess.Popen
_servers: dict[Sequence[str], _Server] = {}
_making = threading.Lock()  # guards _servers
_starting = threading.Lock()  # one at a time: that of the subreaper is a setting of the whole process
_is_fork = False
_are_true = False


def install() -> None:
    """Put `ForkedPopen` in the place of ``subprocess.Popen``."""
    if sys.platform == "linux":
        subprocess.Popen = ForkedPopen  # type: ignore[misc]
        server_with(PACKAGE)


@contextlib.contextmanager
def true_starts() -> Iterator[None]:
    """Fork no process in this ``with`` block."""
    global _are_true
    before, _are_true = _are_true, True
    try:
        yield
    finally:
        _are_true = before


def server_with(modules: Sequence[str]) -> _Server | None:
    """Return the fork server that has imported these modules; a new one has not, but will have before it forks."""
    with _making:
        if modules not in _servers and not _is_fork:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno()), *modules]
                process = _TruePopen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            process.returncode = 0  # it is waited for elsewhere
            _servers[modules] = _Server(ours, process.pid)
        return _servers.get(modules)


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that is forked where that is the same as to start it."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, process_group,
    ):  # fmt: skip
        variables = os.environ if env is None else env
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        folder = os.getcwd() if cwd is None else os.fsdecode(cwd)
        program = None
        is_plain = umask == -1 and not (shell or executable or preexec_fn or pass_fds or gid or gids or uid)
        if is_plain and not _are_true and not isinstance(args, str | bytes) and os.path.isdir(folder):
            program = Program.of([os.fsdecode(word) for word in args], folder)
        server = None
        if program is not None:
            server = server_with(TORCH if program.uses_torch(folder) and not _is_fork else PACKAGE)
        if server is None or not server.can_start(environment):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        request = {
            "words": [os.fsdecode(word) for word in args],
            "program": asdict(program),
            "environment": environment,
            "folder": folder,
            "umask": _umask(),
            "has_session": start_new_session,
            "group": process_group,
            "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        }
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = server.start(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_AT_START.fullmatch(name)}


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Become the parent of descendants whose parent ends."""
    prctl = ctypes.CDLL(None).prctl
    if prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("the system refuses to make this process a subreaper (prctl)")
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        some = connection.recv(size - len(received))
        if not some:
            raise EOFError("the other end of a fork server's connection has ended")
        received += some
    return received


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int], int]:
    """Fork for each request; returns in the forks, with a request, its streams, and a pipe that wants the process id.

    The process ends when the connection does.
    """
    while True:
        try:
            head, streams, _, _ = socket.recv_fds(connection, 8, 3)
            encoded = _receive(connection, int.from_bytes(head, "big"))
        except (EOFError, ConnectionError):
            os._exit(0)
        if not head:
            os._exit(0)
        reading, writing = os.pipe()
        server = os.getpid()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            os.close(reading)
            connection.close()
            while os.getppid() in (between, server):
                time.sleep(0.0002)
            return json.loads(encoded), streams, writing
        for number in (writing, *streams):
            os.close(number)
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 8) or bytes(8))
        os.close(reading)


def become(environment: Mapping[str, str], folder: str, streams: Sequence[int], *, is_unbuffered: bool = False) -> None:
    """Take over environment, folder and standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        mode = "w" if number else "r"
        raw = io.FileIO(number, mode, closefd=False)
        binary: Any = io.BufferedReader(raw) if number == 0 else raw if is_unbuffered else io.BufferedWriter(raw)
        made = io.TextIOWrapper(
            binary,
            stream.encoding,
            stream.errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        made.mode = mode
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


class _Executed(BaseException):
    """This process was asked to execute a program of Python."""

    def __init__(self, program: Program) -> None:
        self.program = program


def _execvp(file: str, words: Sequence[str]) -> None:
    """Execute a program, as ``os.execvp``: the rest of the process is left by an exception."""
    program = Program.of(words, os.getcwd())
    if program is not None:
        raise _Executed(program)
    _true_execvp(file, words)


_true_execvp = os.execvp


def run(program: Program) -> None:
    """Run a program and end as an interpreter does, without the teardown of modules, which takes long."""
    status: object = 0
    is_interrupted = False
    main = types.ModuleType("__main__")
    script = os.path.abspath(program.target)
    try:
        sys.argv[:] = [{"text": "-c", "module": "-m"}.get(program.kind, program.target), *program.arguments]
        sys.path[0] = {"text": "", "module": os.getcwd()}.get(program.kind, os.path.dirname(os.path.realpath(script)))
        if program.kind == "module":
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main
            if program.kind == "script":
                main.__file__ = script
            text = program.target if program.kind == "text" else Path(script).read_bytes()
            if program.kind == "text" and sys.version_info >= (3, 13):
                # Tracebacks of -c TEXT have lines of the text since this version.
                lines = [line + "\n" for line in program.target.splitlines()]
                linecache.cache["<string>"] = (len(program.target), None, lines, "<string>")
            exec(compile(text, script if program.kind == "script" else "<string>", "exec"), main.__dict__)
    except _Executed as executed:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(executed.program)
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt as interrupt:
        sys.excepthook(type(interrupt), interrupt, interrupt.__traceback__)
        is_interrupted = True
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(status or 0) & 0xFF)


def _show(words: Sequence[str]) -> None:
    """Have the system list this process with another command line, or the beginning of it."""
    begin, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


_filters = 0  # of warnings, that the imports have added


def _warn(action: str) -> None:
    """Do as ``python -W ACTION``: the filters that imports add come before that one."""
    warnings.simplefilter(action)  # type: ignore[arg-type]
    warnings.filters.insert(_filters, warnings.filters.pop(0))  # type: ignore[attr-defined]
    sys.warnoptions.append(action)


def _begin(request: Mapping[str, Any], streams: Sequence[int], ready: int) -> None:
    """Run the program of a request: what a fork does."""
    program = Program(**request["program"])
    _forget_servers()
    if program.may_start_others(request["folder"]):
        serve_own_children((ready, *streams))
    if request["has_session"]:
        os.setsid()
    if request["group"] is not None and request["group"] != -1:
        os.setpgid(0, request["group"])
    os.umask(request["umask"])
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler)
    environment = request["environment"]
    is_unbuffered = program.is_unbuffered or "PYTHONUNBUFFERED" in environment
    become(environment, request["folder"], streams, is_unbuffered=is_unbuffered)
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for action in program.actions:
        _warn(action)
    _show(request["words"])
    os.write(ready, os.getpid().to_bytes(8, "big"))
    os.close(ready)
    run(program)


def _forget_servers() -> None:
    global _is_fork
    _is_fork = True
    while _servers:
        _servers.popitem()[1].forget()


def serve_own_children(not_for_server: Sequence[int] = ()) -> None:
    """Fork a server, as which this process is now, for the programs that it will start; it must have one thread."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if server == 0:
        for number in not_for_server:
            os.close(number)
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _begin(*serve(theirs))
    theirs.close()
    _forget_servers()
    _servers[PACKAGE] = _Server(ours, server)
    _replace_starts()


def _replace_starts() -> None:
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.execvp = _execvp  # type: ignore[assignment]


def _main() -> None:
    global _filters
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = len(warnings.filters)
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # of an optional package: the program that needs it reports it
            importlib.import_module(name)
    _filters = len(warnings.filters) - given
    _replace_starts()
    gc.freeze()  # collections in the forks leave the shared pages alone
    _begin(*serve(connection))


if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]
    _main()
