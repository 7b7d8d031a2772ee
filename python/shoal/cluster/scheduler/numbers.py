"""Random numbers that are the same in a replay.

The k-th number depends on a seed and on k alone (a counter-based generator). Threads: one.
"""

from __future__ import annotations

import random


class NumberSource:
    """Numbers of the cluster, of jobs and of streams."""

    def __init__(self, seed: bytes, drawn: int = 0) -> None:
        self.seed = seed
        self.drawn = drawn

    def draw(self, bits: int) -> int:
        """Return the next number."""
        self.drawn += 1
        return random.Random(self.seed + self.drawn.to_bytes(8, "little")).getrandbits(bits)
