"""Past: the fit of a saved model, whose data, batches and kept checkpoints are there to make parts of it again.

Threads: the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from msgspec import structs

from shoal.base.fit_rows import SUFFIX
from shoal.base.machine import temporary_root
from shoal.base.plural import counted
from shoal.consistency import parse_consistency
from shoal.data import Batch, Reader, key_of_name
from shoal.lineage.again import Moment, Part, Watcher, made, reader_of
from shoal.models import files
from shoal.storage.base import StorageDir, StoragePath
from shoal.storage.open import open_dir
from shoal.tools.load import load


class OfWorker(NamedTuple):
    """The batch of a worker in a clock: its rank, its examples in the worker's pass, the files that it is made from."""

    rank: int
    begin: int
    end: int
    files: tuple[int, ...]  # their numbers


class Place(NamedTuple):
    """The place of a clock in a fit: its pass, from 0, its number there, examples learned from before and with it."""

    epoch: int
    clock: int
    begin: int
    end: int
    batches: tuple[OfWorker, ...]

    @property
    def files(self) -> set[int]:
        """Numbers of those that it was made from."""
        return {file for one in self.batches for file in one.files}


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
        self.workers: int = self.fit.source["shard"][1]
        self._check_repeatable()

    def _check_repeatable(self) -> None:
        """Raise ValueError if the fit is no function of its data, its settings and its checkpoints."""
        fit, workers = self.fit, counted(self.workers, "worker")
        if fit.consistency and not parse_consistency(fit.consistency).is_bulk:
            raise ValueError(
                f"{self.directory} was trained by {workers} under {fit.consistency}, where weights depend on when "
                "pushes arrive: only fits under bsp are made again, and those with a record (--record) replayed"
            )
        if fit.irregular:
            raise ValueError(f"{self.directory} was trained by {workers}, and cannot be made again: {fit.irregular}")
        if self.workers > 1 and not fit.consistency:
            raise ValueError(
                f"{self.directory} was trained by {workers}, and an earlier version of shoal, which did not record "
                "their consistency: only fits under bsp are made again"
            )

    @cached_property
    def data(self) -> Reader:
        """The whole data of the fit, which is as it was then."""
        assert self.fit.source is not None
        return reader_of(self.fit.source, f"the data of {self.directory}")

    def file(self, number: int) -> Reader:
        """Return a reader of one of its files."""
        assert self.fit.source is not None
        source = self.fit.source
        return reader_of({**source, "files": [source["files"][number]]}, f"the data of {self.directory}")

    def files_of(self, rank: int) -> list[int]:
        """Return the numbers of the files that a worker read, in the order of the data."""
        files = range(len(self.data.paths))
        return [number for number in files if len(files) < self.workers or number % self.workers == rank]

    def examples_of(self, number: int, rank: int) -> tuple[int | None, int]:
        """Count the examples of a worker in a file, and those above them; None: they do not lie together."""
        whole = self.file(number)
        if len(self.data.paths) >= self.workers:
            return 0, sum(map(len, whole))
        examples = [sum(map(len, whole.split(other, self.workers))) for other in range(rank + 1)]
        return sum(examples[:-1]) if whole._can_begin_anywhere(whole._files[0]) else None, examples[-1]

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

    def clocks(self, data: Reader | None = None) -> Generator[tuple[Place, list[Batch]]]:
        """Return the clocks of the fit, or of one of other data, in their order: in each a batch of each worker."""
        data = self.data if data is None else data
        readers = [data] if self.workers == 1 else [data.split(rank, self.workers) for rank in range(self.workers)]
        learned = min(self.kept)
        done = [one for one in self.described.history.passes if one.number >= self.fit.first_pass]
        last = self.described.examples if self.described.fit_state is not None else None
        for epoch in range(len(done) if last is None else self.fit.plan.epochs):
            in_pass = [0] * self.workers
            with ExitStack() as stack:
                passes = [stack.enter_context(closing(self._batches(one, epoch, learned))) for one in readers]
                for clock, taken in enumerate(zip_longest(*passes)):
                    if last is not None and learned >= last:
                        return
                    begin, places, batches = learned, [], []
                    for rank, one in enumerate(taken):
                        if one is None:  # it has ended its pass
                            continue
                        batch, of = one
                        first, in_pass[rank] = in_pass[rank], in_pass[rank] + len(batch)
                        places.append(OfWorker(rank, first, in_pass[rank], of))
                        batches.append(batch)
                        learned += len(batch)
                    yield Place(epoch, clock, begin, learned, tuple(places)), batches

    def _batches(self, reader: Reader, epoch: int, known: int) -> Generator[tuple[Batch, tuple[int, ...]]]:
        """Return the batches of a worker in a pass, and the files that each is made from."""
        plan = self.fit.plan
        source = plan.source(reader, epoch)
        assert isinstance(source, Reader)
        position = source.position()
        own = self.files_of(position["shard"][0])
        own = sorted(own, key=position.get("order", own).index)
        with closing(plan.batches(source, epoch, known, workers=self.workers)) as batches:
            for batch, block in batches:
                first = own.index(block.cursor.file) if block.number else 0
                last = own.index(source.cursor.file) if source.cursor.file in own else first
                yield batch, tuple(own[first : max(first, last) + 1])

    def moment_of(self, checkpoint: StorageDir) -> Moment:
        """Return the moment of a checkpoint of the fit."""
        described = files.read(checkpoint)
        epoch = sum(one.number >= self.fit.first_pass for one in described.history.passes)
        state = described.fit_state
        if state is None or not state.is_within:
            return epoch, 0
        if not state.clocks:
            raise ValueError(f"{checkpoint} is of an earlier version of shoal, which did not count clocks: train again")
        return epoch, state.clocks

    def checkpoint_before(self, examples: int) -> int:
        """Return the examples of the last kept checkpoint that has learned from at most so many."""
        return max(kept for kept in self.kept if kept <= examples)

    @contextmanager
    def made_again(
        self,
        start: StorageDir,
        *,
        until: Moment | None = None,
        data: Reader | None = None,
        watchers: Sequence[Watcher] = (),
        to: StoragePath | None = None,
        keep: bool = False,
    ) -> Iterator[Any]:
        """Continue the fit from a checkpoint, until its end or until a moment of it.

        Parameters
        ----------
        start : StorageDir
            The checkpoint.
        until : Moment, optional
        data : Reader, optional
            Other data than that of the fit, which begins with the same examples as far as the checkpoint has read.
        watchers : sequence of Watcher
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
        with tempfile.TemporaryDirectory(prefix="shoal-again-", dir=temporary_root()) as temporary:
            place = open_dir(temporary if to is None else to)
            files.copy(start, place)
            described = files.read(place)
            begin = self.moment_of(place)
            reader = self.data if data is None else data
            *earlier, last = described.history.fits
            source = {**reader.fingerprint(), "shard": [0, self.workers]}
            fits = (*earlier, structs.replace(last, source=source))
            files.rewrite(place, structs.replace(described, history=structs.replace(described.history, fits=fits)))
            with files.copied_from(start, place):
                if described.fit_state is None or (until is not None and begin >= until):
                    with files.store_for(place) as store, load(place, store=store) as model:
                        yield model
                    return
                part = Part(
                    place=str(place.location),
                    begin=begin,
                    end=until,
                    saves=to is not None,
                    keep=keep,
                    consistency=self.fit.consistency or "bsp",
                    workers=self.workers,
                    job=job_of(described),
                )
                with made(part, watchers) as model:
                    yield model


def job_of(described: files.ModelFile) -> str:
    """Return the name of the job that has a fit, which the table of its progress has in its name; empty: none."""
    assert described.fit_state is not None
    return described.fit_state.table.removesuffix(SUFFIX)[len(described.table) + 1 :]
