"""Fixtures and settings of several test files."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import fork_server
from cluster_fakes import Wire
from held_saves import Held
from paths import GOLDEN
from places import cut_connection, object_store
from ray_nodes import RayNodes, ray_nodes
from shoal.store.local import LocalStore, local
from tiers import mark_combinations, rounds

# A shell's background jobs start with Ctrl-C ignored, those of nohup with SIGHUP; so would what the tests start, which
# send them to themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without it boto asks for credentials at the address of a cloud's machines, and waits seconds for an answer.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"

# Idle threads of OpenMP do not spin: the processes of the tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# As scikit-learn sets them when it is imported: programs that start with others than those before are not forked.
os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")

# Nothing below can see what reaches the disk, and thousands of tables are saved: a file need not be written there.
os.fsync = lambda file: os.fstat(file)  # which refuses a closed one

# Stores of tests have few rows: what fits and saves do for each of 1,024 slots would be half of what they do. Programs
# that tests start have as many slots as ever.
for _made in (local, LocalStore.__init__):
    _made.__kwdefaults__["slots"] = 64

# The same examples in every run; a failure prints how to run it again.
hypothesis.settings.register_profile(
    "shoal", deadline=None, derandomize=True, print_blob=True, max_examples=rounds(100)
)
hypothesis.settings.load_profile("shoal")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Begin with what is slow: at the end no process waits for the last long test of another one."""
    mark_combinations(items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection() -> None:
    """Import the tests without the garbage collector, which would take a quarter of the time and find nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Start the collector, and keep modules and tests from it: a full run through all of them takes 0.2 s."""
    gc.freeze()
    gc.enable()
    fork_server.install()


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Take away the handlers that a test leaves behind, as a command does that a signal has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def true_starts() -> Iterator[None]:
    """Have the processes of a test be started, not forked: tests of the start itself, of memory, of process trees."""
    with fork_server.true_starts():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep what earlier tests left from the collector of tests that fork.

    A child has dropped all threads, and so what these held; file systems of s3fs among that wait, a second each, for a
    thread to close them.
    """
    if isinstance(item, pytest.Function) and hasattr(item.module, "in_child"):
        gc.collect()
        gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    seed = 20140619
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of files that every later version must read."""
    return GOLDEN


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayNodes]:
    """A cluster of Ray with a head of four CPUs and two nodes of two; a test that kills a node adds another one."""
    pytest.importorskip("ray", reason="ray is an extra: pip install 'shoal[ray]'")
    with ray_nodes() as made:
        yield made


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3, with the bucket "places"."""
    with object_store() as address:
        yield address


@pytest.fixture
def wire(s3: str) -> Iterator[Wire]:
    """A connection to that server that can be cut."""
    with cut_connection(s3) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Hold what saves write until the test ends, or lets it go."""
    held = Held(monkeypatch)
    yield held
    held.go.set()


@pytest.fixture(scope="session")
def shoal_data() -> Path:
    """The folder of real data sets that the environment variable SHOAL_DATA names."""
    folder = os.environ.get("SHOAL_DATA")
    if not folder:
        pytest.skip("SHOAL_DATA is not set: no real data sets")
    return Path(folder)
