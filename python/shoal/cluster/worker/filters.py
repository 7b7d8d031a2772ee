"""Filters that reduce the bytes of pulls and pushes, after Li et al. (OSDI 2014): what users choose.

csrc/client/filter.h encodes.

Threads: a description is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal import _core
from shoal.base.scalars import make_plain

Dtype = _core.WireDtype

_DTYPES = {"float32": Dtype.FLOAT32, "float16": Dtype.FLOAT16, "bfloat16": Dtype.BFLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Compression of the messages of a table; none by default.

    Parameters
    ----------
    key_caching : bool
        Exact. A list of keys that the server still has is sent as a digest of 16 bytes, for example in the push after a
        pull of the same batch, and for the same batch in a later pass.
    zeros : bool
        Exact. Gradients and weights that are zero are sent as one bit each, if that takes fewer bytes.
    gradients : str
        Type in which gradients are sent: ``"float32"``, exact; ``"bfloat16"`` or ``"float16"``, unbiased, by stochastic
        rounding to one of the two nearest numbers.
    weights : str
        Type in which the weights of pulls are sent, likewise.
    threshold : float
        Unbiased. A row whose largest absolute gradient m is below it is sent with probability m / threshold, scaled
        by threshold / m, and as zeros otherwise; with `zeros`, those take a bit each. 0: all rows are sent.
    seed : int
        Seed of the random numbers, 0 to 2**64 - 1.

    Raises
    ------
    ValueError
        An invalid dtype, threshold or seed.

    Examples
    --------
    >>> Filters(key_caching=True, zeros=True).exact
    True
    >>> Filters(gradients="bfloat16").exact
    False
    """

    key_caching: bool = False
    zeros: bool = False
    gradients: str = "float32"
    weights: str = "float32"
    threshold: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("gradients", "weights"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name} are sent as {', '.join(_DTYPES)}, got {getattr(self, name)!r}")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold must be a finite number >= 0, got {self.threshold!r}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be 0 to 2**64 - 1, got {self.seed!r}")

    @property
    def exact(self) -> bool:
        """Whether results are bit-identical to those without filters."""
        return self.gradients == self.weights == "float32" and self.threshold == 0

    def exact_part(self) -> Filters:
        """Return those that are exact: the filters of a table of integers."""
        return replace(self, gradients="float32", weights="float32", threshold=0.0)


def choose(filters: Filters | Mapping[str, Filters] | None, table: str) -> Filters | None:
    """Return the filters of one table, by its name if tables have different ones; None if it has none."""
    found = filters.get(table) if isinstance(filters, Mapping) else filters
    if found is not None and not isinstance(found, Filters):
        raise TypeError(f"filters are a shoal.Filters, or one for each table's name, got {found!r}")
    return found


def parse_filters(text: str, seed: int = 0) -> Filters:
    """Read key_caching,zeros,gradients=bfloat16,threshold=0.1; ValueError if it is something else."""
    given: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if bool(equals) != (name in ("gradients", "weights", "threshold")) or name not in _NAMES:
            raise ValueError(
                f"{word!r} is not a filter: pass key_caching, zeros, gradients=bfloat16, weights=bfloat16 or "
                "threshold=0.1"
            )
        if name in given:
            raise ValueError(f"{text!r} names {name} twice: name it once")
        given[name] = value or True
    if "threshold" in given:
        try:
            given["threshold"] = float(given["threshold"])
        except ValueError:
            raise ValueError(f"threshold={given['threshold']} is not a number") from None
    return Filters(seed=seed, **given)


_NAMES = ("key_caching", "zeros", "gradients", "weights", "threshold")


def make_filter(filters: Filters, rank: int, incarnation: int, job: int) -> _core.Filter:
    """Make what encodes the arrays of one table's calls, for one worker."""
    return _core.Filter(
        key_caching=filters.key_caching,
        zeros=filters.zeros,
        gradients=_DTYPES[filters.gradients],
        weights=_DTYPES[filters.weights],
        threshold=filters.threshold,
        seed=filters.seed ^ (rank << 32 | incarnation),
        job=job,
    )
