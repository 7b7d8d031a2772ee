"""Tables that are larger than memory: where their other rows are."""

import os
from pathlib import Path

import msgspec
from msgspec import structs

from shoal import _core
from shoal.base.machine import local_path
from shoal.base.sizes import memory_bytes
from shoal.errors import StorageError

_LEFT = "shoal-tier-*"  # files that had a name for a moment, where the file system knows no files without one


class Tiered(msgspec.Struct, frozen=True):
    """Storage of rows that are more than memory holds: on a local disk.

    Of a table of a local store (``store.table(..., storage=...)``), or of all tables of each server of a cluster
    (``shoal.launch(tier=...)``, ``shoal server --tier``).

    Rows that are used often, and those that have changed, are in memory. Results are those of a table in memory, bit
    for bit. ``docs/tiered.md`` says how to size it, and when it does not pay.

    Parameters
    ----------
    path : path
        A directory on a local SSD or NVMe disk, created if missing. The rows are in a file without a name, which the
        system removes with the process: it is no checkpoint. Tables may share the directory.
    memory : int or str
        Bytes of memory that the table, or the tables of a server together, may use, as a number or as in ``"8GiB"``:
        rows, and about 2 bytes for each row on disk. At least 4096 for each slot.

    Raises
    ------
    ValueError, TypeError
        ``memory`` is not a size, or ``path`` no path, or a URL.

    Examples
    --------
    >>> import tempfile
    >>> import shoal
    >>> with tempfile.TemporaryDirectory() as directory, shoal.local(slots=16) as store:
    ...     table = store.table("user", dim=4, storage=shoal.Tiered(directory, memory="64KiB"))
    ...     for first in range(0, 10_000, 500):
    ...         keys = np.arange(first, first + 500, dtype=np.uint64)
    ...         table.push(keys, np.ones((500, 4), np.float32)).result()
    ...     stats = table.stats()
    ...     print(stats.rows, stats.bytes < 100_000)
    10000 True
    """

    path: str | os.PathLike[str]
    memory: int | str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"path must be that of a directory, got {self.path!r}")
        structs.force_setattr(self, "path", str(local_path(self.path)))
        _ = self.memory_bytes  # raises if it is invalid

    @property
    def memory_bytes(self) -> int:
        """The memory as a number."""
        return memory_bytes(self.memory)

    def native(self) -> tuple[str, int]:
        """Make the directory if it is missing; return it and the memory as the engine takes them."""
        directory = Path(self.path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"the tier of a table cannot be in {directory}: {error}") from error
        return str(directory), self.memory_bytes


def parse_tier(text: str) -> Tiered:
    """Parse DIR:SIZE, such as ``/mnt/nvme:8GiB``."""
    path, colon, memory = text.rpartition(":")
    if not (colon and path):
        raise ValueError(f"{text!r} is not DIR:SIZE, such as /mnt/nvme:8GiB")
    return Tiered(path, memory=memory)


def open_space(space: _core.TierSpace, tier: Tiered, name: str) -> None:
    """Open the directory of a server's tiers below the path of the tier, without what an earlier one left there."""
    directory = Path(tier.path) / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(_LEFT):
            left.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"the tier of this server cannot be in {directory}: {error}") from error
    space.open(str(directory))
