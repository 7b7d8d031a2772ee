"""Statistics of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["TableStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Statistics of a table at one moment; counters start when the table is made or loaded.

    Parameters
    ----------
    rows : int
    bytes : int
        Memory of index and rows, in bytes.
    bytes_per_row : float
        NaN for an empty table.
    load : float
        Rows divided by the cells of the index.
    pulls, pushes : int
        Requests.
    keys_pulled, keys_pushed : int
        Unique keys in them.
    rows_created, rows_erased : int
    nonfinite_rows : int
        Rows that a push left unchanged because its gradient, or the new row, was not finite.
    refused : int
        Occurrences of keys that were not admitted.
    waiting : int
        Keys that wait for admission, if the rule counts them individually.
    expired : dict of int
        Rows dropped by each of the table's expiry rules, by class name; for `MaxRows`, pushes included.
    """

    rows: int
    bytes: int
    bytes_per_row: float
    load: float
    pulls: int
    pushes: int
    keys_pulled: int
    keys_pushed: int
    rows_created: int
    rows_erased: int
    nonfinite_rows: int
    refused: int = 0
    waiting: int = 0
    expired: Mapping[str, int] = field(default_factory=dict)
