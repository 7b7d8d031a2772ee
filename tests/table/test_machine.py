"""A table against a dict, by random sequences of every call (Hypothesis shrinks what breaks).

Keys come from a small pool of awkward ones: the ends of the key space, neighbours that fight for one place, keys that
share a slot. Each rule is run exactly where float32 is exact, and within a tolerance elsewhere.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from table_machine import (
    MACHINES,
    TableMachine,
)
from tiers import long_but, rounds


@pytest.mark.slow
@pytest.mark.rounds
@pytest.mark.parametrize(
    "arguments", long_but(["group ftrl of dim 3", "adagrad of dim 5", "sgd of dim 2 in bfloat16"], MACHINES)
)
def test_a_table_is_a_dict_of_rows(arguments):
    run_state_machine_as_test(
        lambda: TableMachine(*arguments), settings=settings(max_examples=rounds(40), stateful_step_count=25)
    )
