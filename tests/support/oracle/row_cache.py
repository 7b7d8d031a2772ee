"""A worker's cache of rows, slow and simple: the twin of ``_core.RowCache``, with the same interface.

Entries are objects in lists, sums are added up one number at a time, and nothing is prefetched or packed. Local
steps are those of SGD.
"""

from dataclasses import dataclass

import numpy as np

WAYS = 8
MAX_USES = 15
PATIENCE = 8


@dataclass(eq=False)
class Entry:
    hash: int
    uses: int = 0
    copy: np.ndarray | None = None
    clocks: int = 0
    reader: int = 0
    sum: np.ndarray | None = None
    count: int = 0
    since: int = 0
    row: np.ndarray | None = None  # with local steps: what the copy is, or was
    base: np.ndarray | None = None  # the row when its last change was sent
    changed: bool = False


class RowCache:
    def __init__(self, rows, dim, counted, rate):
        self.dim, self.counted = dim, counted
        self.rate = None if rate is None else np.float32(rate)
        self.buckets = [[None] * WAYS for _ in range(-(-rows // WAYS))]
        self.hands = [0] * len(self.buckets)
        self.refused = [0] * len(self.buckets)

    @property
    def sums(self):
        return sum(map(self.has_sum, self.entries()))

    @staticmethod
    def has_sum(entry):
        return entry.changed or entry.sum is not None

    def entries(self):
        return [entry for bucket in self.buckets for entry in bucket if entry is not None]

    def find(self, hash):
        return next((e for e in self.buckets[hash * len(self.buckets) >> 64] if e is not None and e.hash == hash), None)

    def place(self, hash, taken):
        """Return a new entry; None: all others of the bucket are used more."""
        at = hash * len(self.buckets) >> 64
        bucket = self.buckets[at]
        way = bucket.index(None) if None in bucket else None
        if way is None:
            self.refused[at] += 1
        if self.refused[at] == PATIENCE:
            self.refused[at] = 0
            hand = self.hands[at]
            self.hands[at] = (hand + 1) % WAYS
            if bucket[hand].uses > 0:
                bucket[hand].uses -= 1
            elif not bucket[hand].reader:
                way = hand
                self.take(bucket[hand], taken)
        if way is None:
            return None
        bucket[way] = Entry(hash)
        return bucket[way]

    def take(self, entry, taken):
        """Move a sum, if there is one."""
        if entry.sum is not None:
            taken.append((entry.hash, entry.sum, entry.count))
            entry.sum = None
        if entry.changed:
            taken.append((entry.hash, entry.row - entry.base, entry.count))
            entry.base, entry.changed = entry.row.copy(), False

    def drop(self, entry):
        entry.copy, entry.reader = None, 0

    def is_new_enough(self, entry, clocks):
        return entry.copy is not None and entry.clocks >= clocks

    def packed(self, taken, slots):
        if not taken:
            return None
        taken = sorted(taken, key=lambda one: one[0])
        hashes = np.array([hash for hash, _, _ in taken], np.uint64)
        counts = np.array([count for _, _, count in taken], np.uint32) if self.counted else None
        return hashes, self.offsets(hashes, slots), np.array([grad for _, grad, _ in taken], np.float32), counts

    @staticmethod
    def offsets(hashes, slots):
        of = [hash * slots >> 64 for hash in hashes.tolist()]
        return np.array([sum(slot < end for slot in of) for end in range(slots + 1)], np.uint64)

    def read(self, hashes, clocks, reader, may_join, rows, slots):
        fetched, joined, readers, taken = [], [], set(), []
        for position, hash in enumerate(hashes.tolist()):
            entry = self.find(hash) or self.place(hash, taken)
            if entry is None:
                fetched.append(position)
                continue
            entry.uses = min(entry.uses + 1, MAX_USES)
            if self.is_new_enough(entry, clocks):
                rows[position] = entry.copy
            elif entry.reader and may_join:
                joined.append(position)
                readers.add(entry.reader)
            else:
                fetched.append(position)
                if not entry.reader:
                    self.take(entry, taken)
                    entry.copy, entry.reader = None, reader
        some = hashes[fetched] if fetched else hashes[:0]
        return (
            np.array(fetched, np.uint32), some, self.offsets(some, slots), np.array(joined, np.uint32), sorted(readers),
            self.packed(taken, slots),
        )  # fmt: skip

    def fill(self, hashes, reader, clocks, is_kept, rows):
        for position, hash in enumerate(hashes.tolist()):
            entry = self.find(hash)
            if entry is None:
                continue
            if is_kept and entry.reader == reader:
                entry.clocks, entry.reader = clocks, 0
                self.keep(entry, rows[position].copy())
            else:
                self.drop(entry)

    def keep(self, entry, row):
        entry.copy = row
        if self.rate is not None:
            entry.copy = entry.row = row + (entry.row - entry.base) if entry.changed else row
            entry.base = row.copy()

    def add(self, hashes, grads, counts, clock, slots):
        passed = []
        for position, hash in enumerate(hashes.tolist()):
            entry = self.find(hash)
            count = 1 if counts is None else int(counts[position])
            if entry is None or (self.rate is not None and entry.row is None):
                passed.append((hash, grads[position].copy(), count))
                if entry is not None:
                    self.drop(entry)
                continue
            entry.uses = min(entry.uses + 1, MAX_USES)
            if self.rate is not None:
                entry.count = min(entry.count + count, 2**32 - 1) if entry.changed else count
                entry.since = entry.since if entry.changed else clock
                entry.row -= self.rate * grads[position]
                entry.changed = True
            elif entry.sum is None:
                entry.sum, entry.count, entry.since = grads[position].copy(), count, clock
            else:
                for k in range(self.dim):
                    entry.sum[k] += grads[position][k]
                entry.count = min(entry.count + count, 2**32 - 1)
        return self.packed(passed, slots)

    def send(self, entries, slots, drop):
        taken = []
        for entry in entries:
            self.take(entry, taken)
            drop(entry)
        return self.packed(taken, slots)

    def outdate(self, entry):
        """Keep no answer that lacks what has just been sent."""
        entry.reader = 0

    def send_older(self, clock, slots):
        old = [entry for entry in self.entries() if self.has_sum(entry) and entry.since <= clock]
        return self.send(old, slots, self.drop if self.rate is None else self.outdate)

    def send_rows(self, hashes, slots):
        return self.send([entry for entry in map(self.find, hashes.tolist()) if entry is not None], slots, self.drop)

    def forget(self):
        for entry in self.entries():
            self.drop(entry)
            if not entry.changed:
                entry.row = entry.base = None

    def stats(self):
        return {"held": self.sums}

    def verify(self):
        return True
