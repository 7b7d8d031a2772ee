"""The search for settings, the same for every program: coordinate ascent on a grid, one step at a time.

    axes {"alpha": [0.1, 0.3, 1], "l2": [0, 1, 3]}, start {"alpha": 0.3, "l2": 0}
    --> measures (0.3, 0), (0.1, 0), (1, 0): takes the best of them; then along l2; then along alpha again; ...

It ends when no step along any axis improves the gain by more than LEAST: usually after one or two dozen measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Settings = dict[str, Any]

LEAST = 1e-4  # of AUC or log-loss; less is noise


def climb(
    axes: Mapping[str, Sequence[Any]], start: Settings, gain: Callable[[Settings], float]
) -> tuple[Settings, float, int]:
    """Return the best settings that were found, their gain, and how many were measured.

    Parameters
    ----------
    axes : mapping of str to sequence
        Values by setting, in an order in which neighbours are alike.
    start : dict
        A value of every axis.
    gain : callable
        Measures settings; more is better. Called once for each.
    """
    measured: dict[tuple[int, ...], float] = {}
    names = list(axes)
    values = [list(axes[name]) for name in names]

    def at(place: tuple[int, ...]) -> float:
        if place not in measured:
            measured[place] = gain({name: of[i] for name, of, i in zip(names, values, place, strict=True)})
        return measured[place]

    best = tuple(of.index(start[name]) for name, of in zip(names, values, strict=True))
    at(best)
    idle = 0  # axes in a row along which no step was better
    axis = 0
    while idle < len(names):
        before = best
        for step in (-1, 1):
            while 0 <= best[axis] + step < len(values[axis]):
                next_to_it = (*best[:axis], best[axis] + step, *best[axis + 1 :])
                if not at(next_to_it) > at(best) + LEAST:
                    break
                best = next_to_it
        idle = 1 if best != before else idle + 1
        axis = (axis + 1) % len(names)
    return {name: of[i] for name, of, i in zip(names, values, best, strict=True)}, measured[best], len(measured)
