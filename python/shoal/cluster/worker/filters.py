"""Filters that reduce the bytes of pulls and pushes, after Li et al. (OSDI 2014).

Idea. A filter encodes the arrays of a call into frames. Some filters are exact: the servers receive the same bits. The
others are unbiased: the expected value of what arrives is what was passed. Their errors are counted, and do not depend
on how a call was cut or how often it was sent.

    gradients  --threshold--> small rows: zeros, or larger --gradients--> 16 bits --zeros--> packed
    hashes     --key_caching--> 16 bytes, if the server has the list
    weights    by the server: --weights--> 16 bits --zeros--> packed

The random numbers of a push are a function of (seed, worker, sequence of the call, hash): a part that is cut again
after a change of the map has the same values.

Threads: a description is frozen; a :class:`Filter` belongs to its owner of requests, and is used under the same lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import _core
from shoal.base.scalars import make_plain

Dtype = _core.WireDtype

_DTYPES = {"float32": Dtype.FLOAT32, "float16": Dtype.FLOAT16, "bfloat16": Dtype.BFLOAT16}
_MIN_KEYS = 16  # below this a digest saves too little


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


@dataclass(slots=True)
class EncodedPayload:
    """The frames of a part, and the fields of its header that depend on them."""

    frames: list[Any]
    dtype: int
    packed: bool = False
    keep: bool = False
    digest: bytes = b""  # of the list; sent in its place unless `keep`


class Filter:
    """The state of one table's filters, for one worker."""

    def __init__(self, filters: Filters, rank: int, incarnation: int, job: int) -> None:
        self.filters = filters
        # pushes, pulls (messages); key_bytes_saved, gradient_bytes_saved, weight_bytes_saved; lists_sent, lists_named
        # (by digest), lists_lost (the server had none: sent after all); rows_dropped, rows_raised by `threshold`.
        self.counts: Counter[str] = Counter()
        # Sum of (sent - passed)^2 over all gradients.
        self.gradient_error = 0.0
        # Largest error of a gradient by rounding to 16 bits.
        self.largest_error = 0.0
        self._seed = filters.seed ^ (rank << 32 | incarnation)
        self._job = job

    def metrics(self) -> dict[str, float]:
        """Return all counts, by name."""
        return {**self.counts, "gradient_error": self.gradient_error, "largest_error": self.largest_error}

    def pull(self, hashes: npt.NDArray[np.uint64], known: Mapping[bytes, None]) -> EncodedPayload:
        """Return the frames of a pull; ``known`` has the digests of the key lists that its server has."""
        sent = EncodedPayload([hashes], _DTYPES[self.filters.weights], packed=self.filters.zeros)
        self._name(sent, hashes, known)
        self.counts["pulls"] += 1
        return sent

    def prefetch(self, hashes: npt.NDArray[np.uint64], known: Mapping[bytes, None]) -> EncodedPayload:
        """Return the frames of a prefetch, after which a pull can name its key list."""
        sent = EncodedPayload([hashes], Dtype.NONE)
        self._name(sent, hashes, known)
        return sent

    def push(
        self,
        hashes: npt.NDArray[np.uint64],
        grads: npt.NDArray[np.float32],
        sequence: int,
        known: Mapping[bytes, None],
        *,
        whole: bool = False,
    ) -> EncodedPayload:
        """Return the frames of a push; ``grads`` is float32[n, dim].

        ``whole``: they are changes of whole rows, to which no threshold applies.
        """
        filters, counts = self.filters, self.counts
        sent = EncodedPayload([], Dtype.FLOAT32)
        values: npt.NDArray[Any] = grads
        if filters.threshold and not whole:
            values, dropped, raised, squared = _core.filter_significant(
                values, hashes, filters.threshold, self._seed, sequence
            )
            counts["rows_dropped"] += dropped
            counts["rows_raised"] += raised
            self.gradient_error += squared
        if filters.gradients != "float32":
            sent.dtype = _DTYPES[filters.gradients]
            values, squared, largest = _core.narrow(values, hashes, sent.dtype, self._seed, sequence)
            self.gradient_error += squared
            self.largest_error = max(self.largest_error, largest)
        packed = _core.pack(values) if filters.zeros else None
        frames = [values] if packed is None else list(packed)
        sent.packed = packed is not None
        sent.frames = [hashes, *frames]
        counts["pushes"] += 1
        counts["gradient_bytes_saved"] += grads.nbytes - sum(frame.nbytes for frame in frames)
        self._name(sent, hashes, known)
        return sent

    def _name(self, sent: EncodedPayload, hashes: npt.NDArray[np.uint64], known: Mapping[bytes, None]) -> None:
        if not self.filters.key_caching or len(hashes) < _MIN_KEYS:
            return
        sent.digest = _core.digest(hashes, self._job)
        sent.keep = sent.digest not in known
        if sent.keep:
            self.counts["lists_sent"] += 1
        else:
            self.counts["lists_named"] += 1
            self.counts["key_bytes_saved"] += hashes.nbytes - len(sent.digest)
            sent.frames[0] = sent.digest

    def lost(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Count a list that was sent as a digest first, and then completely."""
        self.counts["lists_lost"] += 1
        self.counts["key_bytes_saved"] -= hashes.nbytes

    def pulled(self, plain: int, came: int) -> None:
        """Count an answer to a pull, of ``came`` bytes instead of ``plain``."""
        self.counts["weight_bytes_saved"] += plain - came
