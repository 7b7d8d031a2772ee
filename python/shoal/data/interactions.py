"""Interactions: the pairs of fields whose features are combined; `shoal._core.interact` computes the keys.

``docs/readers.md`` defines the keys.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal import _core
from shoal.data.hashing import hash_strings
from shoal.data.names import FeatureNames

Field = str | int
Interactions = Sequence[Field] | Sequence[tuple[Field, Field]]
Pairs = tuple[tuple[int, int], ...]


def field_of(name: str) -> int:
    """Return the number of a named field: of a column, or of a namespace."""
    return int(hash_strings([name])[0])


def named_pairs(interactions: Interactions) -> list[tuple[Field, Field]]:
    """Convert the user's interactions to pairs of fields."""
    if isinstance(interactions, str):
        raise TypeError(f"interactions is {interactions!r}: pass a list of pairs of fields, or of fields")
    items = [_plain(item) for item in interactions]
    fields = [item for item in items if isinstance(item, str | int)]
    if len(fields) == len(items):
        pairs = list(itertools.combinations(fields, 2))
        if len(fields) == 1:
            raise ValueError(f"interactions is {fields!r}: one field makes no pair, pass two or more")
    else:
        pairs = [_pair(item) for item in items]
    seen = set()
    for pair in pairs:
        if frozenset(pair) in seen:
            raise ValueError(f"interactions holds {pair!r} twice: pass each pair once")
        seen.add(frozenset(pair))
    return pairs


def _plain(item: object) -> object:
    """Return numbers, of NumPy too, as int; those in a pair as well."""
    if isinstance(item, numbers.Integral):
        return int(item)
    return tuple(map(_plain, item)) if isinstance(item, tuple | list) else item


def _pair(item: object) -> tuple[Field, Field]:
    if isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(name, str | int) for name in item):
        return item[0], item[1]
    raise TypeError(
        f"{item!r} is not an interaction: pass pairs such as ('site', 'ad'), or fields for all of their pairs"
    )


def pairs_of(interactions: Interactions, number: Callable[[Field], int]) -> Pairs:
    """Convert the user's interactions to pairs of field numbers; ``number`` returns a field's number."""
    return tuple((number(first), number(second)) for first, second in named_pairs(interactions))


def pair_numbers(pairs: Pairs) -> NDArray[np.uint64]:
    """Return the fields by twos, as `shoal._core` takes them."""
    return np.array(pairs, np.uint64).reshape(-1)


def interact(
    indptr: NDArray[np.int64],
    keys: NDArray[np.uint64],
    values: NDArray[np.float32] | None,
    fields: NDArray[np.uint64],
    pairs: NDArray[np.uint64],
    names: FeatureNames | None,
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.float32] | None]:
    """Append the combined features to the features of each row; name them if names are collected."""
    made = _core.interact(indptr, keys, values, fields, pairs)
    if names is not None:
        names.note_pairs(indptr, keys, fields, pairs, made[0], made[1])
    return made


def combined_key(first: int, second: int) -> int:
    """Return the key of the combination of two features."""
    keys, fields = np.array([first, second], np.uint64), np.array([0, 1], np.uint64)
    _, made, _ = _core.interact(np.array([0, 2], np.int64), keys, None, fields, fields)
    return int(made[-1])
