"""Metrics of predictions: log-loss, AUC, calibration, normalized entropy; exact, per group, and of streams.

    margin a, label y in {0, 1}, weight v >= 0          p = 1 / (1 + e^-a)

    logloss       sum v (max(a, 0) - a y + log1p(e^-|a|)) / sum v              nats per example, 0 is perfect
    auc           P(a positive's margin > a negative's), ties count 1/2        1 is perfect, 0.5 is a coin
    calibration   sum v y / sum v p                                            1 is right, above it p is too low
    NE            logloss / H(mean y), H(q) = -q ln q - (1 - q) ln(1 - q)      1 is the best constant prediction
    GAUC          sum n_u AUC_u / sum n_u over the groups u with both classes  for example the AUC of each user

Everything is computed from *margins* (log-odds) in float64: a float32 probability is 1 from a margin of 17 on, where
its logarithm is lost and different margins become ties.

    exact.py         what needs all margins at once: measure, auc, gauc, ...
    ordered.py       examples of equal score as one group: what AUC, the ROC curve and the deciles are computed from
    stream.py        StreamMetrics: metrics in constant memory, mergeable
    accumulator.py   of two classes, the AUC between two bounds
    multiclass.py    of several classes: log-loss and accuracy
    described.py     accumulators from their descriptions
    progressive.py   when to print progressive metrics, as Vowpal Wabbit does

docs/metrics.md has every formula with its source.

Threads: functions are pure; one accumulator belongs to one thread at a time.
"""

from shoal.metrics.accumulator import Accumulator
from shoal.metrics.described import accumulator_from_dict
from shoal.metrics.exact import (
    GroupedAUC,
    Metrics,
    auc,
    calibration,
    curves,
    gauc,
    logit,
    logloss,
    measure,
    measure_with_curves,
    probabilities,
)
from shoal.metrics.multiclass import MulticlassAccumulator
from shoal.metrics.ordered import Curves, Decile
from shoal.metrics.progressive import Progressive, ProgressiveLine
from shoal.metrics.stream import StreamMetrics

__all__ = [
    "Accumulator",
    "Curves",
    "Decile",
    "GroupedAUC",
    "Metrics",
    "MulticlassAccumulator",
    "Progressive",
    "ProgressiveLine",
    "StreamMetrics",
    "accumulator_from_dict",
    "auc",
    "calibration",
    "curves",
    "gauc",
    "logit",
    "logloss",
    "measure",
    "measure_with_curves",
    "probabilities",
]
