"""The metrics as they are defined: one pair, one group, one example at a time, summed without rounding."""

import math


def auc(labels, scores, weights=None, tied=0.5):
    """Every (positive, negative) pair: 1 if in order, ``tied`` if equal, times the product of the weights."""
    weights = [1.0] * len(labels) if weights is None else weights
    examples = list(zip(labels, scores, weights, strict=True))
    won, pairs = [], []
    for y, s, w in examples:
        for z, t, v in examples:
            if y == 1 and z == 0:
                pairs.append(w * v)
                won.append(w * v * (1.0 if s > t else tied if s == t else 0.0))
    return math.fsum(won) / math.fsum(pairs) if math.fsum(pairs) > 0 else math.nan


def probability(margin):
    """Of label 1."""
    return 1 / (1 + math.exp(-margin)) if margin >= 0 else math.exp(margin) / (1 + math.exp(margin))


def loss(label, margin):
    """Log-loss of one example."""
    return max(margin, 0.0) - margin * label + math.log1p(math.exp(-abs(margin)))


def mean(values, weights):
    """Weighted mean."""
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def gauc(labels, scores, groups, weights=None):
    """(GAUC, groups with both classes, groups without)."""
    weights = [1.0] * len(labels) if weights is None else weights
    sums, total, left_out = [], [], 0
    for group in sorted(set(groups)):
        mine = [i for i, g in enumerate(groups) if g == group and weights[i] > 0]
        if not mine:
            continue
        value = auc(*([column[i] for i in mine] for column in (labels, scores, weights)))
        if math.isnan(value):
            left_out += 1
        else:
            sums.append(value * math.fsum(weights[i] for i in mine))
            total.append(math.fsum(weights[i] for i in mine))
    return (math.fsum(sums) / math.fsum(total) if total else math.nan), len(total), left_out


def deciles(labels, margins, weights=None, count=10):
    """[(weight, mean probability, mean label)] of equal predictions put by their middle into tenths of the weight."""
    weights = [1.0] * len(labels) if weights is None else weights
    examples = sorted(zip(margins, labels, weights, strict=True))
    total = math.fsum(weights)
    parts = {}
    seen = 0.0
    for margin in sorted({a for a, _, w in examples if w > 0}):
        tied = [(y, w) for a, y, w in examples if a == margin]
        mass = math.fsum(w for _, w in tied)
        part = min(int((seen + mass / 2) / total * count), count - 1)
        parts.setdefault(part, []).extend((margin, y, w) for y, w in tied)
        seen += mass
    return [
        (
            math.fsum(w for _, _, w in part),
            mean([probability(a) for a, _, _ in part], [w for _, _, w in part]),
            mean([y for _, y, _ in part], [w for _, _, w in part]),
        )
        for _, part in sorted(parts.items())
    ]
