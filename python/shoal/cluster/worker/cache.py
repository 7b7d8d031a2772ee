"""What a worker keeps of a table: a frozen description.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal import _core
from shoal.base.scalars import make_plain
from shoal.consistency import Consistency
from shoal.optim import Optimizer

_MAX_ROWS = 2**31
_MAX_STALENESS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Rows of a table that a worker keeps for some clocks, while it adds up the gradients that it pushes to them.

    ``docs/cache.md`` says what a pull then sees, and how to choose the numbers.

    Parameters
    ----------
    rows : int
        Number of rows that there is room for, 1 to 2^31; `bytes` says what they take.
    staleness : int
        Clocks for which a gradient may be held back, 0 to 2^31 - 1; under ASP also those for which a row is kept. Under
        SSP at most the staleness of the job; half of it saves the most.
    local_steps : bool
        Whether the worker makes the optimizer's steps in the rows that it keeps, and sends what they have changed: it
        sees its own pushes at once, and models learn nearly as without a cache. Rows then travel with the optimizer's
        state. For SGD, Adagrad, RowWiseAdagrad, FTRL and GroupFTRL without a schedule; tables with other optimizers,
        and all with False, send sums of gradients, each of which is one step.

    Raises
    ------
    TypeError
        ``local_steps`` is not a bool.
    ValueError
        A number is out of its range.

    Examples
    --------
    >>> from shoal.optim import FTRL
    >>> cache = Cache(rows=1_000_000, staleness=8)
    >>> cache.bytes(1, FTRL())
    40000000
    """

    rows: int
    staleness: int
    local_steps: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        for name, least, most in (("rows", 1, _MAX_ROWS), ("staleness", 0, _MAX_STALENESS)):
            number = getattr(self, name)
            if not least <= number <= most:
                raise ValueError(f"a cache needs {name} from {least} to {most}, got {number!r}")

    def bytes(self, dim: int, optimizer: Optimizer) -> int:
        """Return the bytes that the rows of a table with ``dim`` weights and this optimizer take.

        They are 24 for each row and 8 for each of its numbers: its weights, with local steps also the optimizer's
        state. A table that counts occurrences takes 8 more for each row.
        """
        numbers = self._step_floats(optimizer, dim) if self.local_steps else 0
        return self.rows * (24 + 8 * (numbers or dim))

    def makes_steps(self, optimizer: Optimizer, dim: int) -> bool:
        """Return whether the worker makes this optimizer's steps in rows of ``dim`` weights."""
        return self.local_steps and self._step_floats(optimizer, dim) > 0

    @staticmethod
    def _step_floats(optimizer: Optimizer, dim: int) -> int:
        return _core.local_step_floats(optimizer.rule, optimizer.engine_params(), dim)

    def check(self, consistency: Consistency) -> None:
        """Check that gradients are not held back for longer than the consistency of the job allows.

        Raises
        ------
        ValueError
            They are.
        """
        if consistency.mode == "ssp" and not consistency.is_bulk and self.staleness > consistency.waits:
            raise ValueError(
                f"a cache with staleness={self.staleness} holds gradients back for longer than "
                f"SSP(staleness={consistency.waits}) allows: choose at most {consistency.waits} for the cache; half of "
                "it saves the most"
            )


def choose_cache(cache: Cache | Mapping[str, Cache] | None, table: str) -> Cache | None:
    """Return the cache of one table, by its name if tables have different ones; None if it has none."""
    found = cache.get(table) if isinstance(cache, Mapping) else cache
    if found is not None and not isinstance(found, Cache):
        raise TypeError(f"cache is a shoal.Cache, or one for each table's name, got {found!r}")
    return found


def parse_cache(text: str) -> Cache:
    """Read ROWS:STALENESS, such as 1000000:8, or ROWS:STALENESS:sums, without local steps; ValueError otherwise."""
    numbers = text.split(":")
    local_steps = numbers[2:] != ["sums"]
    if not local_steps:
        numbers.pop()
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{text!r} is not ROWS:STALENESS, such as 1000000:8, or ROWS:STALENESS:sums")
    return Cache(rows=int(numbers[0]), staleness=int(numbers[1]), local_steps=local_steps)
