"""Functions that block, in simulated time: each is a thread of its own, of which one at a time runs.

A fiber runs until it waits for something; then whoever has resumed it goes on. So a run has one order of events, and
can be repeated from its seed. Within a fiber, the modules given to `simulated_time` take their time from its network.
"""

import contextlib
import threading
import time
from unittest import mock

_local = threading.local()
HANDOVER_SECONDS = 600.0  # of real time, in which a fiber comes to wait; only a defect takes as long


class Killed(BaseException):
    """Raised in a fiber that waits while its run ends."""


class Fiber:
    """A blocking function.

    Parameters
    ----------
    network : Network
    function : callable
        What it runs.
    ready : callable
        Called by the network when a time has come that the fiber waits for: it resumes the fiber, if that may run now.

    Attributes
    ----------
    done : bool
    error : Exception or None
        What the function has raised.
    """

    def __init__(self, network, function, ready):
        self.network, self.ready = network, ready
        self.done = False
        self.error = None
        self._function = function
        self._is_ready = lambda: True
        self._killed = False
        self._go, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = None

    def resume(self):
        """Run it until it waits for something that has not come."""
        while not self.done and self._is_ready():
            self._switch()

    def kill(self):
        """End it: whatever it waits for raises `Killed`."""
        self._killed = True
        while not self.done and self._thread is not None:
            self._switch()

    def _switch(self):
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        if not self._yielded.acquire(timeout=HANDOVER_SECONDS):
            raise RuntimeError(f"a fiber runs for {HANDOVER_SECONDS:g} s: {self._function}")

    def _run(self):
        self._go.acquire()
        _local.fiber = self
        try:
            if not self._killed:
                self._function()
        except Killed:
            pass
        except Exception as error:  # of the code under test: the owner judges it
            self.error = error
        self.done = True
        self._yielded.release()

    # --- within the fiber ---

    def check(self):
        """Do nothing, unless it is being killed."""
        if self._killed:
            raise Killed

    def wait(self, is_ready, seconds=None):
        """Wait until a condition holds, or so long."""
        self.check()
        end = None
        if seconds is not None:
            end = self.network.now + seconds
            self.network.at(end, self.ready)
        self._is_ready = lambda: is_ready() or (end is not None and self.network.now >= end)
        if not self._is_ready():
            self._yielded.release()
            self._go.acquire()
        self.check()

    def sleep(self, seconds):
        """Wait so long."""
        self.wait(lambda: False, seconds)


def current():
    """Return the fiber that runs; None outside of fibers."""
    return getattr(_local, "fiber", None)


class _Time:
    """The functions of `time` that take simulated time within fibers."""

    @staticmethod
    def monotonic():
        fiber = current()
        return time.monotonic() if fiber is None else fiber.network.now

    @staticmethod
    def sleep(seconds):
        fiber = current()
        if fiber is None:
            time.sleep(seconds)
        else:
            fiber.sleep(seconds)


@contextlib.contextmanager
def simulated_time(*modules):
    """Let modules that import `time` take the time of the fiber in which they run."""
    with contextlib.ExitStack() as undo:
        for module in modules:
            undo.enter_context(mock.patch.object(module, "time", _Time))
        yield
