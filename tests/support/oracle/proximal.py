"""Logistic regression with an L1 penalty on dense float64 arrays, by plain proximal gradient with momentum (FISTA)."""

from __future__ import annotations

import numpy as np


def losses(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(a, 0) - a * y + np.log1p(np.exp(-np.abs(a)))


def gradient(x: np.ndarray, y: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    p = 1 / (1 + np.exp(-(x @ w)))
    return x.T @ (v * (p - y))


def objective(x: np.ndarray, y: np.ndarray, v: np.ndarray, w: np.ndarray, l1: float) -> float:
    return float(np.sum(v * losses(x @ w, y)) + l1 * np.sum(np.abs(w)))


def violations(x: np.ndarray, y: np.ndarray, v: np.ndarray, w: np.ndarray, l1: float) -> np.ndarray:
    """How far each weight is from the optimum's conditions."""
    g = gradient(x, y, v, w)
    return np.where(w == 0, np.maximum(np.abs(g) - l1, 0), np.abs(g + l1 * np.sign(w)))


def optimum(x: np.ndarray, y: np.ndarray, v: np.ndarray, l1: float, steps: int = 20000) -> np.ndarray:
    """The minimiser, to about 1e-9 in every condition."""
    step = 4 / np.linalg.norm(x.T * v @ x, 2)
    w = seen = np.zeros(x.shape[1])
    t = 1.0
    for n in range(steps):
        moved = seen - step * gradient(x, y, v, seen)
        new = np.sign(moved) * np.maximum(np.abs(moved) - step * l1, 0)
        if np.dot(seen - new, new - w) > 0:  # O'Donoghue and Candes: start the momentum again
            t = 1.0
        after = (1 + np.sqrt(1 + 4 * t * t)) / 2
        seen = new + (t - 1) / after * (new - w)
        w, t = new, after
        if n % 50 == 0 and np.max(violations(x, y, v, w, l1)) < 1e-9:
            break
    return w
