"""Which files, and which part of each, a split of a reader reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.data.files import File
from shoal.data.fingerprint import check_sizes
from shoal.data.folder import Following
from shoal.data.settings import BEGINNING, FileSplit, Settings


def file_splits(files: Sequence[File], settings: Settings, begun: list[int]) -> Iterable[FileSplit | None]:
    """Find what a split reads from where its settings begin on; None: there is nothing yet.

    ``begun`` has the digests of the files of a folder that were begun, and gets those that are.
    """
    folder = files[0]
    if isinstance(folder, Following):
        return folder.splits(settings, begun)
    sizes = [file.size() for file in files]
    check_sizes(settings, files, sizes)
    whole = len(files) >= settings.num_splits  # each file belongs to one split
    order = settings.order or range(len(files))
    mine = [i for i in order if not whole or i % settings.num_splits == settings.rank]
    rank, num_splits = (0, 1) if whole else (settings.rank, settings.num_splits)
    total = sum(sizes[i] or 0 for i in mine)
    before = 0.0
    splits = []
    for i in mine:
        share = (sizes[i] or 0) / total if total else 0.0
        splits.append(FileSplit(i, files[i], rank, num_splits, before, share, sizes[i]))
        before += share
    is_resumed = settings.begin != BEGINNING and settings.begin.file in mine
    return splits[mine.index(settings.begin.file) if is_resumed else 0 :]
