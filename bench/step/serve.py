"""Answers turns: a line of JSON for each line of the input, [first batch, unmeasured steps, measured steps]."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from step.data import Example, batch

Step = Callable[[Any], float]


def serve(model: str, prepare: Callable[[Example], Any], step: Step, finish: Callable[[], None] = lambda: None) -> None:
    """Take turns until the input ends. ``prepare``, which is not measured, makes the tensors of a batch."""
    print("ready", flush=True)
    for line in sys.stdin:
        first, warm, steps = json.loads(line)
        given = [prepare(batch(model, number)) for number in range(first, first + warm + steps)]
        losses = [step(one) for one in given[:warm]]
        finish()
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [step(one) for one in given[warm:]]
        finish()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**spent, "losses": losses}), flush=True)


def begin() -> tuple[str, str]:
    """Return the side and the model that the command line names, with the number of threads set."""
    side, model, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return side, model
