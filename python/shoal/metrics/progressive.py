"""When to print progressive metrics: progressive validation as Vowpal Wabbit prints it.

    average    since       example       example
    loss       last        counter       weight      AUC
    0.693147   0.693147             1             1       nan
    0.601332   0.509517             2             2  0.500000
    ...

Each example is predicted before it is learned from, so the mean of its losses is that of examples the model has not
seen. Lines come at the powers of two, so that a long stream prints few of them, or every so many examples. A
batch is never divided: a line comes with the first batch that ends at its number or after it.

A line is the difference between two states of the `Accumulator` of the stream.

Source: Blum, Kalai, Langford, "Beating the hold-out", COLT 1999; the option ``--progress`` of Vowpal Wabbit.
"""

from __future__ import annotations

import msgspec

from shoal.base.scalars import plain
from shoal.metrics.exact import ratio
from shoal.metrics.stream import StreamMetrics


class ProgressiveLine(msgspec.Struct, frozen=True, kw_only=True):
    """The progressive metrics of a stream at some example.

    Attributes
    ----------
    examples : int
        So far.
    weight : float
        Sum of their weights.
    logloss : float
        Mean loss since the start, by weight.
    since_last : float
        Mean loss since the line before.
    auc : float
        Since the start, within `Accumulator.auc_error`; NaN of several classes.
    accuracy : float or None
        Of several classes: since the start.
    """

    examples: int
    weight: float
    logloss: float
    since_last: float
    auc: float
    accuracy: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.logloss:<10.6f} {self.since_last:<10.6f} {self.examples:>14,} {self.weight:>14,.10g} "
            f"{self.auc if self.accuracy is None else self.accuracy:>10.6f}"
        )


class Progressive:
    """Decides when a line is due, and computes it.

    Parameters
    ----------
    every : int or float
        An int: a line every so many examples. A float above 1: each line at so many times the examples of the one
        before, from 1 on; 2.0 gives the powers of two.

    Examples
    --------
    >>> from shoal.metrics import Accumulator
    >>> seen, lines = Accumulator(), Progressive(2.0)
    >>> for label in [0, 1, 0, 1, 1]:
    ...     loss = seen.update([label], [0.0])
    ...     if line := lines.update(seen):
    ...         print(line.examples, round(line.since_last, 4))
    1 0.6931
    2 0.6931
    4 0.6931
    """

    HEADER = (
        f"{'average':<10} {'since':<10} {'example':>14} {'example':>14}\n"
        f"{'loss':<10} {'last':<10} {'counter':>14} {'weight':>14} {'AUC':>10}"
    )

    def __init__(self, every: float = 2.0) -> None:
        every = plain(every)
        is_number = isinstance(every, int | float) and not isinstance(every, bool)
        if not is_number or not (every >= 1 if isinstance(every, int) else 1.0 < every < float("inf")):
            raise ValueError(f"every is {every!r}: pass a number of examples (int) or a factor above 1 (float)")
        self._every = every
        self._next: float = every if isinstance(every, int) else 1.0
        self._examples = 0
        self._weight = 0.0
        self._loss = 0.0

    @classmethod
    def header(cls, seen: StreamMetrics) -> str:
        """Return the names of the columns of an accumulator's lines: those of `HEADER`, or of several classes."""
        return cls.HEADER.replace(f"{'AUC':>10}", f"{seen.quality_name:>10}")

    def update(self, seen: StreamMetrics) -> ProgressiveLine | None:
        """Return a line, if one is due; call it after each batch that ``seen`` has counted."""
        if _counted(seen) < self._next:
            return None
        if isinstance(self._every, int):
            self._next = (seen.examples // self._every + 1) * self._every
        elif seen.examples * (self._every - 1) < 1:  # the next power is less than an example away
            self._next = seen.examples + 1
        else:
            while self._next <= seen.examples:
                self._next *= self._every
        return self._line(seen)

    def finish(self, seen: StreamMetrics) -> ProgressiveLine | None:
        """Return the line of the examples after the last line, if there are any."""
        return self._line(seen) if _counted(seen) > self._examples else None

    def _line(self, seen: StreamMetrics) -> ProgressiveLine:
        weight, loss = seen.weight, seen.loss_sum
        line = ProgressiveLine(
            examples=seen.examples,
            weight=weight,
            logloss=seen.logloss,
            since_last=ratio(loss - self._loss, weight - self._weight),
            auc=seen.auc,
            accuracy=seen.accuracy,
        )
        self._examples, self._weight, self._loss = seen.examples, weight, loss
        return line


def _counted(seen: StreamMetrics) -> int:
    """Return the number of examples of an accumulator."""
    if not isinstance(seen, StreamMetrics):
        raise TypeError(f"seen is a {type(seen).__name__}: pass the accumulator that counts, not its result")
    return seen.examples
