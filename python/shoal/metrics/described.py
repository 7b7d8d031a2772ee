"""Accumulators from their descriptions: of two or of several classes.

Threads: functions are pure.
"""

from __future__ import annotations

from typing import Any

from shoal.metrics.accumulator import Accumulator
from shoal.metrics.multiclass import MulticlassAccumulator
from shoal.metrics.stream import StreamMetrics


def accumulator_from_dict(described: dict[str, Any]) -> StreamMetrics:
    """Make the accumulator, of either kind, that its `to_dict` described; equal to the bit.

    Raises
    ------
    ValueError
        It is not a description of an accumulator, or has an unknown version.
    """
    if isinstance(described, dict) and described.get("kind") == MulticlassAccumulator.kind:
        return MulticlassAccumulator.from_dict(described)
    return Accumulator.from_dict(described)
