"""Hashes, slots and places on Python's integers, and keys chosen to meet."""

from __future__ import annotations

import numpy as np

MASK = 2**64 - 1
LAST_KEY = MASK


def mix(key: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood, OOPSLA'14; Stafford's variant 13)."""
    x = (key + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(value: int) -> int:
    """Undo ``mix``: its factors' inverses modulo 2^64, its shifts unrolled until nothing is left."""
    x = unshifted(value, 31)
    x = unshifted(x * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
    x = unshifted(x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30)
    return (x - 0x9E3779B97F4A7C15) & MASK


def unshifted(y: int, by: int) -> int:
    """Return the x with x ^ (x >> by) == y."""
    x = y
    while (x ^ (x >> by)) != y:
        x = y ^ (x >> by)
    return x


def keys_of(hashes) -> np.ndarray:
    """Return the keys whose hashes these are."""
    return np.array([unmix(int(h)) for h in hashes], np.uint64)


def neighbours(count: int, first: int = 0x1234567890ABCDEF) -> np.ndarray:
    """Return keys of consecutive hashes: one slot, one place, whatever the number of slots."""
    return keys_of(first + i for i in range(count))


def one_slot(count: int, bits: int = 12) -> np.ndarray:
    """Return keys spread over the places of a single slot (of 2^bits, and of any smaller number)."""
    step = (2 ** (64 - bits)) // count
    return keys_of(i * step for i in range(count))


def one_per_slot(slots: int) -> np.ndarray:
    """Return the first hash of every slot, as keys."""
    return keys_of(i * (2**64 // slots) for i in range(slots))
