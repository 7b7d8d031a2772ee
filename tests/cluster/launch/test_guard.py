"""The guard of a worker's program: what the program inherits."""

import os
import signal
import subprocess
import sys

from shoal.cluster.launch import guard


def test_a_program_ignores_no_signal_that_python_ignores():
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    ignored = int(done.stdout.split()[1], 16)  # others may be, by the shell that has started the tests
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ)), done
