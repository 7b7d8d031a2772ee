"""To its caller, a forked process is one that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

IS_FORK = "import sys as system; print('fork_server' in system.modules)"
SCRIPT = """\
import os, sys, threading
print(sys.argv[1:], sys.path[0] == os.getcwd(), os.environ["TOLD"], __name__, __file__)
print(len(sys.stdin.read()), oct(os.umask(0)), os.getcwd(), os.getppid(), file=sys.stderr)
threading.Timer(0.05, print, ["at the end"]).start()
"""


def reported(*words, **settings):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, **settings)
    lines = [line for line in done.stderr.splitlines() if fork_server.__file__ not in line and "  exec(" not in line]
    return done.returncode, done.stdout, [line for line in lines if set(line) - set(" ^~")]


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "print(__name__, 7 / 2, flush=True); 1 / 0"],
        ["-c", "import sys; sys.exit('why')"],
        ["-c", "import sys; sys.exit(300)"],
        ["-c", "raise KeyboardInterrupt"],
        ["-c", "import os; os.kill(os.getpid(), 11)"],
        ["-W", "error", "-c", "import sys, warnings; print(sys.warnoptions); warnings.warn('beware')"],
        ["-W", "ignore", "-c", "import warnings; warnings.warn('beware')"],
        ["-u", "-c", "import os, sys; print('seen', sys.argv); os._exit(0)", "-m"],
        ["-c", "import os; print('lost'); os._exit(0)"],
        ["-c", "import atexit, signal; atexit.register(print, 'bye'); print(signal.getsignal(signal.SIGINT))"],
        ["-c", "import os, stat; print([stat.S_IFMT(os.fstat(n).st_mode) for n in range(3)], os.isatty(0))"],
        ["-m", "shoal", "train"],
        ["none.py"],
        ["script.py", "one", "--two"],
    ],
)
def test_a_fork_answers_as_a_start_does(words, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    how = {"cwd": tmp_path, "input": "read", "env": {**os.environ, "TOLD": "something"}}
    with fork_server.true_starts():
        started = reported(*words, **how)
    assert reported(*words, **how) == started


def is_fork(**settings):
    return reported("-c", IS_FORK, **settings)[1] == "True\n"


def test_programs_are_forked_where_an_optional_package_is_missing(monkeypatch):
    monkeypatch.setattr(fork_server, "PACKAGE", ("no_such_package", "shoal"))
    try:
        assert is_fork()
    finally:
        fork_server._servers.pop(fork_server.PACKAGE)._stop()


@pytest.mark.slow
def test_only_what_a_fork_can_be_is_forked():
    assert is_fork()
    assert is_fork(env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
    assert not is_fork(env={**os.environ, "PYTHONHASHSEED": "1"})
    assert not is_fork(env={**os.environ, "LD_LIBRARY_PATH": "/nowhere"})
    assert not is_fork(preexec_fn=os.getpid)
    assert reported("-I", "-c", IS_FORK)[1] == reported("-c", IS_FORK + "# not sys.modules")[1] == "False\n"
    with fork_server.true_starts():
        assert not is_fork()


def test_a_fork_is_a_child_in_the_group_of_its_own_that_can_be_stopped_and_killed():
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout.readline() == b"here\n"
        seen = psutil.Process(process.pid)
        assert seen.ppid() == os.getpid()
        assert os.getpgid(process.pid) == process.pid
        assert seen.cmdline()[: len(command)] == command
        open_files = [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert len([name for name in open_files if "libffi" not in name]) == 3  # some builds keep theirs open
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=120) == -signal.SIGKILL


def test_a_fork_that_may_start_others_forks_them_too():
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IS_FORK!r}], check=True)"
    assert reported("-c", text) == (0, "True\n", [])
    text = f"import os, subprocess, sys\nif os.fork() == 0: subprocess.run([sys.executable, '-c', {IS_FORK!r}])"
    assert reported("-c", text + "\nelse: os.wait()") == (0, "False\n", [])  # the server is its parent's


def test_a_supervised_program_is_a_fork_as_well():
    words = [sys.executable, "-I", "-S", fork_server.GUARD, str(os.getpid()), sys.executable, "-c", IS_FORK]
    assert reported(*words[1:]) == (0, "True\n", [])


def test_a_fork_that_fails_to_begin_is_an_error(tmp_path):
    server = fork_server.server_with(fork_server.PACKAGE)
    program = {"kind": "text", "target": "", "arguments": [], "actions": [], "is_unbuffered": False}
    request = {"program": program, "has_session": False, "group": None, "umask": 0o22, "ignores_interrupts": False}
    with open(os.devnull, "r+") as null, pytest.raises(OSError, match="its standard error says why"):
        server.start({**request, "folder": str(tmp_path / "none"), "environment": {}}, [null.fileno()] * 3)
