"""Addresses that are refused: each message names the remedy."""

import pytest

from shoal.cluster.protocol.address import split
from shoal.cluster.scheduler.scheduler import Scheduler
from shoal.config import SchedulerConfig


def test_a_port_out_of_range_is_told_the_range():
    with pytest.raises(ValueError, match=r"port 70000 is out of range: pass 1 to 65535, or \* for any free port"):
        split("tcp://127.0.0.1:70000")


def test_an_address_of_another_machine_has_a_remedy():
    said = "Cannot assign requested address; this machine does not have that address, choose one of its own"
    with pytest.raises(OSError, match=f"cannot listen at tcp://192.0.2.1:5570: {said}"):
        Scheduler(SchedulerConfig(bind="tcp://192.0.2.1:5570", servers=1, insecure=True))
