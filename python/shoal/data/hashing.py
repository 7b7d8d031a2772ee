"""Keys of text: a 64-bit hash of (field, token), the same one that the readers use for categorical fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import _reader

# The text whose key, in each field, stands for an empty cell. No cell of a text file can have this text.
MISSING_TEXT = "\0missing"


def hash_strings(tokens: Sequence[str] | Sequence[bytes] | NDArray[Any], field: int = 0) -> NDArray[np.uint64]:
    """Turn text into keys.

    Parameters
    ----------
    tokens : sequence or array of str or bytes, length n
        A str is encoded as UTF-8; equal bytes have equal keys.
    field : int, default 0
        0 to 2^64 - 1. The same token in another field is another key.

    Returns
    -------
    uint64[n]

    Raises
    ------
    TypeError
        A token is neither str nor bytes, or ``tokens`` is a single one.
    OverflowError
        ``field`` does not fit 64 bits.

    Notes
    -----
    The function never changes (``docs/readers.md`` has its definition): keys may be stored. Two tokens of one field and
    of the same length of up to eight bytes never share a key; others share one with probability 2^-64. Safe from any
    thread.

    Examples
    --------
    >>> hash_strings(["68fd1e64", "05db9164"], field=14)
    array([  506082733431835310, 16457309957467409924], dtype=uint64)
    """
    if isinstance(tokens, str | bytes):
        raise TypeError(f"tokens is a single {type(tokens).__name__}: pass a list of them")
    flat: list[Any] = list(tokens)
    keys = np.empty(len(flat), np.uint64)
    _reader.hash_tokens(flat, field, keys)
    return keys
