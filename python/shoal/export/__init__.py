"""Exports: read-only files with the weights of a store, for processes that only look up rows.

``store.export(directory)`` writes one, :func:`open` maps it into memory. An export has no optimizer state and no
rows equal to their initial value, and may round weights. It is read without a store, in place, so all processes of a
machine share one copy. A delta holds the changes since another export. ``docs/export-format.md`` describes the bytes.

- ``manifest.py``: the contents of an export, as its manifest lists them.
- ``write.py``: exports and deltas, slot by slot.
- ``layers.py``: the mapped files of an export and of the exports it is based on.
- ``read.py``: lookups, and the swap to a newer version.
- ``cache.py``: local copies of remote exports.
- ``compaction.py``: a chain of exports as one.
"""

from shoal.export.compaction import compact
from shoal.export.read import Export, ExportTable, ExportVersion, open
from shoal.export.write import Exported, ExportedTable

__all__ = ["Export", "ExportTable", "ExportVersion", "Exported", "ExportedTable", "compact", "open"]
