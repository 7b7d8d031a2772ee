"""Keys of text: a 64-bit hash of (field, token), the same one that the readers use for categorical fields."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import _reader

_TOO_LARGE = "a value is too large for float32"  # one of FAULTS

# The text whose key, in each field, stands for an empty cell, and for an empty item of a list.
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


def hash_cells(texts: Sequence[str], field: int) -> NDArray[np.uint64]:
    """Turn cells with these texts into keys: `hash_strings` of what ``docs/readers.md`` calls the text of a cell."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    keys = np.empty(len(encoded), np.uint64)
    _reader.hash_cells(np.frombuffer(b"".join(encoded), np.uint8), ends, field, keys)
    return keys


def texts_of_numbers(numbers: Sequence[float]) -> list[str]:
    """Return the texts of cells that hold these numbers."""
    ends = np.empty(len(numbers) + 1, np.int64)
    texts = _reader.number_texts(np.array(numbers, np.float64), ends)
    return [texts[begin:end].decode() for begin, end in itertools.pairwise(ends.tolist())]


def number_of_text(text: str) -> float:
    """Return the number in a text, as csv has numbers in a numeric column."""
    data, number = np.frombuffer(text.encode(), np.uint8), np.empty(1, np.float32)
    bad, fault = _reader.read_numbers(data, np.array([0, len(data)]), np.ones(1, np.bool_), number)
    if bad >= 0:
        raise ValueError(number_fault(fault))
    return float(number[0])


def number_fault(fault: int) -> str:
    """Say what is wrong with the text of a number, by the fault of `shoal._reader.read_numbers`."""
    return "is not finite as float32" if _reader.FAULTS[fault] == _TOO_LARGE else "is not a number"
