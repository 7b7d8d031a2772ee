"""What more than one test file needs."""

import os
import signal
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# A shell's background jobs start with Ctrl-C ignored, and so would what the tests start: they send it to themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; a failure prints how to run it again.
hypothesis.settings.register_profile("shoal", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("shoal")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    seed = 20140619
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of files that are read for ever."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def shoal_data() -> Path:
    """The folder of real data sets that the environment variable SHOAL_DATA names."""
    folder = os.environ.get("SHOAL_DATA")
    if not folder:
        pytest.skip("SHOAL_DATA is not set: no real data sets")
    return Path(folder)
