"""Starts a worker of Ray, as `ray/_private/workers/setup_worker.py` does, which imports Ray for this: half of a start.

Ray replaces this process by the worker, after it has set the variables of the runtime environment. The tests use no
other part of runtime environments.
"""

import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--serialized-runtime-env-context", default="")
parser.add_argument("--language")
given, command = parser.parse_known_args()
context = json.loads(given.serialized_runtime_env_context or "{}")
assert context.get("py_executable", sys.executable) == sys.executable, context
assert not context.get("command_prefix"), context
os.execve(sys.executable, [sys.executable, *command], {**os.environ, **context.get("env_vars", {})})
