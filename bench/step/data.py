"""Batches of ids for whole steps of a click model; NumPy alone, so that every side can draw them.

    deepfm, dcnv2    26 fields of categories
    din              8 fields; two sequences of 0 to 30 items, whose rows are those of field 0; two lists of 1 to 9
                     items, with rows of their own, the last two tenths

All ids are below `ROWS`; those of a field are drawn by Zipf's law (draw.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ctr.draw import BATCH, EXPONENT

ROWS = 1_000_000
DIM = 16
HIDDEN = (400, 400, 400)
ATTENTION = (80, 40)
FIELDS = {"deepfm": 26, "dcnv2": 26, "din": 8}
SEQUENCES, LISTS = ("clicked", "bought"), ("tags", "topics")
LONGEST = {"clicked": 30, "bought": 30, "tags": 9, "topics": 9}

Ids = npt.NDArray[np.int64]
_SPREAD = 7_368_787


@dataclass(frozen=True, slots=True)
class Example:
    """A batch: ids int64[n, fields], items by name (keys int64[nnz], offsets int64[n + 1]), labels float32[n]."""

    ids: Ids
    items: dict[str, tuple[Ids, Ids]]
    labels: npt.NDArray[np.float32]


def each(model: str) -> int:
    """Return the rows of a field, or of a list."""
    return ROWS // (FIELDS[model] + (2 if model == "din" else 0))


def place(model: str, name: str) -> int:
    """Return the field whose rows a sequence or a list has; those of lists are behind the others."""
    return FIELDS[model] + LISTS.index(name) if name in LISTS else 0


def batch(model: str, number: int) -> Example:
    """Draw a batch; the same number gives the same batch."""
    random = np.random.default_rng([11, number])
    size = each(model)

    def draw(count: int | tuple[int, int]) -> Ids:
        return random.zipf(EXPONENT, count) % size * _SPREAD % size

    ids = draw((BATCH, FIELDS[model])) + np.arange(FIELDS[model]) * size
    items: dict[str, tuple[Ids, Ids]] = {}
    for name in (*SEQUENCES, *LISTS) if model == "din" else ():
        lengths = random.integers(1 if name in LISTS else 0, LONGEST[name] + 1, BATCH)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        items[name] = (draw(int(offsets[-1])) + place(model, name) * size, offsets)
    margin = ((ids * 2_654_435_761 >> 7) % 1000 / 1000 - 0.5).sum(axis=1)
    labels = (random.random(BATCH) < 1 / (1 + np.exp(1 - margin))).astype(np.float32)
    return Example(ids, items, labels)
