"""Which tests are long: `make long` runs them, `make fast` and `make slow` the others.

A long test repeats what a shorter one checks, with other settings, seeds, sizes or formats, or checks the checks. Tests
of random examples, those of Hypothesis and others that are marked ``rounds``, are run by both: by `make long`, which
sets SHOAL_ROUNDS to 1, with all of their examples, else with a quarter of them.

Of a test with several parameters, ``combined`` leaves as many combinations as it takes to have every value of each, and
``combined(2)`` every two values of different parameters: the others are long.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest


def rounds(count: int) -> int:
    """Return how many of `count` random examples this run has: one of four, if SHOAL_ROUNDS says nothing else."""
    return max(1, round(count * float(os.environ.get("SHOAL_ROUNDS", "0.25"))))


def long_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of which those after the first `count` are long; a tuple is of several arguments."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=[] if place < count else pytest.mark.long) for place, one in enumerate(sets)]


def everywhere(few: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters for a place and a value: here with all values; on S3, which is slow, the others are long."""
    named = list(values)
    return [*(("local", value) for value in named), *long_after(few, (("s3", value) for value in named))]


def long_but(names: Collection[str], values: Mapping[str, Any] | Iterable[str]) -> list[Any]:
    """Return parameters of which those without these names are long; of a mapping, its values."""
    named = dict(values) if isinstance(values, Mapping) else {name: name for name in values}
    assert named.keys() >= set(names), f"there is no {sorted(set(names) - named.keys())}"
    return [
        pytest.param(value, id=name, marks=[] if name in names else pytest.mark.long) for name, value in named.items()
    ]


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark the combinations long that tests marked ``combined`` leave to others."""
    tests: dict[tuple[pytest.Item, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("combined"):
            tests[item.parent, item.originalname].append(item)
    for some in tests.values():
        (size,) = some[0].get_closest_marker("combined").args or (1,)
        has = {one: set(combinations(enumerate(one.callspec._idlist), size)) for one in some}
        wanted = set().union(*(has[one] for one in some if one.get_closest_marker("long") is None))
        while wanted:
            most = max(some, key=lambda one: (one.get_closest_marker("long") is None, len(has[one] & wanted)))
            wanted -= has.pop(most)
            some.remove(most)
        for one in some:
            one.add_marker(pytest.mark.long)
