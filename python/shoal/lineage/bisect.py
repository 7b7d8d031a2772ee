"""The batch whose training broke a test: first between two kept checkpoints, then within a part of the fit.

    kept        good    |-------|-------|xxxxxxx|xxxxxxx|   bad
    made again                      [--|xxx]                from the last good state, to the batch in the middle

Threads: the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.base.machine import temporary_root
from shoal.lineage.past import OfWorker, Past, Place
from shoal.models import files
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir

Test = Callable[[str], bool]  # whether the model in a directory is good


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Examples of a file, numbered from 1; first and last are 0 where the fit took the data in another order.

    So they are where several workers shared a compressed file, or one of Parquet, which lies divided among them.
    """

    file: str
    first: int = 0
    last: int = 0


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """The batch with which a model became bad; of several workers, the batches of one clock.

    Attributes
    ----------
    epoch : int
        The pass, from 1.
    begin, end : int
        Examples that the model had learned from before the batch, and with it.
    spans : list of Span
        What the batch was made from; of data that was shuffled, the files of all batches that it was shuffled with.
    probes : int
        Models that were tested.
    """

    epoch: int
    begin: int
    end: int
    spans: list[Span]
    probes: int


def bisect(
    good: StoragePath, bad: StoragePath, test: Test, *, say: Callable[[str], None] = lambda line: None
) -> Culprit:
    """Find the batch with which a model became bad.

    Parameters
    ----------
    good : path
        A kept checkpoint of the fit, such as ``model/kept-000000080000``, that passes the test.
    bad : path
        The model, or a later kept checkpoint of it, that does not.
    test : function
        Called with the path of a model: whether it is good. A model that is good is taken to have been good before, and
        a bad one to stay bad.
    say : function, optional
        Called with a line of text after each step.

    Returns
    -------
    Culprit

    Raises
    ------
    ValueError
        Both are not of one fit that kept its checkpoints, or ``good`` is bad, or ``bad`` good; its data has changed.

    Notes
    -----
    Tests about as many models as the binary logarithm of the number of batches. Each is made from the last good state.
    """
    past = Past(_owner(bad))
    from_, to = files.read(good), files.read(bad)
    if not any(one.is_same(open_dir(good)) for one in past.kept.values()) or from_.examples >= to.examples:
        known = ", ".join(str(one) for one in past.kept.values())
        raise ValueError(f"{good} is no earlier checkpoint of {past.directory}: pass one of {known}")
    return _Search(past, test, say).run(from_.examples, to.examples, open_dir(bad))


def _owner(where: StoragePath) -> StorageDir:
    """Return the model that a kept checkpoint belongs to, or the model itself."""
    place = open_dir(where)
    above = place.child("..")
    return above if any(one.is_same(place) for one in files.kept(above).values()) else place


class _Search:
    """A search for the first bad batch."""

    def __init__(self, past: Past, test: Test, say: Callable[[str], None]) -> None:
        self._past = past
        self._test = test
        self._say = say
        self._probes = 0

    def run(self, begin: int, end: int, bad: StorageDir) -> Culprit:
        """Search between a good and a bad number of examples."""
        past = self._past
        if not self._is_good(past.kept[begin], begin):
            raise ValueError(f"{past.kept[begin]} fails the test already: pass an earlier checkpoint as good")
        if self._is_good(bad, end):
            raise ValueError(f"{bad} passes the test: nothing has broken it")
        marks = [kept for kept in past.kept if begin < kept < end]
        while marks:
            middle = marks[len(marks) // 2]
            if self._is_good(past.kept[middle], middle):
                begin, marks = middle, [kept for kept in marks if kept > middle]
            else:
                end, marks = middle, [kept for kept in marks if kept < middle]
        clocks = [one for one, _ in past.clocks() if begin <= one.begin and one.end <= end]
        batches = sum(len(one.batches) for one in clocks)
        self._say(f"broken between {begin:,} and {end:,} examples: {batches:,} batches of {_files(past, clocks)}")
        with tempfile.TemporaryDirectory(prefix="shoal-bisect-", dir=temporary_root()) as folder:
            clocks = self._narrowed(clocks, past.kept[begin], Path(folder))
        return self._found(clocks[0])

    def _narrowed(self, clocks: list[Place], good: StorageDir, folder: Path) -> list[Place]:
        while len(clocks) > 1:
            number = len(clocks) // 2
            middle = clocks[number]
            place = open_dir(folder / f"at-{middle.begin:012}")
            with self._past.made_again(good, until=(middle.epoch, middle.clock), to=place):
                pass
            if self._is_good(place, middle.begin):
                good, clocks = place, clocks[number:]
            else:
                place.clear()
                clocks = clocks[:number]
        return clocks

    def _is_good(self, place: StorageDir, examples: int) -> bool:
        self._probes += 1
        is_good = self._test(str(place))
        self._say(f"after {examples:,} examples: {'good' if is_good else 'bad'}")
        return is_good

    def _found(self, culprit: Place) -> Culprit:
        plan = self._past.fit.plan
        is_in_order = not plan.shuffles and plan.negative_rate == 1.0
        return Culprit(
            epoch=culprit.epoch + 1,
            begin=culprit.begin,
            end=culprit.end,
            spans=[span for one in culprit.batches for span in _spans(self._past, one)]
            if is_in_order
            else [Span(file=name) for name in _names(self._past, [culprit])],
            probes=self._probes,
        )


def _files(past: Past, clocks: list[Place]) -> str:
    names = _names(past, clocks)
    return names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"


def _names(past: Past, clocks: list[Place]) -> list[str]:
    """Return the files that the batches of clocks were made from."""
    return [past.data.paths[number] for number in sorted({file for one in clocks for file in one.files})]


def _spans(past: Past, batch: OfWorker) -> list[Span]:
    """Return which examples of which files a batch of data in order has."""
    before, found = 0, []
    for number in past.files_of(batch.rank):
        if before >= batch.end:
            break
        above, examples = past.examples_of(number, batch.rank)
        first, last = max(batch.begin - before, 0), min(batch.end - before, examples)
        before += examples
        if first < last:
            place = {} if above is None else {"first": above + first + 1, "last": above + last}
            found.append(Span(file=past.data.paths[number], **place))
    return found
