"""Rules of other systems that have the name of a rule of shoal and differ, so that tests show the difference."""

from __future__ import annotations

import numpy as np


def keras_adagrad(w, g, n0=0.1, lr=0.1, eps=1e-7):
    """Keras keeps eps inside the root and starts n at 0.1. Yields the weight after every gradient."""
    n = n0
    for x in g:
        n += x * x
        w -= lr * x / np.sqrt(n + eps)
        yield w


def torch_dense_adam(w, g, lr=0.001, b1=0.9, b2=0.999, eps=1e-8):
    """torch.optim.Adam divides v by its bias correction before it adds eps; SparseAdam and TF add eps first."""
    m = v = 0.0
    for t, x in enumerate(g, 1):
        m = b1 * m + (1 - b1) * x
        v = b2 * v + (1 - b2) * x * x
        w -= lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        yield w


def paddle_sparse_adagrad(w, g, lr=0.05, g0=3.0):
    """Paddle's SparseAdaGrad: steps with the OLD sum, then adds the row's mean square. Yields (w, sum)."""
    w = np.array(w, np.float64)
    total = 0.0
    for x in np.asarray(g, np.float64):
        w = w - lr * x * np.sqrt(g0 / (g0 + total))
        total += np.mean(x * x)
        yield w, total


def keras_ftrl(w, g, lr=0.1, beta=0.0, l1=0.0, l2=0.0, n0=0.1):
    """Keras's FTRL and TF's op: z starts at 0 whatever the weight, the l2 term is doubled.

    Without beta it is TF's ApplyFtrl.
    """
    z, n = 0.0, n0
    for x in g:
        grown = n + x * x
        z += x - (np.sqrt(grown) - np.sqrt(n)) / lr * w
        n = grown
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + 2 * l2) if abs(z) > l1 else 0.0
        yield w
