"""To a shell, a command that a fork of the preloaded process runs is the command itself."""

from __future__ import annotations

import subprocess
import sys

from paths import SUPPORT

# In a process of its own: the server is forked, which only a process without threads may do.
SCRIPT = """\
import signal, subprocess
from pathlib import Path
from preloaded import preloaded

def shell(text, **more):
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120, **more)
    return done.returncode, done.stdout, done.stderr

def started():
    words = ["shoal", "scheduler", "--bind", "tcp://127.0.0.1:*", "--servers", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout.readline()
    return process

with preloaded(["shoal.cli"]):
    status, out, err = shell("shoal compact")
    assert status == 2 and out == "" and "--output" in err, (status, out, err)
    Path("folder").mkdir()
    status, out, err = shell("cd folder && shoal audit --data - --format libsvm > ../out", input="1 7:1\\n")
    assert status == 0 and "1 distinct" in Path("out").read_text(), (status, out, err)
    ended, killed = started(), started()
    ended.terminate()
    assert ended.wait(timeout=120) == 0  # the scheduler ends regularly
    killed.kill()
    killed.communicate(timeout=120)  # the other end of its output is closed: the command is gone
"""


def test_a_preloaded_command_has_the_streams_signals_and_status_of_a_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SUPPORT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
