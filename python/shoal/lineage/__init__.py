"""Lineage: where the weights of a model come from, by making parts of its fit again.

A fit is a function of its data, its settings and the checkpoint that it begins with: made again from there it gives the
same bits. So a fit that keeps its checkpoints (``--keep-checkpoints``, `shoal.models.Checkpointing`) can be asked later
what it did, and pays nothing for it while it trains.

    past.py      the fit of a saved model: its data, its batches, its kept checkpoints
    again.py     a part of it made again, by as many workers (worker.py: the process of another one)
    explain.py   the life of a row: where it was seen, and which batches moved it
    bisect.py    the batch whose training broke a test
    forget.py    the model that training without some examples gives, with a certificate
    replay.py    a fit of several workers under SSP or ASP, in the order of a record (order.py, turns.py)

The data of the fit has to be where it was, unchanged, and but for a replay the fit one in one process, or under BSP.
"""

from shoal.lineage.bisect import Culprit, Span, bisect
from shoal.lineage.explain import FileCount, RowLife, Sighting, Step, explain
from shoal.lineage.forget import Certificate, forget
from shoal.lineage.replay import Replayed, replay

__all__ = [
    "Certificate",
    "Culprit",
    "FileCount",
    "Replayed",
    "RowLife",
    "Sighting",
    "Span",
    "Step",
    "bisect",
    "explain",
    "forget",
    "replay",
]
