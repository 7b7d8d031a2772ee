"""Exports: the weights of a store in files that are never changed, for processes that only read them.

``store.export(directory)`` writes one, :func:`open_export` maps it. An export has no optimizer state, no rows that read
as if they were not there, and rounds weights if asked to; it is read without a store, in place, so all processes of a
machine share one copy of it. A delta holds what has changed since another export. ``docs/export-format.md`` has the
bytes.

    manifest.py   what an export holds, as its manifest tells it
    write.py      write: exports and deltas, slot by slot
    read.py       open_export, Export: lookups, and the swap to a newer version
    cache.py      Cache: copies on this machine of exports that are elsewhere
    compact.py    compact: a chain of exports as one
"""

from shoal.export.read import Export, ExportTable, ExportVersion, open_export
from shoal.export.write import Exported, ExportedTable

__all__ = ["Export", "ExportTable", "ExportVersion", "Exported", "ExportedTable", "open_export"]
