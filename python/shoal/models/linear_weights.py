"""LinearWeights: reading the weights of a model that has one linear weight for each key, or one for each class.

Threads: reads only; safe while another thread learns, each slot as it was at some batch boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import overload

import numpy as np
import numpy.typing as npt

from shoal.models.learner import Floats
from shoal.models.scales import Scales
from shoal.table.table import Table

# The key of the bias: the first eight bytes of SHA-256 of "shoal bias". A small or a round number would be more likely
# to be the key of a feature, which would then share its row.
BIAS_KEY = 0x1208DA918DB99F36


# Of rows of one weight, so many are found without reading the others: each slot answers with as many.
_MOST_FOUND = 1000


class LinearWeights:
    """The linear weights of a model: its first table, the bias among them, and its table of scales."""

    _tables: tuple[Table, ...]
    _has_bias: bool
    _is_normalized: bool

    @property
    def table(self) -> Table:
        """The table of the linear weights: one row per key."""
        return self._tables[0]

    @property
    def _scales(self) -> Scales | None:
        return Scales(self._tables[-1]) if self._is_normalized else None

    @property
    def bias(self) -> float:
        """Weight of the constant feature; 0 in a model without one."""
        return float(self._bias_row()[0])

    def _bias_row(self) -> npt.NDArray[np.float32]:
        if not self._has_bias:
            return np.zeros(self.table.dim, np.float32)
        row: npt.NDArray[np.float32] = self.table.pull(np.array([BIAS_KEY], np.uint64))[0]
        return row

    def _weights_in(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the linear weights in rows of the table, float32[k] or float32[k, K]."""
        return rows[:, 0]

    def _nonzero(self) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
        """Yield keys whose weights are not all 0, without the bias; their weights, and the largest absolute value."""
        for keys, rows in self.table.items():
            weights = self._weights_in(rows)
            sizes = np.abs(weights.reshape(len(keys), -1)).max(axis=1)
            kept = sizes != 0
            if self._has_bias:
                kept &= keys != np.uint64(BIAS_KEY)
            yield keys[kept], weights[kept], sizes[kept]

    def count_nonzero(self) -> int:
        """Count the linear weights that are not zero, without the bias.

        Where a row has one weight, the process that holds the rows counts them; otherwise they are read.
        """
        if self._weights_in(np.empty((0, self.table.dim), np.float32)).ndim == 1:
            return self.table.count() - (self.bias != 0)
        return sum(int(np.count_nonzero(weights)) for _, weights, _ in self._nonzero())

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        """Read all linear weights that are not zero, without the bias.

        Returns
        -------
        keys : uint64[k]
            In hash order.
        weights : float32[k] or float32[k, K]
            Of several classes, those of each; not all of a row are zero.

        Notes
        -----
        Uses 12 bytes for each weight. With l1 > 0 most rows read zero: their state is kept for further learning. The
        weights of a normalized model apply to x divided by its scale: see `scales`.
        """
        keys, weights = [np.empty(0, np.uint64)], [self._weights_in(np.empty((0, self.table.dim), np.float32))]
        for some_keys, some_weights, _ in self._nonzero():
            keys.append(some_keys)
            weights.append(some_weights)
        return np.concatenate(keys), np.concatenate(weights)

    def scales(self) -> tuple[npt.NDArray[np.uint64], Floats]:
        """Read the numbers by which a normalized model divides the values of features; other keys have scale 1.

        Returns
        -------
        keys : uint64[k]
            In hash order.
        scales : float64[k]
            Above 0; none of a model that is not normalized.
        """
        scales = self._scales
        return (np.empty(0, np.uint64), np.empty(0)) if scales is None else scales.items()

    @overload
    def top(self, n: int = 20) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]: ...

    @overload
    def top(self, n: int = 20, *, names: Mapping[int, str]) -> tuple[list[str], npt.NDArray[np.float32]]: ...

    def top(
        self, n: int = 20, *, names: Mapping[int, str] | None = None
    ) -> tuple[npt.NDArray[np.uint64] | list[str], npt.NDArray[np.float32]]:
        """Read the linear weights of largest absolute value, without the bias; of several classes the largest rows.

        Parameters
        ----------
        n : int
            Greatest number of features.
        names : mapping of int to str, optional
            Names of features by their keys, such as `shoal.data.FeatureNames`.

        Returns
        -------
        keys : uint64[k], or list of str
            With ``names`` the name of each key; the number of a key without a name.
        weights : float32[k] or float32[k, K]
            The largest absolute value first; of equal ones the smaller key first. Of several classes those of each, by
            the largest of them.

        Raises
        ------
        ValueError
            ``n`` is negative.

        Notes
        -----
        Up to 1000 rows of one weight are found by the process that holds them. Otherwise every row is read; ``n`` rows
        and a block of 65536 are held at a time.
        """
        if n < 0:
            raise ValueError(f"n is {n}: pass 0 or more")
        keys, weights = self._top_of_norms(n) if self.table.dim == 1 and n <= _MOST_FOUND else self._top_of_rows(n)
        if names is None:
            return keys, weights
        return [names.get(key, str(key)) for key in keys.tolist()], weights

    def _top_of_norms(self, n: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        keys, norms = self.table.topk(n + 1)  # one more: the bias
        kept = norms != 0
        if self._has_bias:
            kept &= keys != np.uint64(BIAS_KEY)
        keys = keys[kept][:n]
        return keys, self._weights_in(self.table.pull(keys))

    def _top_of_rows(self, n: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        keys, sizes = np.empty(0, np.uint64), np.empty(0, np.float32)
        weights = self._weights_in(np.empty((0, self.table.dim), np.float32))
        for some_keys, some_weights, some_sizes in self._nonzero():
            keys, weights = np.concatenate([keys, some_keys]), np.concatenate([weights, some_weights])
            sizes = np.concatenate([sizes, some_sizes])
            order = np.lexsort((keys, -sizes))[:n]
            keys, weights, sizes = keys[order], weights[order], sizes[order]
        return keys, weights
