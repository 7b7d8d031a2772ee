"""Admission and expiry of a table's rows, as dicts: what the rules of `shoal.lifecycle` must mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

import shoal
from oracle.hashing import mix
from oracle.optimizers import Rule
from oracle.table import DictTable, summed

MASK = 2**64 - 1


@dataclass
class Marks:
    """The record of a row's occurrences."""

    count: int
    clock: int
    score: np.float32


class LivingTable(DictTable):
    """A `DictTable` of a store with ``slots``, whose keys are admitted and whose rows expire."""

    def __init__(
        self,
        dim: int,
        rule: Rule,
        initial: Callable[[int], np.ndarray],
        *,
        slots: int,
        admit: shoal.lifecycle.Admission | None = None,
        expire: Iterable[shoal.lifecycle.Expiry] = (),
    ):
        super().__init__(dim, rule, initial)
        self.slots = slots
        self.admit = admit
        self.expire = tuple(expire)
        self.marks: dict[int, Marks] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.refused = 0
        self.expired = {type(rule).__name__: 0 for rule in self.expire}
        self.clock = 0

    # ---- what rows and slots have ----

    def slot(self, key: int) -> int:
        return mix(key) * self.slots >> 64

    def share(self, total: int, slot: int) -> int:
        return total // self.slots + (slot < total % self.slots)

    def in_slot(self, keys: Iterable[int], slot: int) -> list[int]:
        return [key for key in keys if self.slot(key) == slot]

    @property
    def decay(self) -> float:
        return next((rule.decay for rule in self.expire if isinstance(rule, shoal.DecayedScore)), 1.0)

    def score(self, key: int) -> float:
        marks = self.marks[key]
        return float(marks.score) * self.decay ** (self.clock - marks.clock)

    def norm(self, key: int) -> float:
        return float(np.sqrt(np.sum(np.asarray(self.rule.weights(self.rows[key]), np.float32).astype(np.float64) ** 2)))

    def rank(self, rule: shoal.lifecycle.Expiry, key: int) -> tuple[float, int]:
        """Rows with lower values are dropped first."""
        first = self.marks[key].count if rule.keep == "frequent" else self.marks[key].clock
        return first, mix(key)

    # ---- admission ----

    def admits(self, key: int, count: int) -> bool:
        rule = self.admit
        if rule is None:
            return True
        if isinstance(rule, shoal.WithProbability):
            shared = mix(rule.seed ^ mix(self.step)) ^ mix(key)
            return any((mix((shared + j) & MASK) >> 11) * 2.0**-53 < rule.p for j in range(count))
        assert isinstance(rule, shoal.AfterCount)
        before, clock = self.waiting.get(key, (0, self.clock))
        if rule.within is not None and self.clock - clock > rule.within:
            before = 0
        if before + count >= rule.n:
            self.waiting.pop(key, None)
            return True
        if key not in self.waiting and rule.capacity is not None:
            share = self.share(rule.capacity, self.slot(key))
            waiting = self.in_slot(self.waiting, self.slot(key))
            if len(waiting) >= share:
                waiting.sort(key=lambda other: (self.waiting[other][1], mix(other)))
                for other in waiting[: max(1, len(waiting) // 8)]:
                    del self.waiting[other]
        self.waiting[key] = before + count, self.clock
        return False

    # ---- calls ----

    def see(self, key: int, count: int) -> None:
        if key not in self.marks:
            self.marks[key] = Marks(0, self.clock, np.float32(0))
        marks = self.marks[key]
        marks.score = np.float32(float(marks.score) * self.decay ** (self.clock - marks.clock) + count)
        marks.count += count
        marks.clock = self.clock

    def push(self, keys: Iterable[int], grads: np.ndarray, counts: dict[int, int] | None = None) -> None:
        keys = [int(key) for key in keys]
        counts = counts or {key: keys.count(key) for key in keys}
        grad_of = summed(keys, grads)
        admitted: dict[int, np.ndarray] = {}
        self.step += 1
        for key in sorted(grad_of, key=mix):
            if key in self.rows or self.admits(key, counts[key]):
                admitted[key] = grad_of[key]
            else:
                self.refused += counts[key]
                self.nonfinite_rows += not np.all(np.isfinite(grad_of[key]))
        self.step -= 1
        super().push(admitted.keys(), np.array(list(admitted.values()), np.float32).reshape(len(admitted), self.dim))
        for key in admitted:
            self.see(key, counts[key])
        self.hold({self.slot(key) for key in grad_of})

    def assign(self, keys: Iterable[int], rows: np.ndarray) -> None:
        keys = [int(key) for key in keys]
        super().assign(keys, rows)
        for key in keys:
            self.waiting.pop(key, None)
            self.see(key, 1)
        self.hold({self.slot(key) for key in keys})

    def erase(self, keys: Iterable[int]) -> int:
        keys = [int(key) for key in keys]
        for key in keys:
            self.marks.pop(key, None)
        return super().erase(keys)

    def drop(self, rule: shoal.lifecycle.Expiry, keys: Iterable[int]) -> int:
        gone = self.erase(keys)
        self.expired[type(rule).__name__] += gone
        return gone

    def hold(self, slots: set[int]) -> None:
        """At the end of a push, slots beyond their share of rows give an eighth of it up."""
        for rule in self.expire:
            for slot in slots if isinstance(rule, shoal.MaxRows) else ():
                share, rows = self.share(rule.rows, slot), self.in_slot(self.rows, slot)
                if len(rows) > share:
                    rows.sort(key=lambda key, rule=rule: self.rank(rule, key))
                    self.drop(rule, rows[: len(rows) - (share - share // 8)])

    def expires(self, rule: shoal.lifecycle.Expiry, key: int) -> bool:
        if isinstance(rule, shoal.TimeToLive):
            return self.clock - self.marks[key].clock > rule.clocks
        if isinstance(rule, shoal.DecayedScore):
            return self.score(key) < rule.floor
        return isinstance(rule, shoal.MinNorm) and self.norm(key) < rule.floor

    def sweep(self) -> list[int]:
        """Drop what the rules name: how many rows by each."""
        gone: dict[int, list[int]] = {k: [] for k in range(len(self.expire))}
        for key in self.rows:
            first = next((k for k, rule in enumerate(self.expire) if self.expires(rule, key)), None)
            if first is not None:
                gone[first].append(key)
        dropped = [self.drop(rule, gone[k]) for k, rule in enumerate(self.expire)]
        for k, rule in enumerate(self.expire):
            for slot in range(self.slots) if isinstance(rule, shoal.MaxRows) else ():
                rows = sorted(self.in_slot(self.rows, slot), key=lambda key, rule=rule: self.rank(rule, key))
                dropped[k] += self.drop(rule, rows[: max(0, len(rows) - self.share(rule.rows, slot))])
        if isinstance(self.admit, shoal.AfterCount) and self.admit.within is not None:
            within = self.admit.within
            self.waiting = {key: seen for key, seen in self.waiting.items() if self.clock - seen[1] <= within}
        return dropped
