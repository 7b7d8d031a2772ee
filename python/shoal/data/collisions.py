"""Collisions: which texts of a sample share a key, and how many would with fewer bits.

    64 bits    two texts share a key with the probability of two equal random numbers; those of the sample are found
    b bits     hash tables of 2^b rows, as in other systems: keys are assigned to 2^b cells, and those that share a
               cell are counted

Threads: an audit is one pass over a reader, from any thread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.data.names import FeatureNames, Spelled
from shoal.data.reader import Reader
from shoal.data.spelling import Texts, text_at

EXAMPLES = 100_000
BITS = (18, 22, 24)


class CellCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A sample's features in a table of 2^bits rows."""

    bits: int
    # Distinct features that share their row with another one.
    sharing: int
    # Their share of the distinct features.
    distinct_share: float
    # Their share of all features, each as often as it occurs.
    feature_share: float
    # What `distinct_share` is expected to be: 1 - (1 - 2^-bits)^(n - 1) of n distinct features.
    expected_share: float


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What `audit` found in a sample.

    Attributes
    ----------
    examples, features : int
        That were read; a feature counts as often as it occurs.
    texts : int
        Distinct texts: a category in its column, a name in its namespace.
    keys : int
        Distinct keys.
    shared : dict of int to tuple of str
        Keys that several texts have, and the texts.
    expected : float
        Pairs of texts that are expected to share a key of 64 bits: n (n - 1) / 2^65.
    cells : tuple of CellCounts
        For each number of bits that was asked for.
    """

    examples: int
    features: int
    texts: int
    keys: int
    shared: dict[int, tuple[str, ...]]
    expected: float
    cells: tuple[CellCounts, ...]


class _CollisionFinder(FeatureNames):
    """Names that remember every text of a key, not the first alone."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)
        self.others: dict[int, set[str]] = {}

    def spelled(self, keys: npt.NDArray[np.uint64], names_of: Callable[[npt.NDArray[np.uint32]], Texts]) -> Spelled:
        """Spell the names of all keys."""
        return np.ascontiguousarray(keys), names_of(np.arange(len(keys), dtype=np.uint32))

    def add_spelled(self, spelled: Spelled) -> None:
        """Add names, and remember other texts of keys that have one."""
        super().add_spelled(spelled)
        if spelled is not None:
            keys, texts = spelled
            with self._lock:
                for i in self._texts.differing(keys, *texts).tolist():
                    self.others.setdefault(int(keys[i]), set()).add(text_at(texts, i))


def audit(reader: Reader, *, examples: int | None = EXAMPLES, bits: Sequence[int] = BITS) -> Audit:
    r"""Look for texts that share a key in a sample of the data.

    Parameters
    ----------
    reader : Reader
        Read from its beginning. Its own names are left alone.
    examples : int, optional
        Examples to read, rounded up to whole batches; None: all.
    bits : sequence of int
        1 to 63: for each, how many features would share a row in a table of 2^bits rows.

    Returns
    -------
    Audit

    Raises
    ------
    ValueError
        ``examples`` or ``bits`` is out of range; a malformed line.

    Notes
    -----
    Holds every distinct text, and 8 bytes for each feature. Takes about 40 microseconds for an example of Criteo's
    logs. More data has more distinct features, of which more share a key: the result for a sample is a lower bound for
    all data.

    Examples
    --------
    >>> import pathlib, tempfile, shoal
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "ads.csv")
    ...     _ = path.write_text("click,site\n1,a.com\n0,b.com\n0,c.com\n")
    ...     found = audit(shoal.read_csv(path, label="click"), bits=[1])
    >>> found.texts, found.keys, found.shared, found.cells[0].sharing
    (3, 3, {}, 3)
    """
    if examples is not None and examples < 1:
        raise ValueError(f"examples is {examples}: pass 1 or more, or None for all")
    for some in bits:
        if not 1 <= some <= 63:
            raise ValueError(f"bits holds {some}: pass 1 to 63")
    witness = _CollisionFinder()
    read = 0
    parts = [np.empty(0, np.uint64)]
    for batch in reader.with_names(witness):
        read += len(batch)
        parts.append(batch.keys)
        if examples is not None and read >= examples:
            break
    keys, counts = np.unique(np.concatenate(parts), return_counts=True)
    # The pass may have read ahead: only batches that were returned count.
    seen = set(keys.tolist())
    shared = {key: tuple(sorted({witness[key], *texts})) for key, texts in witness.others.items() if key in seen}
    texts = len(keys) + sum(len(several) - 1 for several in shared.values())
    return Audit(
        examples=read,
        features=int(counts.sum()),
        texts=texts,
        keys=len(keys),
        shared=dict(sorted(shared.items())),
        expected=texts * (texts - 1) / 2.0**65,
        cells=tuple(_cells(keys, counts, some) for some in bits),
    )


def _cells(keys: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64], bits: int) -> CellCounts:
    if len(keys) == 0:
        return CellCounts(bits=bits, sharing=0, distinct_share=0.0, feature_share=0.0, expected_share=0.0)
    _, cell, size = np.unique(_core.mix(keys) >> np.uint64(64 - bits), return_inverse=True, return_counts=True)
    shares = size[cell] > 1
    return CellCounts(
        bits=bits,
        sharing=int(shares.sum()),
        distinct_share=float(shares.mean()),
        feature_share=float(counts[shares].sum() / counts.sum()),
        expected_share=-math.expm1((len(keys) - 1) * math.log1p(-(2.0**-bits))),
    )
