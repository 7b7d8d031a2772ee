"""The life of a row: where its feature was seen, which batches moved it, and its weights at each kept checkpoint.

    data, file by file --> sightings                       where the feature stands, how often, with which labels
    batches of the fit --> parts between two checkpoints in which it occurs --made again--> steps of its row

Only parts in which the feature occurs are made again.

Threads: the caller's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.data import Batch, Reader
from shoal.data.batch import rows_with
from shoal.data.files import files_of
from shoal.data.source import Lines
from shoal.lineage.again import Moment, Watcher
from shoal.lineage.past import Past, Place
from shoal.storage.base import StoragePath

Weights = dict[str, tuple[float, ...]]  # by table; without those that have no row of the key


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """An example that has a feature.

    Attributes
    ----------
    file : str
    example : int
        Its number among those of the file, from 1.
    line : int or None
        The line of the file, of a table the row, from 1; None: not each other line is an example.
    label : float
    """

    file: str
    example: int
    line: int | None
    label: float


class FileCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many examples of a file have a feature, and how many of them are positive."""

    file: str
    examples: int
    positives: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that moved a row.

    Attributes
    ----------
    epoch : int
        The pass, from 1.
    begin, end : int
        Examples that the model had learned from before the batch, and with it.
    examples, positives : int
        Those of the batch that have the feature.
    before, after : dict
        The weights of the row, by table.
    size : float
        Norm of the change of all its weights.
    """

    epoch: int
    begin: int
    end: int
    examples: int
    positives: int
    before: Weights
    after: Weights
    size: float


class RowLife(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the row of a feature.

    Attributes
    ----------
    feature : str
    key : int
    first, last : Sighting
        In the order of the data.
    files : list of FileCount
        Files in which it occurs.
    steps : list of Step
        The largest ones, the largest first.
    weights : list of (int, dict)
        Examples that the model had learned from, and the weights of the row then: at the first kept checkpoint, at each
        one with other weights than before, and at the end.
    """

    feature: str
    key: int
    first: Sighting
    last: Sighting
    files: list[FileCount]
    steps: list[Step]
    weights: list[tuple[int, Weights]]


def explain(model: StoragePath, features: Sequence[str], *, steps: int = 5) -> list[RowLife]:
    """Find out where the rows of features come from: the parts of the fit in which they occur are made again.

    Parameters
    ----------
    model : path
        A model whose fit kept its checkpoints.
    features : sequence of str
        As ``shoal inspect --key`` takes them: ``"ad=a3"``, the number of a key.
    steps : int
        How many of the largest steps are kept.

    Returns
    -------
    list of RowLife
        One for each feature.

    Raises
    ------
    ValueError
        The model has no kept checkpoints, its data has changed, or no example has a feature.

    Notes
    -----
    Blocks for at most the time of the fit and a pass over its data. The model's directory is only read.
    """
    past = Past(model)
    keys = past.keys(features)
    seen = _sightings(past, list(keys.values()))
    for name, key in keys.items():
        if not seen[key]:
            raise ValueError(f"no example of {past.data.path} has {name!r} (key {key}): is it written as in the data?")
    found = _Steps(past, {key: past.key_in_tables(name) for name, key in keys.items()}, steps)
    found.run()
    return [
        RowLife(
            feature=name,
            key=key,
            first=seen[key][0][1],
            last=seen[key][-1][2],
            files=[one[0] for one in seen[key]],
            steps=[one for _, _, one in sorted(found.steps[key], reverse=True)],
            weights=found.weights[key],
        )
        for name, key in keys.items()
    ]


# ---- the data --------------------------------------------------------------------------------------------------------

_Found = dict[int, list[tuple[FileCount, Sighting, Sighting]]]  # by key; its files, the first and the last in each


class _InFile:
    """A feature in one file."""

    def __init__(self) -> None:
        self.examples = self.positives = 0
        self.ends: list[tuple[int, float]] = []  # the first and the last example: number, label

    def add(self, before: int, rows: npt.NDArray[np.int64], labels: npt.NDArray[np.float32]) -> None:
        """Count examples of a batch; ``before``: examples of the file before it."""
        self.examples += len(rows)
        self.positives += int((labels == 1).sum())
        first, last = ((before + int(rows[i]) + 1, float(labels[i])) for i in (0, -1))
        self.ends = [self.ends[0] if self.ends else first, last]


def _sightings(past: Past, keys: Sequence[int]) -> _Found:
    """Find the examples that have any of the keys, file by file."""
    found: _Found = {key: [] for key in keys}
    for number, path in enumerate(past.data.paths):
        reader, before = past.file(number), 0
        there = {key: _InFile() for key in keys}
        for batch in reader:
            for key in keys:
                if len(rows := rows_with(batch, np.array([key], np.uint64))):
                    there[key].add(before, rows, batch.labels[rows])
            before += len(batch)
        known = {key: its for key, its in there.items() if its.examples}
        above = _lines_above(reader, before) if known else None
        for key, its in known.items():
            first, last = (
                Sighting(file=path, example=one, line=None if above is None else one + above, label=label)
                for one, label in its.ends
            )
            found[key].append((FileCount(file=path, examples=its.examples, positives=its.positives), first, last))
    return found


def _lines_above(reader: Reader, examples: int) -> int | None:
    """Return how many lines stand above the first example of a file; None where not each other one is an example."""
    if reader.skipped or reader._settings.leaves_out:
        return None
    if reader.format == "parquet":
        return 0
    header = int(reader.format == "csv" and "columns" not in reader.schema)
    lines = sum(_newlines(block.text) for block in Lines(files_of(reader.paths[0])[0]))
    return header if lines == examples + header else None


def _newlines(text: memoryview) -> int:
    return int((np.frombuffer(text, np.uint8) == ord("\n")).sum())


# ---- the fit ---------------------------------------------------------------------------------------------------------


class _Clock(NamedTuple):
    """A clock in which some keys occur: of each how many examples have it, and how many of them are positive."""

    place: Place
    found: dict[int, tuple[int, int]]


class _Steps(Watcher):
    """The steps of some rows, over all parts of a fit that are made again."""

    def __init__(self, past: Past, keys: Mapping[int, int], most: int) -> None:
        self._past = past
        self._keys = keys  # of the data, and each one's in the tables
        self._most = most
        self._clocks: dict[Moment, _Clock] = {}  # that have any of them, by the moment after each
        self._marks: dict[Moment, int] = {}  # examples of the checkpoints, and of the end
        self._rows: dict[int, Weights] = {}  # at the last moment that was looked at
        self._begin = 0  # examples before the part that is made again
        self.steps: dict[int, list[tuple[float, int, Step]]] = {key: [] for key in keys}
        self.weights: dict[int, list[tuple[int, Weights]]] = {key: [] for key in keys}

    def run(self) -> None:
        """Make the parts again in which any of the keys occurs: from checkpoint to checkpoint, as long as they do."""
        past, touched = self._past, set[int]()
        ends = {*past.kept, past.described.examples}
        moments: dict[int, Moment] = {}
        for place, batches in past.clocks():
            after = place.epoch, place.clock + 1
            if place.end in ends:
                moments[place.end] = after
            if found := {key: its for key in self._keys if (its := _examples_with(batches, key))[0]}:
                touched.add(past.checkpoint_before(place.begin))
                self._clocks[after] = _Clock(place, found)
        self._marks = {moment: examples for examples, moment in moments.items()}
        parts: list[list[int]] = []
        for begin, end in pairwise(sorted(ends)):
            if begin not in touched:
                continue
            if parts and parts[-1][1] == begin:
                parts[-1][1] = end
            else:
                parts.append([begin, end])
        for self._begin, end in parts:
            with past.made_again(past.kept[self._begin], until=moments[end], watchers=[self]):
                pass

    def watch(self, model: Any) -> None:
        """Take the model that is about to learn."""
        super().watch(model)
        self._rows = {key: self._row(key) for key in self._keys}
        self._note_weights(self._begin)

    def reached(self, moment: Moment) -> None:
        """Note how a clock has moved the rows, and what they are before the next one."""
        clock, next_one = self._clocks.get(moment), (moment[0], moment[1] + 1)
        if clock is None and next_one not in self._clocks and moment not in self._marks:
            return
        before, self._rows = self._rows, {key: self._row(key) for key in self._keys}
        if clock is not None:
            for key, counts in clock.found.items():
                self._note_step(clock.place, key, counts, before[key])
        if moment in self._marks:
            self._note_weights(self._marks[moment])

    def _note_weights(self, examples: int) -> None:
        for key, noted in self.weights.items():
            if not noted or noted[-1][1] != self._rows[key]:
                noted.append((examples, self._rows[key]))

    def _note_step(self, place: Place, key: int, counts: tuple[int, int], before: Weights) -> None:
        after = self._rows[key]
        step = Step(
            epoch=place.epoch + 1,
            begin=place.begin,
            end=place.end,
            examples=counts[0],
            positives=counts[1],
            before=before,
            after=after,
            size=_distance(before, after),
        )
        heapq.heappush(self.steps[key], (step.size, -step.begin, step))
        if len(self.steps[key]) > self._most:
            heapq.heappop(self.steps[key])

    def _row(self, key: int) -> Weights:
        one = np.array([self._keys[key]], np.uint64)
        tables = {table.name: table for table in self.model.tables}
        return {name: tuple(table.pull(one)[0].tolist()) for name, table in tables.items() if table.contains(one)[0]}


def _examples_with(batches: Sequence[Batch], key: int) -> tuple[int, int]:
    """Count the examples that have a key, and the positive ones among them."""
    labels = [batch.labels[rows_with(batch, np.array([key], np.uint64))] for batch in batches]
    return sum(map(len, labels)), sum(int((one == 1).sum()) for one in labels)


def _distance(before: Weights, after: Weights) -> float:
    """Return the norm of a change; a row that is not there is zero."""
    names = {*before, *after}
    return math.sqrt(
        sum(
            (new - old) ** 2
            for name in names
            for old, new in zip_longest(before.get(name, ()), after.get(name, ()), fillvalue=0.0)
        )
    )
