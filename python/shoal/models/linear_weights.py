"""LinearWeights: reading the weights of a model that has one linear weight for each key.

Threads: reads only; safe while another thread learns, each slot as it was at some batch boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import numpy as np
import numpy.typing as npt

from shoal.models.learner import Floats
from shoal.models.scales import Scales
from shoal.table.table import Table

__all__ = ["BIAS_KEY", "LinearWeights"]

# The key of the bias: the first eight bytes of SHA-256 of "shoal bias". A small or a round number would be more likely
# to be the key of a feature, which would then share its row.
BIAS_KEY = 0x1208DA918DB99F36


class LinearWeights:
    """The linear weights of a model: its first table, of dim 1, the bias among them, and its table of scales."""

    _tables: tuple[Table, ...]
    _has_bias: bool
    _is_normalized: bool

    @property
    def table(self) -> Table:
        """The table of the linear weights: one row per key, of dim 1."""
        return self._tables[0]

    @property
    def _scales(self) -> Scales | None:
        return Scales(self._tables[-1]) if self._is_normalized else None

    @property
    def bias(self) -> float:
        """Weight of the constant feature; 0 in a model without one."""
        if not self._has_bias:
            return 0.0
        return float(self.table.pull(np.array([BIAS_KEY], np.uint64))[0, 0])

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        """Read all linear weights that are not zero, without the bias.

        Returns
        -------
        keys : uint64[k]
            In hash order.
        weights : float32[k]

        Notes
        -----
        Uses 12 bytes for each weight. With l1 > 0 most rows read zero: their state is kept for further learning. The
        weights of a normalized model apply to x divided by its scale: see `scales`.
        """
        keys = [np.empty(0, np.uint64)]
        weights = [np.empty(0, np.float32)]
        for some_keys, rows in self.table.items():
            w = rows[:, 0]
            kept = w != 0
            if self._has_bias:
                kept &= some_keys != np.uint64(BIAS_KEY)
            keys.append(some_keys[kept])
            weights.append(w[kept])
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
        """Read the linear weights of largest absolute value, without the bias.

        Parameters
        ----------
        n : int
            Greatest number of weights.
        names : mapping of int to str, optional
            Names of features by their keys, such as `shoal.FeatureNames`.

        Returns
        -------
        keys : uint64[k], or list of str
            With ``names`` the name of each key; the number of a key without a name.
        weights : float32[k]
            The largest absolute value first; of equal ones the smaller key first.

        Raises
        ------
        ValueError
            ``n`` is negative.

        Notes
        -----
        Reads every row; holds ``n`` rows and a block of 65536 at a time.
        """
        if n < 0:
            raise ValueError(f"n is {n}: pass 0 or more")
        keys, weights = np.empty(0, np.uint64), np.empty(0, np.float32)
        for some_keys, rows in self.table.items():
            w = rows[:, 0]
            kept = w != 0
            if self._has_bias:
                kept &= some_keys != np.uint64(BIAS_KEY)
            keys, weights = np.concatenate([keys, some_keys[kept]]), np.concatenate([weights, w[kept]])
            order = np.lexsort((keys, -np.abs(weights)))[:n]
            keys, weights = keys[order], weights[order]
        if names is None:
            return keys, weights
        return [names.get(key, str(key)) for key in keys.tolist()], weights
