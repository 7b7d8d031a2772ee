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

from shoal.lineage.past import Past, Place
from shoal.models import files
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir

Test = Callable[[str], bool]  # whether the model in a directory is good


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Examples of a file, numbered from 1; first and last are 0 where the fit took the data in another order."""

    file: str
    first: int = 0
    last: int = 0


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """The batch with which a model became bad.

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
        batches = [one for one, _ in past.batches() if begin <= one.begin and one.end <= end]
        self._say(f"broken between {begin:,} and {end:,} examples: {len(batches):,} batches of {_files(past, batches)}")
        with tempfile.TemporaryDirectory(prefix="shoal-bisect-") as folder:
            batches = self._narrowed(batches, past.kept[begin], Path(folder))
        return self._found(batches[0])

    def _narrowed(self, batches: list[Place], good: StorageDir, folder: Path) -> list[Place]:
        while len(batches) > 1:
            middle = batches[len(batches) // 2].begin
            place = open_dir(folder / f"at-{middle:012}")
            with self._past.made_again(good, until=middle, to=place):
                pass
            if self._is_good(place, middle):
                good, batches = place, [one for one in batches if one.begin >= middle]
            else:
                place.clear()
                batches = [one for one in batches if one.begin < middle]
        return batches

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
            spans=_spans(self._past, culprit)
            if is_in_order
            else [Span(file=name) for name in _names(self._past, [culprit])],
            probes=self._probes,
        )


def _files(past: Past, batches: list[Place]) -> str:
    names = _names(past, batches)
    return names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} to {names[-1]}"


def _names(past: Past, batches: list[Place]) -> list[str]:
    """Return the files that batches were made from."""
    paths = past.data.paths
    return [paths[number] for number in sorted({file for one in batches for file in one.files})]


def _spans(past: Past, culprit: Place) -> list[Span]:
    """Return which examples of which files a batch of data in order has."""
    begin, before = culprit.in_pass, 0
    end = begin + culprit.end - culprit.begin
    found = []
    for number in range(culprit.files.stop):
        after = before + sum(map(len, past.file(number)))
        if max(begin, before) < min(end, after):
            first, last = max(begin, before) - before + 1, min(end, after) - before
            found.append(Span(file=past.data.paths[number], first=first, last=last))
        before = after
    return found
