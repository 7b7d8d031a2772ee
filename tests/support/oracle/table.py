"""A table as a dict of float64 rows: what every push, pull, assign and erase must mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from oracle.optimizers import Rule, State

Keys = Iterable[int]


def summed(keys: Keys, grads: np.ndarray) -> dict[int, np.ndarray]:
    """Sum the gradients of equal keys in order of occurrence, in float64, and round once to float32."""
    total: dict[int, np.ndarray] = {}
    for key, grad in zip(map(int, keys), np.asarray(grads, np.float32).astype(np.float64), strict=True):
        total[key] = total[key] + grad if key in total else grad
    with np.errstate(over="ignore"):
        return {key: grad.astype(np.float32) for key, grad in total.items()}


class DictTable:
    """One table. ``initial(key)`` gives the float weights that a key reads before its first push."""

    def __init__(self, dim: int, rule: Rule, initial: Callable[[int], np.ndarray]):
        self.dim = dim
        self.rule = rule
        self.initial = initial
        self.rows: dict[int, State] = {}
        self.step = 0
        self.nonfinite_rows = 0

    def fresh(self, key: int) -> State:
        return self.rule.start(np.asarray(self.initial(key), np.float64))

    def pull(self, keys: Keys) -> np.ndarray:
        rows = [self.rule.weights(self.state(key)) for key in map(int, keys)]
        return np.array(rows, np.float64).reshape(-1, self.dim)

    def push(self, keys: Keys, grads: np.ndarray) -> None:
        """Apply one step per unique key; a row that would not be finite stays whole and is counted."""
        self.step += 1
        for key, grad in summed(keys, grads).items():
            row = self.state(key)
            if np.all(np.isfinite(grad)):
                row = self.rule.push(row, grad, self.step)
            else:
                self.nonfinite_rows += 1
            self.rows[key] = row

    def assign(self, keys: Keys, rows: np.ndarray) -> None:
        """Set weights; what the rule remembers of a row that is there stays."""
        for key, row in zip(map(int, keys), np.asarray(rows, np.float64), strict=True):
            self.rows[key] = self.rule.assigned(self.state(key), row)

    def erase(self, keys: Keys) -> int:
        return sum(self.rows.pop(key, None) is not None for key in set(map(int, keys)))

    def contains(self, keys: Keys) -> list[bool]:
        return [int(key) in self.rows for key in keys]

    def state(self, key: int) -> State:
        return self.rows[key] if key in self.rows else self.fresh(key)

    def __len__(self) -> int:
        return len(self.rows)
