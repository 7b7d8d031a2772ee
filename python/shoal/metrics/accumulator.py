"""Metrics of a stream in constant memory, from parts that merge in any order into the same whole.

    sums        weight, positive weight, weight x loss, weight x probability: exact sums of the batches' float64 sums
    histogram   the weight of each class in 2^bits bins of the margin, equally wide on [-16, 16); what lies outside
                counts in the first or the last bin

The AUC. A bin keeps the order of margins, so only the P_b N_b pairs inside of a bin may be ordered either way:

    auc_lower = sum_b P_b (N_1 + .. + N_(b-1)) / P N             every such pair in the wrong order
    auc       = auc_lower + sum_b P_b N_b / 2 P N                every such pair a tie
    auc_upper = auc_lower + sum_b P_b N_b / P N                  every such pair in the right order

and the exact AUC, ties within equal margins counting half, lies between the first and the last.

Merging is addition. Counts are int64 until the first example with a weight, so unweighted histograms are the same for
any split and any order of merges. Weighted ones are float64: the same to the bit where all weights are whole numbers
(or multiples of one power of two) below 2^53 in sum, and within n 2^-52 of each other elsewhere. The sums of batches
are added without any rounding, so they depend on which batches there were, not on the order of updates and merges.

Cost: 2^(bits + 4) bytes, 1 MiB by default. `update` takes O(n), `merge` and the AUC O(2^bits).

Threads: an accumulator belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.exact_sum import ExactSum
from shoal.base.scalars import whole
from shoal.metrics.checked import checked
from shoal.metrics.exact import Metrics, losses, probabilities, ratio, weighted_sum
from shoal.metrics.ordered import Curves, ScoreGroups, auc_bounds
from shoal.metrics.stream import REMEDY, Integers, StreamMetrics, check_described, whole_number

LIMIT = 16.0
BITS = 16
_MOST_BITS = 24

_FRACTION_BITS = 40  # of `Accumulator.histogram`
_MOST_WHOLE = float(1 << 53)  # the same: more is not counted in a bin

_VERSION = 1
_ALONE = _core.ThreadPool(1)
_SUMS = ("weight", "positive_weight", "loss", "probability")

Scalar = TypeVar("Scalar", bound=np.generic)


class Accumulator(StreamMetrics):
    """Metrics of a stream of examples, mergeable, in constant memory.

    Parameters
    ----------
    bits : int
        The histogram has ``2**bits`` bins for each class, 1 to 24; the module says what that costs. One more bit about
        halves ``auc_error``. Only accumulators with equal bits merge.

    Attributes
    ----------
    examples : int
        How many examples were counted.
    bits : int

    Examples
    --------
    >>> left, right = Accumulator(), Accumulator()
    >>> loss = left.update([0, 1], [-2.0, 0.0])
    >>> loss = right.update([0, 1], [0.0, 2.0])
    >>> left.merge(right)
    >>> left.auc, left.auc_lower, left.auc_upper, left.result().examples
    (0.875, 0.75, 1.0, 4)
    """

    __slots__ = ("_counts", "_positive_weight", "_probability", "_used", "bits")

    kind: ClassVar[str] = "shoal metrics"
    quality_name: ClassVar[str] = "AUC"
    relative_name: ClassVar[str] = "normalized entropy"
    constant: ClassVar[str] = "the base rate alone"

    def __init__(self, bits: int = BITS) -> None:
        bits = whole("bits", bits, 1, f"1 to {_MOST_BITS}")
        if bits > _MOST_BITS:
            raise ValueError(f"bits is {bits}: pass 1 to {_MOST_BITS}")
        super().__init__()
        self.bits = bits
        self._positive_weight = ExactSum()
        self._probability = ExactSum()
        self._counts: npt.NDArray[Any] = np.zeros(2 << bits, np.int64)  # negatives, then positives
        self._used = range(0)  # other bins are empty: few are used, and the AUC is computed often

    def update(
        self,
        labels: npt.ArrayLike,
        margins: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
        *,
        sums: tuple[float, ...] | None = None,
        pool: _core.ThreadPool | None = None,
    ) -> float:
        """Count a batch of examples.

        Parameters
        ----------
        labels : float[n], 0 or 1
        margins : float[n]
            Log-odds (`logit` makes them of probabilities). As predicted before the batch was learned from, if the
            result is to be progressive.
        weights : float[n], optional
            Importance of each example, 0 or more; all 1 if not given.
        sums : (float, float), optional
            The weighted sums of the batch's losses and of its probabilities, where they are known already.
        pool : ThreadPool, optional
            Threads that count where ``sums`` are known; default: the caller's alone.

        Returns
        -------
        float
            The weighted sum of the batch's losses.

        Raises
        ------
        ValueError
            Lengths differ, a label is neither 0 nor 1, a margin is NaN, a weight is negative or not finite. Nothing
            was counted.
        """
        if sums is not None and weights is None and self._count(labels, margins, sums, pool or _ALONE):
            return sums[0]
        y, a, w = checked(labels, margins, weights, "margins")
        loss, probability = sums or (weighted_sum(losses(y, a), w), weighted_sum(probabilities(a), w))
        if w is not None:
            w = np.ascontiguousarray(w)
            self._counts = self._counts.astype(np.float64, copy=False)
        if len(y):
            self._use(*_core.count_bins(np.ascontiguousarray(a), y, w, LIMIT, self._counts))
        weight = float(len(y)) if w is None else float(np.sum(w))
        self._add(len(y), weight, weighted_sum(y, w), loss, probability)
        return loss

    def _count(
        self, labels: npt.ArrayLike, margins: npt.ArrayLike, sums: tuple[float, ...], pool: _core.ThreadPool
    ) -> bool:
        """Count examples without weights as a model has them, in one call; false: they are others, and not counted."""
        if not (_is_array(labels, np.float32) and _is_array(margins, np.float64) and self._counts.dtype == np.int64):
            return False
        n = len(labels)
        found = _core.count_labelled(margins, labels, LIMIT, self._counts, pool) if 0 < n == len(margins) else None
        if found is None:
            return False
        low, high, positive = found
        self._use(low, high)
        self._add(n, float(n), float(positive), *sums)
        return True

    def update_with(
        self,
        pool: _core.ThreadPool,
        labels: npt.NDArray[np.float32],
        margins: npt.NDArray[np.float64],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> float:
        """Count many examples with the threads of a pool, whose number does not change a bit.

        As `update`, in a sixth of the CPU time. The sums may differ from those of `update` in their last bits.

        Parameters
        ----------
        pool : ThreadPool
        labels : float32[n], 0 or 1
        margins : float64[n]
        weights : float32[n], optional

        Returns
        -------
        float
            The weighted sum of the losses.

        Raises
        ------
        ValueError
            As of `update`. Nothing was counted.
        """
        if weights is not None:
            self._counts = self._counts.astype(np.float64, copy=False)
        found = _core.count_margins(margins, labels, weights, LIMIT, self._counts, pool) if len(labels) else None
        if found is None:
            return self.update(labels, margins, weights)  # an error, if a margin is NaN
        loss, probability, weight, positive_weight, low, high = found
        self._use(low, high)
        self._add(len(labels), weight, positive_weight, loss, probability)
        return loss

    def _check_mergeable(self, other: Self) -> None:
        if other.bits != self.bits:
            raise ValueError(f"bits are {self.bits} and {other.bits}: only histograms with equal bits merge")

    def merge(self, other: Self) -> None:
        """Add what ``other`` counted, as if its examples had been counted here.

        Raises
        ------
        ValueError
            Its histogram has other bins. Nothing has been added.
        """
        super().merge(other)
        self._counts = self._counts + other._counts
        if other._used:
            self._use(other._used[0], other._used[-1])

    def empty(self) -> Self:
        """Return an accumulator that has counted nothing and merges with this one."""
        return type(self)(self.bits)

    @property
    def bins(self) -> range:
        """The bins of each class in use: all others of `histogram` are 0."""
        return self._used

    def _totals(self) -> list[int]:
        return [*super()._totals(), int(self._counts.dtype != np.int64), self.examples - self.unplaced]

    def histogram(self) -> Integers:
        """Return the counts, negatives then positives: int64[2, 2, 2**bits] as one vector; see the module of streams.

        A fraction is rounded down to a multiple of 2^-40, and a count above 2^53 is given as 2^53.
        """
        out = np.zeros((2, 2, 1 << self.bits), np.int64)
        used = slice(self._used.start, self._used.stop)
        counts = self._counts.reshape(2, -1)[:, used]
        if counts.dtype == np.int64:
            out[0, :, used] = counts
        else:
            counts = np.minimum(counts, _MOST_WHOLE)
            out[0, :, used] = counts
            counts -= out[0, :, used]
            counts *= 1 << _FRACTION_BITS
            out[1, :, used] = counts
        return out.reshape(-1)

    def take(self, totals: Integers, histogram: Integers) -> None:
        """Become the merge of the accumulators whose totals and histograms were added: see `StreamMetrics.take`."""
        super().take(totals, histogram)
        count = len(self._totals())
        weighted, placed = totals[count - 2 : count].tolist()
        self.unplaced = self.examples - placed
        units, fractions = histogram.reshape(2, -1)
        self._counts = units + fractions / (1 << _FRACTION_BITS) if weighted or fractions.any() else units.copy()
        bins = np.flatnonzero(self._counts.reshape(2, -1).any(axis=0))
        self._used = range(int(bins[0]), int(bins[-1]) + 1) if len(bins) else range(0)

    @property
    def probability_sum(self) -> float:
        """Weighted sum of the predicted probabilities so far."""
        return float(self._probability)

    @property
    def calibration(self) -> float:
        """Sum of labels over sum of predicted probabilities so far."""
        return ratio(float(self._positive_weight), float(self._probability))

    @property
    def base_rate(self) -> float:
        """Share of positive labels so far."""
        return ratio(float(self._positive_weight), float(self._weight))

    @property
    def auc(self) -> float:
        """AUC with the examples of a bin as ties; NaN while there is one class only."""
        return self._auc()[1]

    @property
    def auc_lower(self) -> float:
        """Lower bound of the exact AUC."""
        return self._auc()[0]

    @property
    def auc_upper(self) -> float:
        """Upper bound of the exact AUC."""
        return self._auc()[2]

    @property
    def auc_error(self) -> float:
        """Maximum error of ``auc``: half the distance of the bounds."""
        lower, _, upper = self._auc()
        return (upper - lower) / 2

    @property
    def quality(self) -> float:
        """The AUC."""
        return self.auc

    @property
    def relative_loss(self) -> float:
        """The normalized entropy: log-loss over that of always predicting the base rate."""
        return self.result().normalized_entropy

    def result(self) -> Metrics:
        """Return the metrics so far; the AUC is the one within ``auc_error``."""
        return Metrics(
            logloss=self.logloss,
            auc=self.auc,
            calibration=self.calibration,
            examples=self.examples,
            base_rate=self.base_rate,
            weight=self.weight,
        )

    def curves(self) -> Curves:
        """Return the calibration by decile and the ROC curve so far.

        The examples of a bin are placed at its middle, at most half a bin, 2^(4 - bits), from their margins: predicted
        odds are within a factor of exp(2^(4 - bits)), 1.00025 by default, of the exact ones. Margins outside of
        [-16, 16) are placed in the middle of the first or the last bin.
        """
        ordered = self._ordered()
        return ordered.curves(probabilities(ordered.scores))

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a JSON value; bins without examples are left out."""
        filled = np.flatnonzero(self._counts)
        return {
            "kind": self.kind,
            "version": _VERSION,
            "bits": self.bits,
            "examples": self.examples,
            "unplaced": self.unplaced,
            "weighted": self._counts.dtype != np.int64,
            "sums": {name: exact.to_text() for name, exact in zip(_SUMS, self._sums(), strict=True)},
            "bins": filled.tolist(),
            "counts": self._counts[filled].tolist(),
        }

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> Self:
        """Make the accumulator that `to_dict` described; equal to the bit.

        Raises
        ------
        ValueError
            It is not a description of an accumulator, or has an unknown version.
        """
        check_described(described, cls.kind, _VERSION)
        try:
            out = cls(whole_number(described["bits"], "bits"))
            out.examples = whole_number(described["examples"], "examples")
            out.unplaced = whole_number(described["unplaced"], "unplaced")
            out._set_sums([ExactSum.from_text(described["sums"][name]) for name in _SUMS])
            where, what = np.asarray(described["bins"]), np.asarray(described["counts"])
            dtype = np.dtype(np.float64 if described["weighted"] else np.int64)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this description of {cls.kind} lacks something ({error!r}): {REMEDY}") from None
        if len(where.shape) != 1 or where.shape != what.shape:
            raise ValueError(f"bins {where.shape} and counts {what.shape}: {REMEDY}")
        if len(where):
            if where.dtype != np.int64 or where[0] < 0 or where[-1] >= len(out._counts) or np.any(np.diff(where) <= 0):
                raise ValueError(f"bins are whole numbers from 0 to {len(out._counts) - 1}, ascending: {REMEDY}")
            if what.dtype.kind not in dtype.kind + "i" or not np.all((what > 0) & (what < np.inf)):
                raise ValueError(f"counts are {dtype} above 0: {REMEDY}")
        if not described["weighted"] and int(what.sum()) != out.examples - out.unplaced:
            raise ValueError(f"examples is {out.examples}, but {int(what.sum())} are counted: {REMEDY}")
        out._counts = out._counts.astype(dtype, copy=False)
        if len(where):
            out._counts[where] = what
            bins = where % (1 << out.bits)
            out._use(int(bins.min()), int(bins.max()))
        return out

    def _add(self, examples: int, weight: float, positive_weight: float, loss: float, probability: float) -> None:
        """Add the number and the sums of some examples."""
        self.examples += examples
        self._weight.add(weight)
        self._positive_weight.add(positive_weight)
        self._loss.add(loss)
        self._probability.add(probability)

    def _use(self, low: int, high: int) -> None:
        """Widen what is used to the bins from ``low`` to ``high``."""
        used = self._used or range(low, high + 1)
        self._used = range(min(used.start, low), max(used.stop, high + 1))

    def _sums(self) -> tuple[ExactSum, ...]:
        return self._weight, self._positive_weight, self._loss, self._probability

    def _set_sums(self, sums: Sequence[ExactSum]) -> None:
        self._weight, self._positive_weight, self._loss, self._probability = sums

    def _auc(self) -> tuple[float, float, float]:
        negative, positive = self._counts.reshape(2, -1)[:, self._used.start : self._used.stop]
        return auc_bounds(positive, negative)

    def _ordered(self) -> ScoreGroups:
        """Return the bins with anything in them, each at its middle."""
        negative, positive = self._counts.reshape(2, -1)[:, self._used.start : self._used.stop]
        filled = np.flatnonzero(negative + positive)
        middles = np.asarray((filled + (self._used.start + 0.5)) * (2 * LIMIT / (1 << self.bits)) - LIMIT, np.float64)
        return ScoreGroups(middles, positive[filled], negative[filled])


def _is_array(given: npt.ArrayLike, dtype: type[Scalar]) -> TypeGuard[npt.NDArray[Scalar]]:
    return isinstance(given, np.ndarray) and given.dtype == dtype and given.ndim == 1 and given.flags.c_contiguous
