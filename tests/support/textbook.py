"""Logistic regression as the paper prints it, and batches for it."""

import itertools
import math
import signal

import numpy as np

from oracle.optimizers import rule_of
from shoal import Batch


def make_batch(rng, n, *, keys=40, nnz=6, values=True):
    """Draw examples whose label depends on their keys; some have no feature, some have one twice."""
    counts = rng.integers(0, nnz + 1, n)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    drawn = rng.integers(0, keys, indptr[-1])
    x = rng.normal(1, 0.5, indptr[-1]).astype(np.float32) if values else None
    effect = np.sin(np.arange(keys) * 7.0)
    weight = effect[drawn] * (1 if x is None else x)
    margins = np.array([weight[a:b].sum() for a, b in itertools.pairwise(indptr)])
    labels = (rng.random(n) < 1 / (1 + np.exp(-2 * margins))).astype(np.float32)
    return Batch(labels, indptr, drawn.astype(np.uint64), x)


def cut(batch, size):
    """Cut a batch into batches of ``size`` examples."""
    out = []
    for a in range(0, len(batch), size):
        b = min(a + size, len(batch))
        some = slice(batch.indptr[a], batch.indptr[b])
        values = None if batch.values is None else batch.values[some]
        indptr = batch.indptr[a : b + 1] - batch.indptr[a]
        out.append(Batch(batch.labels[a:b], indptr, batch.keys[some], values))
    return out


class Textbook:
    """Online logistic regression in plain float64: one dict, one example after the other."""

    def __init__(self, optimizer, bias=True):
        self.rule = rule_of(optimizer)
        self.bias = bias
        self.states = {}
        self.step = 0

    def features(self, batch, i):
        entries = range(batch.indptr[i], batch.indptr[i + 1])
        found = [(int(batch.keys[e]), 1.0 if batch.values is None else float(batch.values[e])) for e in entries]
        return found + ([("bias", 1.0)] if self.bias else [])

    def weight(self, key):
        return self.rule.weights(self.states[key])[0] if key in self.states else 0.0

    def margins(self, batch):
        return [sum(self.weight(k) * x for k, x in self.features(batch, i)) for i in range(len(batch))]

    def learn(self, batch):
        gradient = {}
        for i, a in enumerate(self.margins(batch)):
            p = 1 / (1 + math.exp(-a))
            for key, x in self.features(batch, i):
                gradient[key] = gradient.get(key, 0.0) + (p - batch.labels[i]) * x
        self.step += 1
        for key, g in gradient.items():
            state = self.states.get(key) or self.rule.start(np.zeros(1))
            self.states[key] = self.rule.push(state, np.array([g]), self.step)


class PressesCtrlC:
    """Batches; in the middle of making one of them somebody presses Ctrl-C."""

    def __init__(self, batches, at, times=1, number=signal.SIGINT):
        self.batches, self.at, self.times, self.number = batches, at, times, number

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            for _ in range(self.times if i == self.at else 0):
                signal.raise_signal(self.number)
            yield batch
