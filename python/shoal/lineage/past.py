"""Past: the fit of a saved model, whose data, batches and kept checkpoints are there to make parts of it again.

Threads: the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, cast

from msgspec import structs

from shoal.data import Batch, Reader, key_of_name
from shoal.data.places import places_of
from shoal.data.readers import READERS
from shoal.metrics import StreamMetrics
from shoal.models import files, fitting
from shoal.models.fit_checkpoints import Checkpointing
from shoal.models.learner import FitObserver, FitState, Learner
from shoal.models.plan import FitInput
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.tools.load import load

Progress = Callable[[str], None]  # told what happens, line by line


class Place(NamedTuple):
    """The place of a batch in a fit: its pass, from 0, examples learned from before it and with it, its files."""

    epoch: int
    begin: int
    end: int
    in_pass: int  # examples of the pass before it
    files: range  # numbers of those that it was made from


class Past:
    """The last fit of a saved model, which kept its checkpoints."""

    def __init__(self, model: StoragePath) -> None:
        self.directory = open_dir(model)
        self.described = files.read(self.directory)
        if not self.described.history.fits:
            raise ValueError(f"{self.directory} has no fit: it was not trained by fit or shoal train")
        self.fit = self.described.history.fits[-1]
        self.kept: Mapping[int, StorageDir] = files.kept(self.directory)
        if not self.kept:
            raise ValueError(
                f"{self.directory} has no kept checkpoints to begin from: train with --keep-checkpoints, or pass a "
                "Checkpointing that keeps them"
            )
        first = files.read(self.kept[min(self.kept)])
        if first.fit_state is None or first.fit_state.is_within or len(first.history.passes) >= self.fit.first_pass:
            raise ValueError(
                f"the first kept checkpoint of {self.directory} is of {first.examples:,} examples: the one before the "
                "first batch of the fit is not there any more"
            )
        if self.fit.source is None:
            raise ValueError(f"{self.directory} was trained on data that no reader read: it cannot be read again")
        rank, workers = self.fit.source["shard"]
        if workers > 1:
            raise ValueError(
                f"{self.directory} was trained by {workers} workers, of which this was number {rank}: only fits of one "
                "worker are made again"
            )

    @cached_property
    def data(self) -> Reader:
        """The data of the fit, which is as it was then."""
        assert self.fit.source is not None
        return reader_of(self.fit.source, f"the data of {self.directory}")

    def file(self, number: int) -> Reader:
        """Return a reader of one of its files."""
        assert self.fit.source is not None
        source = self.fit.source
        return reader_of({**source, "files": [source["files"][number]]}, f"the data of {self.directory}")

    def keys(self, features: Sequence[str]) -> dict[str, int]:
        """Return the keys that features have in the batches of the data."""
        if isinstance(features, str) or not features or not all(isinstance(one, str) for one in features):
            raise ValueError(f"features are {features!r}: pass a list of names such as 'user=u17'")
        return {name: self.key_in_data(name) for name in features}

    def key_in_data(self, feature: str) -> int:
        """Return the key that a feature has in the batches of the data."""
        return key_of_name(self.described.format or "", feature, self.described.schema)

    def key_in_tables(self, feature: str) -> int:
        """Return the key that its row has."""
        if not self.described.click:
            return self.key_in_data(feature)
        from shoal.torch import Features

        return int(Features.from_json(self.described.click["features"]).key_of(feature))

    def batches(self, data: Reader | None = None) -> Generator[tuple[Place, Batch]]:
        """Return the batches of the fit, or of one of other data, in the order in which it learned from them."""
        data = self.data if data is None else data
        plan, learned = self.fit.plan, min(self.kept)
        done = [one for one in self.described.history.passes if one.number >= self.fit.first_pass]
        last = self.described.examples if self.described.fit_state is not None else None
        for epoch in range(len(done) if last is None else plan.epochs):
            source, begin = plan.source(data, epoch), learned
            assert isinstance(source, Reader)
            for batch, block in plan.batches(source, epoch, learned):
                if last is not None and learned >= last:
                    return
                files_of_it = range(block.cursor.file, max(block.cursor.file, source.cursor.file) + 1)
                yield Place(epoch, learned, learned + len(batch), learned - begin, files_of_it), batch
                learned += len(batch)

    def checkpoint_before(self, examples: int) -> int:
        """Return the examples of the last kept checkpoint that has learned from at most so many."""
        return max(kept for kept in self.kept if kept <= examples)

    @contextmanager
    def made_again(
        self,
        start: StorageDir,
        *,
        until: int | None = None,
        data: Reader | None = None,
        observers: Sequence[Watcher] = (),
        to: StoragePath | None = None,
        keep: bool = False,
    ) -> Iterator[Any]:
        """Continue the fit from a checkpoint, until its end or until it has learned from so many examples.

        Parameters
        ----------
        start : StorageDir
            The checkpoint.
        until : int, optional
            Examples, of the beginning of a batch.
        data : Reader, optional
            Other data than that of the fit, which begins with the same examples as far as the checkpoint has read.
        observers : sequence of Watcher
            Of what is made again.
        to : path, optional
            Where the model is written; default: a temporary directory, which ends with the block.
        keep : bool
            Whether checkpoints are kept there.

        Yields
        ------
        Model or ClickModel
            As it is then; it is saved in ``to``, with the state of its fit if that is not over.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-again-") as temporary:
            place = open_dir(temporary if to is None else to)
            files.copy(start, place)
            described = files.read(place)
            reader = self.data if data is None else data
            *earlier, last = described.history.fits
            fits = (*earlier, structs.replace(last, source=reader.fingerprint()))
            files.rewrite(place, structs.replace(described, history=structs.replace(described.history, fits=fits)))
            with files.copied_from(start, place), files.store_for(place) as store, load(place, store=store) as model:
                if described.fit_state is None or (until is not None and described.examples >= until):
                    yield model
                    return
                stop = _Stop(model, place, until)
                watching = [*observers, *([] if until is None else [stop])]
                for one in observers:
                    one.watch(model)
                given = FitInput(model.reading(reader), self._valid(model), self.fit.plan)
                how = Checkpointing(place, resume=True, overwrite=True, keep=keep)
                with suppress(_Reached):
                    fitting.fit([cast(Learner, model)], given, progress=False, checkpoint=how, observers=watching)
                yield model

    def _valid(self, model: Any) -> Any:
        source = self.fit.valid_source
        return None if source is None else model.reading(reader_of(source, "the validation data"))


class Watcher(FitObserver):
    """An observer of a part of a fit, which is told of its model before."""

    def watch(self, model: Any) -> None:
        """Take the model that is about to learn."""
        self.model = model


class _Reached(Exception):
    """The part of the fit that was asked for is done."""


class _Stop(FitObserver):
    """Ends a fit once it has learned from so many examples, with a checkpoint."""

    def __init__(self, model: Any, place: StorageDir, until: int | None) -> None:
        self._model, self._place, self._until = model, place, until

    def batch_done(self, seen: Sequence[StreamMetrics], fit_state: Callable[[], FitState]) -> None:
        if self._until is not None and self._model.examples >= self._until:
            self._model.save(self._place, overwrite=True, fit_state=fit_state())
            raise _Reached


def reader_of(source: Mapping[str, Any], what: str) -> Reader:
    """Make the reader that a fingerprint describes; raise ValueError if its data is no longer the same."""
    names = [file["name"] for file in source["files"]]
    how = {} if source["format"] == "parquet" else {"on_error": "skip"}  # where none was skipped, none is now
    if source["format"] not in READERS or source["format"] == "arrow":
        raise ValueError(f"{what} was a table in memory, or of format {source['format']!r}: it cannot be read again")
    if streams := [file["name"] for file in source["files"] if "size" not in file]:
        raise ValueError(f"{what} was a stream, {streams[0]}: it cannot be read again")
    reader = READERS[source["format"]](names, batch_size=source["batch_size"], **source["schema"], **how)
    lines = {name: spans for name, spans in source.get("without_lines", {}).items() if name in names}
    reader = reader.without(source.get("without", ()), examples=places_of(lines))
    if (changed := reader.changes({**source, "without_lines": lines or None})) is not None:
        raise ValueError(f"{what} has changed since, so no fit can be made again: {changed}")
    return reader
